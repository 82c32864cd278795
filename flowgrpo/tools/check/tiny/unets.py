"""Variance-preserving image pipelines: U-Nets, transformers that predict noise or v, and consistency models; and
pipelines of both kinds with a live ControlNet or IP-Adapter. Control images have 16 x 16 pixels.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo.tools.check.tiny.images import FLUX_CALL, SD3_CALL, flux, sd3
from flowgrpo.tools.check.tiny.parts import (
    Network,
    Pipeline,
    Scheduler,
    autoencoder,
    image,
    lively,
    silent,
    text_encoder,
    tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WIDTH = 16  # of every text encoder
SD_NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1,
            "timestep_spacing": "leading"}
UNCHECKED = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
# The pipeline's code fixes the prompt length of these text encoders.
HUNYUAN_LENGTHS = (77, 256)
SMALL = {"height": 16, "width": 16, "use_resolution_binning": False, "clean_caption": False, "max_sequence_length": 16}
TOKENS = 4  # of an image in an IP-Adapter; diffusers fixes their number


def pndm() -> Scheduler:
    """Return the stock scheduler of SD 1.5."""
    from diffusers import PNDMScheduler

    return PNDMScheduler(skip_prk_steps=True, set_alpha_to_one=False, **SD_NOISE)


def lcm() -> Scheduler:
    """Return the stock scheduler of latent consistency models."""
    from diffusers import LCMScheduler

    return LCMScheduler(clip_sample=False, **{key: SD_NOISE[key] for key in SD_NOISE if key.startswith("beta")})


def sd15(scheduler: Scheduler | None = None, seed: int = 0, kind: type | None = None, **options: Any) -> Pipeline:
    """Return a StableDiffusionPipeline that predicts noise: a U-Net of one block, no safety checker.

    kind: another class of these parts. options: its further arguments.
    """
    from diffusers import StableDiffusionPipeline
    from transformers import CLIPTextModel

    torch.manual_seed(seed)
    tokens = tokenizer()
    parts = {"unet": unet(), "scheduler": scheduler or pndm(), "vae": autoencoder(),
             "text_encoder": text_encoder(CLIPTextModel, tokens), "tokenizer": tokens}
    return _quiet((kind or StableDiffusionPipeline)(**parts | options, **UNCHECKED))


def sdxl(seed: int = 0, kind: type | None = None, **options: Any) -> Pipeline:
    """Return a StableDiffusionXLPipeline: two text encoders; pooled embeddings and sizes in addition to the time."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(seed)
    tokens = tokenizer()
    denoiser = unet(cross_attention_dim=2 * WIDTH, **sizes(WIDTH))
    return _quiet((kind or StableDiffusionXLPipeline)(
        unet=denoiser, scheduler=EulerDiscreteScheduler(**SD_NOISE), vae=autoencoder(),
        text_encoder=text_encoder(CLIPTextModel, tokens), tokenizer=tokens,
        text_encoder_2=text_encoder(CLIPTextModelWithProjection, tokens), tokenizer_2=tokenizer(), **options))


def kolors(seed: int = 0, kind: type | None = None, **options: Any) -> Pipeline:
    """Return a KolorsPipeline: SDXL's U-Net, conditioned on a ChatGLM."""
    from diffusers import EulerDiscreteScheduler
    from diffusers.pipelines.kolors.pipeline_kolors import KolorsPipeline

    torch.manual_seed(seed)
    denoiser = unet(encoder_hid_dim=WIDTH, encoder_hid_dim_type="text_proj", **sizes(WIDTH))
    scheduler = EulerDiscreteScheduler(**SD_NOISE | {"beta_end": 0.014, "num_train_timesteps": 1100})
    encoder, tokens = _chatglm()
    return _quiet((kind or KolorsPipeline)(unet=denoiser, scheduler=scheduler, vae=autoencoder(), text_encoder=encoder,
                                           tokenizer=tokens, **options))


def lcm_sd15(seed: int = 0) -> Pipeline:
    """Return a LatentConsistencyModelPipeline: the guidance scale is embedded, the output consistent."""
    from diffusers import LatentConsistencyModelPipeline

    torch.manual_seed(seed)
    return sd15(lcm(), seed, LatentConsistencyModelPipeline, unet=unet(time_cond_proj_dim=8))


def inpaint(seed: int = 0, channels: int = 9) -> tuple[Pipeline, dict[str, Any]]:
    """Return a StableDiffusionInpaintPipeline whose U-Net reads mask and masked image as extra channels.

    With 4 channels it reads only the state, and the pipeline restores the image after every step.
    """
    from diffusers import StableDiffusionInpaintPipeline

    torch.manual_seed(seed)
    pipe = sd15(None, seed, StableDiffusionInpaintPipeline, unet=unet(in_channels=channels))
    return pipe, {"image": large_image(), "mask_image": _mask()}


def instruct_pix2pix(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """Return a StableDiffusionInstructPix2PixPipeline, which reads its image as channels and has no encode_prompt."""
    from diffusers import StableDiffusionInstructPix2PixPipeline

    torch.manual_seed(seed)
    pipe = sd15(None, seed, StableDiffusionInstructPix2PixPipeline, unet=unet(in_channels=8))
    return pipe, {"image": large_image()}


def pixart(kind: type, seed: int = 0, scheduler: Scheduler | None = None, **options: Any) -> Pipeline:
    """Return a PixArt pipeline: a transformer that predicts noise and its variance; the pipeline drops the variance."""
    from diffusers import DPMSolverMultistepScheduler, PixArtTransformer2DModel

    torch.manual_seed(seed)
    tokens = tokenizer()
    denoiser = PixArtTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, num_attention_heads=2, attention_head_dim=8, in_channels=4,
        out_channels=8, caption_channels=WIDTH, cross_attention_dim=16, use_additional_conditions=False)
    return _quiet(kind(transformer=lively(denoiser), scheduler=scheduler or DPMSolverMultistepScheduler(),
                       vae=autoencoder(), text_encoder=_t5(tokens), tokenizer=tokens, **options))


def hunyuan_dit(seed: int = 0, kind: type | None = None, **options: Any) -> Pipeline:
    """Return a HunyuanDiTPipeline: v-prediction, a BERT (here a CLIP) and a T5.

    Images are 32 x 32, in 4 x 4 latents.
    """
    from diffusers import DDPMScheduler, HunyuanDiT2DModel, HunyuanDiTPipeline
    from transformers import CLIPTextModel

    torch.manual_seed(seed)
    short, long = (tokenizer(length) for length in HUNYUAN_LENGTHS)
    denoiser = HunyuanDiT2DModel(
        sample_size=4, num_layers=2, patch_size=2, num_attention_heads=2, attention_head_dim=8, in_channels=4,
        hidden_size=16, mlp_ratio=1.0, cross_attention_dim=WIDTH, cross_attention_dim_t5=WIDTH,
        pooled_projection_dim=WIDTH, text_len=HUNYUAN_LENGTHS[0], text_len_t5=HUNYUAN_LENGTHS[1])
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.02, beta_schedule="scaled_linear", clip_sample=False,
                              prediction_type="v_prediction", steps_offset=1)
    return _quiet((kind or HunyuanDiTPipeline)(
        transformer=lively(denoiser), scheduler=scheduler, vae=autoencoder(stages=4),
        text_encoder=text_encoder(CLIPTextModel, short), tokenizer=short, text_encoder_2=_t5(long), tokenizer_2=long,
        **options, **UNCHECKED))


def cogview3(seed: int = 0) -> Pipeline:
    """Return a CogView3PlusPipeline: v-prediction from a terminal signal of zero."""
    from diffusers import CogVideoXDDIMScheduler, CogView3PlusPipeline, CogView3PlusTransformer2DModel

    torch.manual_seed(seed)
    tokens = tokenizer()
    denoiser = CogView3PlusTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, num_attention_heads=2, attention_head_dim=8, in_channels=4,
        out_channels=4, text_embed_dim=WIDTH, time_embed_dim=16, condition_dim=4, pos_embed_max_size=8)
    scheduler = CogVideoXDDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear",
                                       prediction_type="v_prediction", rescale_betas_zero_snr=True,
                                       snr_shift_scale=4.0, timestep_spacing="trailing", clip_sample=False)
    return _quiet(CogView3PlusPipeline(transformer=lively(denoiser), scheduler=scheduler, vae=autoencoder(),
                                       text_encoder=_t5(tokens), tokenizer=tokens))


def img2img(seed: int = 0) -> Pipeline:
    """Return a StableDiffusionImg2ImgPipeline, which takes no latents."""
    from diffusers import StableDiffusionImg2ImgPipeline

    return sd15(None, seed, StableDiffusionImg2ImgPipeline)


def omnigen(seed: int = 0) -> Pipeline:
    """Return an OmniGenPipeline without encode_prompt: its one transformer reads the prompt's tokens at every step."""
    from diffusers import FlowMatchEulerDiscreteScheduler, OmniGenPipeline, OmniGenTransformer2DModel

    torch.manual_seed(seed)
    rope = {"type": "su", "long_factor": [1.0] * 4, "short_factor": [1.0] * 4}
    denoiser = OmniGenTransformer2DModel(
        hidden_size=16, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16, num_layers=1, in_channels=4,
        time_step_dim=4, rope_scaling=rope, vocab_size=1024, pad_token_id=0, pos_embed_max_size=8)
    return _quiet(OmniGenPipeline(transformer=lively(denoiser), vae=autoencoder(), tokenizer=tokenizer(),
                                  scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True)))


def unet(**options: Any) -> Network:
    """Return a tiny U-Net of one block with random weights; options: of its class, over the defaults."""
    from diffusers import UNet2DConditionModel

    small = dict(sample_size=8, block_out_channels=(8,), layers_per_block=1, norm_num_groups=4, attention_head_dim=2,
                 down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",),
                 cross_attention_dim=WIDTH)
    return lively(UNet2DConditionModel(**small | options))


def sizes(pooled: int) -> dict[str, Any]:
    """Arguments of a U-Net that reads pooled embeddings and six size numbers."""
    return {"addition_embed_type": "text_time", "addition_time_embed_dim": 4,
            "projection_class_embeddings_input_dim": pooled + 6 * 4}


def _t5(tokens: PreTrainedTokenizerBase) -> PreTrainedModel:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=len(tokens), d_model=WIDTH, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
                                   dropout_rate=0.0))


def _chatglm() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel
    from diffusers.pipelines.kolors.tokenizer import ChatGLMTokenizer
    from sentencepiece import SentencePieceTrainer

    written = io.BytesIO()
    SentencePieceTrainer.train(sentence_iterator=iter(["abcdefghijklmnopqrstuvwxyz 0123456789"]), model_writer=written,
                               model_type="char", vocab_size=60, hard_vocab_limit=False, pad_id=3, minloglevel=2)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.model").write_bytes(written.getvalue())
        tokens = ChatGLMTokenizer(str(Path(folder, "tokenizer.model")))
    encoder = ChatGLMModel(ChatGLMConfig(
        num_layers=2, padded_vocab_size=len(tokens), hidden_size=WIDTH, ffn_hidden_size=16, kv_channels=8,
        num_attention_heads=2, seq_length=16, add_qkv_bias=True, original_rope=True))
    with torch.no_grad():
        for parameter in encoder.parameters():  # its initialisation leaves norms as uninitialised memory
            parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(std=0.3)
    return encoder, tokens


def _quiet(pipe: Pipeline) -> Pipeline:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def large_image(channels: int = 3) -> torch.Tensor:
    """One image [1,channels,16,16] in [0, 1]: a ramp."""
    return torch.linspace(0, 1, 16).expand(1, channels, 16, 16).clone()


def _mask() -> torch.Tensor:
    return (large_image(1) > 0.5).float()


def _alpha(seed: int) -> tuple[Pipeline, dict[str, Any]]:
    from diffusers import PixArtAlphaPipeline

    return pixart(PixArtAlphaPipeline, seed), SMALL


def _sigma(seed: int) -> tuple[Pipeline, dict[str, Any]]:
    from diffusers import PixArtSigmaPipeline

    return pixart(PixArtSigmaPipeline, seed), SMALL


def _pag(seed: int) -> tuple[Pipeline, dict[str, Any]]:
    from diffusers import StableDiffusionPAGPipeline

    return sd15(None, seed, StableDiffusionPAGPipeline), {"pag_scale": 2.0}


def _pag_xl(seed: int) -> tuple[Pipeline, dict[str, Any]]:
    from diffusers import StableDiffusionXLPAGPipeline

    return sdxl(seed, StableDiffusionXLPAGPipeline, add_watermarker=False), {"pag_scale": 2.0}


HUNYUAN_CALL = {"height": 32, "width": 32, "use_resolution_binning": False}
FACTORIES = {
    "StableDiffusionPipeline": lambda seed: (sd15(None, seed), {}),
    "StableDiffusionXLPipeline": lambda seed: (sdxl(seed, add_watermarker=False), {}),
    "KolorsPipeline": lambda seed: (kolors(seed), {"max_sequence_length": 16}),
    "LatentConsistencyModelPipeline": lambda seed: (lcm_sd15(seed), {}),
    "StableDiffusionInpaintPipeline": inpaint,
    "StableDiffusionInpaintPipeline (4 channels)": lambda seed: inpaint(seed, 4),
    "StableDiffusionInstructPix2PixPipeline": instruct_pix2pix,
    "StableDiffusionPAGPipeline": _pag,
    "StableDiffusionXLPAGPipeline": _pag_xl,
    "PixArtAlphaPipeline": _alpha,
    "PixArtSigmaPipeline": _sigma,
    "HunyuanDiTPipeline": lambda seed: (hunyuan_dit(seed), HUNYUAN_CALL),
    "CogView3PlusPipeline": lambda seed: (cogview3(seed), {"max_sequence_length": 16}),
    "StableDiffusionImg2ImgPipeline": lambda seed: (img2img(seed), {"image": large_image()}),
    "OmniGenPipeline": lambda seed: (omnigen(seed), {}),
}


def unet_controlnet(width: int = WIDTH, **options: Any) -> Network:
    """Return a ControlNetModel for the tiny U-Nets. width: of the prompt's embeddings."""
    from diffusers import ControlNetModel

    control = lively(ControlNetModel(
        block_out_channels=(8,), layers_per_block=1, down_block_types=("CrossAttnDownBlock2D",),
        cross_attention_dim=width, attention_head_dim=2, norm_num_groups=4, conditioning_embedding_out_channels=(8, 8),
        **options))
    return _awake(control, control.controlnet_cond_embedding.conv_out, *control.controlnet_down_blocks,
                  control.controlnet_mid_block)


def _awake(control: Network, *zeros: Any) -> Network:
    """Fill the layers that start at zero, so that the control image has an effect."""
    with torch.no_grad():
        for layer in zeros:
            layer.weight.normal_(std=0.3)
    return control


def controlnet(seed: int = 0) -> Pipeline:
    """Return a StableDiffusionControlNetPipeline."""
    from diffusers import StableDiffusionControlNetPipeline

    torch.manual_seed(seed)
    return sd15(None, seed, StableDiffusionControlNetPipeline, controlnet=unet_controlnet())


def xl_controlnet(seed: int = 0) -> Pipeline:
    """Return a StableDiffusionXLControlNetPipeline."""
    from diffusers import StableDiffusionXLControlNetPipeline

    torch.manual_seed(seed)
    return sdxl(seed, StableDiffusionXLControlNetPipeline, controlnet=unet_controlnet(2 * WIDTH, **sizes(WIDTH)),
                add_watermarker=False)


def sd3_controlnet(seed: int = 0) -> Pipeline:
    """Return a StableDiffusion3ControlNetPipeline, whose autoencoder encodes the control image."""
    from diffusers import AutoencoderKL, SD3ControlNetModel, StableDiffusion3ControlNetPipeline

    pipe = sd3(seed)
    control = lively(SD3ControlNetModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=16, pooled_projection_dim=32,
        pos_embed_max_size=4, qk_norm="rms_norm"))
    vae: Any = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 4), layers_per_block=1, latent_channels=4, norm_num_groups=1, sample_size=16,
        scaling_factor=1.5, shift_factor=0.1)
    with torch.no_grad():  # the pipeline samples the control image's latent: next to no deviation
        for block in control.controlnet_blocks:
            block.weight.mul_(0.1)
        vae.quant_conv.weight[4:] = 0
        vae.quant_conv.bias[4:] = -30
    parts = pipe.components | {"vae": vae, "controlnet": _awake(control, control.pos_embed_input.proj)}
    return silent(StableDiffusion3ControlNetPipeline(**parts))


def flux_controlnet(seed: int = 0) -> Pipeline:
    """Return a FluxControlNetPipeline."""
    from diffusers import FluxControlNetModel, FluxControlNetPipeline

    torch.manual_seed(seed)
    control = lively(FluxControlNetModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=1,
        joint_attention_dim=16, pooled_projection_dim=16, guidance_embeds=True, axes_dims_rope=(4, 6, 6)))
    return flux(seed, FluxControlNetPipeline, controlnet=control)


def ip_adapter(seed: int = 0) -> Pipeline:
    """Return a StableDiffusionPipeline with an IP-Adapter."""
    pipe = sd15(None, seed)
    encoder, processor = image_encoder()
    pipe.register_modules(image_encoder=encoder, feature_extractor=processor)
    pipe.load_ip_adapter(ip_adapter_weights(pipe.unet), subfolder="", weight_name="")
    pipe.set_ip_adapter_scale(1.0)
    return pipe


def image_encoder() -> tuple[Any, Any]:
    """Return a CLIP image encoder of two layers of width 16, and its processor."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

    encoder = CLIPVisionModelWithProjection(CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=16, projection_dim=WIDTH, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=8))
    return encoder, CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})


def ip_adapter_weights(unet: Network) -> dict[str, dict[str, torch.Tensor]]:
    """Return random weights of an IP-Adapter for a tiny U-Net, in the published form."""
    widths = [unet.config.block_out_channels[0] for name in unet.attn_processors if "attn2" in name]
    width, drawn = unet.config.cross_attention_dim, torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=drawn) * shape[-1] ** -0.5

    adapter = {f"{2 * i + 1}.to_{name}_ip.weight": normal(size, width)
               for i, size in enumerate(widths) for name in "kv"}
    image = {"proj.weight": normal(TOKENS * width, WIDTH), "proj.bias": torch.zeros(TOKENS * width),
             "norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)}
    return {"image_proj": image, "ip_adapter": adapter}


CONDITIONED: dict[str, Callable[[int], tuple[Pipeline, dict[str, Any]]]] = {
    "StableDiffusionControlNetPipeline": lambda seed: (controlnet(seed), {"image": image()}),
    "StableDiffusionXLControlNetPipeline": lambda seed: (xl_controlnet(seed), {"image": image()}),
    "StableDiffusion3ControlNetPipeline": lambda seed: (sd3_controlnet(seed), SD3_CALL | {"control_image": image()}),
    "FluxControlNetPipeline": lambda seed: (flux_controlnet(seed), FLUX_CALL | {"control_image": image()}),
    "StableDiffusionPipeline (IP-Adapter)": lambda seed: (ip_adapter(seed), {"ip_adapter_image": image()}),
}

"""Variance-preserving image pipelines: U-Nets, transformers that predict noise or v, and consistency models; and
pipelines of both kinds with a live ControlNet or IP-Adapter. Control images have 16 x 16 pixels.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch

from flowgrpo.tools.check.tiny.images import FLUX_CALL, SD3_CALL, flux, sd3
from flowgrpo.tools.check.tiny.parts import (
    Factories,
    Made,
    Network,
    Pipeline,
    Scheduler,
    autoencoder,
    clip,
    factory,
    flux_transformer,
    image,
    image_encoder,
    lively,
    silent,
    still_autoencoder,
    t5,
    tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FACTORIES: Factories = {}
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
    return diffusers.PNDMScheduler(skip_prk_steps=True, set_alpha_to_one=False, **SD_NOISE)


def lcm() -> Scheduler:
    """Return the stock scheduler of latent consistency models."""
    betas = {key: value for key, value in SD_NOISE.items() if key.startswith("beta")}
    return diffusers.LCMScheduler(clip_sample=False, **betas)


def sd15(scheduler: Scheduler | None = None, seed: int = 0, kind: str = "StableDiffusionPipeline",
         **options: Any) -> Pipeline:
    """Return a StableDiffusionPipeline that predicts noise: a U-Net of one block, no safety checker. kind: another
    class of these parts. options: its further arguments."""
    torch.manual_seed(seed)
    tokens = tokenizer()
    parts = {"unet": unet(), "scheduler": scheduler or pndm(), "vae": autoencoder(),
             "text_encoder": clip(tokens), "tokenizer": tokens}
    return silent(getattr(diffusers, kind)(**parts | options, **UNCHECKED))


def sdxl(seed: int = 0, kind: str = "StableDiffusionXLPipeline", **options: Any) -> Pipeline:
    """Return a StableDiffusionXLPipeline: two text encoders; pooled embeddings and sizes in addition to the time."""
    torch.manual_seed(seed)
    tokens = tokenizer()
    denoiser = unet(cross_attention_dim=2 * WIDTH, **sizes(WIDTH))
    return silent(getattr(diffusers, kind)(
        unet=denoiser, scheduler=diffusers.EulerDiscreteScheduler(**SD_NOISE), vae=autoencoder(),
        text_encoder=clip(tokens), tokenizer=tokens,
        text_encoder_2=clip(tokens, projected=True), tokenizer_2=tokenizer(), **options))


@factory(FACTORIES, "KolorsPipeline")
def kolors() -> Made:
    """Return a KolorsPipeline: SDXL's U-Net, conditioned on a ChatGLM."""
    from diffusers.pipelines.kolors.pipeline_kolors import KolorsPipeline

    denoiser = unet(encoder_hid_dim=WIDTH, encoder_hid_dim_type="text_proj", **sizes(WIDTH))
    scheduler = diffusers.EulerDiscreteScheduler(**SD_NOISE | {"beta_end": 0.014, "num_train_timesteps": 1100})
    encoder, tokens = _chatglm()
    kind: Any = KolorsPipeline  # which annotates its own ChatGLM
    pipe = kind(unet=denoiser, scheduler=scheduler, vae=autoencoder(), text_encoder=encoder, tokenizer=tokens)
    return pipe, {"max_sequence_length": 16}


def lcm_sd15(seed: int = 0) -> Pipeline:
    """Return a LatentConsistencyModelPipeline: the guidance scale is embedded, the output consistent."""
    torch.manual_seed(seed)
    return sd15(lcm(), seed, "LatentConsistencyModelPipeline", unet=unet(time_cond_proj_dim=8))


def editing(seed: int, kind: str, channels: int, **call: Any) -> Made:
    """Return a pipeline of SD 1.5's parts whose U-Net reads an image as extra channels."""
    torch.manual_seed(seed)
    return sd15(None, seed, kind, unet=unet(in_channels=channels)), {"image": large_image()} | call


def pixart(seed: int, kind: str) -> Pipeline:
    """Return a PixArt pipeline: a transformer that predicts noise and its variance; the pipeline drops the variance."""
    torch.manual_seed(seed)
    tokens = tokenizer()
    denoiser = diffusers.PixArtTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, num_attention_heads=2, attention_head_dim=8, in_channels=4,
        out_channels=8, caption_channels=WIDTH, cross_attention_dim=16, use_additional_conditions=False)
    return silent(getattr(diffusers, kind)(
        transformer=lively(denoiser), scheduler=diffusers.DPMSolverMultistepScheduler(), vae=autoencoder(),
        text_encoder=t5(tokens), tokenizer=tokens))


@factory(FACTORIES, "HunyuanDiTPipeline")
def hunyuan_dit() -> Made:
    """Return a HunyuanDiTPipeline: v-prediction, a BERT (here a CLIP) and a T5; images of 32 x 32, latents of 4 x 4."""
    short, long = (tokenizer(length) for length in HUNYUAN_LENGTHS)
    denoiser = diffusers.HunyuanDiT2DModel(
        sample_size=4, num_layers=2, patch_size=2, num_attention_heads=2, attention_head_dim=8, in_channels=4,
        hidden_size=16, mlp_ratio=1.0, cross_attention_dim=WIDTH, cross_attention_dim_t5=WIDTH,
        pooled_projection_dim=WIDTH, text_len=HUNYUAN_LENGTHS[0], text_len_t5=HUNYUAN_LENGTHS[1])
    scheduler = diffusers.DDPMScheduler(
        beta_start=0.00085, beta_end=0.02, beta_schedule="scaled_linear", clip_sample=False,
        prediction_type="v_prediction", steps_offset=1)
    return diffusers.HunyuanDiTPipeline(
        transformer=lively(denoiser), scheduler=scheduler, vae=autoencoder(stages=4),
        text_encoder=clip(short), tokenizer=short, text_encoder_2=t5(long), tokenizer_2=long,
        **UNCHECKED), {"height": 32, "width": 32, "use_resolution_binning": False}


@factory(FACTORIES, "CogView3PlusPipeline")
def cogview3() -> Made:
    """Return a CogView3PlusPipeline: v-prediction from a terminal signal of zero."""
    tokens = tokenizer()
    denoiser = diffusers.CogView3PlusTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, num_attention_heads=2, attention_head_dim=8, in_channels=4,
        out_channels=4, text_embed_dim=WIDTH, time_embed_dim=16, condition_dim=4, pos_embed_max_size=8)
    scheduler = diffusers.CogVideoXDDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type="v_prediction",
        rescale_betas_zero_snr=True, snr_shift_scale=4.0, timestep_spacing="trailing", clip_sample=False)
    return diffusers.CogView3PlusPipeline(
        transformer=lively(denoiser), scheduler=scheduler, vae=autoencoder(), text_encoder=t5(tokens),
        tokenizer=tokens), {"max_sequence_length": 16}


@factory(FACTORIES, "OmniGenPipeline")
def omnigen() -> Made:
    """Return an OmniGenPipeline without encode_prompt: its one transformer reads the prompt's tokens at every step."""
    rope = {"type": "su", "long_factor": [1.0] * 4, "short_factor": [1.0] * 4}
    denoiser = diffusers.OmniGenTransformer2DModel(
        hidden_size=16, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16, num_layers=1, in_channels=4,
        time_step_dim=4, rope_scaling=rope, vocab_size=1024, pad_token_id=0, pos_embed_max_size=8)
    return diffusers.OmniGenPipeline(
        transformer=lively(denoiser), vae=autoencoder(), tokenizer=tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)), {}


def unet(**options: Any) -> Network:
    """Return a tiny U-Net of one block with random weights; options: of its class, over the defaults."""
    small = dict(sample_size=8, block_out_channels=(8,), layers_per_block=1, norm_num_groups=4, attention_head_dim=2,
                 down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",),
                 cross_attention_dim=WIDTH)
    return lively(diffusers.UNet2DConditionModel(**small | options))


def sizes(pooled: int) -> dict[str, Any]:
    """Arguments of a U-Net that reads pooled embeddings and six size numbers."""
    return {"addition_embed_type": "text_time", "addition_time_embed_dim": 4,
            "projection_class_embeddings_input_dim": pooled + 6 * 4}


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


def large_image(channels: int = 3) -> torch.Tensor:
    """One image [1,channels,16,16] in [0, 1]: a ramp."""
    return torch.linspace(0, 1, 16).expand(1, channels, 16, 16).clone()


INPAINT = "StableDiffusionInpaintPipeline"
MASK = (large_image(1) > 0.5).float()
FACTORIES |= {
    "StableDiffusionPipeline": lambda seed: (sd15(None, seed), {}),
    "StableDiffusionXLPipeline": lambda seed: (sdxl(seed, add_watermarker=False), {}),
    "LatentConsistencyModelPipeline": lambda seed: (lcm_sd15(seed), {}),
    INPAINT: lambda seed: editing(seed, INPAINT, 9, mask_image=MASK),
    # It reads the state alone, and restores the image after every step.
    f"{INPAINT} (4 channels)": lambda seed: editing(seed, INPAINT, 4, mask_image=MASK),
    "StableDiffusionInstructPix2PixPipeline": lambda seed: editing(seed, "StableDiffusionInstructPix2PixPipeline", 8),
    "StableDiffusionPAGPipeline": lambda seed: (sd15(None, seed, "StableDiffusionPAGPipeline"), {"pag_scale": 2.0}),
    "StableDiffusionXLPAGPipeline": lambda seed: (
        sdxl(seed, "StableDiffusionXLPAGPipeline", add_watermarker=False), {"pag_scale": 2.0}),
    "PixArtAlphaPipeline": lambda seed: (pixart(seed, "PixArtAlphaPipeline"), SMALL),
    "PixArtSigmaPipeline": lambda seed: (pixart(seed, "PixArtSigmaPipeline"), SMALL),
    "StableDiffusionImg2ImgPipeline": lambda seed: (
        sd15(None, seed, "StableDiffusionImg2ImgPipeline"), {"image": large_image()}),
}


def unet_controlnet(width: int = WIDTH, **options: Any) -> Network:
    """Return a ControlNetModel for the tiny U-Nets. width: of the prompt's embeddings."""
    control = lively(diffusers.ControlNetModel(
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
    torch.manual_seed(seed)
    return sd15(None, seed, "StableDiffusionControlNetPipeline", controlnet=unet_controlnet())


def xl_controlnet(seed: int = 0) -> Pipeline:
    torch.manual_seed(seed)
    control = unet_controlnet(2 * WIDTH, **sizes(WIDTH))
    return sdxl(seed, "StableDiffusionXLControlNetPipeline", controlnet=control, add_watermarker=False)


def sd3_controlnet(seed: int = 0) -> Pipeline:
    """Return a StableDiffusion3ControlNetPipeline, whose autoencoder encodes the control image."""
    pipe = sd3(seed)
    control = lively(diffusers.SD3ControlNetModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=16, pooled_projection_dim=32,
        pos_embed_max_size=4, qk_norm="rms_norm"))
    vae = still_autoencoder()
    for block in control.controlnet_blocks:
        block.weight.data.mul_(0.1)
    parts = pipe.components | {"vae": vae, "controlnet": _awake(control, control.pos_embed_input.proj)}
    return silent(diffusers.StableDiffusion3ControlNetPipeline(**parts))


def flux_controlnet(seed: int = 0) -> Pipeline:
    torch.manual_seed(seed)
    control = lively(flux_transformer(diffusers.FluxControlNetModel))
    return flux(seed, "FluxControlNetPipeline", controlnet=control)


def ip_adapter(seed: int = 0) -> Pipeline:
    pipe = sd15(None, seed)
    encoder, processor = image_encoder()
    pipe.register_modules(image_encoder=encoder, feature_extractor=processor)
    pipe.load_ip_adapter(ip_adapter_weights(pipe.unet), subfolder="", weight_name="")
    pipe.set_ip_adapter_scale(1.0)
    return pipe


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


CONDITIONED: Factories = {
    "StableDiffusionControlNetPipeline": lambda seed: (controlnet(seed), {"image": image()}),
    "StableDiffusionXLControlNetPipeline": lambda seed: (xl_controlnet(seed), {"image": image()}),
    "StableDiffusion3ControlNetPipeline": lambda seed: (sd3_controlnet(seed), SD3_CALL | {"control_image": image()}),
    "FluxControlNetPipeline": lambda seed: (flux_controlnet(seed), FLUX_CALL | {"control_image": image()}),
    "StableDiffusionPipeline (IP-Adapter)": lambda seed: (ip_adapter(seed), {"ip_adapter_image": image()}),
}

"""Variance-preserving image pipelines: U-Nets, transformers that predict noise or v, and consistency models; and
pipelines of both kinds with a live ControlNet or IP-Adapter. Control images have 16 x 16 pixels.
"""

import io
import tempfile
from pathlib import Path
from typing import Any

import diffusers
import torch

from flowgrpo.tools.check.tiny import parts as tiny
from flowgrpo.tools.check.tiny.images import FLUX_CALL, SD3_CALL, flux_parts, sd3_parts
from flowgrpo.tools.check.tiny.parts import SIZE, WIDTH, Network, Parts, Pipeline, Scheduler, lively, network

BETAS: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SD_NOISE = BETAS | {"steps_offset": 1, "timestep_spacing": "leading"}
UNCHECKED = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
SMALL = SIZE | {"use_resolution_binning": False, "clean_caption": False, "max_sequence_length": 16}
# Of a U-Net that reads pooled embeddings and six size numbers.
POOLED = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4,
          "projection_class_embeddings_input_dim": WIDTH + 6 * 4}
ONE_STAGE: dict[str, Any] = {
    "sample_size": 8, "block_out_channels": (8,), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 2,
    "down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",),
    "cross_attention_dim": WIDTH}
TWO_STAGES: dict[str, Any] = {
    "block_out_channels": (8, 8), "norm_num_groups": 2, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
TOKENS = 4  # of an image in an IP-Adapter; diffusers fixes their number


def pndm() -> Scheduler:
    return diffusers.PNDMScheduler(skip_prk_steps=True, set_alpha_to_one=False, **SD_NOISE)


def lcm() -> Scheduler:
    return diffusers.LCMScheduler(clip_sample=False, **BETAS)


def sd15_parts(**given: Any) -> Parts:
    """Noise is predicted by a U-Net of one block, without a safety checker."""
    return {"unet": unet(), "scheduler": pndm(), "vae": tiny.autoencoder(), **tiny.clip(), **UNCHECKED, **given}


def sdxl_parts(**given: Any) -> Parts:
    """Two text encoders; pooled embeddings and sizes in addition to the time."""
    return {"unet": unet(cross_attention_dim=2 * WIDTH, **POOLED), "vae": tiny.autoencoder(), **tiny.clip(),
            **tiny.clip("_2", projected=True), "scheduler": diffusers.EulerDiscreteScheduler(**SD_NOISE),
            "add_watermarker": False, **given}


def pixart() -> Parts:
    """Its transformer predicts noise and its variance; the pipeline drops the variance."""
    denoiser = network("PixArtTransformer2DModel", num_layers=2, attention_head_dim=8, out_channels=8,
                       caption_channels=WIDTH, cross_attention_dim=16, use_additional_conditions=False)
    return tiny.with_t5(denoiser, scheduler=diffusers.DPMSolverMultistepScheduler())


def unet(**options: Any) -> Network:
    """Return a tiny U-Net of one block with random weights; options: of its class, over the defaults."""
    return lively(diffusers.UNet2DConditionModel(**ONE_STAGE | options))


def _chatglm() -> Parts:
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
    return {"text_encoder": encoder, "tokenizer": tokens}


def large_image(channels: int = 3) -> torch.Tensor:
    """One image [1,channels,16,16] in [0, 1]: a ramp."""
    return torch.linspace(0, 1, 16).expand(1, channels, 16, 16).clone()


MASKED = {"image": large_image(), "mask_image": (large_image(1) > 0.5).float()}


def unet_controlnet(width: int = WIDTH, **options: Any) -> Network:
    """Return a ControlNetModel for the tiny U-Nets. width: of the prompt's embeddings."""
    return tiny.awake(lively(diffusers.ControlNetModel(
        block_out_channels=(8,), layers_per_block=1, down_block_types=("CrossAttnDownBlock2D",),
        cross_attention_dim=width, attention_head_dim=2, norm_num_groups=4, conditioning_embedding_out_channels=(8, 8),
        **options)))


def sd3_controlnet() -> Parts:
    """Its autoencoder encodes the control image."""
    parts = sd3_parts()
    control = lively(network(
        "SD3ControlNetModel", attention_head_dim=8, joint_attention_dim=32, pooled_projection_dim=32,
        pos_embed_max_size=4, qk_norm="rms_norm"))
    vae = tiny.still_autoencoder()
    for block in control.controlnet_blocks:
        block.weight.data.mul_(0.1)
    return parts | {"vae": vae, "controlnet": tiny.awake(control)}


def ip_adapter(seed: int = 0) -> Pipeline:
    pipe, _ = tiny.assemble("StableDiffusionPipeline", sd15_parts, {}, seed=seed)
    pipe.register_modules(image_encoder=tiny.image_encoder(), feature_extractor=tiny.image_processor())
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


FACTORIES = tiny.factories({
    # SDXL's U-Net, conditioned on a ChatGLM.
    "KolorsPipeline": (lambda: {
        "unet": unet(encoder_hid_dim=WIDTH, encoder_hid_dim_type="text_proj", **POOLED), **_chatglm(),
        "vae": tiny.autoencoder(), "scheduler": diffusers.EulerDiscreteScheduler(
            **SD_NOISE | {"beta_end": 0.014, "num_train_timesteps": 1100})}, {"max_sequence_length": 16}),
    # v-prediction, a BERT (here a CLIP) and a T5, whose lengths the pipeline's code fixes; latents of 4 x 4.
    "HunyuanDiTPipeline": (lambda: {
        "transformer": lively(network(
            "HunyuanDiT2DModel", sample_size=4, num_layers=2, patch_size=2, attention_head_dim=8, in_channels=4,
            hidden_size=16, mlp_ratio=1.0, cross_attention_dim=WIDTH)),
        "vae": tiny.autoencoder(stages=4), **tiny.clip(length=77), **tiny.t5("_2", 256), **UNCHECKED,
        "scheduler": diffusers.DDPMScheduler(**BETAS | {"beta_end": 0.02}, clip_sample=False, steps_offset=1,
                                             prediction_type="v_prediction")},
        {"height": 32, "width": 32, "use_resolution_binning": False}),
    # v-prediction from a terminal signal of zero.
    "CogView3PlusPipeline": (lambda: tiny.with_t5(
        network("CogView3PlusTransformer2DModel", num_layers=2, attention_head_dim=8, condition_dim=4,
                pos_embed_max_size=8),
        scheduler=diffusers.CogVideoXDDIMScheduler(
            **BETAS, prediction_type="v_prediction", rescale_betas_zero_snr=True, snr_shift_scale=4.0,
            timestep_spacing="trailing", clip_sample=False)), {"max_sequence_length": 16}),
    # Without encode_prompt: its one transformer reads the prompt's tokens at every step.
    "OmniGenPipeline": (lambda: {
        "transformer": lively(network(
            "OmniGenTransformer2DModel", hidden_size=16, time_step_dim=4, vocab_size=1024, pad_token_id=0,
            pos_embed_max_size=8, rope_scaling={"type": "su", "long_factor": [1.0] * 4, "short_factor": [1.0] * 4})),
        "vae": tiny.autoencoder(), "tokenizer": tiny.tokenizer(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)}, {}),
    "StableDiffusionPipeline": (sd15_parts, {}),
    "StableDiffusionXLPipeline": (sdxl_parts, {}),
    # The guidance scale is embedded, the output consistent.
    "LatentConsistencyModelPipeline": (sd15_parts, {}, {
        "unet": lambda: unet(time_cond_proj_dim=8), "scheduler": lcm}),
    # An image as extra channels.
    "StableDiffusionInpaintPipeline": (sd15_parts, MASKED, {"unet": lambda: unet(in_channels=9)}),
    # It reads the state alone, and restores the image after every step.
    "StableDiffusionInpaintPipeline (4 channels)": (sd15_parts, MASKED),
    "StableDiffusionInstructPix2PixPipeline": (sd15_parts, {"image": large_image()}, {
        "unet": lambda: unet(in_channels=8)}),
    "StableDiffusionPAGPipeline": (sd15_parts, {"pag_scale": 2.0}),
    "StableDiffusionXLPAGPipeline": (sdxl_parts, {"pag_scale": 2.0}),
    "PixArtAlphaPipeline": (pixart, SMALL),
    "PixArtSigmaPipeline": (pixart, SMALL),
    "StableDiffusionImg2ImgPipeline": (sd15_parts, {"image": large_image()}),
    "StableDiffusionControlNetPipeline": (sd15_parts, {"image": tiny.image()}, {"controlnet": unet_controlnet}),
    "StableDiffusionXLControlNetPipeline": (sdxl_parts, {"image": tiny.image()}, {
        "controlnet": lambda: unet_controlnet(2 * WIDTH, **POOLED)}),
    "StableDiffusion3ControlNetPipeline": (sd3_controlnet, SD3_CALL | {"control_image": tiny.image()}),
    "FluxControlNetPipeline": (flux_parts, FLUX_CALL | {"control_image": tiny.image()}, {
        "controlnet": lambda: lively(tiny.flux_transformer("FluxControlNetModel"))}),
}) | {"StableDiffusionPipeline (IP-Adapter)": lambda seed=0: (ip_adapter(seed), {"ip_adapter_image": tiny.image()})}

"""Image pipelines with a live ControlNet or IP-Adapter. Control pictures have 16 x 16 pixels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flowgrpo.check.tiny.images import FLUX_CALL, SD3_CALL, flux, sd3
from flowgrpo.check.tiny.parts import Network, Pipeline, lively, picture, silent
from flowgrpo.check.tiny.unets import WIDTH, sd15, sdxl, sizes

TOKENS = 4  # of a picture in an IP-Adapter; diffusers fixes their number


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
    """Fill the layers that start at zero, so that the control picture has an effect."""
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
    """Return a StableDiffusion3ControlNetPipeline, whose autoencoder encodes the control picture."""
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
    with torch.no_grad():  # the pipeline samples the control picture's latent: next to no deviation
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


FACTORIES: dict[str, Callable[[int], tuple[Pipeline, dict[str, Any]]]] = {
    "StableDiffusionControlNetPipeline": lambda seed: (controlnet(seed), {"image": picture()}),
    "StableDiffusionXLControlNetPipeline": lambda seed: (xl_controlnet(seed), {"image": picture()}),
    "StableDiffusion3ControlNetPipeline": lambda seed: (sd3_controlnet(seed), SD3_CALL | {"control_image": picture()}),
    "FluxControlNetPipeline": lambda seed: (flux_controlnet(seed), FLUX_CALL | {"control_image": picture()}),
    "StableDiffusionPipeline (IP-Adapter)": lambda seed: (ip_adapter(seed), {"ip_adapter_image": picture()}),
}

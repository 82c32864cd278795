"""ModularPipelines, and others that have the parts of a tiny pipeline of another module, which ROWS names."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import diffusers
import torch
import transformers

from flowgrpo.tools.check.tiny import controlled, images, newest, shrunk, unets, videos
from flowgrpo.tools.check.tiny.parts import (
    TOKENS,
    Pipeline,
    chat_tokenizer,
    flux2_vae,
    image,
    language_model,
    lively,
    qwen3_vl,
    qwen_vae,
    shifted_scheduler,
    silent,
    tokenizer,
    video_image,
)

LAYERS = 36  # of the text encoder, twelve of which Krea 2's blocks read by number
Parts = dict[str, Any]


def _krea2(parts: Parts) -> Parts:
    config = {**parts["transformer"].config, "num_text_layers": LAYERS // 3}
    reader = qwen3_vl(parts["tokenizer"], "Qwen3VLModel", LAYERS)
    return {"transformer": lively(diffusers.Krea2Transformer2DModel.from_config(config)), "text_encoder": reader}


def _template(parts: Parts) -> Parts:
    """The blocks cut the tokens of the model's own template off."""
    tokens = chat_tokenizer()
    tokens.chat_template = "x" * 108 + tokens.chat_template + "."
    return {"tokenizer": tokens}


def _ltx2(parts: Parts) -> Parts:
    return {name: diffusers.LTX2Guidance(stg_scale=0.0, modality_scale=1.0) for name in ("guider", "audio_guider")}


def _ltx25(parts: Parts) -> Parts:
    return _ltx2(parts) | {"diffusion_decoder": diffusers.LTX2VideoDiffusionDecoderModel(
        latent_channels=4, patch_size=1, decoder_head_dim=8, decoder_stage_channels=(16, 8, 8, 8, 8),
        decoder_stage_depths=(1,) * 5, decoder_stage_kernels=((1, 1, 1),) * 4, decoder_stage5_kernel=(1, 1, 1),
        decoder_upsample_strides=((1, 2, 2), (2, 1, 1), (1, 1, 1), (1, 1, 1)), decoder_t_emb_dim=8,
        decoder_upsample_channel_reductions=(2, 1, 1, 1), spatial_compression_ratio=2, temporal_compression_ratio=2)}


def _anima(parts: Parts) -> Parts:
    tokens = chat_tokenizer()
    denoiser = diffusers.CosmosTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1, mlp_ratio=2,
        text_embed_dim=16, adaln_lora_dim=4, max_size=(4, 32, 32), patch_size=(1, 2, 2), rope_scale=(1.0, 1.0, 1.0),
        concat_padding_mask=True, extra_pos_embed_type=None)
    conditioner = diffusers.AnimaTextConditioner(
        source_dim=16, target_dim=16, model_dim=16, num_layers=1, num_attention_heads=2, target_vocab_size=len(tokens),
        min_sequence_length=8)
    return {"transformer": lively(denoiser), "text_conditioner": conditioner, "tokenizer": tokens, "vae": qwen_vae(),
            "t5_tokenizer": tokenizer(TOKENS), "text_encoder": language_model(tokens), "scheduler": shifted_scheduler()}


def _flux3(parts: Parts, distilled: bool = False) -> Parts:
    processor = newest.vision_processor()
    denoiser = diffusers.Flux3Transformer2DModel(
        in_channels=16, cond_in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=8 * 16, timestep_channels=16, axes_dims_rope=(4, 4, 4, 4),
        flow_map=distilled)
    return {"transformer": lively(denoiser), "tokenizer": processor, "vae": flux2_vae(),
            "text_encoder": qwen3_vl(processor.tokenizer, layers=33), "scheduler": shifted_scheduler()}


def _siglip(parts: Parts) -> Parts:
    """An encoder of images of 16 x 16, as wide as the embeddings that HunyuanVideo 1.5 reads."""
    config = transformers.SiglipVisionConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1,
                                             num_attention_heads=2, image_size=16, patch_size=8)
    return {"image_encoder": transformers.SiglipVisionModel(config),
            "feature_extractor": transformers.SiglipImageProcessor(size={"height": 16, "width": 16})}


SMALL = {"height": 16, "width": 16, "max_sequence_length": TOKENS}
PICTURE = {"image": image(), "strength": 0.9}
# A class, without its "Pipeline"; the one whose parts it has, further parts, further arguments of its call.
ROWS: dict[str, tuple[Any, ...]] = {
    "AnimaModular": ("", _anima, SMALL),
    "ErnieImageModular": ("ErnieImage",),
    "Flux2KleinBaseModular": ("Flux2Klein",),
    "Flux2KleinModular": ("Flux2Klein",),
    "Flux2Modular": ("Flux2",),
    "Flux3DistilledModular": ("", partial(_flux3, distilled=True), SMALL),
    "Flux3Modular": ("", _flux3, SMALL),
    "FluxKontextModular": ("FluxKontext",),
    "FluxModular": ("Flux",),
    "HunyuanVideo15Modular": ("HunyuanVideo15", _template),
    "Ideogram4Modular": ("Ideogram4",),
    "Krea2Modular": ("Krea2", _krea2, {"max_sequence_length": 256}),
    "Krea2TurboModular": ("Krea2", _krea2, {"max_sequence_length": 256}),
    "LTX25Modular": ("LTX2", _ltx25),
    "LTX2Modular": ("LTX2", _ltx2),
    "LTXModular": ("LTX",),
    "MiniMaxH3Modular": ("",),  # which is refused without parts
    "QwenImage21Modular": ("QwenImage21",),
    "QwenImage21TurboModular": ("QwenImage21",),
    "QwenImageEditModular": ("QwenImageEdit",),
    "QwenImageEditPlusModular": ("QwenImageEditPlus",),
    "QwenImageModular": ("QwenImage",),
    "StableDiffusion3Modular": ("StableDiffusion3",),
    "StableDiffusionXLModular": ("StableDiffusionXL",),
    "Wan22Image2VideoModular": ("WanImageToVideo",),
    "Wan22Modular": ("Wan (2.2)",),
    "Wan22VaceModular": ("WanVACE", lambda parts: {"transformer_2": copy.deepcopy(parts["transformer"])}),
    "WanImage2VideoModular": ("WanImageToVideo (first and last frame)",),
    "WanModular": ("Wan",),
    "ZImageModular": ("ZImage",),
    # Image-to-image, guidance by perturbed attention, and others of driven families.
    "AnimateDiffPAG": ("AnimateDiff",),
    "ChromaImg2Img": ("Chroma", None, PICTURE),
    "Flux2KleinKV": ("Flux2Klein",),
    "FluxImg2Img": ("Flux", None, PICTURE),
    "HunyuanVideo15ImageToVideo": ("HunyuanVideo15", _siglip, {"image": video_image()}),
    "IFImg2Img": ("IF", None, PICTURE),
    "Kandinsky3Img2Img": ("Kandinsky3", None, PICTURE),
    "KolorsImg2Img": ("Kolors", None, PICTURE),
    "KolorsPAG": ("Kolors",),
    "LatentConsistencyModelImg2Img": ("LatentConsistencyModel", None, PICTURE),
    "LTX2Condition": ("LTX2",),
    "LucyEdit": ("WanVideoToVideo", controlled.changed(transformer={"in_channels": 8})),
    "PixArtSigmaPAG": ("PixArtSigma",),
    "QwenImageImg2Img": ("QwenImage", None, PICTURE),
    "SanaPAG": ("Sana",),
    "StableDiffusion3Img2Img": ("StableDiffusion3", None, PICTURE),
    "StableDiffusion3PAG": ("StableDiffusion3",),
    "StableDiffusion3PAGImg2Img": ("StableDiffusion3", None, PICTURE),
    "StableDiffusionPAGImg2Img": ("StableDiffusion", None, PICTURE),
    "StableDiffusionXLImg2Img": ("StableDiffusionXL", None, PICTURE),
    "StableDiffusionXLInstructPix2Pix": ("StableDiffusionXL", controlled.changed(unet={"in_channels": 8}), {
        "image": image()}),
    "StableDiffusionXLPAGImg2Img": ("StableDiffusionXL", None, PICTURE),
    "ZImageImg2Img": ("ZImage", None, PICTURE),
    "AnimateDiffVideoToVideo": ("AnimateDiff", None, {"video": [video_image(16 * i) for i in range(5)]}),
} | controlled.ROWS | shrunk.ROWS


def build(name: str, seed: int = 0, row: tuple[Any, ...] = ()) -> tuple[Pipeline, dict[str, Any]]:
    """Build the tiny pipeline of a class as its row, else that of ROWS, says."""
    from flowgrpo.policies.pipelines.modular import of_parts

    row = row or ROWS[name]
    base, further, arguments = row + (None, {})[len(row) - 1:]
    base, _, variant = base.replace("Pipeline", "").partition(" ")
    torch.manual_seed(seed)
    like, call = (OWN | FACTORIES)[f"{base}Pipeline {variant}".strip()](seed) if base else (None, {})
    parts = dict(like.components) if base else {}
    parts |= further(parts) if further else {}
    cls: Any = getattr(diffusers, f"{name}Pipeline")
    if name.endswith("Modular"):
        pipe: Pipeline = of_parts(cls, parts)
    else:
        pipe = silent(cls(**{key: part for key, part in parts.items() if key in inspect.signature(cls).parameters}))
        for key, value in vars(like).items() if base else ():  # of templates and lengths
            if not key.startswith("_") and isinstance(value, (int, str, list)):
                setattr(pipe, key, value)
    takes = inspect.signature(inspect.unwrap(type(pipe).__call__)).parameters
    return pipe, {key: value for key, value in call.items() if key in takes} | arguments


# Of pipelines with parts of their own, and of those that have the parts of another.
OWN = images.FACTORIES | newest.FACTORIES | unets.FACTORIES | unets.CONDITIONED | videos.FACTORIES
FACTORIES = {f"{name}Pipeline": partial(build, name) for name in ROWS}

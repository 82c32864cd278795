"""ModularPipelines, and others that have the parts of a tiny pipeline of another module, which ROWS names."""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch
import transformers

from flowgrpo.policies.pipelines.modular import of_parts
from flowgrpo.tools.check.tiny import images, unets, videos
from flowgrpo.tools.check.tiny import parts as tiny
from flowgrpo.tools.check.tiny.parts import SIZE, TOKENS, WIDTH, Factories, Network, Parts, Pipeline, lively, network

Further = Callable[[Parts], Parts]  # builds further parts, or others, of those of a pipeline


# --- changed parts, and those of adapters ----------------------------------------------------------------------------


def _configuration(part: Network) -> dict[str, Any]:
    return {name: value for name, value in part.config.items() if not name.startswith("_")}


def changed(**configurations: dict[str, Any]) -> Further:
    """Return a function that builds named parts anew, each with these values over its own configuration."""
    return lambda parts: {name: lively(type(parts[name])(**_configuration(parts[name]) | values))
                          for name, values in configurations.items()}


def like(kind: str, denoiser: str = "transformer", **values: Any) -> Further:
    """Return a function that builds a ControlNet of a class with the configuration of the denoiser, as far as both have
    it; its layers that start at zero are filled, so that it has an effect."""
    def build(parts: Parts) -> Parts:
        cls: Any = getattr(diffusers, kind)
        known = inspect.signature(cls.__init__).parameters
        shared = {name: value for name, value in _configuration(parts[denoiser]).items() if name in known}
        return {"controlnet": tiny.awake(lively(cls(**shared | values)))}
    return build


def _still(further: Further) -> Further:
    return lambda parts: {"vae": tiny.still_autoencoder()} | further(parts)


def denoiser(kind: str, further: Further = lambda parts: {}, name: str = "transformer", **options: Any) -> Further:
    """Return a function that builds the denoiser of a row, and its further parts."""
    return lambda parts: {name: lively(network(kind, **options))} | further(parts)


# --- parts of a class of its own -------------------------------------------------------------------------------------


def _krea2(parts: Parts) -> Parts:
    """Its blocks read twelve of 36 layers of the text encoder by number."""
    reader = tiny.qwen3_vl(parts["tokenizer"], "Qwen3VLModel", 36)
    return {"text_encoder": reader} | changed(transformer={"num_text_layers": 12})(parts)


def _template(parts: Parts) -> Parts:
    """The blocks cut the tokens of the model's own template off."""
    tokens = tiny.chat_tokenizer()
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
    cosmos = network("CosmosTransformer3DModel", adaln_lora_dim=4, max_size=(4, 32, 32), rope_scale=(1.0, 1.0, 1.0),
                     extra_pos_embed_type=None)
    conditioner = diffusers.AnimaTextConditioner(
        source_dim=16, target_dim=16, model_dim=16, num_layers=1, num_attention_heads=2, target_vocab_size=514,
        min_sequence_length=8)
    return {"transformer": lively(cosmos), "text_conditioner": conditioner, "vae": tiny.qwen_vae(),
            "t5_tokenizer": tiny.tokenizer(), **tiny.prompt_reader(), "scheduler": tiny.shifted_scheduler()}


def _flux3(parts: Parts, distilled: bool = False) -> Parts:
    processor = tiny.vision_processor()
    flux3 = network("Flux3Transformer2DModel", in_channels=16, cond_in_channels=16, joint_attention_dim=8 * 16,
                    timestep_channels=16, mlp_ratio=3.0, axes_dims_rope=(4, 4, 4, 4), flow_map=distilled)
    return {"transformer": lively(flux3), "tokenizer": processor, "vae": tiny.flux2_vae(),
            "text_encoder": tiny.qwen3_vl(processor.tokenizer, layers=33), "scheduler": tiny.shifted_scheduler()}


def _motif(parts: Parts) -> Parts:
    sizes = tiny.READER | {"num_hidden_layers": 1}
    config = transformers.T5Gemma2EncoderConfig(
        text_config=sizes | {"vocab_size": 600, "num_key_value_heads": 1, "head_dim": 8, "dropout_rate": 0.0,
                             "attention_dropout": 0.0},
        vision_config=sizes | {"image_size": 28, "patch_size": 14})
    return {"text_encoder": transformers.T5Gemma2Encoder(config),
            "guider": diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
            "scheduler": tiny.shifted_scheduler(), "tokenizer": tiny.tokenizer()}


# --- rows ------------------------------------------------------------------------------------------------------------

SMALL = SIZE | {"max_sequence_length": TOKENS}
CLIP = {"num_frames": 5}
IMAGE = {"image": tiny.video_image()}
PICTURE = {"image": tiny.image(), "strength": 0.9}
STARTED = PICTURE | {"control_image": tiny.image()}
CONTROL = {"control_image": tiny.image()}
MASKED = unets.MASKED | {"strength": 1.0}
NINE = changed(unet={"in_channels": 9})
WIDER = _still(changed(transformer={"in_channels": 32, "out_channels": 16}))
UNION = like("ControlNetUnionModel", "unet", conditioning_embedding_out_channels=(8, 8), num_trans_channel=8,
             num_trans_head=2, num_proj_channel=8)
UNION_CALL = {"control_image": [tiny.image()], "control_mode": [0]}
# A class, without its "Pipeline"; the one whose parts it has, further parts, further arguments of its call.
ROWS: dict[str, tuple[Any, ...]] = {
    **{f"{name}Modular": (name,) for name in (
        "ErnieImage", "Flux", "Flux2", "Flux2Klein", "FluxKontext", "Ideogram4", "LTX", "QwenImage", "QwenImage21",
        "QwenImageEdit", "QwenImageEditPlus", "StableDiffusion3", "StableDiffusionXL", "Wan", "ZImage")},
    "AnimaModular": ("", _anima, SMALL),
    "Flux2KleinBaseModular": ("Flux2Klein",),
    "Flux3DistilledModular": ("", partial(_flux3, distilled=True), SMALL),
    "Flux3Modular": ("", _flux3, SMALL),
    "HeliosModular": ("Helios", None, {"history_sizes": [2, 1, 1]}),
    "HunyuanVideo15Modular": ("HunyuanVideo15", _template),
    "Krea2Modular": ("Krea2", _krea2, {"max_sequence_length": 256}),
    "Krea2TurboModular": ("Krea2", _krea2, {"max_sequence_length": 256}),
    "LTX25Modular": ("LTX2", _ltx25),
    "LTX2Modular": ("LTX2", _ltx2),
    "MiniMaxH3Modular": ("",),  # which is refused without parts
    "QwenImage21TurboModular": ("QwenImage21",),
    "Wan22Image2VideoModular": ("WanImageToVideo",),
    "Wan22Modular": ("Wan (2.2)",),
    "Wan22VaceModular": ("WanVACE", lambda parts: {"transformer_2": copy.deepcopy(parts["transformer"])}),
    "WanImage2VideoModular": ("WanImageToVideo (first and last frame)",),
    # Image-to-image, guidance by perturbed attention, and others of driven families.
    **{f"{name}PAG": (name,) for name in (
        "AnimateDiff", "Kolors", "PixArtSigma", "Sana", "StableDiffusion3", "StableDiffusionControlNet",
        "StableDiffusionXLControlNet")},
    **{f"{name}Img2Img": (name, None, PICTURE) for name in (
        "Chroma", "Flux", "IF", "Kandinsky3", "Kolors", "LatentConsistencyModel", "QwenImage", "StableDiffusion3",
        "StableDiffusionXL", "ZImage")},
    **{f"{name}PAGImg2Img": (name, None, PICTURE) for name in (
        "StableDiffusion", "StableDiffusion3", "StableDiffusionXL")},
    "AnimateDiffSDXL": ("StableDiffusionXL", lambda parts: {
        "unet": unets.unet(cross_attention_dim=2 * WIDTH, **unets.TWO_STAGES, **unets.POOLED),
        "motion_adapter": videos.motion_adapter(),
        "scheduler": diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False)}, {"num_frames": 4}),
    "AnimateDiffVideoToVideo": ("AnimateDiff", None, {"video": tiny.video(5)}),
    "DreamLiteMobile": ("DreamLite",),
    "Flux2KleinKV": ("Flux2Klein",),
    # The encoder's images are of 16 x 16, its embeddings as wide as those that the denoiser reads.
    "HunyuanVideo15ImageToVideo": ("HunyuanVideo15", lambda parts: {
        "image_encoder": transformers.SiglipVisionModel(transformers.SiglipVisionConfig(
            hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16,
            patch_size=8)),
        "feature_extractor": transformers.SiglipImageProcessor(size=SIZE)}, IMAGE),
    "Kandinsky5T2V": ("Kandinsky5T2I", lambda parts: {"vae": OWN["HunyuanVideoPipeline"]()[0].vae},
                      CLIP | {"height": 32, "width": 32}),
    "LTX2Condition": ("LTX2",),
    "LTX2InContext": ("LTX2",),
    "LucyEdit": ("WanVideoToVideo", changed(transformer={"in_channels": 8})),
    "SanaImageToVideo": ("SanaVideo", None, IMAGE),
    "StableDiffusionXLInstructPix2Pix": ("StableDiffusionXL", changed(unet={"in_channels": 8}), {
        "image": tiny.image()}),
    "ZImageOmni": ("ZImage", lambda parts: {"siglip": None, "siglip_processor": None}),
    # ControlNets, adapters and inpainting.
    **{f"{name}Img2Img": (name, None, STARTED) for name in (
        "FluxControlNet", "StableDiffusionControlNet", "StableDiffusionXLControlNet")},
    **{f"{name}Inpaint": (name, NINE, MASKED | CONTROL) for name in (
        "StableDiffusionControlNet", "StableDiffusionXLControlNet")},
    "StableDiffusionPAGInpaint": ("StableDiffusionInpaint",),
    "StableDiffusionXLInpaint": ("StableDiffusionXL", NINE, MASKED),
    "StableDiffusionXLPAGInpaint": ("StableDiffusionXL", NINE, MASKED),
    "StableDiffusionXLControlNetPAGImg2Img": ("StableDiffusionXLControlNet", None, STARTED),
    "StableDiffusionXLControlNetUnion": ("StableDiffusionXL", UNION, UNION_CALL),
    "StableDiffusionXLControlNetUnionImg2Img": ("StableDiffusionXL", UNION, UNION_CALL | PICTURE),
    "FluxControl": ("Flux", WIDER, CONTROL),
    "FluxControlImg2Img": ("Flux", WIDER, STARTED),
    "QwenImageControlNet": ("QwenImage", like("QwenImageControlNetModel"), CONTROL),
    "CogView4Control": ("CogView4", _still(changed(transformer={"in_channels": 8})), CONTROL),
    # Denoisers of a class of their own; the text encoder, autoencoder and scheduler are those of another.
    "Helios": ("Wan", denoiser("HeliosTransformer3DModel", lambda parts: {
        "scheduler": diffusers.HeliosScheduler(stages=1, stage_range=[0, 1])}),
        {"num_latent_frames_per_chunk": 3, "history_sizes": [2, 1, 1]}),
    # Pixels of a U-Net that gives a variance too.
    "IF": ("StableDiffusion", lambda parts: {
        "unet": unets.unet(in_channels=3, out_channels=6, sample_size=16, encoder_hid_dim=WIDTH,
                           encoder_hid_dim_type="text_proj"),
        **tiny.t5(length=77), **unets.UNCHECKED, "watermarker": None, "scheduler": diffusers.DDPMScheduler(
            beta_schedule="squaredcos_cap_v2", variance_type="learned_range", clip_sample=False)},
        {"clean_caption": False}),
    "MotifVideo": ("Wan", denoiser("MotifVideoTransformer3DModel", _motif, in_channels=9)),
    "MotifVideoImage2Video": ("MotifVideo", denoiser("MotifVideoTransformer3DModel", lambda parts: {
        "feature_extractor": transformers.SiglipImageProcessor(size={"height": 28, "width": 28})},
        in_channels=9, image_embed_dim=WIDTH), IMAGE),
    "EasyAnimate": ("Wan", denoiser("EasyAnimateTransformer3DModel", lambda parts: {
        "vae": diffusers.AutoencoderKLMagvit(
            latent_channels=4, block_out_channels=[4, 4, 4, 4], layers_per_block=1, norm_num_groups=2),
        **tiny.prompt_reader(), "scheduler": tiny.shifted_scheduler()},
        in_channels=4, out_channels=4, patch_size=2), CLIP),
    "DreamLite": ("", denoiser("DreamLiteUNetModel", lambda parts: {
        "processor": (processor := tiny.vision_processor()), "tokenizer": processor.tokenizer,
        "text_encoder": tiny.qwen3_vl(processor.tokenizer), "vae": tiny.autoencoder(),
        "scheduler": tiny.shifted_scheduler()},
        "unet", block_out_channels=(8, 8), norm_num_groups=2, attention_head_dim=4, num_attention_heads=None,
        cross_attention_dim=16, sample_size=8, down_block_types=("DreamLiteCrossAttnDownBlock2D",) * 2,
        up_block_types=("DreamLiteCrossAttnUpBlock2D",) * 2), SMALL),
    "PRXPixel": ("PRX", denoiser("PRXTransformer2DModel", in_channels=3, axes_dim=(4, 4), hidden_size=16,
                                 bottleneck_size=8)),
    "Lumina": ("Lumina2", denoiser("LuminaNextDiT2DModel", lambda parts: {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}, sample_size=4, multiple_of=2, num_kv_heads=1,
        cross_attention_dim=16)),
    "Kandinsky3": ("StableDiffusion", lambda parts: {
        "movq": diffusers.VQModel(
            latent_channels=4, block_out_channels=(8, 8), norm_num_groups=2, vq_embed_dim=4,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2),
        "unet": lively(network("Kandinsky3UNet", time_embedding_dim=16, groups=2, attention_head_dim=8,
                               layers_per_block=3, block_out_channels=(16, 32), cross_attention_dim=16,
                               encoder_hid_dim=16)),
        **tiny.t5(length=128), "scheduler": diffusers.DDPMScheduler(clip_sample=False)}, SIZE),
}


def build(name: str, seed: int = 0, row: tuple[Any, ...] = ()) -> tuple[Pipeline, dict[str, Any]]:
    """Build the tiny pipeline of a class as its row, else that of ROWS, says."""
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
        pipe = tiny.construct(cls, parts)
        for key, value in vars(like).items() if base else ():  # of templates and lengths
            if not key.startswith("_") and isinstance(value, (int, str, list)):
                setattr(pipe, key, value)
    takes = inspect.signature(inspect.unwrap(type(pipe).__call__)).parameters
    return pipe, {key: value for key, value in call.items() if key in takes} | arguments


# Of pipelines with parts of their own, and of those that have the parts of another.
OWN: Factories = images.FACTORIES | unets.FACTORIES | videos.FACTORIES
FACTORIES = {f"{name}Pipeline": partial(build, name) for name in ROWS}

"""Configurations of the models that the recipes name, so that a dry run needs no network.

Dimensions are those of the published config.json files and conversion scripts. What could not be confirmed by either is
marked. Keys that equal a class's default are left out. Of tokenizers only the longest sequence matters.
"""

from dataclasses import dataclass, field
from typing import Any

Part = tuple[str, dict[str, Any]]  # class of diffusers or transformers, and its configuration


@dataclass(frozen=True)
class Published:
    """Published pipeline: its class, parts by name, tokenizers by name with their longest sequence, further arguments,
    and the transformers class of its image processor, if it has one."""

    pipeline: str
    parts: dict[str, Part]
    tokenizers: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    processor: str | None = None


# --- text encoders ---------------------------------------------------------------------------------------------------

_CLIP: dict[str, Any] = {"vocab_size": 49408, "max_position_embeddings": 77, "bos_token_id": 0, "eos_token_id": 2}
_L = _CLIP | {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
              "projection_dim": 768}
CLIP_L: Part = "CLIPTextModel", _L
CLIP_L_PROJECTED: Part = "CLIPTextModelWithProjection", _L
CLIP_G: Part = "CLIPTextModelWithProjection", _CLIP | {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "projection_dim": 1280}
_XXL: dict[str, Any] = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
                        "feed_forward_proj": "gated-gelu"}
T5_XXL: Part = "T5EncoderModel", _XXL | {"vocab_size": 32128}
UMT5_XXL: Part = "UMT5EncoderModel", _XXL | {"vocab_size": 256384}


def _decoder(*sizes: int, **further: Any) -> dict[str, Any]:
    """Configuration of a language model; sizes: of its vocabulary, hidden states and MLPs, its numbers of layers, heads
    and key-value heads, and the size of a head, of which the last may be left out."""
    return dict(zip(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "head_dim"), sizes)) | further


QWEN_VL_7B: Part = "Qwen2_5_VLForConditionalGeneration", {
    "text_config": _decoder(152064, 3584, 18944, 28, 28, 4, max_position_embeddings=128000, rope_parameters={
        "mrope_section": [16, 24, 24], "rope_type": "default", "rope_theta": 1e6}),
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                      "out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31]}}
QWEN3_4B: Part = "Qwen3Model", _decoder(151936, 2560, 9728, 36, 32, 8, 128, max_position_embeddings=40960)
# Of Anima.
QWEN3_06B: Part = "Qwen3Model", _decoder(151936, 1024, 3072, 28, 16, 8, 128, max_position_embeddings=32768)
# Of FLUX.2-klein-4B: QWEN3_4B with a language head, which has the embeddings' weights.
QWEN3_4B_HEAD: Part = "Qwen3ForCausalLM", QWEN3_4B[1] | {"tie_word_embeddings": True}
# Of FLUX.2-klein-9B.
QWEN3_8B_HEAD: Part = "Qwen3ForCausalLM", _decoder(
    151936, 4096, 12288, 36, 32, 8, 128, max_position_embeddings=40960)
_VL: dict[str, Any] = {"max_position_embeddings": 262144, "rope_parameters": {
    "mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_type": "default", "rope_theta": 5e6}}
QWEN3_VL_4B: Part = "Qwen3VLModel", {
    "text_config": QWEN3_4B[1] | _VL,
    "vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
                      "out_hidden_size": 2560, "deepstack_visual_indexes": [5, 11, 17]}}
# Of Qwen-Image-2.1: 8.77B, as its files are.
QWEN3_VL_8B: Part = "Qwen3VLForConditionalGeneration", {
    "text_config": QWEN3_8B_HEAD[1] | _VL, "vision_config": {"out_hidden_size": 4096}}
# Of FLUX.3: the same as QWEN3_VL_4B with a language head, which has the embeddings' weights.
QWEN3_VL_4B_HEAD: Part = "Qwen3VLForConditionalGeneration", QWEN3_VL_4B[1] | {"tie_word_embeddings": True}
MISTRAL_24B: Part = "Mistral3ForConditionalGeneration", {
    "text_config": {"model_type": "mistral"} | _decoder(131072, 5120, 32768, 40, 32, 8, 128,
                                                        max_position_embeddings=131072),
    "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                      "num_attention_heads": 16, "image_size": 1540, "patch_size": 14}}
# Of ERNIE-Image; its vision tower has the sizes of transformers' defaults, which are not confirmed.
MINISTRAL_3B: Part = "Mistral3Model", {
    "text_config": {"model_type": "mistral"} | _decoder(131072, 3072, 9216, 26, 32, 8, 128,
                                                        max_position_embeddings=262144, tie_word_embeddings=True),
    "vision_config": {"model_type": "pixtral"}}
QWEN_VL_7B_TEXT: Part = "Qwen2_5_VLTextModel", QWEN_VL_7B[1]["text_config"]
# google/byt5-small with the 1,126 colours and fonts of Glyph-SDXL-v2; their number is not confirmed.
BYT5_SMALL: Part = "T5EncoderModel", {
    "vocab_size": 1510, "d_model": 1472, "d_kv": 64, "d_ff": 3584, "num_layers": 12, "num_heads": 6,
    "feed_forward_proj": "gated-gelu"}
GEMMA3_12B: Part = "Gemma3ForConditionalGeneration", {
    "text_config": _decoder(262208, 3840, 15360, 48, 16, 8, 256, sliding_window=1024),
    "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
                      "num_attention_heads": 16, "image_size": 896, "patch_size": 14, "vision_use_head": False}}
# Of LTX-2.5, whose own file was not read: google/gemma-4-12B of 11,959,730,224 parameters.
GEMMA4_12B: Part = "Gemma4UnifiedForConditionalGeneration", {
    "text_config": _decoder(262144, 3840, 15360, 48, 16, 8, num_global_key_value_heads=1, attention_k_eq_v=True),
    "vision_config": {"mm_embed_dim": 3840}, "audio_config": {}}
LLAMA3_8B: Part = "LlamaModel", _decoder(128320, 4096, 14336, 32, 32, 8, max_position_embeddings=8192)
GEMMA2_2B: Part = "Gemma2Model", _decoder(256000, 2304, 9216, 26, 8, 4, 256)

# --- autoencoders and schedulers -------------------------------------------------------------------------------------

_KL: dict[str, Any] = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2,
                       "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
KL_4: Part = "AutoencoderKL", _KL | {"latent_channels": 4, "sample_size": 512}
KL_XL: Part = "AutoencoderKL", _KL | {"latent_channels": 4, "sample_size": 1024, "scaling_factor": 0.13025}
_16 = _KL | {"latent_channels": 16, "sample_size": 1024, "use_quant_conv": False, "use_post_quant_conv": False}
KL_SD3: Part = "AutoencoderKL", _16 | {"scaling_factor": 1.5305, "shift_factor": 0.0609}
KL_FLUX: Part = "AutoencoderKL", _16 | {"scaling_factor": 0.3611, "shift_factor": 0.1159}
_STAGES = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
DC_AE: Part = "AutoencoderDC", {
    "encoder_block_types": _STAGES, "decoder_block_types": _STAGES, "downsample_block_type": "conv",
    "upsample_block_type": "interpolate", "encoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
    "decoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)), "scaling_factor": 0.41407}
HUNYUAN_VAE: Part = "AutoencoderKLHunyuanVideo", {}
WAN_VAE: Part = "AutoencoderKLWan", {}
WAN22_VAE: Part = "AutoencoderKLWan", {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12, "out_channels": 12,
    "patch_size": 2, "scale_factor_spatial": 16, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48}
QWEN_VAE: Part = "AutoencoderKLQwenImage", {}
FLUX2_VAE: Part = "AutoencoderKLFlux2", {}

_SD_BETAS: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
                             "steps_offset": 1}
FLOW = "FlowMatchEulerDiscreteScheduler"
FLUX_GRID: Part = FLOW, {"shift": 3.0, "use_dynamic_shifting": True}
QWEN_GRID: Part = FLOW, {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192,
                         "shift_terminal": 0.02}


def _unipc(shift: float) -> Part:
    return "UniPCMultistepScheduler", {"prediction_type": "flow_prediction", "use_flow_sigmas": True,
                                       "flow_shift": shift}


# --- pipelines -------------------------------------------------------------------------------------------------------

_FLUX_PARTS: dict[str, Part] = {
    "transformer": ("FluxTransformer2DModel", {"guidance_embeds": True}), "scheduler": FLUX_GRID, "vae": KL_FLUX,
    "text_encoder": CLIP_L, "text_encoder_2": T5_XXL}
_XL: dict[str, Any] = {
    "block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": (5, 10, 20),
    "transformer_layers_per_block": (1, 2, 10), "use_linear_projection": True, "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816}
_WAN_14B: Part = "WanTransformer3DModel", {}
_WAN_1B: Part = "WanTransformer3DModel", {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}


def _pipeline(name: str, transformer: Part, vae: Part, text_encoder: Part, scheduler: Part, length: int,
              processor: str | None = None, **options: Any) -> Published:
    """Pipeline of four parts and one tokenizer of this longest sequence."""
    return Published(name, {"transformer": transformer, "vae": vae, "text_encoder": text_encoder,
                            "scheduler": scheduler}, {"tokenizer": length}, options, processor)


def _wan(*transformers: Part, shift: float = 3.0, vae: Part = WAN_VAE, **options: Any) -> Published:
    named = dict(zip(("transformer", "transformer_2"), transformers))
    return Published("WanPipeline", named | {"scheduler": _unipc(shift), "vae": vae, "text_encoder": UMT5_XXL},
                     {"tokenizer": 512}, options)


def _hunyuan(pipeline: str, **transformer: Any) -> Published:
    return Published(pipeline, {
        "transformer": ("HunyuanVideoTransformer3DModel", transformer), "scheduler": (FLOW, {"shift": 7.0}),
        "vae": HUNYUAN_VAE, "text_encoder": LLAMA3_8B, "text_encoder_2": CLIP_L},
        {"tokenizer": 1024, "tokenizer_2": 77})


def _ltx(heads: int, layers: int, transformer: dict[str, Any], connectors: dict[str, Any], vae: dict[str, Any],
         vocoder: str, encoder: Part, grid: dict[str, Any]) -> Published:
    """scripts/convert_ltx2_to_diffusers.py of diffusers. heads, layers: of the connectors."""
    of_both = {"num_attention_heads": heads, "num_layers": layers, "num_learnable_registers": 128}
    return Published("LTX2Pipeline", {
        "transformer": ("LTX2VideoTransformer3DModel", {"rope_type": "split"} | transformer),
        "connectors": ("pipelines.ltx2.LTX2TextConnectors", connectors | {
            f"{kind}_connector_{key}": value for kind in ("video", "audio") for key, value in of_both.items()} | {
            "caption_channels": 3840, "text_proj_in_factor": 49, "connector_rope_base_seq_len": 4096,
            "rope_theta": 10000.0, "rope_double_precision": True, "causal_temporal_positioning": False,
            "rope_type": "split", "video_connector_attention_head_dim": 128}),
        "vae": ("AutoencoderKLLTX2Video", vae | {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}),
        "audio_vae": ("AutoencoderKLLTX2Audio", {}), "vocoder": (f"pipelines.ltx2.vocoder.{vocoder}", {}),
        "text_encoder": encoder, "scheduler": (FLOW, grid)}, {"tokenizer": 1024})


# scripts/convert_flux2_to_diffusers.py of diffusers: klein-4b and klein-9b
def _klein(layers: int, single: int, heads: int, width: int, encoder: Part, **options: Any) -> Published:
    return _pipeline("Flux2KleinPipeline", ("Flux2Transformer2DModel", {
        "num_layers": layers, "num_single_layers": single, "num_attention_heads": heads,
        "joint_attention_dim": width, "guidance_embeds": False}),
        FLUX2_VAE, encoder, FLUX_GRID, 512, **options)  # grid not confirmed; the pipeline computes the shift


def _sdxl(size: int, scheduler: str, spacing: str) -> Published:
    return Published("StableDiffusionXLPipeline", {
        "unet": ("UNet2DConditionModel", _XL | {"sample_size": size}), "vae": KL_XL, "text_encoder": CLIP_L,
        "text_encoder_2": CLIP_G, "scheduler": (scheduler, _SD_BETAS | {"timestep_spacing": spacing})},
        {"tokenizer": 77, "tokenizer_2": 77})


def _qwen_image(pipeline: str = "QwenImagePipeline", processor: str | None = None) -> Published:
    return _pipeline(pipeline, ("QwenImageTransformer2DModel", {}), QWEN_VAE, QWEN_VL_7B, QWEN_GRID, 131072, processor)


def _z_image(shift: float) -> Published:
    lengths = {"axes_lens": [1536, 512, 512]}  # not confirmed; no weight has it
    return _pipeline("ZImagePipeline", ("ZImageTransformer2DModel", lengths), KL_FLUX, QWEN3_4B,
                     (FLOW, {"shift": shift}), 131072)


MODELS: dict[str, Published] = {
    "stable-diffusion-v1-5/stable-diffusion-v1-5": Published(
        "StableDiffusionPipeline", {
            "unet": ("UNet2DConditionModel", {"sample_size": 64, "cross_attention_dim": 768}), "vae": KL_4,
            "text_encoder": CLIP_L, "scheduler": ("PNDMScheduler", _SD_BETAS | {"skip_prk_steps": True})},
        # Its safety checker, a CLIP ViT-L of 0.6 GB, is left out.
        {"tokenizer": 77}, {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}),
    "stabilityai/stable-diffusion-xl-base-1.0": _sdxl(128, "EulerDiscreteScheduler", "leading"),
    "stabilityai/sdxl-turbo": _sdxl(64, "EulerAncestralDiscreteScheduler", "trailing"),
    "stabilityai/stable-diffusion-3.5-medium": Published(
        "StableDiffusion3Pipeline", {
            "transformer": ("SD3Transformer2DModel", {
                "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384,
                "dual_attention_layers": tuple(range(13)), "qk_norm": "rms_norm"}),
            "scheduler": (FLOW, {"shift": 3.0}), "vae": KL_SD3, "text_encoder": CLIP_L_PROJECTED,
            "text_encoder_2": CLIP_G, "text_encoder_3": T5_XXL},
        {"tokenizer": 77, "tokenizer_2": 77, "tokenizer_3": 512}),
    "black-forest-labs/FLUX.1-dev": Published("FluxPipeline", _FLUX_PARTS, {"tokenizer": 77, "tokenizer_2": 512}),
    "black-forest-labs/FLUX.1-schnell": Published(
        "FluxPipeline", _FLUX_PARTS | {"transformer": ("FluxTransformer2DModel", {"guidance_embeds": False}),
                                       "scheduler": (FLOW, {"shift": 1.0})},
        {"tokenizer": 77, "tokenizer_2": 256}),
    "black-forest-labs/FLUX.1-Kontext-dev": Published(
        "FluxKontextPipeline", _FLUX_PARTS, {"tokenizer": 77, "tokenizer_2": 512}),
    "black-forest-labs/FLUX.2-klein-base-4B": _klein(5, 20, 24, 7680, QWEN3_4B_HEAD),
    "black-forest-labs/FLUX.2-klein-4B": _klein(5, 20, 24, 7680, QWEN3_4B_HEAD, is_distilled=True),
    "black-forest-labs/FLUX.2-klein-base-9B": _klein(8, 24, 32, 12288, QWEN3_8B_HEAD),
    # scripts/convert_flux2_to_diffusers.py of diffusers: flux2-dev
    "black-forest-labs/FLUX.2-dev": _pipeline(
        "Flux2Pipeline", ("Flux2Transformer2DModel", {}), FLUX2_VAE, MISTRAL_24B, FLUX_GRID, 512),
    # Widths are the defaults of Krea2Transformer2DModel, the grid that of Krea2Pipeline's docstring.
    "krea/Krea-2-Raw": _pipeline(
        "Krea2Pipeline", ("Krea2Transformer2DModel", {}), QWEN_VAE, QWEN3_VL_4B, (FLOW, {
            "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "max_image_seq_len": 6400}), 131072),
    # Sizes are the defaults of diffusers' class: 5.5B beside an autoencoder of 0.1B, as published. Its model that
    # rewrites prompts is left out.
    "black-forest-labs/flux-3-image-klein-base": _pipeline(
        "Flux3ModularPipeline", ("Flux3Transformer2DModel", {}), FLUX2_VAE, QWEN3_VL_4B_HEAD, (FLOW, {"shift": 6.93}),
        131072, "Qwen3VLProcessor"),
    "lodestones/Chroma1-HD": _pipeline(  # grid not confirmed; the pipeline computes the shift
        "ChromaPipeline", ("ChromaTransformer2DModel", {}), KL_FLUX, T5_XXL, FLUX_GRID, 512),
    "Qwen/Qwen-Image": _qwen_image(),
    "Qwen/Qwen-Image-2512": _qwen_image(),  # its parts are those of Qwen-Image; no file of its own was read
    # Sizes are the defaults of diffusers' classes: 7.1B and 32 layers, as published.
    "Qwen/Qwen-Image-2.1": Published(
        "QwenImage21Pipeline", {
            "transformer": ("QwenImage21Transformer2DModel", {}), "vae": ("AutoencoderKLQwenImage21", {}),
            "text_encoder": QWEN3_VL_8B, "scheduler": QWEN_GRID},  # grid not confirmed; no weight has this size
        {"processor": 131072}, processor="Qwen3VLProcessor"),
    # scripts/convert_anima_to_diffusers.py and convert_cosmos_to_diffusers.py of diffusers: 2B-Text2Image
    "circlestone-labs/Anima-Base-v1.0-Diffusers": Published(
        "AnimaModularPipeline", {
            "transformer": ("CosmosTransformer3DModel", {
                "num_attention_heads": 16, "rope_scale": (1.0, 4.0, 4.0), "extra_pos_embed_type": None}),
            "text_conditioner": ("AnimaTextConditioner", {}), "vae": QWEN_VAE, "text_encoder": QWEN3_06B,
            "scheduler": (FLOW, {"shift": 3.0})},
        {"tokenizer": 131072, "t5_tokenizer": 512}),
    # scripts/convert_hunyuan_image_to_diffusers.py of diffusers: hunyuanimage2.1; the guider of its documentation
    "hunyuanvideo-community/HunyuanImage-2.1-Diffusers": Published(
        "HunyuanImagePipeline", {
            "transformer": ("HunyuanImageTransformer2DModel", {"text_embed_2_dim": 1472}),
            "vae": ("AutoencoderKLHunyuanImage", {
                "in_channels": 3, "out_channels": 3, "latent_channels": 64, "layers_per_block": 2,
                "block_out_channels": (128, 256, 512, 512, 1024, 1024), "spatial_compression_ratio": 32,
                "sample_size": 384, "scaling_factor": 0.75289}),
            "text_encoder": QWEN_VL_7B, "text_encoder_2": BYT5_SMALL,
            "guider": ("AdaptiveProjectedMixGuidance", {"adaptive_projected_guidance_momentum": -0.5,
                                                        "adaptive_projected_guidance_rescale": 10.0,
                                                        "adaptive_projected_guidance_start_step": 5}),
            "scheduler": (FLOW, {"shift": 5.0})},  # not confirmed; no weight has this size
        {"tokenizer": 131072, "tokenizer_2": 1024}),
    # Copies of transformer/config.json, scheduler_config.json and text_encoder/config.json on the hub.
    "baidu/ERNIE-Image": _pipeline(
        "ErnieImagePipeline", ("ErnieImageTransformer2DModel", {
            "hidden_size": 4096, "num_attention_heads": 32, "num_layers": 36, "ffn_hidden_size": 12288,
            "text_in_dim": 3072}), FLUX2_VAE, MINISTRAL_3B, (FLOW, {"shift": 4.0}), 131072),
    "Qwen/Qwen-Image-Edit-2509": _qwen_image("QwenImageEditPlusPipeline", "Qwen2VLProcessor"),
    "Efficient-Large-Model/Sana_1600M_512px_diffusers": _pipeline(
        "SanaPipeline", ("SanaTransformer2DModel", {"caption_channels": 2304, "sample_size": 16}), DC_AE, GEMMA2_2B,
        ("DPMSolverMultistepScheduler", _unipc(3.0)[1]), 8192),
    "Tongyi-MAI/Z-Image-Turbo": _z_image(3.0),
    "Tongyi-MAI/Z-Image": _z_image(6.0),  # not confirmed
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": _wan(_WAN_1B),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": _wan(_WAN_14B, shift=5.0),  # not confirmed; the recipe sets its own grid
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": _wan(_WAN_14B, _WAN_14B, boundary_ratio=0.875),
    # scripts/convert_wan_to_diffusers.py of diffusers: Wan2.2-TI2V-5B
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": _wan(
        ("WanTransformer3DModel", {
            "num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48}),
        shift=5.0, vae=WAN22_VAE, expand_timesteps=True),
    "Lightricks/LTX-2": _ltx(
        30, 2, {}, {"audio_connector_attention_head_dim": 128},
        {"block_out_channels": (256, 512, 1024, 2048), "decoder_block_out_channels": (256, 512, 1024)},
        "LTX2Vocoder", GEMMA3_12B,
        {"use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05, "shift_terminal": 0.1}),
    # Its parts have 35.03B weights, as published. A head that predicts a clip's length is left out.
    "Lightricks/LTX-2.5-Diffusers": _ltx(
        32, 8, {"use_prompt_embeddings": False, "perturbed_attn": True, "ff_bias": False,
                "use_keyframes_abs_pos_embedding": True, "gated_attn": True, "cross_attn_mod": True,
                "audio_gated_attn": True, "audio_cross_attn_mod": True},
        {"audio_connector_attention_head_dim": 64, "video_gated_attn": True, "audio_gated_attn": True,
         "per_modality_projections": True, "video_hidden_dim": 4096, "audio_hidden_dim": 2048, "proj_bias": True},
        {"block_out_channels": (256, 512, 1024, 1024), "decoder_block_out_channels": (256, 512, 512, 1024),
         "layers_per_block": (4, 6, 4, 2, 2), "decoder_layers_per_block": (4, 6, 4, 2, 2),
         "decoder_spatio_temporal_scaling": (True,) * 4, "decoder_inject_noise": (False,) * 5,
         "upsample_type": ("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
         "upsample_residual": (False,) * 4, "upsample_factor": (2, 2, 1, 2)},
        "LTX2VocoderWithBWE", GEMMA4_12B, {}),  # the grid of the distilled transformer, whose sigmas are given
    # scripts/convert_hunyuan_video1_5_to_diffusers.py of diffusers: 480p_t2v
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": Published(
        "HunyuanVideo15Pipeline", {
            "transformer": ("HunyuanVideo15Transformer3DModel", {}), "scheduler": (FLOW, {"shift": 5.0}),
            "vae": ("AutoencoderKLHunyuanVideo15", {}), "text_encoder": QWEN_VL_7B_TEXT, "text_encoder_2": BYT5_SMALL,
            "guider": ("ClassifierFreeGuidance", {"guidance_scale": 6.0})},
        {"tokenizer": 131072, "tokenizer_2": 1024}),
    "hunyuanvideo-community/HunyuanVideo": _hunyuan("HunyuanVideoPipeline"),
    # The folder that configs/skyreels_i2v.yaml has put together. Not confirmed: guidance_embeds.
    "skyreels_i2v": _hunyuan("HunyuanSkyreelsImageToVideoPipeline", in_channels=32, guidance_embeds=False),
}


def _janus(width: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    """Configuration of a Janus-Pro; its vision tower and its autoencoder have the sizes of transformers' defaults."""
    return {"text_config": {"model_type": "llama"} | _decoder(102400, width, inner, layers, heads, heads,
                                                              max_position_embeddings=16384),
            "vision_config": {"projection_dim": width}, "tie_word_embeddings": False,
            "vq_config": {"projection_dim": width, "image_token_embed_dim": width}}


# Configurations of models of image tokens.
LANGUAGE = {"deepseek-community/Janus-Pro-1B": _janus(2048, 5632, 24, 16),
            "deepseek-community/Janus-Pro-7B": _janus(4096, 11008, 30, 32)}


def find(model: str) -> Published | None:
    """Configuration of a hub id, or of the first model of a pipeline's class; None if there is none."""
    of_class = (published for published in MODELS.values() if published.pipeline == model)
    return MODELS.get(model) or next(of_class, None)

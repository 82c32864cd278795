"""Video pipelines: four to nine frames of 16 x 16 or 32 x 32, autoencoders with one layer per stage.

Schedulers are those of the published checkpoints, with their conventions: inverted sigmas, v-prediction with zero
terminal signal, multistep flow schedulers.
"""

from functools import partial
from typing import Any

import diffusers
import transformers

from flowgrpo.tools.check.tiny import parts as tiny
from flowgrpo.tools.check.tiny.parts import READER, SIZE, TOKENS, VIDEO, Network, Parts, Scheduler, lively, network
from flowgrpo.tools.check.tiny.unets import ONE_STAGE, TWO_STAGES

CALL = VIDEO | {"max_sequence_length": TOKENS}
LARGE_CALL = CALL | {"height": 32, "width": 32}


def image_vae() -> Network:
    """An autoencoder of images, which takes the frames one by one."""
    return diffusers.AutoencoderKL(**tiny.HALF_SIDE | {"norm_num_groups": 2, "sample_size": 32})


# --- HunyuanVideo, and SkyReels V1, which has its architecture; HunyuanVideo 1.5 -------------------------------------


def _hunyuan_transformer(**options: Any) -> Network:
    return lively(network("HunyuanVideoTransformer3DModel", attention_head_dim=10, mlp_ratio=4.0, patch_size=1,
                          rope_axes_dim=(2, 4, 4), **options))


def _hunyuan_parts() -> Parts:
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(4,) * 4, layers_per_block=1, norm_num_groups=2)
    return {"vae": vae, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
            "tokenizer": tiny.tokenizer(), **tiny.clip("_2", 77)}  # the pipeline pads to this length


def hunyuan15() -> Parts:
    """Two text encoders, and guidance in a part of its own, the guider."""
    tokens = tiny.chat_tokenizer()
    tokens.chat_template += "."  # the denoiser takes the mean of a prompt's tokens, also of an empty one's
    reader = transformers.Qwen2_5_VLTextModel(transformers.Qwen2_5_VLTextConfig(
        **READER | {"num_hidden_layers": 3}, vocab_size=len(tokens), num_key_value_heads=2,
        pad_token_id=tokens.pad_token_id, rope_parameters=dict(tiny.MROPE)))
    denoiser = network("HunyuanVideo15Transformer3DModel", in_channels=9, attention_head_dim=10, mlp_ratio=4.0,
                       image_embed_dim=8, rope_axes_dim=(2, 4, 4), target_size=16)
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(32, 32, 32), layers_per_block=1, spatial_compression_ratio=4)
    return {"text_encoder": lively(reader), "tokenizer": tokens, "transformer": lively(denoiser), "vae": vae,
            "scheduler": tiny.shifted_scheduler(), **tiny.t5("_2"),
            "guider": diffusers.ClassifierFreeGuidance(guidance_scale=6.0), "prompt_template_encode_start_idx": 0,
            "vision_num_semantic_tokens": 2, "tokenizer_max_length": TOKENS, "tokenizer_2_max_length": TOKENS}


def hunyuan_image(kind: str) -> Parts:
    """The image is an extra condition or the state's first frame."""
    tokens: dict[str, Any] = {"pad_token_id": 0, "image_token_index": 1}
    reader = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(
        vision_config=tiny.vision_config(), text_config=tiny.llama_config(), **tokens))
    beside = kind == "latent_concat"
    return {"text_encoder": lively(reader), **_hunyuan_parts(), "image_processor": tiny.image_processor(),
            "transformer": _hunyuan_transformer(in_channels=9 if beside else 4, guidance_embeds=not beside,
                                                image_condition_type=kind)}


# --- LTX-Video, LTX-2 ------------------------------------------------------------------------------------------------


def _ltx_scheduler() -> Scheduler:
    return diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1)


def ltx() -> Parts:
    """In its image-to-video the scheduler sees all frames but the first."""
    vae: Network = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8), down_block_types=("LTXVideoDownBlock3D",) * 2,
        decoder_block_out_channels=(8, 8), layers_per_block=(1, 1, 1), decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, False), decoder_spatio_temporal_scaling=(True, False), patch_size=1,
        decoder_inject_noise=(False,) * 3, upsample_residual=(False,) * 2, upsample_factor=(1, 1))
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    denoiser = network("LTXVideoTransformer3DModel", in_channels=8, out_channels=8, attention_head_dim=8,
                       cross_attention_dim=16, num_layers=2)
    return {"transformer": lively(denoiser), "vae": vae, **tiny.t5(), "scheduler": _ltx_scheduler()}


def ltx2() -> Parts:
    """An additional state for sound."""
    from diffusers.pipelines.ltx2 import LTX2TextConnectors
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    denoiser = network(
        "LTX2VideoTransformer3DModel", attention_head_dim=8, cross_attention_dim=16, audio_in_channels=4,
        audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=4, audio_cross_attention_dim=8,
        rope_double_precision=False, rope_type="split")
    registers = {f"{kind}_connector_{key}": value for kind in ("video", "audio") for key, value in {
        "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": None}.items()}
    connectors = LTX2TextConnectors(
        caption_channels=16, text_proj_in_factor=4, connector_rope_base_seq_len=32, rope_double_precision=False,
        rope_type="split", **registers)
    vae: Network = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4, block_out_channels=(8,), decoder_block_out_channels=(8,), layers_per_block=(1,),
        decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,), decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False), downsample_type=("spatial",), upsample_residual=(False,),
        upsample_factor=(1,), patch_size=1, decoder_causal=False)
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    sound = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4, ch_mult=(1,), num_res_blocks=1, resolution=32, latent_channels=2, mel_bins=8)
    vocoder = LTX2Vocoder(
        in_channels=16, hidden_channels=8, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2],
        resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]], output_sampling_rate=16000)
    return {"transformer": lively(denoiser), "connectors": connectors, "vae": vae, "audio_vae": sound,
            "vocoder": vocoder, "text_encoder": lively(tiny.llama()), "tokenizer": tiny.tokenizer(),
            "scheduler": _ltx_scheduler()}


LTX2_CALL = LARGE_CALL | {
    "frame_rate": 25.0, "stg_scale": 0.0, "modality_scale": 1.0, "audio_guidance_scale": 1.0, "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0}


# --- Wan, and SkyReels V2, which has its architecture ----------------------------------------------------------------


def wan_vae() -> Network:
    """Latents of 4 x 3 x 8 x 8 for 5 frames of 16 x 16."""
    return diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[True], latents_mean=[0.1] * 4,
        latents_std=[1.5] * 4, scale_factor_temporal=2, scale_factor_spatial=2)


def wan(channels: int = 4, kind: str = "Wan", shift: float = 3.0, experts: tuple[str, ...] = ("transformer",),
        **options: Any) -> Parts:
    """Of one transformer, or of experts of its configuration; options: of it."""
    denoisers = {name: lively(network(f"{kind}Transformer3DModel", attention_head_dim=12, num_layers=2,
                                      in_channels=channels, **options)) for name in experts}
    return denoisers | {**tiny.t5(kind="UMT5"), "vae": wan_vae(), "scheduler": diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)}


def wan22(channels: int = 4) -> Parts:
    """Wan 2.2: `transformer` above, `transformer_2` below 0.875 of the noise."""
    return wan(channels, experts=("transformer", "transformer_2")) | {"boundary_ratio": 0.875}


def wan_clip(kind: str = "Wan", **options: Any) -> Parts:
    """Images are also encoded by CLIP."""
    vision = {"image_encoder": tiny.image_encoder(), "image_processor": tiny.image_processor()}
    return vision | wan(10, kind, 5.0, image_dim=16, added_kv_proj_dim=24, **options)


# --- others ----------------------------------------------------------------------------------------------------------


def cogvideox(channels: int = 4, scheduler: str = "CogVideoXDPMScheduler", shift: float = 1.0) -> Parts:
    """v-prediction; the scheduler is that of the 5B checkpoint (DPM)."""
    vae = diffusers.AutoencoderKLCogVideoX(
        latent_channels=4, block_out_channels=(4,) * 4, layers_per_block=1, norm_num_groups=2, sample_height=16,
        sample_width=16)
    denoiser = network("CogVideoXTransformer3DModel", in_channels=channels, time_embed_dim=8, num_layers=2,
                       sample_frames=9, patch_size=1, max_text_seq_length=TOKENS, use_rotary_positional_embeddings=True)
    return {"transformer": lively(denoiser), "vae": vae, **tiny.t5(), "scheduler": getattr(diffusers, scheduler)(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, clip_sample=False, timestep_spacing="trailing",
        snr_shift_scale=shift)}


COGVIDEOX_DDIM = partial(cogvideox, scheduler="CogVideoXDDIMScheduler", shift=3.0)  # that of the 2B checkpoint


def allegro() -> Parts:
    """It predicts noise; its autoencoder decodes only in tiles."""
    denoiser = network("AllegroTransformer3DModel", attention_head_dim=12, num_layers=2, cross_attention_dim=24,
                       sample_width=8, sample_height=8, sample_frames=8)
    vae: Network = diffusers.AutoencoderKLAllegro(
        block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=2, sample_size=16)
    vae.kernel = vae.stride = (8, 16, 16)  # one tile
    vae.enable_tiling()
    vae.enable_slicing()  # a tile of several videos does not decode
    return tiny.with_t5(denoiser, vae, scheduler=diffusers.EulerAncestralDiscreteScheduler(
        timestep_spacing="leading", steps_offset=1))


def animatediff() -> Parts:
    """A U-Net of SD 1.5 with motion modules."""
    denoiser = diffusers.UNet2DConditionModel(**ONE_STAGE | TWO_STAGES)
    return {"motion_adapter": motion_adapter(), "vae": image_vae(), **tiny.clip(), "unet": lively(denoiser),
            "scheduler": diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False)}


def motion_adapter() -> Network:
    return diffusers.MotionAdapter(block_out_channels=(8, 8), motion_layers_per_block=1, motion_norm_num_groups=2,
                                   motion_num_attention_heads=2)


IMAGE = {"image": tiny.video_image()}
FRAMES = SIZE | {"max_sequence_length": TOKENS}  # of calls that take their number from a video
HUNYUAN_CALL = CALL | {"prompt_template": {"template": "{}", "crop_start": 0}}
# Four image tokens stand in the text; the template is not cropped.
HUNYUAN_IMAGE = CALL | IMAGE | {"prompt_template": {
    "template": "{}", "crop_start": 0, "image_emb_len": 4, "image_emb_start": 2, "image_emb_end": 6}}
FACTORIES = tiny.factories({
    "HunyuanVideo15Pipeline": (hunyuan15, VIDEO),
    # Its time runs from 0 (noise) to 1, and its velocity points to the data.
    "MochiPipeline": (lambda: tiny.with_t5(
        network("MochiTransformer3DModel", attention_head_dim=8, num_layers=2, in_channels=12, time_embed_dim=4,
                max_sequence_length=TOKENS),
        diffusers.AutoencoderKLMochi(encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4,
                                     layers_per_block=(1,) * 5),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)), LARGE_CALL | {"num_frames": 7}),
    "AllegroPipeline": (allegro, CALL | {"num_frames": 8, "clean_caption": False}),
    # It predicts noise and its variance; the pipeline drops the variance.
    "LattePipeline": (lambda: tiny.with_t5(
        network("LatteTransformer3DModel", patch_size=2, attention_head_dim=8, caption_channels=16, in_channels=4,
                cross_attention_dim=16, out_channels=8, attention_bias=True, activation_fn="gelu-approximate",
                num_embeds_ada_norm=1000, norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6,
                video_length=5),
        image_vae(), scheduler=diffusers.DDIMScheduler(clip_sample=False)),
        SIZE | {"video_length": 5, "clean_caption": False}),
    "AnimateDiffPipeline": (animatediff, SIZE | {"num_frames": 4}),
    # Linear attention over the latents of Wan's autoencoder.
    "SanaVideoPipeline": (lambda: {
        "transformer": lively(network(
            "SanaVideoTransformer3DModel", attention_head_dim=12, cross_attention_head_dim=12, cross_attention_dim=24,
            mlp_ratio=2.5, sample_size=16)),
        "vae": wan_vae(), "text_encoder": tiny.llama(), "tokenizer": tiny.tokenizer(),
        "scheduler": diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0)}, {
        "height": 32, "width": 32, "frames": 5, "max_sequence_length": TOKENS, "complex_human_instruction": None,
        "use_resolution_binning": False}),
    # Guidance as an input of the transformer.
    "HunyuanVideoPipeline": (lambda: {
        "text_encoder": lively(tiny.llama()), "transformer": _hunyuan_transformer(), **_hunyuan_parts()}, HUNYUAN_CALL),
    "HunyuanSkyreelsImageToVideoPipeline": (lambda: {
        "text_encoder": lively(tiny.llama()), **_hunyuan_parts(),
        "transformer": _hunyuan_transformer(in_channels=8, guidance_embeds=False)}, HUNYUAN_CALL | IMAGE),
    "HunyuanVideoImageToVideoPipeline": (partial(hunyuan_image, "latent_concat"), HUNYUAN_IMAGE | {
        "num_frames": 9}),  # four are cropped
    "HunyuanVideoImageToVideoPipeline (token_replace)": (partial(hunyuan_image, "token_replace"), HUNYUAN_IMAGE),
    "LTXPipeline": (ltx, LARGE_CALL),
    "LTXImageToVideoPipeline": (ltx, LARGE_CALL | IMAGE),
    # LTX-Video 0.9.5 and later: conditions at any frame. The noise added to its image at every step would differ
    # between rollout and replay.
    "LTXConditionPipeline": (lambda: ltx() | {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler()},
                             LARGE_CALL | IMAGE | {"image_cond_noise_scale": 0.0}),
    "LTX2Pipeline": (ltx2, LTX2_CALL),
    "LTX2ImageToVideoPipeline": (ltx2, LTX2_CALL | IMAGE | {"image_crf": 0}),
    "WanPipeline": (wan, CALL),
    "WanPipeline (2.2)": (wan22, CALL),
    # Wan 2.2's dense model for texts and images (TI2V-5B): a time step for every token.
    "WanPipeline (2.2, dense)": (lambda: wan(shift=5.0) | {"expand_timesteps": True}, CALL),
    # 4 channels of the state, 2 of the mask (one per video frame of a latent frame), 4 of the image.
    "WanImageToVideoPipeline": (partial(wan22, 10), CALL | IMAGE),
    # Wan 2.1's FLF2V. Tokens of an image: 2 x 2 patches and one of the whole.
    "WanImageToVideoPipeline (first and last frame)": (partial(wan_clip, pos_embed_seq_len=2 * 5), CALL | IMAGE | {
        "last_image": tiny.video_image(128)}),
    "WanVideoToVideoPipeline": (wan, FRAMES | {"video": tiny.video(5)}),
    # Extra blocks read a video to change: 4 channels of its unchanged part, 4 of the changed one, 2 x 2 of the mask.
    "WanVACEPipeline": (partial(wan, kind="WanVACE", vace_layers=[0], vace_in_channels=12), CALL),
    "SkyReelsV2Pipeline": (partial(wan, kind="SkyReelsV2", shift=8.0), CALL),
    "SkyReelsV2ImageToVideoPipeline": (partial(wan_clip, "SkyReelsV2"), CALL | IMAGE),
    "CogVideoXPipeline": (cogvideox, CALL | {"num_frames": 9}),
    "CogVideoXPipeline (DDIM)": (COGVIDEOX_DDIM, CALL | {"num_frames": 9}),
    # The image is extra channels of the first frame.
    "CogVideoXImageToVideoPipeline": (partial(cogvideox, 8), CALL | IMAGE | {"num_frames": 9}),
    "CogVideoXVideoToVideoPipeline": (COGVIDEOX_DDIM, FRAMES | {"video": tiny.video(9)}),
})

"""ModularPipelines: loaded from a folder, with code of their own where it is trusted; their guiders."""

import json

import pytest
import torch

from flowgrpo.config.schema import Config
from flowgrpo.config.sections import Adapter
from flowgrpo.policies import build
from flowgrpo.policies.pipelines import modular
from flowgrpo.policies.pipelines.frames import call_parameters, is_video
from flowgrpo.policies.pipelines.load import load_pipeline, skeleton
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.samplers.grids import make_grid
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.tools.check import tiny
from flowgrpo.tools.check.tiny import parts
from flowgrpo.types import Gaussian
from tests.helpers.commands import refusal
from tests.helpers.refusals import message

NAME = "QwenImageModularPipeline"
CODE = '''
from diffusers import QwenImageAutoBlocks


class OwnBlocks(QwenImageAutoBlocks):
    pass
'''


def drawn(pipe, call):
    """Images as a user of diffusers asks for them."""
    return pipe(prompt="red", negative_prompt="old", num_inference_steps=2, output_type="pt",
                generator=torch.Generator().manual_seed(1), output="images", **call)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    pipe, call = tiny.make(NAME)
    pipe.save_pretrained(str(folder := tmp_path_factory.mktemp("modular") / "saved"), overwrite_modular_index=True)
    return folder, drawn(pipe, call), call


def test_a_folder_is_loaded_and_known_before(saved):
    folder, expected, call = saved
    config = Config(model=str(folder))
    assert build.kind(config) == build.PIPELINE and build.modality_ahead(config) == "image"
    cls, modules = skeleton(str(folder))
    assert cls.__name__ == NAME and {"transformer", "text_encoder"} == modules.keys()
    assert torch.equal(drawn(load_pipeline(str(folder)), call), expected)


def test_a_folder_that_is_moved_after_it_was_written_is_loaded(saved, tmp_path):
    """As `export --form merged` writes it: into a temporary folder first."""
    folder, expected, call = saved
    modular.save(load_pipeline(str(folder)), tmp_path / "first", tmp_path / "place")
    (tmp_path / "first").rename(tmp_path / "place")
    index = (tmp_path / "place" / "modular_model_index.json").read_text()
    assert str(tmp_path / "place") in index and str(folder) not in index and "first" not in index
    assert torch.equal(drawn(load_pipeline(str(tmp_path / "place")), call), expected)


def test_code_of_a_repository_runs_only_where_it_is_trusted(saved, tmp_path):
    folder, expected, call = saved
    for part in folder.iterdir():
        (tmp_path / part.name).symlink_to(part)
    (tmp_path / "blocks.py").write_text(CODE)
    (tmp_path / "modular_config.json").write_text(json.dumps(
        {"_class_name": "OwnBlocks", "auto_map": {"ModularPipelineBlocks": "blocks.OwnBlocks"}}))
    assert "trust" in message(load_pipeline, str(tmp_path))
    pipe = load_pipeline(str(tmp_path), trust_remote_code=True)
    assert type(pipe._blocks).__name__ == "OwnBlocks" and torch.equal(drawn(pipe, call), expected)


def test_a_class_says_what_it_takes_before_anything_is_loaded():
    cls = modular.class_of("ZImageModularPipeline")
    assert {"prompt", "height", "generator", "latents"} <= call_parameters(cls).keys() and not is_video(cls)
    assert not {"strength", "image"} & call_parameters(cls).keys()  # image-to-image has pipelines of its own
    assert "image" in call_parameters(modular.class_of("QwenImageEditModularPipeline"))
    assert is_video(modular.class_of("WanModularPipeline")) and modular.class_of("NoPipeline") is None


@pytest.mark.parametrize("name", ["HunyuanImagePipeline", "ZImageModularPipeline"])
def test_a_guider_knows_the_step_of_the_whole_grid(name):
    """HunyuanImage guides by APG after its step 5, so that a replay of step 7 that believes to be the first differs.
    Momentum, which a step has of those before it, is off in rollouts and replays, and the guider is left as it was."""
    pipe, call = tiny.make(name)
    before = {key: value for key, value in vars(pipe.guider).items() if not key.startswith("_")}
    policy = PipelinePolicy(pipe, Adapter(rank=2), guidance=3.0, call=call)
    row, (grid, timesteps) = policy.encode(["red"]), make_grid("shifted", 9, 3.0, policy.stock)
    step = frozenset({7})
    task = Segment(grid, range(9), lambda x, v, grid, i: Gaussian(v, torch.ones(())), stochastic=step, recorded=step,
                   generators=policy.generators([1]), timesteps=timesteps)
    with torch.no_grad():
        record = policy.run(task, row, None, policy.generators([1]))[1]
        replayed = policy.replay(row, record.x[7], grid, 7, timesteps)
        first = policy.replay(row, record.x[7], grid, 0, timesteps)
    torch.testing.assert_close(replayed, record.transition[7].mean, rtol=0, atol=1e-6)
    assert (first - replayed).abs().max() > 1e-3
    assert before == {key: value for key, value in vars(pipe.guider).items() if not key.startswith("_")}


def minimax_h3():
    """A tiny MiniMax-H3, and the arguments of its shortest call. Its text encoder is read after fifty layers."""
    import diffusers

    torch.manual_seed(0)
    processor = parts.vision_processor()
    denoiser = diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=2, attention_head_dim=16, hidden_size=32, num_layers=1, num_refiner_layers=1, ffn_dim=32,
        in_channels=4, audio_in_channels=8, text_dim=16, freq_dim=16, time_embed_hidden_dim=16, time_embed_dim=16,
        rope_freq_dim=2)
    vae = diffusers.AutoencoderKLMiniMaxH3(
        latent_channels=4, block_out_channels=(8, 8), layers_per_block=1, spatial_downsample_factors=(2, 2),
        temporal_downsample_factors=(2, 2), norm_num_groups=2, decoder_num_layers=1, decoder_num_attention_heads=2,
        decoder_attention_head_dim=8, latents_mean=(0.0,) * 4, latents_std=(1.0,) * 4)
    sound = diffusers.AutoencoderKLMiniMaxH3Audio(
        encoder_dim=4, encoder_rates=(2, 2), latent_dim=32, latent_channels=8, num_attention_heads=2, decoder_dim=16,
        decoder_rates=(2, 2), decoder_kernel_sizes=(4, 4), latents_mean=[0.0] * 8, latents_std=[1.0] * 8)
    pipe = diffusers.MiniMaxH3ModularPipeline()
    pipe.update_components(
        transformer=denoiser, processor=processor, tokenizer=processor.tokenizer, vae=vae, audio_vae=sound,
        text_encoder=parts.qwen3_vl(processor.tokenizer, layers=51),
        scheduler=diffusers.MiniMaxH3Scheduler(shift=12.0), audio_scheduler=diffusers.MiniMaxH3Scheduler(shift=3.0))
    return pipe, {"height": 16, "width": 16, "num_frames": 124}


def test_minimax_h3_steps_pictures_and_sound_at_noise_levels_of_their_own():
    """Why it is refused, seen in its stock call: two states of rows without a dimension of samples, each with its own
    timestep in the same step."""
    pipe, call = minimax_h3()
    seen = {"scheduler": [], "audio_scheduler": []}
    for name, steps in seen.items():
        scheduler = getattr(pipe, name)

        def watched(output, timestep, sample, step=scheduler.step, steps=steps, **options):
            steps.append((round(float(timestep), 4), tuple(sample.shape)))
            return step(output, timestep, sample, **options)

        scheduler.step = watched
    made = pipe(prompt="a robot", num_inference_steps=3, output_type="pt",
                generator=torch.Generator().manual_seed(0), **call)
    assert made.get("videos").shape == (1, 124, 3, 16, 16) and made.get("audio").shape == (1, 2, 207 * 4)
    # t = 1 - s / (2 s - (s - 1)) at the middle of the grid, of shifts of 12 and 3: 1/13 and 1/4.
    assert seen == {"scheduler": [(0.0, (148, 16)), (round(1 / 13, 4), (148, 16))],
                    "audio_scheduler": [(0.0, (414, 8)), (0.25, (414, 8))]}
    assert "H3ModularPipeline steps with scheduler and audio_scheduler: in one step" in message(modular.drivable, pipe)


def test_a_command_refuses_two_schedulers_before_it_reads_weights(tmp_path, capsys):
    index = {"_class_name": "MiniMaxH3ModularPipeline", "_blocks_class_name": "MiniMaxH3Blocks"}
    (tmp_path / "modular_model_index.json").write_text(json.dumps(index))
    assert "steps with scheduler and audio_scheduler" in refusal(capsys, {"model": str(tmp_path)}, "starter_video")

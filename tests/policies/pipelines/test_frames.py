"""Frames per second of clips: the model's own, or `image.fps`, in the pipeline's call and for rewards."""

import json

import pytest
import torch

from flowgrpo import config, rewards
from flowgrpo.config.sections import Load
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation.measured import measure
from flowgrpo.evaluation.samplers import draw_one
from flowgrpo.policies.pipelines.frames import rate_of, with_fps
from flowgrpo.policies.pipelines.load import rate_ahead
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.tools.check.tiny import make


@pytest.mark.parametrize("name, expected", [
    ("WanPipeline", 16), ("WanPipeline (2.2, dense)", 24), ("LTXPipeline", 25), ("LTX2Pipeline", 24),
    ("CogVideoXPipeline", 8), ("MochiPipeline", 30), ("SkyReelsV2ImageToVideoPipeline", 24), ("AllegroPipeline", 15)])
def test_the_rate_is_the_models_also_before_it_is_loaded(name, expected, tmp_path):
    pipe, _ = make(name)
    assert rate_of(pipe, {}) == expected and rate_of(pipe, {}, 12.5) == 12.5
    pipe.save_config(tmp_path)  # model_index.json
    assert rate_ahead(str(tmp_path), Load(), {}) == expected


def test_cogvideox_15_has_twice_the_rate_of_the_first(tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "model_index.json").write_text('{"_class_name": "CogVideoXPipeline"}')
    for patch, expected in ((None, 8), (2, 16)):
        (tmp_path / "transformer" / "config.json").write_text(json.dumps({"patch_size_t": patch}))
        assert rate_ahead(str(tmp_path), Load(), {}) == expected


def test_a_pipeline_that_is_told_the_rate_gets_it_and_others_do_not():
    (ltx, call), (wan, _) = make("LTX2Pipeline"), make("WanPipeline")
    assert with_fps(type(ltx), {}, 30) == {"frame_rate": 30} and with_fps(type(wan), {}, 30) == {}
    assert rate_of(ltx, {"frame_rate": 50}) == 50
    slow, fast = (draw_one(ltx, Prompt("a cat"), 0, call | {"num_inference_steps": 2, "fps": fps}) for fps in (8, 60))
    assert not torch.equal(slow, fast)


def test_a_rate_of_images_and_two_rates_are_refused():
    pipe, call = make("FluxPipeline")
    with pytest.raises(UserError, match="image.fps is 8, but FluxPipeline generates images"):
        PipelinePolicy(pipe, None, call=call, fps=8)
    with pytest.raises(UserError, match="fps is 8, and call has frame_rate too: leave one out"):
        config.validate({"reward": "sharpness", "image": {"fps": 8, "call": {"frame_rate": 24}}})


def test_a_reward_that_names_fps_is_given_it():
    pipe, call = make("WanPipeline")
    policy = PipelinePolicy(pipe, None, call=call, fps=12)
    found = measure(policy, [Prompt("a cat")], {"rate": rate}, steps=1, guidance=1.0, samples=1, micro_batch=1, keep=1)
    assert found.scores == {"rate": [12.0]} and found.fps == 12
    assert rewards.score({"rate": rate}, torch.zeros(1, 2, 3, 8, 8), ["p"], [{}]).tolist() == [[-1]]


def rate(videos, prompts, metadata, fps):
    return [fps or -1] * len(prompts)

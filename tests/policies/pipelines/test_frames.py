"""Frames per second of clips: the model's own, or `image.fps`, in the pipeline's call and for rewards."""

import json

import pytest
import torch
from torchvision.transforms.functional import to_pil_image

from flowgrpo import config, rewards
from flowgrpo.config.sections import Load
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation.measured import measure
from flowgrpo.evaluation.report.snapshots import data_url
from flowgrpo.evaluation.samplers import draw_one
from flowgrpo.policies.pipelines.frames import rate_of, rgb, with_fps
from flowgrpo.policies.pipelines.load import rate_ahead
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.rewards import guards
from flowgrpo.rewards.preprocessing import eight_bit
from flowgrpo.tools.check.tiny import make
from tests.helpers.refusals import message


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
    assert "image.fps is 8, but FluxPipeline generates images" in message(PipelinePolicy, pipe, None, call=call, fps=8)
    told = message(config.validate, {"reward": "sharpness", "image": {"fps": 8, "call": {"frame_rate": 24}}})
    assert "fps is 8, and call has frame_rate too: leave one out" in told


def test_a_reward_that_names_fps_is_given_it():
    pipe, call = make("WanPipeline")
    policy = PipelinePolicy(pipe, None, call=call, fps=12)
    found = measure(policy, [Prompt("a cat")], {"rate": rate}, steps=1, guidance=1.0, samples=1, micro_batch=1, keep=1)
    assert found.scores == {"rate": [12.0]} and found.fps == 12
    assert rewards.score({"rate": rate}, torch.zeros(1, 2, 3, 8, 8), ["p"], [{}]).tolist() == [[-1]]


def rate(videos, prompts, metadata, fps):
    return [fps or -1] * len(prompts)


def test_four_channels_are_composed_on_white_and_one_is_grey():
    pixel = torch.tensor([0.2, 0.4, 0.6, 0.5]).view(1, 4, 1, 1).requires_grad_()
    shown = rgb(pixel, object())  # half of the colour, half of white
    torch.testing.assert_close(shown.flatten(), torch.tensor([0.6, 0.7, 0.8]))
    [slope] = torch.autograd.grad(shown.sum(), pixel)
    torch.testing.assert_close(slope.flatten(), torch.tensor([0.5, 0.5, 0.5, -1.8]))  # sum of colour - 1
    whole = torch.rand(2, 5, 3, 4, 4)
    assert rgb(whole, object()) is whole
    clip = torch.cat([whole, torch.zeros(2, 5, 1, 4, 4)], 2)
    assert torch.equal(rgb(clip, object()), torch.ones(2, 5, 3, 4, 4))  # nothing opaque: white
    grey = torch.rand(2, 1, 4, 4)
    assert torch.equal(rgb(grey, object()), torch.cat([grey] * 3, 1))
    told = message(rgb, torch.rand(1, 2, 4, 4), object())
    assert "makes images of 2 channels: expected 1 (grey), 3 (RGB) or 4" in told


def test_a_pipeline_of_four_channels_shows_three_everywhere(tmp_path):
    pipe, call = make("QwenImage21Pipeline")
    policy = PipelinePolicy(pipe, None, call=call)
    conditioning = policy.encode(["red"])
    stock = policy.generate(conditioning, policy.generators([0]), 2, 1.0)
    noise = policy.of_noise(conditioning, policy.generators([0]))
    assert stock.shape == noise.shape == (1, 3, 64, 64)
    assert draw_one(pipe, Prompt("red"), 0, call | {"num_inference_steps": 2}).shape == (3, 64, 64)
    for score in (guards.sharpness, guards.crispness, guards.jpeg_compressibility):
        assert len(score(stock, ["red"])) == 1
    assert guards.edge_widths(stock).shape == (1,)
    assert eight_bit(stock).shape == (1, 64, 64, 3)  # what OCR, judges and detectors read
    assert data_url(stock[0]).startswith("data:image/webp")  # of the report
    to_pil_image(stock[0]).save(tmp_path / "sample.jpg")

"""`eval.frames`: evaluations whose clips are longer than those of training, on a tiny Wan."""

import json

import pytest
import torch

from flowgrpo.contrib.phases import Phases
from flowgrpo.evaluation.held_out import measurement_settings
from flowgrpo.evaluation.samplers import call_arguments
from flowgrpo.methods import keys_read
from flowgrpo.policies import options
from flowgrpo.policies.pipelines.frames import clips_of, require_made
from flowgrpo.tools.check.tiny import make
from flowgrpo.tools.dry_run.estimate import dry_run
from tests.helpers import loop, tiny, tiny_runs, tiny_text
from tests.helpers.refusals import refused

WAN = "WanPipeline"


class Lengths:
    """A reward that records how many clips each call has, and of how many frames."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def __call__(self, videos, prompts):
        self.seen.append((len(prompts), videos.shape[1]))
        return videos.flatten(1).mean(1).tolist()


def settings(folder, count: int | None, **changes):
    _, call = make(WAN)
    usual = dict(image__call=call, reward="lengths", train__steps=2, train__epochs=1, parts={"plan": {"size": 1}},
                 eval__every=1)
    return tiny.config(folder, eval__frames=count, **usual | changes)


def trained(config):
    reward = Lengths()
    pipe, _ = make(WAN)
    return tiny_runs.whole(config, {"lengths": reward}, pipe=pipe), reward.seen


def test_frames_of_evaluations_and_of_training(tmp_path):
    own = make(WAN)[1]["num_frames"]
    summary, seen = trained(settings(tmp_path, own + 4))
    assert {length for rows, length in seen if rows == 4} == {own}  # micro-batches of a group of 4
    longer = [rows for rows, length in seen if length == own + 4]
    assert sum(longer) == 3 * 2 and {length for _, length in seen} == {own, own + 4}  # before, epoch 1, after
    assert json.loads((tmp_path / "run" / "before.json").read_text())["frames"] == own + 4
    assert summary["evaluation"]["of"] == f"clips ({own + 4} frames, 3 steps, guidance 1)"
    assert call_arguments("m", tmp_path / "run")["num_frames"] == own + 4
    ends = [trained(settings(tmp_path / str(count), count))[0] for count in (None, own)]
    for key in ("before", "after"):
        assert ends[0][key] == ends[1][key]


def test_a_policy_has_its_frames_again_and_the_base_is_measured_again(tmp_path):
    pipe, call = make(WAN)
    policy = tiny.policy(pipe, call=call)
    with pytest.raises(ValueError, match="stop"), clips_of(policy, 9):
        assert policy.call["num_frames"] == 9
        raise ValueError("stop")
    assert policy.call == call
    with clips_of(policy, None):
        assert policy.call == call
    assert measurement_settings(settings(tmp_path, 5), [], {}) != measurement_settings(settings(tmp_path, 9), [], {})


@pytest.mark.parametrize("name, count, told", [
    (WAN, 4, "eval.frames is 4, but WanPipeline takes 1 more than a multiple of 2: expected 3 or 5"),
    ("WanVideoToVideoPipeline", 5, "has the frames of its source video: leave it out"),
    ("StableDiffusion3Pipeline", 5, "StableDiffusion3Pipeline takes no number of frames: leave it out")])
def test_frames_that_a_pipeline_does_not_take_are_refused(name, count, told, tmp_path):
    pipe = tiny.sd3() if name.startswith("Stable") else make(name)[0]
    refused(told, options.check_frames, loop.setup(settings(tmp_path, count), "pipeline", loaded=pipe))


def test_clips_beyond_the_limits_and_counts_that_only_clips_show_are_refused(tmp_path):
    large = settings(tmp_path, 60_000, image__call={"height": 512, "width": 512})
    refused(r"eval.frames is 60000, whose clips have [\d,]+ pixels: expected 268,435,456", options.check_frames,
            loop.setup(large, "pipeline"))
    refused("eval.frames is set, which is about denoisers", keys_read.require_kind, tiny_text.config(eval__frames=3),
            "causal_lm")
    make(WAN)[0].save_pretrained(tmp_path / "wan")
    own = settings(tmp_path, None, model=str(tmp_path / "wan"), image__frames=4, image__call={})
    refused("image.frames is 4, but WanPipeline takes 1 more than a multiple of 2", options.check_frames,
            loop.setup(own, "pipeline"))
    refused("image.frames is 8, but object makes clips of 9 frames: expected 9", require_made, 8,
            torch.zeros(1, 9, 3, 4, 4), object())
    require_made(9, torch.zeros(1, 9, 3, 4, 4), object())


@pytest.fixture(scope="module")
def estimates(tmp_path_factory):
    """Dry runs of a tiny Wan without eval.frames, and with more of them."""
    pipe, call = make(WAN)
    pipe = pipe.to(torch.bfloat16)
    own = call["num_frames"]
    usual = dict(precision="bf16", eval__steps=7, eval__prompts=6, train__micro_batch=2)
    return [dry_run(settings(tmp_path_factory.mktemp("dry"), count, **usual), pipe=pipe)
            for count in (None, own, own + 8)]


def test_the_dry_run_has_the_evaluation_as_a_phase_beside_the_epoch(estimates):
    plain, same, longer = estimates
    assert "evaluation" not in plain.phases
    assert [*longer.phases][-1] == "evaluation" and plain.seconds == same.seconds == longer.seconds
    assert longer.phases["evaluation"].allocated > same.phases["evaluation"].allocated > 0
    assert longer.phases["evaluation"].seconds > same.phases["evaluation"].seconds > 0
    needed = longer.phases["evaluation"].allocated
    assert "evaluation" in longer.above(needed - 1) and longer.peak >= needed


def test_the_cost_of_an_evaluation_is_that_of_its_steps(tmp_path):
    """Twice the steps add as much as the steps themselves: cost(13) - cost(7) = cost(7) - cost(1)."""
    pipe, call = make(WAN)
    pipe = pipe.to(torch.bfloat16)
    costs = [dry_run(settings(tmp_path, call["num_frames"], precision="bf16", eval__steps=steps, eval__prompts=6,
                              train__micro_batch=2), pipe=pipe).phases["evaluation"].flops for steps in (1, 7, 13)]
    assert costs[2] - costs[1] == pytest.approx(costs[1] - costs[0]) and costs[1] > costs[0] > 0


@pytest.mark.parametrize("name, count, expected", [
    (WAN, 4, "image.frames is 4, but WanPipeline takes 1 more than a multiple of 2: expected 3"),
    (WAN, 6, "image.frames is 6, but WanPipeline takes 1 more than a multiple of 2: expected 5 or 7"),
    ("LTXPipeline", 8, "image.frames is 8, but LTXPipeline takes 1 more than a multiple of")])
def test_frames_of_training_are_those_that_the_pipeline_makes(name, count, expected, tmp_path):
    pipe = make(name)[0]
    for keys in ({"image__frames": count, "image__call": {}}, {"image__call": {"num_frames": count}}):
        refused(expected, options.check_frames, loop.setup(settings(tmp_path, None, **keys), "pipeline", loaded=pipe))
    later = settings(tmp_path, None, phases=[{"at": 0.5, "set": {"image.frames": count}}])
    refused(r"phases\[0\].set " + expected, Phases.require_model, loop.setup(later, "pipeline", loaded=pipe))

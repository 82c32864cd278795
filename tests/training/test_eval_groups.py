"""Held-out evaluation of rewards that compare a group, what tells a reward training from evaluation, and no evaluation.
"""

from __future__ import annotations

import json

import pytest

from flowgrpo import rewards
from flowgrpo.config import validate
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.rewards.pairwise import held_out_rewards
from flowgrpo.run import run
from tests.helpers import tiny


class Ranked:
    """Rank of each image's red within its group, 0 to 1, and how it was called."""

    def __init__(self):
        self.calls = []

    def __call__(self, images, prompts, metadata, group, training=False):
        assert len(images) % group == 0
        self.calls.append((group, training))
        assert all(len({*prompts[start:start + group]}) == 1 for start in range(0, len(prompts), group))
        red = images[:, 0].flatten(1).mean(1).unflatten(0, (-1, group))
        return (red.argsort(1).argsort(1).flatten() / max(group - 1, 1)).tolist()


def go(folder, functions, **options):
    config = tiny.config(folder, **dict(train__epochs=1, held_out=0.5, eval__prompts=3) | options)
    return config, run(config, pipe=tiny.sd3(), functions=functions, prompts=[Prompt(text) for text in tiny.PROMPTS])


@pytest.mark.parametrize("rows", [2, 8])
def test_a_reward_of_groups_is_measured_on_the_images_of_a_prompt(tmp_path, rows):
    """In micro-batches that end within a group too."""
    ranked = Ranked()
    config, summary = go(tmp_path, {"ranked": ranked}, reward="ranked", eval__samples=3, train__micro_batch=rows,
                         train__group=4)
    assert summary["before"] == summary["after"] == {"ranked": 0.5}
    scores = json.loads((config.folder / "before.json").read_text())["scores"]["ranked"]
    assert [sorted(scores[start:start + 3]) for start in (0, 3, 6)] == [[0, 0.5, 1]] * 3
    assert {(group, training) for group, training in ranked.calls} >= {(4, True), (3, False)}
    assert all(training == (group == 4) for group, training in ranked.calls[1:])  # the first one is a trial


def test_what_cannot_be_measured_is_refused_with_the_ways_out():
    def grouped(images, prompts, metadata, group):
        return [0.0] * len(images)
    def pairs(first, second, prompts):
        return [1.0] * len(first)
    assert held_out_rewards({"g": grouped}, {}, 2) == {"g": grouped}
    assert held_out_rewards({"p": pairs}, {"g": grouped}, 2) == {"g": grouped}
    with pytest.raises(UserError, match="no groups: expected .* one image at a time, eval.samples of 2 or more, which "
                                        "are then a group, or eval.prompts: 0 for no evaluation$"):
        held_out_rewards({"g": grouped}, {})
    with pytest.raises(UserError, match="one image at a time$"):
        held_out_rewards({}, {"p": pairs}, 2)


def test_a_reward_knows_whether_its_samples_are_trained_on():
    seen = []
    def voter(images, prompts, training: bool):
        seen.append(training)
        return [0.0] * len(images)
    import torch
    rewards.score({"voter": voter}, torch.rand(2, 3, 8, 8), ["a"] * 2, [{}] * 2)
    rewards.score({"voter": voter}, torch.rand(2, 3, 8, 8), ["a"] * 2, [{}] * 2, training=True)
    assert seen == [False, True]
    assert not rewards.remembers({"voter": voter})


def test_an_evaluation_can_be_left_out(tmp_path):
    ranked = Ranked()
    config, summary = go(tmp_path, {"ranked": ranked}, reward="ranked", eval__prompts=0, train__group=4)
    assert {group for group, _ in ranked.calls} == {4}
    assert summary["before"] == summary["after"] == {} and summary["evaluation"]["prompts"] == 0
    assert (config.folder / "report.html").is_file() and not summary["trained"]["nothing"]


@pytest.mark.parametrize("given, told", [({"every": 5}, "every is 5, and prompts is 0, so that nothing is measured"),
                                         ({"rewards": ["scene"]}, "rewards is .'scene'., and prompts is 0")])
def test_what_an_evaluation_without_prompts_would_not_read_is_refused(given, told):
    with pytest.raises(UserError, match=told):
        validate({"eval": {"prompts": 0, **given}})

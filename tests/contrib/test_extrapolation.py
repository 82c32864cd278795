"""Extrapolation of a LoRA's path: the fit by known curves, jumps, and jumps that are taken back."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowgrpo.contrib import extrapolation as extrapolation
from flowgrpo.errors import UserError
from flowgrpo.training import extensions
from flowgrpo.training.epoch import Epoch
from tests.helpers import loop, tiny, tiny_runs, tiny_text
from tests.helpers.tiny_runs import next_epochs


def saturating(epochs: int, rate: float, noise: float = 0.0) -> torch.Tensor:
    """Weights [epochs + 1, 30] along 5 (1 - exp(-rate t)) of one direction, and noise."""
    generator = torch.Generator().manual_seed(0)
    first, direction = torch.randn(2, 30, dtype=torch.float64, generator=generator)
    size = 5 * (1 - torch.exp(-rate * torch.arange(epochs + 1)))
    spread = torch.randn(epochs + 1, 30, dtype=torch.float64, generator=generator)
    return first + size[:, None] * direction / direction.norm() + noise * spread


def test_paths_of_rank_one_and_lines_go_on():
    path = saturating(6, 0.3)
    c, u = extrapolation.rank_one(path)
    torch.testing.assert_close(c[:, None] * u, path - path[0])
    assert c[-1] > 0 and u.norm().item() == pytest.approx(1)
    still, none = extrapolation.rank_one(path[:1].expand(4, -1))
    assert not still.any() and not none.any()
    c = torch.arange(9, dtype=torch.float64) * 0.7
    assert extrapolation.growth(c, 4) == pytest.approx(4 * 0.7, rel=0.02)


@pytest.mark.parametrize("rate, noise", [(0.3, 0.0), (0.3, 0.02), (0.1, 0.0), (0.8, 0.02)])
def test_a_curve_is_nearer_to_a_path_that_saturates_than_a_line(rate, noise):
    path, ahead = saturating(8, rate, noise), 6
    target = saturating(8 + ahead, rate)[-1]
    c, u = extrapolation.rank_one(path)
    curve = path[-1] + extrapolation.growth(c, ahead) * u
    t = torch.arange(9, dtype=torch.float64)
    line = path[-1] + ahead * ((t @ c) / (t @ t)) * u
    assert (curve - target).norm() < 0.5 * (line - target).norm()
    assert noise or (curve - target).norm() < 0.05


def run(rewards: list[float], **options):
    """A trainer whose epochs have these mean rewards; it jumps by 3 epochs after 2."""
    made = tiny_text.trainer(train__extrapolate=3, train__extrapolate_every=2, train__epochs=8, **options)
    made.lines = []
    made.log = made.lines.append
    jumping: Any = loop.extension(made, "Extrapolation")
    see = jumping.on_drawn
    def given(epoch: Epoch) -> None:
        see(Epoch(SimpleNamespace(totals=torch.full_like(epoch.groups.totals, rewards[made.epoch]))))
    jumping.on_drawn = given
    return made


def test_a_jump_that_lowers_the_reward_is_taken_back():
    made = run([0.1, 0.2, 0.3, 0.25, 0.3, 0.3, 0.3])
    assert [line["extrapolation"] for line in next_epochs(made, 3)] == [0, 0, 1]
    before, jumped = loop.extension(made, "Extrapolation").held, made.policy.weights.snapshot()
    assert any(not torch.equal(before[key], jumped[key]) for key in before)
    assert next_epochs(made, 1)[0]["extrapolation"] == -1
    tiny_runs.assert_same_weights(made, before)
    assert [line for line in made.lines if "restored" in line] == [
        "epoch 4: reward 0.25 after an extrapolation, 0.3 before it: its weights are restored"]
    assert [line["extrapolation"] for line in next_epochs(made, 3)] == [0, 0, 1]


@pytest.mark.fast
def test_jumps_are_kept_or_not():
    made = run([0.1, 0.2, 0.3, 0.3, 0.3, 0.3])
    assert [line["extrapolation"] for line in next_epochs(made, 6)] == [0, 0, 1, 0, 0, 1]
    assert not any("restored" in line for line in made.lines)
    assert "Extrapolation" not in loop.names(tiny_text.trainer())


def test_a_jump_is_that_of_every_weight_along_its_own_path():
    made, plain = run([0.1] * 3), tiny_text.trainer(train__epochs=8)
    path = []
    for _ in range(3):
        next_epochs(plain, 1)
        path.append(plain.policy.weights.snapshot())
    next_epochs(made, 3)
    for key, tensor in made.policy.weights.snapshot().items():
        values = torch.stack([snapshot[key] for snapshot in path])
        c, u = extrapolation.rank_one(values.flatten(1))
        expected = values[-1] + (extrapolation.growth(c, 3) * u).view(tensor.shape).float()
        torch.testing.assert_close(tensor, expected)


@pytest.mark.parametrize("done", [2, 3])
def test_a_resumed_run_jumps_and_takes_back_alike(done, tmp_path):
    tiny_runs.assert_resumes(lambda: run([0.1, 0.2, 0.3, 0.2, 0.3]), tmp_path, done, 5 - done)


@pytest.mark.parametrize("options, named", [
    ({"adapter__rank": 0}, "adapter.rank: 0"), ({"train__staleness": 1}, "train.staleness"),
    ({"memory__shard": True}, "memory.shard")])
def test_what_cannot_be_extrapolated_is_refused(options, named):
    with pytest.raises(UserError, match=f"train.extrapolate is 3, which does not go with {named}"):
        extensions.require(extrapolation.Extrapolation, loop.setup(tiny.config(train__extrapolate=3, **options)))


def test_a_jump_is_behind_all_else_of_its_epoch_and_the_next_reference_behind_it():
    parts = {"advantage": {"type": "ValueTracker"}, "reference": {"type": "PreviousPolicy", "every": 1},
             "kl": {"weight": 0.5}}
    made, plain = run([0.1] * 3, parts=parts), tiny_text.trainer(train__epochs=8, parts=parts)
    for each in (made, plain):
        next_epochs(each, 3)
    [held] = made.kl_reference.snapshots
    tiny_runs.assert_same_weights(made, held)
    assert any(not torch.equal(held[key], tensor) for key, tensor in plain.policy.weights.snapshot().items())
    assert made.memory["drift"] == plain.memory["drift"] > 0  # of the update alone

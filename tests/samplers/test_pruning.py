"""Samples that are begun and not finished: which go on, what they cost, and that their decisions are what was drawn."""

from __future__ import annotations

import pytest
import torch

from flowgrpo.errors import UserError
from flowgrpo.methods import validate
from flowgrpo.samplers.preview import Pruning
from flowgrpo.training import sampling
from tests.helpers import tiny_runs

PRUNED = {"pruning": {"type": "Pruning", "pool": 7, "step": 2}, "roots": None}


def made(host: str = "flow_grpo", kind: str = "flow", **parts):
    return tiny_runs.trainer(kind, tiny_runs.config(kind, host, PRUNED | parts, train__steps=4,
                                                    train__micro_batch=4))


def test_the_best_and_the_worst_go_on():
    scores = torch.tensor([[0.3, 0.9, 0.1, 0.5, 0.7], [5.0, 4.0, 3.0, 2.0, 1.0]])
    assert Pruning(5).chosen(scores, 2).tolist() == [[1, 2], [0, 4]]
    assert Pruning(5).chosen(scores, 4).tolist() == [[0, 1, 2, 4], [0, 1, 3, 4]]


@pytest.mark.parametrize("right, places", [
    ([1, 1, 1, 1, 0, 1, 0, 1], [0, 1, 4, 6]), ([1, 1, 1, 1, 0, 1, 1, 1], [0, 1, 2, 4]),
    ([0, 0, 0, 0, 0, 1, 0, 0], [0, 1, 2, 5]), ([1] * 8, [0, 1, 2, 3]), ([0] * 8, [0, 1, 2, 3])])
def test_successes_and_failures_are_balanced(right, places):
    scores = torch.tensor([right], dtype=torch.float32)
    assert Pruning(8, right=0.5).chosen(scores, 4).tolist() == [places]


@pytest.mark.parametrize("kind, host, parts", [
    ("flow", "flow_grpo", {}), ("flow", "mix_grpo", {"plan": {"size": 2}}), ("vp", "ddpo", {"advantage": {"least": 4}}),
    ("flow", "mix_grpo", {"plan": {"size": 1}, "solver": {"type": "DPMSolver2M"}})])
def test_what_goes_on_is_what_was_begun(kind, host, parts):
    """The samples are those of a whole rollout of the pool, and the first ratio is 1."""
    trainer = made(host, kind, **parts)
    [part, _], conditioning, _ = sampling.sample(trainer, trainer.prompts[:2])
    whole = tiny_runs.trainer(kind, tiny_runs.config(kind, host, {"roots": None} | parts, train__steps=4,
                                                     train__group=7, train__micro_batch=7))
    pool = sampling.sample(whole, whole.prompts[:2])[0][0]
    of = [pool.seeds.tolist().index(seed) for seed in part.seeds.tolist()]
    assert len(set(of)) == 4
    torch.testing.assert_close(part.finals[0], pool.finals[0][of], rtol=1e-4, atol=1e-4)
    for taken, among in zip(part.transitions, pool.transitions):
        torch.testing.assert_close(taken.x_next, among.x_next[of], rtol=1e-4, atol=1e-4)
    for k, rows, new in trainer.rollouts.replay(part, conditioning):
        torch.testing.assert_close(new.logp, part.transitions[k].old.logp[rows], rtol=0, atol=1e-5)


def test_those_that_stop_cost_the_steps_before_and_a_look():
    trainer = made()
    sampling.sample(trainer, trainer.prompts[:2])
    assert trainer.rollouts.rollout_evaluations == 2 * (7 * (2 + 1) + 4 * 2)


def test_the_predictions_decide_by_the_runs_reward():
    trainer = made()
    trainer.scoring.functions["score"] = lambda images, prompts: torch.arange(len(images)) % 7  # of a pool, its last
    [part, _], _, _ = sampling.sample(trainer, trainer.prompts[:2])
    seed = trainer.rollouts.seeds(0, 0, 2)
    assert part.seeds.tolist() == [seed(0, sample) for sample in (0, 1, 5, 6)]


def test_a_run_with_pruning_and_progress_trains():
    trainer = made("diffusion_nft")
    assert tiny_runs.epochs(trainer, 1)[0]["clip_fraction"] == 0
    trainer = made(progress={"type": "Progress"})
    [metrics] = tiny_runs.epochs(trainer, 1)
    assert trainer.first_ratio.max_log_ratio < 1e-6 and metrics["grad_norm"] > 0


@pytest.mark.parametrize("parts, message", [
    ({"pruning": {"type": "Pruning", "pool": 3}, "roots": None}, "expected at least the group of 4"),
    ({"pruning": {"type": "Pruning", "step": 6}, "roots": None}, "step is 6, expected at most 5 of 6 steps"),
    ({"pruning": {"type": "Pruning"}, "roots": 1}, "pruning begins samples that share no state")])
def test_what_does_not_go_together_is_refused(parts, message):
    with pytest.raises(UserError, match=message):
        validate.resolve(tiny_runs.config("flow", "flow_grpo", parts), "flow")

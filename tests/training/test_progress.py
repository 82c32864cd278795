"""Credit of steps by their clean predictions, and the deterministic sample as a baseline, on a tiny pipeline."""

import pytest
import torch

from flowgrpo.advantages import group_relative
from flowgrpo.samplers import rollout
from flowgrpo.samplers.kernels import predict_x0, x0_from_noise
from flowgrpo.training import sampling
from tests.helpers import loop, tiny_runs

PROGRESS = {"progress": {"type": "Progress", "weight": 2.0}}


def made(method: str = "flow_grpo", kind: str = "flow", **parts):
    return tiny_runs.trainer(kind, tiny_runs.config(kind, method, parts, train__steps=4))


@pytest.mark.parametrize("kind, host, parts", [
    ("flow", "flow_grpo", {}), ("flow", "mix_grpo", {"plan": {"size": 2}}), ("flow", "dance_grpo", {}),
    ("flow", "branch_grpo", {"plan": {"splits": [0, 2]}}), ("vp", "ddpo", {"advantage": {"least": 4}}),
    ("flow", "flow_grpo", {"kernel": {"type": "CPS", "level": 0.8}})])
def test_predictions_are_scored_before_every_trained_step(kind, host, parts):
    trainer = made(host, kind, **PROGRESS, **parts)
    made_parts, conditioning, _ = sampling.sample(trainer, trainer.prompts[:2])
    for part in made_parts:
        assert part.measured["predicted"].shape == (len(part.prompts), len(part.transitions))
        for k, taken in enumerate(part.transitions):
            rows, grid = conditioning.rows(taken.prompts), part.exploration.grid
            with torch.no_grad():
                v = trainer.policy.replay(rows, taken.x, grid, taken.step, trainer.rollouts.timesteps)
            clean = (predict_x0 if kind == "flow" else x0_from_noise)(taken.x, v, grid[taken.step])
            expected = tiny_runs.score(trainer.rollouts.decode(clean, rows), rows.prompts)
            leaves = expected.repeat_interleave(len(part.prompts) // len(taken.x))
            torch.testing.assert_close(part.measured["predicted"][:, k], leaves, rtol=1e-4, atol=1e-4)
            assert taken.clean is None


def test_a_steps_advantage_compares_the_reward_and_its_progress():
    trainer = made(advantage={"scale": "none", "order": "rewards", "clamp": 100.0}, roots=None, **PROGRESS)
    parts, conditioning, scores = sampling.sample(trainer, trainer.prompts[1:3])
    predicted = torch.cat([part.measured["predicted"] for part in parts]).unflatten(0, (2, 4)).float()
    credited = loop.credit(trainer, parts, scores, conditioning.prompts)
    values = torch.cat([predicted, scores], 2)
    for k in range(3):
        expected = group_relative(scores[..., 0] + 2 * (values[..., k + 1] - values[..., k]), "none")
        found = torch.cat([part.advantages[k] for part in credited])
        torch.testing.assert_close(found, expected.flatten(), rtol=1e-4, atol=1e-5)
    assert expected.abs().max() > 1e-4


def test_a_weight_of_nothing_is_the_method_without():
    plain, weighted = (made(**parts) for parts in ({}, {"progress": {"type": "Progress", "weight": 0.0}}))
    for trainer in (plain, weighted):
        tiny_runs.epochs(trainer, 1)
    tiny_runs.assert_same_weights(plain, weighted)


# --- the deterministic sample as a baseline --------------------------------------------------------------------------
def euler(trainer, x, conditioning, grid):
    for step, delta in enumerate((grid[:-1] - grid[1:]).float()):
        with torch.no_grad():
            x = x - delta * trainer.policy.replay(conditioning, x, grid, step)
    return x


@pytest.mark.parametrize("roots", [1, None])
def test_the_baseline_is_the_odes_sample_from_the_same_noise(roots):
    trainer = made(advantage={"type": "SameNoise"}, roots=roots)
    parts, conditioning, scores = sampling.sample(trainer, trainer.prompts[1:3])
    for part in parts:
        first = part.transitions[0]
        assert first.step == 0
        starts = first.x.repeat_interleave(len(part.prompts) // len(first.x), 0)
        rows = conditioning.rows(part.prompts)
        expected = tiny_runs.score(trainer.rollouts.decode(euler(trainer, starts, rows, part.exploration.grid), rows),
                                   rows.prompts)
        baseline = part.measured["baseline"]
        torch.testing.assert_close(baseline, expected.to(baseline), rtol=1e-4, atol=1e-5)
    credited = loop.credit(trainer, parts, scores, conditioning.prompts)
    gains = scores[..., 0].flatten() - torch.cat([part.measured["baseline"] for part in parts])
    torch.testing.assert_close(torch.cat([part.advantages[-1] for part in credited]), gains, rtol=1e-4, atol=1e-5)


def test_a_sample_without_noise_has_no_advantage(monkeypatch):
    monkeypatch.setattr(rollout, "LEAST", 0.0)  # else a run refuses so little noise
    trainer = made(advantage={"type": "SameNoise"}, roots=None, kernel={"level": 1e-4})
    parts, conditioning, scores = sampling.sample(trainer, trainer.prompts[1:3])
    credited = loop.credit(trainer, parts, scores, conditioning.prompts)
    assert max(part.advantages[0].abs().max() for part in credited) < 1e-3

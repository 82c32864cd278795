"""LayerTuning: clip bounds that adapt to the advantage, and the pull towards the best path of a group."""

import math

import pytest
import torch

from flowgrpo.objectives.supervised import LayerTuning
from flowgrpo.objectives.surrogates import AdaptiveClip, Clip
from flowgrpo.training import sampling
from flowgrpo.training.credit import towards_best
from flowgrpo.training.metrics import UpdateStats
from flowgrpo.training.optimizer import decisions
from flowgrpo.types import RegressionTarget, Scored
from tests.helpers import loop, tiny, updates
from tests.helpers.tables import f64

F64 = torch.float64


# --- the clip --------------------------------------------------------------------------------------------------------
def test_the_adaptive_clip_by_hand():
    # sigmoid(log 3) = 3/4 and sigmoid(-log 3) = 1/4: of a good sample r is within 1 - 0.15 and 1 + 0.25, of a bad one
    # within 1 - 0.25 and 1 + 0.15.
    clip, good, bad = AdaptiveClip(0.1, 0.3), math.log(3), -math.log(3)
    ratios = f64([[0.7, 0.8, 1.2, 1.26, 2.0]])
    log_ratio = ratios.log()
    expected = -good * f64([[0.7, 0.8, 1.2, 1.25, 1.25]])
    torch.testing.assert_close(clip(log_ratio, f64([[good]])), expected, rtol=0, atol=1e-10)
    assert clip.clip_mask(log_ratio, f64([[good]])).tolist() == [[False, False, False, True, True]]
    torch.testing.assert_close(clip(log_ratio, f64([[bad]])), -bad * f64([[0.75, 0.8, 1.2, 1.26, 2.0]]), rtol=0,
                               atol=1e-10)
    assert clip.clip_mask(log_ratio, f64([[bad]])).tolist() == [[True, False, False, False, False]]


def test_both_bounds_follow_the_advantage_over_a_table():
    lowest, highest = AdaptiveClip(0.1, 0.3).bounds(f64([[-50], [-math.log(3)], [0], [math.log(3)], [50]]), None)
    torch.testing.assert_close(lowest[:, 0], f64([-0.3, -0.25, -0.2, -0.15, -0.1]), rtol=0, atol=1e-12)
    torch.testing.assert_close(highest[:, 0], f64([0.1, 0.15, 0.2, 0.25, 0.3]), rtol=0, atol=1e-12)


def test_every_row_has_its_own_bound_between_low_and_high():
    advantage = f64([[0.0], [0.5], [1.0], [5.0]])
    far = torch.full((4, 2), 3.0, dtype=F64).log()
    bound = -AdaptiveClip(0.1, 0.3, sensitivity=2.0)(far, advantage) / advantage - 1
    expected = [0.1 + 0.2 / (1 + math.exp(-2 * a)) for a in (0.5, 1.0, 5.0)]
    torch.testing.assert_close(bound[1:], f64(expected)[:, None].expand(3, 2), rtol=0, atol=1e-10)
    assert 0.1 < expected[0] < expected[1] < expected[2] < 0.3


def test_without_a_range_it_is_the_plain_clip():
    noise = torch.Generator().manual_seed(0)
    log_ratio, advantage = torch.randn(2, 50, 1, generator=noise, dtype=F64) * torch.tensor([[[0.2]], [[1.0]]])
    for part in (AdaptiveClip(0.1, 0.1, 3.0), AdaptiveClip(0.0, 0.2, 0.0)):
        plain = Clip((part.low + part.high) / 2, (part.low + part.high) / 2)
        torch.testing.assert_close(part(log_ratio, advantage), plain(log_ratio, advantage), rtol=0, atol=1e-12)
        assert torch.equal(part.clip_mask(log_ratio, advantage), plain.clip_mask(log_ratio, advantage))


# --- the pull --------------------------------------------------------------------------------------------------------
def test_the_pull_by_hand():
    # Two rows of two values; means 1 and 2 off over a slope of -1/2: outputs 2 and 4 off, squares 4 and 16, mean 10.
    new = Scored(torch.zeros(2, 1, dtype=F64), torch.ones(2, 1, dtype=torch.bool), f64([[[1, 2]], [[0, 0]]]), f64([1]),
                 f64([-0.5]))
    regression_target = RegressionTarget(f64([[[0, 0]], [[0, 0]]]), f64([[1.5], [2.0]]))
    found = LayerTuning(0.1)(new, regression_target)
    torch.testing.assert_close(found, f64([[0.1 * 1.5 * 10], [0.0]]), rtol=0, atol=1e-12)
    torch.testing.assert_close(LayerTuning(0.1)(new, regression_target.rows(slice(0, 1)))[0, 0], f64(1.5))


def test_progress_divides_the_best_advantage_over_the_depths_of_the_tree():
    """Eight leaves of a binary tree: means below the path to leaf 5 are 0, 1, 2.5, 4; a path that falls gains nothing.
    """
    advantages = f64([[-2, 0, -1, -1, 1, 4, 0, -1], [5, -5, -3, 0, 3, 0, 0, 0]])
    part = LayerTuning(1.0, by="progress")
    gains = torch.stack([part.weights(advantages, edges, edges // 2) for edges in (2, 4, 8)])
    torch.testing.assert_close(gains, f64([[1, 0], [1.5, 0.75], [1.5, 5]]), rtol=0, atol=1e-12)
    assert gains[:, 0].sum() == advantages[0].max() and (part.weights(advantages, 8, 8) == 0).all()
    assert LayerTuning(1.0).weights(advantages, 2, 1).tolist() == [4, 5]


def test_the_preset_pulls_by_progress():
    trainer = made()
    parts, conditioning, _ = sampling.sample(trainer, trainer.prompts[:2])
    rewards = torch.zeros(2, 16)
    rewards[0, 4:8], rewards[0, 5] = 1.0, 2.0
    [part] = loop.credit(trainer, parts, rewards[..., None], conditioning.prompts)
    gained = [taken.regression_target.weight[0, 0].item() for taken in part.transitions]
    # Means below the path to leaf 5: 5/16, 5/8, 5/4, 3/2, 2.
    std = rewards[0].std().item()
    assert gained == pytest.approx([5 / 16 / std, 5 / 8 / std, 1 / 4 / std, 1 / 2 / std], rel=1e-4)
    assert all((taken.regression_target.weight[-1] == 0).all() for taken in part.transitions)


def made(**options):
    """A trainer of tree_rpo on the tiny SD3, one tree of 16 leaves per prompt, its weights off their start. The
    supervised term's weight is larger than the preset's, for numbers above rounding."""
    options = {"parts__tuning__weight": 0.01} | options
    trainer = tiny.trainer(method="tree_rpo", train__group=16, train__micro_batch=32, **options)
    tiny.stir(trainer.policy)
    return trainer


def outputs(trainer, part, conditioning, taken) -> torch.Tensor:
    """The model's outputs on the states of one step, [n,*D]."""
    with torch.no_grad():
        return trainer.policy.replay(conditioning.rows(taken.prompts), taken.x, trainer.rollouts.grid, taken.step)


def test_the_pull_is_the_distance_to_the_old_output_on_the_best_path():
    trainer = made()
    parts, conditioning, _ = sampling.sample(trainer, trainer.prompts[:2])
    advantages = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    [part] = [towards_best(part, advantages, LayerTuning(0.01)) for part in parts]
    old = [outputs(trainer, part, conditioning, taken) for taken in part.transitions]
    tiny.stir(trainer.policy, 0.05)
    best, weight = advantages.argmax(1), advantages.max(1).values
    found = {k: trainer.method.target.tuning(new, part.transitions[k].regression_target.rows(rows))
             for k, rows, new in trainer.rollouts.replay(part, conditioning)}  # 32 rows hold each step in one batch
    for k, taken in enumerate(part.transitions):
        edges = len(taken.parent) // 2
        v = outputs(trainer, part, conditioning, taken)[taken.parent]
        star = torch.stack([old[k][taken.parent[group * edges + best[group] * edges // 16]] for group in range(2)])
        expected = (v - star.repeat_interleave(edges, 0)).square().flatten(1).mean(1)
        torch.testing.assert_close(found[k][:, 0].detach(), 0.01 * weight.repeat_interleave(edges) * expected,
                                   rtol=1e-3, atol=1e-6)


def test_on_the_best_path_itself_nothing_pulls_before_the_first_update():
    trainer = made()
    parts, conditioning, _ = sampling.sample(trainer, trainer.prompts[:2])
    advantages = torch.zeros(2, 16)
    advantages[0, 5], advantages[1] = 2.0, -1.0
    [part] = [towards_best(part, advantages, LayerTuning(0.01)) for part in parts]
    for k, rows, new in trainer.rollouts.replay(part, conditioning):
        taken = part.transitions[k]
        edges = len(taken.parent) // 2
        pull = trainer.method.target.tuning(new, taken.regression_target.rows(rows))[:, 0].detach().view(2, edges)
        assert pull[0, 5 * edges // 16] < 1e-9 and (pull[1] == 0).all()  # the second group has nothing above 0
        siblings = (taken.parent[:edges] == taken.parent[5 * edges // 16]).nonzero().flatten()
        assert (pull[0, siblings] < 1e-9).all()  # they left the same state
        assert k == 0 or pull[0].max() > 1e-4


def test_training_goes_towards_the_best_path_when_only_the_pull_is_left():
    trainer = made(train__lr=1e-3, parts__tuning__weight=1.0)
    [part], conditioning = updates.credited(trainer)
    still = type(part)(**{**vars(part), "advantages": tuple(torch.zeros_like(a) for a in part.advantages)})
    def pull() -> float:
        with torch.no_grad():
            return sum(trainer.method.target.tuning(new, still.transitions[k].regression_target.rows(rows)).sum().item()
                       for k, rows, new in trainer.rollouts.replay(still, conditioning))
    found = [pull()]
    for _ in range(4):
        trainer.optimization.optimizer.zero_grad()
        weights = tiny.step_weights(trainer, [still])
        loop.backward(trainer, still, conditioning, weights, decisions([still]), UpdateStats())
        trainer.optimization.step()
        found.append(pull())
    assert found == sorted(found, reverse=True) and found[-1] < 0.97 * found[0]


def test_pruned_edges_have_no_goal_left():
    trainer = made(parts__selection={"type": "BestWorst", "n": 2})
    [part], conditioning = updates.credited(trainer)
    for taken in part.transitions:
        assert len(taken.regression_target.mean) == len(taken.regression_target.weight) == len(taken.parent) <= 4
    loop.backward(trainer, part, conditioning, tiny.step_weights(trainer, [part]), decisions([part]), UpdateStats())


def test_without_a_weight_no_goal_is_kept():
    [part], _ = updates.credited(made(parts__tuning__weight=0.0))
    assert all(taken.regression_target is None and taken.old.mean is None for taken in part.transitions)

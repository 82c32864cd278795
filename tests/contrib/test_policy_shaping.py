"""LUFFY's bounded ratio by hand: which samples have it, its value and its gradient."""

import math

import pytest
import torch

from flowgrpo.contrib.surrogates import PolicyShaping
from flowgrpo.objectives.surrogates import Clip, DivergenceMask, surrogate_input
from flowgrpo.types import Scored
from tests.helpers.refusals import message
from tests.helpers.tables import close, f64


def origin(part: PolicyShaping, new, old, guided=None, answers=None):
    """(log-ratio, what the loss reads) of probabilities [B, N]."""
    new, old = (Scored(f64(each).log(), torch.ones(len(each), len(each[0])).bool(),
                       guided=None if guided is None else torch.tensor(guided)) for each in (new, old))
    return new.logp - old.logp, surrogate_input(part, new, old, None if answers is None else torch.tensor(answers))


def test_the_bounded_ratio_and_its_gradient():
    part = PolicyShaping(Clip(0.2, 0.2), gamma=0.1)
    new, old = [[0.5, 0.1], [0.05, 0.9], [0.1, 0.4]], [[0.25, 0.2], [0.5, 0.1], [0.3, 0.3]]
    ratio, read = origin(part, new, old, [False, True, False], [False, False, True])
    # Own samples: r = 2 is clipped at 1.2, 0.5 is not for A > 0. Guided: r = 0.1 and 9. Answer: p = 0.1 and 0.4.
    close(part(ratio, f64([[1], [2], [-3]]), read), [[-1.2, -0.5], [-2 * 0.5, -2 * 9 / 9.1], [3 * 0.5, 3 * 0.8]])
    assert part.clip_mask(ratio, f64([[1], [1], [1]]), read).tolist() == [[True, False], [False] * 2, [False] * 2]
    half = PolicyShaping(gamma=0.1, probability=0.5)
    close(half(ratio, f64([[0], [0], [1]]), read)[2:], [[-0.2 / 0.3, -0.8 / 0.9]])
    assert (part.low, part.high) == (0.2, 0.2)
    part = PolicyShaping()
    ratios = torch.tensor([[0.01, 0.1, 1.0, 10.0]], dtype=torch.float64).log().requires_grad_()
    old = Scored(torch.zeros(1, 4, dtype=torch.float64), torch.ones(1, 4).bool(), guided=torch.tensor([True]))
    part(ratios, f64([[-1]]), surrogate_input(part, Scored(ratios, old.mask), old)).sum().backward()
    close(ratios.grad, [[0.1 * r / (r + 0.1) ** 2 for r in (0.01, 0.1, 1.0, 10.0)]])
    assert math.isclose(ratios.grad.max().item(), 0.25, abs_tol=1e-12)
    part = PolicyShaping(Clip(0.1, 0.1))
    ratio, read = origin(part, [[0.5]], [[0.25]])
    close(part(ratio, f64([[1]]), read), [[-1.1]])


@pytest.mark.parametrize("options", [{"gamma": 0.0}, {"probability": 0.0}, {"probability": 2.0},
                                     {"surrogate": PolicyShaping()}, {"surrogate": DivergenceMask()}])
def test_impossible_settings(options):
    assert "PolicyShaping: " in message(PolicyShaping, **options, error=ValueError)

"""The length term by hand, and in which groups it is switched on."""

import math

import pytest
import torch

from flowgrpo.text.credit import LengthSwitch, shortened
from flowgrpo.types import Context, SampleMeasures

REWARDS = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.float64)[..., None]
LENGTHS = torch.tensor([[10, 20, 30, 40], [10, 20, 30, 40], [10, 30, 5, 5]])


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def test_right_ones_earn_less_the_longer_they_are():
    found = shortened(REWARDS[..., 0], REWARDS[..., 0] == 1, LENGTHS, 0.2)
    z = 10 / (math.sqrt(200 / 3) + 1e-6)
    assert found[1].tolist() == pytest.approx([1 - 0.2 * sigmoid(-z), 0.9, 1 - 0.2 * sigmoid(z), 0], abs=1e-10)
    z = 10 / (10 + 1e-6)
    assert found[2].tolist() == pytest.approx([1 - 0.2 * sigmoid(-z), 1 - 0.2 * sigmoid(z), 0, 0], abs=1e-10)
    assert found[0].tolist() == pytest.approx([0.9, 0, 0, 0], abs=1e-10)  # alone with itself


@pytest.mark.parametrize("part, on", [
    (LengthSwitch(top=0.0), []), (LengthSwitch(top=1 / 3), [1]), (LengthSwitch(top=2 / 3), [1, 2]),
    (LengthSwitch(top=1.0), [0, 1, 2]), (LengthSwitch(top=1.0, least=0.5), [1, 2]),
    (LengthSwitch(top=1.0, least=0.75), [1]), (LengthSwitch(), [1]),
])
def test_groups_that_are_right_often_enough_have_it(part, on):
    found = part(REWARDS, Context(samples=SampleMeasures(lengths=LENGTHS)))
    changed = [i for i in range(3) if not torch.equal(found[i], REWARDS[i])]
    assert changed == on and (found[REWARDS == 0] == 0).all()
    whole = LengthSwitch(top=1.0)(REWARDS, Context(samples=SampleMeasures(lengths=LENGTHS)))
    assert all(torch.equal(found[i], whole[i]) for i in on)


def test_other_rewards_and_missing_ones_stay():
    both = torch.cat([REWARDS, REWARDS * 3], dim=2)
    both[1, 0, 0] = torch.nan
    found = LengthSwitch(top=1.0)(both, Context(samples=SampleMeasures(lengths=LENGTHS)))
    assert torch.equal(found[..., 1], both[..., 1]) and torch.equal(found.isnan(), both.isnan())
    assert found[1, 1, 0] == pytest.approx(1 - 0.2 * sigmoid(-5 / (5 + 1e-6)), abs=1e-10)  # 20 of 20 and 30


def test_impossible_shares():
    with pytest.raises(ValueError, match="LengthSwitch: top is 2"):
        LengthSwitch(top=2.0)

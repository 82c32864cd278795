"""Constraints: their multipliers by hand, a policy that ends at its limit, and their state in a run."""

import math

import pytest

from flowgrpo.config import validate
from flowgrpo.config.reward_rules import Limit
from flowgrpo.data.prompts import Prompt
from flowgrpo.training.announcement import lines
from flowgrpo.training.scoring import Limits
from tests.helpers import tiny_runs, tiny_text

NAN = math.nan


@pytest.mark.parametrize("limit, means, multipliers", [
    # 0 + 0.5 (0.3 - 0.1) = 0.1, then 0.2, then 0.2 - 0.5 * 0.1, then never below 0; a mean that is missing moves none.
    ({"at_most": 0.1, "rate": 0.5}, [0.3, 0.3, 0.0, NAN, -1.0, 0.1], [0.1, 0.2, 0.15, 0.15, 0.0, 0.0]),
    ({"at_least": 0.8, "rate": 1, "start": 1}, [0.3, 1.0, 2.5], [1.5, 1.3, 0.0])])
def test_a_multiplier_by_hand(limit, means, multipliers):
    limits = Limits({"cost": Limit(**limit)}, {})
    for mean, expected in zip(means, multipliers):
        assert limits.learn({"reward/cost/mean": mean})["limit/cost/multiplier"] == pytest.approx(expected)
        assert limits.multipliers == {"cost": pytest.approx(expected)}


def test_the_weights_are_those_of_the_lagrangian():
    """A = (2 A_R - 0.5 A_C + 1.5 A_L) / (1 + 0.5 + 1.5)."""
    limits = Limits({"cost": Limit(at_most=0, start=0.5), "least": Limit(at_least=0, start=1.5)}, {})
    assert limits.reward_weights({"good": 2.0, "cost": 0.0, "least": 0.0}) == pytest.approx(
        {"good": 2 / 3, "cost": -1 / 6, "least": 0.5})


def test_a_policy_of_two_arms_ends_at_its_limit():
    """The arm that is drawn with probability p has reward 1 and cost 1; without the limit p goes to 1."""
    limits, logit, seen = Limits({"cost": Limit(at_most=0.3, rate=0.1)}, {}), 0.0, []
    for _ in range(2000):
        p = 1 / (1 + math.exp(-logit))
        limits.learn({"reward/cost/mean": p})
        weights = limits.reward_weights({"good": 1.0, "cost": 0.0})
        logit += 0.2 * p * (1 - p) * (weights["good"] + weights["cost"])
        seen.append(p)
    assert max(seen) > 0.5 and sum(seen[1000:]) / 1000 == pytest.approx(0.3, abs=0.01)


def cost(completions, prompts):
    return [len(text) / 6 for text in completions]


def test_a_resumed_run_has_the_multipliers_of_an_unbroken_one(tmp_path):
    def arguments(folder, **options):
        config = tiny_text.config(folder, train__schedule="constant", train__warmup=0, reward={
            "short": 1.0, "cost": {"limit": {"at_most": 0.05, "rate": 1.0}}}, **options)
        return config, {"functions": {"short": tiny_text.short, "cost": cost}, "pipe": tiny_text.model(),
                        "prompts": [*map(Prompt, tiny_text.PROMPTS)]}
    whole, part = tiny_runs.whole_and_resumed(arguments, tmp_path)
    values, resumed = ([line["limit/cost/multiplier"] for line in tiny_runs.lines(folder)] for folder in (whole, part))
    assert resumed == values and values == sorted(values) and values[0] > 0 and len(set(values)) == 3
    assert "Multipliers of the limits" in (whole / "report.html").read_text()


def test_the_notation_of_a_recipe():
    config = validate({"reward": {"scene": 1.0, "safety": {"limit": {"at_most": 0.1}}}})
    assert config.rewards == {"scene": 1.0, "safety": 0.0} and validate(config.model_dump()) == config
    assert "rewards: scene (weight 1), safety (at most 0.1)" in list(lines(config))


"""Rule of the frontier on sequences made by hand: each prompt's score is a mean with a spread of its own."""

import math

import numpy as np
import pytest
from scipy import stats

from flowgrpo.contrib.frontier import LEVEL, Frontier, change, trained

SPREAD = np.array([-3.0, -1.0, 1.0, 3.0]) / 1000  # over prompts; that of every other measurement is turned


def scores(number: int, **means: float) -> dict[str, list[float]]:
    """Scores of four prompts around means, whose differences between measurements have a spread."""
    return {name: list(value + SPREAD[::(1, -1)[number % 2]]) for name, value in means.items()}


def kept(trained_means, gold_means, weights=None) -> int | None:
    """The number of the measurement that the rule keeps, the first value being the base's."""
    rule, chosen = Frontier(weights or {"red": 1.0}), None
    for number, (red, gold) in enumerate(zip(trained_means, gold_means, strict=True)):
        now = scores(number, red=red, gold=gold)
        if number == 0:
            rule.begin(now)
        elif rule.see(now)[0]:
            chosen = number
    return chosen


@pytest.mark.parametrize("red, gold, expected", [
    ([0, .2, .4, .6, .8], [.5, .6, .7, .8, .9], 4),  # no hacking: the last
    ([0, .2, .4, .6, .8], [.5, .6, .7, .4, .1], 2),  # the gold reward peaks (Gao et al., figure 1)
    ([0, .2, .4, .6, .8], [.5, .6, .7, .65, .6], 2),  # it peaks, and stays above the base
    ([0, .2, .4, .6, .8], [.5, .5, .5, .5, .5], 4),  # it does not change
    ([0, .2, .4, .6, .8], [.5, .7, .3, .8, .9], 4),  # it recovers
    ([0, .2, .4, .4, .4], [.5, .6, .7, .8, .9], 2),  # of equal trained rewards the nearest
    ([0, .2, .4, .3, .1], [.5, .6, .7, .8, .9], 2),  # the trained reward falls
    ([0, .2, .4, .6, .8], [.5, .1, .2, .3, .4], 1),  # below the base in all: the first
    ([0, -.2, -.1, 0, 0], [.5, .5, .5, .5, .5], 3),  # below the base in the trained reward
    ([0, math.nan, .4, math.nan, .5], [.5, .6, .7, .8, .9], 4),  # a trained reward without a score is never kept
    ([0, .2, .4, .6, .8], [.5, math.nan, .7, math.nan, .3], 3),  # an eval-only one without a score says nothing
    ([0, .2, .4, .6, .8], [math.nan, math.nan, .7, .4, .1], 2),  # first measured behind the base
    ([0, math.nan], [.5, .5], None),
])
def test_what_is_kept(red, gold, expected):
    assert kept(red, gold) == expected


def test_a_reward_that_is_to_fall_is_trained_by_its_weight():
    assert kept([0, -.2, -.4, -.3], [.5] * 4, {"red": -1.0}) == 2


def test_steps_that_show_no_gain_add_up():
    """Gains of .001 a measurement on prompts that differ by .006: the fourth is the first that can be shown."""
    moved = stats.ttest_1samp
    rule, chosen = Frontier({"red": 1.0}), []
    rule.begin(scores(0, red=0.0, gold=0.5))
    history = [scores(number, red=number * 0.0012, gold=0.5) for number in range(1, 9)]
    for number, now in enumerate(history, 1):
        if rule.see(now)[0]:
            chosen.append(number)
    expected, last = [1], history[0]
    for number, now in enumerate(history[1:], 2):
        difference = np.subtract(now["red"], last["red"])
        if difference.std() < 1e-12 or moved(difference, 0, alternative="greater").pvalue < LEVEL:
            expected.append(number)
            last = now
    assert chosen == expected and 1 < len(chosen) < 8


def test_a_slow_fall_adds_up():
    """Each step of the fall is a seventh of the noise of a mean, and no two measurements in a row differ by more than
    chance; the best one stays what they are compared with."""
    rng, rule, lost = np.random.default_rng(0), Frontier({"red": 1.0}), []
    golds = [0.5 - 0.0015 * number + rng.normal(0, 0.05, 25) for number in range(61)]
    for number, gold in enumerate(golds):
        now = {"red": [float(number)] * 25, "gold": list(gold)}
        if number:
            lost.append(bool(rule.see(now)[1]))
        else:
            rule.begin(now)
    assert not lost[0] and all(lost[-10:])
    steps = [stats.ttest_rel(one, other, alternative="greater").pvalue for one, other in zip(golds, golds[1:])]
    assert min(steps) > LEVEL / 60


def test_an_eval_only_reward_is_lost_to_report_only_with_a_gain():
    rule = Frontier({"red": 1.0})
    rule.begin(scores(0, red=0.0, gold=0.5))
    rule.see(scores(1, red=0.4, gold=0.5))
    assert rule.see(scores(2, red=0.2, gold=0.1)) == (False, [])
    assert rule.see(scores(3, red=0.6, gold=0.1)) == (False, ["gold"])


def simulated(golds, prompts: int, noise: float, runs: int = 60) -> np.ndarray:
    """The kept measurement of each run, whose trained reward and eval-only ones are curves with noise of each prompt.
    """
    rng, found = np.random.default_rng(0), []
    for _ in range(runs):
        rule, chosen = Frontier({"red": 1.0}), 0
        for number in range(len(DISTANCE)):
            now = {"red": list(TRAINED[number] + rng.normal(0, 0.1, prompts))} | {
                f"gold{place}": list(gold[number] + rng.normal(0, noise, prompts)) for place, gold in enumerate(golds)}
            if not number:
                rule.begin(now)
            elif rule.see(now)[0]:
                chosen = number
        found.append(chosen)
    return np.array(found)


DISTANCE = np.linspace(0, 10, 21)
TRAINED = 1 - np.exp(-DISTANCE / 4)
OF_GAO = np.concatenate([[0.0], DISTANCE[1:] * (1 - 0.45 * np.log(DISTANCE[1:]))])  # d (alpha - beta log d)
OF_GAO /= OF_GAO.max()


@pytest.mark.parametrize("prompts, noise, flat, share", [(64, 0.2, 0, 0.96), (64, 0.2, 2, 0.95), (64, 0.5, 0, 0.9),
                                                         (200, 0.2, 0, 0.98)])
def test_weights_near_the_peak_are_kept_on_the_curves_of_gao(prompts, noise, flat, share):
    """The gold reward's peak is 1, at measurement 7 of 20; it ends at -.24. flat: further rewards that stay."""
    kept = simulated([OF_GAO] + [np.zeros(21)] * flat, prompts, noise)
    assert OF_GAO.argmax() == 7 and OF_GAO[-1] < -0.2
    assert OF_GAO[kept].mean() > share and (kept < 13).all()


@pytest.mark.parametrize("count", [1, 3])
def test_eval_only_rewards_that_stay_cost_little_of_the_trained_one(count):
    kept = simulated([np.zeros(21)] * count, 64, 0.3)
    assert TRAINED[kept].mean() > 0.965 * TRAINED[-1]


def test_the_value_is_the_trained_reward_and_rises():
    rule, values = Frontier({"red": 1.0, "blue": 0.5}), []
    rule.begin(scores(0, red=0, blue=0, gold=.5))
    for number, (red, blue) in enumerate([(.2, .4), (.6, .4), (.6, .8)], 1):
        assert rule.see(scores(number, red=red, blue=blue, gold=.5))[0]
        values.append(rule.value)
    assert values == pytest.approx([.4, .8, 1.0])


def test_the_change_of_several_rewards_by_hand():
    nan, weights = math.nan, {"a": 1.0, "b": -2.0}
    before = {"a": [1, nan, nan, nan, 1], "b": [0, 3, nan, 1, 2]}
    now = {"a": [2, nan, nan, 5, 4], "b": [1, 2, nan, 1, nan]}
    # 1 - 2; b alone; none; a in one alone; b in one alone
    assert change(weights, before, now) == pytest.approx([-1, 2, nan, nan, nan], nan_ok=True)
    assert trained(weights, {"a": [1, nan, nan], "b": [1, 2, nan]}) == pytest.approx((-1 - 4) / 2)

"""The guard against collapse: its bounds by hand, planted spikes, returns to the bit, and resume."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from flowgrpo.contrib import guard
from flowgrpo.contrib.guard import Guard, snapshot
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation.looks import Looks
from flowgrpo.evaluation.measured import Measured
from flowgrpo.evaluation.report import report
from flowgrpo.methods.validate import resolve
from flowgrpo.run import run
from flowgrpo.training import extensions
from flowgrpo.training.checks import check
from tests.helpers import loop, tiny, tiny_runs, tiny_text
from tests.helpers.refusals import refused
from tests.helpers.tiny_runs import next_epochs
from tests.training.test_best import Aim, epochs, in_file, same, saved, weights_of

EPOCHS = 16
AT = 9  # the epoch with a spike, from 0


def made_with(score=None, **options):
    """A run of the tiny language model, guarded over 3 epochs, that keeps the lines it prints."""
    made = tiny_text.trainer(rewards={"short": score or tiny_text.short}, **dict(
        guard__window=3, guard__false_alarms=0.1, train__epochs=EPOCHS, train__ema=0.5, eval__weights="ema",
        train__prompts=6) | options)
    made.lines = []
    made.log = made.lines.append
    return made


def digits(completions, prompts):
    """Share of a completion's letters that are digits: 0 to 1, with a spread in every group."""
    return [sum(letter.isdigit() for letter in text) / 6 for text in completions]


def same_state(one, other) -> bool:
    return same(one.tensors, other.tensors)


def guard_of(made):
    return loop.extension(made, "Guard")


def spiked(factor: float, **options):
    """A run before epoch AT, whose gradient is multiplied."""
    made = made_with(digits, **options)
    def planted(update: int) -> None:
        if made.epoch == AT:
            for parameter in made.optimization.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
    loop.watch(made, on_gradients=planted)
    next_epochs(made, AT)
    return made


def test_a_huge_gradient_is_taken_back_only_with_a_guard():
    made = spiked(1e9)
    before, rate = snapshot(made), made.optimization.scale
    [line] = next_epochs(made, 1)
    assert line["grad_norm"] > 1e6 and line["guard/returns"] == 1
    assert same_state(snapshot(made), before) and made.optimization.scale == rate * 0.5
    assert made.lines[-1].startswith(f"epoch {AT + 1}: grad_norm is ") and made.lines[-1].endswith(
        f"so that the run went back to the weights of epoch {AT}, with 0.5 of the learning rate")
    assert next_epochs(made, 2)[-1]["guard/returns"] == 1 and not same_state(snapshot(made), before)
    made = spiked(1e9, guard__window=0, guard__false_alarms=0.01)
    before = snapshot(made)
    next_epochs(made, 1)
    assert not same_state(snapshot(made), before) and "Guard" not in loop.names(made)


def test_weights_that_are_not_finite_are_taken_back():
    made = made_with(digits)
    def planted() -> None:
        if made.epoch == 2:
            made.optimization.parameters[0].data.fill_(math.nan)
    loop.watch(made, on_stepped=planted)
    next_epochs(made, 2)
    before = snapshot(made)
    next_epochs(made, 1)
    assert same_state(snapshot(made), before) and made.lines == [
        "epoch 3: weights are not finite, so that the run went back to the weights of epoch 2, with 0.5 of the "
        "learning rate"]


def turning(epochs: range, **options):
    """A run whose reward is `digits` less 1 in some epochs."""
    made = made_with(lambda completions, prompts: [score - (made.epoch in epochs)
                                                   for score in digits(completions, prompts)], **options)
    return made


@pytest.mark.parametrize("bad", [range(AT, EPOCHS), range(AT, AT + 1)], ids=["turns negative", "one bad batch"])
def test_a_reward_that_falls_brings_the_good_weights_back_to_the_bit(bad):
    made = turning(bad)
    next_epochs(made, AT)
    good = guard_of(made).good
    assert guard_of(made).window and 3 <= good.epoch < AT and not made.lines
    [line] = next_epochs(made, 1)
    assert line["guard/returns"] == 1 and same_state(snapshot(made), good)
    assert made.lines[0].startswith(f"epoch {AT + 1}: the training reward fell from 0.") and \
        f"went back to the weights of epoch {good.epoch}, with" in made.lines[0]
    later = next_epochs(made, 2)[-1]["guard/returns"]
    assert later == (3 if len(bad) > 1 else 1) and same_state(snapshot(made), good) == (len(bad) > 1)


@pytest.mark.parametrize("kind", ["text", "image", "old policy"])
def test_a_run_without_spikes_is_bit_equal_to_one_without_a_guard(kind):
    options = {"image": dict(method="mix_grpo", parts={"plan": {"size": 2}}),
               "old policy": dict(method="diffusion_nft")}.get(kind)
    runs = []
    for window in (3, 0):
        if options is None:
            made = made_with(digits, guard__window=window, guard__false_alarms=0.01)
        else:
            made = tiny.trainer(guard__window=window, train__epochs=4, **options)
        lines = next_epochs(made, 5 if options is None else 3)
        assert all(line.pop("guard/returns", 0) == 0 for line in lines)
        runs.append((snapshot(made), [{key: value for key, value in line.items() if "second" not in key}
                                      for line in lines]))
    assert same_state(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]


@pytest.mark.parametrize("done", [2, AT - 1, AT + 1])
def test_a_resumed_run_is_the_same(done, tmp_path):
    """Before the band is full, before a return, and behind one."""
    made, other, _ = tiny_runs.assert_resumes(lambda: turning(range(AT, AT + 1)), tmp_path, done, 12 - done)
    assert same_state(snapshot(made), snapshot(other)) and same_state(guard_of(made).good, guard_of(other).good)
    assert guard_of(made).returns == guard_of(other).returns != []
    assert made.optimization.scale == other.optimization.scale == 0.5


def test_the_old_policy_goes_back_too():
    made = tiny.trainer(guard__window=2, train__epochs=8, method="diffusion_nft")
    next_epochs(made, 3)
    guard, good = guard_of(made), snapshot(made)
    next_epochs(made, 2)
    assert not same_state(snapshot(made), good) and any(key.startswith("old/") for key in good.tensors)
    guard._go_back(good, "a test")
    assert same_state(snapshot(made), good)


# --- held-out measurements -------------------------------------------------------------------------------------------
class Falling(Aim):
    """Means of PEAK as `Aim` has them, with a small spread over prompts that is the same in every evaluation."""

    def __call__(self, images, prompts):
        return [score + 0.001 * len(prompt) for score, prompt in zip(super().__call__(images, prompts), prompts)]


def guarded(folder, **options):
    return tiny.config(folder, **dict(
        train__epochs=8, train__lr=0.05, eval__every=1, eval__rewards=["aim"], eval__prompts=3, held_out=0.5,
        eval__samples=1, train__micro_batch=8, train__save_every=1, train__keep=20, guard__window=4,
        guard__reward="aim", guard__false_alarms=0.1) | options)


def go(config, aim, resume=False):
    return run(config, resume, pipe=tiny.sd3(), functions={"red": tiny.red, "aim": aim},
               prompts=[Prompt(text) for text in (*tiny.PROMPTS, "one more", "two")])


@pytest.fixture(scope="module")
def fallen(tmp_path_factory):
    config = guarded(tmp_path_factory.mktemp("runs"))
    return config, go(config, Falling())


def test_a_fall_goes_back_and_the_report_says_so(fallen):
    config, summary = fallen
    assert epochs(config.folder) == list(range(1, 9))
    best = weights_of(config.folder, 3)
    for epoch in (4, 6, 7, 8):  # .4, .2, .1 and 0, behind .9 in epoch 3
        assert same(weights_of(config.folder, epoch), best)
    assert same(saved(config.folder), in_file(config, 3))
    assert summary["kept"].startswith("kept the weights of epoch 3, the best by held-out aim (0.9")
    assert summary["kept"].count("held-out aim fell from 0.9") == 4
    found = report.data(config.folder)
    assert found["sentences"][1]["text"] == "K" + summary["kept"][1:] + "."
    assert "Returns to good weights" in [chart["title"] for chart in found["charts"]]
    assert [line["guard/returns"] for line in tiny_runs.lines(config.folder)] == [0, 0, 0, 1, 1, 2, 3, 4]


def test_a_run_may_end_with_its_last_weights(tmp_path):
    config = guarded(tmp_path, guard__best=False, train__epochs=5)
    summary = go(config, Falling())  # .9 again in epoch 5, behind a return
    assert not summary["kept"].startswith("kept") and same(saved(config.folder), in_file(config, 5))
    assert not same(saved(config.folder), in_file(config, 3))


def test_a_run_that_is_resumed_behind_a_return_ends_alike(fallen, tmp_path):
    config, summary = fallen
    again = guarded(tmp_path)
    with pytest.raises(UserError, match="fell over"):
        go(again, Falling(end=6))  # in the evaluation of epoch 6
    resumed = go(again, Falling(done=6), resume=True)
    assert same(saved(again.folder), saved(config.folder)) and resumed["kept"] == summary["kept"]


def test_the_reward_of_the_held_out_prompts():
    def by(**options):
        config = tiny.config(**options)
        return extensions.best_weights(config, resolve(config)).best.reward
    on = {"guard__window": 2, "eval__every": 1}
    assert by(guard__window=2) is None and by(**on) == "red"
    assert by(**on, reward={"a": 1.0, "b": 2.0}) == "b"
    assert by(**on, guard__reward="a") == "a" and by(**on, eval__best="c") == "c"
    assert by(**on, guard__best=False) is None
    assert by(eval__every=1) is None


# --- what it does not go with ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("options, named", [
    ({"train__staleness": 1}, "train.staleness"), ({"memory__shard": True}, "memory.shard"),
    ({"train__extrapolate": 2}, "train.extrapolate, which moves"), ({"phases": [{"at": 1, "set": {}}]}, "phases"),
    ({"parts": {"curriculum": {"type": "ThompsonSampling"}}}, "the curriculum ThompsonSampling, which chooses .* with"),
    ({"reward": {"red": {"limit": {"at_least": 0.5}}, "blue": 1.0}}, "a reward's limit, .* without eval.every")])
def test_what_it_does_not_go_with_is_refused(options, named):
    with pytest.raises(UserError, match=f"^guard.window is 2, which does not go with {named}.*leave one of them out$"):
        extensions.require(Guard, loop.setup(tiny.config(guard__window=2, **options)))


@pytest.mark.parametrize("options, told", [
    ({"guard__reward": "blue"}, "guard.reward names the reward 'blue', which is not measured: expected red"),
    ({"reward": {"red": -1.0}}, "guard.reward is 'red', whose weight is -1: expected a measured reward")])
def test_a_held_out_reward_that_cannot_guard_is_refused(options, told):
    with pytest.raises(UserError, match=told):
        extensions.check(loop.setup(tiny.config(guard__window=2, eval__every=1, **options), rewards={"red": tiny.red}))


@pytest.mark.parametrize("options, told", [
    ({"guard__lr": 0.1}, "guard.lr is 0.1, but guard.window is 0"),
    ({"guard__window": 2, "guard__best": False}, "guard.best is False, but eval.every is 0"),
    ({"guard__edge_width": 1.1}, "guard.edge_width is 1.1, but eval.every is 0"),
    ({"guard__edge_width": 1.1, "eval__every": 1, "guard__best": False}, "guard.best is False, but guard.window is 0")])
def test_keys_that_are_not_read_are_refused(options, told):
    refused(told, check, tiny.config(**options), pipe=tiny.sd3(), functions={"red": tiny.red},
            prompts=[Prompt(text) for text in tiny.PROMPTS])


# --- limits of looks -------------------------------------------------------------------------------------------------
def looked(*stages):
    """A guarded run with these looks after each epoch, over those of its base; returns it and its lines."""
    made = tiny.trainer(guard__edge_width=1.1, guard__diversity=0.9, eval__every=1, train__epochs=8)
    made.lines = []
    made.log = made.lines.append
    guard, kept = guard_of(made), []
    guard.on_base(Measured([], {}, torch.empty(0), looks=Looks(2.0, 0.5)), {})
    for width, apart in stages:
        next_epochs(made, 1)
        guard.on_measured(Measured([], {}, torch.empty(0), looks=Looks(2.0 * width, 0.5 * apart)))
        kept.append(snapshot(made))
    return made, kept


def test_blurred_or_alike_images_bring_back_the_last_weights_within_the_limits():
    made, kept = looked((1.0, 1.0), (1.05, 0.95), (1.12, 1.0), (1.0, 0.85))
    assert not same_state(kept[0], kept[1])
    assert same_state(kept[2], kept[1]) and same_state(kept[3], kept[1])
    assert made.optimization.scale == 0.25
    assert made.lines[-2:] == [
        "epoch 3: edges became 1.12 times as wide as the base's (guard.edge_width 1.1), so that the run went back to "
        "the weights of epoch 2, with 0.5 of the learning rate",
        "epoch 4: images of a prompt became 0.85 times as far apart as the base's (guard.diversity 0.9), so that the "
        "run went back to the weights of epoch 2, with 0.5 of the learning rate"]


@pytest.mark.fast
def test_the_first_weights_are_good_and_those_beyond_the_limits_not_the_best():
    made, kept = looked((1.2, 1.0))
    start = tiny.trainer(guard__edge_width=1.1, eval__every=1, train__epochs=8)
    assert same_state(kept[0], snapshot(start)) and made.lines[-1].endswith("epoch 0, with 0.5 of the learning rate")
    made, _ = looked((1.0, 1.0))
    guard = guard_of(made)
    beyond = Measured([], {}, torch.empty(0), looks=Looks(2.5, 0.5))
    assert guard.judge(beyond) == {}
    made.progress.best.best.reward = "red"
    assert math.isnan(guard.judge(beyond)["red"])
    assert guard.judge(Measured([], {}, torch.empty(0), looks=Looks(2.1, 0.5))) == {}


def test_levels_and_limits_by_hand():
    pairs = 20 * 19 / 2
    assert guard.pair_level(0.01, 20) * pairs == pytest.approx(0.01 / 3)
    assert guard.spike_level(0.01, 20) * 20 * 3 == pytest.approx(0.01 / 3)
    assert guard.pair_level(0.01, 1) == pytest.approx(0.01 / 3)
    assert guard.fell([1, 1], [0, 0], 1e-9) and not guard.fell([0, 0], [1, 1], 0.4)
    assert guard.fell_paired([1, 1], [0, 0], 1e-9) and not guard.fell_paired([1, 1], [1, 1], 0.4)
    assert not guard.fell([1], [0, 0], 0.4) and not guard.fell_paired([1], [0], 0.4)
    # Logarithms 0, 1, 2: mean 1, deviation 1; the bound is exp(1 + t sqrt(4/3)) with t of 2 degrees of freedom.
    expected = math.exp(1 + stats.t.isf(0.1, 2) * math.sqrt(4 / 3))
    assert guard.limit(np.exp([0, 1, 2]), 0.1) == pytest.approx(expected)
    assert guard.limit([1, 2], 0.1) == guard.limit([1, 1, 1], 0.1) == math.inf


@pytest.mark.parametrize("seed", range(4))
def test_falls_are_those_of_welch_and_of_pairs(seed):
    rng = np.random.default_rng(seed)
    best, now = rng.normal(1, 1, 12), rng.normal(0.3, 2, 7)
    found = stats.ttest_ind(best, now, equal_var=False, alternative="greater").pvalue
    assert not guard.fell(best, now, found * 0.99) and guard.fell(best, now, found * 1.01)
    assert not guard.fell(now, best, 0.4)
    rng = np.random.default_rng(seed)
    best = rng.normal(1, 1, 12)
    now = best - rng.normal(0.5, 0.5, 12)
    found = stats.ttest_rel(best, now, alternative="greater").pvalue
    assert not guard.fell_paired(best, now, found * 0.99) and guard.fell_paired(best, now, found * 1.01)
    assert guard.fell_paired([*best, math.nan], [*now, 0.0], found * 1.01)


def test_runs_without_a_fall_go_back_no_more_often_than_said():
    """400 runs of 12 epochs x 8 groups with one mean, each window of two epochs against the best before it."""
    rng, level, alarms = np.random.default_rng(0), guard.pair_level(0.3, 12), 0
    for _ in range(400):
        rewards = rng.random((12, 8))
        alarms += any(guard.fell(rewards[i:i + 2].ravel(), rewards[j:j + 2].ravel(), level)
                      for i in range(11) for j in range(i + 2, 11))
    assert alarms / 400 < 0.1  # a third of .3


def test_updates_without_a_spike_go_back_no_more_often_than_said():
    rng, level = np.random.default_rng(0), guard.spike_level(0.3, 12)
    runs = rng.lognormal(0, 0.5, (400, 12))
    alarms = sum(any(run[k] > guard.limit(run[max(0, k - 4):k], level) for k in range(12)) for run in runs)
    assert alarms / 400 < 0.1 / 3 + 3 * math.sqrt(0.033 / 400)

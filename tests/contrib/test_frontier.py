"""`eval.best: frontier`: its rule on sequences made by hand, and tiny runs."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from flowgrpo.contrib.frontier import LEVEL, Frontier, KeepFrontier, change
from flowgrpo.contrib.guard import reward_of
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation.report import report
from flowgrpo.methods.validate import resolve
from flowgrpo.run import run
from flowgrpo.storage import checkpoint
from flowgrpo.training import extensions
from tests.helpers import loop, tiny, tiny_runs, tiny_text
from tests.helpers.refusals import error_line, message, refused
from tests.training.test_best import epochs, in_file, same, saved

HACK = [0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9]  # trained reward of the base and of each evaluation
GOLD = [0.5, 0.6, 0.7, 0.8, 0.4, 0.2, 0.1]  # what the samples are worth: it peaks in epoch 3


class Planted:
    """A reward of means by evaluation, with a spread over prompts; the first call is the trial's.

    own: what samples of other than the `held` prompts score, for a trained one. done: evaluations so far. end: the
    evaluation in which it fails.
    """

    def __init__(self, means, own=None, held=(), done: int = 0, end: int | None = None):
        self.means, self.own, self.held, self.calls, self.end = means, own, held, done, end
        self.tried = own is not None  # the trial is on training prompts too

    def __call__(self, outputs, prompts):
        if self.own and not {*prompts} <= {*self.held}:
            return self.own(outputs, prompts)
        if not self.tried:
            self.tried = True
            return [0.0] * len(prompts)
        number, self.calls = self.calls, self.calls + 1
        if number == self.end:
            raise RuntimeError("the machine fell over")
        return [self.means[min(number, len(self.means) - 1)] + 0.001 * len(prompt) for prompt in prompts]


KINDS = {"image": (tiny, tiny.sd3, tiny.red, [*tiny.PROMPTS, "one more", "two"]),
         "text": (tiny_text, tiny_text.model, tiny_text.short, [*tiny_text.PROMPTS, "3+4=", "8+9="])}


def settings(kind, folder, **options):
    """A run of six epochs with four held-out prompts, measured after each."""
    return KINDS[kind][0].config(folder, **dict(
        reward="hacked", train__epochs=6, train__lr=0.05, eval__every=1, eval__rewards=["gold"], eval__prompts=4,
        held_out=0.5, train__micro_batch=8, train__save_every=1, train__keep=20, eval__best="frontier") | options)


def go(kind, config, gold=GOLD, done=0, end=None, resume=False):
    _, model, own, texts = KINDS[kind]
    prompts = [Prompt(text) for text in texts]
    held = [prompt.text for prompt in sets.split(prompts, config.held_out, sets.SPLIT_SEED)[1]]
    return run(config, resume, pipe=model(), prompts=prompts, functions={
        "hacked": Planted(HACK, own, held, done), "gold": Planted(gold, done=done, end=end)})


def stored(folder, epoch: int, room: str = "weights/"):
    """The tensors of one part of a checkpoint."""
    return checkpoint.within(checkpoint.load(folder / "checkpoints" / f"epoch-{epoch:05d}")[0], room)


@pytest.fixture(scope="module", params=KINDS)
def hacked(request, tmp_path_factory):
    config = settings(request.param, tmp_path_factory.mktemp("runs"))
    return request.param, config, go(request.param, config)


def test_the_weights_before_hacking_are_kept_and_reported(hacked):
    kind, config, summary = hacked
    assert epochs(config.folder) == [1, 2, 3, 4, 5, 6]
    kept = stored(config.folder, 6, "best/")
    assert same(kept, stored(config.folder, 3)) and not same(kept, stored(config.folder, 6))
    assert kind == "text" or same(saved(config.folder), in_file(config, 3))
    assert summary["kept"].startswith("kept the weights of epoch 3, the best by held-out frontier (0.6")
    assert summary["kept"].endswith("; beyond the frontier: epochs 4, 5, 6, by a higher trained reward and a lower "
                                    "gold")
    lines = tiny_runs.lines(config.folder)
    assert [line["frontier/epoch"] for line in lines] == [1, 2, 3, 3, 3, 3]
    assert "held_out/frontier" not in lines[-1]
    assert report.data(config.folder)["sentences"][1]["text"] == "K" + summary["kept"][1:] + "."


@pytest.mark.parametrize("end", [2, 3, 5])
def test_a_resumed_run_keeps_the_same(hacked, tmp_path, end):
    """In the evaluation of the epoch before the peak, of the peak, and behind a fall."""
    kind, config, summary = hacked
    again = settings(kind, tmp_path)
    assert "fell over" in message(go, kind, again, end=end)
    resumed = go(kind, again, done=end, resume=True)
    assert resumed["kept"] == summary["kept"]
    assert same(stored(again.folder, 6, "best/"), stored(config.folder, 6, "best/"))


@pytest.mark.parametrize("options, gold, epochs, told", [
    (dict(train__epochs=4), [0.5] * 6, 4, "^kept the weights of epoch 4((?!beyond).)*$"),  # nothing is hacked
    (dict(eval__stop={"reward": "frontier", "patience": 2}), GOLD, 5,
     "stopped: 2 evaluations without a better held-out frontier than that of epoch 3"),
    (dict(guard__window=4), GOLD, 6, "^kept the weights of epoch 3")], ids=["to its end", "stopped", "guarded"])
def test_runs_to_the_end_stopped_and_guarded(options, gold, epochs, told, tmp_path):
    config = settings("image", tmp_path, **options)
    assert reward_of(config) == "hacked" and extensions.best_weights(config, resolve(config)).best.reward == "frontier"
    summary = go("image", config, gold=gold)
    assert summary["epochs"] == epochs and re.search(told, summary["kept"], re.DOTALL)


def test_other_held_out_prompts_begin_anew(tmp_path):
    config = settings("image", tmp_path)
    with pytest.raises(UserError, match="fell over"):
        go("image", config, end=5)  # epoch 3 is kept, of four prompts
    other = config.model_copy(update={"eval": config.eval.model_copy(update={"prompts": 3})})
    summary = go("image", other, gold=[0.5] * 8, done=3, resume=True)  # .6 of the base, .7 and .8 of epochs 5 and 6
    assert summary["kept"].startswith("kept the weights of epoch 6, the best by held-out frontier (0.8")


def test_rewards_that_fall_or_are_lost_and_wrong_names():
    named = tiny.config(eval__every=1, eval__best="frontier", eval__rewards=["frontier"])
    assert extensions.selector_names(named, resolve(named, "flow")) == []
    assert extensions.selector_names(settings("image", "nowhere"), resolve(named, "flow")) == ["frontier"]
    def near(images, prompts, metadata, base=None):
        return [0.0] * len(prompts)
    near.base = True
    with pytest.raises(UserError, match="no eval-only reward is measured, so that reward hacking cannot be seen: name"):
        required(measured={"hacked": tiny.red, "near": near})
    assert kept([0, -.2, -.4, -.3], [.5] * 4, {"red": -1.0}) == 2
    rule = Frontier({"red": 1.0})
    rule.begin(scores(0, red=0.0, gold=0.5))
    rule.see(scores(1, red=0.4, gold=0.5))
    assert rule.see(scores(2, red=0.2, gold=0.1)) == (False, [])
    assert rule.see(scores(3, red=0.6, gold=0.1)) == (False, ["gold"])


def required(measured=None, **options):
    config = settings("image", "nowhere", **options)
    extensions.require(KeepFrontier, replace(
        loop.setup(config, prompts=[Prompt(text) for text in tiny.PROMPTS]),
        measured={"hacked": tiny.red, "gold": tiny.red} if measured is None else measured,
        split=([], [Prompt(text) for text in tiny.PROMPTS])))


@pytest.mark.parametrize("options, told", [
    ({"phases": [{"at": 1, "set": {}}]}, "which does not go with phases"),
    ({"reward": {"hacked": {"limit": {"at_least": 0.5}}, "gold": 1.0}}, "which does not go with a reward's limit"),
    ({"reward": {"hacked": {"transform": [{"band": [0, 1]}]}}}, "does not go with the transforms band and budget"),
    ({"measured": {"gold": tiny.red}}, "the trained reward 'hacked' is not measured on held-out prompts: expected"),
    ({"measured": {"hacked": tiny.red}}, "no eval-only reward is measured, .* name one under eval.rewards"),
    ({"eval__prompts": 1}, "which compares held-out prompts: got 1, expected at least 2")])
def test_what_it_needs_is_refused_in_one_line(options, told):
    refused(f"^eval.best is frontier.*{told}[^\n]*$", required, **options)


@pytest.mark.parametrize("arguments, told", [
    (["--select-best", "frontier"], "eval.best is set, but eval.every is 0, so nothing is measured in between"),
    (["--select-best", "frontier", "--eval.every=2"], "eval.best is frontier, but no eval-only reward"),
    (["--select-best", "frontire", "--eval.every=2"], "eval.best names the reward 'frontire', which is not"),
    (["--eval.stop.reward=frontier", "--eval.stop.patience=1", "--eval.every=2"],
     "eval.stop names the reward 'frontier', which is not measured")])
def test_the_command_line(tmp_path, capsys, arguments, told):
    assert told in error_line(capsys, "train", *arguments, f"--output={tmp_path}") and not list(tmp_path.iterdir())


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
    ([0, math.nan], [.5, .5], None)])
def test_what_is_kept(red, gold, expected):
    assert kept(red, gold) == expected


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


def test_the_value_is_the_trained_reward_and_several_by_hand():
    rule, values = Frontier({"red": 1.0, "blue": 0.5}), []
    rule.begin(scores(0, red=0, blue=0, gold=.5))
    for number, (red, blue) in enumerate([(.2, .4), (.6, .4), (.6, .8)], 1):
        assert rule.see(scores(number, red=red, blue=blue, gold=.5))[0]
        values.append(rule.value)
    assert values == pytest.approx([.4, .8, 1.0])
    nan, weights = math.nan, {"a": 1.0, "b": -2.0}
    before = {"a": [1, nan, nan, nan, 1], "b": [0, 3, nan, 1, 2]}
    now = {"a": [2, nan, nan, 5, 4], "b": [1, 2, nan, 1, nan]}
    # 1 - 2; b alone; none; a in one alone; b in one alone
    assert change(weights, before, now) == pytest.approx([-1, 2, nan, nan, nan], nan_ok=True)
    first = Frontier(weights)
    first.see({"a": [1, nan, nan], "b": [1, 2, nan]})
    assert first.value == pytest.approx((-1 - 4) / 2)

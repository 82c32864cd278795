"""`eval.best: frontier` on tiny runs: a trained reward that is hacked, and an eval-only one that shows it."""

import json
from dataclasses import replace

import pytest

from flowgrpo.cli import main
from flowgrpo.contrib.frontier import KeepFrontier
from flowgrpo.contrib.guard import reward_of
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation.report import report
from flowgrpo.methods.validate import resolve
from flowgrpo.run import run
from flowgrpo.storage import checkpoint
from flowgrpo.training import extensions
from tests.helpers import loop, tiny, tiny_text
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
    tensors, _ = checkpoint.load(folder / "checkpoints" / f"epoch-{epoch:05d}")
    return {key.removeprefix(room): value for key, value in tensors.items() if key.startswith(room)}


@pytest.fixture(scope="module", params=KINDS)
def hacked(request, tmp_path_factory):
    config = settings(request.param, tmp_path_factory.mktemp("runs"))
    return request.param, config, go(request.param, config)


def test_the_weights_before_hacking_are_kept(hacked):
    kind, config, summary = hacked
    assert epochs(config.folder) == [1, 2, 3, 4, 5, 6]
    kept = stored(config.folder, 6, "best/")
    assert same(kept, stored(config.folder, 3)) and not same(kept, stored(config.folder, 6))
    assert kind == "text" or same(saved(config.folder), in_file(config, 3))
    assert summary["kept"].startswith("kept the weights of epoch 3, the best by held-out frontier (0.6")
    assert summary["kept"].endswith("; beyond the frontier: epochs 4, 5, 6, by a higher trained reward and a lower "
                                    "gold")


def test_metrics_and_report_say_what_is_kept(hacked):
    _, config, summary = hacked
    lines = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["frontier/epoch"] for line in lines] == [1, 2, 3, 3, 3, 3]
    assert "held_out/frontier" not in lines[-1]
    assert report.data(config.folder)["sentences"][1]["text"] == "K" + summary["kept"][1:] + "."


@pytest.mark.parametrize("end", [2, 3, 5])
def test_a_resumed_run_keeps_the_same(hacked, tmp_path, end):
    """In the evaluation of the epoch before the peak, of the peak, and behind a fall."""
    kind, config, summary = hacked
    again = settings(kind, tmp_path)
    with pytest.raises(UserError, match="fell over"):
        go(kind, again, end=end)
    resumed = go(kind, again, done=end, resume=True)
    assert resumed["kept"] == summary["kept"]
    assert same(stored(again.folder, 6, "best/"), stored(config.folder, 6, "best/"))


def test_a_run_without_hacking_keeps_the_last(tmp_path):
    config = settings("image", tmp_path, train__epochs=4)
    summary = go("image", config, gold=[0.5] * 6)
    assert summary["kept"].startswith("kept the weights of epoch 4") and "beyond" not in summary["kept"]


def test_other_held_out_prompts_begin_anew(tmp_path):
    config = settings("image", tmp_path)
    with pytest.raises(UserError, match="fell over"):
        go("image", config, end=5)  # epoch 3 is kept, of four prompts
    other = config.model_copy(update={"eval": config.eval.model_copy(update={"prompts": 3})})
    summary = go("image", other, gold=[0.5] * 8, done=3, resume=True)  # .6 of the base, .7 and .8 of epochs 5 and 6
    assert summary["kept"].startswith("kept the weights of epoch 6, the best by held-out frontier (0.8")


def test_it_stops_where_the_frontier_ends(tmp_path):
    config = settings("image", tmp_path, eval__stop={"reward": "frontier", "patience": 2})
    summary = go("image", config)
    assert summary["epochs"] == 5 and "stopped: 2 evaluations without a better held-out frontier than that of epoch 3" \
        in summary["kept"]


def test_a_guarded_run_keeps_it_too(tmp_path):
    config = settings("image", tmp_path, guard__window=4)
    assert reward_of(config) == "hacked" and extensions.best_by(config, resolve(config)) == "frontier"
    assert go("image", config)["kept"].startswith("kept the weights of epoch 3")


def test_a_reward_of_that_name_comes_first():
    named = tiny.config(eval__every=1, eval__best="frontier", eval__rewards=["frontier"])
    assert extensions.selector_names(named, resolve(named, "flow")) == []
    assert extensions.selector_names(settings("image", "nowhere"), resolve(named, "flow")) == ["frontier"]


def test_a_distance_to_the_base_is_no_eval_only_reward():
    def near(images, prompts, metadata, base=None):
        return [0.0] * len(prompts)
    near.base = True
    with pytest.raises(UserError, match="no eval-only reward is measured, so that reward hacking cannot be seen: name"):
        required(measured={"hacked": tiny.red, "near": near})


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
    with pytest.raises(UserError, match=f"^eval.best is frontier.*{told}[^\n]*$"):
        required(**options)


@pytest.mark.parametrize("arguments, told", [
    (["--select-best", "frontier"], "eval.best is set, but eval.every is 0, so nothing is measured in between"),
    (["--select-best", "frontier", "--eval.every=2"], "eval.best is frontier, but no eval-only reward"),
    (["--select-best", "frontire", "--eval.every=2"], "eval.best names the reward 'frontire', which is not"),
    (["--eval.stop.reward=frontier", "--eval.stop.patience=1", "--eval.every=2"],
     "eval.stop names the reward 'frontier', which is not measured")])
def test_the_command_line(tmp_path, capsys, arguments, told):
    assert main(["train", *arguments, f"--output={tmp_path}"]) == 2
    assert told in capsys.readouterr().err and not list(tmp_path.iterdir())

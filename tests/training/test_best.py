"""The best weights by a held-out reward, and early stop: on a run whose held-out reward peaks in the middle."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo.config import load
from flowgrpo.config.sections import Eval
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation.report import report
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.run import run
from flowgrpo.storage import checkpoint
from flowgrpo.training.best import BestWeights
from tests.helpers import tiny

PEAK = [0.1, 0.3, 0.9, 0.4, 0.9, 0.2, 0.1, 0.0]  # what the held-out reward says of the evaluations on the way


class Aim:
    """A held-out reward whose means on the way are PEAK; the base has 0. It is called once per evaluation, and before
    all of them for the trial."""

    def __init__(self, done: int = 0, end: int | None = None):
        self.calls, self.end, self.tried = done, end, False

    def __call__(self, images, prompts):
        if not self.tried:
            self.tried = True
            return [0.0] * len(prompts)
        number, self.calls = self.calls, self.calls + 1
        if number == self.end:
            raise RuntimeError("the machine fell over")
        return [0.0 if number == 0 else PEAK[min(number, len(PEAK)) - 1]] * len(prompts)


def settings(folder, **options):
    return tiny.config(folder, train__epochs=8, train__lr=0.05, eval__every=1, eval__rewards=["aim"],
                       train__save_every=1, train__keep=20, **options)


def go(config, aim, resume: bool = False):
    return run(config, resume, pipe=tiny.sd3(), functions={"red": tiny.red, "aim": aim},
               prompts=[Prompt(text) for text in tiny.PROMPTS])


def saved(folder) -> dict[str, torch.Tensor]:
    return {key.removeprefix("transformer."): value for key, value in load_file(folder / LORA_FILE).items()}


def weights_of(folder, epoch: int, room: str = "weights/") -> dict[str, torch.Tensor]:
    tensors, _ = checkpoint.load(folder / "checkpoints" / f"epoch-{epoch:05d}")
    return {key.removeprefix(room + "transformer.").replace(".default", ""): value
            for key, value in tensors.items() if key.startswith(room)}


def in_file(config, epoch: int, room: str = "weights/") -> dict[str, torch.Tensor]:
    return tiny.in_file(weights_of(config.folder, epoch, room))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and len(a) > 0 and all(torch.equal(a[key], b[key]) for key in a)


def epochs(folder) -> list[int]:
    return [json.loads(line)["epoch"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A run that keeps its best weights and stops after three evaluations without better ones."""
    config = settings(tmp_path_factory.mktemp("runs"), eval__best="aim", eval__stop={"reward": "aim", "patience": 3})
    return config, go(config, Aim())


def test_it_stops_when_nothing_better_came(both):
    config, summary = both
    assert epochs(config.folder) == [1, 2, 3, 4, 5, 6] and summary["epochs"] == 6
    assert summary["kept"] == ("kept the weights of epoch 3, the best by held-out aim (0.9); stopped: 3 evaluations "
                               "without a better held-out aim than that of epoch 3")
    assert json.loads((config.folder / "summary.json").read_text())["kept"] == summary["kept"]


def test_the_best_weights_are_what_is_saved_and_evaluated(both):
    config, summary = both
    lines = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert same(saved(config.folder), in_file(config, 3))
    assert not same(saved(config.folder), in_file(config, 6))
    assert summary["after"]["red"] == pytest.approx(lines[2]["held_out/red"], abs=1e-7)
    assert summary["after"]["red"] != pytest.approx(lines[5]["held_out/red"], abs=1e-7)


def test_the_report_shows_the_decline_and_says_what_was_kept(both):
    config, summary = both
    found = report.data(config.folder)
    [curve] = [series for chart in found["charts"] if chart["title"] == "aim" for series in chart["series"]]
    assert (curve["x"], curve["y"]) == ([0, 1, 2, 3, 4, 5, 6], pytest.approx([0.0, *PEAK[:6]]))
    assert found["sentences"][1] == {"tone": "plain", "text": "K" + summary["kept"][1:] + "."}
    assert found["stages"][-1]["label"] == "after training"


def test_a_checkpoint_holds_them(both):
    config, _ = both
    for epoch, best in [(1, 1), (2, 2), (3, 3), (4, 3), (5, 3), (6, 3)]:
        assert same(weights_of(config.folder, epoch, "best/"), weights_of(config.folder, best))
        told = checkpoint.load(config.folder / "checkpoints" / f"epoch-{epoch:05d}")[1]["best"]
        assert (told["best"]["epoch"], told["stop"]["since"]) == (best, epoch - best)


def test_a_resumed_run_ends_as_an_unbroken_one(both, tmp_path):
    config, summary = both
    again = settings(tmp_path, eval__best="aim", eval__stop={"reward": "aim", "patience": 3})
    with pytest.raises(UserError, match="fell over"):
        go(again, Aim(end=5))  # in the evaluation of epoch 5, after the best one
    for late in (again.folder / "checkpoints").glob("epoch-00005"):
        shutil.rmtree(late)
    resumed = go(again, Aim(done=5), resume=True)
    assert epochs(again.folder) == [1, 2, 3, 4, 5, 6] and resumed["kept"] == summary["kept"]
    assert same(saved(again.folder), saved(config.folder))


def test_a_run_that_had_stopped_stays_stopped(both):
    config, summary = both
    assert go(config, Aim(done=7), resume=True)["kept"] == summary["kept"] and len(epochs(config.folder)) == 6


def test_other_held_out_prompts_forget_what_was_best_of_the_earlier_ones(tmp_path):
    config = settings(tmp_path, eval__best="aim", eval__prompts=1)
    with pytest.raises(UserError, match="fell over"):
        go(config, Aim(end=4))  # behind the evaluation of epoch 3, the best one
    other = config.model_copy(update={"eval": config.eval.model_copy(update={"prompts": 2})})
    # The epoch whose evaluation failed is measured again, on the other prompts.
    assert go(other, Aim(done=5), resume=True)["kept"] == "kept the weights of epoch 4, the best by held-out aim (0.2)"


def test_stop_alone_keeps_the_last_weights(tmp_path):
    config = settings(tmp_path, eval__stop={"reward": "aim", "patience": 1})
    summary = go(config, Aim())
    assert epochs(config.folder) == [1, 2, 3, 4] and same(saved(config.folder), in_file(config, 4))
    assert summary["kept"].startswith("stopped: 1 evaluation ") and not weights_of(config.folder, 4, "best/")


def test_the_moving_average_is_kept_where_it_is_what_is_evaluated(tmp_path):
    config = settings(tmp_path, eval__best="aim", eval__weights="ema", train__ema=0.5)
    go(config, Aim())
    assert epochs(config.folder) == list(range(1, 9))
    assert same(saved(config.folder), in_file(config, 3, "ema/"))
    assert not same(saved(config.folder), in_file(config, 3))


@pytest.mark.parametrize("values, best, since", [
    ([1, 2, 3], 3, 0), ([3, 2, 1], 1, 2), ([1, 1], 1, 1), ([math.nan, -5, math.nan], 2, 1), ([-1, math.nan, 0], 3, 0),
])
def test_peaks(values, best, since):
    kept = BestWeights(Eval(best="a", stop={"reward": "a", "patience": 2}))
    for epoch, value in enumerate(values, 1):
        kept.see({"held_out/a": value}, epoch, lambda: {"w": torch.tensor(float(epoch))})
    assert (kept.best.epoch, kept.stop.since, kept.should_stop) == (best, since, since >= 2)
    assert kept.weights["w"] == best


def test_weights_are_copied():
    kept, live = BestWeights(Eval(best="a")), torch.zeros(2)
    kept.see({"held_out/a": 1.0}, 1, lambda: {"w": live})
    live += 1
    assert kept.weights["w"].tolist() == [0, 0] and not kept.should_stop
    assert kept.summary().startswith("kept the weights")


def test_what_is_of_another_reward_is_not_taken_from_a_checkpoint():
    old = BestWeights(Eval(best="a", stop={"reward": "a", "patience": 1}))
    old.see({"held_out/a": 1.0}, 4, lambda: {"w": torch.ones(1)})
    for named, epoch in (("a", 4), ("b", 0)):
        new = BestWeights(Eval(best=named, stop={"reward": named, "patience": 2}))
        tensors, values = old.state()
        new.load_state(tensors, json.loads(json.dumps(values)))
        assert (new.best.epoch, new.stop.epoch, bool(new.weights)) == (epoch, epoch, named == "a")


def test_options_of_the_command_line():
    given = {"eval.stop.reward": "a", "eval.stop.patience": "3", "eval.best": "b"}
    found = load(None, given).eval
    assert (found.stop.reward, found.stop.patience, found.best) == ("a", 3, "b")

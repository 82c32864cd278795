"""The best weights by a held-out reward, and early stop: on a run whose held-out reward peaks in the middle."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo.config.sections import Eval
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation import runs
from flowgrpo.evaluation.measured import ANEW_SEED, EVAL_SEED, halves, measure
from flowgrpo.evaluation.report import comparison, report
from flowgrpo.export import model_card
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.storage import checkpoint
from flowgrpo.storage.checkpoint import within
from flowgrpo.training.best import BestWeights
from tests.helpers import tiny, tiny_runs
from tests.helpers.refusals import message
from tests.helpers.tiny_runs import same

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
    return tiny_runs.whole(config, {"red": tiny.red, "aim": aim}, resume)


def saved(folder) -> dict[str, torch.Tensor]:
    return {key.removeprefix("transformer."): value for key, value in load_file(folder / LORA_FILE).items()}


def weights_of(folder, epoch: int, room: str = "weights/") -> dict[str, torch.Tensor]:
    tensors, _ = checkpoint.load(folder / "checkpoints" / f"epoch-{epoch:05d}")
    return {key.removeprefix(room + "transformer.").replace(".default", ""): value
            for key, value in tensors.items() if key.startswith(room)}


def in_file(config, epoch: int, room: str = "weights/") -> dict[str, torch.Tensor]:
    return tiny.in_file(weights_of(config.folder, epoch, room))


def epochs(folder) -> list[int]:
    return [line["epoch"] for line in tiny_runs.lines(folder)]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A run that keeps its best weights and stops after three evaluations without better ones."""
    config = settings(tmp_path_factory.mktemp("runs"), eval__best="aim", eval__stop={"reward": "aim", "patience": 3})
    return config, go(config, Aim())


def test_it_stops_when_nothing_better_came_and_report_and_checkpoints_hold_the_best(both):
    config, summary = both
    assert epochs(config.folder) == [1, 2, 3, 4, 5, 6] and summary["epochs"] == 6
    assert summary["kept"] == ("kept the weights of epoch 3, the best by held-out aim (0.9); stopped: 3 evaluations "
                               "without a better held-out aim than that of epoch 3")
    assert json.loads((config.folder / "summary.json").read_text())["kept"] == summary["kept"]
    found = report.data(config.folder)
    [curve] = [series for chart in found["charts"] if chart["title"] == "aim" for series in chart["series"]]
    assert (curve["x"], curve["y"]) == ([0, 1, 2, 3, 4, 5, 6], pytest.approx([0.0, *PEAK[:6]]))
    assert found["sentences"][1] == {"tone": "plain", "text": "K" + summary["kept"][1:] + "."}
    assert found["stages"][-1]["label"] == "after training"
    for epoch, best in [(1, 1), (2, 2), (3, 3), (4, 3), (5, 3), (6, 3)]:
        assert same(weights_of(config.folder, epoch, "best/"), weights_of(config.folder, best))
        told = checkpoint.load(config.folder / "checkpoints" / f"epoch-{epoch:05d}")[1]["best"]
        assert (told["best"]["epoch"], told["stop"]["since"]) == (best, epoch - best)


def test_the_best_weights_are_saved_and_measured_on_prompts_and_seeds_that_chose_nothing(both):
    config, summary = both
    assert same(saved(config.folder), in_file(config, 3))
    assert not same(saved(config.folder), in_file(config, 6))
    choosing, reported = halves(sets.split([Prompt(text) for text in tiny.PROMPTS], 0.3, sets.SPLIT_SEED)[1])
    assert choosing and reported and not {p.text for p in choosing} & {p.text for p in reported}
    for name, prompts in (("choosing", choosing), ("before", reported)):
        known = json.loads((config.folder / f"{name}.json").read_text())
        assert [text for text, *_ in known["settings"]["shown"]] == [prompt.text for prompt in prompts]
    assert (summary["evaluation"]["seed"], ANEW_SEED) == (ANEW_SEED, EVAL_SEED + 1)

    made = tiny.trainer()

    def red(seed: int) -> float:
        return measure(made.policy, reported, {"red": tiny.red}, steps=3, guidance=1.0, samples=1, micro_batch=4,
                       run_seed=seed).mean()["red"]

    assert red(ANEW_SEED) == pytest.approx(summary["before"]["red"], abs=1e-6) != pytest.approx(red(EVAL_SEED))
    tensors, _ = checkpoint.load(config.folder / "checkpoints" / "epoch-00003")
    made.policy.weights.load(within(tensors, "weights/"))
    assert red(ANEW_SEED) == pytest.approx(summary["after"]["red"], abs=1e-6) != pytest.approx(summary["before"]["red"])


def test_report_card_and_lists_of_runs_have_the_new_numbers_and_curves_the_others(both):
    config, summary = both
    told = report.data(config.folder)
    [said] = [each["text"] for each in told["sentences"] if each["text"].startswith("red, trained on")]
    ends = [f"{summary[when]['red']:.3f}" for when in ("before", "after")]
    assert "on 1 held-out image that chose nothing" in said and all(end in said for end in ends)
    assert [(stage["label"], stage["base"]) for stage in told["stages"][-2:]] == [
        ("before training, other prompts", 7), ("after training", 7)]
    assert model_card.results(config, summary).startswith("| reward | before")
    assert "measured anew on prompts and seeds that chose nothing" in model_card.results(config, summary)
    assert runs.read(config.folder).after == summary["after"]
    lines = comparison.epoch_metrics(config.folder)
    assert [line["held_out/aim"] for line in lines] == pytest.approx([0.0, *PEAK[:6]])
    before = json.loads((config.folder / "choosing.json").read_text())["scores"]["red"]
    assert lines[0]["held_out/red"] == pytest.approx(before[0]) != summary["before"]["red"]


@pytest.mark.parametrize("end", [7, 8])
def test_a_run_that_dies_in_the_last_measurements_ends_as_an_unbroken_one(both, tmp_path, end):
    """Of the base, then of the kept weights. What was measured is not measured again."""
    config, _ = both
    again = settings(tmp_path, eval__best="aim", eval__stop={"reward": "aim", "patience": 3})
    assert "fell over" in message(go, again, Aim(end=end))
    aim = Aim(done=end)
    go(again, aim, resume=True)
    assert aim.calls == 9
    one, other = (json.loads((folder / "summary.json").read_text()) for folder in (config.folder, again.folder))
    assert all(one[key] == other[key] for key in ("before", "after", "kept", "compared", "looks"))
    aim = Aim(done=9)
    go(again, aim, resume=True)
    assert aim.calls == 10  # the kept weights, as of every finished run, and not the base


@pytest.mark.parametrize("options, expected", [
    ({}, False), ({"eval__best": "red"}, True), ({"eval__stop": {"reward": "red", "patience": 1}}, True),
    ({"guard__window": 2}, True), ({"guard__window": 2, "guard__best": False}, True),
    ({"guard__edge_width": 1.1}, False), ({"guard__window": 2, "eval__every": 0}, False)])
def test_runs_whose_evaluations_choose_their_weights(options, expected):
    assert tiny.trainer(**{"eval__every": 1} | options).progress.best.anew is expected


def test_halves_share_no_text_and_have_the_mix_of_an_ordered_file():
    prompts = [Prompt(f"{kind} {i}") for kind in "ab" for i in range(40)] + [Prompt("a 0")]
    one, other = halves(prompts)
    assert sorted(one + other, key=repr) == sorted(prompts, key=repr)
    assert not {prompt.text for prompt in one} & {prompt.text for prompt in other}
    counts = [sum(prompt.text.startswith("a") for prompt in side) for side in (one, other)]
    assert sorted(counts) == [20, 21] and {len(one), len(other)} == {40, 41}
    assert halves(prompts[:1]) == (prompts[:1], prompts[:1]) and halves([]) == ([], [])
    odd = [prompt for prompt in one if int(prompt.text[2:]) % 2]
    assert 10 < len(odd) < 30  # two kinds in turn are on both sides


def test_a_resumed_run_ends_as_an_unbroken_one_and_one_that_had_stopped_stays_so(both, tmp_path):
    config, summary = both
    again = settings(tmp_path, eval__best="aim", eval__stop={"reward": "aim", "patience": 3})
    assert "fell over" in message(go, again, Aim(end=5))  # in the evaluation of epoch 5, after the best one
    for late in (again.folder / "checkpoints").glob("epoch-00005"):
        shutil.rmtree(late)
    resumed = go(again, Aim(done=5), resume=True)
    assert epochs(again.folder) == [1, 2, 3, 4, 5, 6] and resumed["kept"] == summary["kept"]
    assert same(saved(again.folder), saved(config.folder))
    assert go(again, Aim(done=9), resume=True)["kept"] == summary["kept"] and len(epochs(again.folder)) == 6


def test_other_held_out_prompts_forget_what_was_best_of_the_earlier_ones(tmp_path):
    config = settings(tmp_path, eval__best="aim", eval__prompts=1)
    assert "fell over" in message(go, config, Aim(end=4))  # behind the evaluation of epoch 3, the best one
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


def test_weights_are_copied_and_those_of_another_reward_are_not_taken_from_a_checkpoint():
    kept, live = BestWeights(Eval(best="a")), torch.zeros(2)
    kept.see({"held_out/a": 1.0}, 1, lambda: {"w": live})
    live += 1
    assert kept.weights["w"].tolist() == [0, 0] and not kept.should_stop
    assert kept.summary().startswith("kept the weights")
    old = BestWeights(Eval(best="a", stop={"reward": "a", "patience": 1}))
    old.see({"held_out/a": 1.0}, 4, lambda: {"w": torch.ones(1)})
    for named, epoch in (("a", 4), ("b", 0)):
        new = BestWeights(Eval(best=named, stop={"reward": named, "patience": 2}))
        tensors, values = old.state()
        new.load_state(tensors, json.loads(json.dumps(values)))
        assert (new.best.epoch, new.stop.epoch, bool(new.weights)) == (epoch, epoch, named == "a")

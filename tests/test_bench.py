"""The benchmark's arithmetic: what a run will cost, and the table of what came out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from flowgrpo import methods
from flowgrpo.config import validate
from flowgrpo.data.prompts import Prompt
from flowgrpo.methods.targets import LatentEdits
from flowgrpo.methods.validate import require_recorded_pairs, resolve
from flowgrpo.rewards import differentiable
from flowgrpo.run import run
from tests.data.test_recorded_pairs import pairs_file
from tests.helpers import tiny

sys.path.append(str(Path(__file__).parent.parent / "scripts"))

import bench_compile  # noqa: E402
import bench_full_size  # noqa: E402
import bench_methods  # noqa: E402
import bench_overhead  # noqa: E402
import bench_starter  # noqa: E402


def config(folder, method: str, micro_batch: int, guidance: float = 1.0, **parts):
    return validate({
        "method": method, "parts": parts, "reward": "bright", "output": str(folder), "tracker": "none", "device": "cpu",
        "precision": "fp32",
        "picture": {"call": tiny.CALL}, "adapter": {"rank": 2}, "eval": {"steps": 1, "prompts": 1, "grid": 1},
        "train": {"epochs": 3, "prompts": 2, "group": 3, "micro_batch": micro_batch, "guidance": guidance}})


def shortened(settings, **train):
    """Two epochs, of which the first alone checks its ratio, on a grid of 6 steps."""
    return settings.model_copy(update={"train": settings.train.model_copy(update={"epochs": 2, "steps": 6} | train)})


@differentiable
def bright(images, prompts):
    return images.flatten(1).mean(1)


def spent(settings) -> int:
    """Denoiser evaluations of the epochs of a run, without those that measure it."""
    prompts = [Prompt(text) for text in "abcde"]
    trainer = tiny.trainer_of(settings, {"bright": bright}, prompts)
    for trainer.epoch in range(settings.train.epochs):
        trainer.run_epoch()
    return trainer.policy.evaluations


# Parts of groups, or one group, as 4 rows do not hold two; every kind of replay, with guidance and without.
@pytest.mark.parametrize("method, guidance, micro_batch, parts", [
    ("flow_grpo", 1.0, 2, {}), ("flow_grpo", 1.0, 4, {}), ("flow_grpo_fast", 1.0, 2, {}), ("dance_grpo", 1.0, 2, {}),
    ("mix_grpo", 3.0, 2, {}), ("mix_grpo", 1.0, 4, {"plan": {"every": 1}}),
    ("mix_grpo_flash", 1.0, 2, {"plan": {"every": 1}}), ("mix_grpo+grpo_guard", 1.0, 4, {}),
    ("diffusion_nft", 1.0, 2, {}), ("diffusion_nft", 1.0, 4, {}), ("awm", 3.0, 2, {}), ("dgpo", 1.0, 2, {}),
    ("dgpo", 1.0, 4, {}), ("diffusion_dpo", 1.0, 4, {}), ("refl", 1.0, 2, {}),
    ("draft", 3.0, 4, {"plan": {"count": 2}}), ("alignprop", 1.0, 2, {}),
])
def test_a_run_costs_what_was_foretold(tmp_path, method, guidance, micro_batch, parts):
    settings = shortened(config(tmp_path, method, micro_batch, guidance, **parts))
    assert spent(settings) == sum(bench_starter.epoch_cost(settings, epoch) for epoch in range(2))


def test_a_whole_run_reports_what_was_foretold(tmp_path):
    settings = config(tmp_path, "mix_grpo", 4)
    summary = run(settings, pipe=tiny.sd3(), functions={"bright": bright}, prompts=[Prompt(text) for text in "abcde"])
    assert summary["denoiser_evaluations"] == sum(bench_starter.epoch_cost(settings, epoch) for epoch in range(3))


@pytest.mark.parametrize("micro_batch", [2, 4])
@pytest.mark.parametrize("method, parts", [("diffusion_dpo", {}), ("rpo", {"times": {"count": 2}})])
def test_a_run_on_recorded_pairs_costs_what_was_foretold(tmp_path, method, parts, micro_batch):
    texts = "abcde"
    file = pairs_file(tmp_path, *((text, "a.png", "b.png") for text in texts))
    settings = config(tmp_path, method, micro_batch, **parts)
    settings = settings.model_copy(update={
        "preferences": file, "labels": "rewards" if method == "rpo" else "file",
        "train": settings.train.model_copy(update={"group": 2, "epochs": 2})})
    # 2 pairs, so 4 rows at each time: the old score, the reference's, the policy's own, and this once more for the
    # first ratio; no rollout.
    rows = 4 * parts.get("times", {}).get("count", 4)
    assert [bench_starter.epoch_cost(settings, epoch) for epoch in (0, 1)] == [4 * rows, 3 * rows]
    summary = run(settings, pipe=tiny.sd3(), functions={"bright": bright}, prompts=[Prompt(text) for text in texts])
    assert summary["denoiser_evaluations"] == 7 * rows


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_run_of_edits_costs_its_bases(tmp_path, guidance):
    settings = config(tmp_path, "expo", 4, guidance, edit={"width": 8, "depth": 1}, value={"steps": 2, "batch": 4})
    settings = settings.model_copy(update={"train": settings.train.model_copy(update={"group": 4, "epochs": 2})})
    # 2 prompts of 2 bases, with a grid of 10 steps
    assert [bench_starter.epoch_cost(settings, epoch) for epoch in (0, 1)] == [4 * 10 * (2 if guidance > 1 else 1)] * 2
    assert spent(settings) == sum(bench_starter.epoch_cost(settings, epoch) for epoch in (0, 1))


@pytest.mark.parametrize("entry", ["offline_dpo", "rpo"])
def test_the_runs_on_recorded_pairs_fit_and_have_the_budgets_epochs(entry):
    settled = {"train.prompts": "6", "parts": "{}", "method": entry}
    found = bench_starter.load(bench_starter.RECIPE, settled | bench_starter.OPTIONS[entry])
    require_recorded_pairs(found, resolve(found))
    # 192 rows at 2 times: the old score, the reference's, the policy's own, and this once more for the first ratio.
    assert bench_starter.epochs_for(found, 40_000) == (35, (35 * 3 + 1) * 2 * 192)


@pytest.mark.parametrize("method", ["flow_grpo", "dgpo"])
def test_a_second_pass_costs_what_was_foretold(tmp_path, method):
    settings = shortened(config(tmp_path, method, 2), inner_epochs=2)
    assert spent(settings) == sum(bench_starter.epoch_cost(settings, epoch) for epoch in range(2))


def entry(method: str, **more):
    """The configuration of an entry of the benchmark, but for its length."""
    settled = {"train.prompts": "6", "parts": "{}", "method": method} | bench_starter.OPTIONS.get(method, {}) | more
    return bench_starter.load(bench_starter.RECIPE, settled)


@pytest.mark.parametrize("name", bench_methods.METHODS)
def test_every_entry_fits_and_some_say_what_they_change(name):
    found = entry(name)
    method, preset = resolve(found), methods.preset(found.method)
    if "sol_rl" in name:
        assert (method.rollout.preview.pool, method.rollout.preview.steps) == (48, 4)
        assert (preset.rollout.preview.pool, preset.rollout.preview.steps) == (96, 6)
    assert found.train.inner_epochs == (2 if name.endswith("_twice") or isinstance(method.target, LatentEdits) else 1)


def test_passes_over_a_batch_are_all_that_tells_the_twice_apart():
    grpo, dppo = entry("flow_grpo_twice"), entry("flow_dppo_twice")
    assert (grpo.method, dppo.method) == ("flow_grpo", "flow_grpo+flow_dppo")
    assert grpo == entry("flow_grpo", **{"train.inner_epochs": "2"}) == dppo.model_copy(update={"method": grpo.method})


def test_the_fewest_epochs_that_reach_a_budget(tmp_path):
    # 2 prompts of 3 rows: the step at which they part costs 2, another one 6. Rollout 2 + 9 * 6, replay of the window
    # 2 + 3 * 6, and in the first epoch once more for the first ratio.
    settings = config(tmp_path, "mix_grpo", 2)
    assert [bench_starter.epoch_cost(settings, epoch) for epoch in (0, 1, 24)] == [56 + 2 * 20, 56 + 20, 56 + 20]
    assert bench_starter.epoch_cost(settings, 25) == 56 - 4 + 20  # the window has moved: one more step per prompt
    assert bench_starter.epochs_for(settings, 96) == (1, 96)
    assert bench_starter.epochs_for(settings, 97) == (2, 172)


def test_the_table_by_hand():
    base = {"best": 0.5, "best_guidance": 2.0}
    runs = [{"method": "a", "base": 0.5, "accuracy": score, "epochs": 10, "evaluations": 1000, "seconds": seconds}
            for score, seconds in ((0.6, 10.0), (0.8, 20.0))]
    assert bench_starter.table(runs, base).splitlines()[2:] == [
        "| base, guidance 2 | 0.500 | | | | | |", "| a | 0.700 | 0.600..0.800 | +0.200 | 10 | 1,000 | 15 |"]


def run_of(method: str, seed: int, *points: tuple[int, float, float]) -> dict:
    return {"method": method, "seed": seed, "held_out": [(0, 0.0, 0.4), *points]}


RUNS = [run_of("flow_grpo", 0, (50, 10.0, 0.44), (100, 20.0, 0.5)),
        run_of("flow_grpo", 1, (50, 12.0, 0.46), (100, 22.0, 0.5)),
        run_of("quick", 0, (60, 6.0, 0.6), (110, 9.0, 0.7)), run_of("slow", 0, (50, 1.0, 0.41), (100, 2.0, 0.49))]


def test_a_course_is_the_mean_over_seeds():
    assert bench_methods.course(RUNS, "flow_grpo") == [(0, 0, 0.4), (50, 11, 0.45), (100, 21, 0.5)]


def test_the_evaluations_to_an_accuracy_by_hand():
    # From .4 at 0 to .6 at 60: .5 lies half way.
    assert bench_methods.needed(bench_methods.course(RUNS, "quick"), 0.5) == pytest.approx(30)
    assert bench_methods.needed(bench_methods.course(RUNS, "slow"), 0.5) is None
    assert bench_methods.reaching(RUNS).splitlines()[2:] == [
        "| flow_grpo | 100 | 1.00 |", "| quick | 30 | 0.30 |", "| slow | not reached | |"]
    assert bench_methods.losers(RUNS) == ["slow"]


def test_previews_are_foretold_and_count(tmp_path):
    settings = config(tmp_path, "mix_grpo+sol_rl", 2, preview={"pool": 5, "steps": 2})
    settings = settings.model_copy(update={"train": settings.train.model_copy(update={"group": 4, "epochs": 2})})
    # 2 prompts of 4 rows, each a noise of its own: previews 2 * 5 * 2, rollout 10 * 8, replay of the window 4 * 8, and
    # in the first epoch once more.
    assert [bench_starter.epoch_cost(settings, epoch) for epoch in (0, 1)] == [20 + 80 + 2 * 32, 20 + 80 + 32]
    summary = run(settings, pipe=tiny.sd3(), functions={"bright": bright}, prompts=[Prompt(text) for text in "abcde"])
    assert summary["denoiser_evaluations"] == 2 * (20 + 80) + 3 * 32
    assert summary["rollout_evaluations_per_picture"] == pytest.approx((20 + 80) / 8)
    assert summary["rollout_evaluations_saved_by_sharing"] == 0


def test_an_epochs_calls_of_the_denoiser_are_recorded_and_run_again():
    trainer = tiny.trainer(parts__plan__size=2, train__micro_batch=8)
    bench_overhead.epoch(trainer)  # looks at the first ratio
    before = trainer.policy.evaluations
    calls = bench_overhead.recorded(trainer)
    # 6 steps and the replay of a window of 2, in one batch each.
    assert [backward for *_, backward in calls] == [False] * 6 + [True] * 2
    spent = trainer.policy.evaluations - before
    bench_overhead.bare(trainer, calls)
    assert trainer.policy.evaluations - before == 2 * spent


# --- at full size ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("model, gigabytes", [("sd35_medium", 4.94), ("flux_dev", 23.80)])  # of the published files
def test_full_size_is_that_of_the_published_weights(model, gigabytes):
    with bench_full_size.made_on(torch.device("meta"), torch.bfloat16):
        denoiser = bench_full_size.MODELS[model]().transformer
    values = sum(each.numel() for each in denoiser.state_dict().values())
    assert 2 * values / 1e9 == pytest.approx(gigabytes, abs=0.01) and denoiser.dtype == torch.bfloat16


@pytest.mark.parametrize("model", ["sd35_medium", "flux_dev"])
def test_what_is_measured_at_full_size_runs_small(model, tmp_path, monkeypatch, capsys):
    told = tmp_path / "told.json"
    small = {"train.group": 2, "train.micro_batch": 2, "train.updates": 1, "picture": "{height: 32, width: 32}"}
    options = [part for key, value in small.items() for part in ("--option", f"{key}={value}")]
    monkeypatch.setattr(sys, "argv", ["bench_full_size.py", model, "--device", "cpu", "--repetitions", "1", "--layers",
                                      "1", "--heads", "1", "--width", "32", "--json", str(told), *options])
    bench_full_size.main()
    lines = {line["what"]: line for line in json.loads(told.read_text())["lines"]}
    assert lines.keys() == {"rollout", "the pipeline's own call", "decoding", "update"}
    assert all(line["per_second"] == pytest.approx((1 if what == "update" else 4) / line["seconds"])
               for what, line in lines.items())
    shares = [lines[what]["outside_denoiser"] for what in ("rollout", "the pipeline's own call")]
    assert all(0 < share < 1 for share in shares) and "outside the denoiser" in capsys.readouterr().out


def test_the_share_outside_is_what_is_left_of_the_forwards():
    """A clock whose stamps are counted by hand: a work of 10 in which two forwards take 2 and 3."""
    module, stamps = torch.nn.Identity(), iter([0, 1, 3, 4, 7, 10])
    clock = bench_full_size.PhaseTimer(torch.device("cpu"), [module])
    clock.stamp = lambda: next(stamps)
    assert clock.measured(lambda: (module(1), module(2))) == (10, 5)


def test_compiled_and_plain_epochs_are_measured_in_turns(monkeypatch, capsys):
    monkeypatch.setattr(torch._dynamo.config, "disable", True)  # compiling takes minutes
    monkeypatch.setattr(sys, "argv", ["bench_compile.py", "--repetitions", "1", "--option", "train.group=2",
                                      "--option", "train.micro_batch=4"])
    bench_compile.main()
    plain, compiled = capsys.readouterr().out.splitlines()[-2:]
    assert plain.split()[0] == "plain" and plain.split()[3] == "1.00," and compiled.startswith("compiled ")

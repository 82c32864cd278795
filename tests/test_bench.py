"""The benchmark's arithmetic: what a run will cost, and the table of what came out."""

from __future__ import annotations

import json
import sys
from functools import partial
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

import bench_methods  # noqa: E402
import bench_overhead  # noqa: E402
import bench_starter  # noqa: E402
import gpu_models  # noqa: E402
import gpu_report  # noqa: E402
import gpu_sections  # noqa: E402


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


# --- on one GPU ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("model, gigabytes", [("sd35_medium", 4.94), ("flux_dev", 23.80)])  # of the published files
def test_full_size_is_that_of_the_published_weights(model, gigabytes):
    with gpu_models.made_on(torch.device("meta"), torch.bfloat16):
        denoiser = gpu_models.MODELS[model]().transformer
    values = sum(each.numel() for each in denoiser.state_dict().values())
    assert 2 * values / 1e9 == pytest.approx(gigabytes, abs=0.01) and denoiser.dtype == torch.bfloat16


@pytest.fixture(scope="module", params=["sd35_medium", "flux_dev"])
def bench(request):
    """A small model whose first two sections have run: (bench, their lines)."""
    made = gpu_sections.Bench(request.param, "cpu", tiny=True)
    return made, [*made.stock()], [*made.epoch()]


def test_the_model_alone_and_as_a_policy_are_measured(bench):
    made, (call, stock), (rollout, decode, update, ratio) = bench
    assert call["seconds"] == made.bare > 0 and call["ms per row"] == pytest.approx(1e3 * made.bare / 2)
    assert stock["over its denoiser's calls"] == pytest.approx(stock["seconds"] / (6 * made.bare))
    assert rollout["over bare calls"] == pytest.approx(rollout["seconds"] / (6 * made.bare))
    replayed = {"sd35_medium": 5, "flux_dev": 3}[made.name]
    assert update["ms per row and step"] == pytest.approx(1e3 * update["seconds"] / 2 / replayed)
    assert all(0 < line["estimated GiB"] < 1 for line in (rollout, decode, update))
    assert 0 <= ratio["value"] < 0.02 and made.trainer.update == 3  # warm-up and two repetitions


def test_variants_of_the_arithmetic_leave_the_first(bench):
    made = bench[0]
    own, casts = made.variants()
    assert (own["what"], casts["what"]) == ("own LoRA forward", "autocast and peft's")
    assert all(line[key] > 0 for line in (own, casts) for key in ("denoiser's call, s", "rollout, s", "update, s"))
    layers = made.trainer.policy.weights.layers().values()
    assert not made.trainer.policy.driver.casts and all("forward" in vars(layer) for layer in layers)


def test_rows_and_checkpointing_are_swept(bench):
    made = bench[0]
    times = 2 if made.name == "sd35_medium" else 1  # rows of a call, by guidance
    lines = [*made.sweep()]
    assert [(line["rows"], line["checkpointing"]) for line in lines] == [
        (rows * times, recomputes) for recomputes in (False, True) for rows in (4, 8)]
    assert all(line["with backward, ms per row"] > line["forward, ms per row"] > 0 for line in lines)
    assert not made.pipe.transformer.gradient_checkpointing


def test_previews_and_what_needs_a_gpu(bench):
    made = bench[0]
    assert [line["precision"] for line in made.previews()] == ["full", "int8"]
    assert [line["what"] for line in made.host()] == ["denoiser's call", "rollout", "update"]
    assert [*made.synchronisations()] == [{"phase": "none without a GPU"}]


def test_compiled_blocks_are_measured_apart_from_their_first_call(bench):
    made = bench[0]
    with torch.compiler.set_stance("force_eager"):  # compiling takes seconds
        lines = [*made.compiled()]
    assert [line["what"] for line in lines] == ["denoiser's call", "rollout", "update", "denoiser's call in int8"]
    assert all(line["first, s"] > 0 and line["seconds"] > 0 for line in lines)
    made.free()
    assert "pipe" not in vars(made) and "trainer" not in vars(made)


# A step of Flow-GRPO (2505.05470, eq. 9), with the signature of its code.
STEP = """
import torch

def sde_step_with_logprob(scheduler, velocity, timestep, x, noise_level=0.7, prev_sample=None):
    [s], [after] = ({float(scheduler.sigmas[scheduler.index_for_timestep(t) + k]) for t in timestep} for k in (0, 1))
    g2, d = noise_level**2 * s / (1 - s), after - s
    mean = x * (1 + g2 / (2 * s) * d) + velocity * (1 + g2 * (1 - s) / (2 * s)) * d
    std = (-g2 * d) ** 0.5
    return mean + std * torch.randn_like(x), torch.zeros(len(x)), mean, std
"""


def test_a_step_is_that_of_flow_grpo_where_it_is_importable(monkeypatch, tmp_path):
    (tmp_path / "flow_grpo" / "diffusers_patch").mkdir(parents=True)
    (tmp_path / "flow_grpo" / "diffusers_patch" / "sd3_sde_with_logprob.py").write_text(STEP)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("flow_grpo", "flow_grpo.diffusers_patch", "flow_grpo.diffusers_patch.sd3_sde_with_logprob"):
        monkeypatch.setitem(sys.modules, name, None)  # to be taken away at the end
        monkeypatch.delitem(sys.modules, name)
    own, other = gpu_sections.beside_flow_grpo("cpu")
    assert other["largest difference of means"] < 1e-5
    assert other["ours over theirs"] == pytest.approx(own["ms"] / other["ms"])


def test_a_step_alone_where_flow_grpo_is_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "flow_grpo", None)
    own, note = gpu_sections.beside_flow_grpo("cpu")
    assert own["ms"] > 0 and note == {"what": "flow_grpo is not importable: no ratio"}


def written(report) -> tuple[list, str]:
    return (json.loads((report.folder / "report.json").read_text())["sections"],
            (report.folder / "report.md").read_text())


def test_sections_have_budgets_and_every_line_is_written_at_once(tmp_path, monkeypatch):
    """The clock goes on by 10 seconds with every line; of 100, 60 are left after two sections."""
    now = [0.0]
    monkeypatch.setattr(gpu_report.time, "monotonic", lambda: now[0])
    report = gpu_report.Report(tmp_path / "out", 100, {"device": "none"})

    def lines(count: int):
        for number in range(count):
            now[0] += 10
            yield {"what": f"a|{number}", "value": number / 3}
            assert f"a/{number}" in written(report)[1]

    def fails():
        yield from lines(1)
        raise ArithmeticError("of the\nGPU")

    for name, seconds, work in (("whole", 30, partial(lines, 2)), ("long", 15, partial(lines, 9)), ("fails", 10, fails),
                                ("late", 51, partial(lines, 1))):
        report.run(gpu_report.Section(name, seconds, work))
    found, text = written(report)
    assert [(section["name"], len(section["lines"]), section["seconds"]) for section in found] == [
        ("whole", 2, 20), ("long", 2, 20), ("fails", 1, 10), ("late", 0, 0)]
    assert [section["note"] for section in found] == [
        None, "ended after its 15 s; further lines are left out", "failed: ArithmeticError: of the GPU",
        "skipped: 50 s are left, and it may take 51 s"]
    assert "## whole\n\n| what | value |\n|---|---|\n| a/0 | 0 |\n| a/1 | 0.3333 |\n" in text


def test_packages_are_told_in_a_line_each_and_core_ones_are_needed(monkeypatch, capsys, tmp_path):
    def version(name: str) -> str:
        if name in ("peft", "torchao", "ftfy"):
            raise gpu_report.PackageNotFoundError
        return "1.0"

    monkeypatch.setattr(gpu_report, "version", version)
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--output", str(tmp_path / "out"), "--tiny"])
    assert gpu_report.main() == 2 and not (tmp_path / "out").exists()
    lines = capsys.readouterr().out.splitlines()
    assert {"torch 1.0", "peft: missing, bring its wheel (without it: nothing runs)",
            "ftfy: missing, bring its wheel (without it: not needed here)",
            "torchao: missing, bring its wheel (without it: previews in low precision are left out)"} <= {*lines}
    assert lines[-1] == "nothing is measured without peft"


def test_one_command_writes_the_sections_that_are_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "flow_grpo", None)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--output", str(tmp_path), "--tiny", "--only", "flow_grpo"])
    assert gpu_report.main() == 0
    [section] = json.loads((tmp_path / "report.json").read_text())["sections"]
    assert section["name"] == "steps beside flow_grpo's" and len(section["lines"]) == 2 and section["note"] is None
    assert "- device: none" in (tmp_path / "report.md").read_text()

"""Benchmarks of scripts/: an epoch's overhead, and what is measured on one GPU."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers import tiny

sys.path.append(str(Path(__file__).parent.parent / "scripts"))

import bench_overhead  # noqa: E402
import gpu_models  # noqa: E402
import gpu_report  # noqa: E402
import gpu_sections  # noqa: E402


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


def test_calls_behind_a_trained_text_encoder_have_backwards_too():
    trainer = tiny.trainer(method="mix_grpo+texforce", parts__plan__size=2, train__micro_batch=8)
    bench_overhead.epoch(trainer)
    calls = bench_overhead.recorded(trainer)
    assert any(backward for *_, backward in calls)
    bench_overhead.bare(trainer, calls)


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
    stock, epoch = [*made.stock()], [*made.epoch()]
    assert made.trainer.optimization.update == 3  # a warm-up and two repetitions; other tests add theirs
    return made, stock, epoch


of_sd3 = pytest.mark.parametrize("bench", ["sd35_medium"], indirect=True)  # nothing there depends on the model


def test_the_model_alone_and_as_a_policy_are_measured(bench):
    made, (call, stock), (rollout, decode, update, ratio) = bench
    assert call["seconds"] == made.bare > 0 and call["ms per row"] == pytest.approx(1e3 * made.bare / 2)
    assert stock["over its denoiser's calls"] == pytest.approx(stock["seconds"] / (6 * made.bare))
    assert rollout["over bare calls"] == pytest.approx(rollout["seconds"] / (6 * made.bare))
    replayed = {"sd35_medium": 5, "flux_dev": 3}[made.name]
    assert update["ms per row and step"] == pytest.approx(1e3 * update["seconds"] / 2 / replayed)
    assert all(0 < line["estimated GiB"] < 1 for line in (rollout, decode, update))
    assert 0 <= ratio["value"] < 0.02


@of_sd3
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
    assert all(min(line["with backward, ms per row"], line["forward, ms per row"]) > 0 for line in lines)
    assert not made.pipe.transformer.gradient_checkpointing


@of_sd3
def test_previews_and_what_needs_a_gpu(bench):
    made = bench[0]
    assert [line["precision"] for line in made.previews()] == ["full", "int8"]
    assert [line["what"] for line in made.host()] == ["denoiser's call", "rollout", "update"]
    assert [*made.synchronisations()] == [{"phase": "none without a GPU"}]


@of_sd3
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

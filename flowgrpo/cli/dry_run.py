"""Pages of `flowgrpo check --gpu`: a dry run of a recipe's epoch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from flowgrpo.cli.show import print_table
from flowgrpo.errors import UserError

if TYPE_CHECKING:
    from flowgrpo.dry_run.estimate import Estimate
    from flowgrpo.gpus import GPU


def predict(model: str | None, recipe: str | None, overrides: dict[str, str], name: str, processes: int,
            as_json: bool, verbose: bool, trusted: bool = False) -> None:
    """Print whether a dry run of the recipe's epoch fits, and the nearest settings that do; exit code 2 otherwise.

    model: None for the recipe's own. overrides: dotted keys of the recipe. name: the GPU's. verbose: print the phases
    and what is counted too. trusted: as of `parse.load`.
    """
    from flowgrpo.config import parse
    from flowgrpo.dry_run import estimate, fit
    from flowgrpo.gpus import gpu_named
    from flowgrpo.methods import keys_read, validate
    from flowgrpo.methods.setup import Setup
    from flowgrpo.policies import build
    from flowgrpo.policies.weights import sharding

    gpu = gpu_named(name)
    if recipe is None:
        raise UserError("--gpu predicts an epoch of a recipe: give --recipe")
    config = build.with_method(parse.load(recipe, overrides | ({} if model is None else {"model": model}), trusted))
    kind = build.kind(config)
    setup = Setup(config, kind, validate.resolve(config, build.process(kind)))
    keys_read.check(setup)
    sharding.require_shardable(setup)
    config = fit.settle(config, gpu, processes)
    counts = estimate.dry_run(config, gpu, processes)
    above = counts.above(gpu.room)
    settings, better = fit.nearest_settings(config, gpu, counts, processes) if above else ({}, counts)
    report = _report(config.model, name, gpu, counts, settings, better) | {
        "processes": processes,
        "micro_batch": config.train.micro_batch, "checkpointing": config.train.checkpointing,
        "one_pass": config.train.one_pass,
        "epochs": config.train.epochs, "hours": round(counts.seconds * config.train.epochs / 3600, 4)}
    typer.echo(json.dumps(report, indent=2) if as_json else summary(report))
    if not as_json:
        _page(report) if verbose else typer.echo("--verbose: memory and seconds by phase, and what is counted")
    if above:
        raise typer.Exit(2)


def _report(model: str, name: str, gpu: GPU, counts: Estimate, settings: dict[str, Any], better: Estimate
            ) -> dict[str, Any]:
    """Return the report: memory in GiB, FLOPs in 10^12, for one process and an epoch."""
    from flowgrpo.dry_run.estimate import gib
    from flowgrpo.gpus import CONTEXT

    phases = {key: {"allocated": round(gib(phase.allocated), 2), "reserved": round(gib(phase.reserved), 2),
                    "tflop": round(phase.flops / 1e12, 1), "seconds": round(phase.seconds, 1),
                    "share": round(phase.seconds / counts.seconds, 3), "kernels": phase.kernels,
                    "waits": dict(phase.waits)} for key, phase in counts.phases.items()}
    fits = {"settings": settings, "peak": round(gib(better.peak), 2), "seconds": round(better.seconds, 1),
            "enough": not better.above(gpu.room)}
    return {"model": model, "gpu": name.upper(), "measured": False, "phases": phases,
            "rewards": round(gib(counts.rewards), 2), "context": round(gib(CONTEXT), 2),
            "peak": round(gib(counts.peak), 2), "room": round(gib(gpu.room), 2), "seconds": round(counts.seconds, 1),
            "waits_per_step": counts.step_waits, "waits_per_replay": counts.replay_waits,
            "above": counts.above(gpu.room), "nearest": fits if settings else None}


def summary(report: dict[str, Any]) -> str:
    """Return a line that says whether the recipe fits; if it does not, a second one with the settings that do."""
    hours, count = report["hours"], report["processes"]
    gpus = f"one {report['gpu']}" if count == 1 else f"{count} {report['gpu']}"
    line = (f"{'does not fit' if report['above'] else 'fits'}: {report['peak']:.1f} of {report['room']:.1f} GiB, "
            f"{hours:,.{0 if hours >= 10 else 1}f} h on {gpus} (computed)")
    if not report["above"]:
        return line
    return f"{line}\n{', '.join(report['above'])}: {_nearest(report['nearest'], report['room'])}"


def _page(report: dict[str, Any]) -> None:
    rows = [[name, f"{phase['allocated']:.1f}", f"{phase['reserved']:.1f}", f"{phase['tflop']:,.0f}",
             f"{phase['seconds']:,.1f}", f"{phase['share']:.0%}", f"{phase['kernels']:,}"]
            for name, phase in report["phases"].items()]
    print_table(["phase", "GiB", "reserved", "TFLOP", "seconds", "share", "kernels"], rows)
    lines = {"rows": f"{report['micro_batch']} at once (train.micro_batch), train.checkpointing "
                     f"{str(report['checkpointing']).lower()}, train.one_pass {str(report['one_pass']).lower()}",
             "rewards": f"{report['rewards']:.1f} GiB of reward models, beside every phase",
             "peak": f"{report['peak']:.1f} GiB of the {report['room']:.1f} that tensors can take on one "
                     f"{report['gpu']}: its memory less {report['context']:.1f} GiB of CUDA's context and 4 % between "
                     "the allocator's blocks",
             "reserved": "by the rules of torch's caching allocator; unused blocks are given back when memory runs out",
             "seconds": f"{report['seconds']:,.0f} an epoch; of each kernel the largest of FLOP / peak, bytes / "
                        "bandwidth and 2.5 us: computed, not measured",
             "hours": f"{report['hours']:,.1f} of all {report['epochs']:,} epochs (train.epochs), without the time of "
                      "rewards and evaluations",
             "host waits": f"{_waits(report['waits_per_step'])} per rollout step, "
                           f"{_waits(report['waits_per_replay'])} per replayed micro-batch"}
    for key, text in lines.items():
        typer.echo(f"{key:<10}  {text}")


def _waits(reasons: dict[str, float]) -> str:
    total = sum(reasons.values())
    return f"{total:g}" + (f" ({'; '.join(reasons)})" if reasons else "")


def _nearest(nearest: dict[str, Any] | None, room: float) -> str:
    if nearest is None:
        return "no setting helps"
    settings = ", ".join(f"{key}: {str(value).lower()}" for key, value in nearest["settings"].items())
    need = f"{nearest['peak']:.1f} GiB and {nearest['seconds']:,.0f} s"
    return f"with {settings} it fits, in {need}" if nearest["enough"] else \
        f"with all that helps ({settings}) it still needs {nearest['peak']:.1f} of {room:.1f} GiB"

"""Pages of `flowgrpo check --gpu`: a dry run of a recipe's epoch."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import typer

from flowgrpo.cli.root import print_table
from flowgrpo.config import Config, features, parse
from flowgrpo.errors import UserError
from flowgrpo.gpus import CONTEXT, GIB, GPU, gpu_named


def predict(model: str | None, recipe: str | None, overrides: dict[str, str], name: str, processes: int,
            as_json: bool, verbose: bool, trusted: bool = False) -> None:
    """Print whether a dry run of the recipe's epoch fits, and the nearest settings that do; exit code 2 otherwise.

    model: None for the recipe's own. overrides: dotted keys of the recipe. name: the GPU's. verbose: print the phases
    and what is counted too. trusted: as of `parse.load`.
    """
    gpu = gpu_named(name)  # first: the imports below load torch
    if recipe is None:
        raise UserError("--gpu predicts an epoch of a recipe: give --recipe")
    from flowgrpo.methods import keys_read
    from flowgrpo.policies import options
    from flowgrpo.policies.weights import memory_options, sharding

    config, told = options.fitting(parse.load(recipe, overrides | ({} if model is None else {"model": model}), trusted))
    setup = options.setup_of(config)
    for require in (keys_read.check, sharding.require_shardable, options.require_ahead, memory_options.require_waiting):
        require(setup)
    report = _predict(config, name, gpu, processes)
    if told and not as_json:
        typer.echo(f"{config.model}: {told}")
    typer.echo(json.dumps(report, indent=2) if as_json else summary(report))
    if not as_json:
        _page(report) if verbose else typer.echo("--verbose: memory and seconds by phase, and what is counted")
    if report["above"]:
        raise typer.Exit(2)


def _predict(config: Config, name: str, gpu: GPU, processes: int) -> dict[str, Any]:
    """Report of a recipe by dry runs, whose phases are shown on stderr: memory in GiB, FLOPs in 10^12, for one process
    and an epoch."""
    from flowgrpo.tools.dry_run import fit

    with _show_phases(name):
        config = fit.settle(config, gpu, processes)
        counts = fit.epoch(config, gpu, processes)
        settings, better = ({}, counts) if not counts.above(gpu.room) else fit.nearest_settings(
            config, gpu, counts, processes)
        taste = _of_taste(config, name, gpu, processes)
    counts, better = (each.correct(name, config.model) for each in (counts, better))
    phases = {key: {"allocated": round(phase.allocated / GIB, 2), "reserved": round(phase.reserved / GIB, 2),
                    "tflop": round(phase.flops / 1e12, 1), "seconds": round(counts.phase_seconds(key), 1),
                    "tbyte": round(phase.traffic / 1e12, 2),
                    "gpu_seconds": round(phase.seconds, 1), "host_seconds": round(phase.host, 1),
                    "share": round(counts.phase_seconds(key) / counts.seconds, 3), "kernels": phase.kernels,
                    "waits": dict(phase.waits)} for key, phase in counts.phases.items()}
    fits = {"settings": settings, "peak": round(better.peak / GIB, 2), "seconds": round(better.seconds, 1),
            "enough": not better.above(gpu.room)}
    return {"model": config.model, "gpu": name.upper(), "measured": False, "basis": counts.basis,
            "stored": counts.stored, "phases": phases,
            "rewards": round(counts.rewards / GIB, 2), "context": round(CONTEXT / GIB, 2),
            "away": f" but {' and '.join(sorted(counts.away))}" * bool(counts.away),
            "peak": round(counts.peak / GIB, 2), "room": round(gpu.room / GIB, 2), "seconds": round(counts.seconds, 1),
            "first_epoch": round(counts.first, 1),
            "waits_per_step": counts.step_waits, "waits_per_replay": counts.replay_waits,
            "above": counts.above(gpu.room), "nearest": fits if settings else None, "processes": processes,
            "micro_batch": config.train.micro_batch, "checkpointing": config.train.checkpointing,
            **{key.rpartition(".")[2]: attrgetter(key)(config) for key in _feature_keys()},
            "taste": taste, "epochs": config.train.epochs,
            "hours": round(counts.seconds * config.train.epochs / 3600, 4)}


def _of_taste(config: Config, name: str, gpu: GPU, processes: int) -> dict[str, float] | None:
    """Seconds per click and peak of `flowgrpo taste` on the recipe's model; None for one of many steps."""
    from flowgrpo.contrib.taste import session
    from flowgrpo.policies.pipelines import few_steps
    from flowgrpo.tools.dry_run import fit

    if processes > 1 or (config.image.frames or 1) > 1 or few_steps.ahead(config.model, config.load).why is None:
        return None
    sitting = session.of_recipe(config)
    counts = fit.epoch(sitting, gpu).correct(name, config.model)
    seconds = session.seconds_per_click(lambda phase: counts.phase_seconds(phase) if phase in counts.phases else 0.0,
                                        sitting.train.steps)
    return {"seconds": round(seconds, 2), "peak": round(counts.peak / GIB, 2)}


@contextmanager
def _show_phases(gpu: str) -> Iterator[None]:
    """Context manager: a bar of the phases of each dry run that is computed; without a terminal one line."""
    from unittest.mock import patch

    from flowgrpo.log import bar, in_terminal
    from flowgrpo.tools.dry_run.estimate import LOG, ORDER, START

    title = f"dry run on {gpu.upper()}, up to two minutes"
    shown: Any = None

    def show(phase: str) -> None:
        nonlocal shown
        if phase == START:
            if shown is None:
                if not in_terminal():
                    typer.echo(f"{title} ...", err=True)
                shown = bar(title=title, unit="phase", total=0, shown=in_terminal())
            shown.n, shown.total = shown.total, shown.total + len(ORDER) + 1
        elif phase in ORDER:
            shown.n = max(shown.n, shown.total - len(ORDER) + ORDER.index(phase))
        shown.set_postfix_str(phase)

    try:
        with patch.object(LOG, "info", show):
            yield
    finally:
        if shown is not None:
            shown.close()


def summary(report: dict[str, Any]) -> str:
    """Line that says whether the recipe fits; if it does not, a second one with the settings that do."""
    hours, count = report["hours"], report["processes"]
    gpus = f"one {report['gpu']}" if count == 1 else f"{count} {report['gpu']}"
    line = (f"{'does not fit' if report['above'] else 'fits'}: {report['peak']:.1f} of {report['room']:.1f} GiB, "
            f"{hours:,.{0 if hours >= 10 else 1}f} h on {gpus} ({report['basis']})")
    if sitting := report.get("taste"):
        line += (f"\nflowgrpo taste: {sitting['seconds']:.1f} s per click, {sitting['peak']:.1f} GiB "
                 f"({report['basis']})")
    if not report["above"]:
        return line
    return f"{line}\n{', '.join(report['above'])}: {_nearest(report['nearest'], report['room'])}"


def _page(report: dict[str, Any]) -> None:
    rows = [[name, f"{phase['allocated']:.1f}", f"{phase['reserved']:.1f}", f"{phase['tflop']:,.0f}",
             f"{phase['seconds']:,.1f}", f"{phase['share']:.0%}", f"{phase['kernels']:,}"]
            for name, phase in report["phases"].items()]
    print_table(["phase", "GiB", "reserved", "TFLOP", "seconds", "share", "kernels"], rows)
    lines = {"rows": f"{report['micro_batch']} at once (train.micro_batch), train.checkpointing "
                     f"{str(report['checkpointing']).lower()}" + "".join(
                         f", {key} {str(report[key.rpartition('.')[2]]).lower()}" for key in _feature_keys()),
             "rewards": f"{report['rewards']:.1f} GiB of reward models, beside every phase" + report["away"],
             "peak": f"{report['peak']:.1f} GiB of the {report['room']:.1f} that tensors can take on one "
                     f"{report['gpu']}: its memory less {report['context']:.1f} GiB of CUDA's context and 4 % between "
                     "the allocator's blocks",
             "reserved": "by the rules of torch's caching allocator; unused blocks are given back when memory runs out",
             "seconds": f"{report['seconds']:,.0f} an epoch: {report['basis']}; of each kernel the largest of FLOP / "
                        "peak, bytes / bandwidth and 2.5 us, of a phase at least 5 us of the host for each kernel",
             "first epoch": f"at least {report['first_epoch']:,.1f} s longer: kernels are loaded, attention is "
                            "planned, and the allocator grows",
             "hours": f"{report['hours']:,.1f} of all {report['epochs']:,} epochs (train.epochs), without the time of "
                      "rewards and evaluations",
             "host waits": f"{_waits(report['waits_per_step'])} per rollout step, "
                           f"{_waits(report['waits_per_replay'])} per replayed micro-batch"}
    if report["stored"]:
        lines["computed"] = f"at {report['stored']}, and stored"
    for key, text in lines.items():
        typer.echo(f"{key:<11}  {text}")


def _feature_keys() -> list[str]:
    return [key for feature in features.dry_runs(features.all()) for key in feature.reported]


def _waits(reasons: dict[str, float]) -> str:
    total = sum(reasons.values())
    return f"{total:g}" + (f" ({'; '.join(reasons)})" if reasons else "")


def _nearest(nearest: dict[str, Any] | None, room: float) -> str:
    if nearest is None:
        return "no setting of memory, micro_batch or checkpointing helps: take a larger GPU or a smaller size"
    settings = ", ".join(f"{key}: {str(value).lower()}" for key, value in nearest["settings"].items())
    need = f"{nearest['peak']:.1f} GiB and {nearest['seconds']:,.0f} s"
    return f"with {settings} it fits, in {need}" if nearest["enough"] else \
        f"with all that helps ({settings}) it still needs {nearest['peak']:.1f} of {room:.1f} GiB"

"""Epochs of a run: train, measure, log and save, until the last one or a stop."""

import math
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.evaluation import held_out
from flowgrpo.evaluation.looks import LOOKS
from flowgrpo.evaluation.report import symptoms
from flowgrpo.evaluation.report.verdict import last_error
from flowgrpo.evaluation.runs import HELD_OUT
from flowgrpo.nouns import quantity
from flowgrpo.policies.weights.change import UNUSABLE
from flowgrpo.storage.checkpoint import GROWN, UNSTEADY
from flowgrpo.training import endings, state
from flowgrpo.training.extension import Run
from flowgrpo.training.metrics import Log, progress_metrics
from flowgrpo.training.throughput import Throughput


def run(trainer: Run, folder: Path, measured: dict[str, Any]) -> None:
    """Run the remaining epochs; save in between, at the end, and when asked to stop."""
    train, every, progress = trainer.config.train, trainer.config.eval.every, trainer.progress
    run_log = Log(folder, trainer.accelerator, train.epochs, trainer.epoch, trainer.extensions.seconds_left)
    throughput = Throughput(trainer.config, trainer.policy, trainer.processes)
    trainer.log = run_log.log
    progress.begun = time.perf_counter() - progress.seconds
    with closing(run_log), trainer.stop, endings.save_on_stop(trainer, folder):
        if progress.evaluation_due:  # the run was stopped in the evaluation of its last epoch
            run_log.amend(measure(trainer, folder, measured))
        while trainer.epoch < train.epochs and not progress.best.should_stop:
            # Train an epoch. Weights that are ruined are not counted, so that no checkpoint has them.
            settled = settle_threads(trainer)
            with throughput.epoch(lambda: progress.sampled) as metrics:
                metrics |= trainer.run_epoch() | trainer.clock.pop()
            change = metrics["weights/change"] = progress.change(trainer.processes)
            if not math.isfinite(change):
                state.require_finite(trainer, epoch=trainer.epoch + 1)
            if not change <= UNUSABLE:
                raise UserError(f"the updates of epoch {trainer.epoch + 1} have ruined the weights, which changed by "
                                f"{change:.1e} times the size of a usual layer, and are not saved: train.lr "
                                f"({trainer.config.train.rate}) is too large: {endings.way_back(trainer, folder)}")
            metrics |= trainer.optimization.eps_share(metrics["grad_norm"])
            # Count it, as a checkpoint will have it: what follows may be stopped, and comes again on resuming.
            progress.reward_seconds += metrics["seconds/reward"]
            progress.seconds = time.perf_counter() - progress.begun
            trainer.epoch += 1
            progress.evaluation_due = bool(every) and trainer.epoch % every == 0
            progress.saved_counters = state.counters(trainer)
            progress.saved_counters |= {"change": change}
            if change >= symptoms.GROWN:
                progress.saved_counters |= {UNSTEADY: True, GROWN: True}
            metrics |= settled | {"evaluations": progress.saved_counters["evaluations"],
                                  "seconds": round(progress.seconds, 2)}
            # Measure and log. The line of metrics is written even if the evaluation fails.
            try:
                if progress.evaluation_due:
                    metrics |= measure(trainer, folder, measured)
            finally:
                run_log.epoch(trainer.epoch, metrics, progress_metrics(metrics, trainer.config))
            run_log.report(trainer)
            progress.saving.look()
            if trainer.epoch < train.epochs:
                require_scores(trainer, metrics)
            # Stop where asked, or save where it is due.
            with trainer.processes.collective():
                trainer.stop.check()
            last = trainer.epoch == train.epochs or progress.best.should_stop
            if last or trainer.epoch % train.save_every == 0:
                state.save_epoch(trainer, folder, last)


def settle_threads(trainer: Run) -> dict[str, int]:
    """Let torch use as many threads on a CPU as cores are free, the same on all processes; return them as a metric.
    An epoch that is repeated has those of its first time, on which the last bits of some sums depend."""
    progress = trainer.progress
    if trainer.policy.device.type != "cpu":
        return {}
    before = progress.repeated.get(trainer.epoch + 1)
    wished = torch.tensor([progress.threads.recommend() if before is None else before])
    count = int(trainer.processes.gather(wished).min())
    if line := progress.threads.use(count, "" if before is None else f"as epoch {trainer.epoch + 1} had"):
        trainer.log(line)
    return {"threads": torch.get_num_threads()}


def require_scores(trainer: Run, metrics: dict[str, Any]) -> None:
    """Raise UserError for a trained reward that has failed on all samples of `guard.unscored` epochs in a row.
    One that applies to none of an epoch's prompts is not counted. metrics: of the epoch."""
    unscored, most = trainer.progress.unscored, trainer.config.guard.unscored
    for name in trainer.scoring.functions:
        means, failed = (metrics.get(f"reward/{name}/{what}", 0) for what in ("mean", "failed"))
        unscored[name] = 0 if means == means else unscored[name] + bool(failed)
        if most and unscored[name] >= most:
            raise UserError(f"reward {name!r} has failed on every sample of {quantity(most, 'epoch')} in a row, so "
                            "that it trains nothing: see that it answers, and --resume; --guard.unscored=0 goes on "
                            "without its scores" + last_error(trainer.scoring.errors.get(name)))


def measure(trainer: Run, folder: Path, measured: dict[str, Any]) -> dict[str, float]:
    """Measure held-out scores after an epoch and return them; the time is not training's."""
    paused, progress = time.perf_counter(), trainer.progress
    scores = held_out.sample_images(trainer, measured, folder)
    metrics = {f"{HELD_OUT}{name}": value for name, value in scores.mean().items()}
    judged = {f"{HELD_OUT}{name}": value for name, value in trainer.extensions.judge(scores).items()}
    progress.best.see(metrics | judged, trainer.epoch, trainer.optimization.evaluated_weights)
    metrics |= {f"{LOOKS}{name}": share for name, share in scores.looks.relative_to(progress.base).items()}
    metrics |= trainer.extensions.on_measured(scores)
    progress.evaluation_due = progress.saved_counters["unmeasured"] = False
    progress.begun += time.perf_counter() - paused
    return metrics

"""Epochs of a run: train, measure, log and save, until the last one or a stop."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from flowgrpo.cores import Threads
from flowgrpo.errors import UserError
from flowgrpo.evaluation import held_out
from flowgrpo.evaluation.report import symptoms
from flowgrpo.evaluation.runs import HELD_OUT
from flowgrpo.nouns import counted
from flowgrpo.policies.weights.change import Change
from flowgrpo.storage.checkpoint import GROWN, UNSTEADY
from flowgrpo.training import endings, state
from flowgrpo.training.best import BestWeights
from flowgrpo.training.metrics import Log, shown
from flowgrpo.training.run import Run
from flowgrpo.training.saving import Saving
from flowgrpo.training.throughput import Throughput


class Progress:
    """Counters of a run, its best weights and the writer of its checkpoints.

    sampled: images or completions. seconds: of training, without evaluations; reward_seconds: of them, those that were
    spent on waiting for rewards. begun: the clock's time at which training would have begun without a pause.
    evaluation_due: the last epoch is trained, and its evaluation is not done.
    unscored: epochs in a row, up to the last one, in which each trained reward failed on every sample.
    change: how far training has moved the weights, called.
    best: the best weights that were measured. saving: the writer of checkpoints. saved_counters: the counters at the
    end of the last whole epoch, as a checkpoint has them. threads: torch's on a CPU; repeated: those of epochs that the
    run trained before it was interrupted, by their numbers.
    """

    def __init__(self, trainer: Run):
        self.sampled = 0
        self.seconds = 0.0
        self.reward_seconds = 0.0
        self.begun = 0.0
        self.evaluation_due = False
        self.unscored: Counter[str] = Counter()
        self.change = Change(trainer.policy.weights)
        self.best = BestWeights(trainer.config.eval, trainer.config.best_by)
        self.saving = Saving(trainer)
        self.saved_counters: dict[str, Any] = {}
        self.threads = Threads.of(trainer.policy.device)
        self.repeated: dict[int, int] = {}


def run(trainer: Run, folder: Path, measured: dict[str, Any]) -> None:
    """Run the remaining epochs; save in between, at the end, and when asked to stop."""
    train, every, progress = trainer.config.train, trainer.config.eval.every, trainer.progress
    log = Log(folder, trainer.accelerator, train.epochs, trainer.epoch)
    throughput = Throughput(trainer.config, trainer.policy, trainer.processes)
    trainer.say = log.say
    progress.begun = time.perf_counter() - progress.seconds
    with closing(log), trainer.stop, endings.saved(trainer, folder):
        if progress.evaluation_due:  # the run was stopped in the evaluation of its last epoch
            log.amend(measure(trainer, folder, measured))
        while trainer.epoch < train.epochs and not progress.best.stopped:
            settled = settle_threads(trainer)
            metrics = throughput.epoch(lambda: trainer.run_epoch() | trainer.clock.pop(), lambda: progress.sampled)
            change = metrics["weights/change"] = progress.change(trainer.processes)
            endings.require_usable(trainer, folder, change)
            metrics |= trainer.optimization.eps_share(metrics["grad_norm"])
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
            try:
                if progress.evaluation_due:
                    metrics |= measure(trainer, folder, measured)
            finally:
                log.epoch(trainer.epoch, metrics, shown(metrics, trainer.config))
            log.report(trainer)
            progress.saving.look()
            if trainer.epoch < train.epochs:
                require_scores(trainer, metrics)
            with trainer.processes.together():
                trainer.stop.check()
            last = trainer.epoch == train.epochs or progress.best.stopped
            if last or trainer.epoch % train.save_every == 0:
                progress.saving(folder, last)


def settle_threads(trainer: Run) -> dict[str, int]:
    """Let torch use as many threads on a CPU as cores are free, the same on all processes; return them as a metric.

    An epoch that is repeated has those of its first time, on which the last bits of some sums depend.
    """
    progress = trainer.progress
    if trainer.policy.device.type != "cpu":
        return {}
    before = progress.repeated.get(trainer.epoch + 1)
    wished = torch.tensor([progress.threads.wished() if before is None else before])
    count = int(trainer.processes.gather(wished).min())
    if line := progress.threads.use(count, "" if before is None else f"as epoch {trainer.epoch + 1} had"):
        trainer.say(line)
    return {"threads": torch.get_num_threads()}


def require_scores(trainer: Run, metrics: dict[str, Any]) -> None:
    """Raise UserError for a trained reward that has failed on all samples of `guard.unscored` epochs in a row.

    One that applies to none of an epoch's prompts is not counted. metrics: of the epoch.
    """
    unscored, most = trainer.progress.unscored, trainer.config.guard.unscored
    for name in trainer.scoring.functions:
        means, failed = (metrics.get(f"reward/{name}/{what}", 0) for what in ("mean", "failed"))
        unscored[name] = 0 if means == means else unscored[name] + bool(failed)
        if most and unscored[name] >= most:
            raise UserError(f"reward {name!r} has failed on every sample of {counted(most, 'epoch')} in a row, so that "
                            "it trains nothing: see that it answers, and --resume; --guard.unscored=0 goes on without "
                            "its scores")


def measure(trainer: Run, folder: Path, measured: dict[str, Any]) -> dict[str, float]:
    """Measure held-out scores after an epoch and return them; the time is not training's."""
    paused, progress = time.perf_counter(), trainer.progress
    scores = held_out.sample_pictures(trainer, measured, folder)
    metrics = {f"{HELD_OUT}{name}": value for name, value in scores.mean().items()}
    judged = {f"{HELD_OUT}{name}": value for name, value in trainer.extensions.judge(scores).items()}
    progress.best.see(metrics | judged, trainer.epoch, trainer.optimization.evaluated_weights)
    metrics |= trainer.extensions.on_measured(scores)
    progress.evaluation_due = progress.saved_counters["unmeasured"] = False
    progress.begun += time.perf_counter() - paused
    return metrics

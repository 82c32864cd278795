"""Metrics of a run: metrics.jsonl, trackers, progress bar, statistics of an update."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from flowgrpo.config.schema import Config
from flowgrpo.distributed.processes import Processes
from flowgrpo.evaluation.report import report, symptoms
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import finite, read_lines
from flowgrpo.training import tracker

if TYPE_CHECKING:
    from accelerate import Accelerator

    from flowgrpo.evaluation.trainer import Trainer


class Log:
    """Metrics of one run, one line of JSON per epoch, appended as they come; written by the first process."""

    def __init__(self, folder: Path, accelerator: Accelerator, total: int, first: int):
        self.path, self.accelerator, self.speaks = folder / "metrics.jsonl", accelerator, accelerator.is_main_process
        known = [line for line in read_lines(self.path, "epoch") if line["epoch"] <= first] if self.speaks else []
        self.start, self.recent = known[:symptoms.START], deque(known, maxlen=symptoms.FLAT)
        self.alerted = set[str]()
        self.bar = tqdm(total=total, initial=first, desc="training", unit="epoch",
                        disable=None if self.speaks else True)  # None: where there is no terminal
        self.total, self.first, self.began = total, first, time.monotonic()

    def epoch(self, epoch: int, metrics: dict[str, Any], shown: dict[str, str]) -> None:
        if not self.speaks:
            return
        line = finite({"epoch": epoch, **metrics})
        self.recent.append(line)
        self.start += [line] if len(self.start) < symptoms.START else []
        atomic.append_line(self.path, json.dumps(line))
        self.accelerator.log({k: v for k, v in metrics.items() if isinstance(v, (int, float))}, step=epoch)
        self.bar.set_postfix(shown)
        self.bar.update()
        if self.bar.disable:
            took = time.monotonic() - self.began
            left = took / max(epoch - self.first, 1) * (self.total - epoch)
            passed, coming = (tqdm.format_interval(seconds) for seconds in (took, left))
            print(f"epoch {epoch} of {self.total} ({passed}, {coming} left): "
                  + ", ".join(f"{key}={value}" for key, value in shown.items()), file=sys.stderr, flush=True)

    def amend(self, metrics: dict[str, float]) -> None:
        """Add metrics to the line of the last epoch, whose evaluation was left out."""
        if not self.speaks or not self.recent:
            return
        self.recent[-1] |= finite(metrics)
        kept = self.path.read_text().splitlines()[:-1]
        atomic.write_text(self.path, "\n".join([*kept, json.dumps(self.recent[-1])]) + "\n")
        self.accelerator.log(metrics, step=self.recent[-1]["epoch"])

    def report(self, trainer: Trainer) -> None:
        """Alert to new symptoms, write the report where one is due, and send the best and worst samples to the tracker.

        Those of the last epoch follow with the samples after training.
        """
        folder = self.path.parent
        if self.speaks:
            self._alert(symptoms.of_run(trainer.config, self._read(), trainer.first_ratio.clip), trainer.epoch)
        if report.during(trainer, folder) and trainer.epoch < trainer.config.train.epochs:
            tracker.show(self.accelerator, folder, trainer.epoch, "best", "worst")

    def _read(self) -> list[dict[str, Any]]:
        """Return the lines that symptoms read: the first of the run, and the last ones."""
        return [*(line for line in self.start if line["epoch"] < self.recent[0]["epoch"]), *self.recent]

    def _alert(self, present: list[symptoms.Symptom], epoch: int) -> None:
        """Print a line on each symptom that the epoch before did not have, and send it to the tracker."""
        for symptom in present:
            if symptom.name not in self.alerted:
                self.say(f"alert, epoch {epoch}: {symptom.text}")
                tracker.alert(self.accelerator, symptom, epoch)
        self.alerted = {symptom.name for symptom in present}

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.speaks:
            self.bar.write(text)

    def close(self) -> None:
        self.bar.close()


class UpdateStats:
    """Statistics of an epoch's updates, per grid step; read once, at the end."""

    def __init__(self):
        self.norms: list[torch.Tensor] = []
        self.decisions: list[torch.Tensor] = []  # [n,6]: step, log-ratio, clipped, loss, KL, mask

    def add(self, step: int, mask: Tensor, log_ratio: Tensor, clipped: Tensor, loss: Tensor, kl: Tensor | None = None
            ) -> None:
        """Add a batch, all [B,N]; mask: the decisions that count; kl: to the reference, None if it was not measured."""
        columns = (torch.full_like(log_ratio, step), log_ratio, clipped, loss,
                   torch.full_like(log_ratio, torch.nan) if kl is None else kl, mask)
        self.decisions.append(torch.stack([value.detach().float().flatten() for value in columns], 1))

    def summary(self, processes: Processes = Processes()) -> dict[str, Any]:
        """Return means over the decisions of all processes, which have the same norms.

        trained_updates: those with a gradient that was finite and not 0.
        """
        norms = torch.stack(self.norms).cpu() if self.norms else torch.zeros(1)
        trained = {"trained_updates": int((norms.isfinite() & (norms > 0)).sum())}
        decisions = torch.cat(self.decisions).cpu() if self.decisions else torch.empty(0, 6)
        decisions = processes.gather(decisions[decisions[:, 5] > 0, :5])
        if not len(decisions):
            return {"loss": 0.0, "grad_norm": 0.0} | trained
        of, log_ratio, clipped, loss, kl = decisions.unbind(1)
        steps = [int(step) for step in of.unique()]
        return {"loss": loss.mean().item(),
                "grad_norm": norms.mean().item(),
                **trained,
                "log_ratio_max": log_ratio.abs().max().item(),
                "clip_fraction": clipped.mean().item(),
                **({} if kl.isnan().all() else {"kl": kl.nanmean().item()}),
                **{f"ratio/step_{step}": log_ratio[of == step].exp().mean().item() for step in steps},
                **{f"clip_fraction/step_{step}": clipped[of == step].mean().item() for step in steps}}


def shown(metrics: dict[str, Any], config: Config) -> dict[str, str]:
    """Return the metrics of an epoch for the progress bar."""
    rewards_now = {name: f"{metrics[f'reward/{name}/mean']:.3f}" for name in config.rewards}
    return rewards_now | {"clip": f"{metrics.get('clip_fraction', 0):.2f}", "grad": f"{metrics['grad_norm']:.2g}"}

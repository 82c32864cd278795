"""Metrics of a run: metrics.jsonl, progress bar, statistics of an update, and trackers: TensorBoard, Weights & Biases
or Trackio.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from tqdm import tqdm

from flowgrpo.config.schema import Config
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.evaluation.report import report, snapshots, symptoms
from flowgrpo.evaluation.runs import HELD_OUT
from flowgrpo.evaluation.trainer import Trainer
from flowgrpo.methods.setup import Setup
from flowgrpo.notebook import Cell, in_notebook
from flowgrpo.packages import present
from flowgrpo.rewards import about
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import finite, read_lines, read_object

if TYPE_CHECKING:
    from accelerate import Accelerator
    from PIL import Image

    # Captions, and images, clips or texts.
    Samples: TypeAlias = list[tuple[str, Image.Image | snapshots.Video | str]]

FILE = "tracker.json"  # in the run's folder: its tracker, and its id there
PROJECT = "flowgrpo"


class TensorBoard:
    """Event files in the run's folder, below `events`, where a resumed run adds a file."""

    name = "tensorboard"

    def __init__(self, config: Config, run_id: str, epoch: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(config.folder / "events"), purge_step=epoch + 1 if epoch else None)
        self.writer.add_text("run", f"{config.name} ({run_id})", epoch)
        self.writer.add_text("config", "".join(f"    {line}\n" for line in config.yaml().splitlines()), epoch)

    def log(self, values: dict[str, float], step: int | None) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def show(self, name: str, samples: Samples, step: int) -> None:
        """Add an image or an animated GIF for each sample, and a text with the captions, which images lack here."""
        import numpy as np
        from tensorboard.compat.proto.summary_pb2 import Summary

        lines = []
        for number, (caption, sample) in enumerate(samples, 1):
            lines.append(f"{number}. {caption}" + (f"\n\n        {sample}" if isinstance(sample, str) else ""))
            if isinstance(sample, snapshots.Video):
                # `SummaryWriter.add_video` writes the same GIF, and needs moviepy.
                width, height = sample.frames[0].size
                image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=sample.gif())
                self.writer._get_file_writer().add_summary(
                    Summary(value=[Summary.Value(tag=f"{name}/{number}", image=image)]), step)
            elif not isinstance(sample, str):
                self.writer.add_image(f"{name}/{number}", np.asarray(sample), step, dataformats="HWC")
        self.writer.add_text(f"{name}/samples", "\n".join(lines), step)
        self.writer.flush()

    def alert(self, name: str, text: str, step: int) -> None:
        self.writer.add_text(f"alerts/{name}", text, step)
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


class WandB:
    """Run of Weights & Biases, in the project PROJECT."""

    name = "wandb"

    def __init__(self, config: Config, run_id: str, epoch: int):
        self.module: Any = importlib.import_module(self.name)
        self.run = self.module.init(project=PROJECT, config=config.model_dump(mode="json"), resume="allow",
                                    **self.run_arguments(config, run_id))

    def run_arguments(self, config: Config, run_id: str) -> dict[str, str]:
        return {"name": config.name, "id": run_id}

    def log(self, values: dict[str, Any], step: int | None) -> None:
        self.run.log(values, step=step)

    def show(self, name: str, samples: Samples, step: int) -> None:
        """Add the samples: images and clips with their captions, texts as a table."""
        images = [self.moving(sample, caption) if isinstance(sample, snapshots.Video) else
                    self.module.Image(sample, caption=caption) for caption, sample in samples
                    if not isinstance(sample, str)]
        texts = [[caption, sample] for caption, sample in samples if isinstance(sample, str)]
        if texts:
            self.log({name: self.module.Table(columns=["prompt", "text"], data=texts)}, step)
        if images:
            self.log(self.image_entries(name, images), step)

    def moving(self, video: snapshots.Video, caption: str) -> Any:
        """A clip as mp4, or without an encoder as GIF."""
        content, ending = video.file()
        return self.module.Video(io.BytesIO(content), caption=caption, format=ending)

    def alert(self, name: str, text: str, step: int) -> None:
        """Send a line on a symptom, as an alert; `log` has sent the step already."""
        self.run.alert(title=f"{name} at epoch {step}", text=text, level="WARN")

    def image_entries(self, name: str, images: list[Any]) -> dict[str, Any]:
        return {name: images}

    def finish(self) -> None:
        self.run.finish()


class Trackio(WandB):
    """Run of Trackio, in the project PROJECT. It knows runs by their names, and images one by one."""

    name = "trackio"

    def run_arguments(self, config: Config, run_id: str) -> dict[str, str]:
        return {"name": f"{config.name}-{run_id}"}

    def image_entries(self, name: str, images: list[Any]) -> dict[str, Any]:
        return {f"{name}/{number}": image for number, image in enumerate(images, 1)}

    def show(self, name: str, samples: Samples, step: int) -> None:
        with tempfile.TemporaryDirectory() as folder:  # logging copies the files of clips
            self.folder = Path(folder)
            super().show(name, samples, step)

    def moving(self, video: snapshots.Video, caption: str) -> Any:
        content, ending = video.file()
        file = self.folder / f"{uuid.uuid4().hex}.{ending}"
        file.write_bytes(content)
        return self.module.Video(str(file), caption=caption)

    def alert(self, name: str, text: str, step: int) -> None:
        """Send a line on a symptom; early versions have no alerts."""
        if hasattr(self.module, "alert"):
            self.module.alert(title=f"{name} at epoch {step}", text=text)


TRACKERS = {made.name: made for made in (TensorBoard, WandB, Trackio)}


def check(setup: Setup) -> None:
    """Raise UserError for a tracker that is not installed, or would prompt for a key without a terminal."""
    name = setup.config.tracker
    if name == "none":
        return
    if not present(name):
        raise UserError(f"tracker is {name!r}, but its package is not installed: pip install {name}, or set tracker "
                        "to tensorboard or none")
    asks = os.environ.get("WANDB_MODE") not in ("offline", "disabled", "dryrun") and not sys.stdin.isatty()
    if name == "wandb" and asks:  # there is no terminal to answer its prompt for a key
        import wandb

        if not getattr(getattr(wandb, "api", None), "api_key", "unknown"):
            raise UserError("tracker is 'wandb', but it has no key: `wandb login`, or set WANDB_API_KEY, "
                            "WANDB_MODE=offline or another tracker")


def start(accelerator: Accelerator, config: Config, epoch: int = 0, resumed: bool = False) -> None:
    """Open the tracker in the first process, after every check, so a rejected run leaves no empty one.
    epoch: the number of epochs that are done. Raises UserError if it does not open."""
    if config.tracker == "none" or not accelerator.is_main_process:
        return
    run_id = identity(config, resumed)
    try:
        accelerator.trackers.append(TRACKERS[config.tracker](config, run_id, epoch))
    except Exception as error:  # third-party: it may lack a network or refuse the key
        raise UserError(f"tracker {config.tracker!r} does not start ({type(error).__name__}: "
                        f"{' '.join(str(error).split())[:200]}): set tracker: none to run without it") from error


def identity(config: Config, resumed: bool) -> str:
    """The id of the run with its tracker: of a resumed run the earlier one, else a new one, which is kept."""
    file = config.folder / FILE
    if resumed and file.is_file():
        kept = read_object(file, "remove it, and the tracker begins a new run", tracker=str, id=str)
        if kept["tracker"] == config.tracker:
            return kept["id"]
    run_id = uuid.uuid4().hex[:8]
    atomic.write_text(file, json.dumps({"tracker": config.tracker, "id": run_id}) + "\n")
    return run_id


def show(accelerator: Accelerator, run: Path, step: int, *names: str) -> None:
    """Send samples of a run's snapshots to its tracker, after so many epochs.
    names: `before` and `after`, the held-out prompts; `best` and `worst`, samples of the last epoch. What the prompts
    bring is sent as `source`, `best_source` and `worst_source`."""
    for name in names if accelerator.trackers else ():
        last = name in ("best", "worst")
        content = read_object(run / snapshots.FOLDER / f"{'last' if last else name}.json", snapshots.MEND)
        cards = content[name if last else "cards"]
        brought = [(f"{card['prompt']} ({source['name']})", snapshots.content(source))
                   for card in cards for source in card.get("sources", ())]
        for key, samples in ((f"{name}_source" if last else "source", brought),
                             (name, [(caption(card), snapshots.content(card)) for card in cards])):
            for tracker in accelerator.trackers if samples else ():
                tracker.show(key, samples, step)


def log_held_out(accelerator: Accelerator, means: dict[str, float], step: int) -> None:
    """Send held-out means to the run's tracker, as `held_out/NAME`, after so many epochs."""
    accelerator.log({f"{HELD_OUT}{name}": mean for name, mean in means.items() if math.isfinite(mean)}, step=step)


def caption(card: dict[str, Any]) -> str:
    scores = [f"{name} {score:.3g}" for name, score in card["scores"].items() if score is not None]
    return f"{card['prompt']} ({', '.join(scores)})" if scores else card["prompt"]


class Log:
    """Metrics of one run, one line of JSON per epoch, appended as they come; written by the first process.

    left: as `Extension.seconds_left`.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, total: int, first: int,
                 left: Callable[[], float | None] | None = None):
        self.path, self.accelerator, self.speaks = folder / "metrics.jsonl", accelerator, accelerator.is_main_process
        known = [line for line in read_lines(self.path, "epoch") if line["epoch"] <= first] if self.speaks else []
        self.start, self.recent = known[:symptoms.START], deque(known, maxlen=symptoms.FLAT)
        self.alerted = set[str]()
        self.left, self.cell = left, Cell() if self.speaks and in_notebook() else None
        self.bar = tqdm(total=total if left is None else None, initial=first, desc="training", unit="epoch",
                        file=self.cell, ncols=self.cell and 100,  # below: None leaves it out without a terminal
                        disable=not self.speaks or (None if self.cell is None else False))
        self.total, self.first, self.began = total, first, time.monotonic()

    def epoch(self, epoch: int, metrics: dict[str, Any], shown: dict[str, str]) -> None:
        if not self.speaks:
            return
        line = finite({"epoch": epoch, **metrics})
        self.recent.append(line)
        self.start += [line] if len(self.start) < symptoms.START else []
        atomic.append_line(self.path, json.dumps(line))
        self.accelerator.log({k: v for k, v in metrics.items() if isinstance(v, (int, float))}, step=epoch)
        if self.cell is not None:
            for name in (key for key in metrics if key.startswith("reward/") and key.endswith("/mean")):
                self.cell.values.setdefault(name, []).append(metrics[name])
        self.bar.set_postfix(shown)
        self.bar.update()
        if self.bar.disable:
            took = time.monotonic() - self.began
            left: float | None = took / max(epoch - self.first, 1) * (self.total - epoch)
            of = f" of {self.total}"
            if self.left is not None:
                of, left = "", self.left()
            passed, coming = (tqdm.format_interval(seconds) for seconds in (took, left or 0))
            print(f"epoch {epoch}{of} ({passed}{f', {coming} left' if left is not None else ''}): "
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
        """Alert to new symptoms, write the report where one is due, and send the best and worst samples to the tracker,
        but for those of the last epoch, which follow after training."""
        folder = self.path.parent
        if self.speaks:
            ranges = {name: about(function).range for name, function in trainer.scoring.functions.items()}
            # Symptoms read the first lines of the run, and the last ones; each is told once, until it is gone.
            read = [*(line for line in self.start if line["epoch"] < self.recent[0]["epoch"]), *self.recent]
            present = symptoms.of_run(trainer.config, read, trainer.first_ratio.clip, ranges)
            for name, text in present.items():
                if name not in self.alerted:
                    self.log(f"alert, epoch {trainer.epoch}: {text}")
                    for tracker in self.accelerator.trackers:
                        tracker.alert(name, text, trainer.epoch)
            self.alerted = {*present}
        if report.during(trainer, folder) and trainer.epoch < trainer.config.train.epochs:
            show(self.accelerator, folder, trainer.epoch, "best", "worst")

    def log(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.speaks:
            self.bar.write(text)

    def close(self) -> None:
        self.bar.close()


class UpdateStats:
    """Statistics of an epoch's updates: sums, counts and maxima per grid step; read once, at the end."""

    def __init__(self):
        self.norms: list[torch.Tensor] = []
        # [8] of a batch: step, decisions, sums of loss, clipped, ratio and KL, decisions with a KL, largest |log-ratio|
        self.batches: list[torch.Tensor] = []

    def add(self, step: int, mask: Tensor, log_ratio: Tensor, clipped: Tensor, loss: Tensor, kl: Tensor | None = None
            ) -> None:
        """Add a batch, all [B,N]; mask: the decisions that count; kl: to the reference, None if it was not measured."""
        kept, log_ratio = mask > 0, log_ratio.detach().float()

        def total(values: Tensor) -> Tensor:
            return values.detach().float().where(kept, 0).sum()

        decisions, none = kept.sum().float(), log_ratio.new_zeros(())
        self.batches.append(torch.stack([
            log_ratio.new_full((), step), decisions, total(loss), total(clipped), total(log_ratio.exp()),
            none if kl is None else total(kl), none if kl is None else decisions,
            log_ratio.abs().where(kept, 0).max()]))

    def summary(self, processes: Processes = Processes()) -> dict[str, Any]:
        """Means over the decisions of all processes, which have the same norms.

        trained_updates: those with a gradient that was finite and not 0.
        """
        norms = torch.stack(self.norms).cpu() if self.norms else torch.zeros(1)
        trained = {"trained_updates": int((norms.isfinite() & (norms > 0)).sum())}
        batches = torch.stack(self.batches).cpu().double() if self.batches else torch.empty(0, 8, dtype=torch.float64)
        steps = merge_steps(processes.gather(merge_steps(batches[batches[:, 1] > 0])))
        if not len(steps):
            return {"loss": 0.0, "grad_norm": norms.mean().item()} | trained
        of, decisions, loss, clipped, ratio, kl, measured, largest = steps.unbind(1)
        named = [(int(step), *row) for step, *row in zip(of, (ratio / decisions).tolist(),
                                                         (clipped / decisions).tolist())]
        return {"loss": (loss.sum() / decisions.sum()).item(),
                "grad_norm": norms.mean().item(),
                **trained,
                "log_ratio_max": largest.max().item(),
                "clip_fraction": (clipped.sum() / decisions.sum()).item(),
                **({"kl": (kl.sum() / measured.sum()).item()} if measured.any() else {}),
                **{f"ratio/step_{step}": mean for step, mean, _ in named},
                **{f"clip_fraction/step_{step}": share for step, _, share in named}}


def merge_steps(rows: Tensor) -> Tensor:
    """Merge rows [n,8] of `UpdateStats` into one per grid step, in their order."""
    merged = [rows[rows[:, 0] == step] for step in rows[:, 0].unique()]
    return torch.stack([torch.cat([some[0, :1], some[:, 1:7].sum(0), some[:, 7:].amax(0)]) for some in merged]
                       ) if merged else rows


def progress_metrics(metrics: dict[str, Any], config: Config) -> dict[str, str]:
    rewards_now = {name: f"{metrics[f'reward/{name}/mean']:.3f}" for name in config.rewards}
    return rewards_now | {"clip": f"{metrics.get('clip_fraction', 0):.2f}", "grad": f"{metrics['grad_norm']:.2g}"}

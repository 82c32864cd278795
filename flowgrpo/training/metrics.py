"""Metrics of a run: metrics.jsonl, progress bar, statistics of an update, and trackers: TensorBoard, Weights & Biases
or Trackio.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import math
import os
import sys
import tempfile
import time
import uuid
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from tqdm import tqdm

from flowgrpo.config.schema import Config
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.evaluation.report import report, snapshots, symptoms
from flowgrpo.evaluation.report.symptoms import Symptom
from flowgrpo.evaluation.runs import HELD_OUT
from flowgrpo.methods.setup import Setup
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import finite, read_lines, read_object

if TYPE_CHECKING:
    from accelerate import Accelerator

    from flowgrpo.evaluation.trainer import Trainer

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
        """Add the metrics of an epoch."""
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def show(self, name: str, samples: Samples, step: int) -> None:
        """Add an image or an animated GIF for each sample, and a text with the captions, which images have none of
        here."""
        import numpy as np

        lines = []
        for number, (caption, sample) in enumerate(samples, 1):
            lines.append(f"{number}. {caption}" + (f"\n\n        {sample}" if isinstance(sample, str) else ""))
            if isinstance(sample, snapshots.Video):
                self._move(f"{name}/{number}", sample, step)
            elif not isinstance(sample, str):
                self.writer.add_image(f"{name}/{number}", np.asarray(sample), step, dataformats="HWC")
        self.writer.add_text(f"{name}/samples", "\n".join(lines), step)
        self.writer.flush()

    def _move(self, tag: str, video: snapshots.Video, step: int) -> None:
        """Add a clip. `SummaryWriter.add_video` writes the same GIF, and needs moviepy."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = video.frames[0].size
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=video.gif())
        self.writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

    def alert(self, name: str, text: str, step: int) -> None:
        """Add a line on a symptom."""
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
        """Return the arguments that identify a run."""
        return {"name": config.name, "id": run_id}

    def log(self, values: dict[str, Any], step: int | None) -> None:
        """Add the metrics of an epoch, or samples."""
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
        """Return a clip as mp4, or without an encoder as GIF."""
        content, ending = video.file()
        return self.module.Video(io.BytesIO(content), caption=caption, format=ending)

    def alert(self, name: str, text: str, step: int) -> None:
        """Send a line on a symptom, as an alert; `log` has sent the step already."""
        self.run.alert(title=f"{name} at epoch {step}", text=text, level="WARN")

    def image_entries(self, name: str, images: list[Any]) -> dict[str, Any]:
        """Return images under their keys."""
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
    """Raise UserError for a tracker whose package is not installed, or that would prompt for a key without a
    terminal."""
    name = setup.config.tracker
    if name == "none":
        return
    if importlib.util.find_spec(name) is None:
        raise UserError(f"tracker is {name!r}, but its package is not installed: pip install {name}, or set tracker "
                        "to tensorboard or none")
    if name == "wandb" and not _is_logged_in():
        raise UserError("tracker is 'wandb', but it has no key: `wandb login`, or set WANDB_API_KEY, "
                        "WANDB_MODE=offline or another tracker")


def _is_logged_in() -> bool:
    """True if wandb starts without a prompt, or a terminal is there to answer, or if that is unknown."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or sys.stdin.isatty():
        return True
    import wandb

    return bool(getattr(getattr(wandb, "api", None), "api_key", "unknown"))


def start(accelerator: Accelerator, config: Config, epoch: int = 0, resumed: bool = False) -> None:
    """Open the tracker in the first process, after every check, so a rejected run leaves no empty one.

    epoch: the number of epochs that are done. Raises UserError if it does not open.
    """
    if config.tracker == "none" or not accelerator.is_main_process:
        return
    run_id = identity(config, resumed)
    try:
        accelerator.trackers.append(TRACKERS[config.tracker](config, run_id, epoch))
    except Exception as error:  # third-party: it may lack a network or refuse the key
        raise UserError(f"tracker {config.tracker!r} does not start ({type(error).__name__}: "
                        f"{' '.join(str(error).split())[:200]}): set tracker: none to run without it") from error


def identity(config: Config, resumed: bool) -> str:
    """Return the id of the run with its tracker: of a resumed run the earlier one, else a new one, which is kept."""
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
    bring is sent as `source`, `best_source` and `worst_source`.
    """
    for name in names if accelerator.trackers else ():
        last = name in ("best", "worst")
        content = read_object(run / snapshots.FOLDER / f"{'last' if last else name}.json", snapshots.MEND)
        cards = content[name if last else "cards"]
        for key, samples in ((f"{name}_source" if last else "source", _prompt_images(cards)),
                             (name, [(caption(card), snapshots.content(card)) for card in cards])):
            for tracker in accelerator.trackers if samples else ():
                tracker.show(key, samples, step)


def _prompt_images(cards: list[dict[str, Any]]) -> Samples:
    """Return what the prompts of samples bring, with captions: their prompt and its name."""
    return [(f"{card['prompt']} ({source['name']})", snapshots.content(source))
            for card in cards for source in card.get("sources", ())]


def log_held_out(accelerator: Accelerator, means: dict[str, float], step: int) -> None:
    """Send held-out means to the run's tracker, as `held_out/NAME`, after so many epochs."""
    accelerator.log({f"{HELD_OUT}{name}": mean for name, mean in means.items() if math.isfinite(mean)}, step=step)


def alert(accelerator: Accelerator, symptom: Symptom, epoch: int) -> None:
    """Send a symptom of the last epochs to the run's tracker."""
    for tracker in accelerator.trackers:
        tracker.alert(symptom.name, symptom.text, epoch)


def caption(card: dict[str, Any]) -> str:
    """Return the prompt of a sample with its scores."""
    scores = [f"{name} {score:.3g}" for name, score in card["scores"].items() if score is not None]
    return f"{card['prompt']} ({', '.join(scores)})" if scores else card["prompt"]


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
            show(self.accelerator, folder, trainer.epoch, "best", "worst")

    def _read(self) -> list[dict[str, Any]]:
        """Return the lines that symptoms read: the first of the run, and the last ones."""
        return [*(line for line in self.start if line["epoch"] < self.recent[0]["epoch"]), *self.recent]

    def _alert(self, present: list[symptoms.Symptom], epoch: int) -> None:
        """Print a line on each symptom that the epoch before did not have, and send it to the tracker."""
        for symptom in present:
            if symptom.name not in self.alerted:
                self.log(f"alert, epoch {epoch}: {symptom.text}")
                alert(self.accelerator, symptom, epoch)
        self.alerted = {symptom.name for symptom in present}

    def log(self, text: str) -> None:
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


def progress_metrics(metrics: dict[str, Any], config: Config) -> dict[str, str]:
    """Return the metrics of an epoch for the progress bar."""
    rewards_now = {name: f"{metrics[f'reward/{name}/mean']:.3f}" for name in config.rewards}
    return rewards_now | {"clip": f"{metrics.get('clip_fraction', 0):.2f}", "grad": f"{metrics['grad_norm']:.2g}"}

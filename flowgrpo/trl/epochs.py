"""Ends of a run's epochs, for callbacks and an image hook."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flowgrpo.data import provenance
from flowgrpo.errors import UserError
from flowgrpo.rewards.find import find
from flowgrpo.rewards.preprocessing import eight_bit
from flowgrpo.rewards.reward import Batch, Reward, Wrapped, as_reward
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import read_lines

MOMENTS = ("on_train_begin", "on_log", "on_step_end", "on_train_end")  # of callbacks


class Epochs:
    """Ends of a run's epochs, for callbacks and an image hook.

    The first reward that is no reward model calls the listener. The first samples of an epoch, or the end of the run,
    end the epoch before.
    """

    def __init__(self, callbacks: Sequence[Any], args: Any, hook: Callable[..., Any] | None = None) -> None:
        if not isinstance(callbacks, (list, tuple)):
            raise UserError(f"callbacks: got a value of type {type(callbacks).__name__}, expected a list of callbacks")
        for callback in callbacks:
            if isinstance(callback, type) or not all(callable(getattr(callback, moment, None)) for moment in MOMENTS):
                raise UserError(f"callbacks: got {' '.join(repr(callback).split())[:80]}, expected objects of a "
                                "TrainerCallback of transformers")
        self.callbacks, self.args, self.hook = list(callbacks), args, hook
        self.folder, self.epoch, self.batches = Path(), -1, list[list[Any]]()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def of(self, folder: Path) -> Iterator[None]:
        """Context manager of a run in that folder."""
        self.folder, self.epoch = folder, -1
        self._tell("on_train_begin")
        yield
        self._end()
        self._tell("on_train_end")

    def watching(self, rewards: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return rewards with their weights or rules, one of them with the listener of samples, if there is one."""
        if not (self.callbacks or self.hook):
            return dict(rewards)
        plain = [key for key, weight in rewards.items() if not isinstance(weight, Mapping)]
        if not plain:
            raise UserError("callbacks: expected a reward function beside the reward models, whose calls tell epochs")
        first, others = plain[0], [key for key in rewards if key != plain[0]]
        function = find(first) if isinstance(first, str) else first
        place = provenance.place(function)
        rule = {"weight": rewards[first]} | ({} if place is None or isinstance(first, str) else {"use": place})
        name = first if isinstance(first, str) else getattr(first, "__name__", type(first).__name__)
        return {Watched(name, as_reward(function, name), self): rule} | {key: rewards[key] for key in others}

    def add(self, batch: Batch, scores: Any) -> None:
        """Take samples of an epoch with their scores."""
        if batch.epoch is None:
            return
        with self._lock:
            if batch.epoch != self.epoch:
                self._end()
                self.epoch = batch.epoch
            if self.hook:
                self.batches.append([batch.samples, tuple(batch.prompts), tuple(batch.metadata),
                                     torch.as_tensor(scores, dtype=torch.float32), {}])

    def _end(self) -> None:
        """End the epoch of which there are samples."""
        if self.epoch < 0:
            return
        if self.hook:
            self.hook(self.batches, self.epoch, Log(self.folder / "hook"))
        self.batches = []
        if self.callbacks:
            lines = read_lines(self.folder / "metrics.jsonl")
            self._tell("on_log", logs=lines[-1] if lines else {})
            self._tell("on_step_end")

    def _tell(self, moment: str, **further: Any) -> None:
        from transformers import TrainerControl, TrainerState

        state = TrainerState(global_step=max(self.epoch, 0), epoch=float(max(self.epoch, 0)))
        for callback in self.callbacks:
            getattr(callback, moment)(self.args, state, TrainerControl(), **further)


class Watched(Wrapped):
    """Reward whose samples and scores of an epoch are passed on."""

    def __init__(self, name: str, reward: Reward, epochs: Epochs) -> None:
        super().__init__(name, reward)
        self.__name__, self.epochs = name, epochs

    def __call__(self, batch: Batch) -> Any:
        scores = self.reward(batch)
        self.epochs.add(batch, scores)
        return scores


class Log:
    """Place of what an image hook logs: files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def log_images(self, images: Mapping[str, Any], step: int, **_: Any) -> None:
        """Write images [1, 3, H, W] in [0, 1] as PNGs, with their captions in captions.json."""
        from PIL import Image

        folder = self.folder / f"epoch_{step:04}"
        folder.mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(images.values()):
            Image.fromarray(eight_bit(torch.as_tensor(image).reshape(-1, *image.shape[-3:])[0])).save(
                folder / f"{number:03}.png")
        atomic.write_text(folder / "captions.json", json.dumps(list(images), ensure_ascii=False, indent=1))

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Add a line to log.jsonl."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | dict(values), default=str) + "\n")


def copy_weights(folder: Path, output_dir: str) -> None:
    """Copy the weights files of a run into another folder."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"no trained weights in {folder}: call train() first")
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    for file in files:
        if file.parent.resolve() != Path(output_dir).resolve():
            atomic.write_bytes(Path(output_dir) / file.name, file.read_bytes())

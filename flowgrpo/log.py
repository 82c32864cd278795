"""What a run says: a progress bar, `metrics.jsonl`, and a tracker (TensorBoard or wandb) through accelerate."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, no library warns and diffusers logs nothing: for calls whose warnings are known not to apply."""
    from diffusers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def finite(value: Any) -> Any:
    """The value with null for what JSON has no number for: the mean of a reward that applied to no sample."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Log:
    """Metrics of one run, one line of JSON per epoch, appended as they come."""

    def __init__(self, folder: Path, accelerator, total: int, first: int):
        self.path, self.accelerator = folder / "metrics.jsonl", accelerator
        self.bar = tqdm(total=total, initial=first, desc="training", unit="epoch")

    def epoch(self, epoch: int, metrics: dict[str, Any], shown: dict[str, str]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(finite({"epoch": epoch, **metrics})) + "\n")
        self.accelerator.log({k: v for k, v in metrics.items() if isinstance(v, (int, float))}, step=epoch)
        self.bar.set_postfix(shown)
        self.bar.update()

    def say(self, text: str) -> None:
        """A line above the progress bar."""
        self.bar.write(text)

    def close(self) -> None:
        self.bar.close()


class Clock:
    """Seconds per phase of an epoch: `with clock("rollout"): ...`."""

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        taken = {f"seconds/{phase}": round(value, 4) for phase, value in self.seconds.items()}
        self.seconds.clear()
        return taken


class Stats:
    """What an epoch's updates looked like, per grid step; read once, at the end."""

    def __init__(self):
        self.norms, self.losses = [], []
        self.ratios: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.clipped: dict[int, list[torch.Tensor]] = defaultdict(list)

    def add(self, step: int, log_ratio, clipped, loss) -> None:
        self.ratios[step].append(log_ratio.detach())
        self.clipped[step].append(clipped)
        self.losses.append(loss.detach().flatten())

    def summary(self) -> dict[str, Any]:
        if not self.losses:
            return {"loss": 0.0, "grad_norm": 0.0}
        ratios = {step: torch.cat(values) for step, values in self.ratios.items()}
        clipped = {step: torch.cat(values).float() for step, values in self.clipped.items()}
        return {"loss": torch.cat(self.losses).mean().item(),
                "grad_norm": torch.stack(self.norms).mean().item(),
                "log_ratio_max": max(values.abs().max().item() for values in ratios.values()),
                "clip_fraction": torch.cat(list(clipped.values())).mean().item(),
                **{f"ratio/step_{step}": values.exp().mean().item() for step, values in sorted(ratios.items())},
                **{f"clip_fraction/step_{step}": values.mean().item() for step, values in sorted(clipped.items())}}

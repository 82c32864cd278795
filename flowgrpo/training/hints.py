"""Hints: lines on what makes a run slow, or keeps it from learning. They do not stop a run."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flowgrpo.device import bf16_speed


def of_machine(precision: str, device: str | torch.device) -> Iterator[str]:
    """Return hints on a run's use of a CPU; none on another device.

    precision: as the recipe asks for, `auto` included.
    """
    if torch.device(device).type != "cpu":
        return
    if precision == "bf16" and (speed := bf16_speed()) < 1:
        yield (f"hint: this CPU has no bf16 arithmetic, and multiplies it {speed:.2g} times as fast as fp32: "
               "--precision=fp32")

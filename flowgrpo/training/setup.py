"""Setup of a run, as its checks read it: nothing is loaded yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowgrpo.config.geometry import BatchShape
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.methods.method import Method


@dataclass(frozen=True, eq=False)
class Setup:
    """kind: of the model, as in `policies.build`. shape: the batch of a process. processes: of the run, teams count as
    one; all_processes: every one. trained, measured: rewards by name. split: training and held-out prompts."""

    config: Config
    kind: str
    method: Method
    shape: BatchShape
    processes: int
    all_processes: int
    trained: Mapping[str, Any]
    measured: Mapping[str, Any]
    split: tuple[list[Prompt], list[Prompt]]

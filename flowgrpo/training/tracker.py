"""Tracker in addition to `metrics.jsonl`: accelerate's, which silently skips a missing one."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from flowgrpo.config.schema import Config
from flowgrpo.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator


def require(config: Config) -> None:
    """Raise UserError for a tracker whose package is not installed, or that would prompt for a key without a
    terminal."""
    name = config.tracker
    if name == "none":
        return
    if importlib.util.find_spec(name) is None:
        raise UserError(f"tracker is {name!r}, but its package is not installed: pip install {name}, or set tracker "
                        "to tensorboard or none")
    if name == "wandb" and not _logged_in():
        raise UserError("tracker is 'wandb', but it has no key: `wandb login`, or set WANDB_API_KEY, "
                        "WANDB_MODE=offline or another tracker")


def _logged_in() -> bool:
    """True if wandb starts without a prompt, or a terminal is there to answer, or if that is unknown."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or sys.stdin.isatty():
        return True
    import wandb

    return bool(getattr(getattr(wandb, "api", None), "api_key", "unknown"))


def start(accelerator: Accelerator, config: Config) -> None:
    """Open the tracker, after every check, so a rejected run leaves no empty one.

    Raises UserError if it does not open.
    """
    if config.tracker == "none":
        return
    try:
        accelerator.init_trackers("flowgrpo" if config.tracker == "wandb" else "events")
    except Exception as error:  # third-party: it may lack a network or refuse the key
        raise UserError(f"tracker {config.tracker!r} does not start ({type(error).__name__}: "
                        f"{' '.join(str(error).split())[:200]}): set tracker: none to run without it") from error

"""Precision of a run whose configuration says `auto`."""

from __future__ import annotations

from typing import Any

import torch

from flowgrpo.config import Config
from flowgrpo.device import AUTO, DTYPES, arithmetic, choose
from flowgrpo.policies.pipelines.load import denoisers


def resolve_precision(config: Config, device: str | torch.device, loaded: Any = None, begun: str | None = None
           ) -> tuple[Config, str]:
    """Return the configuration with a precision in place of `auto`, and that precision in words, with the reason.

    loaded: a pipeline, or the tuple of a language model, which keeps its own; begun: the precision in which a resumed
    run began, which it keeps on another machine too.
    """
    if config.precision != AUTO:
        return config, config.precision
    chosen, reason = choose(arithmetic(device))
    present = None if loaded is None else _precision_of(loaded)
    if present is not None:
        chosen, reason = present, "that of the loaded model"
    elif begun is not None:
        here = "" if begun == chosen else f"; a new run would take {chosen} here: {reason}"
        chosen, reason = begun, f"as the run began{here}"
    return config.model_copy(update={"precision": chosen}), f"{chosen} (auto: {reason})"


def _precision_of(loaded: Any) -> str | None:
    """Return the precision of a loaded model; None for a dtype that is no precision of a configuration."""
    modules = [loaded[0]] if isinstance(loaded, tuple) else list(denoisers(loaded).values())
    return next((name for name, dtype in DTYPES.items() if modules and modules[0].dtype == dtype), None)

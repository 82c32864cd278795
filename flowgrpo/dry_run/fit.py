"""Settings with which a recipe fits a GPU, by dry runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowgrpo.config.schema import Config


def batch_settings(config: Config, room: float, pipe: Any = None, processes: int = 1,
                   micro_batches: Sequence[int] = (), checkpointing: Sequence[bool] = (False, True)
                   ) -> dict[str, Any] | None:
    """Return the largest micro-batch that fits `room` bytes, as {"micro_batch": 8, "checkpointing": False}.

    config: with numbers in place of `auto`; its micro_batch and checkpointing are not read. pipe: the run's pipeline,
    on any device, which is not changed; None: of the configuration files of `config.model`. micro_batches: those to
    choose from; empty: all that divide the group, and its multiples by whole prompts. checkpointing: the settings to
    choose from, best first: one that fits with a micro-batch that keeps a GPU busy is taken before the next.
    None if nothing fits. Raises UserError for what a dry run does not cover.
    """
    raise NotImplementedError

"""Rollouts of a run by an engine: `rollout.engine`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from flowgrpo.contrib.engine import sampler
from flowgrpo.contrib.engine.client import Engine
from flowgrpo.contrib.engine.lora import LoraSender
from flowgrpo.contrib.engine.sampler import EngineSampler
from flowgrpo.methods.setup import Setup
from flowgrpo.training.extension import Extension


class EngineRollouts(Extension):
    """Rollouts whose samples an engine draws. Replays stay the trainer's, so that the first-ratio check of every run
    compares the engine's log-probabilities with theirs."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        own = trainer.config.rollout
        self.engine = Engine(own.engine, own.timeout, own.retries)
        self.lora = LoraSender(self.engine, own.folder)
        rollouts = trainer.rollouts
        for spec in rollouts.explorations(0):
            sampler.require(sampler.of_rollout(spec, rollouts.grid))
        served = self.engine.info()
        trainer.log(f"rollouts by {self.engine.url}: {served.get('model_path', 'an unnamed model')}, version "
                    f"{served.get('version', 'unknown')}")
        self._placed()

    @classmethod
    def require(cls, setup: Setup) -> None:
        sampler.check(setup)

    def _placed(self) -> None:
        """Have the present rollouts draw by the engine."""
        rollouts: Any = self.trainer.rollouts  # those of a denoiser, as the check of the run says
        if rollouts.drawer is None:
            rollouts.drawer = EngineSampler(self.engine, self.lora, rollouts, self.trainer.config.rollout.release)

    @contextlib.contextmanager
    def around_epoch(self) -> Iterator[None]:
        """Context manager: rollouts that a phase made anew draw by the engine too."""
        self._placed()
        yield

    def close(self) -> None:
        self.lora.close()

"""Work of some methods around an epoch's updates: critics, replayed groups, rehearsed samples, measured drift."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from flowgrpo.data.prompts import Prompt
from flowgrpo.rollouts.base import Encoded
from flowgrpo.samplers.rollout import Part
from flowgrpo.training import variants
from flowgrpo.training.measures import drifted
from flowgrpo.training.state import Run


def prepare(run: Run, parts: list[Part], conditioning: Encoded, prompts: Sequence[Prompt], weights: dict[int, float]
            ) -> tuple[list[Part], Encoded]:
    """Return the parts that are trained, with groups of earlier epochs where the method replays them, and their
    conditioning. prompts: of this process's groups; weights: of the steps."""
    variants.write(run, parts, prompts)
    if run.rehearsing is not None:
        run.fitted(partial(run.rehearsing.draw, run.prompts, run.scoring))
    if run.recorded is None:
        return parts, conditioning
    return run.recorded(parts, conditioning, [prompt.learned for prompt in prompts], run.epoch, weights)


def finish(run: Run, parts: list[Part], conditioning: Encoded) -> dict[str, Any]:
    """Learn from an epoch whose updates are done; return metrics. parts: the trained ones of this process."""
    if "drift" in run.method.needs:
        replay = partial(run.rollouts.replay, conditioning=conditioning)
        run.fitted(partial(drifted, run.method, run.memory, parts, replay, run.processes), "update")
    metrics = {name: float(value) for name, value in run.reported.items()}
    run.reported.clear()
    metrics |= run.data.metrics() | (run.rehearsing.metrics() if run.rehearsing else {})
    metrics |= (run.ahead.metrics() if run.ahead else {}) | (run.trajectory.epoch() if run.trajectory else {})
    if run.critic is not None:
        with run.clock("update"):
            metrics |= run.critic.fit()
    return metrics | (run.recorded.keep(run.epoch) if run.recorded else {})

"""Epochs of a dry run with `train.one_pass`: counted from those of a run that replays.

The forwards of the replays are left out of the update, since its graphs are those of the rollout. These are all there
from the rollout to the update.
"""

from __future__ import annotations

from flowgrpo.dry_run.meta_gpu import Phase
from flowgrpo.dry_run.repeats import Repeats

HOLDING = ("rollout", "decode", "base", "reward", "update")


def hold(phases: dict[str, Phase], calls: Repeats, times: float) -> None:
    """Change the phases of an epoch with replays into those of one without. times: the epoch over the counted calls."""
    for name in (name for name in HOLDING if name in phases):
        more = round(calls.kept * times) - calls.graph * (name == "update")  # which has one graph at a time already
        phases[name].allocated += more
        phases[name].reserved += more
    update, forwards = phases["update"], calls.forwards
    update.flops -= forwards.flops * times
    update.seconds -= forwards.seconds * times
    update.kernels -= round(forwards.kernels * times)
    update.traffic -= forwards.traffic * times
    update.waits.subtract({reason: round(count * times) for reason, count in forwards.waits.items()})

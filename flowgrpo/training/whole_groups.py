"""Check of a method whose groups are split over processes: parts that need a whole group in one process."""

from __future__ import annotations

from flowgrpo.config.schema import Config
from flowgrpo.errors import UserError
from flowgrpo.methods.method import Method
from flowgrpo.methods.setup import Setup
from flowgrpo.methods.targets import LatentEdits, RecordedPairs
from flowgrpo.rewards import pairwise
from flowgrpo.samplers.plans import Schedule


def check(setup: Setup) -> None:
    """Raise UserError where groups are split over processes and the method or a reward needs them whole."""
    if setup.shape.slices == 1:
        return
    config, processes = setup.config, setup.processes
    prompts, reasons = config.train.prompts, _reasons(config, setup.method, processes)
    reasons |= {f"the reward {name!r} compares the samples of a group": pairwise.sees_groups(reward)
                for name, reward in setup.trained.items()}
    for reason in (reason for reason, applies in reasons.items() if applies):
        more = -(-prompts // processes) * processes
        fewer = max(count for count in range(1, processes) if prompts % count == 0)
        raise UserError(f"{processes} processes would split the groups of {prompts} prompts, but {reason}: use "
                        f"train.prompts: {more}, or {fewer} processes")


def _reasons(config: Config, method: Method, processes: int) -> dict[str, bool]:
    """Return what needs whole groups, and whether this method or configuration has it."""
    reasons = {"parts.redraw replaces whole groups": method.redraw is not None,
               "memory.shard takes processes that sample alike, each samples of one group":
                   config.memory.shard and processes % config.train.prompts != 0,
               "a language model samples whole groups": method.for_tokens}
    if method.for_tokens:
        return reasons
    denoising, group = method.denoising, config.train.group
    planned = denoising.plan(config.train.steps, 0, config.seed)
    plans = (planned,) if isinstance(planned, Schedule) else tuple(planned)
    return reasons | {
        f"the plan {type(denoising.plan).__name__} grows trees of samples":
            len(plans) > 1 or any(plan.children for plan in plans),
        f"parts.roots: {denoising.roots} shares initial noises among some of a group":
            denoising.roots not in (None, 1, group),
        "parts.preview chooses the initial noises of a whole group": denoising.preview is not None,
        "parts.pruning compares the samples of a whole group": denoising.pruning is not None,
        "parts.tuning pulls towards the best sample of a whole group": bool(method.tuning.weight),
        "latent edits stand beside their bases": isinstance(method.target, LatentEdits),
        "recorded pairs are whole groups": isinstance(method.target, RecordedPairs)}

"""Demands of a run's rewards and groups: rewards that do not fit its method, its model or its prompts, and parts that
need a whole group in one process.
"""

from flowgrpo import rewards
from flowgrpo.advantages.token_credit import select_weights
from flowgrpo.config.schema import Config
from flowgrpo.errors import UserError
from flowgrpo.methods.method import Method
from flowgrpo.methods.setup import Setup
from flowgrpo.methods.targets import LatentEdits, RecordedPairs
from flowgrpo.policies import build
from flowgrpo.rewards import pairwise
from flowgrpo.samplers.plans import Schedule


def check(setup: Setup) -> None:
    """Raise UserError for rewards that cannot serve the method's parts.

    They are judges of pairs with a group or pool that they cannot share out, rewards without a gradient that is
    followed, and rewards that compare samples where clean predictions or deterministic samples are scored one by one.
    """
    method, trained = setup.method, setup.trained
    pools = [part.pool for part in (method.rollout.preview, method.rollout.pruning) if part is not None]
    pairwise.require(trained, setup.config.train.group, *pools)
    if method.target.follows_reward:
        rewards.require_gradient(trained)
    progress = method.credit.progress
    if progress is None and not method.credit.advantage.reads_baseline:
        return
    for name in select_weights(dict.fromkeys(trained, 1.0), progress.rewards if progress else ()):
        if pairwise.sees_groups(trained[name]) or rewards.sees_base(trained[name]):
            part = "parts.progress" if progress else "parts.advantage"
            raise UserError(f"{part} scores images one by one, but the reward {name!r} compares several: name others "
                            "in parts.progress.rewards, or leave it out")


def check_modality(setup: Setup) -> None:
    """Raise UserError for a reward that judges another modality than the model's, or what it does not have.
    A pipeline on the hub is not known before it is loaded."""
    known = {**setup.trained, **setup.extra_rewards}
    if modality := build.modality_ahead(setup.config, setup.loaded):
        rewards.require_modality(known, modality)
        if setup.method.for_tokens or modality == "text":
            rewards.require_for_tokens(known)


def check_clips(setup: Setup) -> None:
    """Raise UserError in the first process for a function that scores images where clips are generated."""
    if setup.first and build.modality_ahead(setup.config, setup.loaded) == "video":
        prompt = setup.split[0][0]
        rewards.require_clips({**setup.trained, **setup.extra_rewards}, prompt.text, prompt.metadata)


def check_routes(setup: Setup) -> None:
    """Raise UserError for a reward that applies to none of the prompts that it is for."""
    for routed, side in zip((setup.trained, setup.extra_rewards), setup.split):
        rewards.require_routes(routed, [prompt.metadata for prompt in side])
    for name, rule in (setup.config.trained | setup.config.extra_rewards).items():
        rewards.require_values(f"reward {name!r}, when", rule.when,
                               [prompt.metadata for side in setup.split for prompt in side])


def check_whole_groups(setup: Setup) -> None:
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
    """Reasons to need whole groups, in words; True for each that this method or configuration has."""
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

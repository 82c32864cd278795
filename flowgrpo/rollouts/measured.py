"""Rewards of samples beside those that are trained: previews, clean predictions, and deterministic samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch

from flowgrpo.advantages.token_credit import Progress
from flowgrpo.config.geometry import BatchShape
from flowgrpo.config.schema import Config
from flowgrpo.log import PhaseTimer
from flowgrpo.methods.method import Method
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights.low_precision import require_low_precision, with_quantised_weights
from flowgrpo.rollouts.base import TotalReward
from flowgrpo.samplers.base_samples import deterministic
from flowgrpo.samplers.old_policy import OldPolicy
from flowgrpo.samplers.preview import Preview, contrasting, previews, select_seeds
from flowgrpo.samplers.rollout import Part, Seed
from flowgrpo.types import unwrap


class Rollouts(Protocol):
    """Rollouts of a pipeline as they are measured (`denoising.DenoisingRollouts`)."""

    config: Config
    policy: PipelinePolicy
    method: Method
    geometry: BatchShape
    old_policy: OldPolicy
    clock: PhaseTimer
    decodes: bool

    def decode(self, finals: torch.Tensor, conditioning: Conditioning) -> torch.Tensor: ...

    def count(self, spent: int) -> None: ...

    def make_grid(self, steps: int) -> tuple[torch.Tensor, torch.Tensor | None]: ...


def require_previews(preview: Preview, policy: PipelinePolicy) -> None:
    """Raise UserError for previews in a precision that the policy's device lacks."""
    require_low_precision(preview.precision, policy.device)


def preview_seeds(rollouts: Rollouts, conditioning: Conditioning, seed: Seed, judge: TotalReward) -> Seed:
    """Return the seeds of the noises whose cheap previews score best and worst."""
    preview, policy = unwrap(rollouts.method.denoising.preview), rollouts.policy
    before = policy.evaluations
    with rollouts.clock("preview"):
        grid, rows = rollouts.make_grid(preview.steps), torch.arange(len(conditioning.prompts))
        with with_quantised_weights(policy, preview.precision):
            finals = previews(policy, conditioning, *grid, preview.pool, rollouts.geometry.micro_batch, seed)
        rollouts.count(policy.evaluations - before)
        of = conditioning.rows(rows.repeat_interleave(preview.pool))
        images = rollouts.decode(finals, of) if rollouts.decodes else None
    with rollouts.clock("reward"):
        totals = judge(images, preview.pool, None, finals.float().cpu())
        return select_seeds(seed, contrasting(totals, rollouts.config.train.group))


def score_predictions(rollouts: Rollouts, part: Part, conditioning: Conditioning, judge: TotalReward,
                      progress: Progress) -> Part:
    """Return the part with the rewards of the clean predictions before its trained steps, which are let go."""
    transitions: Any = part.transitions  # of a pipeline
    values, leaves = [], len(part.prompts)
    for taken in transitions:
        together = len(taken.x) // len(part.groups)
        totals = score_states(rollouts, unwrap(taken.clean), taken.prompts, conditioning, judge, together,
                              progress.rewards)
        values.append(totals.flatten().repeat_interleave(leaves // len(taken.x)))
    let_go = tuple(replace(taken, clean=None) for taken in transitions)
    return replace(part, transitions=let_go).with_measured(predicted=torch.stack(values, 1))


def score_baselines(rollouts: Rollouts, part: Part, conditioning: Conditioning, judge: TotalReward) -> Part:
    """Return the part with the reward of the deterministic sample from every leaf's initial noise."""
    before = rollouts.policy.evaluations
    with rollouts.clock("rollout"), rollouts.old_policy.drawing():
        finals, prompts, at = deterministic(rollouts.policy, conditioning, part, rollouts.geometry.micro_batch)
    rollouts.count(rollouts.policy.evaluations - before)
    return part.with_measured(baseline=score_states(rollouts, finals, prompts, conditioning, judge, 1).flatten()[at])


def score_states(rollouts: Rollouts, finals: torch.Tensor, prompts: torch.Tensor, conditioning: Conditioning,
                 judge: TotalReward, together: int, names: tuple[str, ...] = ()) -> torch.Tensor:
    """Return the total rewards [., together] of final states [n,*D] of the prompts [n]. names: of those that count."""
    with rollouts.clock("decode"):
        finals = finals.to(rollouts.policy.device)
        images = rollouts.decode(finals, conditioning.rows(prompts)) if rollouts.decodes else None
    with rollouts.clock("reward"):
        return judge(images, together, prompts, finals.float().cpu(), names)

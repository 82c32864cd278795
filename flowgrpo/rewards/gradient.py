"""Differentiable rewards: function or class with the attribute `differentiable = True`.

Such a reward takes images [B, 3, H, W] (videos [B, F, 3, H, W]) as floats in [0, 1] that may carry a graph, on any
device, and returns a tensor [B] in that graph. Everywhere else it is an ordinary reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowgrpo.config.reward_rules import RewardRule, WatchRule
from flowgrpo.errors import UserError
from flowgrpo.nouns import quantity
from flowgrpo.rewards.about import RewardFunction
from flowgrpo.rewards.compose import Composed
from flowgrpo.rewards.reward import Batch, Reward, as_reward, named_parts, require_finite, scores_latents, sees_base
from flowgrpo.user_code import call_user_code

if TYPE_CHECKING:
    from torch import Tensor


def require_gradient(rewards: Mapping[str, RewardFunction | Reward]) -> None:
    """Raise UserError for the first reward that is not differentiable, or whose rule changes its scores afterwards."""
    for name, reward in rewards.items():
        if not as_reward(reward).differentiable:
            raise UserError(f"reward {name!r} is not differentiable, and this method follows a reward's gradient: "
                            "choose one that is, such as scene_soft or pickscore, or a method that needs none, "
                            "such as mix_grpo")
        for label, part in named_parts(name, reward):  # whose inputs or rule a gradient may not reach
            if sees_base(part):
                raise UserError(f"reward {label!r} compares with the base's image (base = True), which a method that "
                                "follows a reward's gradient does not generate: take `base` away")
            if scores_latents(part):
                raise UserError(f"reward {label!r} scores latents, and this method follows a reward's gradient "
                                "through decoded images: take `scores` away")
            rule = part.rule if isinstance(part, Composed) else WatchRule()
            if isinstance(rule, RewardRule) and rule.transform:
                raise UserError(f"reward {label!r} has a transform, which a method that follows its gradient does not "
                                "see: take the transform away")
            if rule.on_error != "raise" or rule.timeout:
                raise UserError(f"reward {label!r} has on_error or timeout, but a method that follows its gradient "
                                "needs every answer, and waits for it: take them away")


def with_gradient(rewards: Mapping[str, RewardFunction | Reward]) -> dict[str, RewardFunction | Reward]:
    """The differentiable ones of the rewards."""
    return {name: reward for name, reward in rewards.items() if as_reward(reward).differentiable}


def value(rewards: Mapping[str, RewardFunction | Reward], weights: Mapping[str, float], images: Tensor,
          prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
    """Weighted sum [B] of differentiable rewards of images [B, ...], in one graph with them.

    A sample that a reward's rule excludes gets nothing from it.
    Raises UserError if a reward raises, or returns anything but a tensor [B] of finite numbers with a gradient.
    """
    held = getattr(images, "weights", images)
    require_finite(held.detach(), prompts)
    total = held.new_zeros(len(images))
    for name, reward in rewards.items():
        rows, scores = _score(name, reward, images, prompts, metadata)
        if rows:
            total = total.index_add(0, held.new_tensor(rows).long(), weights[name] * scores.to(total))
    return total


def _score(name: str, reward: RewardFunction | Reward, images: Tensor, prompts: Sequence[str],
           metadata: Sequence[dict[str, Any]]) -> tuple[list[int], Tensor]:
    """Rows that a reward applies to, and its scores of them in the images' graph."""
    from flowgrpo.rewards.combine import Combined  # loads torch

    composed = reward if isinstance(reward, Composed) else Composed(reward, name=name)
    rows = [i for i, entry in enumerate(metadata) if composed.rule.applies(entry)]
    if not rows:
        return rows, getattr(images, "weights", images).new_zeros(0)
    composed.bring()
    made = composed.made
    batch = Batch(images[rows], [prompts[i] for i in rows], [metadata[i] for i in rows])
    if isinstance(made, Combined):
        import torch

        columns = []  # of the parts, in one graph; NaN where one does not apply
        for place, part in enumerate(made.made.values()):
            own, scores = _score(f"{name}[{place}]", part, batch.samples, batch.prompts, batch.metadata)
            column = torch.full((len(rows),), torch.nan, dtype=torch.float64, device=scores.device)
            columns.append(column.index_copy(0, torch.tensor(own, device=scores.device).long(), scores.double()))
        scores = made.combine(torch.stack([column.to(columns[0].device) for column in columns], 1))
        there = scores.isfinite().nonzero()[:, 0].tolist()
        return [rows[i] for i in there], scores[there]
    message = (f"reward {name!r} raised on {quantity(len(rows), 'sample')} that carry a graph (first prompt: "
               f"{batch.prompts[0]!r})")
    return rows, _validate_scores(name, call_user_code(message, made, batch), batch.samples)


def require_graph(name: str, reward: RewardFunction | Reward, outputs: Tensor, prompts: Sequence[str],
                  metadata: Sequence[dict[str, Any]]) -> None:
    """Raise UserError if a reward gives outputs, a leaf, no gradient or one that is not finite; else as `value`."""
    import torch

    leaf = getattr(outputs, "weights", outputs)
    total = value({name: reward}, {name: 1.0}, outputs, prompts, metadata).sum()
    (gradient,) = call_user_code(f"the gradient of reward {name!r} cannot be computed (first prompt: {prompts[0]!r})",
                                 torch.autograd.grad, total, leaf, allow_unused=True)
    expected = f"expected a gradient by its images (first prompt: {prompts[0]!r})"
    if gradient is None:
        raise UserError(f"reward {name!r} is differentiable, but its numbers do not depend on what it is given: "
                        f"{expected}: does it detach, round or copy them?")
    if not gradient.isfinite().all():
        raise UserError(f"reward {name!r} is differentiable, but its gradient holds NaN or an infinity: {expected}")


def _validate_scores(name: str, scores: Any, images: Tensor) -> Tensor:
    import torch

    images = getattr(images, "weights", images)
    expected = f"expected a tensor of {len(images)} finite numbers that carries the images' graph"
    if not torch.is_tensor(scores) or scores.shape != images.shape[:1]:
        got = f"the shape {list(scores.shape)}" if torch.is_tensor(scores) else f"a {type(scores).__name__}"
        raise UserError(f"reward {name!r} is differentiable and returned {got}: {expected}")
    if scores.is_meta:
        raise UserError(f"reward {name!r} is differentiable and returned a tensor on the meta device, which has no "
                        f"values: {expected}")
    if images.requires_grad and not scores.requires_grad:
        raise UserError(f"reward {name!r} is differentiable and returned numbers without a gradient: {expected}")
    if not scores.isfinite().all():
        raise UserError(f"reward {name!r} is differentiable and returned NaN or an infinity: {expected}")
    return scores

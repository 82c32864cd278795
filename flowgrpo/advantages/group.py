"""Group-relative advantages: pure functions on rewards [P, G], P prompts with G samples each.

NaN means that a reward does not apply to a sample: it is left out of every statistic, and its advantage is 0. A group
has no variance if its deviation is at most 1e-6 of its largest absolute reward. Below that, float32 rewards differ by
rounding alone, and dividing by the deviation would train on the rounding. Its advantages are 0 at every scale but
"running", which reads the variance of a prompt's whole history.

Deviations of a group have ddof 1, as in DanceGRPO, MixGRPO, TRL and verl. Flow-GRPO's option of a deviation per prompt
and TraceRL have 0: advantages that are larger by sqrt(G / (G - 1)). "running" has ddof 0, as DDPO; B2-DiffuRL has 1.

`Pooled` compares the groups of one prompt as one.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import torch
from torch import Tensor

from flowgrpo.parts import Above, AtLeast, OneOf, part
from flowgrpo.types import Context, InDouble, wide

RELATIVE_NOISE = 1e-6
SCALES = ("group", "batch", "none", "leave_one_out")  # of group_relative; an Advantage also has "running"
ORDERS = ("advantages", "rewards", "gdpo")
TRIMS = "0 (none) or more, and below 0.5, the share of each tail"
Clamp: TypeAlias = Annotated[float, Above(0, words="above 0 (infinity for none)", named=False)]  # of the advantages
# What a context has of every sample, and its name in messages.
MEASURED = {"logp": "log-probabilities", "lengths": "lengths", "entropy": "entropies",
            "reference": "log-probabilities under the reference"}


class AdvantageRule(InDouble):
    """Comparison of the rewards of a group: base class.

    single: it compares no samples of one group with each other, so a group may be one sample.
    teaches: a group whose samples earn the same may have advantages other than 0.
    needs: what it reads that is not measured for every method: "entropy", the policy's; "lengths", of completions;
        "reference", log-probabilities under the reference; "drift", how far the policy moves in an epoch.
    reads_baseline: it compares with the deterministic sample from the same initial noise (`SampleMeasures.baseline`).
    adapts_weights: it moves the weights of rewards itself, so that no limit can.
    compares: False where advantages are the rewards themselves, such as labels.
    keeps_prior: it keeps a prior value of every prompt, which a redraw may read.
    clamp: the bound of advantages.
    """

    single = teaches = False
    needs: tuple[str, ...] = ()
    reads_baseline = False
    adapts_weights = keeps_prior = False
    compares = True
    clamp: float = math.inf

    def require(self, weights: Sequence[float]) -> None:
        """Raise ValueError for weights of a run's rewards that it cannot read."""

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        """Advantages [P, G]. rewards: [P, G, R], NaN where one does not apply; weights: [R]."""
        return self.compare(weighted_sum(rewards, weights), context).clamp(-self.clamp, self.clamp)

    def compare(self, total: Tensor, context: Context | None) -> Tensor:
        """Advantages [P, G] before they are clamped, of the weighted sum of the rewards [P, G], NaN where none applies.
        """
        raise NotImplementedError

    def prompt_weights(self, memory: dict[str, Any], prompts: Sequence[str]) -> Tensor | None:
        """Sampling weights of prompts, [len(prompts)], from what it has learned; None: all are equal."""
        return None


# It compares with a history, or the whole batch.
@part("advantage", single=lambda rule: rule.scale == "running", teaches=lambda rule: rule.scale == "running")
class Advantage(AdvantageRule):
    """One advantage of several weighted rewards: [P, G, R] and weights [R] to [P, G], within +-clamp.

    scale: one of `group_relative`, or "running", which needs a context and keeps the last `buffer` rewards of every
        prompt in its memory (see `running`).
    order:
      "advantages"  one advantage per reward, then their weighted sum (MixGRPO 2507.21802, DanceGRPO 2505.07818);
      "gdpo"        the same, then less its mean and over its deviation in the whole batch (GDPO, 2601.05242; groups of
                    zeros stay zeros);
      "rewards"     the weighted sum of rewards, then one advantage (Flow-GRPO 2505.05470).
    trim: the share of a group's samples at either end, rounded down, whose advantages become 0 (0 for none).
    buffer, least: for scale "running" only.
    """

    scale: Annotated[str, OneOf((*SCALES, "running"), named=False)] = "group"
    order: Annotated[str, OneOf(ORDERS, named=False)] = "advantages"
    clamp: Clamp = 5.0
    trim: Annotated[float, AtLeast(0, below=0.5, named=False, words=TRIMS)] = 0.0
    buffer: int = 32
    least: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.buffer:
            raise ValueError(f"least is {self.least} and buffer {self.buffer}, expected 1 <= least <= buffer")

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        weights = weights_like(rewards, weights)

        def compare(reward: Tensor, column: int) -> Tensor:
            if self.scale != "running":
                return group_relative(reward, self.scale)
            assert context is not None, "scale 'running' compares with earlier epochs: it needs a context"
            return running(reward, context, column, self.buffer, self.least)

        if self.order == "rewards":
            advantages = compare(weighted_sum(rewards, weights), 0)
        else:
            terms = [compare(reward, column) for column, reward in enumerate(rewards.unbind(2))]
            advantages = (torch.stack(terms, dim=2) * weights).sum(dim=2)
        if self.order == "gdpo":
            silent = (advantages == 0).all(dim=1, keepdim=True)
            advantages = whiten(advantages, ~rewards.isnan().all(dim=2)).masked_fill(silent, 0)
        return trim_extremes(advantages, self.trim).clamp(-self.clamp, self.clamp)


def group_relative(rewards: Tensor, scale: str = "group") -> Tensor:
    """Rewards [P, G] less their group's mean, over a deviation plus eps: [P, G], float32 or wider, computed in
    float64.

    scale:
      "group"          the group's own deviation, ddof 1, eps 1e-8 (DanceGRPO, MixGRPO);
      "batch"          the deviation of all P*G rewards, ddof 0, eps 1e-4 (Flow-GRPO): pass those of all processes;
      "none"           no division (Dr. GRPO);
      "leave_one_out"  less the mean of the others, n/(n-1) times the rewards less the mean of the group's n, no
                       division (RLOO, 2402.14740; LOOP, 2502.01600).
    """
    if scale not in SCALES:
        raise ValueError(f"scale is {scale!r}, expected one of {', '.join(SCALES)}")
    if rewards.ndim != 2:
        raise ValueError(f"rewards have shape {tuple(rewards.shape)}, expected [prompts, samples per prompt]")
    dtype, rewards = wide(rewards)[0].dtype, rewards.double()
    advantages = centre(rewards)
    if scale == "group":
        advantages = advantages / (group_std(rewards)[:, None] + 1e-8)
    if scale == "batch":
        spread = (rewards - rewards.nanmean()).square().nanmean().sqrt()
        advantages = advantages / (spread + 1e-4)
    if scale == "leave_one_out":
        count = (~rewards.isnan()).sum(dim=1, keepdim=True)
        advantages = advantages * count / (count - 1).clamp(min=1)
    return advantages.masked_fill(zero_variance(rewards)[:, None], 0).to(dtype)


def running(rewards: Tensor, context: Context, column: int = 0, buffer: int = 32, least: int = 16) -> Tensor:
    """Rewards [P, G] less the mean of their prompt's last `buffer` rewards, over their deviation, ddof 0, eps
    1e-6.

    The present rewards are included. Until a prompt has `least` of them, the statistics of the whole batch are used
    (DDPO, 2305.13301, the released tracker: 32 and 16). `column` separates several rewards.

    memory["running"] holds the history. Repeated calls in an epoch, for the inner nodes of a tree or after a resume,
    all start from the epochs before. The first call's rewards are stored.
    """
    (rewards,) = wide(rewards)
    assert len(context.groups.prompts) == len(rewards), (len(context.groups.prompts), rewards.shape)
    seen = context.run.memory.setdefault("running", {}).setdefault(str(column), {})
    advantages = torch.zeros_like(rewards)
    everything = rewards[~rewards.isnan()]
    for prompt, rows in rows_of(context.groups.prompts).items():
        present = rewards[rows]
        values = present[~present.isnan()]
        if len(values):
            past = epochs_before(seen, prompt, context.run.epoch, values.tolist(), buffer)
            history = values.new_tensor((past + values.tolist())[-buffer:])
            known = history if len(history) >= least else everything
            if not zero_variance(known[None]):
                advantages[rows] = (present - known.mean()) / (known.std(correction=0) + 1e-6)
    return advantages.masked_fill(rewards.isnan(), 0)


def epochs_before(seen: dict[str, Any], prompt: str, epoch: int, present: list[Any], most: int) -> list[Any]:
    """The last `most` entries of a prompt from the epochs before. seen: the memory, in which the first call of an epoch
    stores its own, `present`."""
    entry = seen.setdefault(prompt, {"epoch": epoch, "past": [], "present": present})
    if entry["epoch"] != epoch:
        past = (entry["past"] + entry["present"])[-most:]
        entry = seen[prompt] = {"epoch": epoch, "past": past, "present": present}
    return entry["past"]  # type: ignore[no-any-return]  # JSON


def weighted_sum(rewards: Tensor, weights: Tensor | Sequence[float]) -> Tensor:
    """Weighted sum of several rewards [P, G, R]: [P, G].

    A missing reward is replaced by its group's mean, so its presence moves no sample. A sample without any is NaN.
    """
    double, missing = rewards.double(), rewards.isnan()
    means = double.nanmean(dim=1, keepdim=True).nan_to_num(0)
    total = (torch.where(missing, means, double) * weights_like(double, weights)).sum(dim=2)
    return total.masked_fill(missing.all(dim=2), torch.nan).to(wide(rewards)[0].dtype)


def whiten(values: Tensor, applies: Tensor) -> Tensor:
    """Values [P, G] less their mean, over their deviation (ddof 0, eps 1e-4), of all those where `applies`.

    The others are 0, and so are all if they differ by rounding alone.
    """
    present = values.masked_fill(~applies, torch.nan)
    less_mean = present - present.nanmean()
    spread = less_mean.square().nanmean().sqrt()
    noise = spread <= RELATIVE_NOISE * present.abs().nan_to_num(0).max()
    return (less_mean / (spread + 1e-4)).masked_fill(~applies | noise, 0)


def trim_extremes(advantages: Tensor, share: float) -> Tensor:
    """Advantages [P, G] with 0 for the floor(share * G) lowest and highest of a group each; ties by position."""
    size = advantages.shape[1]
    cut = int(share * size + 1e-9)  # 0.29 * 100 is 28.999999999999996
    ranked = advantages.argsort(dim=1, stable=True)
    return advantages.scatter(1, torch.cat([ranked[:, :cut], ranked[:, size - cut :]], dim=1), 0)


def below(rewards: Tensor, width: int) -> Tensor:
    """Value of every node of a balanced tree, the mean reward of the `width` leaves below it: [P, G, R] to [P, G/width,
    R] (BranchGRPO, 2509.06040).

    NaN if no leaf has one.
    """
    return rewards.unflatten(1, (-1, width)).nanmean(dim=2) if width > 1 else rewards


def zero_variance(rewards: Tensor) -> Tensor:
    """Groups of rewards [P, G] without variance or with fewer than two applicable rewards: bool [P]."""
    rewards = rewards.double()
    return group_std(rewards) <= RELATIVE_NOISE * rewards.abs().nan_to_num(0).amax(dim=1)


def centre(rewards: Tensor) -> Tensor:
    """Rewards [P, G] less their group's mean, 0 where not applicable."""
    return (rewards - rewards.nanmean(dim=1, keepdim=True)).masked_fill(rewards.isnan(), 0)


def group_std(rewards: Tensor, ddof: int = 1) -> Tensor:
    """Deviation of each group's applicable rewards [P, G], 0 if there are at most ddof: [P]."""
    count = (~rewards.isnan()).sum(dim=1) - ddof
    return (centre(rewards).square().sum(dim=1) / count.clamp(min=1)).sqrt()


def rows_of(prompts: Sequence[str]) -> dict[str, list[int]]:
    """Group indices of every prompt, in the order of their first appearance."""
    rows: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows.setdefault(prompt, []).append(row)
    return rows


def of_samples(context: Context | None, name: str, rewards: Tensor, part: str) -> Tensor:
    """Measure of every sample in a context, [P, G], for rewards [P, G] or [P, G, R]. name: one of `MEASURED`.

    part: the name of the part that reads it, for the error.
    """
    assert context is not None, f"{part} needs a context"
    values = getattr(context.samples, name)
    what = MEASURED[name]
    if values is None:
        raise ValueError(f"{part} reads the samples' {what}, and this method has none: choose another part")
    if values.shape != rewards.shape[:2]:
        raise ValueError(f"{part}: {what} of {tuple(values.shape)} samples for rewards of "
                         f"{tuple(rewards.shape[:2])}, expected the same: it does not go with a method that branches")
    return values


def weights_like(rewards: Tensor, weights: Tensor | Sequence[float]) -> Tensor:
    """Weights [R] as a tensor for rewards [P, G, R]. Raises ValueError for other shapes."""
    weights = torch.as_tensor(weights, dtype=rewards.dtype, device=rewards.device)
    if rewards.ndim != 3 or weights.shape != rewards.shape[2:]:
        raise ValueError(f"rewards have shape {tuple(rewards.shape)} and weights {tuple(weights.shape)}, "
                         "expected [prompts, samples, rewards] and one weight per reward")
    return weights


@part("advantage")
class Pooled(AdvantageRule):
    """`group_relative` of the weighted sum, with all groups of one prompt in an epoch as one group.

    For an epoch that samples a prompt several times, such as that of `Knapsack` (2509.25849).
    """

    scale: Literal["group", "none", "leave_one_out"] = "group"
    clamp: Clamp = math.inf

    def compare(self, total: Tensor, context: Context | None) -> Tensor:
        assert context is not None, "Pooled needs a context with all prompts"
        assert len(context.groups.prompts) == len(total), (len(context.groups.prompts), total.shape)
        advantages = torch.zeros_like(total)
        for rows in rows_of(context.groups.prompts).values():
            advantages[rows] = group_relative(total[rows].reshape(1, -1), self.scale).view(len(rows), -1)
        return advantages

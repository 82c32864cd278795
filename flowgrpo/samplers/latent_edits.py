"""Edits of final latents: the recorded decisions of EXPO (2507.07986) for a frozen generator.

A small policy reads a final state x0 and its prompt and draws a decision u ~ N(m, std^2). The edited state is x0 +
bound * tanh(u). The density of u is that of the edit up to the Jacobian of the tanh, which has no weights, so ratios
are the same. A decision is recorded, replayed and scored as a transition "from x0 to u" under N(m, std^2); a base that
stays as it is is the transition to u = 0, which no policy drew.

An editor has the networks of an `Edit` (`Editor` in policies/pipelines/edits.py): its `replay` gives the mean of a
decision, its `value` the worth of a final state.

Samples are those of EXPO's acting policy: of n bases and their n edits the one that the critic values most. For a loss
by the edit's ratio they are pairs: half of a group are bases, and each base is followed by its edit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from flowgrpo import gaussian
from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.samplers.growth import replay, rescore, single_score
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.rollout import EncodedPrompts, Part, RolloutSpec, Seed, fork_seed, generators
from flowgrpo.samplers.scheduler import noise_like
from flowgrpo.types import Gaussian, Transitions, wide


@part("edit")
class Edit:
    """Bounded edit of the final latents by a tanh-Gaussian policy (EXPO, 2507.07986).

    bound: largest change of a latent value (0.05 to 0.7 in the paper).
    std: of the decision before the tanh, in training.
    width, depth: of the small networks of policy and critic.
    candidates: bases per sample; the critic chooses one of them and of their edits.
    acting: samples of training: "argmax", each such a choice, as at inference, but of drawn edits; or "pairs", a base
        and its edit in turn, for a loss by the edit's ratio.
    """

    bound: Annotated[float, Above(0)] = 0.3
    std: Annotated[float, Above(0)] = 0.3
    width: Annotated[int, AtLeast(1)] = 64
    depth: Annotated[int, AtLeast(1)] = 2
    candidates: Annotated[int, AtLeast(1)] = 1
    acting: Literal["argmax", "pairs"] = "argmax"

    def __post_init__(self) -> None:
        if self.width % 4:
            raise ValueError(f"Edit: width is {self.width}, expected a number that 4 divides")

    def bases(self, group: int) -> int:
        """Number of base samples that are drawn for a group in training."""
        return group // 2 if self.acting == "pairs" else group * self.candidates

    def __call__(self, decision: Tensor) -> Tensor:
        """Edit [B,*D], within +-bound, of decisions [B,*D]."""
        return self.bound * decision.tanh()

    def apply(self, x: Tensor, decision: Tensor) -> Tensor:
        """Edited states [B,*D], rounded as x is; x itself where a decision is 0."""
        state, decision = wide(x, decision)
        return (state + self(decision)).to(x.dtype)

    def transition(self, x: Tensor, mean: Tensor, grid: Tensor, i: int) -> Gaussian:
        """Kernel N(mean, std^2), with the mean [B,*D] of the editing network."""
        (mean,) = wide(mean)
        return Gaussian(mean, torch.tensor(self.std, dtype=mean.dtype))

    def exploration(self, group: int, solver: Callable, score_means: bool, keep_means: bool) -> RolloutSpec:
        """Edits as an exploration in which every state has one step."""
        return RolloutSpec(torch.tensor([1.0, 0.0]), Schedule((0,), (0,)), self.transition, solver, group, group,
                           score_means=score_means, keep_means=keep_means)


@dataclass(frozen=True, eq=False)
class Edits(Transitions):
    """Decisions of edits and the rewards of their samples.

    x: [n,*D], final states.
    x_next: [m,*D], decisions, 0 of a sample that is its base.
    rewards: [m], or None before they are known.
    proposed: [m,*D], the decisions that the policy drew for the samples' bases.
    """

    rewards: Tensor | None = None
    proposed: Tensor | None = None

    def select(self, keep: Tensor) -> "Edits | None":
        left = super().select(keep)
        if left is None or left is self:
            return None if left is None else self
        rewards, proposed = (None if value is None else value[keep.to(value.device)]
                             for value in (self.rewards, self.proposed))
        return Edits(**vars(left), rewards=rewards, proposed=proposed)


def apply_edits(editor: Any, conditioning: EncodedPrompts, part: Part, exploration: RolloutSpec, micro_batch: int,
                seed: Seed) -> Part:
    """Part with samples in place of its finals, by the present weights: pairs, or those of the acting policy.

    seed: seeds of the leaves, as in the rollout; the noise of an edit is a separate draw.
    """
    (x0,) = part.finals
    count = editor.edit.bases(exploration.group)
    seeds = (fork_seed(seed(int(p), leaf % count), 2) for leaf, p in enumerate(part.prompts))
    noise = noise_like(x0, generators(seeds))
    with torch.no_grad():
        means = torch.cat([editor.replay(conditioning.rows(part.prompts[rows]), x0[rows.to(x0.device)])
                           for rows in torch.arange(len(x0)).split(micro_batch)])
    drawn = gaussian.sample(editor.edit.transition(x0, means, exploration.grid, 0), noise)
    if editor.edit.acting == "pairs":
        bases = torch.arange(len(x0))
        parent = torch.arange(len(x0)).repeat_interleave(2)
        decisions = torch.stack([torch.zeros_like(drawn), drawn], 1).flatten(0, 1)
    else:
        chosen = _choose(editor, conditioning, part.prompts, x0, drawn, micro_batch)
        bases = chosen % len(x0)
        parent = torch.arange(len(chosen))
        decisions = torch.cat([torch.zeros_like(drawn), drawn])[chosen]
    # Samples and recorded decisions [m,*D], not scored yet, at the bases [n] that samples come from.
    of, kept = bases[parent], decisions.to(editor.states)
    unscored = single_score(torch.zeros(len(kept)), kept if exploration.keep_means else None)
    taken = Edits(0, x0[bases.to(x0.device)].to(editor.states), part.prompts[bases], parent, kept, unscored,
                  proposed=drawn[of].to(editor.states))
    part = replace(part, prompts=part.prompts[of], exploration=exploration, transitions=(taken,),
                   finals=(editor.edit.apply(x0[of.to(x0.device)], decisions),),
                   seeds=None if part.seeds is None else part.seeds[of])
    with torch.no_grad():
        return rescore(part, replay(editor, conditioning, part, micro_batch))


def _choose(editor: Any, conditioning: EncodedPrompts, prompts: Tensor, x0: Tensor, drawn: Tensor, micro_batch: int
            ) -> Tensor:
    """Choices of the acting policy among bases x0 [b,*D] and their edits: int64 [b / candidates].

    `candidates` consecutive bases make a sample. A choice below b is a base, b + k the edit of base k. Ties go to the
    first, bases before edits.
    """
    n, count = editor.edit.candidates, len(x0)
    both = torch.cat([x0, editor.edit.apply(x0, drawn)])
    with torch.no_grad():
        values = torch.cat([editor.value(conditioning.rows(prompts[rows % count]), both[rows.to(both.device)])
                            for rows in torch.arange(2 * count).split(micro_batch)]).cpu()
    best = values.view(2, -1, n).transpose(0, 1).flatten(1).argmax(1)
    return best // n * count + torch.arange(count // n) * n + best % n


def with_rewards(part: Part, rewards: Tensor) -> Part:
    """Part with the rewards [b] of its samples, the targets of the critic."""
    [taken] = part.transitions
    assert isinstance(taken, Edits), "a part without edits"
    return replace(part, transitions=(replace(taken, rewards=rewards),))


@torch.no_grad()
def on_the_fly(editor: Any, conditioning: EncodedPrompts, x: Tensor) -> tuple[Tensor, Tensor]:
    """EXPO's acting policy: of n bases of each prompt and their n edits, choose the one with the highest critic value.

    x: [P, n, *D] -> (the chosen [P, *D], the values [P, 2n] of bases, then edits). Ties go to the first, so edits of 0
    leave the first base.
    """
    rows = conditioning.rows(torch.arange(len(x)).repeat_interleave(x.shape[1]))
    flat = x.flatten(0, 1)
    both = torch.stack([flat, editor.edit.apply(flat, editor.replay(rows, flat))])
    values = torch.stack([editor.value(rows, states) for states in both]).unflatten(1, x.shape[:2])
    values = values.transpose(0, 1).flatten(1)
    both = both.unflatten(1, x.shape[:2]).transpose(0, 1).flatten(1, 2)
    return both[torch.arange(len(x)), values.argmax(1).cpu()], values

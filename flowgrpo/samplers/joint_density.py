"""Joint density of a chain of states: all recorded steps of a sample as one decision (ReinFlow, 2505.22094)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowgrpo import gaussian
from flowgrpo.device import to_device
from flowgrpo.samplers.growth import sampler_steps, single_score
from flowgrpo.samplers.rollout import C, Part, Replayer, RolloutSpec
from flowgrpo.types import Gaussian, Scored, Transitions, unwrap


def log_prob(first: Tensor | None, steps: Sequence[Tensor]) -> Tensor:
    """Log-density of a chain over its number of terms, [b]: (log N(x_0; 0, 1) + sum_k log p(x_k+1 | x_k)) / terms, as
    the code of ReinFlow (2505.22094) divides it. A sample has one ratio, so a clip range bounds the chain.

    first: the state [b,*D] that the chain starts from, or None where its density is not known.
    steps: log-densities [b] of the transitions, each a mean over the latent's values.
    """
    terms = list(steps)
    if first is not None:
        zero = torch.zeros_like(first)
        terms.append(gaussian.log_prob(Gaussian(zero, zero.new_ones(())), first).to(terms[0]))
    return torch.stack(terms).mean(0)


@dataclass(frozen=True, eq=False)
class JointTransitions(Transitions):
    """Recorded transitions of m samples, merged into one per sample, from the first state to the last, with the joint
    old score. links: the transitions, in grid order."""

    links: tuple[Transitions, ...] = ()

    def select(self, keep: Tensor) -> "JointTransitions | None":
        if keep.all():
            return self
        links = tuple(left for link in self.links if (left := link.select(keep)) is not None)
        return merge(links, self.old.rows(keep.to(self.old.logp.device))) if links else None


def join_chains(part: Part) -> Part:
    """Part with one chain per sample in place of its transitions."""
    links = tuple(sampler_steps(part))
    first = _first(unwrap(part.exploration), links[0], slice(None))
    old = log_prob(first, [link.old.logp[:, 0] for link in links])
    return replace(part, transitions=(merge(links, single_score(old)),))


def replay(policy: Replayer[C], conditioning: C, part: Part, micro_batch: int) -> Iterator[tuple[int, slice, Scored]]:
    """Score a part's chains as `growth.replay` does its steps: (0, rows, Scored [b,1]), in one graph of all steps."""
    [chain] = sampler_steps(part)
    exploration = unwrap(part.exploration)
    assert isinstance(chain, JointTransitions), "the part has no chain: call `join_chains` first"
    for start in range(0, len(chain.x), micro_batch):
        rows = slice(start, start + micro_batch)
        encoded = conditioning.rows(chain.prompts[rows])
        steps = [step_log_prob(policy, encoded, exploration, link, rows) for link in chain.links]
        yield 0, rows, single_score(log_prob(_first(exploration, chain, rows), steps))


def step_log_prob(policy: Replayer[C], conditioning: C, exploration: RolloutSpec, link: Transitions, rows: slice
                  ) -> Tensor:
    """Log-density [b] of one step."""
    x, x_next = (to_device(state[rows], policy.device) for state in (link.x, link.x_next))
    v = policy.replay(conditioning, x, exploration.grid, link.step, exploration.timesteps)
    return gaussian.log_prob(exploration.transition(x, v, exploration.grid, link.step), x_next)


def _first(exploration: RolloutSpec, taken: Transitions, rows: slice) -> Tensor | None:
    """States [b,*D] that chains start from, or None unless they are the noise that the pipeline drew."""
    noise = taken.step == 0 and exploration.timesteps is None and float(exploration.grid[0]) > 0.999
    return taken.x[rows].float() if noise else None


def merge(links: tuple[Transitions, ...], old: Scored) -> JointTransitions:
    """Consecutive transitions, which do not split, as one per sample, with its old score [m,1]."""
    first, last = links[0], links[-1]
    assert all(torch.equal(link.parent, torch.arange(len(link.x))) for link in links), "a chain that splits"
    return JointTransitions(first.step, first.x, first.prompts, first.parent, last.x_next, old, links=links)

"""Rollouts of language models, causal and masked: sample completions, and replay them with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from flowgrpo.advantages.segments import starts_of
from flowgrpo.config.geometry import BatchShape
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from flowgrpo.log import PhaseTimer
from flowgrpo.methods.method import Method
from flowgrpo.policies.language.causal_lm import CausalLM
from flowgrpo.rollouts.base import GroupSampler
from flowgrpo.rollouts.text_targets import TARGETS, Replayed
from flowgrpo.samplers.rollout import Part, Seed
from flowgrpo.samplers.text.answers import answer_of, with_answers
from flowgrpo.samplers.text.continuations import segmented
from flowgrpo.samplers.text.records import SampledCompletions, TokenizedPrompts
from flowgrpo.types import Scored


class TextRollouts(GroupSampler[TokenizedPrompts]):
    """Prompts, completions and replays of a language model under a method. target: what the loss scores."""

    policy: Any  # a `CausalLM` or a `MaskedLM`

    def __init__(self, config: Config, policy: CausalLM, method: Method, geometry: BatchShape, processes: Processes,
                 clock: PhaseTimer):
        super().__init__(config, policy, method, geometry, processes, clock)
        self.encode = policy.encode
        self.target = TARGETS[type(method.target)](self)

    def conditioning(self, batch: list[Prompt]) -> TokenizedPrompts:
        """Tokenise prompts."""
        with self.clock("encode"):
            asked = self.encode([p.text for p in batch], images=[p.image for p in batch])
        if not self.method.generation.decoding.expert:
            return asked
        return replace(asked, answers=[answer_of(p) for p in batch])

    def sample(self, asked: TokenizedPrompts, epoch: int, judge: Callable, value: Callable | None = None,
               turn: int = 0) -> Iterator[tuple[Part, list[Any]]]:
        """Sample a group per prompt: the parts as they are finished, each with its texts. judge: the total reward, by
        which a method learns what states are worth; value, of methods for pictures, is not asked; turn: how often the
        epoch has drawn before."""
        before, kernel = self.policy.evaluations, self.method.generation.decoding
        seed = self.seeds(epoch, turn, len(asked.prompts))
        for groups, prompts, samples, _ in self.whole_groups(len(asked.prompts)):
            generators = self.policy.generators(seed(int(p), int(k)) for p, k in zip(prompts, samples))
            with self.clock("rollout"):
                made = self.method.generation.draws(
                    self.policy, asked.rows(prompts), kernel, generators, samples < kernel.greedy, self.geometry.group,
                    self.geometry.micro_batch)
                if kernel.expert:
                    made = self.answered(asked, prompts, samples, made)
            part = self.target.record(groups, prompts, made)
            if self.method.credit.spread is not None and self.method.credit.spread.samples:
                part = self.valued(part, asked, seed, judge)
            yield part, [[t for m in made for t in m.texts]]
        self.count(self.policy.evaluations - before)

    def answered(self, asked: TokenizedPrompts, prompts: torch.Tensor, samples: torch.Tensor,
                 made: list[SampledCompletions]) -> list[SampledCompletions]:
        """Replace the last samples of every group, of the prompts [B], by their prompts' answers."""
        kernel, group = self.method.generation.decoding, self.geometry.group
        places = torch.arange(len(prompts)).split([len(each.ids) for each in made])
        return [with_answers(self.policy, asked, prompts[at], samples[at] >= group - kernel.expert, each, kernel)
                for at, each in zip(places, made)]

    def valued(self, part: Part, asked: TokenizedPrompts, seed: Seed, judge: Callable) -> Part:
        """Return the part in segments, with Monte-Carlo values of the states between them."""
        taken: Any
        [taken], spread = part.transitions, self.method.credit.spread
        segments = spread.segments(taken.old.logp, taken.old.mask)
        starts = starts_of(segments, taken.old.mask)
        with self.clock("rollout"):
            found = segmented(self.policy, asked, taken, segments, starts, spread.samples,
                              self.method.generation.decoding, seed, self.geometry.group, self.geometry.micro_batch,
                              judge)
        return replace(part, transitions=(found,))

    def replay(self, part: Any, asked: TokenizedPrompts) -> Replayed:
        """Score a part's completions under the present weights: (0, its rows, scores)."""
        return self.target.replay(part, asked)

    def loss_inputs(self, part: Any, asked: TokenizedPrompts, reference: list[Scored]) -> Callable[..., Any]:
        """Return what the surrogate reads in addition to ratio and advantage."""
        return self.target.loss_inputs(part, asked, reference)

"""Rollouts of language models, causal and masked: sample completions, and replay them with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from flowgrpo.advantages.segments import starts_of
from flowgrpo.config.geometry import Geometry, prompts_per_part
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from flowgrpo.log import Clock
from flowgrpo.methods.method import Method
from flowgrpo.policies.language.causal_lm import CausalLM
from flowgrpo.policies.language.masked_lm import SampledTrace
from flowgrpo.rollouts.loss_inputs import BesideText
from flowgrpo.samplers.old_policy import Lagging
from flowgrpo.samplers.rollout import Part, Seed, seeder
from flowgrpo.samplers.text.answers import answer_of, with_answers
from flowgrpo.samplers.text.continuations import segmented
from flowgrpo.samplers.text.records import Asked, Sampled
from flowgrpo.types import Completions, Scored, Traces


class TextExplorer:
    """A language model under a method: its prompts' tokens, its completions and their replays.

    rollout_evaluations: tokens that went through the model to sample, padding included, on all processes.
    """

    def __init__(self, config: Config, policy: CausalLM, method: Method, geometry: Geometry, processes: Processes,
                 clock: Clock):
        self.config, self.policy, self.method, self.geometry = config, policy, method, geometry
        self.processes, self.clock = processes, clock
        self.encode = policy.encode
        self.rollout_evaluations = self.saved_evaluations = 0
        self.lagging = Lagging(method.lag, policy.weights)

    def conditioning(self, batch: list[Prompt]) -> Asked:
        """The tokens of these prompts."""
        with self.clock("encode"):
            asked = self.encode([p.text for p in batch], images=[p.image for p in batch])
        return replace(asked, answers=[answer_of(p) for p in batch]) if self.method.kernel.expert else asked

    def sample(self, asked: Asked, epoch: int, judge: Callable, value: Callable | None = None,
               turn: int = 0) -> Iterator[tuple[Part, list[list[str]]]]:
        """Sample a group per prompt: the parts as they are finished, each with its texts. judge: the total reward, by
        which a method learns what states are worth; value, of methods for pictures, is not asked; turn: how often the
        epoch has drawn before."""
        before, group = self.policy.evaluations, self.geometry.group
        seed = self.seeds(epoch, turn, len(asked.prompts))
        together = prompts_per_part(group, self.geometry.micro_batch)
        for own in torch.arange(len(asked.prompts)).split(together):
            prompts, samples = own.repeat_interleave(group), torch.arange(group).repeat(len(own))
            generators = self.policy.generators(seed(int(p), int(k)) for p, k in zip(prompts, samples))
            with self.clock("rollout"):
                made = self.method.draws(self.policy, asked.rows(prompts), self.method.kernel, generators,
                                         samples < self.method.kernel.greedy, group, self.geometry.micro_batch)
                if self.method.kernel.expert:
                    made = self.answered(asked, prompts, samples, made)
            part = self.part(range(int(own[0]), int(own[-1]) + 1), prompts, made)
            if self.method.spread.samples:
                part = self.valued(part, asked, seed, judge)
            yield part, [[t for m in made for t in m.texts]]
        self.rollout_evaluations += (self.policy.evaluations - before) * self.processes.count

    def seeds(self, epoch: int, turn: int, prompts: int) -> Seed:
        """A turn's seeds: of the first of one's own prompts, by its place among those of all processes, each of which
        has so many in this turn, behind those of the turns before."""
        seed, first = seeder(self.config.seed, epoch), turn * self.config.train.prompts + self.processes.rank * prompts
        return lambda prompt, sample: seed(first + prompt, sample)

    def answered(self, asked: Asked, prompts: torch.Tensor, samples: torch.Tensor, made: list[Sampled]
                 ) -> list[Sampled]:
        """What was drawn for the prompts [B], the last samples of every group replaced by their prompts' answers."""
        kernel, group = self.method.kernel, self.geometry.group
        places = torch.arange(len(prompts)).split([len(each.ids) for each in made])
        return [with_answers(self.policy, asked, prompts[at], samples[at] >= group - kernel.expert, each, kernel)
                for at, each in zip(places, made)]

    def part(self, groups: range, prompts: torch.Tensor, made: list[Sampled]) -> Part:
        """Whole groups of completions; those cut off without an end are not trained, or lose the penalty, where
        `text.truncated` says so."""
        ids, logp, mask, cut = (torch.cat([getattr(each, name) for each in made]) for name in
                                ("ids", "logp", "mask", "cut"))
        text = self.config.text
        if text.truncated == "mask":
            mask = mask & ~cut[:, None]
        deducted = text.penalty * cut.float() if text.truncated == "penalise" else None
        old = Scored(logp.masked_fill(~mask, 0.0), mask)
        expert = torch.cat([each.expert for each in made]) if self.method.kernel.expert else None
        return Part(groups, prompts, None, (Completions(ids, prompts, old, expert=expert),), (), deducted=deducted)

    def valued(self, part: Part, asked: Asked, seed: Seed, judge: Callable) -> Part:
        """The part in segments, with what the states between them are worth."""
        [taken], spread = part.transitions, self.method.spread
        segments = spread.segments(taken.old.logp, taken.old.mask)
        starts = starts_of(segments, taken.old.mask)
        with self.clock("rollout"):
            found = segmented(self.policy, asked, taken, segments, starts, spread.samples, self.method.kernel, seed,
                              self.geometry.group, self.geometry.micro_batch, judge)
        return replace(part, transitions=(found,))

    def replay(self, part: Part, asked: Asked) -> Iterator[tuple[int, slice, Scored]]:
        """What the present weights make of a part's completions: (0, rows of it, their score), in micro-batches."""
        [taken] = part.transitions
        for start in range(0, len(taken.ids), self.geometry.micro_batch):
            rows = slice(start, start + self.geometry.micro_batch)
            yield 0, rows, self.policy.log_probs(asked, taken.prompts[rows], taken.ids[rows], taken.old.mask[rows],
                                                 self.method.kernel, entropy=self.method.reads_entropy)

    def beside(self, part: Part, asked: Asked, reference: list[Scored]) -> BesideText:
        """What the surrogate reads beside ratio and advantage."""
        return BesideText(self.method, part, reference, self.policy.device, lambda: self.replay(part, asked))

    def step_weights(self, parts: list[Part], epoch: int) -> dict[int, float]:
        """Tokens are one step."""
        return {0: 1.0}

    def metrics(self) -> dict[str, float]:
        """What an epoch's sampling adds to its metrics."""
        return {}


class MaskedExplorer(TextExplorer):
    """A masked language model under a method: a row of a replay is as many evaluations as its trace has states."""

    def part(self, groups: range, prompts: torch.Tensor, made: list[SampledTrace]) -> Part:
        """Whole groups of completions with the steps at which their tokens were drawn."""
        found = super().part(groups, prompts, made)
        [taken] = found.transitions
        steps = torch.cat([each.steps for each in made])
        return replace(found, transitions=(Traces(taken.ids, taken.prompts, taken.old, steps),))

    def replay(self, part: Part, asked: Asked) -> Iterator[tuple[int, slice, Scored]]:
        """What the present weights make of a part's traces: (0, rows of it, their score), so many rows at once that
        their states are a micro-batch, one at least."""
        [taken] = part.transitions
        most, kernel = self.geometry.micro_batch, self.method.kernel
        count = int(kernel.scorings(taken.steps, taken.ids.shape[1]).max()) + 1
        for start in range(0, len(taken.ids), max(most // count, 1)):
            rows = slice(start, start + max(most // count, 1))
            yield 0, rows, self.policy.log_probs(asked, taken.prompts[rows], taken.ids[rows], taken.old.mask[rows],
                                                 kernel, taken.steps[rows], most, self.method.reads_entropy)

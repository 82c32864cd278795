"""Rollouts of a language model by an inference engine, with importance weights towards the trainer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flowgrpo.config.geometry import BatchShape
from flowgrpo.config.schema import Config
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.log import PhaseTimer
from flowgrpo.methods.method import Method
from flowgrpo.rollouts.base import GroupSampler, RewardValue, TotalReward
from flowgrpo.samplers.rollout import Part
from flowgrpo.text.policies import engines
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.rollouts.completions import TextRollouts
from flowgrpo.text.samplers.groups import Independent, joined
from flowgrpo.text.samplers.records import SampledCompletions, TokenizedPrompts


class EngineRollouts(TextRollouts):
    """Language model whose completions an engine draws.

    Old log-probabilities are the trainer's, as its replay computes them. What the engine's differ by becomes a weight
    of every token (`Mismatch`).
    """

    source = "engine"

    def __init__(self, config: Config, policy: CausalLM, method: Method, geometry: BatchShape, processes: Processes,
                 clock: PhaseTimer):
        super().__init__(config, policy, method, geometry, processes, clock)
        draws = self.method.generation.draws
        if not isinstance(draws, Independent):
            raise UserError(f"method {config.method} samples the completions of a group by {type(draws).__name__}, "
                            "which no engine does: leave text.engine and text.engine_precision out")
        if self.method.generation.decoding.temperatures(torch.zeros(1, 1, dtype=torch.int64)) is not None \
                and config.text.engine == "vllm":
            raise UserError(f"parts.decoding {type(self.method.generation.decoding).__name__} changes the temperature "
                            "within a text, which no engine does: leave text.engine out")
        self.engine = engines.make(config, policy, self.processes.count)

    def sample(self, conditioning: TokenizedPrompts, epoch: int, judge: TotalReward,
               value: RewardValue | None = None, turn: int = 0) -> Iterator[tuple[Part, list[list[str]]]]:
        """Sample as `TextRollouts`; the engine draws all groups first."""
        self.mismatches, conditioning = self.mismatches if turn else [], self.ranked(conditioning)
        before, group, count = self.engine.evaluations, self.geometry.group, len(conditioning.prompts)
        prompts, samples = torch.arange(count).repeat_interleave(group), torch.arange(group).repeat(count)
        seed = self.seeds(epoch, turn, count)
        generators = self.policy.generators(seed(int(p), int(k)) for p, k in zip(prompts, samples))
        greedy = samples < self.method.generation.decoding.greedy
        with self.clock("rollout"):
            self.engine.sync(self.policy)
            every = torch.arange(len(prompts)).split(self.engine.together or len(prompts))
            batches = [self.engine.sample(conditioning.rows(prompts[at]), self.method.generation.decoding,
                                          [generators[i] for i in at], greedy[at]) for at in every]
        self.count(self.engine.evaluations - before)
        whole = joined(batches)
        for groups, part_prompts, places, rows in self.whole_groups(count):
            some = SampledCompletions(whole.ids[rows], whole.logp[rows], whole.mask[rows], whole.cut[rows],
                                      whole.texts[rows])
            if self.method.generation.decoding.expert:
                [some] = self.answered(conditioning, part_prompts, places, [some])
            part = self.corrected(self.recorded(groups, part_prompts, places, [some]), conditioning)
            yield self.valued(part, conditioning, seed, judge), [list(some.texts)]

    def corrected(self, part: Part, conditioning: TokenizedPrompts) -> Part:
        """Return the part with the trainer's log-probabilities and weights of its tokens."""
        with torch.no_grad(), self.old_policy.old(), self.clock("rescore"):
            trained = self.rescored(part, conditioning)
        return self.weighted(part, trained)

    def rescored(self, part: Part, conditioning: TokenizedPrompts) -> Part:
        """Return the part with the old scores of its replay; weights come from the engine's alone."""
        return GroupSampler.rescored(self, part, conditioning)

"""Rollouts of a language model by an inference engine, with importance weights towards the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from flowgrpo.config.geometry import BatchShape
from flowgrpo.config.schema import Config
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.log import PhaseTimer
from flowgrpo.methods.method import Method
from flowgrpo.policies.language import engines
from flowgrpo.policies.language.causal_lm import CausalLM
from flowgrpo.rollouts.base import RewardValue, TotalReward
from flowgrpo.rollouts.text import TextRollouts
from flowgrpo.samplers.replay import rescored
from flowgrpo.samplers.rollout import Part
from flowgrpo.samplers.text.groups import Independent, joined
from flowgrpo.samplers.text.importance import Mismatch
from flowgrpo.samplers.text.records import SampledCompletions, TokenizedPrompts


class EngineRollouts(TextRollouts):
    """Language model whose completions an engine draws.

    Old log-probabilities are the trainer's, as its replay computes them. What the engine's differ by becomes a weight
    of every token (`Mismatch`).
    """

    def __init__(self, config: Config, policy: CausalLM, method: Method, geometry: BatchShape, processes: Processes,
                 clock: PhaseTimer):
        super().__init__(config, policy, method, geometry, processes, clock)
        draws = self.method.generation.draws
        if not isinstance(draws, Independent):
            raise UserError(f"method {config.method} draws the texts of a group by {type(draws).__name__}, "
                            "which no engine does: leave text.engine and text.engine_precision out")
        if self.method.generation.decoding.temperatures(torch.zeros(1, 1, dtype=torch.int64)) is not None \
                and config.text.engine == "vllm":
            raise UserError(f"parts.decoding {type(self.method.generation.decoding).__name__} changes the temperature "
                            "within a text, which no engine does: leave text.engine out")
        text = config.text
        self.mismatch = Mismatch(text.correction, text.correction_cap, text.correction_level)
        self.engine = engines.make(config, policy, self.processes.count)
        self.apart: list[torch.Tensor] = []  # [n,4] of drawn tokens: trainer, engine, weight, above the cap

    def sample(self, conditioning: TokenizedPrompts, epoch: int, judge: TotalReward,
               value: RewardValue | None = None, turn: int = 0) -> Iterator[tuple[Part, list[list[str]]]]:
        """Sample as `TextRollouts`; the engine draws all groups first."""
        self.apart, conditioning = self.apart if turn else [], self.ranked(conditioning)
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
            part = self.target.record(groups, part_prompts, [some])
            part = self.corrected(part, conditioning, greedy[rows])
            yield self.valued(part, conditioning, seed, judge), [list(some.texts)]

    def corrected(self, part: Part, conditioning: TokenizedPrompts, greedy: torch.Tensor) -> Part:
        """Return the part with the trainer's log-probabilities and weights of its tokens.

        The weight is 1 for greedy rows, which were not drawn.
        """
        [by_engine] = part.transitions
        with torch.no_grad(), self.old_policy.old(), self.clock("rescore"):
            part = rescored(part, self.replay(part, conditioning))
        taken: Any
        [taken] = part.transitions
        given = taken.old.logp.cpu(), by_engine.old.logp, by_engine.old.mask
        weights = self.mismatch(*given).masked_fill(greedy[:, None], 1.0)
        counted = by_engine.old.mask & ~greedy[:, None]
        self.apart.append(torch.stack([given[0].float(), given[1].float(), weights.float(),
                                       self.mismatch.above(*given).float()], -1)[counted])
        return replace(part, transitions=(replace(taken, correction=weights),))

    def metrics(self) -> dict[str, float]:
        """Return the mismatch of engine and trainer in this epoch, over the drawn tokens of all processes.

        engine/kl: mean difference of log-probabilities, an estimate of KL(engine || trainer) per token; engine/max: its
        largest size; engine/weight: mean weight; engine/above: share of weights above the cap.
        """
        values = self.processes.gather(torch.cat(self.apart) if self.apart else torch.empty(0, 4))
        if not len(values):
            return {}
        trainer, engine, weight, above = values.unbind(1)
        return {"engine/kl": (engine - trainer).mean().item(), "engine/max": (engine - trainer).abs().max().item(),
                "engine/weight": weight.mean().item(), "engine/above": above.mean().item()}

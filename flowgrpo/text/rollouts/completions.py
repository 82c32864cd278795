"""Rollouts of language models, causal and masked: sample completions, and replay them with gradients. An inference
engine may sample, with importance weights towards the trainer. Teachers may answer in the groups that fail.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo.advantages.token_credit import starts_of
from flowgrpo.config.geometry import BatchShape
from flowgrpo.config.schema import Config
from flowgrpo.curriculum.resampling import failing
from flowgrpo.data.images import noised_image
from flowgrpo.data.prompts import Guidance, Prompt, answer_of
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.log import PhaseTimer
from flowgrpo.methods.method import Method
from flowgrpo.parts import part
from flowgrpo.rollouts.base import GroupSampler, RewardValue, TotalReward
from flowgrpo.rollouts.loss_inputs import LossInputs
from flowgrpo.samplers.rollout import Part, Seed
from flowgrpo.storage.checkpoint import Stateful
from flowgrpo.text.credit import StepScores
from flowgrpo.text.policies import engines
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.rollouts.targets import TARGETS, Replayed, score_steps
from flowgrpo.text.samplers.decoding import WithAnswers
from flowgrpo.text.samplers.groups import Independent, concatenate, with_segment_values
from flowgrpo.text.samplers.importance import Mismatch
from flowgrpo.text.samplers.language_model import SampledCompletions, TokenizedPrompts, rank_answers, with_answers
from flowgrpo.types import Scored

if TYPE_CHECKING:
    from flowgrpo.curriculum.epoch_batch import EpochBatch

@part("redraw", target="texts", puts_answers=True)
class TeacherAnswers:
    """Sample a group without a sample above `fail` anew, with teachers' answers as last samples (AMPO, 2510.02227).

    The metadata holds the teachers' answers under `solutions`, a list of texts or of {"text": ..., "right": true}, and
    the right answer under `answer`. Up to `decoding.expert` of them join the group: those whose reasoning, the text
    before the right answer, makes that answer likeliest for the policy. All other groups have samples alone.

    AMPO keeps the samples of the group that failed; here they are drawn anew.
    """

    fail: float = 0.0

    def __call__(self, drawn: EpochBatch) -> list[tuple[int, Prompt]]:
        failed = failing(drawn, self.fail)
        prompts = [(place, drawn.prompts[place]) for place in drawn.standing() if failed[place]]
        return [(place, replace(prompt, guided=Guidance(prompt.text, answers=True))) for place, prompt in prompts
                if solutions_of(prompt) and not prompt.guided]


def solutions_of(prompt: Prompt) -> list[str]:
    """Return the teachers' right answers in a prompt's metadata, in order."""
    listed = prompt.metadata.get("solutions") or ()
    entries = [entry if isinstance(entry, dict) else {"text": entry} for entry in listed]
    return [str(entry["text"]) for entry in entries if entry.get("text") and entry.get("right", True)]


class TextRollouts(GroupSampler[TokenizedPrompts]):
    """Prompts, completions and replays of a language model under a method. target: what the loss scores.

    Where `generate` computes other log-probabilities than the replay, as in half precision, the old ones are the
    replay's, and what they differ by becomes a weight of every token (`Mismatch`).
    source: what draws, in the names of metrics.
    """

    policy: Any  # a `CausalLM` or a `MaskedLM`
    source = "sampler"

    def __init__(self, config: Config, policy: CausalLM, method: Method, geometry: BatchShape, processes: Processes,
                 clock: PhaseTimer):
        super().__init__(config, policy, method, geometry, processes, clock)
        self.encode = policy.encode
        self.target = TARGETS[type(method.target)](self)
        text = config.text
        self.mismatch = Mismatch(text.correction, text.correction_cap, text.correction_level)
        self.mismatches: list[torch.Tensor] = []  # [n,4] of drawn tokens: trainer, sampler, weight, above the cap

    def conditioning(self, batch: list[Prompt], epoch: int | None = None) -> TokenizedPrompts:
        """Tokenise prompts."""
        with self.clock("encode"):
            encoded = self.encode([p.shown for p in batch], images=[prompt_inputs(p) for p in batch])
        decoding = self.method.generation.decoding
        if not decoding.expert:
            return encoded
        references = [answer_of(p) for p in batch] if self.has_teachers else []
        return replace(encoded, answers=[self.answers(p) for p in batch], references=references)

    @property
    def has_teachers(self) -> bool:
        """Return True if answers are those of several teachers, in groups that failed alone."""
        return isinstance(self.method.redraw, TeacherAnswers)

    def answers(self, prompt: Prompt) -> list[str]:
        """Return the answers that may join a prompt's group, in order."""
        decoding = self.method.generation.decoding
        if self.has_teachers:
            answers = solutions_of(prompt) if prompt.guided and prompt.guided.answers else []
        else:
            answer = answer_of(prompt)
            answers = [] if answer is None else [answer] * decoding.expert
        return [decoding.format_answer(answer) for answer in answers] if isinstance(decoding, WithAnswers) else answers

    def sample(self, conditioning: TokenizedPrompts, epoch: int, judge: TotalReward,
               value: RewardValue | None = None, turn: int = 0) -> Iterator[tuple[Part, list[Any]]]:
        """Sample a group per prompt: yield the parts as they are finished, each with its texts or images.

        judge: the total reward, by which a method learns what states are worth. value: of methods for images; unused
        here. turn: how often the epoch has drawn before.
        """
        before, kernel = self.policy.evaluations, self.method.generation.decoding
        self.mismatches = self.mismatches if turn else []
        self.target.progress = epoch / max(self.config.train.epochs - 1, 1)
        conditioning = self.rank_answers(conditioning)
        seed = self.seeds(epoch, turn, len(conditioning.prompts))
        for groups, prompts, samples, _ in self.whole_groups(len(conditioning.prompts)):
            generators = self.policy.generators([seed(int(p), int(k)) for p, k in zip(prompts, samples)])
            with self.clock("rollout"):
                batches = self.method.generation.draws(
                    self.policy, conditioning.rows(prompts), kernel, generators, samples < kernel.greedy,
                    self.geometry.group, self.geometry.micro_batch)
                if kernel.expert:
                    batches = self.insert_answers(conditioning, prompts, samples, batches)
            part = self.to_part(groups, prompts, samples, batches)
            if self.method.loss.surrogate.reads_uniform:
                with torch.no_grad(), self.clock("update"):
                    part = self.rescore(part, conditioning)
            part = self.add_values(part, conditioning, seed, judge)
            yield part, [together([batch.outputs for batch in batches])]
        self.count(self.policy.evaluations - before)

    def to_part(self, groups: range, prompts: torch.Tensor, samples: torch.Tensor,
                batches: list[SampledCompletions]) -> Part:
        """Return whole groups of completions as a part; samples: int64 [B], the place of each in its group."""
        part, greedy = self.target.record(groups, prompts, batches), self.method.generation.decoding.greedy
        if not greedy:
            return part
        taken: Any
        [taken] = part.transitions
        return replace(part, transitions=(replace(taken, greedy=samples < greedy),))

    def rank_answers(self, conditioning: TokenizedPrompts) -> TokenizedPrompts:
        """Return the prompts with teachers' answers in the order in which they join a group."""
        if not self.has_teachers:
            return conditioning
        with self.clock("rollout"):
            return rank_answers(self.policy, conditioning)

    def insert_answers(self, conditioning: TokenizedPrompts, prompts: torch.Tensor, samples: torch.Tensor,
                       batches: list[SampledCompletions]) -> list[SampledCompletions]:
        """Replace the last samples of every group, of the prompts [B], by their prompts' answers."""
        kernel, group = self.method.generation.decoding, self.geometry.group
        places = torch.arange(len(prompts)).split([len(batch.ids) for batch in batches])
        return [with_answers(self.policy, conditioning, prompts[at], samples[at] - (group - kernel.expert), batch,
                             kernel)
                for at, batch in zip(places, batches)]

    def add_values(self, part: Part, conditioning: TokenizedPrompts, seed: Seed, judge: TotalReward) -> Part:
        """Return the part in segments, where its credit needs them: with Monte-Carlo values of the states between them,
        or with scores of its steps."""
        taken: Any
        [taken], spread = part.transitions, self.method.credit.spread
        if isinstance(spread, StepScores):
            with self.clock("reward"):
                return replace(part, transitions=(score_steps(self.policy, taken, spread, judge),))
        if spread is None or not spread.samples:
            return part
        segments = spread.segments(taken.old.logp, taken.old.mask)
        starts = starts_of(segments, taken.old.mask)
        with self.clock("rollout"):
            completions = with_segment_values(self.policy, conditioning, taken, segments, starts, spread.samples,
                                              self.method.generation.decoding, seed, self.geometry.group,
                                              self.geometry.micro_batch, judge)
        return replace(part, transitions=(completions,))

    def replay(self, part: Part, conditioning: TokenizedPrompts) -> Replayed:
        """Score a part's completions under the present weights: (0, its rows, scores)."""
        return self.target.replay(part, conditioning)

    def stateful(self) -> dict[str, Stateful]:
        """Return the policy, whose trials are made once in a run."""
        return {"language": self.policy}

    def rescore(self, part: Part, conditioning: TokenizedPrompts) -> Part:
        """Return the part with the old scores of its replay, and with weights of its tokens where precision is below
        fp32."""
        again = super().rescore(part, conditioning)
        return again if self.policy.exact or self.policy.process == "masks" else self.add_token_weights(part, again)

    def add_token_weights(self, drawn: Part, trained: Part) -> Part:
        """Return the part `trained`, with the trainer's log-probabilities, with weights of its tokens.

        drawn: the same with the sampler's. The weight is 1 for completions that were not drawn.
        """
        sampled: Any
        taken: Any
        [sampled], [taken] = drawn.transitions, trained.transitions
        given = taken.old.logp.cpu(), sampled.old.logp.cpu(), sampled.old.mask.cpu()
        fixed = sampled.not_sampled[:, None]
        weights = self.mismatch(*given).masked_fill(fixed, 1.0)
        self.mismatches.append(torch.stack([given[0].float(), given[1].float(), weights.float(),
                                       self.mismatch.above(*given).float()], -1)[given[2] & ~fixed])
        if sampled.importance is not None:
            weights = weights * sampled.importance.to(weights)
        return replace(trained, transitions=(replace(taken, importance=weights),))

    def metrics(self) -> dict[str, float]:
        """Return the mismatch of sampler and trainer in this epoch, over the drawn tokens of all processes; empty where
        there is none.

        Behind the name of what draws: kl, the mean difference of log-probabilities, an estimate of KL(sampler ||
        trainer) per token; max, its largest size; weight, the mean weight; above, the share of weights above the cap.
        """
        values = self.processes.gather(torch.cat(self.mismatches) if self.mismatches else torch.empty(0, 4))
        if not len(values):
            return {}
        trainer, sampler, weight, above = values.unbind(1)
        found = {"kl": sampler - trainer, "max": (sampler - trainer).abs().max(), "weight": weight, "above": above}
        return {f"{self.source}/{name}": value.mean().item() for name, value in found.items()}

    def loss_inputs(self, part: Part, conditioning: TokenizedPrompts, reference: list[Scored]) -> LossInputs:
        """Return what the surrogate reads in addition to ratio and advantage."""
        return self.target.loss_inputs(part, conditioning, reference)


def together(outputs: list[Any]) -> Any:
    """Return the outputs of batches as those of one: a list of texts, or images [B,3,H,W]."""
    return torch.cat(outputs) if torch.is_tensor(outputs[0]) else [text for some in outputs for text in some]


def prompt_inputs(prompt: Prompt) -> Any:
    """Return what a prompt brings beside its text; its image with noise where its guidance asks for some."""
    guided = prompt.guided
    if not guided or not guided.noise or prompt.image is None:
        return prompt.brings
    return noised_image(prompt.image, guided.noise, zlib.crc32(prompt.text.encode()))


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
        self.mismatches, conditioning = self.mismatches if turn else [], self.rank_answers(conditioning)
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
        whole = concatenate(batches)
        for groups, part_prompts, places, rows in self.whole_groups(count):
            some = SampledCompletions(whole.ids[rows], whole.logp[rows], whole.mask[rows], whole.cut[rows],
                                      whole.texts[rows])
            if self.method.generation.decoding.expert:
                [some] = self.insert_answers(conditioning, part_prompts, places, [some])
            part = self.correct_mismatch(self.to_part(groups, part_prompts, places, [some]), conditioning)
            yield self.add_values(part, conditioning, seed, judge), [list(some.texts)]

    def correct_mismatch(self, part: Part, conditioning: TokenizedPrompts) -> Part:
        """Return the part with the trainer's log-probabilities and weights of its tokens."""
        with torch.no_grad(), self.old_policy.old(), self.clock("rescore"):
            trained = self.rescore(part, conditioning)
        return self.add_token_weights(part, trained)

    def rescore(self, part: Part, conditioning: TokenizedPrompts) -> Part:
        """Return the part with the old scores of its replay; weights come from the engine's alone."""
        return GroupSampler.rescore(self, part, conditioning)

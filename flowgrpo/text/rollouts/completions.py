"""Rollouts of language models, causal and masked: sample completions, and replay them with gradients. An inference
engine may sample, with importance weights towards the trainer.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import torch

from flowgrpo.advantages.token_credit import starts_of
from flowgrpo.config.geometry import BatchShape
from flowgrpo.config.schema import Config
from flowgrpo.curriculum.resampling import TeacherAnswers, solutions_of
from flowgrpo.data.images import noised_image
from flowgrpo.data.prompts import Prompt, answer_of
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.log import PhaseTimer
from flowgrpo.methods.method import Method
from flowgrpo.objectives import surrogates
from flowgrpo.objectives.sequence_losses import GroupLoss
from flowgrpo.rollouts.base import GroupSampler, RewardValue, TotalReward
from flowgrpo.rollouts.loss_inputs import CompletionInputs, LossInputs
from flowgrpo.samplers.rollout import Part, Seed
from flowgrpo.storage.checkpoint import Stateful
from flowgrpo.text.credit import StepScores, score_steps
from flowgrpo.text.policies import engines
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.samplers.decoding import Unmasking, WithAnswers
from flowgrpo.text.samplers.groups import Independent, split, with_segment_values
from flowgrpo.text.samplers.importance import Mismatch
from flowgrpo.text.samplers.language_model import SampledCompletions, TokenizedPrompts, rank_answers, with_answers
from flowgrpo.types import Completions, Scored, Traces, unwrap


class TextRollouts(GroupSampler[TokenizedPrompts]):
    """Prompts, completions and replays of a language model under a method: what the loss scores is its tokens, by their
    log-probability; those of an unmasking's trace in the state of each token's own step.

    Where `generate` computes other log-probabilities than the replay, as in half precision, the old ones are the
    replay's, and what they differ by becomes a weight of every token (`Mismatch`).
    source: what draws, in the names of metrics. progress: share of the run's epochs that are over, 0 in the first and 1
    in the last one.
    """

    policy: Any  # a `CausalLM` or a `MaskedLM`
    source = "sampler"
    progress = 0.0
    weighs_replays = True

    def __init__(self, config: Config, policy: CausalLM, method: Method, geometry: BatchShape, processes: Processes,
                 clock: PhaseTimer):
        super().__init__(config, policy, method, geometry, processes, clock)
        self.encode = policy.encode
        self.drawer = self.policy  # or an engine
        text = config.text
        self.mismatch = Mismatch(text.correction, text.correction_cap, text.correction_level)
        # [5] of a part: drawn tokens, sums of sampler - trainer, weight and above the cap, and the largest difference
        self.mismatches: list[torch.Tensor] = []

    def conditioning(self, batch: list[Prompt], epoch: int | None = None) -> TokenizedPrompts:
        with self.clock("encode"):
            encoded = self.encode([p.shown for p in batch], images=[prompt_inputs(p) for p in batch])
        decoding = self.method.generation.decoding
        if not decoding.expert:
            return encoded
        references = [answer_of(p) for p in batch] if self.has_teachers else []
        return replace(encoded, answers=[self.answers(p) for p in batch], references=references)

    @property
    def has_teachers(self) -> bool:
        """True if answers are those of several teachers, in groups that failed alone."""
        return isinstance(self.method.redraw, TeacherAnswers)

    def answers(self, prompt: Prompt) -> list[str]:
        """The answers that may join a prompt's group, in order."""
        decoding = self.method.generation.decoding
        if self.has_teachers:
            answers = solutions_of(prompt) if prompt.guided and prompt.guided.answers else []
        else:
            answer = answer_of(prompt)
            answers = [] if answer is None else [answer] * decoding.expert
        form = decoding.form if isinstance(decoding, WithAnswers) else "{answer}"
        return [form.replace("{answer}", answer) for answer in answers]

    def sample(self, conditioning: TokenizedPrompts, epoch: int, judge: TotalReward,
               value: RewardValue | None = None, turn: int = 0) -> Iterator[tuple[Part, list[Any]]]:
        if self.drawer is not self.policy:
            with self.clock("rollout"):
                self.drawer.sync(self.policy)
        before, generation = self.drawer.evaluations, self.method.generation
        kernel = generation.decoding
        self.mismatches = self.mismatches if turn else []
        self.progress = epoch / max(self.config.train.epochs - 1, 1)
        if self.has_teachers:  # whose answers join a group in the order of how well the policy comprehends them
            with self.clock("rollout"):
                conditioning = rank_answers(self.policy, conditioning)
        seed = self.seeds(epoch, turn, len(conditioning.prompts))
        for parts in self.drawn_together(len(conditioning.prompts)):
            # Every row has a generator of its own: what else is drawn beside it changes it by rounding alone.
            prompts, samples = (torch.cat([getattr(each, name) for each in parts]) for name in ("prompts", "samples"))
            generators = self.policy.generators([seed(int(p), int(k)) for p, k in zip(prompts, samples)])
            together = self.geometry.generation_batch if self.drawer.limited else len(generators)
            with self.clock("rollout"):
                drawn = generation.draws(self.drawer, conditioning.rows(prompts), kernel, generators,
                                         samples < kernel.greedy, self.geometry.group, together)
            # From here on in micro-batches again, as the replay reads them.
            most = self.geometry.micro_batch
            pieces = split(drawn, [len(some) for each in parts for some in each.prompts.split(most)])
            for groups, prompts, samples, _ in parts:
                batches = [*islice(pieces, -(-len(prompts) // most))]
                if kernel.expert:  # the last samples of a group become its prompt's answers
                    first = self.geometry.group - kernel.expert
                    rows = torch.arange(len(prompts)).split([len(batch.ids) for batch in batches])
                    with self.clock("rollout"):
                        batches = [with_answers(self.policy, conditioning, prompts[at], samples[at] - first, batch,
                                                kernel) for at, batch in zip(rows, batches)]
                part = self.record(groups, prompts, batches, samples < kernel.greedy if kernel.greedy else None)
                part = self.with_old_scores(part, conditioning)
                part = self.add_values(part, conditioning, seed, judge)
                images = [batch.images for batch in batches if batch.images is not None]
                yield part, [torch.cat(images) if images else [text for batch in batches for text in batch.texts]]
        self.count(self.drawer.evaluations - before)

    def with_old_scores(self, part: Part, conditioning: TokenizedPrompts) -> Part:
        """The part with the old scores that the surrogate reads beside those of the draw."""
        if not self.method.loss.surrogate.reads_uniform:
            return part
        with torch.no_grad(), self.clock("update"):
            return self.rescore(part, conditioning)

    def add_values(self, part: Part, conditioning: TokenizedPrompts, seed: Seed, judge: TotalReward) -> Part:
        """The part in segments, where its credit needs them: with Monte-Carlo values of the states between them, or
        with scores of its steps."""
        taken: Any
        [taken], spread = part.transitions, self.method.credit.spread
        if isinstance(spread, StepScores):
            with self.clock("reward"):
                return replace(part, transitions=(score_steps(self.policy, conditioning, taken, spread, judge),))
        if spread is None or not spread.samples:
            return part
        segments = spread.segments(taken.old.logp, taken.old.mask)
        starts = starts_of(segments, taken.old.mask & taken.counts[:, None])
        with self.clock("rollout"):
            completions = with_segment_values(self.policy, conditioning, taken, segments, starts, spread.samples,
                                              self.method.generation.decoding, seed, self.geometry.group,
                                              self.geometry.generation_batch, judge)
        return replace(part, transitions=(completions,))

    def record(self, groups: range, prompts: torch.Tensor, batches: Sequence[SampledCompletions],
               greedy: torch.Tensor | None = None) -> Part:
        """Whole groups of completions as a part; greedy: bool [B], those of most likely tokens.
        Completions that were cut off without an end are left out of the loss, or lose the penalty, as `text.truncated`
        says."""
        ids, logp, mask, cut = (torch.cat([getattr(batch, name) for batch in batches]) for name in
                                ("ids", "logp", "mask", "cut"))
        text = self.config.text
        measured = {"penalty": text.penalty * cut.float()} if text.truncated == "penalise" else {}
        old = Scored(logp.masked_fill(~mask, 0.0), mask)
        experts = self.method.generation.decoding.expert
        expert = torch.cat([unwrap(batch.expert) for batch in batches]) if experts else None
        taken = Completions(ids, prompts, old, greedy=greedy, expert=expert,
                            left_out=cut if text.truncated == "mask" else None)
        if batches[0].steps is not None:
            taken = Traces(**vars(taken), steps=torch.cat([unwrap(batch.steps) for batch in batches]))
        return Part(groups, prompts, None, (taken,), (), measured=measured)

    def replay(self, part: Part, conditioning: TokenizedPrompts) -> Iterator[tuple[int, slice, Scored]]:
        """Score a part's completions under the present weights: (0, its rows, scores), in micro-batches; of traces as
        many rows at once as have a micro-batch of states, one at least."""
        [taken], decoding, most = part.transitions, self.method.generation.decoding, self.geometry.micro_batch
        together, of_trace = most, isinstance(taken, Traces)
        if of_trace:
            states = int(cast(Unmasking, decoding).scorings(taken.steps, taken.ids.shape[1]).max()) + 1
            together = max(most // states, 1)
        for start in range(0, len(taken.ids), together):
            rows = slice(start, start + together)
            trace = (taken.steps[rows], most) if of_trace else ()
            yield 0, rows, self.policy.log_probs(conditioning, taken.prompts[rows], taken.ids[rows],
                                                 taken.old.mask[rows], decoding, *trace,
                                                 entropy=self.method.reads_entropy)

    def loss_inputs(self, part: Part, conditioning: TokenizedPrompts, reference: list[Scored]) -> LossInputs:
        surrogate = self.method.loss.surrogate
        if not isinstance(surrogate, GroupLoss):
            given = cast(Completions, part.transitions[0]).expert
            expert = None if given is None else given.to(self.policy.device)
            return lambda batch, k, rows, new, old: surrogates.surrogate_input(
                surrogate, new, old, expert if expert is None else expert[rows])
        return CompletionInputs(self.method, part, reference, self.policy.device,
                                lambda: self.replay(part, conditioning), self.progress)

    def stateful(self) -> dict[str, Stateful]:
        return {"language": self.policy}  # whose trials are made once in a run

    def rescore(self, part: Part, conditioning: TokenizedPrompts) -> Part:
        """The part with the old scores of its replay, and with weights of its tokens where precision is below fp32."""
        again = super().rescore(part, conditioning)
        same = self.policy.exact or self.policy.process == "masks" or not self.weighs_replays
        return again if same else self.add_token_weights(part, again)

    def add_token_weights(self, drawn: Part, trained: Part) -> Part:
        """The part `trained`, with the trainer's log-probabilities, with weights of its tokens.
        drawn: the same with the sampler's. The weight is 1 for completions that were not drawn."""
        sampled: Any
        taken: Any
        [sampled], [taken] = drawn.transitions, trained.transitions
        given = taken.old.logp.cpu(), sampled.old.logp.cpu(), sampled.old.mask.cpu()
        fixed = sampled.not_sampled[:, None]
        weights = self.mismatch(*given).masked_fill(fixed, 1.0)
        trained_logp, sampled_logp, mask = given
        apart, kept = (sampled_logp - trained_logp).double(), mask & ~fixed
        self.mismatches.append(torch.stack([
            kept.sum(), *(values.double()[kept].sum() for values in (apart, weights, self.mismatch.above(*given))),
            apart.abs().where(kept, 0).max()]))
        if sampled.importance is not None:
            weights = weights * sampled.importance.to(weights)
        return replace(trained, transitions=(replace(taken, importance=weights),))

    def metrics(self) -> dict[str, float]:
        """The mismatch of sampler and trainer in this epoch, over the drawn tokens of all processes; empty where there
        is none.

        Behind the name of what draws: kl, the mean difference of log-probabilities, an estimate of KL(sampler ||
        trainer) per token; max, its largest size; weight, the mean weight; above, the share of weights above the cap.
        """
        parts = self.processes.gather(torch.stack(self.mismatches) if self.mismatches else
                                      torch.empty(0, 5, dtype=torch.float64))
        if not len(parts) or not (tokens := parts[:, 0].sum()):
            return {}
        means = dict(zip(("kl", "weight", "above"), (parts[:, 1:4].sum(0) / tokens).tolist()))
        return {f"{self.source}/{name}": value for name, value in (means | {"max": parts[:, 4].max().item()}).items()}


def prompt_inputs(prompt: Prompt) -> Any:
    guided = prompt.guided
    if not guided or not guided.noise or prompt.image is None:
        return prompt.brings
    return noised_image(prompt.image, guided.noise, zlib.crc32(prompt.text.encode()))


class EngineRollouts(TextRollouts):
    """`TextRollouts` whose completions an engine draws; the old log-probabilities are always the replay's."""

    source, weighs_replays = "engine", False  # weights come from the engine's scores alone

    def __init__(self, config: Config, *others: Any):
        super().__init__(config, *others)
        draws, decoding = self.method.generation.draws, self.method.generation.decoding
        if not isinstance(draws, Independent):
            raise UserError(f"method {config.method} samples the completions of a group by {type(draws).__name__}, "
                            "which no engine does: leave text.engine and text.engine_precision out")
        if config.text.engine == "vllm" and decoding.temperatures(torch.zeros(1, 1, dtype=torch.int64)) is not None:
            raise UserError(f"parts.decoding {type(decoding).__name__} changes the temperature within a text, which no "
                            "engine does: leave text.engine out")
        self.drawer = self.engine = engines.make(config, self.policy, self.processes.count)

    def with_old_scores(self, part: Part, conditioning: TokenizedPrompts) -> Part:
        """The part with the trainer's old scores, and weights for the mismatch of sampler and trainer."""
        with torch.no_grad(), self.old_policy.old(), self.clock("rescore"):
            trained = self.rescore(part, conditioning)
        return self.add_token_weights(part, trained)

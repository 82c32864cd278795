"""Rollouts of a language model: for recorded pairs of texts, for a reward's gradient through a masked model
(`gumbel_softmax`), and `make_rollouts`, which chooses among them and `completions.TextRollouts`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from flowgrpo.config.geometry import BatchShape
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.log import PhaseTimer
from flowgrpo.methods.method import Method
from flowgrpo.objectives import surrogates
from flowgrpo.policies.policy import Policy
from flowgrpo.rollouts.base import GroupSampler, RewardValue, TotalReward
from flowgrpo.rollouts.loss_inputs import LossInputs
from flowgrpo.samplers.rollout import Part
from flowgrpo.text.policies import engines
from flowgrpo.text.rewards.embeddings import SoftTexts
from flowgrpo.text.rollouts.completions import EngineRollouts, TextRollouts
from flowgrpo.text.samplers.decoding import completion_masks
from flowgrpo.text.samplers.gumbel_softmax import GumbelSoftmax
from flowgrpo.text.samplers.language_model import SampledCompletions, TokenizedPrompts
from flowgrpo.text.targets import RecordedCompletions, RelaxedTraces
from flowgrpo.types import Completion, Scored, unwrap

SIDES = ("chosen", "rejected")  # of a prompt's metadata, as `data.pairs` sets them


class RecordedTextRollouts(TextRollouts):
    """Causal language model whose group of a prompt is its recorded pair, the chosen text first."""

    weighs_replays = False

    def conditioning(self, batch: list[Prompt], epoch: int | None = None) -> TokenizedPrompts:
        """Tokenise prompts of recorded pairs; their `answers` are the texts of their pairs, two per prompt."""
        return replace(super().conditioning(batch, epoch),
                       answers=[prompt.metadata[side] for prompt in batch for side in SIDES])

    def require(self, prompts: Sequence[Prompt]) -> None:
        """Raise UserError for the first text of a pair with more tokens than a completion may have."""
        most = self.config.text.max_tokens
        for prompt in prompts:
            for side in SIDES:
                if (count := len(self.policy.answer(prompt.metadata[side]))) > most:
                    raise UserError(f"preferences {self.config.preferences}: the {side} text of the prompt "
                                    f"{prompt.text[:60]!r} has {count} tokens, its end included, and text.max_tokens "
                                    f"is {most}: raise it, or leave the pair out")

    def sample(self, conditioning: TokenizedPrompts, epoch: int, judge: TotalReward,
               value: RewardValue | None = None, turn: int = 0) -> Iterator[tuple[Part, list[list[str]]]]:
        """Yield the pairs of the prompts, scored by the present policy, each part with its texts."""
        most = self.config.text.max_tokens
        for groups, prompts, _, _ in self.whole_groups(len(conditioning.prompts)):
            texts = [str(text) for text in conditioning.answers[2 * groups.start:2 * groups.stop]]
            before = self.policy.evaluations
            with self.clock("encode"), torch.no_grad():
                rows = [self.policy.answer(text) for text in texts]
                longest = torch.zeros(most, dtype=torch.int64)  # to which the others are padded
                ids, mask = (values[:-1] for values in self.policy.pad_answers([*rows, longest]))
                logp = torch.cat([self.policy.log_probs(conditioning, prompts[at], ids[at], mask[at],
                                                        self.method.generation.decoding).logp.cpu()
                                  for at in torch.arange(len(rows)).split(self.geometry.micro_batch)])
            self.policy.evaluations = before  # nothing was drawn
            tags = self.policy.opened([conditioning.prompts[i] for i in prompts])
            completions = [Completion(text, len(row), opened=tag) for text, row, tag in zip(texts, rows, tags)]
            recorded = SampledCompletions(ids, logp, mask, torch.zeros(len(rows), dtype=torch.bool), completions)
            yield self.record(groups, prompts, [recorded]), [[*completions]]


@dataclass(frozen=True, eq=False)
class Redrawn:
    """Answers that are drawn again from their noise: prompts int64 [m], the prompt of each; generators: m, of all its
    noise; old: Scored [m,1], its reward less the KL."""

    prompts: Tensor
    generators: tuple[torch.Generator, ...]
    old: Scored
    step = 0
    regression_target = importance = expert = left_out = None

    @property
    def parent(self) -> Tensor:
        return torch.arange(len(self.prompts))

    @property
    def counts(self) -> Tensor:
        return torch.ones(len(self.prompts), dtype=torch.bool)

    def select(self, keep: Tensor) -> "Redrawn | None":
        generators = tuple(generator for generator, kept in zip(self.generators, keep.tolist(), strict=True) if kept)
        return Redrawn(self.prompts[keep], generators, self.old.rows(keep)) if generators else None


class RelaxedRollouts(TextRollouts):
    """Masked language model under a method with `backprop`: a rollout without a graph, the same again with one.

    The score of an answer is the reward that `value` gives it, less the KL that `relaxation` weighs, both of the epoch.
    """

    value: RewardValue
    relaxation: GumbelSoftmax

    def __init__(self, *given: Any):
        super().__init__(*given)
        # Before any update, so that it is the base. A graph holds it beside the present weights: no switching to and
        # fro, which a backward pass would not see.
        self.base_weights = {key: tensor.detach().clone() for key, tensor in self.policy.weights.named.items()}
        self.tokens = tuple(self.policy.vocabulary())

    def repeat_prompt(self, prompt: Prompt, count: int) -> SoftTexts:
        [ids] = self.policy.encode([prompt.text]).ids
        weights = torch.nn.functional.one_hot(ids, len(self.tokens)).float().to(self.policy.device)
        return SoftTexts(weights.repeat(count, 1, 1).requires_grad_(), self.tokens)

    def sample(self, conditioning: TokenizedPrompts, epoch: int, judge: TotalReward,
               value: RewardValue | None = None, turn: int = 0) -> Iterator[tuple[Part, list[list[str]]]]:
        before = self.policy.evaluations
        seed = self.seeds(epoch, turn, len(conditioning.prompts))
        self.relaxation = cast(RelaxedTraces, self.method.target).relaxation.at_epoch(epoch, self.config.train.epochs)
        self.value = unwrap(value)
        for groups, prompts, samples, _ in self.whole_groups(len(conditioning.prompts)):
            generators = self.policy.generators(seed(int(p), int(k)) for p, k in zip(prompts, samples))
            unknown = torch.full((len(prompts), 1), torch.nan)
            taken: Any = Redrawn(prompts, tuple(generators), Scored(unknown, unknown.isnan()))
            part = Part(groups, prompts, None, (taken,), ())
            with self.clock("rollout"), torch.no_grad():
                batches = [self._sample_and_score(part, conditioning, rows) for rows in self._batches(part)]
                old = Scored(torch.cat([logp for _, logp in batches])[:, None].cpu(), taken.old.mask)
            ids = torch.cat([answers.argmax(-1) for answers, _ in batches])
            texts = self.policy.detokenize(ids, completion_masks(ids, self.policy.ends)[0],
                                           [conditioning.prompts[i] for i in prompts])
            yield replace(part, transitions=(replace(taken, old=old),)), [texts]
        self.count(self.policy.evaluations - before)

    def replay(self, part: Part, conditioning: TokenizedPrompts) -> Iterator[tuple[int, slice, Scored]]:
        """Replay a part's noise under the present weights: (0, its rows, Scored [b,1] of rewards less KLs)."""
        for rows in self._batches(part):
            scores = self._sample_and_score(part, conditioning, rows)[1][:, None]
            yield 0, rows, Scored(scores, torch.ones_like(scores, dtype=torch.bool))

    def loss_inputs(self, part: Part, conditioning: TokenizedPrompts, reference: list[Scored]) -> LossInputs:
        return lambda batch, k, rows, new, old: surrogates.surrogate_input(self.method.loss.surrogate, new, old)

    def _batches(self, part: Part) -> list[slice]:
        most = self.geometry.micro_batch
        return [slice(start, start + most) for start in range(0, len(part.transitions[0].prompts), most)]

    def _sample_and_score(self, part: Part, conditioning: TokenizedPrompts, rows: slice) -> tuple[Tensor, Tensor]:
        """The answers [b,L,V] of some rows, one-hot, and their scores [b]."""
        taken: Any
        [taken] = part.transitions
        prompts, generators = taken.prompts[rows], [generator.clone_state() for generator in taken.generators[rows]]
        answers, kl = self.policy.sample_relaxed(conditioning, prompts, generators, self.method.generation.decoding,
                                                 self.relaxation, self.base_weights)
        counted, _ = completion_masks(answers.argmax(-1), self.policy.ends)
        reward = self.value(prompts, SoftTexts(answers * counted[..., None], self.tokens))
        return answers, reward - self.relaxation.kl * kl


def make_rollouts(config: Config, policy: Policy, method: Method, geometry: BatchShape, processes: Processes,
                  clock: PhaseTimer, first: Prompt) -> GroupSampler[Any]:
    """Make what samples and replays a language model. first: a prompt, of which it reads nothing."""
    kind: type[TextRollouts] = (
        RelaxedRollouts if isinstance(method.target, RelaxedTraces) else
        RecordedTextRollouts if isinstance(method.target, RecordedCompletions) else
        EngineRollouts if engines.uses_engine(config) else TextRollouts)
    return kind(config, cast(Any, policy), method, geometry, processes, clock)

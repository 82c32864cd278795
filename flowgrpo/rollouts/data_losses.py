"""Losses of supervised terms: the interface, next tokens and pairs of a language model's recorded texts, and noised
examples of a pipeline: flow matching, distillation of guidance, and pairs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, smooth_l1_loss

from flowgrpo.data.prompts import Prompt, answer_of
from flowgrpo.errors import UserError
from flowgrpo.methods import supervised
from flowgrpo.objectives.reductions import SequenceMean, reduce_loss
from flowgrpo.objectives.sequence_losses import PairLoss
from flowgrpo.policies.pipelines.call import at_guidance
from flowgrpo.policies.pipelines.image_latents import ImageEncoder
from flowgrpo.rollouts.denoising import DenoisingRollouts
from flowgrpo.samplers import noised_finals
from flowgrpo.samplers.growth import single_score
from flowgrpo.samplers.rollout import RolloutSpec, fork_seed
from flowgrpo.samplers.scheduler import noise_like
from flowgrpo.types import CompletionBatch, GroupStatistics, Scored, wide

DRAWS = 2210_03142  # separates the draws for examples from others of a run


@dataclass(frozen=True, eq=False)
class Example:
    """Output of a prompt that is learned.

    Its content is the path of an image, an answer's text, or what the run sampled: a final state [*D], or the tokens
    [n] of an answer, on the CPU. rejected: of a pair of texts, the one that is not to be learned; its reward is the
    pair's margin.
    """

    prompt: Prompt
    content: str | Tensor
    reward: float = 1.0
    source: str = ""
    rejected: str = ""


class DataLosses(Protocol):
    """Loss of a run's supervised term. run: has a policy and rollouts, which a phase may replace."""

    run: Any

    @property
    def rollouts(self) -> Any:
        return self.run.rollouts

    def divisor(self, examples: Sequence[Example]) -> int:
        """Divisor of a batch's summed loss: the number of examples, or that of trained tokens."""
        return len(examples)

    def __call__(self, examples: Sequence[Example], places: Sequence[int], update: int) -> Iterator[Tensor]:
        """Yield summed losses, 0-d, each with a graph of its own; their sum over the divisor is the batch's loss.

        places: of the examples in the batch of all processes. update: the number of earlier optimizer steps.
        """

    def metrics(self, total: Callable[[Sequence[int]], list[int]]) -> dict[str, float]:
        """Epoch's further metrics; all processes call it. total: sums over processes."""
        return {}


class TextExamples(DataLosses):
    """Recorded texts of a causal language model as rows of tokens. run: of a `CausalLM`."""

    def __init__(self, part: Any, run: Any):
        self.part, self.run = part, run
        self.policy = cast(Any, run.policy)  # a `CausalLM`

    def encoded(self, examples: Sequence[Example]) -> Any:
        return self.rollouts.conditioning([condition_prompt(self.part.condition, example) for example in examples])


def sum_loss(loss: PairLoss, new: Scored, reference: Scored | None, margins: Sequence[float]) -> Tensor:
    """Summed loss of n pairs of these margins.

    new, reference: scores [2 n, L], each chosen sample before its rejected one; None where the loss reads no reference.
    """
    rows = torch.arange(len(new.logp), device=new.logp.device)
    better = torch.tensor([value for margin in margins for value in (margin, 0.0)]).to(new.logp)
    batch = CompletionBatch(new, new, torch.zeros_like(new.logp), rows, new.mask.long(), new.mask, reference)
    peers = GroupStatistics(loss.statistic(batch).detach(), better, rows // 2)
    losses = loss(batch.log_ratio, better[:, None], replace(batch, peers=peers))
    return reduce_loss(losses, SequenceMean()(new.mask), 2)


class PairTokenLosses(TextExamples):
    """Preference loss of pairs of texts under a causal language model."""

    part: supervised.PreferencePairs

    def require(self, recorded: Iterable[Example]) -> None:
        """Raise UserError for the first text with more tokens than a completion may have."""
        for example in recorded:
            for text in (str(example.content), example.rejected):
                require_fitting(self.rollouts.config.text.max_tokens, example.prompt, len(self.policy.answer(text)),
                                "text")

    def __call__(self, examples: Sequence[Example], places: Sequence[int], update: int) -> Iterator[Tensor]:
        half = max(1, self.rollouts.geometry.micro_batch // 2)  # a pair is two rows
        for start in range(0, len(examples), half):
            yield self._of(examples[start:start + half])

    def _of(self, examples: Sequence[Example]) -> Tensor:
        loss, policy, count = self.part.loss, self.policy, len(examples)
        ids, mask = policy.pad_answers([policy.answer(text) for pair in examples
                                        for text in (str(pair.content), pair.rejected)])
        encoded = self.encoded(examples)
        prompts, decoding = torch.arange(count).repeat_interleave(2), self.rollouts.method.generation.decoding
        new, reference = policy.log_probs(encoded, prompts, ids, mask, decoding), None
        if loss.reads_reference:
            with policy.reference():
                reference = policy.log_probs(encoded, prompts, ids, mask, decoding)
        return sum_loss(loss, new, reference, [example.reward for example in examples])


class TokenLosses(TextExamples):
    """Cross entropy of answers' tokens under a causal language model."""

    part: supervised.NextToken

    def tokens(self, example: Example) -> Tensor:
        """Tokens [n] of an example's answer, an end included."""
        return example.content if isinstance(example.content, Tensor) else self.policy.answer(example.content)

    def require(self, recorded: Iterable[Example]) -> None:
        """Raise UserError for the first recorded answer with more tokens than a completion may have."""
        for example in recorded:
            require_fitting(self.rollouts.config.text.max_tokens, example.prompt, len(self.tokens(example)), "answer")

    def divisor(self, examples: Sequence[Example]) -> int:
        return sum(len(self.tokens(example)) for example in examples)

    def __call__(self, examples: Sequence[Example], places: Sequence[int], update: int) -> Iterator[Tensor]:
        rows = [self.tokens(example) for example in examples]
        ids, mask = self.policy.pad_answers(rows)
        encoded = self.encoded(examples)
        weigh = self.part.token_weight
        seed = seed_of(self.rollouts.config.seed, update, places[0])
        scored = self.policy.log_probs(encoded, torch.arange(len(rows)), ids, mask,
                                       weigh.distribution(seed) or self.policy.plain, weigh.reads_entropy)
        weights = torch.tensor([self.part.weight(example.reward) for example in examples])[:, None].to(scored.logp)
        yield -(weights * weigh(scored.logp, scored.entropy, scored.mask) * scored.logp * scored.mask).sum()
        if isinstance(self.part, supervised.AlignedChains) and self.part.contrast:
            yield from self._contrast(self.part, examples)

    def _contrast(self, part: supervised.AlignedChains, examples: Sequence[Example]) -> Iterator[Tensor]:
        """Yield the contrast of the examples whose prompts have an annotated answer, if two prompts have one; each
        counts as many times as it has tokens."""
        annotated = {example.prompt.key: Example(example.prompt, answer) for example in examples
                     if (answer := answer_of(example.prompt)) is not None}
        if len(annotated) < 2:
            return
        with torch.no_grad():
            anchors = self._mean_hidden_states(list(annotated.values()))
        place = {key: number for number, key in enumerate(annotated)}
        compared = [example for example in examples if example.prompt.key in annotated]
        logits = self._mean_hidden_states(compared) @ anchors.T / part.temperature
        target = torch.tensor([place[example.prompt.key] for example in compared], device=logits.device)
        counts = torch.tensor([len(self.tokens(example)) for example in compared]).to(logits)
        yield part.contrast * (cross_entropy(logits, target, reduction="none") * counts).sum()

    def _mean_hidden_states(self, examples: Sequence[Example]) -> Tensor:
        """Mean last hidden states before the tokens of answers, of length 1: [n,H] float32."""
        rows = [self.tokens(example) for example in examples]
        ids, mask = (each.to(self.policy.device) for each in self.policy.pad_answers(rows))
        states = self.policy.states_before(self.encoded(examples), ids).float()
        return normalize((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=1)


def require_fitting(most: int, prompt: Prompt, count: int, what: str) -> None:
    """Raise UserError for a recorded answer or text with more tokens than `most`, that of a completion."""
    if count > most:
        raise UserError(f"parts.data: the recorded {what} of the prompt {prompt.text[:60]!r} has {count} tokens, its "
                        f"end included, and text.max_tokens is {most}: raise it, or shorten the {what}")


def condition_prompt(condition: str, example: Example) -> Prompt:
    return replace(example.prompt, text=condition.format(prompt=example.prompt.text, source=example.source))


def seed_of(seed: int, update: int, place: int) -> int:
    """Seed of an example's draws. place: its place in the batch of an optimizer step."""
    return fork_seed(seed, update, place, DRAWS)


class NoisedLosses(DataLosses):
    """Errors of a pipeline's prediction at noised examples. run: of the pipeline."""

    def __init__(self, part: supervised.NoisedData, run: Any):
        self.part, self.run = part, run
        self.policy = cast(Any, run.policy)  # a pipeline
        if part.source.path and run.policy.modality != "image":
            raise UserError(f"parts.data.source.path is {part.source.path!r}, which brings images, but "
                            f"{type(self.policy.pipe).__name__} makes videos: leave it out")
        self.encoder = ImageEncoder(self.policy, "demonstrations")

    def __call__(self, examples: Sequence[Example], places: Sequence[int], update: int) -> Iterator[Tensor]:
        policy, seed = self.policy, self.rollouts.config.seed
        prompts = [condition_prompt(self.part.condition, example) for example in examples]
        encoded = DenoisingRollouts.conditioning(self.rollouts, prompts)
        x0 = torch.cat([example.content[None] if isinstance(example.content, Tensor)
                        else self.encoder(example.content, encoded.rows(torch.tensor([row])))[0]
                        for row, example in enumerate(examples)]).to(policy.device)
        noise = noise_like(x0, policy.generators(seed_of(seed, update, place) for place in places))
        weights = torch.tensor([self.part.weight(example.reward) for example in examples])
        times = self.times(update)
        for k, t in enumerate(times.grid[:-1].tolist()):
            x, target = noised_finals.add_noise(x0, noise, t, policy.device, policy.process == "vp")
            if isinstance(self.part, supervised.GuidanceDistillation):
                target = self.teacher(encoded, x, times, k)
            with at_guidance(policy, self.part.guidance):
                output = policy.replay(encoded, x, times.grid, k, times.timesteps)
            yield (weights.to(output.device) * self.errors(output, target, t)).sum() / (len(times.grid) - 1)

    def times(self, update: int) -> RolloutSpec:
        alphas = self.policy.stock.alphas_cumprod.cpu() if self.policy.process == "vp" else None
        times = self.part.times(self.rollouts.grid, update, self.rollouts.config.seed)
        return noised_finals.exploration(times, 1, self.rollouts.method.denoising.solver, False, False, alphas)

    def errors(self, output: Tensor, target: Tensor, t: float) -> Tensor:
        """Error [B] of predictions [B,*D]; t: sigma, or the alpha-bar of a variance-preserving process."""
        output, target = wide(output, target)
        apart = output - target
        if self.part.space == "data":
            apart = apart * (((1 - t) / t)**0.5 if self.policy.process == "vp" else t)
        apart = apart.flatten(1)
        if self.part.distance == "squared":
            return apart.square().mean(1)
        return smooth_l1_loss(apart, torch.zeros_like(apart), reduction="none").mean(1)

    def teacher(self, encoded: Any, x: Tensor, times: RolloutSpec, k: int) -> Tensor:
        """Teacher's guided prediction [B,*D] at states of the k-th time."""
        assert isinstance(self.part, supervised.GuidanceDistillation)
        weights = self.policy.reference() if self.part.base else torch.no_grad()
        with weights, at_guidance(self.policy, self.part.scale):
            return self.policy.replay(encoded, x, times.grid, k, times.timesteps)


class PairNoisedLosses(NoisedLosses):
    """Preference loss of a pipeline on noised pairs of images."""

    part: supervised.PicturePairs

    def __call__(self, examples: Sequence[Example], places: Sequence[int], update: int) -> Iterator[Tensor]:
        half = max(1, self.rollouts.geometry.micro_batch // 2)  # a pair is two rows
        for start in range(0, len(examples), half):
            yield from self._of(examples[start:start + half], places[start:start + half], update)

    def _of(self, examples: Sequence[Example], places: Sequence[int], update: int) -> Iterator[Tensor]:
        policy, loss = self.policy, self.part.loss
        prompts = [condition_prompt(self.part.condition, example) for example in examples]
        encoded = DenoisingRollouts.conditioning(self.rollouts, prompts).rows(
            torch.arange(len(examples)).repeat_interleave(2))
        files = [file for example in examples for file in (str(example.content), example.rejected)]
        x0 = torch.cat([self.encoder(file, encoded.rows(torch.tensor([row])))[0] for row, file in enumerate(files)]
                       ).to(policy.device)
        # Both images of a pair get one noise, so that only they differ.
        seeds = (seed_of(self.rollouts.config.seed, update, place) for place in places)
        noise = noise_like(x0[::2], policy.generators(seeds)).repeat_interleave(2, 0)
        times = self.times(update)
        for k, t in enumerate(times.grid[:-1].tolist()):
            x, target = noised_finals.add_noise(x0, noise, t, policy.device, policy.process == "vp")

            def score() -> Scored:
                with at_guidance(policy, self.part.guidance):
                    output = policy.replay(encoded, x, times.grid, k, times.timesteps)
                return single_score(-self.errors(output, target, t) / 2)

            reference = None
            if loss.reads_reference:
                with policy.reference():
                    reference = score()
            yield sum_loss(loss, score(), reference, [example.reward for example in examples]) / (len(times.grid) - 1)

"""Measurement on held-out prompts: sample, score, and keep the results."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from flowgrpo import rewards
from flowgrpo.data import sources
from flowgrpo.data.prompts import Prompt, encodable
from flowgrpo.distributed import signals
from flowgrpo.distributed.processes import Processes
from flowgrpo.evaluation import looks
from flowgrpo.evaluation.distances import score_shuffled, shuffle, structure
from flowgrpo.evaluation.looks import Looks
from flowgrpo.log import bar
from flowgrpo.nouns import SAMPLE, quantity
from flowgrpo.rewards import pairwise
from flowgrpo.samplers.rollout import seeder

GREY = 0.5  # in the place of an image that could not be made
EVAL_SEED = 20_000  # independent of the run's seed, so that runs are compared on the same images
ANEW_SEED = EVAL_SEED + 1  # of what is reported of weights that evaluations chose


@dataclass(frozen=True)
class Measured:
    """Held-out scores.

    prompts: [N].
    scores: by reward name, [N]; NaN where a reward does not apply (also accepted as JSON's null).
    images: of n prompts, evenly spaced: images [n,3,H,W], clips [n,F,3,H,W] or texts.
    fps: frames per second of clips; None for others.
    failed: number of the N that each reward failed on, if its rule skips failures.
    shuffled: scores [N] under other prompts (distances.py), by reward; NaN where a sample has none.
    lost: [N], True for samples of prompts whose files cannot be read any more, without scores; empty for none.
    features: `looks.features` of the images and their twins, and the number of each one's prompt; None for texts.
    looks: what follows from them, or what an earlier measurement kept of them.
    """

    prompts: list[Prompt]
    scores: dict[str, list[float]]
    images: torch.Tensor | list[str]
    failed: dict[str, int] = field(default_factory=dict)
    fps: float | None = None
    shuffled: dict[str, list[float]] = field(default_factory=dict)
    lost: list[bool] = field(default_factory=list)
    features: tuple[torch.Tensor, list[int]] | None = None
    looks: Looks = Looks()

    def __post_init__(self):
        for key in ("scores", "shuffled"):
            object.__setattr__(self, key, {name: [math.nan if value is None else value for value in values]
                                           for name, values in getattr(self, key).items()})

    def without(self, prompts: list[Prompt], lost: list[bool], keep: int) -> Measured:
        """Scores without those of lost prompts, in whose place others were measured, with grey images.

        prompts: as they were meant, [n]; lost: [n]. keep: number of prompts whose image is kept.
        """
        samples = len(self.prompts) // len(prompts)
        shown = [lost[i] for i in evenly(len(prompts), keep)]
        images = ["" if gone else text for text, gone in zip(self.images, shown)] if isinstance(
            self.images, list) else self.images.clone()
        if isinstance(images, torch.Tensor) and len(images):
            images[torch.tensor(shown)] = GREY
        gone = [each for each in lost for _ in range(samples)]
        seen = self.looks if self.features is None else looks.measure_looks(*self.features, lost)
        return replace(self._blank(gone), looks=seen, prompts=[prompt for prompt in prompts for _ in range(samples)],
                       images=images, lost=gone)

    def beside(self, other: Measured) -> Measured:
        """Keep the scores of the samples that another measurement has not lost."""
        return self._blank(other.lost) if other.lost else self

    def _blank(self, gone: list[bool]) -> Measured:
        scores, shuffled = ({name: [math.nan if lost else value for value, lost in zip(values, gone)]
                             for name, values in of.items()} for of in (self.scores, self.shuffled))
        return replace(self, scores=scores, shuffled=shuffled)

    def structure(self, base: Measured) -> dict[str, Any] | None:
        """Likeness of the images to the base's, by `distances.structure`."""
        one, other = base.images, self.images
        if any(self.lost) and isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            made = [not bool((image == GREY).all()) for image in other]
            one, other = one[made], other[made]
        return structure(one, other)

    def mean(self) -> dict[str, float]:
        return {name: _mean(values) for name, values in self.scores.items()}

    def by_task(self, name: str) -> dict[str, float]:
        """Mean of one reward per `task` of the prompts' metadata, as text; empty if they have none."""
        tasks = defaultdict(list)
        for prompt, score in zip(self.prompts, self.scores[name]):
            if "task" in prompt.metadata:
                tasks[str(prompt.metadata["task"])].append(score)
        return {task: _mean(values) for task, values in tasks.items()}


def _mean(values: list[float]) -> float:
    applicable = [value for value in values if not math.isnan(value)]
    return sum(applicable) / len(applicable) if applicable else math.nan


def spread(prompts: list[Prompt], count: int) -> list[Prompt]:
    return [prompts[i] for i in evenly(len(prompts), count)]


def evenly(total: int, count: int) -> list[int]:
    """At most `count` of `total` indices, evenly spaced."""
    count = min(count, total)
    return [i * total // count for i in range(count)]


def halves(prompts: list[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts in two halves that share no text: of each two neighbours one, by a coin with a fixed seed, so that both
    halves have the mix of an ordered file. Of fewer than two texts both have all."""
    texts = {key: number for number, key in enumerate(dict.fromkeys(prompt.key for prompt in prompts))}
    coins = np.random.default_rng(EVAL_SEED).integers(0, 2, len(texts) // 2 + 1)
    sides: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt in prompts:
        number = texts[prompt.key]
        sides[(number + coins[number // 2]) % 2].append(prompt)
    return sides if all(sides) else (prompts, prompts)


def readable(prompts: list[Prompt], frames: int | None, processes: Processes, title: str
             ) -> tuple[list[Prompt], list[bool]]:
    """Prompts with others in the place of those whose files cannot be read any more, and which these are.

    frames: number of frames that are read of a source video. title: of the measurement, for the line of each.
    """
    if all(prompt.brings is None for prompt in prompts):
        return prompts, [False] * len(prompts)
    errors = [sources.fault(prompt, frames) for prompt in prompts]
    lost = processes.gather(torch.tensor([[error is not None for error in errors]], dtype=torch.int64)).any(0)
    for error in filter(None, errors if processes.first else ()):
        print(f"{title}: {error}: it is not measured ({int(lost.sum())} of {quantity(len(prompts), 'prompt')} lost)",
              flush=True)
    return sources.stand_ins(prompts, lost.tolist(), prompts, frames), lost.tolist()


def measure(policy: Any, prompts: list[Prompt], functions: dict[str, Any], *, steps: int, guidance: float,
            samples: int, micro_batch: int, negative: str = "", keep: int = 0, title: str = "evaluating",
            encode: Callable[..., Any] | None = None, prepare: Callable[[list[Prompt]], None] | None = None,
            processes: Processes = Processes(),
            reference: Callable[[], AbstractContextManager[None]] | None = None, others: Collection[str] = (),
            model: str | None = None, run_seed: int = EVAL_SEED) -> Measured:
    """Generate `samples` images per prompt with the pipeline's own scheduler, or texts, and score them.

    policy: a `Policy` with encode(prompts, negative prompts, images) -> conditioning, and generate(conditioning,
    generators, steps, guidance) -> images or texts.
    keep: number of prompts, evenly spaced, whose first image is kept.
    encode: encodes prompts in place of `policy.encode`. prepare: is given all prompts before the first is encoded.
    processes: share the work; all get the whole result.
    reference: returns a context manager in which the policy is its base. Rewards that compare with the base get its
    images from the same seeds. None: the policy is its base already.
    others: names of rewards that also score images under other prompts, where they can.
    model: the name by which `looks` are measured, of images; None: they are not. run_seed: of `seeder`.
    """
    # Rows (prompt, sample), of which this process has its own; a reward that compares samples needs whole groups.
    encode, viewed = encode or policy.encode, model is not None and policy.modality != "text"
    seed, kept = seeder(run_seed, 0), set(evenly(len(prompts), keep))
    rows = [(i, k) for i in range(len(prompts)) for k in range(samples)]
    whole = any(map(pairwise.sees_groups, functions.values()))
    local = [(i, k) for i in processes.own(range(len(prompts))) for k in range(samples)] if whole else \
        processes.own(rows)
    twins = [(i, 1) for i in evenly(len(prompts), looks.twins(len(prompts), samples))] if viewed else []
    scoring = Scoring(functions, samples if whole else 1, policy, processes.reports)
    shuffled = shuffle({name: functions[name] for name in others} if policy.modality == "image" else {}, prompts)
    under_others = [torch.empty(0, len(shuffled))]
    images, features, seconds = list[Any](), [looks.features([])], [looks.features([])]
    shown = bar(total=len(local) + len(processes.own(twins)), title=title, unit=SAMPLE[policy.modality],
                shown=processes.first)

    def batches(local: list[tuple[int, int]], of: list[tuple[int, int]]
                ) -> Iterator[tuple[list[tuple[int, int]], list[Prompt], Any, list[int]]]:
        """Yield batches of this process's rows, empty ones that it only accompanies, with what draws them."""
        most = -(-len(prompts) // processes.count) * samples if whole and of is rows else -(-len(of) // processes.count)
        for start in range(0, len(local) if processes.lockstep is None else most, micro_batch):
            signals.check()
            local_batch = local[start:start + micro_batch]
            batch = local_batch or of[:1]  # sharded weights are gathered by all processes or by none
            given = [prompts[i] for i, _ in batch]
            yield local_batch, given, encode(*encodable(given, negative)), [seed(i, k) for i, k in batch]
            shown.update(len(local_batch))

    # Sample and score; then the second images of some prompts, which are only looked at.
    with processes.collective(), shown:
        if prepare is not None and rows:
            prepare([prompts[i] for i in dict.fromkeys(i for i, _ in local or rows[:1])])
        for batch, of, conditioning, seeds in batches(local, rows):
            draw = partial(_generate, policy, conditioning, seeds, steps, guidance, scoring.undecoded)
            outputs, latents = draw()
            base = outputs if scoring.compared else None  # the base is its own reference
            if scoring.compared and reference is not None:
                with reference():
                    base = draw()[0]
            if not batch:
                continue
            scoring.add(of, outputs, base, latents)
            if shuffled:
                firsts = [i if k == 0 else None for i, k in batch]
                under_others.append(signals.promptly(partial(score_shuffled, shuffled, firsts, outputs, policy))
                                    if processes.reports else torch.zeros(len(of), len(shuffled)))
            images += [image for (i, k), image in zip(batch, outputs) if k == 0 and i in kept]
            if viewed:
                features.append(looks.features(outputs, str(model)))
        for batch, _, conditioning, seeds in batches(processes.own(twins), twins):
            outputs, _ = _generate(policy, conditioning, seeds, steps, guidance, False)
            seconds.append(looks.features(outputs[:len(batch)], str(model)))
    rewards.leave(functions.values())
    # All processes get the results of all, in the order of `rows`.
    columns = processes.gather(torch.cat(scoring.scores)).T.tolist()
    moved = processes.gather(torch.cat(under_others)).T.tolist() if shuffled else []
    found = (torch.cat([processes.gather(torch.cat(features)), processes.gather(torch.cat(seconds))]),
             [i for i, _ in rows + twins]) if viewed else None
    failed = processes.total([scoring.tally.failed[name] for name in functions])
    return Measured([prompts[i] for i, _ in rows], dict(zip(functions, columns)), processes.gather_samples(images),
                    dict(zip(functions, failed)), policy.fps, dict(zip(shuffled, moved)), features=found,
                    looks=Looks() if found is None else looks.measure_looks(*found))


class Scoring:
    """Scores of samples that come in batches.

    functions: rewards by name. group: samples that are scored together, 1 without a reward that compares them.
    reports: this process scores; another one has zeros.
    scores: of each batch, [n, rewards]. tally: of failures.
    """

    def __init__(self, functions: dict[str, Any], group: int, policy: Any, reports: bool):
        self.functions, self.group, self.policy, self.reports = functions, group, policy, reports
        self.undecoded = any(map(rewards.scores_latents, functions.values()))
        self.compared = any(map(rewards.sees_base, functions.values()))
        self.scores, self.tally = [torch.empty(0, len(functions))], rewards.Tally()
        self._held = list[Any]()

    def add(self, prompts: list[Prompt], samples: Any, base: Any, latents: Any) -> None:
        """Score a batch, together with those before it if a group ends with it."""
        self._held.append((prompts, samples, base, latents))
        if sum(len(held) for held, *_ in self._held) % self.group:
            return
        joined: list[Any] = [parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts)
                             if isinstance(parts[0], torch.Tensor) else [*chain(*parts)] for parts in zip(*self._held)]
        given, drawn, bases, clean = joined
        self._held = []
        if not self.reports:
            self.scores.append(torch.zeros(len(given), len(self.functions)))
            return
        texts, metadata = [prompt.text for prompt in given], [prompt.metadata for prompt in given]
        self.scores.append(signals.promptly(partial(
            rewards.score, self.functions, drawn, texts, metadata, self.group, self.tally, bases, clean,
            policy=self.policy, fps=self.policy.fps)))


def _generate(policy: Any, conditioning: Any, seeds: list[int], steps: int, guidance: float, undecoded: bool
              ) -> tuple[Any, Any]:
    drawn = conditioning, policy.generators(seeds), steps, guidance
    if not undecoded:
        return policy.generate(*drawn), None
    latents = policy.generate(*drawn, output_type="latent")
    return policy.decode(latents.to(policy.device, policy.dtype), conditioning).cpu(), latents

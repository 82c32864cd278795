"""Resampling of groups within an epoch, and their new prompts: `redraw(drawn) -> [(place, prompt), ...]`.

The loop calls it after every turn, until it returns nothing. `drawn` (`EpochBatch`) holds all turns so far, of all
processes. A replaced group is neither compared with others nor trained; a prompt that replaces none adds a group. All
are pure functions of `drawn`: a resumed run draws the same. The new prompt may be the old one with a hint, if no sample
solved it; or a hard prompt gets further groups.

`Expansion` samples every prompt under another text or guidance scale than it is learned with.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np

from flowgrpo.advantages.group import RELATIVE_NOISE, zero_variance
from flowgrpo.advantages.trackers import mean_of
from flowgrpo.config.schema import Config
from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.data.prompts import Guidance, Prompt
from flowgrpo.errors import UserError
from flowgrpo.parts import Above, AtLeast, part


@part("expansion")
class Expansion:
    """Sample every prompt under an expanded text or at another guidance scale; score and learn its samples under the
    prompt itself.

    The ratio is pi(o | prompt) / pi_old(o | expansion), as of Guide-GRPO (2506.13923). A target of finished samples,
    such as noised finals, has no ratio to sampling and takes them as they are.

    text: with {prompt}, such as "{prompt}, each object clearly visible".
    key: of the metadata, under which a prompt has an expansion of its own in place of `text`; empty: none has.
    scale: the guidance scale of sampling, of pipelines; None: `train.guidance`.
    learned: True: the loss reads the expansion and the scale too, so that the first ratio is 1; rewards do not.
    """

    text: str = "{prompt}"
    key: str = ""
    scale: Annotated[float | None, AtLeast(0)] = None
    learned: bool = False

    def __post_init__(self) -> None:
        if "{prompt}" not in self.text:
            raise ValueError(f"Expansion: text is {self.text!r}, expected {{prompt}} in it")

    def require_config(self, config: Config, of_text: bool) -> None:
        """Raise UserError for an expansion under which prompts are sampled as without it."""
        if self.text == "{prompt}" and not self.key and self.scale is None:
            raise UserError("parts.expansion changes nothing: set its text, key or scale")
        require_no_scale("expansion", self.scale, of_text)

    def __call__(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts with their guidance; those that have some already stay."""
        return [prompt if prompt.guided else replace(prompt, guided=Guidance(
            self.expand(prompt), self.scale, self.learned)) for prompt in prompts]

    def expand(self, prompt: Prompt) -> str:
        own = prompt.metadata.get(self.key) if self.key else None
        return self.text.replace("{prompt}", prompt.text) if own is None else str(own)


def require_no_scale(place: str, scale: float | None, of_text: bool) -> None:
    """Raise UserError for a part with a guidance scale in a run of a language model."""
    if of_text and scale is not None:
        raise UserError(f"parts.{place}.scale is {scale}, the guidance of pipelines, and a language model has none: "
                        "leave it out")


@part("redraw")
class DynamicSampling:
    """Replace a group whose samples all earn the same by a fresh prompt, until all differ or an epoch was sampled
    `turns` times (DAPO's dynamic sampling, 2503.14476, equation 11; 10 in its released recipe).

    It compares the weighted sum of rewards before any shaping. Every turn draws only as many prompts as are missing.
    Groups that still agree after the last turn stay, with advantage 0.
    """

    turns: Annotated[int, AtLeast(2, words="2 or more (null: no group is replaced)")] = 10

    def __call__(self, drawn: EpochBatch) -> list[tuple[int, Prompt]]:
        if drawn.turn >= self.turns:
            return []
        agree = zero_variance(drawn.totals).tolist()
        places = [place for place in drawn.standing() if agree[place]]
        return list(zip(places, fresh(drawn.pool, len(places), drawn.prompts, [drawn.seed, drawn.epoch, drawn.turn])))


@part("redraw", reads_prior=True)
class AdditionalGroups:
    """Sample one more group of each prompt whose mean reward contradicts its prior value, the `PriorBlend` advantage's,
    by more than `deviations` of its noise (V0.5, its test of prior and rollouts).

    The noise of a mean of n rewards is sqrt(V (1 - V) / n) under the prior rate V. Both groups are compared as one. A
    prompt without a history asks for nothing. deviations 2, and the form of the test, are ours.
    """

    deviations: Annotated[float, Above(0)] = 2.0

    def __call__(self, drawn: EpochBatch) -> list[tuple[None, Prompt]]:
        known = drawn.memory.get("PriorBlend", {})
        if drawn.turn > 1:
            return []
        pairs: list[tuple[None, Prompt]] = []
        for prompt, rewards in zip(drawn.prompts, drawn.totals):
            if prompt.key not in known or not len(values := rewards[~rewards.isnan()]):
                continue
            prior = mean_of(known[prompt.key]["after"])
            noise = math.sqrt(max(prior * (1 - prior), 0.0) / len(values))
            if abs(values.mean().item() - prior) > self.deviations * noise + RELATIVE_NOISE:
                pairs.append((None, prompt))
        return pairs


def fresh(pool: Sequence[Prompt], count: int, drawn: Sequence[Prompt], seed: Sequence[int]) -> list[Prompt]:
    """`count` prompts of the pool, the least often drawn first, at random among these, by their weights.
    A prompt is repeated only if count exceeds the pool."""
    times = Counter(prompt.key for prompt in drawn)
    lots = np.random.default_rng(seed).exponential(size=len(pool)) / [prompt.weight for prompt in pool]
    order = sorted(range(len(pool)), key=lambda place: (times[pool[place].key], lots[place]))
    return [pool[order[number % len(pool)]] for number in range(count)]


@part("redraw")
class Hints:
    """Sample a group without a sample above `fail` again with a hint in its prompt, and with one more hint while it
    still fails and hints are left (Scaf-GRPO, 2510.19807; GHPO, 2507.10628).

    The prompt's metadata holds the hints, from the vaguest to the plainest: a list of texts under `hints`. With
    `shares` they are the first parts, of these sizes and cut between words, of the text under `solution`.
    usual: the hints of a prompt whose metadata has none, such as ["in sharp focus"] for images.
    text: the template that joins prompt and hints.
    scale: the guidance scale under which pipelines sample again; None: `train.guidance`. With it a prompt that has no
        hints is sampled again as it is.
    after: the share of the run before which no hints are given.
    learned: True: samples and replays, old and new probabilities, all read the prompt with its hints, so that the first
        ratio is 1. False: the loss scores the samples under the prompt itself, with the ratio pi(o | q) / pi_old(o | q,
        hint), as Guide-GRPO (2506.13923).

    Rewards see the prompt without hints. A prompt without hints stays.
    """

    shares: tuple[float, ...] = ()
    after: Annotated[float, AtLeast(0, to=1)] = 0.0
    fail: float = 0.0
    text: str = "{prompt}\n\nHint: {hint}"
    learned: bool = True
    usual: tuple[str, ...] = ()
    scale: Annotated[float | None, AtLeast(0)] = None

    def __post_init__(self) -> None:
        if any(not 0 < share <= 1 for share in self.shares) or list(self.shares) != sorted(set(self.shares)):
            raise ValueError(f"Hints: shares are {list(self.shares)}, expected rising numbers above 0 to 1")
        require_template("Hints", self.text)

    def require_config(self, config: Config, of_text: bool) -> None:
        """Raise UserError for a guidance scale of a language model."""
        require_no_scale("redraw", self.scale, of_text)

    def __call__(self, drawn: EpochBatch) -> list[tuple[int, Prompt]]:
        if drawn.epoch < self.after * drawn.epochs:
            return []
        return [(place, prompt) for place in failing(drawn, self.fail)
                if (prompt := self.add_hint(drawn.prompts[place]))]

    def add_hint(self, prompt: Prompt) -> Prompt | None:
        """The prompt with one more hint; None if none is left."""
        hints = self.hints(prompt.metadata)
        given = 1 + int(prompt.guided.level if prompt.guided else 0)
        if given > len(hints):
            return None
        hint = hints[given - 1] if self.shares else "\n".join(hints[:given])
        text = self.text.replace("{prompt}", prompt.text).replace("{hint}", hint) if hint else prompt.text
        return replace(prompt, guided=Guidance(text, self.scale, self.learned, given))

    def hints(self, metadata: dict[str, Any]) -> list[str]:
        """The hints of a prompt's metadata: its hints, or ever longer beginnings of its solution."""
        if not self.shares:
            given = [str(hint) for hint in metadata.get("hints", self.usual)]
            return given if given or self.scale is None else [""]
        return [beginning(metadata, share) for share in self.shares] if metadata.get("solution") else []


def failing(drawn: EpochBatch, fail: float) -> list[int]:
    """Indices of the standing groups without a sample whose weighted reward is above `fail`."""
    best = drawn.totals.nan_to_num(float("-inf")).amax(1)
    failed = (best <= fail + RELATIVE_NOISE * abs(fail)).tolist()
    return [place for place in drawn.standing() if failed[place]]


def beginning(metadata: dict[str, Any], share: float) -> str:
    """That share of the words of a prompt's solution, one at least; empty for share 0 and without a solution."""
    words = str(metadata.get("solution") or "").split()
    return " ".join(words[:max(1, round(share * len(words)))]) if share > 0 else ""


def require_template(part: str, text: str) -> None:
    """Raise ValueError unless a part's text joins a prompt and a hint."""
    if "{prompt}" not in text or "{hint}" not in text:
        raise ValueError(f"{part}: text is {text!r}, expected both {{prompt}} and {{hint}} in it")


@part("redraw", jointly={"most schedule": "1 or more, and equal or hardness"})
class ExtraRollouts:
    """More groups for hard prompts, after the first turn (DARS, 2508.13755).

    The sum of |advantages| of n samples of a prompt of success rate p is 2 n sqrt(p (1 - p)), largest at p = 1/2. A
    prompt below 1/2 gets as many further groups as bring its sum to that of 1/2, rounded, and at most `most`; one that
    no sample solved gets `most`.
    schedule: "equal"; "hardness" brings the sum to 2 (1 - p) times that of 1/2.

    Rates are means of rewards within 0 to 1. The advantage `Pooled` compares all groups of a prompt as one. The paper
    adds single samples; here the unit is a group, so `train.group` should be small.
    """

    most: Annotated[int, AtLeast(1)] = 3
    schedule: Literal["equal", "hardness"] = "equal"

    def __call__(self, drawn: EpochBatch) -> list[tuple[int | None, Prompt]]:
        if drawn.turn > 1:
            return []
        groups: dict[str, list[int]] = {}
        for place, prompt in enumerate(drawn.prompts):
            groups.setdefault(prompt.key, []).append(place)
        pairs: list[tuple[int | None, Prompt]] = []
        for places in groups.values():
            rewards = drawn.totals[places].flatten()
            rewards = rewards[~rewards.isnan()]
            if len(rewards):
                number = self.groups(rewards.mean().item(), len(rewards), drawn.totals.shape[1])
                pairs += [(None, drawn.prompts[places[0]])] * number
        return pairs

    def groups(self, rate: float, samples: int, size: int) -> int:
        """The further groups of `size` for a prompt with so many samples of this rate."""
        if rate >= 0.5:
            return 0
        if rate <= 0:
            return self.most
        target = 1.0 if self.schedule == "equal" else 2 * (1 - rate)
        missing = samples * (target / (2 * math.sqrt(rate * (1 - rate))) - 1)
        return min(int(missing / size + 0.5), self.most)


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
        prompts = [(place, drawn.prompts[place]) for place in failing(drawn, self.fail)]
        return [(place, replace(prompt, guided=Guidance(prompt.text, answers=True))) for place, prompt in prompts
                if solutions_of(prompt) and not prompt.guided]


def solutions_of(prompt: Prompt) -> list[str]:
    """The teachers' right answers in a prompt's metadata, in order."""
    listed = prompt.metadata.get("solutions") or ()
    entries = [entry if isinstance(entry, dict) else {"text": entry} for entry in listed]
    return [str(entry["text"]) for entry in entries if entry.get("text") and entry.get("right", True)]

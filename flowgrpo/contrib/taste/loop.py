"""Training loop between the clicks: `Taste`, a reward that brings its own draws and waits for a person.

Epoch k trains on batch k of questions. Batch k + 1 is drawn by the weights before that epoch's update, so that the
person votes on it meanwhile. Its samples are one epoch older than the weights that learn from them, for which the loss
is decoupled as that of `train.staleness`; a loss of pairs compares with the reference and reads no old policy. What the
run trains depends on the votes alone, never on their times.

The reward of a sample is the head's score less its group's mean, in deviations of the batch, plus the click on it. That
is 1 for the chosen picture, and -1 / (k - 1) for the k - 1 others that were shown beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowgrpo.contrib.learned_rewards.denoiser_head import states
from flowgrpo.contrib.staleness.extension import decoupled
from flowgrpo.contrib.taste.head import Head, Seen, fitted, seen
from flowgrpo.contrib.taste.votes import Question, Vote, VoteLog
from flowgrpo.data.prompts import Prompt, as_line, of_records
from flowgrpo.evaluation.pages.clips import as_image
from flowgrpo.methods import capabilities
from flowgrpo.methods.setup import Setup
from flowgrpo.rewards.about import About
from flowgrpo.rollouts.base import Encoded
from flowgrpo.samplers.rollout import Part, seeder
from flowgrpo.storage import atomic
from flowgrpo.storage.checkpoint import Tensors
from flowgrpo.training import sampling
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics
from flowgrpo.training.run import Run
from flowgrpo.training.state import restored, stored, within
from flowgrpo.types import required

if TYPE_CHECKING:
    from flowgrpo.evaluation.measured import Measured

SHOWN = 4  # pictures of a question
CHECK_SEED = 40_000  # of the noises of checks, apart from those of training and evaluation
IMAGES, FEATURES, VOTES = "pictures", "features", "votes.jsonl"  # in the run's folder


class Person(Protocol):
    """Source of votes: `vote.live.LiveBallot`."""

    log: VoteLog

    def ask(self, questions: Sequence[Question]) -> None:
        """Add questions."""

    def wait(self, batch: int, check: Callable[[], None]) -> dict[int, Vote] | None:
        """Return the votes on a batch once all of it has one, by places; None if the session ends before."""

    def tell(self, **facts: Any) -> None:
        """Show facts."""


@dataclass(frozen=True)
class Settings:
    """Settings of the loop. head, clicks: the weights of both. checks: blind pairs before each batch."""

    head: float = 1.0
    clicks: float = 1.0
    checks: int = 5


class Taste:
    """Reward of a person's votes. The trainer does not call it for the samples it trains on: its extension draws them.

    folder: of the run. Outside of training no sample has a score: nobody votes on it.
    """

    about = About(modality="image", range=(None, None), needs="", licence="Apache-2.0")
    brings: ClassVar[Any]  # VotedEpochs, which is defined below

    def __init__(self, person: Person, folder: Path, settings: Settings = Settings()):
        self.person, self.folder, self.settings = person, folder, settings

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[None]:
        return [None] * len(prompts)


@dataclass(eq=False)
class Drawn:
    """Batch of questions that is drawn and waits for its votes.

    update: the optimizer updates of the weights that drew it. features: [P, G, F]. checks: prompts of its checks.
    """

    batch: int
    update: int
    prompts: list[Prompt]
    parts: list[Part] = field(default_factory=list)
    features: Tensor = field(default_factory=lambda: torch.empty(0))
    checks: list[str] = field(default_factory=list)
    conditioning: Encoded | None = None


def clicked(votes: dict[int, Vote], prompts: int, group: int) -> Tensor:
    """Return the clicks [P, G]: 1 for a chosen picture, -1 / (k - 1) for the others of k shown, else 0."""
    clicks = torch.zeros(prompts, group, dtype=torch.double)
    for place, vote in votes.items():
        if vote.target is not None:
            shares, k = torch.tensor(vote.target, dtype=torch.double), len(vote.shown)
            clicks[place, list(vote.shown)] = (shares - 1 / k) * k / (k - 1)
    return clicks


def rewarded(head: Head, features: Tensor, clicks: Tensor, settings: Settings) -> Tensor:
    """Return the rewards [P, G] of a batch, float32. features: [P, G, F]; clicks: [P, G]."""
    scores = head(features.flatten(0, 1)).view(clicks.shape)
    scores = scores - scores.mean(1, keepdim=True)
    spread = scores.square().mean().sqrt()
    scores = scores / spread if spread > 0 else scores
    return (settings.head * scores + settings.clicks * clicks).float()


def learned(folder: Path, log: VoteLog, batches: int) -> list[Seen]:
    """Return what the votes on the first batches teach, from the features that a run's folder keeps."""
    taught: list[Seen] = []
    for batch in range(batches):
        if votes := log.of(batch):
            features = load_file(folder / FEATURES / f"{batch:05d}.safetensors")["shown"]
            taught += [each for place, vote in sorted(votes.items())
                       if (each := seen(features[place], vote)) is not None]
    return taught


class VotedEpochs(Extension):
    """Epochs whose samples a person votes on. queue: the batches that are drawn and not learned yet."""

    name = "taste"
    needs = frozenset({capabilities.ONE_DRAW, capabilities.AS_LEARNED, capabilities.OWN_SAMPLES,
                       capabilities.RECORDABLE, capabilities.ENCODED_ONCE})

    def __init__(self, trainer: Run, taste: Taste):
        super().__init__(trainer)
        self.run, self.person, self.settings, self.folder = trainer, taste.person, taste.settings, taste.folder
        self.queue: list[Drawn] = []
        self.head = fitted([])
        self.taught: list[Seen] = []
        self.metrics: Metrics = {}

    @classmethod
    def asked(cls, setup: Setup) -> str:
        return "the samples are voted on"

    @classmethod
    def refused(cls, setup: Setup) -> dict[str, bool]:
        return {f"{setup.all_processes} processes, of which one person would have to see all": setup.all_processes > 1,
                f"a method that trains {setup.method.target.trains}, which blurs models of few steps":
                not setup.method.target.scores_sampling}

    @classmethod
    def lacks(cls, setup: Setup) -> dict[str, str]:
        return {capabilities.PRESENT_WEIGHTS: "votes on samples that earlier weights drew"}

    # --- one epoch ---------------------------------------------------------------------------------------------------

    def draw_epoch(self) -> Epoch:
        """Draw the batch behind the present one, wait for the votes on the present one, and reward its samples.

        Raises Stopped if the session ends before.
        """
        run = self.run
        self.queue = [drawn for drawn in self.queue if drawn.batch >= run.epoch]
        for drawn in self.queue:
            if drawn.conditioning is None:  # of a checkpoint
                drawn.conditioning = run.rollouts.conditioning(drawn.prompts, drawn.batch)
                self.person.ask(self._questions(drawn))
        for batch in range(run.epoch + len(self.queue), run.epoch + 2):
            drawn = run.with_oom_retry(partial(self._drawn, batch))
            self.queue.append(drawn)
            self.person.ask(self._questions(drawn))
        with run.clock("reward"):
            votes = self.person.wait(run.epoch, run.stop.check)
        if votes is None:
            run.stop.asked = True
            run.stop.check()
        return self._voted(self.queue[0], required(votes))

    def _drawn(self, batch: int) -> Drawn:
        """Draw the samples of a batch, their features, and the pictures that are shown."""
        run, scoring, policy = self.run, self.run.scoring, cast(Any, self.run.policy)
        scoring.start_epoch(batch, run.config.train.epochs, run.memory)
        scoring.start_turn()
        run.geometry.start_turn()
        prompts = sampling.choose_prompts(run, batch)
        drawn, features, place = Drawn(batch, run.optimization.update, prompts), [], 0
        encoded = drawn.conditioning = cast(Any, run.rollouts.conditioning(prompts, batch))
        group = run.config.train.group
        for part, outputs in sampling.sampled_parts(run, scoring, encoded, prompts, batch, 0):
            drawn.parts.append(part)
            with run.clock("features"), policy.reference():
                features.append(states(policy, part.finals[0], encoded.rows(part.prompts)))
            for images in cast(Tensor, outputs[0]).split(group):
                for file, image in zip(self._files(batch, "q", place, min(SHOWN, group)), images):
                    _write(file, image)
                place += 1
        drawn.features = torch.cat(features).unflatten(0, (-1, group))
        atomic.make_folder(self.folder / FEATURES)
        with atomic.replacing(self.folder / FEATURES / f"{batch:05d}.safetensors") as file:
            save_file({"shown": drawn.features[:, :SHOWN].contiguous()}, file)
        drawn.checks = self._drawn_checks(batch) if run.optimization.update else []
        run.progress.sampled += len(prompts) * group
        return drawn

    def _drawn_checks(self, batch: int) -> list[str]:
        """Draw held-out prompts with the base and with the present weights, from the same noises."""
        run, count, settings = self.run, self.settings.checks, self.run.config.eval
        held, policy = run.held_out, cast(Any, run.policy)
        prompts = [held[(batch * count + place) % len(held)] for place in range(count)]
        if not prompts:
            return []
        seeds = [seeder(CHECK_SEED, batch)(place, 0) for place in range(count)]
        encoded = cast(Any, run.rollouts.conditioning(prompts))
        before = policy.evaluations

        def images() -> Tensor:
            rows = torch.arange(count).split(run.geometry.micro_batch)
            return torch.cat([policy.generate(encoded.rows(at), policy.generators([seeds[row] for row in at]),
                                              settings.steps, settings.guidance) for at in rows])

        with run.clock("checks"):
            with policy.weights.swapped(run.optimization.evaluated_weights()):
                now = images()
            with policy.reference():
                base = images()
        policy.evaluations = before
        for place in range(count):
            for file, image in zip(self._files(batch, "c", place, 2), (base[place], now[place])):
                _write(file, image)
        return [prompt.text for prompt in prompts]

    def _files(self, batch: int, kind: str, place: int, count: int) -> tuple[Path, ...]:
        return tuple(self.folder / IMAGES / f"{batch:04d}-{kind}{place:02d}-{shown}.png" for shown in range(count))

    def _questions(self, drawn: Drawn) -> list[Question]:
        """Return a batch's checks, and then its questions."""
        shown = min(SHOWN, self.run.config.train.group)
        asked = [Question(drawn.batch, place, text, self._files(drawn.batch, "c", place, 2), check=True)
                 for place, text in enumerate(drawn.checks)]
        return asked + [Question(drawn.batch, place, prompt.text, self._files(drawn.batch, "q", place, shown))
                        for place, prompt in enumerate(drawn.prompts)]

    def _voted(self, drawn: Drawn, votes: dict[int, Vote]) -> Epoch:
        """Return a batch as an epoch with its rewards, after the head has learned from all votes so far."""
        run = self.run
        of = [each for place, vote in sorted(votes.items())
              if (each := seen(drawn.features[place, :SHOWN], vote)) is not None]
        if not self.taught and drawn.batch:  # of a resumed run
            self.taught = learned(self.folder, self.person.log, drawn.batch)
            self.head = fitted(self.taught)
        right, decided = self.head.right(of) if self.taught else (0, 0)
        self.taught = self.taught + of
        self.head = fitted(self.taught)
        clicks = clicked(votes, *drawn.features.shape[:2])
        scores = rewarded(self.head, drawn.features, clicks, self.settings)[..., None]
        run.scoring.start_epoch(run.epoch, run.config.train.epochs, run.memory)
        batch = sampling.empty_batch(run, drawn.batch)
        batch.add(drawn.prompts, scores, run.scoring.weighted(scores))
        run.scoring.end_epoch()
        parts = drawn.parts
        if drawn.update != run.optimization.update and not run.method.loss.surrogate.reads_groups:
            parts = run.with_oom_retry(partial(self._decoupled, drawn), "update")
        self.metrics = {"taste/votes": len(self.taught), "taste/ridge": self.head.ridge,
                        "taste/foretold": right / decided if decided else float("nan")}
        told = {"foretold": {"right": right, "of": decided}} if decided else {}
        self.person.tell(updates=run.optimization.update, **told)
        return Epoch(batch, drawn.prompts, parts, cast(Encoded, drawn.conditioning))

    def _decoupled(self, drawn: Drawn) -> list[Part]:
        run = self.run
        with torch.no_grad(), run.clock("rescore"):
            return [decoupled(part, run.rollouts.replay(part, required(drawn.conditioning)),
                              run.method.loss.log_ratio, run.config.train.staleness_cap) for part in drawn.parts]

    def on_trained(self, epoch: Epoch) -> Metrics:
        """Return the number of votes that taught the head, and the share of the last batch that it foretold."""
        self.queue = self.queue[1:]
        self.person.tell(updates=self.run.optimization.update)
        return self.metrics

    def on_measured(self, measured: Measured) -> Metrics:
        """Show the looks of held-out images, as shares of the base's."""
        self.person.tell(looks=measured.looks.of(self.run.progress.base))
        return {}

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Return the batches that wait for their votes."""
        tensors: Tensors = {}
        listed = []
        for place, drawn in enumerate(self.queue):
            tensors[f"{place}.features"] = drawn.features
            parts = []
            for number, part in enumerate(drawn.parts):
                kept, of = stored(part)
                tensors |= {f"{place}.{number}.{name}": value for name, value in kept.items()}
                parts.append(of)
            listed.append({"batch": drawn.batch, "update": drawn.update, "checks": drawn.checks, "parts": parts,
                           "prompts": [as_line(prompt) for prompt in drawn.prompts]})
        return tensors, {"drawn": listed}

    def load_state(self, tensors: Tensors, values: dict[str, Any]) -> None:
        """Restore the batches of a checkpoint; the next draw asks for their votes."""
        self.queue = []
        for place, entry in enumerate(values.get("drawn", ())):
            drawn = Drawn(entry["batch"], entry["update"], of_records(entry["prompts"]),
                          features=tensors[f"{place}.features"], checks=entry["checks"])
            drawn.parts = [restored(within(tensors, f"{place}.{number}."), of, self.run.rollouts, drawn.batch)
                           for number, of in enumerate(entry["parts"])]
            self.queue.append(drawn)


def _write(file: Path, image: Tensor) -> None:
    """Write a picture [3, H, W] as a PNG, without waiting for the disk: a run that lost it draws it again."""
    file.parent.mkdir(parents=True, exist_ok=True)
    as_image(image).save(file, format="PNG", compress_level=1)


Taste.brings = VotedEpochs

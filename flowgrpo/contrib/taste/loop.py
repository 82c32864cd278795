"""Training loop between the clicks: `Taste`, a reward that brings its own draws and waits for the votes.

Batch b of questions is a few epochs long. The first of them waits for the votes on the batch and fits the head to all
votes so far. Each of them draws fresh samples by the present weights, the head scores these, and the weights learn from
the scores: votes are few and each trains the head for good, samples are many and each trains the weights once. While
the head does not beat chance all samples have the same reward. Batch b + 1 is drawn before batch b is learned, so that
the user votes on it meanwhile. What the run trains depends on the votes alone, never on their times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowgrpo.contrib.learned_rewards.denoiser_head import states
from flowgrpo.contrib.taste.head import Head, Seen, fit_head, observe
from flowgrpo.contrib.taste.votes import Question, Vote, VoteLog
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation.pages.clips import as_image
from flowgrpo.methods import capabilities
from flowgrpo.methods.setup import Setup
from flowgrpo.nouns import quantity
from flowgrpo.rewards.about import About
from flowgrpo.rollouts.base import Encoded
from flowgrpo.samplers.rollout import Part, seeder
from flowgrpo.storage import atomic
from flowgrpo.storage.checkpoint import Tensors
from flowgrpo.training import sampling
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics
from flowgrpo.training.run import Run
from flowgrpo.types import unwrap

if TYPE_CHECKING:
    from flowgrpo.evaluation.measured import Measured

SHOWN = 4  # images of a question
ROUNDS = 4  # epochs of fresh samples for each batch of votes
CHECKS = 5  # blind pairs before each batch
CHECK_SEED = 40_000  # of the noises of checks, apart from those of training and evaluation
IMAGES, FEATURES, VOTES = "pictures", "features", "votes.jsonl"  # in the run's folder


class Voter(Protocol):
    """Source of votes: `vote.live.LiveBallot`."""

    log: VoteLog

    def ask(self, questions: Sequence[Question]) -> None:
        """Add questions."""

    def wait(self, batch: int, check: Callable[[], None]) -> dict[int, Vote] | None:
        """Return the votes on a batch once all of it has one, by places; None if the session ends before."""

    def tell(self, **facts: Any) -> None:
        """Show facts."""


class Taste:
    """Reward of the user's votes. The trainer does not call it for the samples it trains on: its extension draws them.

    folder: of the run. checks: blind pairs before each batch. rounds: epochs of a batch. errors: standard errors by
    which a head must predict votes better than chance before the weights learn from it. Outside of training no sample
    has a score.
    """

    about = About(modality="image", range=(None, None), needs="", licence="Apache-2.0")
    brings: ClassVar[Any]  # VotedEpochs, which is defined below

    def __init__(self, voter: Voter, folder: Path, checks: int = CHECKS, rounds: int = ROUNDS,
                 errors: float = 1.0):
        self.voter, self.folder, self.checks, self.rounds, self.errors = voter, folder, checks, rounds, errors

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[None]:
        return [None] * len(prompts)


@dataclass(frozen=True)
class Drawn:
    """Batch of questions that is drawn and waits for its votes.

    prompts: of its questions. checks: prompts of its checks.
    """

    batch: int
    prompts: list[str]
    checks: list[str]


def head_rewards(head: Head, features: Tensor) -> Tensor:
    """Return the rewards [P, G] of samples, float32: the head's scores less their group's mean, in deviations of the
    batch. features: [P, G, F]."""
    scores = head(features.flatten(0, 1)).view(features.shape[:2])
    scores = scores - scores.mean(1, keepdim=True)
    spread = scores.square().mean().sqrt()
    return (scores / spread if spread > 0 else scores).float()


def features_file(folder: Path, batch: int) -> Path:
    """Return the file of a batch's features, "shown" [questions, images, F]."""
    return folder / FEATURES / f"{batch:05d}.safetensors"


def read_observations(folder: Path, log: VoteLog, batches: int) -> list[Seen]:
    """Return what the votes on the first batches teach, from the features that a run's folder keeps."""
    taught: list[Seen] = []
    for batch in range(batches):
        if votes := log.of(batch):
            features = load_file(features_file(folder, batch))["shown"]
            taught += [each for place, vote in sorted(votes.items())
                       if (each := observe(features[place], vote)) is not None]
    return taught


class VotedEpochs(Extension):
    """Epochs whose samples a head scores, which learns from votes. queue: the batches that are drawn and not learned
    yet."""

    name = "taste"
    needs = frozenset({capabilities.ONE_DRAW, capabilities.AS_LEARNED, capabilities.OWN_SAMPLES,
                       capabilities.ENCODED_ONCE})

    def __init__(self, trainer: Run, taste: Taste):
        super().__init__(trainer)
        self.run, self.taste, self.voter, self.folder = trainer, taste, taste.voter, taste.folder
        self.queue: list[Drawn] = []
        self.unasked: list[Drawn] = []  # of a checkpoint's queue
        self.head = fit_head([])
        self.taught: list[Seen] = []
        self.metrics: Metrics = {}

    @classmethod
    def enabled_by(cls, setup: Setup) -> str:
        return "the samples are voted on"

    @classmethod
    def conflicts(cls, setup: Setup) -> dict[str, bool]:
        return {f"{setup.all_processes} processes, of which one user would have to see all": setup.all_processes > 1,
                f"a method that trains {setup.method.target.trains}, which blurs models of few steps":
                not setup.method.target.scores_sampling}

    # --- one epoch ---------------------------------------------------------------------------------------------------

    def draw_epoch(self) -> Epoch:
        """Draw samples and score them by the head; in the first round of a batch after its votes have come.

        Raises Stopped if the session ends before they have.
        """
        run = self.run
        batch, turn = divmod(run.epoch, self.taste.rounds)
        for drawn in self.unasked:
            self.voter.ask(self._questions(drawn))
        self.unasked = []
        self._fit(batch if turn == 0 else batch + 1)  # a resumed run's head
        if turn == 0:
            self._learn(batch)
        return run.with_oom_retry(self._sample_epoch)

    def _fit(self, batches: int) -> None:
        """Fit the head to the votes on the first batches, unless it is."""
        if batches and not self.taught:
            self.taught = read_observations(self.folder, self.voter.log, batches)
            self.head = fit_head(self.taught)

    def _learn(self, batch: int) -> None:
        """Draw the batch behind the present one, wait for the votes on the present one, and fit the head to all."""
        run = self.run
        for number in range(batch + len(self.queue), batch + 2):
            drawn = run.with_oom_retry(partial(self._sample_batch, number))
            self.queue.append(drawn)
            self.voter.ask(self._questions(drawn))
        with run.clock("reward"):
            votes = self.voter.wait(batch, run.stop.check)
        if votes is None:
            run.stop.asked = True
            run.stop.check()
        features = load_file(features_file(self.folder, batch))["shown"]
        of = [each for place, vote in sorted(unwrap(votes).items())
              if (each := observe(features[place], vote)) is not None]
        right, decided = self.head.right(of) if self.taught else (0, 0)
        self.taught = self.taught + of
        self.head = fit_head(self.taught)
        if not self.head.beats_chance(self.taste.errors):
            run.log(f"epoch {run.epoch + 1}: after {quantity(len(self.taught), 'vote')} the learned taste does not "
                    "predict one better than chance, so that this batch teaches the weights nothing")
        self.queue = self.queue[1:]
        self.metrics = {"taste/votes": len(self.taught), "taste/ridge": self.head.ridge,
                        "taste/gain": self.head.gain, "taste/gain_error": self.head.error,
                        "taste/foretold": right / decided if decided else float("nan")}
        self.voter.tell(updates=run.optimization.update,
                         **{"foretold": {"right": right, "of": decided}} if decided else {})

    def _sample_epoch(self) -> Epoch:
        """Return an epoch of fresh samples, with the head's scores as rewards."""
        run, group = self.run, self.run.config.train.group
        prompts = sampling.choose_prompts(run, run.epoch)
        drawn = [*self._sample_parts(prompts, run.epoch)]
        with run.clock("reward"):
            features = torch.cat([of for _, _, of, _ in drawn]).unflatten(0, (-1, group))
            scores = (head_rewards(self.head, features) if self.head.beats_chance(self.taste.errors) else
                      features.new_zeros(features.shape[:2]).float())[..., None]
        batch = sampling.empty_batch(run, run.epoch)
        batch.add(prompts, scores, run.scoring.sum_rewards(scores))
        run.scoring.end_epoch()
        run.progress.sampled += scores.numel()
        return Epoch(batch, prompts, [part for _, part, _, _ in drawn], drawn[0][0])

    def _sample_parts(self, prompts: list[Prompt], epoch: int, turn: int = 0
                      ) -> Iterator[tuple[Encoded, Part, Tensor, Tensor | None]]:
        """Yield parts with their conditioning, features [rows, F] and images; turn 0 decodes none."""
        run, scoring, policy = self.run, self.run.scoring, cast(Any, self.run.policy)
        scoring.start_epoch(epoch, run.config.train.epochs, run.memory)
        scoring.start_turn()
        run.geometry.start_turn()
        run.rollouts.old_policy.updates = run.optimization.update
        run.rollouts.decodes = turn > 0
        encoded = cast(Any, run.rollouts.conditioning(prompts, epoch))
        for part, outputs in sampling.sample_parts(run, scoring, encoded, prompts, epoch, turn):
            with run.clock("features"), policy.reference():
                features = states(policy, part.finals[0], encoded.rows(part.prompts))
            yield encoded, part, features, cast(Tensor | None, outputs[0])

    # --- questions ---------------------------------------------------------------------------------------------------

    def _sample_batch(self, batch: int) -> Drawn:
        """Draw the images of a batch of questions, and the features of those that are shown."""
        run, group, features, place = self.run, self.run.config.train.group, [], 0
        epoch = batch * self.taste.rounds
        prompts = sampling.choose_prompts(run, epoch)
        for _, _, of, outputs in self._sample_parts(prompts, epoch, turn=1):
            features.append(of.unflatten(0, (-1, group))[:, :SHOWN])
            for images in unwrap(outputs).split(group):
                for file, image in zip(self._files(batch, "q", place, min(SHOWN, group)), images):
                    _write(file, image)
                place += 1
        atomic.make_folder(self.folder / FEATURES)
        with atomic.replacing(features_file(self.folder, batch)) as file:
            save_file({"shown": torch.cat(features).contiguous()}, file)
        checks = self._sample_checks(batch) if run.optimization.update else []
        return Drawn(batch, [prompt.text for prompt in prompts], checks)

    def _sample_checks(self, batch: int) -> list[str]:
        """Draw held-out prompts with the base and with the present weights, from the same noises."""
        run, count, settings = self.run, self.taste.checks, self.run.config.eval
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
            with policy.weights.swap(run.optimization.evaluated_weights()):
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
        return asked + [Question(drawn.batch, place, text, self._files(drawn.batch, "q", place, shown))
                        for place, text in enumerate(drawn.prompts)]

    def on_trained(self, epoch: Epoch) -> Metrics:
        """Return the number of votes that taught the head, and the share of the last batch that it foretold."""
        self.voter.tell(updates=self.run.optimization.update)
        return self.metrics

    def on_measured(self, measured: Measured) -> Metrics:
        """Show the looks of held-out images, as shares of the base's."""
        self.voter.tell(looks=measured.looks.of(self.run.progress.base))
        return {}

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Return the batches that wait for their votes; their images and features are files of the run's folder."""
        return {}, {"drawn": [asdict(drawn) for drawn in self.queue]}

    def load_state(self, tensors: Tensors, values: dict[str, Any]) -> None:
        """Restore the batches of a checkpoint; the next draw asks for their votes."""
        waiting = values.get("drawn", ())
        if any("parts" in entry for entry in waiting):
            raise UserError(f"--resume: the session in {self.folder} is of an earlier version, which learned from the "
                            f"voted samples themselves: begin a new one, or train on its {VOTES}")
        self.queue = [*takewhile(self._is_whole, (Drawn(**entry) for entry in waiting))]
        self.unasked = [*self.queue]

    def _is_whole(self, drawn: Drawn) -> bool:
        """Return True if all images of a batch are there: a power cut can lose those of the last seconds."""
        files = [file for question in self._questions(drawn) for file in question.files]
        return all(file.is_file() and file.stat().st_size for file in files)


def _write(file: Path, image: Tensor) -> None:
    """Write an image [3, H, W] as a PNG, without waiting for the disk: a resumed run draws a lost one again."""
    file.parent.mkdir(parents=True, exist_ok=True)
    as_image(image).save(file, format="PNG", compress_level=1)


Taste.brings = VotedEpochs

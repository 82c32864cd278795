"""Training loop between the clicks: `Taste`, a reward that brings its own draws and waits for the votes.

Batch b of questions is a few epochs long. The first of them waits for the votes on the batch and fits the head to all
votes so far. Each of them draws fresh samples by the present weights, the head scores these, and the weights learn from
the scores. Until there is evidence of a taste all samples have the same reward. Batch b + 1 is drawn before batch b is
learned, so that the user votes on it meanwhile. What the run trains depends on the votes alone, never on their times.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowgrpo.contrib.learned_rewards.denoiser_head import EVIDENCE, states, without_prompts
from flowgrpo.contrib.taste.head import CHANCE, Belief, Head, Seen, observe
from flowgrpo.contrib.taste.votes import Question, Vote, VoteLog
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation.measured import Measured
from flowgrpo.evaluation.pages.clips import as_image
from flowgrpo.files import metadata_of
from flowgrpo.methods import capabilities
from flowgrpo.methods.setup import Setup
from flowgrpo.rewards.about import About
from flowgrpo.rewards.find import find
from flowgrpo.rewards.score import score
from flowgrpo.rollouts.base import Encoded
from flowgrpo.samplers.rollout import Part, seeder
from flowgrpo.storage import atomic
from flowgrpo.storage.checkpoint import Tensors
from flowgrpo.training import sampling
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics, Run
from flowgrpo.types import unwrap

SHOWN = 4  # images of a question
ROUNDS = 8  # epochs of fresh samples for each batch of votes
CHECKS = 12  # blind pairs before each batch: eight batches tell .60 from .50
CHECK_SEED = 40_000  # of the noises of checks, apart from those of training and evaluation
IMAGES, FEATURES, VOTES = "pictures", "features", "votes.jsonl"  # in the run's folder


class Voter(Protocol):
    """Source of votes: `vote.live.LiveBallot`."""

    log: VoteLog

    def ask(self, questions: Sequence[Question]) -> None: ...

    def wait(self, batch: int, check: Callable[[], None]) -> dict[int, Vote] | None:
        """The votes on a batch once all of it has one, by places; None if the session ends before."""

    def tell(self, **facts: Any) -> None: ...

    @property
    def seconds_left(self) -> float | None: ...


class Taste:
    """Reward of the user's votes. The trainer does not call it for the samples it trains on: its extension draws them.

    folder: of the run. checks: blind pairs before each batch. rounds: epochs of a batch. evidence: capital of the
    head's gambler from where the weights learn from its scores. sees: name of a reward whose score is a feature too.
    Outside of training no sample has a score.
    """

    about = About(modality="image", range=(None, None), needs="", licence="Apache-2.0")
    brings: ClassVar[Any]  # VotedEpochs, which is defined below

    def __init__(self, voter: Voter, folder: Path, checks: int = CHECKS, rounds: int = ROUNDS,
                 evidence: float = 1 / CHANCE, sees: str | None = None):
        self.voter, self.folder, self.checks, self.rounds, self.evidence = voter, folder, checks, rounds, evidence
        self.sees = {} if sees is None else {sees: find(sees)}

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[None]:
        return [None] * len(prompts)


@dataclass(frozen=True)
class Drawn:
    """Batch of questions that is drawn and waits for its votes: the prompts of its questions, and of its checks."""

    batch: int
    prompts: list[str]
    checks: list[str]


def head_rewards(head: Head, features: Tensor) -> Tensor:
    """The rewards [P, G] of features [P, G, F], float32: the head's scores less their group's mean, in deviations of
    the batch."""
    scores = head(features.flatten(0, 1)).view(features.shape[:2])
    scores = scores - scores.mean(1, keepdim=True)
    spread = scores.square().mean().sqrt()
    return (scores / spread if spread > 0 else scores).float()


def features_file(folder: Path, batch: int) -> Path:
    return folder / FEATURES / f"{batch:05d}.safetensors"


def read_features(folder: Path, batch: int) -> Tensor:
    """The features [questions, images, F] of a batch; raises UserError for those of an earlier version."""
    found = load_file(features_file(folder, batch))
    if "features" not in found:
        raise UserError(f"--resume: the session in {folder} is of an earlier version, whose features are others: begin "
                        f"a new one, or train on its {VOTES}")
    return found["features"]


def read_observations(folder: Path, log: VoteLog, batch: int) -> list[Seen]:
    """Observations from the votes on a batch."""
    if not (votes := log.in_batch(batch)):
        return []
    features = read_features(folder, batch)
    return [each for place, vote in sorted(votes.items()) if (each := observe(features[place], vote)) is not None]


def seen_by(folder: Path) -> str:
    """The reward whose score is a feature of a session, an empty text if there is none."""
    return metadata_of(features_file(folder, 0)).get("sees", "")


def read_belief(folder: Path, log: VoteLog, batches: int) -> Belief:
    """The belief after the votes on the first batches, one batch after the other."""
    first = read_features(folder, 0)
    evidence = EVIDENCE + bool(seen_by(folder))
    belief = Belief(first, [first.shape[-1] - evidence, evidence])
    for batch in range(batches):
        belief.learn(read_observations(folder, log, batch))
    return belief


class VotedEpochs(Extension):
    """Epochs whose samples a head scores, which learns from votes. queue: the batches that are drawn and not learned
    yet."""

    name = "taste"
    asked_by = "the samples are voted on"
    needs = frozenset({capabilities.ONE_DRAW, capabilities.AS_LEARNED, capabilities.OWN_SAMPLES,
                       capabilities.ENCODED_ONCE})

    def __init__(self, trainer: Run, taste: Taste):
        super().__init__(trainer)
        self.run, self.taste, self.voter, self.folder = trainer, taste, taste.voter, taste.folder
        self.queue: list[Drawn] = []
        self.asked = True  # unless the queue is a checkpoint's
        self.belief: Belief | None = None
        self.metrics: Metrics = {}
        self.seconds_left = lambda: self.voter.seconds_left

    @classmethod
    def conflicts(cls, setup: Setup) -> dict[str, bool]:
        return {f"{setup.all_processes} processes, of which one user would have to see all": setup.all_processes > 1,
                f"a method that trains {setup.method.target.trains}, which blurs models of few steps":
                not setup.method.target.scores_sampling}

    # --- one epoch ---------------------------------------------------------------------------------------------------

    def draw_epoch(self) -> Epoch:
        """Draw samples and score them by the head; in the first round of a batch after its votes have come. Raises
        Stopped if the session ends before they have."""
        run = self.run
        batch, turn = divmod(run.epoch, self.taste.rounds)
        for drawn in () if self.asked else self.queue:
            self.voter.ask(self._questions(drawn))
        self.asked = True
        if self.belief is None and features_file(self.folder, 0).is_file():
            was, now = seen_by(self.folder), "".join(self.taste.sees)
            if was != now:
                raise UserError(f"--resume: the head of {self.folder} {f'sees {was}' if was else 'sees no reward'}: "
                                f"give {f'--sees {was}' if was else 'no --sees'}")
        if self.belief is None and run.epoch:  # of a resumed run
            self.belief = read_belief(self.folder, self.voter.log, batch + bool(turn))
        if turn == 0:
            self._learn(batch)
        return run.with_oom_retry(self._sample_epoch)

    @property
    def convinced(self) -> bool:
        return self.belief is not None and self.belief.evidence >= self.taste.evidence

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
        self.belief = self.belief or read_belief(self.folder, self.voter.log, 0)
        right, decided = self.belief.learn(read_observations(self.folder, self.voter.log, batch))
        evidence, needed = self.belief.evidence, self.taste.evidence
        if not self.convinced:
            run.log(f"epoch {run.epoch + 1}: the evidence of a taste is {evidence:.2g} of {needed:g}, so that this "
                    "batch teaches the weights nothing")
        self.queue = self.queue[1:]
        self.metrics = {"taste/votes": self.belief.votes, "taste/evidence": evidence,
                        "taste/foretold": right / decided if decided else float("nan")}
        self.voter.tell(updates=run.optimization.update, evidence=evidence, needed=needed,
                        **{"foretold": {"right": right, "of": decided}} if decided else {})

    def _sample_epoch(self) -> Epoch:
        """An epoch of fresh samples, with the head's scores as rewards."""
        run, group = self.run, self.run.config.train.group
        prompts = sampling.choose_prompts(run, run.epoch)
        if not self.convinced:  # an epoch that teaches nothing: as small as one can be
            prompts = prompts[:1]
        drawn = [*self._sample_parts(prompts, run.epoch)]
        with run.clock("reward"):
            features = torch.cat([of for _, _, of, _ in drawn]).unflatten(0, (-1, group))
            scores = (head_rewards(unwrap(self.belief).head(), features) if self.convinced else
                      torch.zeros(features.shape[:2]))[..., None]
        batch = sampling.empty_batch(run, run.epoch)
        batch.add(prompts, scores, run.scoring.sum_rewards(scores))
        run.scoring.end_epoch()
        run.progress.sampled += scores.numel()
        return Epoch(batch, prompts, [part for _, part, _, _ in drawn], drawn[0][0])

    def _sample_parts(self, prompts: list[Prompt], epoch: int, turn: int = 0
                      ) -> Iterator[tuple[Encoded, Part, Tensor, Tensor | None]]:
        """Yield parts with their conditioning, features [rows, F] and images; turn 0 has these where they are read."""
        run, scoring, policy = self.run, self.run.scoring, cast(Any, self.run.policy)
        scoring.start_epoch(epoch, run.config.train.epochs, run.memory)
        scoring.start_turn()
        run.geometry.start_turn()
        run.rollouts.old_policy.updates = run.optimization.update
        reads = turn > 0 or self.convinced
        run.rollouts.decodes = turn > 0 or reads and len(self.taste.sees) > 0
        encoded = cast(Any, run.rollouts.conditioning(prompts, epoch))
        empty = cast(Any, run.rollouts.conditioning([replace(prompts[0].unguided, text="")]))
        for part, outputs in sampling.sample_parts(run, scoring, encoded, prompts, epoch, turn):
            latents, rows = part.finals[0], encoded.rows(part.prompts)
            features = torch.zeros(len(latents), 0)
            if reads:
                with run.clock("features"), policy.reference():
                    features = states(policy, latents, rows, without_prompts(rows, empty))
                    if self.taste.sees:
                        of = [prompts[at] for at in part.prompts.tolist()]
                        seen = score(self.taste.sees, cast(Any, outputs[0]), [prompt.text for prompt in of],
                                     [prompt.metadata for prompt in of])
                        features = torch.cat([features, seen.nan_to_num()], 1)
            yield encoded, part, features, None if outputs[0] is None else cast(Tensor, outputs[0]).cpu()

    # --- questions ---------------------------------------------------------------------------------------------------

    def _sample_batch(self, batch: int) -> Drawn:
        """Draw the images of a batch of questions, and the features of those that are shown."""
        run, group, features, place = self.run, self.run.config.train.group, [], 0
        epoch = batch * self.taste.rounds
        prompts = sampling.choose_prompts(run, epoch)
        for _, _, of, outputs in self._sample_parts(prompts, epoch, turn=1):
            features.append(of.unflatten(0, (-1, group))[:, :SHOWN])
            for images in unwrap(outputs).split(group):
                self._write(self._files(batch, "q", place, min(SHOWN, group)), images)
                place += 1
        atomic.make_folder(self.folder / FEATURES)
        with atomic.replacing(features_file(self.folder, batch)) as file:
            save_file({"features": torch.cat(features).contiguous()}, file, {"sees": "".join(self.taste.sees)})
        checks = self._sample_checks(batch) if run.optimization.update and self.convinced else []
        return Drawn(batch, [prompt.text for prompt in prompts], checks)

    def _sample_checks(self, batch: int) -> list[str]:
        """Draw held-out prompts with the base and with the present weights, from other noises."""
        run, count, settings = self.run, self.taste.checks, self.run.config.eval
        held, policy = run.held_out, cast(Any, run.policy)
        prompts = [held[(batch * count + place) % len(held)] for place in range(count)]
        if not prompts:
            return []
        # Other noises on each side: equal ones would show which image is whose.
        seeds = [[seeder(CHECK_SEED, batch)(place, side) for place in range(count)] for side in (0, 1)]
        encoded = cast(Any, run.rollouts.conditioning(prompts))
        before = policy.evaluations

        def images(side: int) -> Tensor:
            rows = torch.arange(count).split(run.geometry.micro_batch)
            return torch.cat([policy.generate(encoded.rows(at), policy.generators([seeds[side][row] for row in at]),
                                              settings.steps, settings.guidance) for at in rows])

        with run.clock("checks"):
            with policy.weights.swap(run.optimization.evaluated_weights()):
                now = images(1)
            with policy.reference():
                base = images(0)
        policy.evaluations = before
        for place in range(count):
            self._write(self._files(batch, "c", place, 2), (base[place], now[place]))
        return [prompt.text for prompt in prompts]

    def _files(self, batch: int, kind: str, place: int, count: int) -> tuple[Path, ...]:
        return tuple(self.folder / IMAGES / f"{batch:04d}-{kind}{place:02d}-{shown}.png" for shown in range(count))

    def _write(self, files: Iterable[Path], images: Iterable[Tensor]) -> None:
        """Write images [3, H, W] as PNGs, without waiting for the disk: a resumed run draws a lost one again."""
        (self.folder / IMAGES).mkdir(parents=True, exist_ok=True)
        for file, image in zip(files, images):
            as_image(image).save(file, format="PNG", compress_level=1)

    def _questions(self, drawn: Drawn) -> list[Question]:
        shown = min(SHOWN, self.run.config.train.group)
        asked = [Question(drawn.batch, place, text, self._files(drawn.batch, "c", place, 2), check=True)
                 for place, text in enumerate(drawn.checks)]
        return asked + [Question(drawn.batch, place, text, self._files(drawn.batch, "q", place, shown))
                        for place, text in enumerate(drawn.prompts)]

    def on_trained(self, epoch: Epoch) -> Metrics:
        self.voter.tell(updates=self.run.optimization.update)
        return self.metrics

    def on_measured(self, measured: Measured) -> Metrics:
        self.voter.tell(looks=measured.looks.relative_to(self.run.progress.base))
        return {}

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """The batches that wait for their votes; their images and features are files of the run's folder."""
        return {}, {"drawn": [asdict(drawn) for drawn in self.queue]}

    def load_state(self, tensors: Tensors, values: dict[str, Any]) -> None:
        """Restore the batches of a checkpoint; the next draw asks for their votes."""
        waiting = values.get("drawn", ())
        if any("parts" in entry for entry in waiting):
            raise UserError(f"--resume: the session in {self.folder} is of an earlier version, which learned from the "
                            f"voted samples themselves: begin a new one, or train on its {VOTES}")
        # Of a batch all images have to be there: a power cut can lose those of the last seconds.
        self.queue = [*takewhile(lambda drawn: all(file.is_file() and file.stat().st_size
                                                   for question in self._questions(drawn) for file in question.files),
                                 (Drawn(**entry) for entry in waiting))]
        self.asked = False


Taste.brings = VotedEpochs

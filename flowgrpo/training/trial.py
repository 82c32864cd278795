"""A trial of a run's rewards right after its model is loaded, so that a mistake in one costs seconds.

Every reward judges a few samples in the form that it will see: pictures that the pipeline decodes from noise without a
call of its denoiser, or completions of a few tokens. Nothing of a trial stays: no kept score, no count, no metric, and
the random numbers are put back. A reward that counts its own calls sees one more.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flowgrpo import rewards
from flowgrpo.config.reward_rules import Retry
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation.measured import measure, spread
from flowgrpo.rewards import Composed
from flowgrpo.rewards.gradient import require_graph
from flowgrpo.rewards.pairwise import pairing, sees_groups
from flowgrpo.rewards.remote import exchange
from flowgrpo.rewards.text.soft_texts import SoftTexts
from flowgrpo.storage import paths
from flowgrpo.training import state

SAMPLES = 2  # of a batch: one alone would not show a reward that always returns one number
TOKENS = 8  # of a completion, at most
PATIENCE = 10.0  # seconds after which a reward that has not answered is named
REAL = 8  # prompts, at most, for which real samples are drawn where no trial sample has a score


@dataclass(frozen=True, eq=False)
class Batch:
    """What one reward is tried on: outputs, as of `rewards.score`, of these prompts, in groups of the given size."""

    name: str
    reward: Composed
    prompts: list[Prompt]
    outputs: Any
    group: int

    @property
    def texts(self) -> list[str]:
        return [prompt.text for prompt in self.prompts]

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """A copy, which a reward may change."""
        return copy.deepcopy([prompt.metadata for prompt in self.prompts])


def require(trainer: Any, measured: dict[str, Any]) -> None:
    """Try the rewards of a run, those that are trained on with training prompts and the other `measured` ones with
    held-out prompts; look at its prompts and at the room on its disk. UserError for the first mistake.

    Every process draws the samples, since with shared weights all have to; the first one judges them.
    """
    trained = trainer.scoring.functions
    watched = {name: reward for name, reward in measured.items() if name not in trained}
    held = spread(trainer.held_out, trainer.config.eval.prompts)
    with trainer.processes.together(), _unseen(trainer.policy):
        if trainer.policy.modality == "text":
            plain = [prompt.text for prompt in [*trainer.prompts, *held] if prompt.image is None]
            trainer.policy.require_context(plain)
        samples = Samples(trainer)
        own = _batches(trained, trainer.prompts, trainer.geometry.group, samples)
        further = _batches(watched, held, 1, samples)
        if trainer.processes.first:
            paths.require_room(trainer.config.folder, state.room(trainer), "the run's checkpoints")
            with exchange.brief():
                scored = [judged(batch) for batch in own]
                for batch in further:
                    judged(batch)
                for batch in own if trainer.method.backprop else ():
                    require_graph(batch.name, batch.reward, samples.in_graph(batch), batch.texts, batch.metadata)
            if own and not any(scored) and not any(_grouped_or_slow(batch.reward) for batch in own):
                _require_real_scores(trainer)


def judged(batch: Batch) -> bool:
    """Have a reward judge its batch. Returns whether a sample has a score, or failed where its rule allows that.

    UserError as of `rewards.score`; a reward that is slow to answer, or fails under `on_error: skip`, is named.
    """
    name, count, tally = batch.name, len(batch.prompts), rewards.Tally()
    outputs = batch.outputs if isinstance(batch.outputs, list) else batch.outputs.clone()
    notice = threading.Timer(PATIENCE, print, [f"reward {name!r} has judged {count} samples for {PATIENCE:g} s: if it "
                                               "hangs, set its timeout"])
    notice.daemon = True
    notice.start()
    try:
        found = rewards.score({name: tried(batch.reward)}, outputs, batch.texts, batch.metadata, batch.group, tally,
                              outputs.clone() if rewards.sees_base(batch.reward) else None)
    finally:
        notice.cancel()
    if said := tally.said.get(name):
        print(f"reward {name!r} failed on a trial sample, which a run leaves out and counts: {said}")
    return bool(said) or not bool(found.isnan().all())


def tried(reward: Composed) -> Composed:
    """A reward that keeps no score, and is asked once again at most, at once."""
    policy = reward.rule.on_error
    if isinstance(policy, Retry):
        policy = policy.model_copy(update={"retry": 1, "wait": 0.0})
    return Composed(reward.function, reward.rule.model_copy(update={"on_error": policy}))


def slow(reward: Any) -> bool:
    """Whether a server answers for a reward, or for one that it is made of: every question may take long, or cost."""
    needs = (rewards.about(reward).needs or "").split(",")
    return "server" in map(str.strip, needs) or any(map(slow, getattr(reward, "made_of", ())))


def _grouped_or_slow(reward: Composed) -> bool:
    return sees_groups(reward.function) or slow(reward.function)


def _batches(functions: dict[str, Any], prompts: list[Prompt], group: int, samples: Samples) -> list[Batch]:
    """What each reward is tried on; a reward that applies to none of the prompts is left out."""
    found = []
    for name, reward in functions.items():
        reward = reward if isinstance(reward, Composed) else Composed(reward)
        few, grouped = slow(reward.function), sees_groups(reward.function)
        # A judge of pairs does not see how many there are: of one that may cost, a pair is asked for.
        size = 2 if few and pairing(reward.function) else group if grouped else 1
        own = list(itertools.islice((prompt for prompt in prompts if reward.rule.applies(prompt.metadata)),
                                    1 if few or grouped else SAMPLES))
        if own:
            rows = own * size if grouped else own if few else (own * SAMPLES)[:SAMPLES]
            found.append(Batch(name, reward, rows, samples(rows), size))
    return found


class Samples:
    """Draws what rewards are tried on, once for the same prompts."""

    def __init__(self, trainer: Any):
        self.trainer, self.policy = trainer, trainer.policy
        self._known: dict[tuple[str, ...], Any] = {}

    def __call__(self, rows: list[Prompt]) -> Any:
        """Outputs of these prompts, one each: two are drawn, and of pictures those behind them are blends of these."""
        key = tuple(prompt.key for prompt in rows)
        if key not in self._known:
            self._known[key] = self._drawn(rows)
        return self._known[key]

    @torch.no_grad()
    def _drawn(self, rows: list[Prompt]) -> Any:
        some, config = rows[:SAMPLES], self.trainer.config
        asked = self.trainer.explorer.encode(
            [prompt.text for prompt in some],
            [config.negative_prompt if prompt.negative is None else prompt.negative for prompt in some],
            [prompt.image for prompt in some])
        if getattr(asked, "mixed", False):  # pictures of several sizes fit in no batch
            asked = asked.rows(torch.zeros(len(some), dtype=torch.int64))
        generators = self.policy.generators(range(len(some)))
        if self.policy.modality == "text":
            with _short(self.policy):
                drawn = self.policy.sample(asked, self.trainer.method.kernel, generators,
                                           torch.zeros(len(some), dtype=torch.bool)).texts
            return [drawn[i % len(drawn)] for i in range(len(rows))]
        drawn = self.policy.of_noise(asked, generators)
        if len(rows) == len(some):
            return drawn
        share = torch.linspace(0, 1, len(rows)).view(-1, *[1] * (drawn.ndim - 1))
        return torch.lerp(drawn[:1], drawn[1:], share)

    def in_graph(self, batch: Batch) -> Any:
        """The outputs as a reward sees them whose gradient is followed: of texts their prompts' own tokens."""
        if self.policy.modality != "text":
            return batch.outputs.to(self.policy.device).clone().requires_grad_()
        tokens = self.trainer.explorer.tokens
        [ids] = self.policy.encode([batch.prompts[0].text]).ids
        weights = torch.nn.functional.one_hot(ids, len(tokens)).float().to(self.policy.device)
        return SoftTexts(weights.repeat(len(batch.prompts), 1, 1).requires_grad_(), tokens)


@contextlib.contextmanager
def _short(policy: Any) -> Iterator[None]:
    """Context manager: sample completions of a few tokens."""
    text = policy.text
    policy.text = text.model_copy(update={"max_tokens": min(text.max_tokens, TOKENS)})
    try:
        yield
    finally:
        policy.text = text


@contextlib.contextmanager
def _unseen(policy: Any) -> Iterator[None]:
    """Context manager: count no evaluation, and restore the state of all random numbers at the end."""
    evaluations, python, numbers = policy.evaluations, random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([policy.device] if policy.device.type == "cuda" else []):
            yield
    finally:
        policy.evaluations = evaluations
        random.setstate(python)
        np.random.set_state(numbers)


def _require_real_scores(trainer: Any) -> None:
    """UserError where no reward that is trained on has a score for real samples either, of prompts evenly over all: as
    the first epoch would tell. Several processes, which would all have to draw, leave it to that."""
    if trainer.processes.count > 1:
        return
    settings, functions = trainer.config.eval, trainer.scoring.functions
    functions = {name: tried(reward) if isinstance(reward, Composed) else reward for name, reward in functions.items()}
    prompts = spread(trainer.prompts, min(REAL, trainer.config.train.prompts))
    found = measure(
        trainer.policy, prompts, functions, steps=settings.steps, guidance=settings.guidance, samples=1,
        micro_batch=trainer.config.train.micro_batch, negative=trainer.config.negative_prompt, title="trial",
        encode=trainer.explorer.encode)
    scored = any(score == score for scores in found.scores.values() for score in scores)
    if not scored and not any(found.failed.values()):
        raise UserError(f"no sample of {len(prompts)} prompts had a score from {' or '.join(map(repr, functions))}: "
                        "expected prompts to which it applies, with the metadata that it asks for, got such as "
                        f"{prompts[0].text[:60]!r}")

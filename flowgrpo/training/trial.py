"""Trial of a run's rewards right after its model is loaded, so a mistake in one costs seconds.

Every reward scores a few samples in their final form: images decoded from noise without a call of the denoiser, or
completions of a few tokens. A trial leaves no trace: no stored score, no count, no metric, and the random state is
restored. A reward that counts its own calls sees one more.
"""

import contextlib
import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from flowgrpo import device, rewards
from flowgrpo.data.images import image_size
from flowgrpo.data.prompts import Prompt, encodable
from flowgrpo.distributed.signals import promptly
from flowgrpo.errors import UserError
from flowgrpo.evaluation.measured import measure, spread
from flowgrpo.nouns import quantity
from flowgrpo.policies.weights.forwards import replaced
from flowgrpo.rewards import Composed
from flowgrpo.rewards.gradient import require_graph
from flowgrpo.rewards.pairwise import pairing, sees_groups
from flowgrpo.rewards.remote import exchange
from flowgrpo.rollouts.base import Outputs
from flowgrpo.storage import paths
from flowgrpo.training import state
from flowgrpo.training.extension import Run
from flowgrpo.training.scoring import RewardFunctions

SAMPLES = 2  # per batch: one alone would not reveal a reward that always returns one number
TOKENS = 8  # of a completion, at most
PATIENCE = 10.0  # seconds after which a slow reward is reported
REAL = 8  # prompts, at most, for which real samples are drawn where no trial sample has a score


@dataclass(frozen=True, eq=False)
class Batch:
    """Input of one reward's trial: outputs and latents as of `rewards.score`, of `prompts` in groups of size `group`.
    policy: the model that is trained."""

    name: str
    reward: Composed
    prompts: list[Prompt]
    outputs: Outputs
    group: int
    latents: torch.Tensor | None = None
    policy: Any = None

    @property
    def texts(self) -> list[str]:
        return [prompt.text for prompt in self.prompts]

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """A copy, which a reward may change."""
        return copy.deepcopy([prompt.metadata for prompt in self.prompts])


def require(trainer: Run, measured: RewardFunctions) -> None:
    """Try the rewards of a run: the trained ones on training prompts, the other `measured` ones on held-out prompts.
    Check its prompts and the free space on its disk.
    Every process draws the samples, as sharded weights require; the first one scores them.
    Raises UserError for the first mistake."""
    trained = trainer.scoring.functions
    eval_only = {name: reward for name, reward in measured.items() if name not in trained}
    held = spread(trainer.held_out, trainer.config.eval.prompts)
    evaluations = trainer.policy.evaluations
    with trainer.processes.collective(), device.random_state_kept(trainer.policy.device):
        # Prompts come first: what does not fit into the context fails without a sample.
        if trainer.policy.unit == "tokens":
            plain = [prompt.text for prompt in [*trainer.prompts, *held] if prompt.brings is None]
            cast(Any, trainer.policy).require_context(plain)
        trainer.rollouts.require(trainer.prompts)
        _require_extremes(trainer, [*trainer.prompts, *held])
        samples = Samples(trainer)
        batches = _batches(trained, trainer.prompts, trainer.geometry.group, samples)
        further = _batches(eval_only, held, 1, samples)
        if trainer.processes.first:
            # One process scores: a server that the rewards ask sees each trial once.
            paths.require_room(trainer.config.folder, state.room(trainer), "the run's checkpoints")
            with exchange.brief():
                scored = [score_trial(batch) for batch in batches]
                for batch in further:
                    score_trial(batch)
                # A reward may refuse a size: try all of them, but a slow one only once.
                for batch, size in itertools.product(batches, trainer.config.image.sizes):
                    if not rewards.slow(batch.reward.function):
                        score_trial(replace(batch, outputs=samples(batch.prompts, size)))
                for batch in batches if trainer.method.target.follows_reward else ():
                    # Outputs in a graph: images as they are, of texts their prompts' own tokens.
                    outputs: Any = samples.rollouts.repeat_prompt(batch.prompts[0], len(batch.prompts)) if isinstance(
                        batch.outputs, list) else batch.outputs.to(samples.policy.device).clone().requires_grad_()
                    require_graph(batch.name, batch.reward, outputs, batch.texts, batch.metadata)
            rewards.leave(measured.values())
            rewards.leave(trained.values())
            # A reward of groups, a slow one, and one whose extension brings its scores may have none in a trial.
            may_skip = any(sees_groups(batch.reward.function) or rewards.slow(batch.reward.function)
                           or any(getattr(part.origin, "brings", None) is not None
                                  for part in rewards.inside(batch.reward)) for batch in batches)
            if batches and not any(scored) and not may_skip:
                _require_real_scores(trainer)
    trainer.policy.evaluations = evaluations


def _require_extremes(trainer: Run, prompts: list[Prompt]) -> None:
    """Encode the prompts with the smallest, largest, widest and tallest images, which a pipeline may refuse.
    They stay encoded for the run. Raises UserError that names the prompt."""
    if trainer.policy.unit == "tokens" or trainer.processes.count * trainer.processes.members > 1:
        return
    sizes = {}
    for prompt in prompts:
        for key, path in prompt.inputs.paths():
            if key != "video":
                with contextlib.suppress(UserError):  # `sampling.readable` tells
                    sizes[image_size(path)] = prompt
    if len(sizes) < 2:
        return
    orders: list[Callable[[tuple[int, int]], float]] = [
        lambda size: size[0] * size[1], lambda size: -size[0] * size[1], lambda size: size[0] / size[1],
        lambda size: size[1] / size[0], lambda size: min(size)]
    for prompt in {id(found): found for found in (sizes[min(sizes, key=order)] for order in orders)}.values():
        cast(Any, trainer.rollouts).encode(*encodable([prompt], trainer.config.negative_prompt))


def score_trial(batch: Batch) -> bool:
    """Score a batch; return True if a sample has a score, or failed where its rule allows that.
    A reward that is slow to answer, or fails under `on_error: skip`, is reported.
    Raises UserError as `rewards.score`."""
    name, count, tally = batch.name, len(batch.prompts), rewards.Tally()
    outputs = batch.outputs if isinstance(batch.outputs, list) else batch.outputs.clone()
    with _notices(name, count):
        base = outputs.clone() if rewards.sees_base(batch.reward) else None
        scores = promptly(lambda: rewards.score(
            {name: rewards.for_trial(batch.reward)}, outputs, batch.texts, batch.metadata, batch.group, tally, base,
            batch.latents, batch.policy, fps=getattr(batch.policy, "fps", None)))
    if said := tally.said.get(name):
        print(f"reward {name!r} failed on a trial sample, which a run leaves out and counts: {said}")
    return bool(said) or not bool(scores.isnan().all())


@contextlib.contextmanager
def _notices(name: str, count: int) -> Iterator[None]:
    """Context manager: print how long a reward has judged, after PATIENCE and each time that the wait has doubled."""
    ended = threading.Event()

    def notify() -> None:
        step = waited = PATIENCE
        while not ended.wait(step):
            print(f"reward {name!r} has judged {quantity(count, 'sample')} for {waited:g} s: if it hangs, set its "
                  f"timeout, such as --reward='{{\"{name}\": {{timeout: 60}}}}'", flush=True)
            step, waited = waited, 2 * waited

    threading.Thread(target=notify, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _batches(functions: RewardFunctions, prompts: list[Prompt], group: int, samples: "Samples") -> list[Batch]:
    """The batch of each reward; a reward that applies to none of the prompts is left out."""
    batches = []
    for name, reward in functions.items():
        reward = reward if isinstance(reward, Composed) else Composed(reward)
        few, grouped = rewards.slow(reward.function), sees_groups(reward.function)
        # A judge of pairs does not see their number: from a possibly paid one, request a single pair.
        size = 2 if few and pairing(reward.function) else group if grouped else 1
        applicable = list(itertools.islice((prompt for prompt in prompts if reward.rule.applies(prompt.metadata)),
                                           1 if few or grouped else SAMPLES))
        if applicable:
            rows = applicable * size if grouped else applicable if few else (applicable * SAMPLES)[:SAMPLES]
            latents = samples.latents(rows) if rewards.scores_latents(reward) else None
            batches.append(Batch(name, reward, rows, samples(rows), size, latents, samples.policy))
    return batches


class Samples:
    """Samples for the trials, drawn once for the same prompts."""

    def __init__(self, trainer: Run):
        self.trainer, self.rollouts = trainer, cast(Any, trainer.rollouts)
        self.policy: Any = trainer.policy
        self._known: dict[tuple[tuple[int, int] | None, tuple[str, ...]], Outputs] = {}

    def __call__(self, rows: list[Prompt], size: tuple[int, int] | None = None) -> Outputs:
        """Outputs of these prompts, one each: two are drawn; further images are blends of these.
        size: height and width of images; None: those of evaluations."""
        key = size, tuple(prompt.key for prompt in rows)
        if key not in self._known:
            self._known[key] = self._sample(rows, size)
        return self._known[key]

    def latents(self, rows: list[Prompt]) -> torch.Tensor:
        """The latents of these prompts' outputs, one each."""
        return cast(torch.Tensor, self._sample(rows, None, "latent"))

    @torch.no_grad()
    def _sample(self, rows: list[Prompt], size: tuple[int, int] | None, output_type: str = "pt") -> Outputs:
        some = rows[:SAMPLES]
        conditioning = self.rollouts.encode(*encodable(some, self.trainer.config.negative_prompt))
        if getattr(conditioning, "mixed", False):  # images of several sizes do not fit in one batch
            conditioning = conditioning.rows(torch.zeros(len(some), dtype=torch.int64))
        if size is not None:
            conditioning = replace(conditioning, sizes=[size] * len(some))
        generators = self.policy.generators(range(len(some)))
        if self.policy.modality == "text":
            text = self.policy.text
            with replaced("text", (self.policy, text.model_copy(update={"max_tokens": min(text.max_tokens, TOKENS)}))):
                drawn = self.policy.sample(conditioning, self.trainer.method.rollout.decoding, generators,
                                           torch.zeros(len(some), dtype=torch.bool)).texts
            return [drawn[i % len(drawn)] for i in range(len(rows))]
        drawn = self.policy.of_noise(conditioning, generators, output_type)
        if len(rows) == len(some):
            return drawn
        share = torch.linspace(0, 1, len(rows)).view(-1, *[1] * (drawn.ndim - 1))
        return torch.lerp(drawn[:1], drawn[1:], share)


def _require_real_scores(trainer: Run) -> None:
    """Raise UserError if no trained reward has a score for real samples either, of prompts spread evenly over all. With
    several processes, which would all have to draw, it is left to the first epoch, which reports the same."""
    if trainer.processes.count * trainer.processes.members > 1:
        return
    settings, functions = trainer.config.eval, trainer.scoring.functions
    functions = {name: rewards.for_trial(reward) if isinstance(reward, Composed) else reward
                 for name, reward in functions.items()}
    prompts = spread(trainer.prompts, min(REAL, trainer.config.train.prompts))
    result = measure(
        trainer.policy, prompts, functions, steps=settings.steps, guidance=settings.guidance,
        samples=1, micro_batch=trainer.geometry.micro_batch, negative=trainer.config.negative_prompt, title="trial",
        encode=cast(Any, trainer.rollouts).encode)
    scored = any(score == score for scores in result.scores.values() for score in scores)
    if not scored and not any(result.failed.values()):
        raise UserError(f"no sample of {quantity(len(prompts), 'prompt')} had a score from "
                        f"{' or '.join(map(repr, functions))}: expected prompts to which it applies, with the metadata "
                        f"that it reads, got such as {prompts[0].text[:60]!r}")

"""Phases of a run: changes from an epoch on, listed under `phases` of a recipe, and prompts carried over to a phase."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from flowgrpo import domains, rewards
from flowgrpo.config.geometry import geometry
from flowgrpo.config.parse import new_name, validate
from flowgrpo.config.schema import Config
from flowgrpo.contrib.features import Phase, PhaseKeys
from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.curriculum.history import RATES, record
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import require_generators
from flowgrpo.errors import UserError, nearest
from flowgrpo.methods import capabilities, keys_read
from flowgrpo.methods.setup import Setup
from flowgrpo.methods.validate import check_supervised, resolve
from flowgrpo.policies import build, options
from flowgrpo.policies.pipelines.frames import clips_of
from flowgrpo.policies.weights.forwards import replaced
from flowgrpo.text.policies import engines
from flowgrpo.training.extension import Extension, Run

MEAN = "phase_mean"  # key of the memory: the last epoch's mean total reward
LEAST = 0.05  # of the odds of a prompt that was always solved


@dataclass(frozen=True)
class Carried:
    """Curriculum of a phase: a share of the epoch is drawn from prompts of earlier phases, the others by `inner`.

    The odds of an earlier prompt fall with its newest success rate p, as max(1 - p, 0.05) (difficulty-aware
    retrospective sampling of QwenLong-L1, 2505.17667).

    now: keys of the phase's prompts. records: rates are recorded for later phases.
    """

    inner: Any
    now: frozenset[str]
    share: float = 0.0
    records: bool = False

    @property
    def reads_diversity(self) -> bool:
        return getattr(self.inner, "reads_diversity", False)

    @property
    def reads_norms(self) -> bool:
        return getattr(self.inner, "reads_norms", False)

    def __call__(self, pool: Sequence[Prompt], count: int, epoch: int, seed: int, weights: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[Prompt]:
        present = [place for place, prompt in enumerate(pool) if prompt.key in self.now]
        known = memory.get(RATES, {})
        earlier = [prompt for prompt in pool if prompt.key not in self.now and known.get(prompt.key)]
        number = min(round(self.share * count), len(earlier))
        chosen = []
        if number:
            odds = np.array([max(1 - known[prompt.key][-1], LEAST) for prompt in earlier])
            rng = np.random.default_rng([seed, epoch, 3])
            chosen = rng.choice(len(earlier), number, replace=False, p=odds / odds.sum()).tolist()
        given = weights if weights is None else [weights[place] for place in present]
        return [earlier[place] for place in chosen] + self.inner(
            [pool[place] for place in present], count - number, epoch, seed, given, memory, group)

    def learn(self, memory: dict[str, Any], drawn: EpochBatch) -> None:
        """Pass an epoch on to the inner curriculum; record its mean reward, and rates if a phase reads them."""
        before = {key: list(rates) for key, rates in memory.get(RATES, {}).items()}
        self.inner.learn(memory, drawn)
        if self.records and memory.get(RATES, {}) == before:  # the inner one recorded none
            record(memory, drawn)
        memory[MEAN] = drawn.totals.nanmean().item()


CHANGES = ("train.steps", "train.shift", "train.group", "train.prompts", "train.lr", "image.sizes", "image.frames",
           "text.max_tokens")  # keys that a phase can set; evaluations keep those of the recipe
NUMBER = "phase"  # key of the memory: the present phase's number


def config_of(config: Config, number: int) -> Config:
    """Configuration of a phase; of the time before the first one, -1, the recipe's own. Raises UserError."""
    if number < 0:
        return config
    raw = config.model_dump(mode="json") | {"phases": []}
    for key, value in PhaseKeys.read(config).phases[number].set.items():
        if key not in CHANGES:
            hint = f": it is called {now!r} now" if (now := new_name(key)) else nearest(key, list(CHANGES))
            raise UserError(f"phases[{number}].set: {key!r} cannot change within a run{hint}; "
                            f"expected one of {', '.join(CHANGES)}")
        section, name = key.split(".")
        raw[section] = raw[section] | {name: value}
    return validate(raw, where=f"phases[{number}].set")


def begins(config: Config) -> list[int]:
    """Epoch with which every phase begins, counted from 0."""
    epochs = config.train.epochs
    return [int(phase.at) if phase.at >= 1 else round(phase.at * epochs) for phase in PhaseKeys.read(config).phases]


def matches(prompt: Prompt, when: dict[str, Any]) -> bool:
    """True if the prompt's metadata has these values, or of a list one of them."""
    return all(prompt.metadata.get(key) in (value if isinstance(value, list) else [value])
               for key, value in when.items())


class Phases(Extension):
    """Phases of a run. number: the present one, -1 before the first."""

    lacks = {capabilities.RECORDABLE: "phases, which change what is drawn"}

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        self.config, self.number, self.begins = trainer.config, -1, begins(trainer.config)
        self.phases = PhaseKeys.read(trainer.config).phases

    @classmethod
    def require(cls, setup: Setup) -> None:
        config, process = setup.config, build.process(setup.kind)
        starts = begins(config)
        if starts != sorted(set(starts)):
            raise UserError(f"phases begin after {starts} epochs: expected rising numbers under `at`")
        if engines.uses_engine(config):
            raise UserError("phases are set, but an engine generates the completions, which keeps its length and "
                            "batch: leave text.engine and text.engine_precision out")
        # Each phase passes the checks of a run of its own, before the first one begins.
        for number, phase in enumerate(PhaseKeys.read(config).phases):
            where, changed = f"phases[{number}]", config_of(config, number)
            require_generators(geometry(changed.train, setup.processes).samples, "samples of an epoch of a phase")
            inner = replace(setup, config=changed, method=resolve(changed, process), where=f"{where}.set: ")
            keys_read.check(inner)
            check_supervised(inner)
            if process == "masks" and "text.max_tokens" in phase.set:
                raise UserError(f"{where}.set: text.max_tokens is fixed for a masked language model: leave it out")
            if unknown := sorted(phase.weights.keys() - config.rewards.keys()):
                raise UserError(f"{where}.weights: no reward {unknown[0]!r}{nearest(unknown[0], list(config.rewards))}")
            if not any(matches(prompt, phase.when) for prompt in setup.split[0]):
                raise UserError(f"{where}.when: no training prompt has {phase.when}: expected values of its metadata")
            rewards.require_values(f"{where}.when", phase.when, [prompt.metadata for prompt in setup.split[0]])
            # Settings that would do nothing are mistakes: name why they have no effect.
            first = starts[number] == 0  # the run begins with the phase
            idle = {"reach": first and phase.reach is not None,
                    "carry": bool(phase.carry) and (first or not phase.when)}
            why, cure = ("the run begins with this phase", "") if first else (
                f"{where}.when is empty, so that all prompts are its own", "set when, or ")
            for key in (key for key, applies in idle.items() if applies):
                raise UserError(f"{where}.{key} is {getattr(phase, key)!r}, but {why}: {cure}leave {key} out")
        if not setup.method.for_tokens and setup.method.denoising.learned_noise:
            kernel = type(setup.method.denoising.kernel).__name__
            raise UserError(f"phases are set, but the kernel {kernel} is trained with one grid: leave one of them out")

    @classmethod
    def require_model(cls, setup: Setup) -> None:
        options.require_frames(setup, {f"phases[{number}].set image.frames": phase.set.get("image.frames")
                                       for number, phase in enumerate(PhaseKeys.read(setup.config).phases)})

    def number_at(self, memory: dict[str, Any], epoch: int) -> int:
        """Number of an epoch's phase: the last that has begun, or the next if its reward is reached."""
        number = max([memory.get(NUMBER, -1), *(n for n, begin in enumerate(self.begins) if begin <= epoch)])
        if number + 1 < len(self.begins):
            reach, mean = self.phases[number + 1].reach, memory.get(MEAN)
            number += reach is not None and mean is not None and mean >= reach
        return number

    @contextlib.contextmanager
    def around_epoch(self) -> Iterator[None]:
        """Context manager: the epoch in its phase. Prompts, curriculum, lengths and frames are the recipe's again
        behind it."""
        trainer, policy = self.trainer, cast(Any, self.trainer.policy)
        number = self.number_at(trainer.memory, trainer.epoch)
        phase = self.phases[number] if number >= 0 else Phase(at=0)
        config = config_of(self.config, number)
        # What a phase changes is held here: evaluations between epochs are the recipe's.
        text = replaced("text", (policy, config.text)) if hasattr(policy, "text") else contextlib.nullcontext()
        with text, clips_of(policy, config.image.frames if "image.frames" in phase.set else None):
            if number != self.number:
                self._enter(config, phase)
                self.number = trainer.memory[NUMBER] = number
            # Restrict the run to the phase's prompts, and those that are carried.
            now = frozenset(prompt.key for prompt in trainer.prompts if matches(prompt, phase.when))
            prompts = [prompt for prompt in trainer.prompts if phase.carry or prompt.key in now]
            curriculum = Carried(trainer.method.curriculum, now, phase.carry,
                                 records=any(each.carry for each in self.phases))
            with replaced("prompts", (trainer, prompts)), \
                    replaced("method", (trainer, replace(trainer.method, curriculum=curriculum))):
                yield

    def _enter(self, config: Config, phase: Phase) -> None:
        """Make what depends on the phase's configuration anew; counters and the old policy stay."""
        trainer = self.trainer
        before, lowered = trainer.rollouts, trainer.geometry.micro_batch
        trainer.config = trainer.optimization.config = config
        trainer.geometry = geometry(config.train, trainer.processes.count)
        trainer.geometry.micro_batch = min(trainer.geometry.micro_batch, lowered)
        trainer.rollouts = domains.sampled_by(trainer.policy.process).rollouts(
            config, trainer.policy, trainer.method, trainer.geometry, trainer.processes, trainer.clock,
            first=trainer.prompts[0])
        for name in ("decodes", "rollout_evaluations", "saved_evaluations", "old_policy"):
            setattr(trainer.rollouts, name, getattr(before, name))
        trainer.scoring.group = trainer.geometry.group
        trainer.scoring.given = self.config.rewards | phase.weights
        if self.number >= 0 or phase.set:
            trainer.log(f"phase from epoch {trainer.epoch + 1}: {dict(phase.set) or 'the recipe itself'}")

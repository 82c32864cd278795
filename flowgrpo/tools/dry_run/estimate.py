"""Dry run of an epoch: the run's own trainer on a pretended GPU, and what it counts by phase.

`dry_run` is the whole; `fit.py` finds settings that fit a GPU. An evaluation with another number of frames is run for
one micro-batch, and extrapolated to all.
"""

import json
import logging
import math
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from PIL import Image

from flowgrpo.config import features
from flowgrpo.config.features import DryRun
from flowgrpo.config.geometry import geometry, prompts_per_part
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.data.sets import SETS
from flowgrpo.device import AUTO, DTYPES
from flowgrpo.errors import UserError
from flowgrpo.evaluation import looks
from flowgrpo.gpus import GIB, GPU, GPUS, GROWTH, LOADING, PLAN, gpu_key
from flowgrpo.log import PhaseTimer
from flowgrpo.methods import validate
from flowgrpo.methods.targets import RewardGradient
from flowgrpo.policies.build import PIPELINE, kind, make_policy
from flowgrpo.policies.pipelines.call import at_guidance
from flowgrpo.policies.pipelines.frames import clips_of
from flowgrpo.published import find
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.rollout import seeder
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.tools.dry_run import from_configs, weights
from flowgrpo.tools.dry_run.meta_gpu import META, MetaGPU, Phase
from flowgrpo.tools.dry_run.repeats import Repeats
from flowgrpo.tools.dry_run.weights import reward_bytes
from flowgrpo.train import Trainer

FEW = (1, 2)  # denoising steps that are run: their difference is the cost of a step


def count_evaluation(trainer: Trainer, meta: MetaGPU, processes: int) -> Phase:
    """Phase of one evaluation on one of so many processes: its peak, and the cost of all held-out samples. The stock
    scheduler's own arithmetic is that of a rollout's."""
    settings, rows = trainer.config.eval, trainer.geometry.micro_batch
    drawn = settings.prompts * settings.samples + looks.twins(settings.prompts, settings.samples)
    total = max(1, math.ceil(drawn / processes))
    rows = min(rows, total)
    one, two = (_run(trainer, meta, rows, steps) for steps in FEW)
    times, more = total / rows, settings.steps - FEW[0]

    def extrapolate(first: Any, second: Any) -> Any:
        return times * (first + more * np.maximum(second - first, 0))

    waits = {reason: round(extrapolate(one.waits[reason], two.waits[reason])) for reason in one.waits | two.waits}
    counts = {name: extrapolate(getattr(one, name), getattr(two, name)) for name in ("flops", "seconds", "traffic")}
    return Phase(meta.spare + max(one.allocated, two.allocated), meta.spare + max(one.reserved, two.reserved),
                 kernels=round(extrapolate(one.kernels, two.kernels)), waits=Counter(waits), **counts)


@torch.no_grad()
def _run(trainer: Trainer, meta: MetaGPU, rows: int, steps: int) -> Phase:
    """Counts of sampling and decoding so many rows with so many steps."""
    policy, rollouts, config = cast(Any, trainer.policy), cast(Any, trainer.rollouts), trainer.config
    settings, prompt = config.eval, trainer.prompts[0]
    conditioning = rollouts.encode([prompt.text], [config.negative_prompt], [prompt.brings])
    conditioning = conditioning.rows(torch.zeros(rows, dtype=torch.int64))
    flow = policy.process == "flow"
    grid = shift_grid(steps, 3.0) if flow else torch.linspace(0.1, 0.99, steps + 1)  # no value changes a count
    timesteps = None if flow else torch.linspace(900, 100, steps).long()
    task, seed = Segment(grid, range(steps), timesteps=timesteps), seeder(0, 0)
    with at_guidance(policy, settings.guidance), clips_of(policy, settings.frames), \
            meta.during(f"evaluation of {steps} steps"):
        latents, _ = policy.run(task, conditioning, generators=policy.generators(seed(0, k) for k in range(rows)))
        policy.decode(latents, conditioning)
    return meta.phases[f"evaluation of {steps} steps"]


LOG = logging.getLogger(__name__)  # the phases that a dry run begins
START = "model"  # what is logged before them
ORDER = ("encode", "preview", "rollout", "decode", "base", "reward", "rescore", "update")
ANSWERS = "answers"  # a phase of questions about own images
EVALUATION = "evaluation"  # a phase beside the epoch
ONCE = "once"  # a part of the update, which more prompts do not make longer
# Seconds that a GPU took over those computed, by card, pipeline and phase, with the commit that was measured.
MEASURED = Path(__file__).with_name("measured.json")
PROMPT = "a lighthouse at dusk, two owls on a branch, and a sign that says open"


@dataclass(frozen=True)
class Estimate:
    """Counts of an epoch on one process.

    phases: by name, in the order of an epoch; with `eval.frames` also an evaluation, which is no part of the epoch.
    rewards: bytes of the reward models, which are not in the phases. away: phases in which they are not on the device.
    steps: denoising steps of the rollouts that were run. replays: micro-batches that were replayed with a backward.
    step_waits, replay_waits: how often the host waits for the GPU in each of them, by reason; once per call is not.
    first: seconds that a first epoch takes longer, at least. factors: by phase, measured seconds over computed ones;
    source: where they are measured. stored: the commit at which they were computed, if not now.
    """

    phases: dict[str, Phase]
    rewards: float
    step_waits: dict[str, float] = field(default_factory=dict)
    replay_waits: dict[str, float] = field(default_factory=dict)
    first: float = 0.0
    factors: dict[str, float] = field(default_factory=dict)
    source: str = ""
    away: frozenset[str] = frozenset()
    stored: str = ""

    def peak_bytes(self, phase: str) -> float:
        """Bytes of tensors that are in use in a phase at most, reward models included."""
        return self.phases[phase].allocated + (0 if phase in self.away else self.rewards)

    @property
    def peak(self) -> float:
        """Bytes of tensors that are in use at most, reward models included."""
        return max(map(self.peak_bytes, self.phases))

    def above(self, room: float) -> list[str]:
        """Phases that need more than `room` bytes."""
        return [name for name in self.phases if self.peak_bytes(name) > room]

    @property
    def seconds(self) -> float:
        """Seconds of the epoch: those of every phase, by its measured factor if it has one."""
        return sum(self.phase_seconds(name) for name in self.phases if name != EVALUATION)

    def phase_seconds(self, name: str) -> float:
        return self.phases[name].duration * self.factors.get(name, 1.0)

    @property
    def basis(self) -> str:
        """Basis of the seconds in words: computed, or corrected by a measurement."""
        if not self.factors:
            return "computed, no measurement yet on this card"
        factors = ", ".join(f"{name} {factor:.2f}" for name, factor in self.factors.items())
        return f"computed, corrected by {factors} as {self.source}"

    def correct(self, gpu: str, model: str, table: Path = MEASURED) -> "Estimate":
        """Estimate with the factors that were measured on this card for the model's pipeline, if any are. table: {card:
        {pipeline: {phase: factor, "commit": commit}}}, which scripts/gpu/gpu_minutes.py writes."""
        known, card = find(model), gpu_key(gpu)
        found = json.loads(table.read_text(encoding="utf-8")).get(card, {}).get(known.pipeline if known else "", {})
        factors = {name: found[name] for name in ORDER if name in found}
        return replace(self, factors=factors, source=f"measured on {card} at {found['commit'][:8]}" if factors else "")


class _Phases(PhaseTimer):
    """Clock of a trainer that tells the pretended GPU which phase it is in.

    began, drawn: bytes in use as the epoch began, and at most as an update did, beside the epoch's samples.
    Text encoders leave before the phase after theirs, and not with its first call.
    """

    def __init__(self, gpu: MetaGPU, encoders: Any):
        super().__init__()
        self.gpu, self.encoders = gpu, encoders
        self.began: int | None = None
        self.drawn = 0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if phase != "encode":
            self.encoders.offload()
        LOG.info(phase)
        self.began = self.gpu.memory.in_use if self.began is None else self.began
        if phase == "update":  # a method that noises its samples begins one with the first of them
            self.drawn = max(self.drawn, self.gpu.memory.in_use)
        with super().__call__(phase), self.gpu.during(phase):
            yield


def dry_run(config: Config, gpu: GPU = GPUS["H100"], processes: int = 1, pipe: Any = None) -> Estimate:
    """Run an epoch of a pipeline's recipe on a pretended GPU; return its counts.

    processes: of the run, which share the epoch's prompts. pipe: a loaded pipeline on any device, which is not changed;
    None: of the configuration of `config.model`. As few prompts are run as make the epoch's optimizer steps, and the
    rest is extrapolated. The state is that of a later epoch: the optimizer has its moments.
    Raises UserError for what a dry run does not cover.
    """
    LOG.info(START)
    config = _prepare_recipe(config)
    shape = geometry(config.train, processes)
    rare = features.dry_runs(features.active_features(config, validate.resolve(config)))
    for feature in rare:
        feature.require(config, processes)
    # As few prompts as make all optimizer steps; the rest of the epoch is extrapolated.
    few = min(shape.prompts, prompts_per_part(shape.group, shape.micro_batch) * config.train.updates)
    meta, short = MetaGPU(gpu), _short(config, few, rare)
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        make, described = from_configs.pipeline, config.load.config or config.model
        twin = make(described, DTYPES[config.precision]) if pipe is None else from_configs.like(pipe)
        with MetaGPU(gpu).running():  # which is not counted
            policy: Any = make_policy(short, META, twin)
        encoders = weights.hold(meta, policy, config.memory, processes)
        calls = Repeats(meta, policy)
        with meta.running():
            image = None if config.prompts in SETS else _image(policy, Path(folder))
            trainer = _trainer(short, policy, image, meta, rare)
            clock = trainer.clock = trainer.rollouts.clock = _Phases(meta, encoders)
            replay_waits = _count_replay_waits(trainer, meta)
            trainer.run_epoch()
            evaluated = None if config.eval.frames is None else count_evaluation(trainer, meta, processes)
    # Phases grow with the prompts that were left out; an evaluation was counted whole.
    phases = _extrapolate(meta, clock, shape.prompts, few, sum(feature.waiting(config) for feature in rare))
    if evaluated is not None:
        phases[EVALUATION] = evaluated
    for feature in rare:
        feature.count(phases, calls, shape.prompts / few)
    # Rewards are added last: they run on the device beside the policy, unless they leave it.
    away = {"encode": config.memory.encoders == "ahead" or config.memory.rewards == "cpu",
            "update": config.memory.rewards == "cpu" and not isinstance(trainer.method.target, RewardGradient)}
    estimate = Estimate(phases, reward_bytes(config), _each(calls.step_waits, calls.steps),
                        _each(replay_waits, calls.replays),
                        away=frozenset(phase for phase, empty in away.items() if empty))
    return replace(estimate, first=LOADING + PLAN * len(meta.attentions) + GROWTH * (estimate.peak / GIB))


def with_precision(config: Config, wrong: dict[str, bool], of: str = "") -> Config:
    """Recipe with a precision. wrong: by name, whether what a dry run does not cover applies. Raises UserError for it.
    """
    for name, applies in (wrong | {"precision: fp16 (say bf16)": config.precision == "fp16"}).items():
        if applies:
            raise UserError(f"a dry run{of} does not cover {name}: leave --gpu out")
    return config.having({"precision": "bf16"}) if config.precision == AUTO else config


def _prepare_recipe(config: Config) -> Config:
    """Recipe with a precision and its largest size."""
    wrong = {"language models": kind(config) != PIPELINE, "adapter.dora": config.adapter.dora,
             "memory.context_parallel": config.memory.context_parallel > 1,
             "trained text encoders": "adapted" in config.parts, "train.pack": config.train.pack,
             "supervised terms (parts.data)": bool(config.parts.get("data")),
             "recorded pairs (preferences)": config.preferences is not None}
    config = with_precision(config, wrong)
    if not config.image.sizes:
        return config
    height, width = max(config.image.sizes, key=math.prod)
    return config.having({"image.height": height, "image.width": width, "image.sizes": []})


def _short(config: Config, prompts: int, rare: Sequence[DryRun]) -> Config:
    """Recipe as it is run, with fewer prompts and without what needs values or several processes."""
    for feature in rare:
        config = feature.run(config)
    parts = config.parts
    if "preview" in parts:  # its quantised copies need values
        parts = parts | {"preview": parts["preview"] | {"precision": "full"}}
    return config.having({"parts": parts, "cache": None, "train.prompts": prompts, "train.compile": False,
                          "train.optimizer": "adamw", "memory.shard": False, "adapter.init": None})


def _image(policy: Any, folder: Path) -> str | None:
    """Write an image of the call's size, for a pipeline that takes one; return its file. Named prompt sets have no
    images, and a pipeline that takes texts alone as well draws from them."""
    if "image" not in policy.accepts:
        return None
    file = folder / "picture.png"
    Image.new("RGB", (policy.call.get("width", 512), policy.call.get("height", 512))).save(file)
    return str(file)


def _trainer(config: Config, policy: Any, image: str | None, meta: MetaGPU, rare: Sequence[DryRun]) -> Trainer:
    """Trainer in the state of a later epoch: with other prompts, the optimizer's moments, and the old policy."""
    first, *later = (Prompt(f"{PROMPT} {number}", image=image) for number in range(config.train.prompts + 1))
    alone: Any = SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu"), is_main_process=True)
    trainer = Trainer(config, alone, policy, {name: _any for name in config.trained}, ([first, *later[1:]], []))
    for feature in rare:
        feature.begin(trainer)
    trainer.prompts = later
    if policy.weights.large:
        trainer.optimization.ema = None  # it waits on the host
    with meta.sharding():
        for parameter in policy.weights.parameters():
            parameter.grad = torch.empty_like(parameter)
        trainer.optimization.optimizer.step()
    trainer.rollouts.old_policy.start_epoch(trainer.epoch)
    trainer.first_ratio.max_log_ratio = 0.0  # there are no values to compare
    return trainer


def _any(images: torch.Tensor, prompts: list[str]) -> list[float]:
    drawn = random.Random(len(prompts))
    return [drawn.random() for _ in prompts]


def _count_replay_waits(trainer: Trainer, meta: MetaGPU) -> Counter[str]:
    """Count what makes the host wait while parts are replayed; the counts fill in while the trainer runs. Optimizer
    steps are counted as a phase of their own, and so are large weights that come once an epoch."""
    waits, weights, observed = Counter[str](), cast(Any, trainer.policy.weights), cast(Any, trainer)
    # A context manager that decorates a function is entered by each of its calls.
    observed.backward = meta.measure(waits=waits)(trainer.backward)
    observed.optimization.step = meta.during(ONCE)(meta.sharding()(trainer.optimization.step))
    if weights.large:
        weights.load = meta.during(ONCE)(weights.load)
    return waits


def _each(waits: Counter[str], times: int) -> dict[str, float]:
    """Counts of a single one of `times`, without what happens less often than each time."""
    return {reason: count / times for reason, count in waits.items() if count >= times > 0}


def _extrapolate(meta: MetaGPU, clock: _Phases, prompts: int, few: int, waiting: int) -> dict[str, Phase]:
    """Phases of an epoch of `prompts`, of which `few` were run with all optimizer steps. waiting: epochs whose samples
    wait beside it."""
    times, phases = prompts / few, {}
    states = max(clock.drawn - (clock.began or 0), 0) / few  # of one prompt
    for name in (name for name in ORDER if name in meta.phases):
        own = states * (prompts - few) if name != "encode" else 0
        phase, more = meta.phases[name], meta.spare + round(own + states * prompts * waiting)
        phases[name] = Phase(phase.allocated + more, phase.reserved + more)
        phases[name].add(phase, times)
        phases[name].seconds, phases[name].fixed = (phase.seconds - phase.fixed) * times + phase.fixed, phase.fixed
    once, update = meta.phases[ONCE], phases["update"]
    update.allocated = max(update.allocated, once.allocated + more)
    update.reserved = max(update.reserved, once.reserved + more)
    update.add(once)
    return phases

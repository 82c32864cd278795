"""Runs of a bench: one per method, seed and settings, in a folder with their hash, so that finished runs are kept. A
budget of evaluations buys a number of epochs that is known before anything runs.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from flowgrpo import rewards
from flowgrpo.advantages.selection import BestWorst
from flowgrpo.config import parse
from flowgrpo.config.schema import Config
from flowgrpo.errors import UserError, nearest
from flowgrpo.methods import keys_read, validate
from flowgrpo.methods.method import Method
from flowgrpo.methods.setup import Setup
from flowgrpo.methods.targets import LatentEdits
from flowgrpo.policies import build
from flowgrpo.samplers import cost
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.reward_gradient import Unroll
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.storage import atomic, paths
from flowgrpo.storage.json_files import read_object
from flowgrpo.storage.places import LOCK
from flowgrpo.tools.bench import models
from flowgrpo.tools.bench.models import Entry, clip_of, entries, scale_entry
from flowgrpo.version import __version__

BENCH, RESULT = "bench.json", "result.json"  # in the folder of a bench, and of a finished run
FACTORS = (1.0, 1 / 3, 3.0)  # of the sweep; among equals the first is chosen
AS_PUBLISHED = 1.0, 1.0  # factors of the learning rate and of the clip
CONFIRMING = 2  # further seeds of a sweep's winner
INTERRUPTED = 4  # checkpoints beside those of the measured epochs, where a run was interrupted
PUBLISHED, SWEEP, TUNED = "published", "sweep", "tuned"
ALL = ["all"]  # of the methods are swept


def epoch_cost(config: Config, epoch: int, process: str = "flow") -> int:
    """Return the denoiser evaluations of one epoch, on a pipeline that doubles its batch under guidance.

    Recorded pairs are not drawn; what it took to draw them once is no epoch's.
    """
    return _cost(config, validate.resolve(config, process), epoch)


def _cost(config: Config, method: Method, epoch: int) -> int:
    """Return the evaluations of one epoch of a resolved method."""
    train = config.train
    drawn = method.target.edit.bases(train.group) if isinstance(method.target, LatentEdits) else train.group
    explorations = method.explorations(shift_grid(train.steps, train.shift), drawn, train.shift, epoch, config.seed)
    doubled = 2 if train.guidance > 1 else 1
    if method.target.follows_reward:
        target: Any = method.target  # a RewardGradient
        return doubled * _backprop_cost(config, target.backprop, explorations[0], epoch)
    if isinstance(method.target, LatentEdits):
        return doubled * cost.rollout(explorations, train.prompts)
    noised = method.noising_spec(shift_grid(train.steps, train.shift), train.group, epoch, config.seed)
    share = trained_share(method, train.group)
    cut = method.loss.surrogate.reads_groups and (share * train.group > train.rows or train.pack)
    reference = method.loss.kl.weight > 0 or method.compares_with_reference  # whose scores serve all inner epochs
    measured = len(method.needs & {"entropy", "drift"})  # a replay each
    passes = train.inner_epochs * (1 + cut) + reference + measured + (epoch == 0)
    spent = 0 if config.preferences else cost.rollout(explorations, train.prompts)
    spent += round(share * cost.update([noised] if noised else explorations, train.prompts, passes))
    spent += cost.update([noised], train.prompts, 1) if noised else 0  # the old scores, before samples are chosen
    if train.staleness and epoch:  # the proximal policy's scores of all samples
        spent += cost.update(explorations, train.prompts, 1)
    spent += cost.preview(method.rollout.preview, train.prompts)
    return doubled * spent


def foretells(method: Method) -> bool:
    """Return True if `epoch_cost` is exact for a denoiser: scores do not decide how many samples are trained."""
    return method.credit.selection is None or isinstance(method.credit.selection, BestWorst)


def trained_share(method: Method, group: int) -> float:
    """Return the share of a group's samples that are trained, where their number is known beforehand; else 1."""
    return method.credit.selection.n / group if isinstance(method.credit.selection, BestWorst) else 1.0


def _backprop_cost(config: Config, ending: Any, exploration: RolloutSpec, epoch: int) -> int:
    """Return the cost of the rollout, and for every replay the steps of the graph."""
    [begin], train = exploration.schedule.trained, config.train
    steps = exploration.steps - begin if isinstance(ending, Unroll) else 1
    return train.prompts * train.group * (begin + steps * (1 + (epoch == 0) + train.inner_epochs))


def epochs_for(config: Config, budget: int, process: str = "flow", share: float = 1.0) -> tuple[int, int]:
    """Return the fewest epochs that reach the budget, and what they cost together.

    share: what an epoch costs, in `epoch_cost`.
    """
    total, method = 0, validate.resolve(config, process)
    for epoch in count():
        total += round(share * _cost(config, method, epoch))
        if total >= budget:
            break
    return epoch + 1, total


def epochs_of(first: int, following: int, budget: int) -> int:
    """Return the fewest epochs that reach the budget, from the measured cost of the first epoch and of the next."""
    return 1 + max(-(-(budget - first) // following), 0)


@dataclass(frozen=True)
class Request:
    """Comparison that a bench makes.

    methods: as given, without the reference if it is to be added. evaluations: of every run. points: measurements of
    the held-out accuracy during training, the last at its end. prompts: of each measured side, at most. sweep: of the
    methods, those to sweep, or ALL. trusted: recipes among them may execute code and reach addresses.
    """

    methods: list[str]
    model: str
    reference: str
    evaluations: int
    seeds: int
    points: int
    prompts: int | None
    sweep: list[str]
    output: Path
    trusted: bool = False


@dataclass(frozen=True)
class Run:
    """One run. column: PUBLISHED, SWEEP or TUNED. lr, clip: factors. foretold: its evaluations, None if they are
    not known beforehand."""

    entry: Entry
    seed: int
    column: str
    lr: float
    clip: float
    config: Config
    foretold: int | None

    @property
    def folder(self) -> Path:
        return self.config.folder

    @property
    def result(self) -> Path:
        return self.folder / RESULT

    @property
    def label(self) -> str:
        factors = "".join(f", {name} x{factor:.3g}" for name, factor in (("lr", self.lr), ("clip", self.clip))
                          if factor != 1)
        return f"{self.entry.label} seed {self.seed}{factors}" + (" (sweep)" if self.column == SWEEP else "")


class Plan:
    """Methods of a bench and their runs.

    unforeseen: methods whose evaluations are not known beforehand, see `budget`. measured: their evaluations of the
    first epoch and of the next, by method; set before runs are listed.
    Raises UserError on the first problem, before anything is written.
    """

    def __init__(self, request: Request):
        self.request, self.of = request, models.model(request.model)
        if not request.methods:
            raise UserError("--methods: got none, expected names such as mix_grpo,ddpo (`flowgrpo list methods` "
                            "lists all)")
        given = request.methods + ([] if request.reference in request.methods else [request.reference])
        self.entries = entries(given, request.model, self.of, request.trusted)
        self.reference = next(entry for entry in self.entries if entry.given == request.reference)
        self.swept = [entry for entry in self.entries if request.sweep == ALL or entry.given in request.sweep]
        for name in request.sweep if request.sweep != ALL else ():
            if name not in given:
                raise UserError(f"--sweep: got {name!r}, expected methods of --methods, or all{nearest(name, given)}")
        self.unforeseen: list[Entry] = []
        self.measured: dict[str, tuple[int, int]] = {}
        self.sides = models.split(request.model)
        require_same(request)
        for entry in self.entries:
            self._require(entry)

    @property
    def counts_evaluations(self) -> bool:
        """Return True if the model is a denoiser, whose evaluations count; else tokens do."""
        return self.of.process != "tokens"

    def _require(self, entry: Entry) -> None:
        config = self._config(entry, entry.settings, 0)
        method = validate.resolve(config, self.of.process)
        kind = build.PIPELINE if self.counts_evaluations else build.CAUSAL_LM
        keys_read.check(Setup(config, kind, method, where=f"{entry.label}: "))
        rewards.compose(config.trained | config.extra_rewards, None)
        if self.counts_evaluations:
            self._afford(entry, epochs_for(config, 1, self.of.process)[1])
        if not self.counts_evaluations or not foretells(method):
            self.unforeseen.append(entry)

    def _afford(self, entry: Entry, cost: int) -> None:
        if cost > self.request.evaluations:
            raise UserError(f"--evaluations: got {self.request.evaluations:,}, but the first epoch of {entry.label} "
                            f"takes {cost:,}: expected at least as many")

    def learn(self, entry: Entry, first: int, following: int) -> None:
        """Keep the measured evaluations of a method's first epoch and of the next."""
        self._afford(entry, first)
        self.measured[entry.given] = first, following

    def _config(self, entry: Entry, settings: dict[str, Any], seed: int, side: str = "held_out") -> Config:
        """Return the configuration of a run, without its length, name and folder."""
        sides = self.request.output / "prompts"
        count = len(self.sides[side])
        return parse.load(None, models.common_settings(self.request.model) | settings | {
            "seed": seed, "prompts": str(sides / "train.jsonl"), "held_out": str(sides / f"{side}.jsonl"),
            "eval.prompts": min(self.request.prompts or count, count)})

    def trial(self, entry: Entry) -> Config:
        """Return the configuration of a method's measured epochs."""
        config = self._config(entry, entry.settings, 0)
        train = config.train.model_copy(update={"epochs": 2})
        return self._with_folder(entry, config.model_copy(update={"train": train}), "trials")

    def run(self, entry: Entry, seed: int, column: str, lr: float = 1.0, clip: float = 1.0) -> Run:
        """Return a run of a method, with factors on its learning rate and clip."""
        side = "validation" if column == SWEEP else "held_out"
        rate = self._config(entry, entry.settings, seed).train.first_lr
        config = self._config(entry, scale_entry(entry, rate, lr, clip), seed, side)
        epochs, foretold = self._length(entry, config)
        every = 0 if column == SWEEP else -(-epochs // self.request.points)
        saved = {"save_every": every, "keep": self.request.points + INTERRUPTED} if every else {
            "save_every": max(epochs // 8, 1)}
        length = {"train": config.train.model_copy(update={"epochs": epochs} | saved),
                  "eval": config.eval.model_copy(update={"every": every})}
        return Run(entry, seed, column, lr, clip, self._with_folder(entry, config.model_copy(update=length), "runs"),
                   foretold)

    def _length(self, entry: Entry, config: Config) -> tuple[int, int | None]:
        """Return the epochs that reach the budget, and their evaluations if these are known."""
        budget, process = self.request.evaluations, self.of.process
        if entry not in self.unforeseen:
            return epochs_for(config, budget, process)
        first, following = self.measured[entry.given]
        if not self.counts_evaluations:
            return epochs_of(first, following, budget), None
        return epochs_for(config, budget, process, following / epoch_cost(config, 1, process))[0], None

    def published_runs(self) -> list[Run]:
        """Return the runs with published parts, seed by seed, so that an interrupted bench has all methods."""
        return [self.run(entry, seed, PUBLISHED) for seed in range(self.request.seeds) for entry in self.entries]

    def sweep(self) -> list[Run]:
        """Return the runs of the sweep, with a seed that no column reports."""
        return [self.run(entry, self.request.seeds, SWEEP, lr, clip) for entry in self.swept
                for lr in FACTORS for clip in (FACTORS if self._clips(entry) else FACTORS[:1])]

    def confirming(self, best: dict[str, tuple[float, float]]) -> list[Run]:
        """Return the runs of a sweep's winners, by label, with further seeds that no column reports."""
        first = self.request.seeds + 1
        return [self.run(entry, seed, SWEEP, *best[entry.label]) for seed in range(first, first + CONFIRMING)
                for entry in self.entries if best.get(entry.label, AS_PUBLISHED) != AS_PUBLISHED]

    def _clips(self, entry: Entry) -> bool:
        """Return True if a clip can act: in the first update of an epoch all ratios are 1."""
        train = self._config(entry, entry.settings, 0).train
        return bool(clip_of(entry, 1.0)) and (train.updates * train.inner_epochs > 1 or train.staleness > 0)

    def tuned_runs(self, best: dict[str, tuple[float, float]]) -> list[Run]:
        """Return the runs with the chosen factors (lr, clip), by label; those of factors 1 are the published ones."""
        return [self.run(entry, seed, TUNED, *best[entry.label]) for seed in range(self.request.seeds)
                for entry in self.entries if entry.label in best]

    def _with_folder(self, entry: Entry, config: Config, folder: str) -> Config:
        """Return the configuration with its folder, whose name has the hash of what the run depends on."""
        name = f"{re.sub(r'[^A-Za-z0-9_+-]+', '_', entry.label)}-seed{config.seed}-{self._hash(config)}"
        return config.model_copy(update={"name": name, "output": str(self.request.output / folder)})

    def _hash(self, config: Config) -> str:
        apart = {"name", "output", "prompts", "held_out"}  # places
        said = [__version__, config.model_dump(mode="json", exclude=apart), Path(str(config.held_out)).stem,
                [prompt.key for side in self.sides.values() for prompt in side],
                [_digest(Path(file)) for file in re.findall(r"[^\s+'\"]+?\.py(?=:)", json.dumps(
                    [config.method, config.parts, config.model_dump(mode="json")["reward"]]))]]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:8]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def settings(request: Request) -> dict[str, Any]:
    """Return what all runs of a bench share; methods, seeds and the reference may be added later."""
    return {"model": request.model, "evaluations": request.evaluations, "points": request.points,
            "prompts": request.prompts}


def require_same(request: Request) -> None:
    """Raise UserError if the output folder holds something else than this bench, or cannot be written."""
    folder, file = request.output, request.output / BENCH
    paths.require_folder(folder)
    if file.is_file():
        known = read_object(file, "name another --output")
        for key, value in settings(request).items():
            if known.get(key) != value:
                raise UserError(f"--output: {folder} holds a bench with {key} {known.get(key)}, got {value}: name "
                                "another folder, or give the same")
    elif folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()):
        raise UserError(f"--output: {folder} holds other files and no bench: name a new folder")


def begin(request: Request) -> None:
    """Write the settings and the prompt files of a bench to its folder."""
    atomic.write_text(request.output / BENCH, json.dumps(settings(request), indent=2) + "\n")
    models.write_sides(request.model, request.output / "prompts")

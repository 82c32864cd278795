"""Runs of a bench: one per method, seed and settings, in a folder with their hash, so that finished runs are kept. A
budget of evaluations buys a number of epochs that is known before anything runs.
"""

import hashlib
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo.advantages.selection import BestWorst
from flowgrpo.config import parse
from flowgrpo.config.schema import Config
from flowgrpo.contrib.features import StalenessKeys
from flowgrpo.errors import UserError, nearest
from flowgrpo.methods import validate
from flowgrpo.methods.method import Method
from flowgrpo.methods.targets import LatentEdits
from flowgrpo.samplers import cost
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.reward_gradient import Unroll
from flowgrpo.storage import atomic, paths
from flowgrpo.storage.json_files import read_object
from flowgrpo.storage.places import LOCK
from flowgrpo.tools.bench import models
from flowgrpo.tools.bench.models import Entry, clip_of, entries, scale_entry
from flowgrpo.training import checks
from flowgrpo.version import __version__

BENCH, RESULT = "bench.json", "result.json"  # in the folder of a bench, and of a finished run
FACTORS = (1.0, 1 / 3, 3.0)  # of the sweep; among equals the first is chosen
AS_PUBLISHED = 1.0, 1.0  # factors of the learning rate and of the clip
CONFIRMING = 2  # further seeds of a sweep's winner
INTERRUPTED = 4  # checkpoints beside those of the measured epochs, where a run was interrupted
PUBLISHED, SWEEP, TUNED = "published", "sweep", "tuned"
ALL = ["all"]  # of the methods are swept


def epoch_cost(config: Config, epoch: int, process: str = "flow") -> int:
    """Denoiser evaluations of one epoch, on a pipeline that doubles its batch under guidance. Recorded pairs are not
    drawn; what it took to draw them once is no epoch's."""
    return _cost(config, validate.resolve(config, process), epoch)


def _cost(config: Config, method: Method, epoch: int) -> int:
    train = config.train
    drawn = method.target.edit.bases(train.group) if isinstance(method.target, LatentEdits) else train.group
    explorations = method.explorations(shift_grid(train.steps, train.shift), drawn, train.shift, epoch, config.seed)
    doubled = 2 if train.guidance > 1 else 1
    if method.target.follows_reward:
        target: Any = method.target  # a RewardGradient: each replay runs the steps of the graph
        [begin], replays = explorations[0].schedule.trained, 1 + (epoch == 0) + train.inner_epochs
        steps = explorations[0].steps - begin if isinstance(target.backprop, Unroll) else 1
        return doubled * train.prompts * train.group * (begin + steps * replays)
    if isinstance(method.target, LatentEdits):
        return doubled * cost.rollout(explorations, train.prompts)
    noised = method.noising_spec(shift_grid(train.steps, train.shift), train.group, epoch, config.seed)
    # The share of a group's samples that are trained, where their number is known beforehand.
    share = method.credit.selection.n / train.group if isinstance(method.credit.selection, BestWorst) else 1.0
    cut = method.loss.surrogate.reads_groups and (share * train.group > train.rows or train.pack)
    reference = method.loss.kl.weight > 0 or method.compares_with_reference  # whose scores serve all inner epochs
    measured = len(method.needs & {"entropy", "drift"})  # a replay each
    passes = train.inner_epochs * (1 + cut) + reference + measured + (epoch == 0)
    spent = 0 if config.preferences else cost.rollout(explorations, train.prompts)
    spent += round(share * cost.update([noised] if noised else explorations, train.prompts, passes))
    spent += cost.update([noised], train.prompts, 1) if noised else 0  # the old scores, before samples are chosen
    if StalenessKeys.read(config).staleness and epoch:  # the proximal policy's scores of all samples
        spent += cost.update(explorations, train.prompts, 1)
    spent += cost.preview(method.rollout.preview, train.prompts)
    return doubled * spent


def epochs_for(config: Config, budget: int, process: str = "flow", share: float = 1.0) -> tuple[int, int]:
    """Most epochs within the budget, at least one, and their cost. share: what an epoch costs, in `epoch_cost`."""
    method = validate.resolve(config, process)
    epochs, total = 1, round(share * _cost(config, method, 0))
    while total + (following := round(share * _cost(config, method, epochs))) <= budget:
        epochs, total = epochs + 1, total + following
    return epochs, total


def epochs_of(first: int, following: int, budget: int) -> int:
    """Most epochs within the budget, one at least, from the measured cost of the first and of the next."""
    return 1 + max((budget - first) // following, 0)


class TooFew(UserError):
    """Budget that holds no epoch."""


@dataclass(frozen=True)
class Request:
    """Comparison that a bench makes.

    methods: as given, without the reference if it is to be added. evaluations: of every run in training, at most.
    points: measurements of the held-out accuracy during training, the last at its end. prompts: of each measured side,
    at most. sweep: of the methods, those to sweep, or ALL. trusted: recipes among them may execute code and reach
    addresses.
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
    """One run. column: PUBLISHED, SWEEP or TUNED. lr, clip: factors. foretold: its evaluations, if known ahead."""

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
        self.request, self.of = request, models.MODELS[request.model]
        self.counts_evaluations = self.of.process != "tokens"  # of a denoiser; of a language model tokens count
        if not request.methods:
            raise UserError("--methods: got none, expected names such as mix_grpo,ddpo (`flowgrpo list methods` "
                            "lists all)")
        given = request.methods + ([] if request.reference in request.methods else [request.reference])
        self.entries = entries(given, request.model, self.of, request.trusted)
        self.reference = next(entry for entry in self.entries if entry.given == request.reference)
        swept = given if request.sweep == ALL else request.sweep
        for name in swept:
            if name not in given:
                raise UserError(f"--sweep: got {name!r}, expected methods of --methods, or all{nearest(name, given)}")
        self.swept = [entry for entry in self.entries if entry.given in swept]
        self.unforeseen: list[Entry] = []
        self.measured: dict[str, tuple[int, int]] = {}
        self.sides = models.split(request.model)
        require_same(request)
        with tempfile.TemporaryDirectory() as place:
            models.write_sides(request.model, Path(place))
            for entry in self.entries:
                self._require(entry, Path(place))

    def _require(self, entry: Entry, prompts: Path) -> None:
        """Make the checks of a run, with the files of its prompts in a folder."""
        train = self._config(entry, entry.settings, 0)
        places = {"prompts": str(prompts / "train.jsonl"), "held_out": str(prompts / "held_out.jsonl")}
        config = self._with_folder(entry, train.model_copy(update=places), "runs")
        try:
            method = checks.check(config).setup.method
        except UserError as error:
            raise UserError(f"{entry.label}: {error}") from error
        if self.counts_evaluations:
            self._afford(_cost(config, method, 0), f"the first epoch of {entry.label} takes")
        else:
            least = config.train.prompts * config.train.group * config.text.max_tokens
            self._afford(least, f"the completions of an epoch of {entry.label} alone may take")
        # `epoch_cost` is exact for a denoiser whose scores decide neither how many samples are trained nor which groups
        # are drawn again.
        exact = method.redraw is None and isinstance(method.credit.selection, BestWorst | None)
        if not (self.counts_evaluations and exact):
            self.unforeseen.append(entry)

    def _afford(self, cost: int, what: str) -> None:
        if cost > self.request.evaluations:
            raise TooFew(f"--evaluations: got {self.request.evaluations:,}, but {what} {cost:,}: expected at least as "
                         "many")

    def learn(self, entry: Entry, first: int, following: int) -> None:
        self._afford(first, f"the first epoch of {entry.label} takes")
        self.measured[entry.given] = first, following

    def _config(self, entry: Entry, settings: dict[str, Any], seed: int, side: str = "held_out") -> Config:
        sides = self.request.output / "prompts"
        count = len(self.sides[side])
        return parse.load(None, models.common_settings(self.request.model) | settings | {
            "seed": seed, "prompts": str(sides / "train.jsonl"), "held_out": str(sides / f"{side}.jsonl"),
            "eval.prompts": min(self.request.prompts or count, count)})

    def trial(self, entry: Entry) -> Config:
        return self._with_folder(entry, self._config(entry, entry.settings, 0).having({"train.epochs": 2}), "trials")

    def run(self, entry: Entry, seed: int, column: str, lr: float = 1.0, clip: float = 1.0) -> Run:
        """Run of a method, with factors on its learning rate and clip."""
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
        """Epochs within the budget, and their evaluations if these are known."""
        budget, process = self.request.evaluations, self.of.process
        if entry not in self.unforeseen:
            return epochs_for(config, budget, process)
        first, following = self.measured[entry.given]
        if not self.counts_evaluations:
            return epochs_of(first, following, budget), None
        return epochs_for(config, budget, process, following / epoch_cost(config, 1, process))[0], None

    def published_runs(self) -> list[Run]:
        """Runs with published parts, seed by seed, so that an interrupted bench has all methods."""
        return [self.run(entry, seed, PUBLISHED) for seed in range(self.request.seeds) for entry in self.entries]

    def sweep(self) -> list[Run]:
        """Runs of the sweep, with a seed that no column reports."""
        runs = []
        for entry in self.swept:
            config = self._config(entry, entry.settings, 0)
            # In the first update of an epoch all ratios are 1, so that a clip acts in later ones alone.
            several = config.train.updates * config.train.inner_epochs > 1 or StalenessKeys.read(config).staleness > 0
            clips = FACTORS if clip_of(entry, 1.0) and several else FACTORS[:1]
            runs += [self.run(entry, self.request.seeds, SWEEP, lr, clip) for lr in FACTORS for clip in clips]
        return runs

    def confirming(self, best: dict[str, tuple[float, float]]) -> list[Run]:
        """Runs of a sweep's winners, by label, with further seeds that no column reports."""
        first = self.request.seeds + 1
        return [self.run(entry, seed, SWEEP, *best[entry.label]) for seed in range(first, first + CONFIRMING)
                for entry in self.entries if best.get(entry.label, AS_PUBLISHED) != AS_PUBLISHED]

    def tuned_runs(self, best: dict[str, tuple[float, float]]) -> list[Run]:
        """Runs with the chosen factors (lr, clip), by label; those of factors 1 are the published ones."""
        return [self.run(entry, seed, TUNED, *best[entry.label]) for seed in range(self.request.seeds)
                for entry in self.entries if entry.label in best]

    def _with_folder(self, entry: Entry, config: Config, folder: str) -> Config:
        """Configuration named after its method, its seed and a hash of all that its results depend on."""
        apart = {"name", "output", "prompts", "held_out"}  # places
        named = json.dumps([config.method, config.parts, config.model_dump(mode="json")["reward"]])
        files = map(Path, re.findall(r"[^\s+'\"]+?\.py(?=:)", named))
        said = [__version__, config.model_dump(mode="json", exclude=apart), Path(str(config.held_out)).stem,
                [prompt.key for side in self.sides.values() for prompt in side],
                [hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "" for file in files]]
        digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:8]
        name = f"{re.sub(r'[^A-Za-z0-9_+-]+', '_', entry.label)}-seed{config.seed}-{digest}"
        return config.model_copy(update={"name": name, "output": str(self.request.output / folder)})


def settings(request: Request) -> dict[str, Any]:
    """Settings that all runs of a bench share; methods, seeds and the reference may be added later."""
    return {"model": request.model, "evaluations": request.evaluations, "points": request.points,
            "prompts": request.prompts}


def require_same(request: Request) -> None:
    """Raise UserError if the output folder holds something else than this bench, or cannot be written. A bench without
    a finished run may still be given other settings."""
    folder, file = request.output, request.output / BENCH
    paths.require_folder(folder)
    if file.is_file():
        if not any(folder.glob(f"runs/*/{RESULT}")):
            return
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

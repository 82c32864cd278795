"""Checks of a run before its model is loaded and anything is written: each is a function of the run's setup."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from flowgrpo import rewards
from flowgrpo.config.schema import Config
from flowgrpo.cores import Threads
from flowgrpo.data import pairs, sets, sources
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import pick_device
from flowgrpo.errors import UserError
from flowgrpo.methods import keys_read
from flowgrpo.methods.setup import Setup, check_parts
from flowgrpo.methods.validate import resolve
from flowgrpo.policies import build, options
from flowgrpo.policies.weights import sharding
from flowgrpo.rewards import pairwise
from flowgrpo.storage import paths
from flowgrpo.training import batch_size, best, extensions, machine, metrics, reward_demands, run_folder

if TYPE_CHECKING:
    from accelerate import Accelerator

Check: TypeAlias = Callable[[Setup], None]
RewardFunctions: TypeAlias = dict[str, Callable[..., Any]]


def check_prompts(setup: Setup) -> None:
    """Raise UserError for the first prompt whose files the model does not take, or that lacks one."""
    build.require_inputs(setup.config, setup.prompts, setup.loaded)


def _without_lost(setup: Setup) -> Setup:
    """Leave out, and report, prompts of a resumed run whose files were damaged since.
    Raises UserError if none of training, or of the held-out ones, is left."""
    lost = sources.decode(setup.prompts, setup.config.call.get("num_frames"), Path(setup.config.output), setup.first)
    gone = {prompt.key for prompt, _ in lost}
    train, held = ([prompt for prompt in side if prompt.key not in gone] for side in setup.split)
    for what, none in (("training", not train), ("held-out", setup.split[1] and not held)):
        if lost and none:
            raise UserError(f"{lost[0][1]}; no {what} prompt is left whose files can be read: restore them")
    for number, (_, error) in enumerate(lost if setup.first else (), 1):
        print(f"resume: {error}: the run goes on without this prompt ({number} of {len(setup.prompts)} lost)",
              flush=True)
    return replace(setup, split=(train, held))


# In the order in which they are made, by what they have to know: what costs nothing comes first.
OF_KEYS: tuple[Check, ...] = (keys_read.check, metrics.check)
OF_MACHINE: tuple[Check, ...] = (batch_size.check_samples, options.check, sharding.check, run_folder.check)
OF_REWARDS: tuple[Check, ...] = (reward_demands.check, reward_demands.check_whole_groups)
OF_PROMPTS: tuple[Check, ...] = (batch_size.check_samples, check_prompts, reward_demands.check_modality,
                                 reward_demands.check_clips, extensions.check, check_parts,
                                 reward_demands.check_routes, best.check, options.check_call,
                                 options.check_frames, extensions.check_model)
OF_MODEL: tuple[Check, ...] = (reward_demands.check_modality, check_prompts, options.check_frames,
                               extensions.check_model)  # once it is loaded


@dataclass(frozen=True, eq=False)
class Ready:
    """Checked run, without the model and its weights.

    setup: its configuration has a chosen precision. precision: in words.
    last: the checkpoint to resume from, or None. changes: of the configuration since then, for the report.
    threads: of torch on a CPU; repeated: those of each epoch that an interrupted run trained and did not save.
    began: time.perf_counter() of the first check.
    """

    setup: Setup
    precision: str
    accelerator: Accelerator
    last: Path | None
    changes: list[str]
    threads: Threads
    repeated: dict[int, int]
    began: float


def check(config: Config, resume: bool | Literal["auto"] = False, pipe: Any = None,
          functions: RewardFunctions | None = None, prompts: list[Prompt] | None = None) -> Ready:
    """Validate configuration, rewards, prompts and run folder before anything is loaded or written.
    Raises UserError on the first problem."""
    began = time.perf_counter()
    setup, launched = check_keys(config, pipe)
    setup, accelerator, precision = machine.place_setup(setup, resume)
    for line in launched if setup.first else ():
        print(line, flush=True)
    require(OF_MACHINE, setup)
    config, away = setup.config, setup.config.memory.rewards == "cpu"
    with rewards.lazily():  # no weights are fetched yet: a reward may turn out not to serve
        setup = replace(setup, trained=rewards.compose(config.trained, config.cache, functions, away),
                        extra_rewards=rewards.compose(config.extra_rewards, config.cache, functions, away))
    require(OF_REWARDS, setup)
    setup = _with_prompts(setup, prompts)
    setup = _without_lost(setup) if setup.resumes else setup
    require(OF_PROMPTS, setup)
    if setup.first and not setup.resumes:
        sources.require(setup.prompts, setup.config.call.get("num_frames"), Path(setup.config.output))
    if setup.first:  # finds mistakes, and makes the trial
        rewards.load([*setup.trained.values(), *setup.extra_rewards.values()])
    last: Path | None = None
    changes: list[str] = []
    repeated: dict[int, int] = {}
    if setup.resumes:
        config, last = setup.config, run_folder.last_whole(setup.config, accelerator)
        changes = run_folder.require_same(config, last)
        changes += run_folder.changes(config.folder, run_folder.hash_inputs(config, setup.split))
        repeated = run_folder.threads_by_epoch(config, last, accelerator)
    if setup.first:
        paths.require_folder(setup.config.folder)
    return Ready(setup, precision, accelerator, last, changes, Threads.for_device(setup.device), repeated, began)


def check_keys(config: Config, pipe: Any = None) -> tuple[Setup, list[str]]:
    """The setup of a configuration whose keys suit the model's kind and the method, and a line on each key that
    accelerate's configuration set.
    Raises UserError on the first problem."""
    device, kind = pick_device(config.device), build.kind(config, pipe)
    config, launched = machine.as_launched(config, kind)
    setup = Setup(config, kind, resolve(config, build.process(kind)), loaded=pipe, device=device)
    require(OF_KEYS, setup)
    return setup, launched


def require(checks: tuple[Check, ...], setup: Setup) -> None:
    """Make checks in their order. Raises UserError on the first problem."""
    for each in checks:
        each(setup)


def _with_prompts(setup: Setup, prompts: list[Prompt] | None) -> Setup:
    """The setup with its prompts, and with what is measured on held-out ones.
    prompts: objects that replace those of the configuration."""
    config = setup.config
    measured = {}
    if config.eval.prompts:
        measured = pairwise.held_out_rewards(setup.trained, setup.extra_rewards, config.eval.samples)
    if prompts is None:
        sets.require_suited(config)
        split = sets.resolve(config)
    else:
        split = sets.split(prompts, config.held_out, sets.SPLIT_SEED)
    return replace(setup, measured=measured, judged=extensions.selector_names(config, setup.method),
                   split=pairs.in_place(config, split, setup.method.for_tokens))

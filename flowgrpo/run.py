"""Entry point of the command line and of `flowgrpo.align`: check, load, measure, train, measure again."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from flowgrpo import rewards
from flowgrpo.arguments import OMITTED, Omitted, Prompts, Rewards, configured
from flowgrpo.config.geometry import geometry, teams
from flowgrpo.config.schema import Config
from flowgrpo.data import provenance, recorded_pairs, splits
from flowgrpo.data.prompts import Prompt, of_records
from flowgrpo.device import described, pick_device, require_generators, rounded_products
from flowgrpo.distributed.processes import PATIENCE, Processes, require_replicated
from flowgrpo.distributed.watch import Watch
from flowgrpo.errors import UserError
from flowgrpo.evaluation import held_out
from flowgrpo.evaluation.nouns import SAMPLE
from flowgrpo.evaluation.report import snapshots
from flowgrpo.log import silence
from flowgrpo.methods import keys_read, split_groups
from flowgrpo.methods.method import Method
from flowgrpo.methods.validate import resolve, substituted
from flowgrpo.packages import require_versions
from flowgrpo.policies import build, options
from flowgrpo.policies.pipelines import prompt_lengths
from flowgrpo.policies.precision import resolve_precision
from flowgrpo.policies.weights import sharding
from flowgrpo.policies.weights.low_precision import notice
from flowgrpo.policies.weights.restore import as_before
from flowgrpo.rewards import pairwise
from flowgrpo.storage import atomic, lock, paths
from flowgrpo.storage.places import CRASH
from flowgrpo.train import Trainer
from flowgrpo.training import (
    announcement,
    batch_size,
    best,
    endings,
    extensions,
    hints,
    inputs,
    reward_demands,
    run_folder,
    state,
    tracker,
    trial,
)
from flowgrpo.training.setup import Setup
from flowgrpo.user_code import reading

if TYPE_CHECKING:
    from accelerate import Accelerator

@dataclass(frozen=True, eq=False)
class Ready:
    """Validated inputs of a run, without the model and its weights.

    config: the configuration, with a chosen precision.
    precision: the precision in words.
    device: of this process.
    accelerator: accelerate's.
    trained, measured: rewards by name.
    split: training and held-out prompts.
    last: the checkpoint to resume from, or None.
    changes: changes of the configuration since then, for the report.
    began: time.perf_counter() of the first check.
    """

    config: Config
    precision: str
    device: str | torch.device
    accelerator: Accelerator
    trained: dict[str, Any]
    measured: dict[str, Any]
    split: tuple[list[Prompt], list[Prompt]]
    last: Path | None
    changes: list[str]
    began: float


def run(config: Config, resume: bool | Literal["auto"] = False, *, pipe: Any = None,
        functions: dict[str, Callable[..., Any]] | None = None, prompts: list[Prompt] | None = None) -> dict[str, Any]:
    """Align a model as `config` says; return the summary that is also written to `summary.json`.

    resume: go on from the last checkpoint of the configuration's folder; "auto": begin where there is no run.
    Under `accelerate launch` or `torchrun` every process calls it, and the first one writes and prints. pipe (of a
    language model the tuple of model and tokenizer or processor), functions (by name) and prompts are objects that
    replace those named in the configuration. If the run fails, such a pipe is restored.
    """
    ready = check(config, resume, pipe, functions, prompts)
    with Watch(Processes(ready.accelerator)):
        return _checked(ready, pipe, prompts, config.precision)


def _checked(ready: Ready, pipe: Any, prompts: list[Prompt] | None, asked: str) -> dict[str, Any]:
    """Load the model of a checked configuration, and run it. asked: the precision before `auto` was settled."""
    from accelerate.utils import set_seed

    config = ready.config
    if ready.accelerator.is_main_process:
        print(f"device: {described(ready.device)}\nprecision: {ready.precision}", flush=True)
        for line in hints.of_machine(asked, ready.device):
            print(line, flush=True)
    set_seed(config.seed)
    loaded = _load(ready) if pipe is None else pipe
    modality = build.modality(loaded)
    rewards.require_modality(ready.trained | ready.measured, modality)
    rewards.require_base(ready.trained | ready.measured, modality)
    rewards.require_latents(ready.trained | ready.measured, modality)
    build.require_inputs(config, [*ready.split[0], *ready.split[1]], loaded)
    listed = provenance.prompt_lines(config, prompts) if ready.accelerator.is_main_process else None
    with as_before(pipe), rounded_products(config.precision, ready.device):
        return _train(ready, loaded, listed)


def _load(ready: Ready) -> Any:
    """Load the model of a run; the first process prints what and how long."""
    config, first, start = ready.config, ready.accelerator.is_main_process, time.monotonic()
    if first:
        print(f"loading {config.model} ...", flush=True)
    encoded = build.encoded(config, [prompt for side in ready.split for prompt in side])
    loaded = build.load(config, encoders=not encoded)
    if first and encoded:
        print(f"text encoders are not loaded: all prompts are encoded in {config.cache}", flush=True)
    if first:
        print(f"loaded in {time.monotonic() - start:.1f} s: {announcement.described(loaded)}"
              + announcement.SAFETY * build.has_checker(config), flush=True)
    return loaded


def _train(ready: Ready, loaded: Any, listed: str | None) -> dict[str, Any]:
    """Run a loaded model, after all checks that need no model; listed: the content of the run's own prompt file."""
    config, folder = ready.config, ready.config.folder
    policy = build.make_policy(config, ready.device, loaded)
    config = batch_size.fit_micro_batch(config, policy, ready.split[0][0], Processes(ready.accelerator))
    trainer = Trainer(config, ready.accelerator, policy, ready.trained, ready.split)
    if ready.last:
        state.restore(trainer, ready.last)
    trial.require(trainer, ready.measured)
    preview = trainer.method.rollout.preview
    for line in (substituted(config, trainer.method),
                 notice(preview.precision, policy.device) if preview else None) if trainer.processes.first else ():
        if line:
            print(line, flush=True)
    if policy.modality != "text" and trainer.processes.first:
        texts = [prompt.text for side in ready.split for prompt in side]
        if line := prompt_lengths.cut(policy.pipe, config.call, texts):
            print(line, flush=True)
    with contextlib.ExitStack() as stack:
        if trainer.processes.first:
            prepare(config, trainer.epoch, ready.last is not None, ready.changes, stack)
            if listed is not None:
                atomic.write_text(folder / provenance.PROMPTS, listed)
            inputs.write(folder, inputs.of_run(config, ready.split))
            snapshots.begin(folder, trainer.epoch, ready.device, trainer.processes.count, ready.precision,
                            SAMPLE[policy.modality], policy.unit)
        tracker.start(ready.accelerator, config, trainer.epoch, resumed=ready.last is not None)
        stack.callback(ready.accelerator.end_training)
        with endings.evaluating(trainer, folder, "first"):
            before = held_out.before(trainer, ready.measured, folder, reuse=ready.last is not None)
        if trainer.processes.first:
            snapshots.stage(folder, "before", 0, before)
        if not ready.last:
            tracker.show(ready.accelerator, folder, 0, "before")
        trainer.train(folder, ready.measured)
        with endings.evaluating(trainer, folder, "last"):
            summary = held_out.finish(trainer, ready.measured, folder, before, ready.began, ready.last is not None)
        tracker.show(ready.accelerator, folder, trainer.epoch, "after", "best", "worst")
        return summary


def check(config: Config, resume: bool | Literal["auto"] = False, pipe: Any = None,
          functions: dict[str, Callable[..., Any]] | None = None, prompts: list[Prompt] | None = None) -> Ready:
    """Validate configuration, rewards, prompts and run folder before anything is loaded or written.

    Raises UserError on the first problem.
    """
    began, device = time.perf_counter(), pick_device(config.device)
    kind = build.kind(config, pipe)
    method = resolve(config, build.process(kind))
    keys_read.require_keys(config, kind, method)
    tracker.require(config)
    accelerator = make_accelerator(device)  # first: it selects the GPU that rewards will use
    if accelerator.num_processes > 1:
        device = accelerator.device
    resume = run_folder.resumes(config, accelerator, resume)
    config, precision = settled(config, accelerator, device, resume, pipe)
    processes = teams(config.memory.context_parallel, accelerator.num_processes)
    shape = geometry(config.train, processes)
    require_generators(shape.rows, "samples of an epoch (train.prompts x train.group)")
    options.require_options(config, method, device, loaded=pipe is not None)
    sharding.require(config.memory.shard, not config.adapter.rank, accelerator.num_processes, os.environ)
    if accelerator.is_main_process:
        run_folder.require_free(config.folder)
        if not resume:
            run_folder.require_outside(config)
    away = config.memory.rewards == "cpu"
    with rewards.lazily():  # first what costs nothing: no weights are fetched for a reward that cannot serve
        trained = rewards.compose(config.trained, config.cache, functions, away)
        further = rewards.compose(config.watched, config.cache, functions, away)
    reward_demands.require(method, trained, config.train.group)
    together = [name for name, reward in trained.items() if pairwise.sees_groups(reward)]
    split_groups.require(config, method, shape, processes, together)
    measured = pairwise.measured(trained, further)
    split = recorded_pairs.in_place(config, _split(config, prompts), method.for_tokens)
    require_generators(min(config.eval.prompts, len(split[1])) * config.eval.samples, "samples of an evaluation")
    build.require_inputs(config, [*split[0], *split[1]], pipe)
    if accelerator.is_main_process and (modality := build.modality_ahead(config, pipe)):
        rewards.require_modality(trained | further, modality)
        if modality == "video":
            rewards.require_clips(trained | further, split[0][0].text, split[0][0].metadata)
    extensions.require(Setup(config, kind, method, shape, processes, accelerator.num_processes, trained, measured,
                             split))
    if require := getattr(method.curriculum, "require", None):
        require(split[0])
    for routed, side in zip((trained, further), split):
        rewards.require_routes(routed, [prompt.metadata for prompt in side])
    if accelerator.is_main_process:  # finds mistakes, and makes the trial
        rewards.load([*trained.values(), *further.values()])
    last = run_folder.last_whole(config, accelerator) if resume else None
    changes = run_folder.require_same(config, last) + inputs.changes(config.folder, inputs.of_run(config, split)) \
        if last else []
    if accelerator.is_main_process:
        paths.require_folder(config.folder)
    if config.eval.weights == "ema" and not config.train.ema:
        raise UserError("eval.weights is 'ema', but train.ema is 0: set train.ema to a decay such as 0.9")
    best.require(config.eval, measured)
    return Ready(config, precision, device, accelerator, trained, measured, split, last, changes, began)


def _split(config: Config, prompts: list[Prompt] | None) -> tuple[list[Prompt], list[Prompt]]:
    """Return the training and the held-out prompts. prompts: objects that replace those of the configuration."""
    if prompts is not None:
        return splits.split(prompts, config.held_out, splits.SPLIT_SEED)
    splits.require_suited(config)
    return splits.resolve(config)


def settled(config: Config, accelerator: Accelerator, device: str | torch.device, resume: bool, pipe: Any
            ) -> tuple[Config, str]:
    """Return the configuration with the precision that the first process chooses for all, and its description."""
    from accelerate.utils import broadcast_object_list

    begun = run_folder.precision(config) if resume else None
    config = run_folder.with_batch(config) if resume else config
    chosen = [resolve_precision(config, device, pipe, begun) if accelerator.is_main_process else None]
    return broadcast_object_list(chosen)[0]


def make_accelerator(device: str) -> Accelerator:
    """Return the accelerator; launch, device and collectives are accelerate's.

    Raises UserError if it was configured to shard the model.
    """
    from accelerate import Accelerator, InitProcessGroupKwargs

    require_replicated(os.environ)
    patience = InitProcessGroupKwargs(timeout=PATIENCE)
    return Accelerator(cpu=device == "cpu", kwargs_handlers=[patience])


def prepare(config: Config, epoch: int, resumed: bool, changes: list[str], stack: contextlib.ExitStack) -> None:
    """Prepare the run's folder: archive an earlier run, or resume this one after `epoch`.

    The folder is locked against other runs until `stack` is closed.
    """
    folder = config.folder
    run_folder.require_free(folder)
    if not resumed and (moved := run_folder.set_aside(folder)):
        print(f"{folder} held an earlier run, which is now {moved}")
    for change in changes:
        print(f"resumed with {change}")
    stack.enter_context(lock.held(folder))
    (folder / CRASH).unlink(missing_ok=True)
    stack.enter_context(run_folder.crash_kept(folder))
    atomic.write_text(folder / "config.yaml", config.yaml())
    run_folder.keep_lines(folder / "metrics.jsonl", epoch)


def align(model: Any = OMITTED, rewards: Rewards | Omitted = OMITTED, prompts: Prompts | Omitted = OMITTED,
          method: str | Method | Omitted = OMITTED, resume: bool | Literal["auto"] = False, *,
          recipe: str | Path | None = None, **options: Any) -> dict[str, Any]:
    """Align `model` to `rewards` on `prompts`: `flowgrpo train` from Python.

    model: `starter`, a directory, a hub id, a loaded diffusers pipeline, or a loaded language model with its tokenizer
        or processor, as a tuple.
    rewards: a name, a function `reward(images, prompts, metadata) -> floats`, or a dictionary of these to weights or
        rules (functions under their own names).
    prompts: a file, or a list of texts or of dictionaries with the keys of a .jsonl file, such as
        {"prompt": "a red star", "metadata": {"count": 1}}.
    method: presets joined by +, FILE.py:NAME, or a `flowgrpo.methods.Method`, whose parts config.yaml records: the
        nearest preset and what differs. A class that is in no file has to be given again, as for `resume`.
    recipe: a YAML file or a packaged name, such as "starter": the base, of which all other arguments change keys.
        Without it a model is needed, and the others are `scene_graded`, `starter` and `mix_grpo`.
    resume: resume from the last checkpoint of the run of that `name`; the other arguments are given again. "auto":
        begin if there is no such run.
    options: configuration keys, sections as dictionaries, such as `train={"epochs": 50}`.

    Returns the run's summary, the content of `summary.json`. A loaded model then has the run's LoRA (adapter
    "default"), in eval mode: it samples the result. A next `align` on it takes that LoRA off and begins with
    the base; `pipe.unload_lora_weights()` does so too, and `pipe.fuse_lora()` before it keeps what was learned. With
    adapter.rank 0 the weights themselves have changed. If the run fails, a loaded model is left without the LoRA. For
    other commands, the run's config.yaml names the folder or hub id that a model was loaded from, and
    FILE.py:NAME of a function at the top level of a file. A list of prompts is saved in the run's prompts.jsonl.
    """
    require_versions()
    if files := reading():
        raise UserError(f"{files[-1]} calls align while it is read for a reward: put that call below "
                        "if __name__ == '__main__':")
    config, functions = configured(model, rewards, prompts, method, recipe, options)
    pipe = None if model is OMITTED or isinstance(model, (str, Path)) else model
    records = None if prompts is OMITTED or isinstance(prompts, (str, Path)) else of_records(prompts)
    silence()
    announcement.announce(config, pipe is not None)
    return run(config, resume, pipe=pipe, functions=functions, prompts=records)

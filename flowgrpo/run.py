"""Entry point of the command line and of `flowgrpo.align`: check, load, measure, train, measure again."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

from flowgrpo.arguments import OMITTED, Omitted, Options, Prompts, Rewards, build_config
from flowgrpo.config.schema import Config
from flowgrpo.data import provenance
from flowgrpo.data.prompts import Prompt, of_records
from flowgrpo.device import describe, matmul_precision, without_cudnn_attention
from flowgrpo.distributed.processes import Processes
from flowgrpo.distributed.watch import Watch
from flowgrpo.evaluation import held_out
from flowgrpo.log import silence
from flowgrpo.methods.method import Method
from flowgrpo.notebook import Summary
from flowgrpo.packages import require_versions
from flowgrpo.policies import build
from flowgrpo.policies.weights.change import restore_pipeline
from flowgrpo.train import Trainer
from flowgrpo.training import announcement, batch_size, checks, endings, loading, metrics, run_folder, state, trial
from flowgrpo.training.checks import Ready
from flowgrpo.trust import command


def run(config: Config, resume: bool | Literal["auto"] = False, *, pipe: Any = None,
        functions: dict[str, Callable[..., Any]] | None = None, prompts: list[Prompt] | None = None) -> dict[str, Any]:
    """Align a model as `config` says; return the summary that is also written to `summary.json`.

    resume: go on from the last checkpoint of the configuration's folder; "auto": begin where there is no run.
    Under `accelerate launch` or `torchrun` every process calls it, and the first one writes and prints. pipe (of a
    language model the tuple of model and tokenizer or processor), functions (by name) and prompts are objects that
    replace those named in the configuration. If the run fails, such a pipe is restored.
    """
    ready = checks.check(config, resume, pipe, functions, prompts)
    everyone = Processes(getattr(ready.accelerator, "whole", ready.accelerator))  # both sides, if there are two
    with Watch(everyone, ready.setup.config.folder), ready.threads:
        return _load_and_run(ready, prompts, config.precision)


def _load_and_run(ready: Ready, prompts: list[Prompt] | None, asked: str) -> dict[str, Any]:
    """Load the model of a checked configuration, and run it. asked: the precision before `auto` was settled."""
    from accelerate.utils import set_seed

    setup, config, changed = ready.setup, ready.setup.config, ready.threads.look()
    if setup.first:
        count = setup.all_processes
        print(f"device: {describe(setup.device)}, {count} process{'es' * (count > 1)}", f"precision: {ready.precision}",
              *loading.machine_hints(asked, setup.device), *filter(None, [changed]), sep="\n", flush=True)
    set_seed(config.seed)
    loaded = loading.load(setup) if setup.loaded is None else setup.loaded
    checks.require(checks.OF_MODEL, replace(setup, loaded=loaded))
    listed = provenance.prompt_lines(config, prompts) if setup.first else None
    with restore_pipeline(setup.loaded), matmul_precision(config.precision, setup.device):
        policy = build.make_policy(config, setup.device, loaded)
        config = batch_size.fit_micro_batch(config, policy, setup.split[0][0], Processes(ready.accelerator))
        trainer = Trainer(config, ready.accelerator, policy, setup.trained, setup.split)
        if ready.last:
            state.restore(trainer, ready.last)
        trainer.progress.threads, trainer.progress.repeated = ready.threads, ready.repeated
        with endings.explain_not_finite(trainer, config.folder):
            return trainer.extensions.whole_run(partial(_run, ready, trainer, listed))()


def _run(ready: Ready, trainer: Trainer, listed: str | None) -> dict[str, Any]:
    """Try the rewards of a trainer, then measure, train, and measure again. listed: the content of the run's own prompt
    file."""
    setup, resumed, config, policy = ready.setup, ready.last is not None, trainer.config, trainer.policy
    folder, measured = config.folder, setup.measured
    trial.require(trainer, measured)
    if trainer.processes.first:
        for line in loading.lines_after_loading(config, trainer.method, policy, setup.prompts):
            print(line, flush=True)
    with contextlib.ExitStack() as stack:
        if policy.unit == "tokens":  # of backward passes too, which recompute
            stack.enter_context(without_cudnn_attention(policy.device))
        if trainer.processes.first:
            stack.enter_context(run_folder.lock_folder(replace(setup, config=config), trainer.epoch, resumed,
                                                       ready.changes, policy, ready.precision, listed))
        metrics.start(ready.accelerator, config, trainer.epoch, resumed=resumed)
        stack.callback(ready.accelerator.end_training)
        with endings.evaluating(trainer, folder, "first"):
            base, anew = held_out.before(trainer, measured, folder, reuse=resumed), trainer.progress.best.anew
        if not resumed:
            metrics.log_held_out(ready.accelerator, base.mean(), 0)
            metrics.show(ready.accelerator, folder, 0, *["before"] * (not anew))
        trainer.progress.base = base.looks
        trainer.extensions.on_base(base, measured)
        trainer.train(folder, measured)
        with endings.evaluating(trainer, folder, "last"):
            summary = held_out.finish(trainer, measured, folder, base, ready.began, resumed)
        if not anew and not (config.eval.every and trainer.epoch % config.eval.every == 0):  # else sent already
            metrics.log_held_out(ready.accelerator, summary["after"], trainer.epoch)
        trained = summary.get("trained", {"said": []})
        changes_nothing = trained.get("nothing", False)
        if trainer.processes.first and not changes_nothing:
            endings.export_for_comfyui(config, folder, policy)
        metrics.show(ready.accelerator, folder, trainer.epoch, *["before"] * anew, "after", "best", "worst")
        # The first process has written everything, and every process knows whether nothing was trained.
        return summary | {"trained": trained | {"nothing": trainer.processes.any(changes_nothing)}}


def align(model: Any = OMITTED, rewards: Rewards | Omitted = OMITTED, prompts: Prompts | Omitted = OMITTED,
          method: str | Method | Omitted = OMITTED, resume: bool | Literal["auto"] = False, *,
          recipe: str | Path | None = None, trust: bool = False, **options: Unpack[Options]) -> Summary:
    """Align `model` to `rewards` on `prompts`: `flowgrpo train` from Python.

    model: `starter`, a directory, a hub id, a loaded diffusers pipeline, or a loaded language model with its tokenizer
        or processor, as a tuple.
    rewards: a name, a function `reward(images, prompts, metadata) -> floats`, or a dictionary of these to weights or
        rules (functions under their own names).
    prompts: a file, or a list of texts or of dictionaries with the keys of a .jsonl file, such as
        {"prompt": "a red star", "metadata": {"count": 1}}. A Dataset of torch or of `datasets` of such rows is a list.
    method: presets joined by +, FILE.py:NAME, or a `flowgrpo.methods.Method`, whose parts config.yaml records: the
        nearest preset and what differs. A class that is in no file has to be given again, as for `resume`.
    recipe: a YAML file or a packaged name, such as "starter": the base, of which all other arguments change keys.
        Without it a model is needed, and the others are `scene_graded`, `starter` and `mix_grpo`, of a language
        model `grpo`.
    trust: let a recipe that is not yours execute code, read keys, reach addresses and write elsewhere, and any recipe
        send keys to its addresses.
    resume: resume from the last checkpoint of the run of that `name`; the other arguments are given again. "auto":
        begin if there is no such run.
    options: configuration keys, sections as dictionaries, such as `train={"epochs": 50}`.

    Returns the run's summary, the content of `summary.json`, with `metrics()`, a pandas DataFrame. A loaded model then
    has the run's LoRA (adapter "default"), in eval mode: it samples the result. A next `align` on it takes that LoRA
    off and begins with the base; `pipe.unload_lora_weights()` does so too, and `pipe.fuse_lora()` before it keeps what
    was learned. With adapter.rank 0 the weights themselves have changed. If the run fails, a loaded model is left
    without the LoRA. For other commands, the run's config.yaml names the folder or hub id that a model was loaded from,
    and FILE.py:NAME of a function at the top level of a file. A list of prompts is saved in the run's prompts.jsonl.
    A FILE.py that has changed since an earlier `align` is imported again.
    """
    require_versions()
    if not isinstance(prompts, (Omitted, str, Path, list, tuple, dict)) and hasattr(prompts, "__getitem__"):
        prompts = [prompts[row] for row in range(len(prompts))]
    with command():
        config, functions = build_config(model, rewards, prompts, method, recipe, options, trust)
        pipe = None if model is OMITTED or isinstance(model, (str, Path)) else build.drivable(model)
        records = None if prompts is OMITTED or isinstance(prompts, (str, Path)) else of_records(prompts)
        silence()
        config = announcement.announce(config, pipe)
        return Summary(run(config, resume, pipe=pipe, functions=functions, prompts=records), config.folder)

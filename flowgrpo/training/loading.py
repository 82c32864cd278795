"""Loading of a run's model, the lines that tell of it, and hints on what makes a run slow, which do not stop it."""

import gc
import time
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, cast

import torch

from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import bf16_speed
from flowgrpo.errors import UserError
from flowgrpo.log import bar
from flowgrpo.methods.method import Method
from flowgrpo.methods.setup import Setup
from flowgrpo.methods.targets import NoisedFinals, RecordedPairs
from flowgrpo.methods.validate import describe_substitutes
from flowgrpo.policies import build
from flowgrpo.policies.pipelines import encoded_prompts, few_steps, padding
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.policy import Policy
from flowgrpo.policies.weights.low_precision import notice
from flowgrpo.starter import FOLDERS
from flowgrpo.training import announcement


def machine_hints(precision: str, device: str | torch.device) -> Iterator[str]:
    """Hints on a run's use of a CPU; none on another device. precision: as the recipe asks for, `auto` included."""
    if torch.device(device).type == "cpu" and precision == "bf16" and (speed := bf16_speed()) < 1:
        yield (f"hint: this CPU has no bf16 arithmetic, and multiplies it {speed:.2g} times as fast as fp32: "
               "--precision=fp32")


def few_step_hints(config: Config, method: Method, pipe: Any) -> Iterator[str]:
    """Yield hints on a model of few steps: on default steps or guidance, where only the loaded model shows what it is,
    and on a method that blurs such models."""
    facts = few_steps.of_pipe(pipe, config.model, config.load)
    if (why := facts.why) is None:
        return
    fitting = few_steps.few_step_config(config, facts)
    left = [f"--{key}={value:g}" for key in ("train.steps", "train.guidance", "eval.steps", "eval.guidance")
            if (value := attrgetter(key)(fitting)) != attrgetter(key)(config)]
    if left:
        yield (f"hint: {config.model} is taken for a model of few steps ({why}), whose steps and guidance are not "
               f"those of other models: {' '.join(left)}, or those of its card")
    if isinstance(method.target, (NoisedFinals, RecordedPairs)):
        yield (f"hint: {config.method} trains on noised samples, which blurs a model of few steps ({why}): take "
               f"--method={facts.method}, which trains the model's own steps, or set a limit: docs/reward_hacking.md")


def load(setup: Setup) -> Any:
    """Load the model of a run; the first process prints what and how long."""
    config, first, start = setup.config, setup.first, time.monotonic()
    if first:
        print(f"loading {config.model} ...", flush=True)
    encoded = build.skips_text_encoders(config, setup.prompts)
    if config.memory.encoders == "ahead" and not encoded:
        _encode_ahead(setup)
        encoded = True
    loaded = build.load(config, encoders=not encoded)
    if first and encoded:
        print(f"text encoders are not loaded: all prompts are encoded in {config.cache}", flush=True)
    if first:
        print(f"loaded in {time.monotonic() - start:.1f} s: {announcement.describe_model(loaded)}"
              + announcement.SAFETY * build.has_checker(config), flush=True)
    return loaded


def _encode_ahead(setup: Setup) -> None:
    """Encode all prompts of a run into its cache by text encoders alone, which are then released.
    They are on the run's device, or on the CPU where they do not fit. Raises UserError for several processes."""
    config = setup.config
    if setup.all_processes > 1:
        raise UserError(f"memory.encoders is ahead, and {setup.all_processes} processes have prompts that are not in "
                        f"{config.cache}: `flowgrpo prompts encode` with the same recipe first")
    def fill(device: str | torch.device) -> encoded_prompts.Filled:
        return encoded_prompts.fill(config, setup.prompts, torch.device(device),
                                    lambda rows: bar(rows, title="encoding", unit="prompt"))

    try:
        filled = fill(setup.device)
    except torch.OutOfMemoryError:
        print("text encoders do not fit the device: prompts are encoded on the CPU", flush=True)
        filled = fill("cpu")
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print(f"encoded {filled.new:,} of {filled.prompts:,} prompts in {filled.folder}", flush=True)


def lines_after_loading(config: Config, method: Method, policy: Policy, prompts: list[Prompt]) -> Iterator[str]:
    """Yield the lines on what a loaded model does otherwise than the recipe says."""
    if line := describe_substitutes(config, method):
        yield line
    preview = method.rollout.preview
    if preview and (line := notice(preview.precision, policy.device)):
        yield line
    if method.for_tokens and config.text.template is None and config.model not in FOLDERS:
        reader = getattr(policy, "processor", None) or cast(Any, policy).tokenizer
        if not getattr(reader, "chat_template", None):
            yield ("the tokenizer has no chat template, so prompts stay as they are: an instruct model needs its own "
                   "(chat_template.jinja in its folder); text.template: false leaves this line out")
    if isinstance(policy, PipelinePolicy):
        yield from few_step_hints(config, method, policy.pipe)
        if line := padding.cut(policy.pipe, config.call, [prompt.text for prompt in prompts]):
            yield line

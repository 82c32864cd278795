"""First lines of a run, printed before torch or a model is loaded."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowgrpo.config.schema import Config
from flowgrpo.nouns import quantity
from flowgrpo.starter import FOLDERS
from flowgrpo.version import __version__

SAFETY = "; its safety checker is off in training and evaluation, where a blackened image would be scored"


def announce(config: Config, pipe: Any = None) -> Config:
    """Print what a run does and where, once among the processes of a launcher; return it with defaults that fit its
    model. pipe: the model, if it is loaded already."""
    first = int(os.environ.get("RANK", "0")) == 0
    if first:
        print(f"flowgrpo {__version__}, run: {config.folder}; to watch it: flowgrpo report {config.folder} --live",
              flush=True)
    config, told = fit_model(config, pipe)
    if first:
        print(*lines(config, pipe is not None, told), sep="\n", flush=True)
    return config


def fit_model(config: Config, pipe: Any = None) -> tuple[Config, str]:
    """A configuration with defaults that fit its model, and what is to be said of them; empty for nothing."""
    if "method" in config.model_fields_set and {"steps", "guidance"} <= config.eval.model_fields_set:
        return config, ""
    from flowgrpo.policies import options  # loads torch

    return options.fitting(config, pipe)


def lines(config: Config, loaded: bool = False, told: str = "") -> Iterator[str]:
    """The lines that say what a run does, after the first one."""
    place = "loaded already" if loaded else origin(config.model)
    yield f"model: {config.model} ({place})" + (f"; {told}" if told else "")
    yield f"method: {config.method}" + (f", parts: {config.parts}" if config.parts else "")
    rewards = ", ".join(f"{name} ({rule.strength})" for name, rule in config.trained.items())
    measured = ", ".join(name for name in config.extra_rewards if name not in config.rewards)
    yield f"rewards: {rewards}" + (f"; eval-only: {measured}" if measured else "")
    train = config.train
    yield (f"prompts: {config.prompts}; {quantity(train.epochs, 'epoch')} of {quantity(train.prompts, 'prompt')} with "
           f"{quantity(train.group, 'sample')}" + " each" * (train.prompts != 1))


def origin(model: str) -> str:
    if model in FOLDERS:
        return "packaged"
    if Path(model).is_file():
        return "a file here"
    return "a folder here" if Path(model).is_dir() else "from the hub, or its cache here"


def describe_model(loaded: Any) -> str:
    parts = [loaded[0]] if isinstance(loaded, tuple) else [part for part in loaded.components.values()
                                                           if hasattr(part, "parameters")]
    count = sum(parameter.numel() for part in parts for parameter in part.parameters())
    name = type(parts[0] if isinstance(loaded, tuple) else loaded).__name__
    checked = getattr(loaded, "safety_checker", None) is not None
    return f"{name}, {count / 1e6:,.3g} million parameters" + SAFETY * checked

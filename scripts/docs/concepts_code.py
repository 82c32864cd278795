"""Write the code of the training loop into docs/concepts/index.md.

    python scripts/docs/concepts_code.py

A block that begins with a line such as `# flowgrpo/train.py: Trainer.run_epoch` gets that function's source; the one
under "An image's way" gets the functions of WAY, each with its file and line.
"""

import functools
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "index.md"
BLOCK = re.compile(r"```python\n# (flowgrpo/[\w/]+)\.py: ([\w.]+)\n.*?```", re.S)
WAY_BLOCK = re.compile(r"(## An image's way\n.*?```text\n).*?(?=```)", re.S)
# Functions from the command to the optimizer, in the order in which an epoch of `starter` first calls them.
WAY = (
    ("flowgrpo.cli.train:train", "the recipe and the options become a configuration"),
    ("flowgrpo.run:run", "checks, model, first measurement"),
    ("flowgrpo.train:Trainer.run_epoch", "one epoch"),
    ("flowgrpo.training.sampling:draw", "prompts, then groups of samples with scores"),
    ("flowgrpo.rollouts.denoising:DenoisingRollouts.conditioning", "prompts are encoded once and cached"),
    ("flowgrpo.rollouts.denoising:DenoisingRollouts.sample", "the group of a prompt, in micro-batches"),
    ("flowgrpo.samplers.growth:explore", "plan: which steps are SDE steps, where branches begin"),
    ("flowgrpo.policies.pipelines.pipeline:PipelinePolicy.run", "a segment of steps by the pipeline"),
    ("flowgrpo.policies.pipelines.call:PipelineCall.__call__", "the pipeline's own __call__"),
    ("flowgrpo.samplers.scheduler:PolicyScheduler.step", "model output to next state, recorded"),
    ("flowgrpo.rollouts.denoising:DenoisingRollouts.decode", "final latents to images"),
    ("flowgrpo.training.credit:compare", "rewards to advantages"),
    ("flowgrpo.advantages.group:Advantage.__call__", "reward minus the mean of its group, over the std"),
    ("flowgrpo.train:Trainer.learn", "the update of an epoch"),
    ("flowgrpo.train:Trainer.gradient", "one optimizer step, micro-batch by micro-batch"),
    ("flowgrpo.train:Trainer.backward", "replay, log-ratio, loss, gradient"),
    ("flowgrpo.objectives.surrogates:ClippedSurrogate.__call__", "clipped ratio times advantage"),
    ("flowgrpo.objectives.reductions:reduce_loss", "weighted sum over all decisions of the step"),
    ("flowgrpo.training.optimizer:Optimization.step", "clip the gradient, AdamW"))


def locate(place: str) -> Any:
    """Object of MODULE:NAME, a function or a method."""
    module, _, names = place.partition(":")
    return functools.reduce(getattr, names.split("."), importlib.import_module(module))


def way() -> str:
    """A line per function of WAY: its file and line, its name, and what it does."""
    lines = []
    for place, does in WAY:
        module, _, name = place.partition(":")
        at = inspect.getsourcelines(inspect.unwrap(locate(place)))[1]
        file = f"{module.removeprefix('flowgrpo.').replace('.', '/')}.py:{at}"
        lines.append(f"{file:<36}{name:<32}{does}")
    return "".join(f"{line}\n" for line in lines)


def written(page: str) -> str:
    """Return the page with the present source in each of its blocks."""
    def block(match: re.Match[str]) -> str:
        source = textwrap.dedent(inspect.getsource(locate(f"{match[1].replace('/', '.')}:{match[2]}"))).rstrip()
        return f"```python\n# {match[1]}.py: {match[2]}\n{source}\n```"

    return WAY_BLOCK.sub(lambda match: match[1] + way(), BLOCK.sub(block, page))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

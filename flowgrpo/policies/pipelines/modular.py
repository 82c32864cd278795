"""ModularPipelines of diffusers, called as its other pipelines are.

    encode_prompt: the block that reads the text -> the blocks of the loop -> the block that decodes

A pipeline's blocks read its `scheduler` and its denoisers, by which call.py drives any pipeline. `drivable` gives a
loaded one a class with `__call__`, whose arguments are those of its blocks, and `encode_prompt`, the block of that name
with the state of the blocks before it.
"""

import functools
import inspect
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flowgrpo.config.sections import Load
from flowgrpo.errors import UserError
from flowgrpo.policies.sources import INDICES
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.storage import atomic

TEXT, PROMPT, DECODE = "text_encoder", "prompt", "decode"  # names of blocks, or how they begin
SOUND = "audio"  # an output beside the clips
COUNT = "batch_size"  # an output of text encoders' blocks: the number of prompts


def class_of(name: str | None) -> Any:
    """Return the class of a pipeline of diffusers, that of a ModularPipeline with its blocks' arguments; None for an
    unknown name."""
    import diffusers

    cls: Any = getattr(diffusers, str(name), None)
    blocks: Any = blocks_of(cls)
    return cls if blocks is None else _kind(cls, blocks.__class__)


def blocks_of(cls: Any) -> Any:
    """Return the blocks of a ModularPipeline's class; None for another class."""
    import diffusers

    made = getattr(diffusers, getattr(cls, "default_blocks_name", None) or "", None)
    return made and made()


def drivable(pipe: Any) -> Any:
    """Return a ModularPipeline that can be driven as a pipeline is, with gradients through its blocks where enabled;
    one that is so already as it is. A user's call of it stays that of diffusers."""
    if "_steps" in vars(pipe):
        return pipe
    logging.getLogger("diffusers.modular_pipelines.modular_pipeline").setLevel(logging.CRITICAL)  # tells every error
    stock: Any = type(pipe)
    blocks: Any = type(pipe._blocks)
    pipe.__class__ = _kind(stock, blocks)
    vars(pipe)["_inputs"], vars(pipe)["_steps"] = pipe._blocks.inputs, [*_steps(pipe._blocks)]
    for block in _tree(pipe._blocks):
        cls: Any = type(block)
        block.__class__ = type(cls.__name__, (cls,), {"__call__": inspect.unwrap(cls.__call__),
                                                      "__module__": cls.__module__})
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)
    return pipe


def of_parts(cls: Any, parts: Mapping[str, Any]) -> Any:
    """Return a drivable ModularPipeline of a class, with those of the parts that its blocks name."""
    pipe = cls()
    pipe.update_components(**{name: part for name, part in parts.items()
                              if part is not None and name in pipe._component_specs})
    return drivable(pipe)


def load(source: str, dtype: torch.dtype, trust: bool, files: Load, parts: Mapping[str, Any], lower: Mapping[str, Any]
         ) -> Any:
    """Load a ModularPipeline from a folder or the hub. Code of its repository is run only if it is trusted. parts:
    components that are loaded already, or None. lower: how components are quantised, by name."""
    from diffusers import ModularPipeline

    pipe = ModularPipeline.from_pretrained(source, trust_remote_code=trust, revision=files.revision)
    given = {name: part for name, part in parts.items() if name in pipe._component_specs}
    unread = {part.name for block in rewriting(pipe._blocks).values() for part in block.expected_components} - {
        part.name for place, block in pipe._blocks.sub_blocks.items() if not place.startswith(PROMPT)
        for part in block.expected_components}
    for name in pipe.pretrained_component_names:
        spec = pipe._component_specs[name]
        if name not in given and name not in unread and spec.pretrained_model_name_or_path is not None:
            own = spec.pretrained_model_name_or_path == source
            options: dict[str, Any] = {"trust_remote_code": True} if trust and own else {}
            options |= {"quantization_config": lower[name]} if name in lower else {}
            options |= {"variant": files.variant} if files.variant else {}
            given[name] = spec.load(dtype=dtype, **options)
    pipe.register_components(**given)
    return drivable(pipe)


def save(pipe: Any, folder: Path, place: Path) -> None:
    """Write a pipeline into a folder that is moved to `place`, which the index of a ModularPipeline names."""
    if not hasattr(pipe, "_component_specs"):
        pipe.save_pretrained(folder, safe_serialization=True)
        return
    pipe.save_pretrained(str(folder), overwrite_modular_index=True)
    now, then = (json.dumps(str(path))[1:-1] for path in (folder, place.resolve()))
    index = folder / INDICES[1]
    atomic.write_text(index, index.read_text(encoding="utf-8").replace(now, then))


def rewriting(blocks: Any) -> dict[str, Any]:
    """Return the blocks that rewrite a prompt, by name: their models are not loaded, and prompts stay as they are."""
    return {place: block for place, block in blocks.sub_blocks.items() if place.startswith(PROMPT)}


def _tree(block: Any) -> Iterator[Any]:
    yield block
    for part in block.sub_blocks.values():
        yield from _tree(part)


def _steps(blocks: Any) -> Iterator[tuple[Any, str]]:
    """Yield the blocks of a call in order, with TEXT where it is read by encoders, and DECODE for the last."""
    from diffusers.modular_pipelines import SequentialPipelineBlocks

    sequence: Any = SequentialPipelineBlocks
    for name, block in blocks.sub_blocks.items():
        if name == TEXT and isinstance(block, sequence):
            yield from ((part, TEXT if part.component_names else "") for part in block.sub_blocks.values())
        else:
            yield block, name


def _read(block: Any) -> list[Any]:
    """Return the outputs of a text encoder's block that are kept of a prompt."""
    return [param for param in block.intermediate_outputs if param.name != COUNT]


@functools.cache
def _kind(stock: Any, blocks: Any) -> type:
    """Subclass of a ModularPipeline's class whose call has the arguments of these blocks. Raises UserError for blocks
    that step with several schedulers."""
    from diffusers.modular_pipelines import PipelineState

    def run(self: Any, **given: Any) -> tuple[Any, ...]:
        state, output = PipelineState(), given.get("output_type")
        for param in self._inputs:
            if param.name is not None:
                state.set(param.name, given.get(param.name, param.default), param.kwargs_type)
        for block, place in self._steps:
            if place.startswith(PROMPT) and all(getattr(self, part) is None for part in block.component_names):
                continue  # a model that rewrites prompts, which is not there
            if place.startswith((TEXT, PROMPT)):
                for param, value in zip(_read(block), self.encode_prompt(block, state), strict=True):
                    state.set(param.name, value, param.kwargs_type)
                state.set(COUNT, len(given["prompt"]) if isinstance(given["prompt"], list) else 1)
            elif place == DECODE and output == "latent":
                return (state.get("latents"),)
            else:
                block(self, state)
        made = state.get(self._blocks.outputs[0].name)
        return (made,) if (sound := state.get(SOUND)) is None else (made, sound)

    def encode_prompt(self: Any, block: Any, state: Any) -> tuple[Any, ...]:
        inside = PipelineState(dict(state.values), {kind: list(names) for kind, names in state.kwargs_mapping.items()})
        block(self, inside)
        return tuple(inside.get(param.name) for param in _read(block))

    made = blocks()
    schedulers = [part.name for part in made.expected_components if part.name.endswith("scheduler")]
    if len(schedulers) > 1:
        raise UserError(f"{stock.__name__} steps with {' and '.join(schedulers)}: in one step parts of its state, such "
                        "as images and sound, have noise levels of their own, and a transition here has one")
    # Some loops have to give the output of their last step, and some unpack the state that the scheduler sees.
    body: dict[str, Any] = {"needs_step": True, "register_modules": stock.register_components,
                            "__module__": stock.__module__,
                            "set_progress_bar_config": lambda self, **_: None}  # `drivable` has switched them off
    if TEXT in made.sub_blocks:
        body["encode_prompt"] = torch.no_grad()(encode_prompt)
    # Left out are inputs that start a loop in its middle, from a noisy image, for which there are pipelines of their
    # own: `strength`, and what no other workflow of the blocks reads.
    workflows = getattr(made, "_workflow_map", None) or {}
    with_strength = {name for name in workflows if "strength" in made.get_workflow(name).input_names}
    kept = {key for name, keys in workflows.items() if name not in with_strength for key in keys}
    left_out = {"strength"} | {key for name in with_strength for key in workflows[name]} - kept
    keyword, none = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    parameters = {param.name: inspect.Parameter(param.name, keyword, default=none if param.required else param.default)
                  for param in made.inputs if param.name and param.name not in left_out}
    setattr(run, "__signature__", inspect.Signature([inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
                                                     *parameters.values()]))

    @functools.wraps(run)  # which is what is driven
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return stock.__call__(self, *args, **kwargs)

    return type(stock.__name__, (stock,), body | {"__call__": call})


# --- guiders ---------------------------------------------------------------------------------------------------------

MOMENTUM = "momentum"  # in the names of what a guider keeps from step to step


def guiders(pipe: Any) -> list[Any]:
    """Return the guidance that is a part of a pipeline's own: objects with a scale and a state."""
    return [part for part in pipe.components.values() if hasattr(part, "guidance_scale") and hasattr(part, "set_state")]


@contextmanager
def guided(parts: list[Any], scale: float, task: Segment | None, idle: int) -> Iterator[None]:
    """Context manager: guiders have this scale, are off at 0, and know which step of the whole grid a task's step is.
    Momentum is off in tasks: a replay of a step does not know the steps before it."""
    before = [dict(vars(part)) for part in parts]
    for part in parts:
        part.guidance_scale, part._enabled = scale, bool(scale)
        if task is not None:
            vars(part).update({name: None for name in vars(part) if MOMENTUM in name})
            vars(part)["set_state"] = lambda step, num_inference_steps, timestep, stock=part.set_state: stock(
                step=task.steps.start + max(step - idle, 0), num_inference_steps=len(task.grid) - 1, timestep=timestep)
    try:
        yield
    finally:
        for part, kept in zip(parts, before, strict=True):
            vars(part).clear()
            vars(part).update(kept)

"""Parts of a rollout as tensors and JSON values, for a checkpoint that is made before they are trained."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor

from flowgrpo import types
from flowgrpo.rollouts.base import GroupSampler
from flowgrpo.samplers.rollout import Part
from flowgrpo.storage.checkpoint import Tensors

KINDS = {kind.__name__: kind for kind in (types.Transitions, types.Completions, types.Traces, types.Segmented)}


def tensors_of(taken: Any) -> Tensors:
    """Return the tensors of a record, on the CPU, by field; those of its score under `old.`."""
    values = {field.name: getattr(taken, field.name) for field in fields(taken) if field.name != "old"}
    values |= {f"old.{field.name}": getattr(taken.old, field.name) for field in fields(taken.old)}
    return {name: value.detach().cpu() for name, value in values.items() if isinstance(value, Tensor)}


def record_of(kind: str, step: int, given: Tensors) -> Any:
    """Return a record of its tensors."""
    old = types.Scored(**{name.removeprefix("old."): value for name, value in given.items() if name.startswith("old.")})
    rest: dict[str, Any] = {name: value for name, value in given.items() if not name.startswith("old.")}
    return KINDS[kind](**rest | ({"step": step} if kind == "Transitions" else {}), old=old)


def stored(part: Part) -> tuple[Tensors, dict[str, Any]]:
    """Return the (tensors, values) of a sampled part, which has no advantages yet."""
    single = {"prompts": part.prompts} | ({} if part.seeds is None else {"seeds": part.seeds}) | part.measured
    tensors = {name: value.cpu().clone() for name, value in single.items()}
    tensors |= {f"final.{place}": final.cpu().clone() for place, final in enumerate(part.finals)}
    for place, taken in enumerate(part.transitions):
        tensors |= {f"{place}.{name}": value.clone() for name, value in tensors_of(taken).items()}
    steps = [[type(taken).__name__, taken.step] for taken in part.transitions]
    return tensors, {"groups": [part.groups.start, part.groups.stop], "steps": steps, "finals": len(part.finals)}


def restored(tensors: Tensors, values: dict[str, Any], rollouts: GroupSampler[Any], epoch: int) -> Part:
    """Return the part of `stored`. epoch: the one that drew it."""
    transitions = tuple(record_of(kind, step, within(tensors, f"{place}."))
                        for place, (kind, step) in enumerate(values["steps"]))
    specs = rollouts.explorations(epoch)
    measured = {name: value for name, value in tensors.items() if "." not in name}  # others are of a step or a final
    return Part(range(*values["groups"]), measured.pop("prompts"), specs[0] if specs else None, transitions,
                tuple(tensors[f"final.{place}"] for place in range(values["finals"])),
                seeds=measured.pop("seeds", None), measured=measured)


def within(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

"""Forms of LoRA files, and proof that what a file holds is what a pipeline got: one reader for all commands.

Loaders of diffusers read many forms and drop in silence what they do not know: a kohya file's DoRA, an alpha that some
layers lack, layers of a part that the pipeline does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.files import tensors_of
from flowgrpo.nouns import counted
from flowgrpo.policies.weights import finite

SIDE = re.compile(r"^(?P<layer>.+?)(?:[._]lora\w*?)?[._](?P<side>A|B|down|up)(?:\.\w+)?\.weight$")
KOHYA, PEFT = "lora_", "base_model.model."  # beginnings of layers' names
ALPHA, MAGNITUDE, SCALES = ".alpha", ".lora_magnitude_vector", ".dora_scale"
# Tensors of other kinds of adapters, by a part of their names.
OTHERS = {".hada_": "LoHa", ".lokr_": "LoKr", ".oft_": "OFT", ".boft_": "BOFT", ".lora_mid": "LoCon with lora_mid",
          ".on_input": "IA3", ".diff_b": "difference of whole weights", ".diff": "difference of whole weights",
          ".lora_B.bias": "LoRA with biases", ".lora_up.bias": "LoRA with biases", ".b1.weight": "GLoRA",
          "emb_params": "textual inversion", "string_to_param": "textual inversion"}
WITHIN = 1e-2  # relative, of |B A|^2 where A and B were rounded to bf16: four times its unit roundoff of 2^-9


@dataclass
class Held:
    """LoRA of one file or of several: its tensors, and what its layers change.

    sizes: of each layer, the squared norm of scale * B A; without the scale where metadata state it. described: whether
    they do. magnitudes: of a DoRA, the sum of squares. changed: tensors differ from the file's.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    magnitudes: float = 0.0
    described: bool = False
    changed: bool = False


def read(path: Path) -> Held:
    """Read a LoRA's file.

    A layer without an alpha has the scale 1, as in kohya's scripts, also where others have one. Where alphas differ,
    or stand beside peft's names, they are multiplied into the weights: diffusers mixes them up, or refuses them. A file
    of kohya's without alphas gets those of the scale 1.

    Raises UserError for another kind of adapter, a DoRA of kohya's form, a layer without one of its sides, and for
    values that are not finite.
    """
    tensors, metadata = tensors_of(path)
    _require_kind(path, tensors)
    finite.require_file(path, tensors)
    held = Held(dict(tensors), described="lora_adapter_metadata" in metadata or _of_peft(path))
    sides: dict[str, dict[str, str]] = {}
    for key in tensors:
        if match := SIDE.match(key):
            sides.setdefault(match["layer"], {})["down" if match["side"] in ("A", "down") else "up"] = key
    scales: dict[str, float] = {}
    for layer, of in sides.items():
        if len(of) < 2:
            raise UserError(f"{path}: the layer {layer} lacks one of its sides: expected both sides of every layer")
        rank, alpha = tensors[of["down"]].shape[0], tensors.get(layer + ALPHA)
        scales[layer] = 1.0 if held.described or alpha is None else float(alpha) / rank
        held.sizes[layer] = scales[layer]**2 * _size(tensors[of["down"]], tensors[of["up"]])
    alphas = {float(tensors[layer + ALPHA]) if layer + ALPHA in tensors else None for layer in sides}
    peft = any(".lora_B" in of["up"] for of in sides.values())  # beside its names diffusers reads no alpha
    if not held.described and (len(alphas) > 1 or peft and alphas != {None}):
        held.changed = True
        for layer, of in sides.items():
            up = tensors[of["up"]]
            held.tensors[of["up"]] = up if scales[layer] == 1 else up.float() * scales[layer]
            held.tensors.pop(layer + ALPHA, None)
    if lacking := {layer: of for layer, of in sides.items() if ".lora_down." in of["down"]
                   and layer.startswith(KOHYA) and layer + ALPHA not in held.tensors}:
        held.changed = True  # some of diffusers' converters read no file of kohya's without it
        held.tensors |= {layer + ALPHA: torch.tensor(float(tensors[of["down"]].shape[0]))
                         for layer, of in lacking.items()}
    held.magnitudes = sum(float(value.double().square().sum()) for key, value in tensors.items() if MAGNITUDE in key)
    return held


def join(files: list[Held]) -> Held:
    """Return one record of several files, which are a folder's."""
    if len(files) == 1:
        return files[0]
    sizes = {f"{number}.{layer}": size for number, held in enumerate(files) for layer, size in held.sizes.items()}
    return Held({}, sizes, sum(held.magnitudes for held in files), all(held.described for held in files))


def _of_peft(path: Path) -> bool:
    return (path.parent / "adapter_config.json").is_file() and path.name == "adapter_model.safetensors"


def _require_kind(path: Path, tensors: Iterable[str]) -> None:
    """Raise UserError for an adapter that is no LoRA, in whole or in part."""
    keys = list(tensors)
    layers = {match["layer"] for key in keys if (match := SIDE.match(key))}
    for mark, kind in OTHERS.items():
        if other := {key.partition(mark)[0] for key in keys if mark in key}:
            of = f" in {len(other)} of its {counted(len(layers | other), 'layer')}" if layers - other else ""
            raise UserError(f"{path} holds a {kind}{of}, which is not read: expected a LoRA, or a DoRA in the form of "
                            "peft or diffusers; merge it into the model with the tool that made it")
    if scales := [key for key in keys if key.endswith(SCALES)]:
        raise UserError(f"{path} holds a DoRA in kohya's form ({counted(len(scales), 'layer')} with dora_scale), "
                        "whose lengths "
                        "diffusers drops: convert it to peft's form (lora_magnitude_vector), or merge it into the "
                        "model with the tool that made it")


def _size(down: Tensor, up: Tensor) -> float:
    """Return the squared norm of B A, without making it. down: [r, ...], up: [out, r, ...]."""
    a, b = down.reshape(down.shape[0], -1).double(), up.reshape(up.shape[0], -1).double()
    if b.shape[1] != a.shape[0]:  # convolutions whose up side has a kernel
        return float(a.square().sum() * b.square().sum())
    return float(((b.T @ b) * (a @ a.T)).sum())


def require_applied(path: Path, held: Held, pipe: Any, parts: dict[str, torch.nn.Module], adapter: str) -> str:
    """Return how many layers of which parts a loaded LoRA changes, in words.

    held: what its files hold. parts: modules of the pipeline, by name. Raises UserError where that is not all that the
    files hold: a loader splits a layer of several projections, but the squared norms of all changes have one sum.
    """
    from peft.tuners.lora import LoraLayer

    counts: dict[str, int] = {}
    sizes, magnitudes, ranks, scales = [], 0.0, set(), set()
    for name, part in parts.items():
        for layer in part.modules():
            if not isinstance(layer, LoraLayer) or adapter not in layer.lora_A:
                continue
            magnitude: Any = layer.lora_magnitude_vector
            scale = layer.scaling[adapter]
            counts[name] = counts.get(name, 0) + 1
            ranks.add(layer.r[adapter])
            scales.add(scale)
            matrices: Any = layer.lora_A, layer.lora_B
            down, up = (sides[adapter].weight.data for sides in matrices)
            sizes.append((1.0 if held.described else scale**2) * _size(down, up))
            if adapter in magnitude:
                magnitudes += float(magnitude[adapter].weight.detach().double().square().sum())
    if not counts:
        raise UserError(f"{path} holds no LoRA layer for {type(pipe).__name__}: {doubt(held)}")
    _require_all(path, held, type(pipe).__name__, sizes, sum(counts.values()))
    if not _near(magnitudes, held.magnitudes, WITHIN):
        raise UserError(f"{path}: the lengths of its DoRA do not reach {type(pipe).__name__} as they are: convert it "
                        "with a current diffusers, or merge it into the model")
    of = ", ".join(f"{counted(count, 'layer')} of the {name}" for name, count in counts.items())
    return f"{path}: {'DoRA' if magnitudes else 'LoRA'} applied to {of}, rank {_range(ranks)}, scale {_range(scales)}"


def doubt(held: Held) -> str:
    """Return why none of a LoRA's layers may have been found, by the form of their names."""
    if held.sizes and all(layer.startswith(PEFT) for layer in held.sizes):
        return "its names are peft's: expected its adapter_config.json beside it, or a LoRA of this model"
    if held.sizes and all(layer.startswith(KOHYA) for layer in held.sizes):
        return ("its names are kohya's, which diffusers does not read for every model: convert it to diffusers' names; "
                "or was it trained on another model?")
    return "was it trained on another model?"


def _require_all(path: Path, held: Held, model: str, sizes: list[float], count: int) -> None:
    """Raise UserError where the sizes of loaded layers are not those of the files' layers."""
    total = sum(held.sizes.values())
    if count >= len(held.sizes) and _near(sum(sizes), total, WITHIN):
        return
    left = {layer: size for layer, size in held.sizes.items() if not any(_near(size, other, 0.02) for other in sizes)}
    if count < len(held.sizes) and not left:  # layers that change nothing
        left = dict(list(held.sizes.items())[count:])
    some = next(iter(left or held.sizes))
    raise UserError(f"{path}: {len(held.sizes) - len(left)} of its {counted(len(held.sizes), 'layer')} are applied "
                    f"to {model}, "
                    f"and {len(left) or 'some'} are not, or at another scale, such as {some}: expected a LoRA of this "
                    "model, without parts that it lacks")


def _near(one: float, other: float, within: float) -> bool:
    return abs(one - other) <= within * max(abs(one), abs(other)) + 1e-12


def _range(values: set[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"

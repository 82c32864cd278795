"""Encoded prompts, kept: every prompt is encoded once per run, or once for all runs that share a folder.

They wait in the CPU's memory, those read last up to LIMIT bytes, or in the folder alone. Only those of a batch are on
the device.

Prompts are encoded one at a time, so that the values do not depend on which prompts happened to be drawn together; a
resumed run, or one with another batch, sees the same numbers. Prompts of different lengths are kept apart: a call for
rows of one length is the pipeline's own call for that prompt, and padding is added where a call mixes lengths.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils._pytree import tree_map_only

from flowgrpo.data.images import Clip
from flowgrpo.data.inputs import Inputs
from flowgrpo.device import to_device
from flowgrpo.errors import UserError
from flowgrpo.policies.pipelines import padding
from flowgrpo.policies.pipelines.prompt_inputs import SHARED, Pictured, images_of
from flowgrpo.storage import atomic, paths

Size = tuple[int, int]  # height and width of an image, in pixels
Brought = str | Inputs | None  # beside a prompt's text
LIMIT = 8 * 2**30  # bytes of encoded prompts in the CPU's memory


@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts: what the pipeline's `encode_prompt` returned, call by call, and the images that go with them.

    calls: the values of each call, in order (with true CFG the negative prompts are encoded by a call of their own).
    per_prompt: which of these values have a row per prompt; the others (None, Flux's `text_ids`) serve all prompts.
    inputs: what prompts bring beside their text by the name of the pipeline's argument, one per prompt; several
    images of one prompt are a list.
    one_per_call: the pipeline takes one prompt per call; then every value is a list of what the prompts' calls
    returned.
    bare: its `encode_prompt` returns one value, and no tuple.
    listed: such a prompt is given as a list of one, since the pipeline would take several.
    parts: of prompts that differ in length, one Conditioning each, in place of `calls`. masks: how they are padded
    (`padding.learn`); None: rows of different lengths need calls of their own.
    sizes: of each prompt's images; empty: of all those of the policy's `call`.
    scales: of each prompt's guidance, where it is sampled at a scale of its own; empty: the policy's.
    pairs: of each prompt the files of its two recorded images, the chosen one first; empty: samples are drawn.
    learned: the same prompts as the loss reads them, for scores of the rollout; None: as these.
    """

    prompts: list[str]
    negatives: list[str]
    calls: tuple[tuple[Any, ...], ...] = ()
    per_prompt: tuple[tuple[bool, ...], ...] = ()
    inputs: dict[str, list[Any]] = field(default_factory=dict)
    one_per_call: bool = False
    bare: bool = False
    listed: bool = False
    parts: tuple[Conditioning, ...] = ()
    masks: padding.Masks | None = None
    sizes: list[Size] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    pairs: list[tuple[str, str]] = field(default_factory=list)
    learned: Conditioning | None = None

    def rows(self, index: torch.Tensor) -> Conditioning:
        """Return the rows `index` (int64 [B]); a row may be taken several times.

        Rows that differ in length are padded, or stay `parts`.
        """
        picked = index.tolist()
        sizes, scales, pairs = ([each[i] for i in picked] if each else [] for each in (
            self.sizes, self.scales, self.pairs))
        if self.parts:
            return replace(concatenate([self.parts[i] for i in picked], self.masks), sizes=sizes, scales=scales,
                           pairs=pairs)
        places: dict[torch.device, torch.Tensor] = {}  # by device: the index is brought to each once

        def select(value: Any) -> Any:
            if not torch.is_tensor(value):
                return [value[i] for i in picked]
            if value.device not in places:
                places[value.device] = index if value.device == index.device else to_device(index, value.device)
            return value[places[value.device]]

        calls = tuple(tuple(select(value) if per_row else value for value, per_row in zip(values, flags, strict=True))
                      for values, flags in zip(self.calls, self.per_prompt, strict=True))
        return replace(self, prompts=select(self.prompts), negatives=select(self.negatives), calls=calls, sizes=sizes,
                       scales=scales, pairs=pairs,
                       inputs={name: select(values) for name, values in self.inputs.items()})

    @cached_property
    def alone(self) -> bool:
        """A call takes one prompt, and no list of prompts."""
        return self.one_per_call and not self.listed

    @cached_property
    def mixed(self) -> bool:
        """Images differ in size. Some pipelines (Flux Kontext) resize all of a call to the first one's."""
        return any(len(set(map(_size, values))) > 1 for name, values in self.inputs.items() if name not in SHARED)

    @cached_property
    def runs(self) -> list[range]:
        """Rows that one call of the pipeline may bring, call by call."""
        count = len(self.prompts)
        if self.one_per_call or self.mixed:
            return [range(row, row + 1) for row in range(count)]
        shapes = [part.shapes() for part in self.parts]
        shared = [[value if isinstance(value, (int, float)) else id(value) for value in self.inputs[name]]
                  for name in SHARED if name in self.inputs]  # scales by their value, images as objects
        cuts = [row for row in range(1, count) if shapes and shapes[row] != shapes[row - 1]
                or any(values[row] != values[row - 1] for values in shared)]
        return [range(start, stop) for start, stop in itertools.pairwise([0, *cuts, count])]

    def arguments(self) -> dict[str, Any]:
        """Return texts, inputs and size of the rows as arguments of one call, clips decoded.

        Raises ValueError for several sizes.
        """
        if len(set(self.sizes)) > 1:
            raise ValueError(f"rows of sizes {sorted(set(self.sizes))} in one call: expected one size")
        given: dict[str, Any] = dict(self.size)
        for name, values in self.inputs.items():
            shown = [value.frames if isinstance(value, Clip) else value for value in values]
            given[name] = shown[0] if self.alone or name in SHARED else shown
        # Copies of the prompts: some pipelines (Z-Image) write into the list.
        given["prompt"] = self.prompts[0] if self.alone else list(self.prompts)
        given["negative_prompt"] = self.negatives[0] if self.alone else list(self.negatives)
        return given

    @property
    def size(self) -> dict[str, int]:
        """Height and width of the first row as arguments of a call; none where all rows have those of every call."""
        return dict(zip(("height", "width"), self.sizes[0])) if self.sizes else {}

    def scale(self, usual: float) -> float:
        """Return the rows' guidance scale: `usual`, or their own. Raises ValueError for several scales."""
        if len(set(self.scales)) > 1:
            raise ValueError(f"rows of guidance scales {sorted(set(self.scales))} in one call: expected one scale")
        return self.scales[0] if self.scales else usual

    def to(self, device: torch.device | str) -> Conditioning:
        return self.map_tensors(lambda tensor: tensor.to(device))

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Conditioning:
        return replace(self, calls=tree_map_only(torch.Tensor, change, self.calls),
                       parts=tuple(part.map_tensors(change) for part in self.parts))

    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """Return the shapes of the values of all calls, in order; None for a value that is no tensor."""
        return tuple(tuple(value.shape) if torch.is_tensor(value) else None for call in self.calls for value in call)


def _size(image: Any) -> Any:
    if isinstance(image, (list, tuple)):
        return tuple(map(_size, image))
    return tuple(image.shape) if hasattr(image, "shape") else getattr(image, "size", None)


class PromptEncoder(Pictured, Protocol):
    """Policy that encodes prompts by its pipeline; call: arguments of every call of it."""

    device: torch.device
    dtype: torch.dtype

    def encode(self, prompts: list[str], negatives: list[str], images: Sequence[Any] | None) -> Conditioning:
        """Encode prompts together; images: of each prompt a reference image, its file, or None."""

    def probe(self, conditioning: Conditioning) -> None:
        """Find out, once, whether the scheduler sees the state that is given as `latents`."""


class PromptCache:
    """policy.encode with a memory, on disk with a `folder`: `encoder(prompts, negatives) -> Conditioning`.

    limit: bytes of the memory. The prompt that was not read for the longest time is dropped first.
    name: of the folder's folder with these prompts, for a policy without text encoders: all have to be there.
    """

    def __init__(self, policy: PromptEncoder, folder: Path | None = None, limit: int = LIMIT, name: str | None = None):
        self.policy, self.limit, self.name = policy, limit, name
        self.folder = folder / (name or fingerprint(policy)) if folder else None
        self._known: OrderedDict[tuple[str, str, Brought], Conditioning] = OrderedDict()
        # By content: what prompts share, a negative one, is there once.
        self._values: WeakValueDictionary[str, torch.Tensor] = WeakValueDictionary()
        self._masks: list[padding.Masks | None] = []  # how the pipeline pads, once prompts have differed in length

    def __call__(self, prompts: list[str], negatives: list[str],
                 images: Sequence[Brought] | None = None) -> Conditioning:
        """images: the file of each prompt's reference image, all that it brings, or None."""
        images = images or [None] * len(prompts)
        parts = [self._one(*row) for row in zip(prompts, negatives, images, strict=True)]
        if len({part.shapes() for part in parts}) > 1 and not self._masks:
            self._masks = [self._padding(parts)]
        conditioning = concatenate(parts, self._masks[0] if self._masks else None, pad=False).to(self.policy.device)
        self.policy.probe(conditioning)
        return conditioning

    def prepare(self, prompts: list[str], negatives: list[str], images: Sequence[Brought]) -> None:
        """Encode prompts into the memory, one after the other, until it is full."""
        rows = [*zip(prompts, negatives, images, strict=True)]
        kept = False
        for row in rows:
            self._one(*row)
            if kept and rows[0] not in self._known:
                return
            kept = rows[0] in self._known

    def fill(self, rows: Iterable[tuple[str, str]]) -> None:
        """Encode prompts with their negative prompts into the folder, and their padding if they differ in length."""
        of_shape: dict[Any, Conditioning] = {}
        for prompt, negative in rows:
            part = self._one(prompt, negative, None)
            of_shape.setdefault(part.shapes(), part)
        if len(of_shape) > 1:
            self._padding(list(of_shape.values()))

    def _padding(self, parts: list[Conditioning]) -> padding.Masks | None:
        """Find out how the pipeline pads prompts of different lengths; of those with images it is not known."""
        if any(part.inputs or part.one_per_call for part in parts):
            return None
        path = self.folder / "padding.json" if self.folder else None
        if path and path.exists():
            return padding.read(path.read_text())
        self._require_encoders(parts[0].prompts[0])
        masks = padding.learn(lambda texts: self.policy.encode(texts, texts, None).to("cpu").calls)
        if path:
            atomic.write_text(path, padding.to_json(masks), shared=True)
        return masks

    def _require_encoders(self, prompt: str) -> None:
        if self.name is not None:
            raise UserError(f"the prompt {prompt[:60]!r} is not in {self.folder}, and the run began without text "
                            "encoders, since all of its prompts were there: run `flowgrpo prompts encode` again")

    def _one(self, prompt: str, negative: str, image: Brought) -> Conditioning:
        """Return the cached or computed conditioning of one prompt, on the CPU."""
        key = prompt, negative, image
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        images = images_of(self.policy, 1, [image]) if image is not None or self.policy.given else {}
        path = entry(self.folder, prompt, negative, images) if self.folder else None
        if path and path.exists():
            return replace(_read(path, prompt, negative), inputs=images)
        self._require_encoders(prompt)
        conditioning = self.policy.encode([prompt], [negative], [image]).to("cpu")
        if not path or not _write(path, conditioning):
            conditioning = conditioning.map_tensors(lambda tensor: self._values.setdefault(digest(tensor), tensor))
            self._known[key] = conditioning
            while len(self._known) > 1 and sum(tensor.nbytes for tensor in self._values.values()) > self.limit:
                self._known.popitem(last=False)
        return conditioning


def entry(folder: Path, prompt: str, negative: str, images: dict[str, Any] = {}) -> Path:
    """Return the file of a prompt, and of the images that it brings, in a cache's folder."""
    key = json.dumps([prompt, negative, digest(images)] if images else [prompt, negative])
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"


def concatenate(parts: Sequence[Conditioning], masks: padding.Masks | None = None, pad: bool = True) -> Conditioning:
    """Return one Conditioning with the rows of all, one each.

    Those that differ in length are padded with `masks`, or, without any, or with pad false, stay `parts`.
    """
    if len({part.shapes() for part in parts}) == 1:
        return join(parts)
    if masks is not None and pad:
        calls = padding.pad_calls([part.calls for part in parts], masks)
        flags = [tuple(tuple(flag or value is not None and mask is not None for flag, value, mask in zip(*of))
                       for of in zip(part.per_prompt, values, masks)) for part, values in zip(parts, calls)]
        rows = [replace(part, calls=values, per_prompt=flags[0]) for part, values in zip(parts, calls)]
        return replace(join(rows), masks=masks)
    whole = join([replace(part, calls=(), per_prompt=()) for part in parts])
    return replace(whole, parts=tuple(parts), masks=masks)


def join(parts: Sequence[Conditioning]) -> Conditioning:
    """Return one Conditioning with the rows of all; what has no row per prompt is the first one's.

    Raises UserError if some bring a reference image and others do not.
    """
    first = parts[0]
    if len({frozenset(part.inputs) for part in parts}) > 1:
        raise UserError("some prompts of a batch bring a reference image and others do not: give all an `image`, or "
                        "none; or the same keys of other inputs")

    def cat(values: Iterable[Any]) -> Any:
        values = list(values)
        return torch.cat(values) if torch.is_tensor(values[0]) else [item for value in values for item in value]

    calls = tuple(tuple(cat(values) if per_row else values[0] for per_row, *values in zip(flags, *of_call))
                  for flags, *of_call in zip(first.per_prompt, *(part.calls for part in parts)))
    return Conditioning(cat(part.prompts for part in parts), cat(part.negatives for part in parts), calls,
                        first.per_prompt, {name: cat(part.inputs[name] for part in parts) for name in first.inputs},
                        first.one_per_call, first.bare, first.listed)


def digest(value: Any) -> str:
    """Return a hash of the content of tensors, images, arrays, and of containers of them."""
    from PIL.Image import Image

    content = hashlib.blake2b(digest_size=16)

    def tell(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for part in value:
                tell(part)
        elif isinstance(value, dict):
            tell(sorted(value.items()))
        elif torch.is_tensor(value):
            content.update(f"{value.dtype}{tuple(value.shape)}".encode())
            raw: Any = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            content.update(raw)
        elif isinstance(value, (Image, np.ndarray)):
            array = np.ascontiguousarray(value)
            content.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        else:
            content.update(repr(value).encode())
        content.update(b"|")

    tell(value)
    return content.hexdigest()


def fingerprint(policy: PromptEncoder) -> str:
    """Return the key of the encoded prompts: the pipeline, its arguments, its precision, and its encoders' weights."""
    pipe, content = policy.pipe, hashlib.sha256()
    content.update(f"form 2 {type(pipe).__name__} {policy.dtype} {sorted(policy.call.items())}".encode())
    for name, module in sorted(pipe.components.items()):
        if name.startswith("tokenizer") and hasattr(module, "get_added_vocab"):  # such as of textual inversions
            added = sorted(set(module.get_added_vocab()) - set(module.all_special_tokens))
            content.update(f"{name} {added}".encode() if added else b"")
        if isinstance(module, torch.nn.Module) and name.startswith("text_encoder"):
            for key, parameter in module.named_parameters():
                content.update(f"{name}.{key} {tuple(parameter.shape)} {parameter.flatten()[:16].tolist()} "
                               f"{parameter.flatten()[-16:].tolist()}".encode())
    return content.hexdigest()[:16]


def _write(path: Path, conditioning: Conditioning) -> bool:
    """Write tensors as `call.value`, of lists their one element. Returns False for values of other types."""
    values = {f"{c}.{v}": value for c, call in enumerate(conditioning.calls) for v, value in enumerate(call)}
    lists = [key for key, value in values.items() if isinstance(value, list)]
    values |= {key: values[key][0] for key in lists}
    if any(value is not None and not torch.is_tensor(value) for value in values.values()):
        return False
    form = {"form": json.dumps([conditioning.per_prompt, lists, conditioning.one_per_call, conditioning.bare])}
    with atomic.replacing(path, shared=True) as file:  # another process may write the same prompt
        save_file({key: v.cpu().contiguous() for key, v in values.items() if v is not None}, file, form)
        paths.readable(file)
    return True


def _read(path: Path, prompt: str, negative: str) -> Conditioning:
    with safe_open(path, "pt") as file:
        per_prompt, lists, one_per_call, bare = json.loads(file.metadata()["form"])
        values = {key: file.get_tensor(key) for key in file.keys()}
    values |= {key: [values.get(key)] for key in lists}
    calls = tuple(tuple(values.get(f"{c}.{v}") for v in range(len(flags))) for c, flags in enumerate(per_prompt))
    return Conditioning([prompt], [negative], calls, tuple(map(tuple, per_prompt)), {}, one_per_call, bare)

"""Pretended GPU: tensors of torch's device "meta" have the shapes of a GPU's tensors, and no values.

`MetaGPU` sees every operation on them. By phase it counts bytes, FLOPs, kernels, the seconds of a roofline, and what
makes the host wait: values that it reads, and copies that block. A value that is unknown reads as 0, 1 or True.
Bytes follow torch's caching allocator of CUDA memory, by its rules for sizes.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import sys
import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from flowgrpo import device
from flowgrpo.gpus import BUS, GPU, HOST
from flowgrpo.tools.dry_run import kernels
from flowgrpo.tools.dry_run.kernels import Autocast, HostValues, autocast

ROUND = 512  # bytes to which a request is rounded up
SMALL = 2**20  # largest request that the small pool serves
SEGMENTS = (2 * 2**20, 20 * 2**20)  # bytes of a segment of the small pool, and of the large one
WHOLE_SEGMENT = 10 * 2**20  # requests from here on get a segment of their own size, in steps of 2 MiB


@dataclass(eq=False)
class Block:
    """Part of a segment; before, behind: its neighbours there."""

    size: int
    small: bool
    number: int
    used: bool = False
    before: Block | None = None
    behind: Block | None = None


class Allocator:
    """Blocks in use and free. in_use: their bytes, as rounded; reserved: bytes of all segments, none given back."""

    def __init__(self) -> None:
        self.in_use = self.reserved = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # by pool, smallest first
        self._numbers = itertools.count()

    def take(self, size: int) -> Block:
        """Block for `size` bytes: the smallest free one that holds it, else one of a new segment."""
        size = max(-(-size // ROUND) * ROUND, ROUND)
        small = size <= SMALL
        free = self._free[small]
        place = bisect.bisect_left(free, (size, -1))
        if place < len(free):
            block = free.pop(place)[2]
        else:
            step = SEGMENTS[0]
            whole = SEGMENTS[not small] if small or size < WHOLE_SEGMENT else -(-size // step) * step
            self.reserved += whole
            block = Block(whole, small, next(self._numbers))
        rest = block.size - size
        if rest >= ROUND if small else rest > SMALL:
            block.size = size
            tail = Block(rest, small, next(self._numbers), before=block, behind=block.behind)
            if tail.behind is not None:
                tail.behind.before = tail
            block.behind = tail
            self._keep(tail)
        block.used = True
        self.in_use += block.size
        return block

    def give(self, block: Block) -> None:
        """Free a block; it joins free neighbours of its segment."""
        block.used = False
        self.in_use -= block.size
        if block.before is not None and not block.before.used:
            block = self._merge_blocks(block.before, block, drop=block.before)
        if block.behind is not None and not block.behind.used:
            block = self._merge_blocks(block, block.behind, drop=block.behind)
        self._keep(block)

    def _merge_blocks(self, first: Block, second: Block, drop: Block) -> Block:
        free = self._free[drop.small]
        del free[bisect.bisect_left(free, (drop.size, drop.number))]
        first.size += second.size
        first.behind = second.behind
        if first.behind is not None:
            first.behind.before = first
        return first

    def _keep(self, block: Block) -> None:
        bisect.insort(self._free[block.small], (block.size, block.number, block))


META = torch.device("meta")
# Operations whose result the host needs, or whose sizes depend on values, and what the host waits for.
READ = {"_local_scalar_dense": "item", "is_nonzero": "bool", "equal": "equal", "nonzero": "nonzero",
        **dict.fromkeys(("unique_consecutive", "_unique2", "unique_dim"), "unique")}
FILLED = 2**26  # elements of a host tensor whose values are known on the GPU
WHOLE = 2**24  # bytes of a copy to the host that has memory of its own; a larger one is a single zero, expanded
# Operations that start no kernel.
FREE = frozenset("""view _unsafe_view t transpose permute expand slice select unsqueeze squeeze split unbind
    split_with_sizes alias detach as_strided _reshape_alias unsafe_split chunk view_as_real view_as_complex narrow
    diagonal lift_fresh empty empty_like empty_strided new_empty new_empty_strided is_pinned squeeze_ unsqueeze_ set_
    resize_ _conj detach_ unfold""".split())
IN_PLACE: dict[Any, Any] = {torch.ops.aten.addmm_: torch.ops.aten.addmm}  # whose FLOPs torch counts for the other alone
ONLY_WRITE = frozenset(("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_"))  # in place, without a read


@dataclass
class Phase:
    """Counts of a phase: bytes in use and reserved at the peak, FLOPs, kernels, seconds of the roofline, how often the
    host waits, by reason, and the bytes that kernels read and write.

    fixed: of the seconds, those that more prompts do not make longer. taken: the seconds that the phase takes.
    """

    allocated: int = 0
    reserved: int = 0
    flops: float = 0.0
    kernels: int = 0
    seconds: float = 0.0
    fixed: float = 0.0
    waits: Counter[str] = field(default_factory=Counter)
    traffic: float = 0.0

    @property
    def host(self) -> float:
        """Seconds in which the host starts the kernels, at least."""
        return self.kernels * HOST

    @property
    def duration(self) -> float:
        """Seconds of GPU or host, whichever needs more: a lower bound, since they do not always overlap."""
        return max(self.seconds, self.host)

    def add(self, other: Phase, times: float = 1.0) -> None:
        """Add the counts of a piece of work so many times; its bytes are above those in use before it."""
        self.flops += other.flops * times
        self.kernels += round(other.kernels * times)
        self.seconds += other.seconds * times
        self.fixed += other.fixed * times
        self.waits.update({reason: round(count * times) for reason, count in other.waits.items()})
        self.traffic += other.traffic * times


@dataclass(frozen=True)
class Shape:
    """Shape, strides and dtype of a tensor, which hold no memory."""

    size: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of_tensor(tensor: torch.Tensor) -> Shape:
        return Shape(tensor.shape, tensor.stride(), tensor.dtype)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.strides, dtype=self.dtype, device=META)


class MetaGPU(TorchDispatchMode):
    """Counts of the operations on meta tensors, while `running`."""

    def __init__(self, gpu: GPU):
        super().__init__()
        self.gpu, self.memory, self.values = gpu, Allocator(), HostValues()
        self._alive: dict[int, Block] = {}
        self.phases: dict[str, Phase] = defaultdict(Phase)
        self.attentions: set[Any] = set()  # shapes, of which cuDNN plans each once
        self.spare = 0  # bytes that are needed at times, beside what is counted
        self.part = 1.0  # share of the bytes of tensors that are under `sharding`
        self.share = 1.0  # that of the tensors that are made now
        self.autocast: Autocast | None = None
        self.phase = self.phases["setup"]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager: count; attention and RMS normalisation are single kernels, tensors of host values are
        copied, and autocast has the operations of CUDA's. Torch's checkpointing restores it in a recomputed forward:
        inside a backward no mode of functions is active."""
        own = META.type
        stock: Any = torch
        make, cast_of, available = stock.tensor, stock.autocast, stock.amp.is_autocast_available
        enabled, dtype_of = stock.is_autocast_enabled, stock.get_autocast_dtype

        def casting(device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> Any:
            if device_type != own:
                return cast_of(device_type, dtype, enabled, cache_enabled)
            return autocast(self, dtype or torch.bfloat16, enabled)

        with META:  # the first context of a device fixes which functions obey it: those of torch, not these
            torch.empty(0)
        with patch.multiple(
            F, scaled_dot_product_attention=partial(kernels.attention, self), rms_norm=kernels.rms_norm,
        ), patch.multiple(
            torch, autocast=casting,
            # On the meta device it is a copy of the host's, whose values are known.
            tensor=lambda data, *, device=None, **options: make(data, **options).to(META)
            if device is not None and torch.device(device) == META else make(data, device=device, **options),
            is_autocast_enabled=lambda *kind: self.autocast is not None if kind == (own,) else enabled(*kind),
            get_autocast_dtype=lambda kind: dtype_of(kind) if kind != own
            else self.autocast.dtype if self.autocast else torch.bfloat16,
        ), patch.multiple(
            torch.amp, autocast=casting, is_autocast_available=lambda kind: kind == own or available(kind),
        ), torch.autograd.set_multithreading_enabled(False), self:
            yield

    def sharding(self) -> Any:
        """Context manager: of tensors that are made inside, this process holds `part`."""
        return patch.object(self, "share", self.part)

    def shard(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors anew, as this process's part of them."""
        tensors = list(tensors)
        self.drop(tensors)
        self.hold(tensors, self.part)

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Context manager: count for the phase `name`."""
        with patch.object(self, "phase", self.phases[name]):
            self._peak()
            yield

    @contextlib.contextmanager
    def measure(self, since: int | None = None, waits: Counter[str] | None = None) -> Iterator[Phase]:
        """Context manager: counts of the work inside, which are the phase's too. since: bytes in use before the work,
        of which its own bytes are counted; None: those at the beginning. waits: gets what the host waits for."""
        before, base = self.phase, self.memory.in_use if since is None else since
        with patch.object(self, "phase", Phase()) as work:
            yield work
        before.add(work)
        before.allocated = max(before.allocated, work.allocated)
        before.reserved = max(before.reserved, work.reserved)
        work.allocated = max(work.allocated - base, 0)
        if waits is not None:
            waits.update(work.waits)

    def repeat(self, work: Phase) -> None:
        """Count once more what `measure` counted."""
        self.phase.add(work)
        self._peak(work.allocated)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [*_tensors(args), *_tensors(kwargs.values())]
        made = kwargs.get("device")
        if not inputs and (made is None or torch.device(made) != META):
            return function(*args, **kwargs)
        name = function._schema.name.partition("::")[2]
        if name in READ:
            return self._read(function, name, args, kwargs)
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self._wait("length")  # unknown repetitions are one each
            known = self.values.read(args[0])
            kwargs = kwargs | {"output_size": args[0].numel() if known is None else int(known.sum())}
        given = args
        if name in ("index", "index_put", "index_put_"):
            args = self._without_masks(name, args)
        if name in ("_to_copy", "copy_") and (copied := self._copy_to_host(name, args, kwargs)) is not None:
            return copied
        # All others run without values; their memory and arithmetic are counted.
        result = _made(function, name, args, kwargs) if inputs else function(*args, **kwargs)
        outputs = [*_tensors([result])]
        self.hold(outputs, self.share)
        if name not in FREE:
            self._launch(function, name, inputs, outputs, result, args, kwargs)
            self.values.follow(function, name, inputs, outputs, given, kwargs)
        return result

    # --- memory ------------------------------------------------------------------------------------------------------

    def hold(self, tensors: Iterable[torch.Tensor], share: float = 1.0) -> None:
        """Count the storages of tensors for as long as they live; share: of their bytes that are stored."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage._cdata not in self._alive:
                self._alive[storage._cdata] = self.memory.take(round(storage.nbytes() * share))
                weakref.finalize(storage, self._release, storage._cdata)
        self._peak()

    def drop(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of tensors no more: they are on the host."""
        for tensor in tensors:
            self._release(tensor.untyped_storage()._cdata)

    def _release(self, key: int) -> None:
        if block := self._alive.pop(key, None):
            self.memory.give(block)

    def _peak(self, more: int = 0) -> None:
        self.phase.allocated = max(self.phase.allocated, self.memory.in_use + more)
        self.phase.reserved = max(self.phase.reserved, self.memory.reserved, self.phase.allocated)

    # --- time --------------------------------------------------------------------------------------------------------

    def _launch(self, function: Any, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], result: Any,
                args: Any, kwargs: Any) -> None:
        read = {id(tensor): tensor for tensor in inputs}
        written = {id(tensor): tensor for tensor in outputs}
        if name in ONLY_WRITE:
            read = {key: tensor for key, tensor in read.items() if key not in written}
        traffic = sum(tensor.numel() * tensor.element_size() for tensor in (*read.values(), *written.values()))
        packet = function._overloadpacket
        count = flop_registry.get(IN_PLACE.get(packet, packet))
        flops = 0.0
        if count:  # torch's formula, which is evaluated once for the same shapes
            key = count, _shape_key(args), _shape_key(tuple(kwargs.items()))
            if key not in _counted:
                _counted[key] = float(count(*args, **kwargs, out_val=result))
            flops = _counted[key]
        half = bool(outputs) and outputs[0].element_size() < 4
        if attention := "attention" in name:
            self.attentions.add((name, torch.is_grad_enabled(), *(tensor.shape for tensor in inputs[:3])))
        self.phase.flops += flops
        self.phase.kernels += 1
        self.phase.traffic += traffic
        self.phase.seconds += self.gpu.seconds(flops, traffic, half, attention)

    def bus(self, count: int, fixed: bool = False) -> None:
        """Count the seconds of a copy of so many bytes between host and GPU. fixed: once an epoch."""
        seconds = self.share * count / BUS
        self.phase.seconds += seconds
        self.phase.fixed += seconds if fixed else 0.0

    # --- what the host waits for -------------------------------------------------------------------------------------

    def _wait(self, reason: str) -> None:
        place = "unknown"  # the nearest line outside of torch that the operation came from
        for frame, number in traceback.walk_stack(sys._getframe()):
            file = frame.f_code.co_filename
            if "/tools/dry_run/" not in file.replace("/tests/tools/", "/tests/") and "/torch/" not in file:
                place = f"{'/'.join(file.split('/')[-2:])}:{number}"
                break
        self.phase.waits[f"{reason}: {place}"] += 1

    def _read(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Value that the host reads, the places that are not zero, or distinct values: unknown ones are all distinct.
        """
        self._wait(READ[name])
        known, tensor = [self.values.read(value) if _on_meta(value) else value for value in args], args[0]
        if READ[name] == "unique" and known[0] is None:
            known[0] = torch.arange(tensor.numel(), device="cpu").reshape(tensor.shape).to(tensor.dtype)
        if not any(value is None and _on_meta(given) for value, given in zip(known, args)):
            return tree_map_only(torch.Tensor, self._to_device, function(*known, **kwargs))
        if name == "nonzero":
            return torch.empty(tensor.numel(), tensor.ndim, dtype=torch.int64, device=META)
        if name == "equal":
            return tensor.shape == args[1].shape
        return True if tensor.dtype == torch.bool or name == "is_nonzero" else 0.0 if tensor.is_floating_point() else 1

    def _to_device(self, value: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        copy = torch.empty_like(value, device=META, dtype=dtype)
        self.hold([copy])
        self.values.set(copy, value)
        return copy

    def _without_masks(self, name: str, args: Any) -> Any:
        """Replace masks among the indices by the places that they select; unknown ones select everything. Indices on
        the host are copied, and block."""
        indices: list[Any] = []
        for index in args[1]:
            if torch.is_tensor(index) and not index.is_meta:
                self._wait("from the host")
            if _on_meta(index) and index.dtype == torch.bool:
                self._wait("mask")
                known = self.values.read(index)
                places = (torch.ones(index.shape, dtype=torch.bool) if known is None else known).nonzero()
                indices += [column.to(META) for column in places.unbind(1)]
            else:
                indices.append(index)
        return args[0], indices, *args[2:]

    def _copy_to_host(self, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
        """The host's copy of a meta tensor; None for other copies. Copies that block are counted."""
        source = args[1] if name == "copy_" else args[0]
        place = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
        if source.device == place:
            return None
        self.bus(source.numel() * source.element_size())
        if source.device == META:
            if not _within(device.put_away):
                self._wait("to the host")
            if name == "copy_":
                return args[0]
            known = self.values.read(source)
            if known is not None:
                return known.to(kwargs.get("dtype") or known.dtype, copy=True)
            shape = source.shape if source.numel() * source.element_size() <= WHOLE else ()
            return torch.zeros(shape, dtype=kwargs.get("dtype") or source.dtype, device="cpu").expand(source.shape)
        if not _within(device.to_device):
            self._wait("from the host")
        if name == "_to_copy" and source.numel() <= FILLED:
            return self._to_device(source, kwargs.get("dtype"))
        if name == "copy_":
            self.values.forget(args[0])
        return None


_INTO = object()  # the result is the first argument
_shapes: dict[Any, Any] = {}  # of an operation's result, or _INTO, by its arguments; of all dry runs of a process
_counted: dict[Any, float] = {}  # FLOPs in the same way


def _made(function: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Result of an operation on meta tensors. Most of torch's own shape functions are Python: an operation that was met
    before with tensors of the same shapes is not run again, and new tensors have the shapes of its first result. One
    whose result shares memory with its arguments is run each time, unless it is the first of them as it was."""
    if name in FREE:
        return function(*args, **kwargs)
    try:
        key = function, torch.get_default_dtype(), _shape_key(args), _shape_key(tuple(kwargs.items()))
        shapes = _shapes.get(key)
    except TypeError:  # an argument that cannot be compared
        return function(*args, **kwargs)
    if shapes is _INTO:
        return args[0]
    if shapes is not None:
        return tuple(shape and shape.empty() for shape in shapes) if isinstance(shapes, list) else shapes.empty()
    result = function(*args, **kwargs)
    whole = result if isinstance(result, tuple) else (result,)
    before = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs.values()))}
    if args and result is args[0] and _shape_key(result) == key[2][0]:
        _shapes[key] = _INTO
    elif not function._schema.is_mutable and \
            all(made is None or _on_meta(made) and made.untyped_storage()._cdata not in before for made in whole):
        made = [None if made is None else Shape.of_tensor(made) for made in whole]
        _shapes[key] = made if isinstance(result, tuple) else made[0]
    return result


def _shape_key(value: Any) -> Any:
    """Argument of an operation as what its result's shape can depend on; 1, 1.0 and True differ."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_shape_key, value))
    return type(value), value


def _on_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if _on_meta(value):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _within(copy: Any) -> bool:
    """True within a function of `device` whose copies do not block."""
    near = itertools.islice(traceback.walk_stack(sys._getframe()), 10)
    return any(frame.f_code is copy.__code__ for frame, _ in near)

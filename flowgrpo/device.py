"""Devices and precisions of a run, and copies to a device that the host does not wait for."""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass

import torch

from flowgrpo.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
AUTO = "auto"
NATIVE = (8, 0)  # CUDA's compute capability with which bf16 arithmetic begins
FASTER = 1.2  # bf16 over fp32 on a CPU: with such instructions 2 to 10, and without below 1
SHAPE = (512, 256, 256)  # rows, inputs and outputs of the timed product: a layer of a small denoiser
TRIALS, SECONDS = 20, 0.1  # of the timing, at most


@dataclass(frozen=True)
class Arithmetic:
    """A device's answers about bf16: kind: "cuda", "mps" or "cpu"; name and capability: of a CUDA device; multiplies:
    MPS's product succeeds; speed: of a CPU's bf16 products over its fp32 ones."""

    kind: str
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    multiplies: bool = False
    speed: float = 0.0


def choose(found: Arithmetic) -> tuple[str, str]:
    """The precision for a device, "bf16" where it computes in that natively and else "fp32", and the reason."""
    if found.kind == "cuda":
        native = found.capability >= NATIVE
        reason = f"{found.name} has compute capability {'.'.join(map(str, found.capability))}"
        reason += "" if native else f", and bf16 begins at {'.'.join(map(str, NATIVE))}"
    elif found.kind == "mps":
        native = found.multiplies
        reason = f"MPS {'multiplies' if native else 'does not multiply'} bf16 here"
    else:
        native = found.speed >= FASTER
        reason = f"this CPU multiplies bf16 {found.speed:.2g} times as fast as fp32"
        reason += "" if native else f", and {FASTER:g} times are expected of it"
    return "bf16" if native else "fp32", reason


def arithmetic(device: str | torch.device) -> Arithmetic:
    """Ask a device about bf16."""
    device = torch.device(device)
    if device.type == "cuda":
        return Arithmetic("cuda", torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    if device.type == "mps":
        return Arithmetic("mps", multiplies=_mps_multiplies(torch.bfloat16))
    return Arithmetic("cpu", speed=bf16_speed())


@functools.cache
def bf16_speed() -> float:
    """Time products of one shape in bf16 and fp32 by turns, on one core, in about SECONDS; returns how many times as
    fast the best one in bf16 is. Limits such as ONEDNN_MAX_CPU_ISA count."""
    rows, inputs, outputs = SHAPE
    best = {torch.float32: math.inf, torch.bfloat16: math.inf}
    threads, begun = torch.get_num_threads(), time.monotonic()
    pairs = {dtype: (torch.ones(rows, inputs, dtype=dtype), torch.ones(inputs, outputs, dtype=dtype)) for dtype in best}
    torch.set_num_threads(1)  # several would wait for each other on a machine that is busy
    try:
        for trial in range(TRIALS):
            for dtype, (left, right) in pairs.items():
                start = time.perf_counter()
                torch.mm(left, right)
                if trial:  # the first ones also make their kernels
                    best[dtype] = min(best[dtype], time.perf_counter() - start)
            if trial and time.monotonic() - begun > SECONDS:
                break
    finally:
        torch.set_num_threads(threads)
    return best[torch.float32] / best[torch.bfloat16]


def _mps_multiplies(dtype: torch.dtype) -> bool:
    """Try a small product on Apple's MPS; returns True where it succeeds."""
    if not torch.backends.mps.is_available():
        return False
    try:
        ones = torch.ones(2, 2, dtype=dtype, device="mps")
        return (ones @ ones).float().sum().item() == 8
    except (NotImplementedError, RuntimeError, TypeError):
        return False


def pick_device(name: str) -> str:
    """`auto` takes CUDA, then MPS where it works, then the CPU. UserError where the asked one is absent."""
    probes = {"cuda": torch.cuda.is_available, "mps": lambda: _mps_multiplies(torch.float32), "cpu": lambda: True}
    if name == AUTO:
        return next(device for device, works in probes.items() if works())
    if not probes[name]():
        raise UserError(f"device is {name!r}, but torch {torch.__version__} sees none here: use device: auto or cpu")
    return name


def default_device() -> str:
    """Name of this thread's CUDA device with its index, as "cuda:1"; "cpu" where there is none."""
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def current_gpu() -> int | None:
    """Index of this thread's CUDA device; None in a process that has not used CUDA."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def use_gpu(index: int | None) -> None:
    """Make the CUDA device of this index that of this thread: every new thread begins with device 0. None: leave it."""
    if index is not None:
        torch.cuda.set_device(index)


def described(device: str | torch.device) -> str:
    """A device in words, with the GPU's name."""
    device = torch.device(device)
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def concrete(precision: str, device: str | torch.device) -> str:
    """A precision, or what the device suits in place of `auto`."""
    return choose(arithmetic(device))[0] if precision == AUTO else precision


def drawing(recorded: str, device: str | torch.device, asked: str | None = None) -> str:
    """The precision to draw in with a model that was trained in `recorded`, or `asked`, where that is given. In place
    of a recorded bf16 or fp16 a CPU takes what suits it."""
    kept = recorded == "fp32" or torch.device(device).type != "cpu"
    return concrete(asked or (recorded if kept else AUTO), device)


def queued(tensor: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    """The tensor on the device (None: where it is). From the CPU to a GPU it goes by pinned memory: the copy is queued,
    and the host does not wait for what was queued before; torch keeps the pinned memory until the copy is done."""
    if device is None or tensor.device.type != "cpu" or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)

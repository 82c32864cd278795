"""Devices and precisions of a run, and non-blocking copies to a GPU through pinned memory."""

import contextlib
import functools
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from flowgrpo.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
AUTO = "auto"
NATIVE = (8, 0)  # lowest CUDA compute capability with bf16 arithmetic
FASTER = 1.2  # speed of bf16 over fp32 on a CPU: 2 to 10 with bf16 instructions, below 1 without
SHAPE = (512, 256, 256)  # rows, inputs and outputs of the timed product: a layer of a small denoiser
GENERATOR = 5056  # bytes of the state of a generator on the CPU
TRIALS, SECONDS = 20, 0.1  # of the timing, at most
CLOCK = time.perf_counter if os.name == "nt" else time.thread_time  # Windows counts a thread's time in steps of 16 ms
T = TypeVar("T")


def choose(device: str | torch.device) -> tuple[str, str]:
    """Precision for a device and the reason: "bf16" if it computes in that natively, otherwise "fp32"."""
    device = torch.device(device)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        native = capability >= NATIVE
        reason = f"{torch.cuda.get_device_name(device)} has compute capability {'.'.join(map(str, capability))}"
        reason += "" if native else f", and bf16 begins at {'.'.join(map(str, NATIVE))}"
    elif device.type == "mps":
        native = _mps_multiplies(torch.bfloat16)
        reason = f"MPS {'multiplies' if native else 'does not multiply'} bf16 here"
    else:
        speed = bf16_speed()
        native = speed >= FASTER
        reason = f"this CPU multiplies bf16 {speed:.2g} times as fast as fp32"
        reason += "" if native else f", and {FASTER:g} times are expected of it"
    return "bf16" if native else "fp32", reason


@functools.cache
def bf16_speed() -> float:
    """Speed of bf16 over fp32: the ratio of the best times of products of one shape, in turn, on one core, in about
    SECONDS. The clock is the thread's own: other programs do not count. Limits such as ONEDNN_MAX_CPU_ISA apply."""
    rows, inputs, outputs = SHAPE
    best = {torch.float32: math.inf, torch.bfloat16: math.inf}
    threads, begun = torch.get_num_threads(), CLOCK()
    pairs = {dtype: (torch.ones(rows, inputs, dtype=dtype), torch.ones(inputs, outputs, dtype=dtype)) for dtype in best}
    torch.set_num_threads(1)  # so that all work is on this thread's clock
    try:
        for trial in range(TRIALS):
            for dtype, (left, right) in pairs.items():
                start = CLOCK()
                torch.mm(left, right)
                if trial:  # the first ones also create their kernels
                    best[dtype] = min(best[dtype], CLOCK() - start)
            if trial and CLOCK() - begun > SECONDS:
                break
    finally:
        torch.set_num_threads(threads)
    return best[torch.float32] / best[torch.bfloat16]


def _mps_multiplies(dtype: torch.dtype) -> bool:
    """Try a small product on Apple's MPS; return True if it succeeds."""
    if not torch.backends.mps.is_available():
        return False
    try:
        ones = torch.ones(2, 2, dtype=dtype, device="mps")
        return (ones @ ones).float().sum().item() == 8
    except (NotImplementedError, RuntimeError, TypeError):
        return False


def pick_device(name: str) -> str:
    """Device for a name; `auto` takes CUDA, then MPS if it works, then the CPU. Raises UserError for a missing one."""
    probes = {"cuda": torch.cuda.is_available, "mps": lambda: _mps_multiplies(torch.float32), "cpu": lambda: True}
    if name == AUTO:
        return next(device for device, works in probes.items() if works())
    if not probes[name]():
        raise UserError(f"device is {name!r}, but torch {torch.__version__} sees none here: use device: auto or cpu")
    return name


def default_device() -> str:
    """Name of this thread's CUDA device with its index, as "cuda:1"; "cpu" where there is none."""
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def current_stream() -> torch.cuda.Stream | None:
    """This thread's CUDA stream; None in a process that has not used CUDA."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def use_stream(stream: torch.cuda.Stream | None) -> None:
    """Put this thread on a stream and its device: every new thread begins with device 0. None: leave it."""
    if stream is not None:
        torch.cuda.set_stream(stream)


@functools.cache
def second_stream(gpu: torch.device) -> torch.cuda.Stream:
    """A stream beside the default one: neither waits for the other. There is one, as freed memory stays with it."""
    return torch.cuda.Stream(gpu)


def hand_over(function: Callable[..., T], *arguments: object) -> Callable[[], T]:
    """The call `function(*arguments)` for another thread: it waits for this thread's work on the GPU so far, queued
    copies to the CPU included, and memory of tensors on a GPU is not reused before its own work is done."""
    if not torch.cuda.is_initialized():
        return functools.partial(function, *arguments)
    done = torch.cuda.Event(blocking=True)  # the waiting thread sleeps
    done.record()

    def call() -> T:
        done.synchronize()
        for tensor in arguments:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return function(*arguments)

    return call


def describe(device: str | torch.device) -> str:
    device = torch.device(device)
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def concrete(precision: str, device: str | torch.device) -> str:
    """Precision, with `auto` replaced by the one that suits the device."""
    return choose(device)[0] if precision == AUTO else precision


def drawing(recorded: str, device: str | torch.device, requested: str | None = None) -> str:
    """Sampling precision for a model that was trained in `recorded`, or `requested` if given. In place of a recorded
    bf16 or fp16 a CPU uses the precision that suits it."""
    kept = recorded == "fp32" or torch.device(device).type != "cpu"
    return concrete(requested or (recorded if kept else AUTO), device)


def matmul_precision(precision: str, device: str | torch.device) -> contextlib.AbstractContextManager[None]:
    """Context manager: a GPU may round the inputs of fp32 matrix products to TF32, unless the precision is fp32; then
    those of convolutions are not rounded either, as they are by torch's default. These are products of reward models
    above all, which another thread computes while samples are drawn, and torch has one setting for all threads."""
    if torch.device(device).type != "cuda":
        return contextlib.nullcontext()
    if precision == "fp32":
        allow = functools.partial(setattr, torch.backends.cudnn, "allow_tf32")
        return _set(lambda: torch.backends.cudnn.allow_tf32, allow, True, False)
    return _set(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest", "high")


def without_cudnn_attention(device: str | torch.device) -> contextlib.AbstractContextManager[None]:
    """Context manager: attention on a GPU is not cuDNN's, for inputs whose lengths change.

    cuDNN plans each new length, which others report to take 0.03 to 0.5 s; torch prefers it on GPUs of compute
    capability 9 and 10. Not measured here.
    """
    if torch.device(device).type != "cuda":
        return contextlib.nullcontext()
    return _set(torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, True, False)


@contextlib.contextmanager
def _set(read: Callable[[], T], write: Callable[[T], None], default: T, inside: T) -> Iterator[None]:
    """Context manager: a setting of torch is `inside` in place of its default; a user's own, which differs, stays."""
    try:
        own = read() != default
    except RuntimeError:  # torch's newer settings of TF32, by operator, which the older name cannot tell
        own = True
    if own:
        yield
        return
    write(inside)
    try:
        yield
    finally:
        write(default)


def to_device(tensor: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    """Tensor on the device (None: unchanged). From the CPU to a GPU the copy goes through pinned memory and is queued:
    the host does not wait for earlier work. torch keeps the pinned memory until the copy is done."""
    if device is None or tensor.device.type != "cpu" or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def put_away(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Tensor on the device where it waits. From a GPU to the CPU the copy goes into pinned memory and is queued: the
    GPU may read it again, the host only after `wait_for_copies`."""
    if tensor.device.type != "cuda" or device.type != "cpu":
        return tensor.to(device)
    return torch.empty_like(tensor, device=device, pin_memory=True).copy_(tensor, non_blocking=True)


def wait_for_copies(device: torch.device) -> None:
    """Wait until the host may read what was put away from a device."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def ran_out(error: BaseException) -> bool:
    """True for an error that says that memory ran out; for a CPU's torch has no class of its own."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or isinstance(error, RuntimeError) and (
        "DefaultCPUAllocator" in str(error) or "can't allocate memory" in str(error))


def require_generators(count: int, what: str) -> None:
    """Raise UserError if the host's memory does not hold generators of noise for so many samples. It is a lower bound
    of what the samples take, known before a model is loaded. what: the samples, in the plural."""
    needed, free = count * GENERATOR, free_memory("cpu")
    if needed > free:
        raise UserError(f"{count:,} {what} need {needed / 2**30:,.0f} GiB for their random numbers, and this "
                        f"machine has {free / 2**30:,.0f} GiB left: ask for {free // GENERATOR:,} at most")


def free_memory(device: str | torch.device) -> int:
    """Bytes that this process can have on a device, those that it holds included; on a CPU the host's."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    import psutil

    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    most = limit.read_text().strip() if limit.is_file() else "max"
    free = psutil.virtual_memory().available + psutil.Process().memory_info().rss
    return min(free, int(most)) if most.isdigit() else free


@contextlib.contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Context manager: restore the random states of Python, NumPy and torch at the end."""
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)

"""Peaks of GPUs, of their makers' data sheets, and the shares of them that kernels reach."""

from __future__ import annotations

from dataclasses import dataclass

from flowgrpo.errors import UserError, nearest

GEMM, ATTENTION, TRAFFIC = 0.63, 0.45, 0.75  # shares of the peaks that good kernels reach
LAUNCH = 2.5e-6  # seconds of the shortest kernel
GIB = 2**30


@dataclass(frozen=True)
class GPU:
    """Peaks of a GPU.

    memory: GB, as sold. half, single: dense TFLOP/s of bf16 and of fp32. bandwidth: TB/s of its memory.
    """

    memory: float
    half: float
    single: float
    bandwidth: float

    @property
    def room(self) -> float:
        """Bytes that a run can allocate: without the context of CUDA and what the allocator leaves unused."""
        return self.memory * 1e9 * 0.94 - GIB

    def seconds(self, flops: float, traffic: int, half: bool, attention: bool) -> float:
        """Return the roofline's seconds of a kernel. traffic: bytes that it reads and writes."""
        peak = self.half if half else self.single
        rate = peak * 1e12 * (ATTENTION if attention else GEMM)
        return max(flops / rate, traffic / (self.bandwidth * 1e12 * TRAFFIC), LAUNCH)


GPUS = {
    "A100": GPU(80, 312, 19.5, 2.04),
    "H100": GPU(80, 989, 67, 3.35),
    "H200": GPU(141, 989, 67, 4.8),
    "B200": GPU(180, 2250, 75, 7.7),
    "RTX4090": GPU(24, 165, 82.6, 1.01),
    "RTX5090": GPU(32, 210, 105, 1.79),
}


def named(name: str) -> GPU:
    """Return the GPU of a name, in any case. Raises UserError."""
    known = {key.lower(): gpu for key, gpu in GPUS.items()}
    if name.lower() not in known:
        raise UserError(f"--gpu is {name!r}{nearest(name.upper(), list(GPUS))}")
    return known[name.lower()]

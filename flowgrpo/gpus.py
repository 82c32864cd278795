"""Peaks of GPUs, of their makers' data sheets, and the shares of them that kernels reach."""

from __future__ import annotations

from dataclasses import dataclass

from flowgrpo.errors import UserError, nearest

GEMM, ATTENTION, TRAFFIC = 0.63, 0.45, 0.75  # shares of the peaks that good kernels reach
LAUNCH = 2.5e-6  # seconds of the shortest kernel
BUS = 20e9  # bytes per second between host and GPU
GIB = 2**30
CONTEXT = 0.6 * GIB  # bytes of CUDA's context and its libraries
SPARE = 0.04  # share of the memory that is lost between the allocator's blocks


@dataclass(frozen=True)
class GPU:
    """Peaks of a GPU.

    memory: GiB, as torch reports them. half, single: dense TFLOP/s of bf16 and of fp32. bandwidth: TB/s of its memory.
    """

    memory: float
    half: float
    single: float
    bandwidth: float

    @property
    def room(self) -> float:
        """Bytes that tensors can take: without CUDA's context, and what is lost between the allocator's blocks."""
        return self.memory * GIB * (1 - SPARE) - CONTEXT

    def seconds(self, flops: float, traffic: int, half: bool, attention: bool) -> float:
        """Return the roofline's seconds of a kernel. traffic: bytes that it reads and writes."""
        peak = self.half if half else self.single
        rate = peak * 1e12 * (ATTENTION if attention else GEMM)
        return max(flops / rate, traffic / (self.bandwidth * 1e12 * TRAFFIC), LAUNCH)


GPUS = {
    "A100": GPU(79.2, 312, 19.5, 2.04),
    "H100": GPU(79.2, 989, 67, 3.35),
    "H200": GPU(139.8, 989, 67, 4.8),
    "B200": GPU(178.4, 2250, 75, 7.7),
    "4090": GPU(23.5, 165, 82.6, 1.01),
    "L40S": GPU(44.4, 362, 91.6, 0.864),
    "5090": GPU(31.4, 210, 105, 1.79),
}


def gpu_named(name: str) -> GPU:
    """Return the GPU of a name, in any case. Raises UserError."""
    if name.upper() not in GPUS:
        raise UserError(f"--gpu is {name!r}{nearest(name.upper(), list(GPUS))}")
    return GPUS[name.upper()]

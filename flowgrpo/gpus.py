"""Peaks of GPUs, of their makers' data sheets, and the shares of them that kernels reach."""

import re
from dataclasses import dataclass

from flowgrpo.errors import UserError

GEMM, ATTENTION, TRAFFIC = 0.63, 0.45, 0.75  # shares of the peaks that good kernels reach
LAUNCH = 2.5e-6  # seconds of the shortest kernel
HOST = 5e-6  # seconds of the host for an operation of eager torch: the least of the 5 to 25 us that are published
# Of a first epoch, each the least of what is published: loading of kernels; a plan of cuDNN for a new shape of
# attention; growth of the allocator by a GiB.
LOADING, PLAN, GROWTH = 0.5, 0.03, 0.01
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
        """The roofline's seconds of a kernel. traffic: bytes that it reads and writes."""
        peak = self.half if half else self.single
        rate = peak * 1e12 * (ATTENTION if attention else GEMM)
        return max(flops / rate, traffic / (self.bandwidth * 1e12 * TRAFFIC), LAUNCH)


# Memory as torch reports it. TFLOP/s without sparsity, accumulated in fp32. The V100 has no bf16: its first number is
# that of fp16.
GPUS = {
    "A10": GPU(22.1, 125, 31.2, 0.6),
    "A100": GPU(79.2, 312, 19.5, 2.04),
    "A100-40GB": GPU(39.4, 312, 19.5, 1.555),
    "A6000": GPU(47.4, 155, 38.7, 0.768),
    "B200": GPU(178.4, 2250, 75, 7.7),
    "H100": GPU(79.2, 989, 67, 3.35),
    "H200": GPU(139.8, 989, 67, 4.8),
    "L4": GPU(22.0, 121, 30.3, 0.3),
    "L40S": GPU(44.4, 362, 91.6, 0.864),
    "MI300X": GPU(191.5, 1307, 163, 5.3),
    "V100": GPU(31.7, 125, 15.7, 0.9),
    "3090": GPU(23.6, 71, 35.6, 0.936),
    "4080": GPU(15.6, 97, 48.7, 0.717),
    "4090": GPU(23.5, 165, 82.6, 1.01),
    "5090": GPU(31.4, 210, 105, 1.79),
    "6000-ADA": GPU(47.4, 364, 91.1, 0.96),
    "PRO-6000": GPU(94.9, 504, 125, 1.79),
}
MAKERS = re.compile(r"NVIDIA|AMD|GEFORCE|RTX|TESLA|INSTINCT|[^A-Z0-9]")


def gpu_named(name: str) -> GPU:
    """GPU of a name, in any case, with or without its maker and series: `NVIDIA GeForce RTX 4090`. A name like another
    is another card, so none is guessed. Raises UserError."""
    return GPUS[gpu_key(name)]


def gpu_key(name: str) -> str:
    """Key in GPUS of a name. Raises UserError."""
    known = {_short(key): key for key in GPUS} | {"A10080GB": "A100", "MI300": "MI300X", "RTX6000ADA": "6000-ADA",
                                                  "H10080GB": "H100", "6000ADAGENERATION": "6000-ADA"}
    if (key := known.get(_short(name))) is None:
        raise UserError(f"--gpu is {name!r}, whose numbers are not known: expected one of {', '.join(GPUS)}")
    return key


def _short(name: str) -> str:
    return MAKERS.sub("", name.upper())

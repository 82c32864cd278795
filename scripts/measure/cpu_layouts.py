"""Seconds of the starter's denoiser on a CPU with contiguous rows for linear layers and without, in turns, as ratios.

    python scripts/measure/cpu_layouts.py --turns 9

A ratio is the median over turns of the seconds with contiguous rows to those without, with the lowest and the highest
turn. Inputs are 96 rows of noise.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from flowgrpo.device import DTYPES
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.weights.forwards import contiguous_inputs

ROWS = 96


def works(pipe: Any, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Return what is timed, by name."""
    denoiser, generator = pipe.transformer, torch.Generator().manual_seed(0)
    width, pooled = denoiser.config.joint_attention_dim, denoiser.config.pooled_projection_dim

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(ROWS, *shape, generator=generator).to(dtype)

    x, given = noise(4, 16, 16), {"encoder_hidden_states": noise(16, width), "pooled_projections": noise(pooled),
                                  "timestep": torch.full((ROWS,), 500.0), "return_dict": False}

    def forward() -> torch.Tensor:
        return denoiser(x, **given)[0]

    def backward() -> None:
        forward().float().square().mean().backward()

    return {"forward": torch.no_grad()(forward), "forward and backward": backward}


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    print("| precision | | with / without | range |\n|---|---|---:|---:|")
    for precision in ("fp32", "bf16"):
        stock, ours = load_pipeline("starter", precision), load_pipeline("starter", precision)
        contiguous_inputs([ours.transformer], torch.device("cpu"))
        pairs = zip(works(ours, DTYPES[precision]).items(), works(stock, DTYPES[precision]).values(), strict=True)
        for (name, new), old in pairs:
            old()
            new()
            ratios = [seconds(new) / seconds(old) for _ in range(args.turns)]
            print(f"| {precision} | {name} | {median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |")


if __name__ == "__main__":
    main()

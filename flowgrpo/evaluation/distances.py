"""Distances of the tuned model's images to the base's: FID and KID of two sets in a feature space, and SSIM of pairs
from the same prompts and seeds; and the base's images under shuffled prompts: a reward that scores them alike cannot
tell whether an image fits.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from flowgrpo import rewards
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import random_state_kept
from flowgrpo.errors import UserError
from flowgrpo.evaluation.statistics import LEAST, PAIRS
from flowgrpo.rewards import guards
from flowgrpo.rewards.preprocessing import eight_bit, grey
from flowgrpo.rewards.reward import FPS

SHORT = 256  # pixels of an image's shorter side, to which `structure` scales
SIDE = 256  # pixels of the image by which the number of features is found, where the run has no size
MOST = 32  # images of a reward

# By name: a reward, and by the index of each prompt the other one under which it scores that prompt's image.
Shuffled = dict[str, tuple[Any, dict[int, Prompt]]]


def fid(one: Tensor, other: Tensor) -> float:
    """Frechet distance of two Gaussians with the means and covariances of features [N, D] and [M, D].

    |m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)), Heusel et al. 2017 (1706.08500), equation 6; the covariances have a
    divisor of N - 1, as in torchmetrics. Computed in float64. It is biased upwards by few images.
    """
    one, other = one.double(), other.double()
    covariances = torch.atleast_2d(torch.cov(one.T)), torch.atleast_2d(torch.cov(other.T))
    values, vectors = torch.linalg.eigh(covariances[0])
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    shared = torch.linalg.eigvalsh(root @ covariances[1] @ root).clamp(min=0).sqrt().sum()
    traces = covariances[0].trace() + covariances[1].trace()
    return float((one.mean(0) - other.mean(0)).square().sum() + traces - 2 * shared)


def kid(one: Tensor, other: Tensor) -> float:
    """Unbiased squared MMD of features [N, D] and [M, D] under the kernel (x y / D + 1)^3.

    Binkowski et al. 2018 (1801.01401), section 3; of all images, where torchmetrics averages over random subsets.
    Computed in float64. An unbiased estimate may be below 0.
    """
    one, other = one.double(), other.double()
    pairs = ((one, one), (other, other), (one, other))
    *alike, mixed = ((x @ y.T / x.shape[1] + 1) ** 3 for x, y in pairs)
    within = [(kernel.sum() - kernel.trace()) / (len(kernel) * (len(kernel) - 1)) for kernel in alike]
    return float(within[0] + within[1] - 2 * mixed.mean())


DISTANCES: dict[str, Callable[[Tensor, Tensor], float]] = {"fid": fid, "kid": kid}


def require(names: Sequence[str], features: str | Callable, images: int, size: tuple[int, int]) -> None:
    """Raise UserError for an unknown distance, for features of pixels, and for fewer images than a distance needs.

    images: of each set. FID needs more images than features, since a covariance has full rank only then; KID needs
    LEAST. size: height and width of an image, at which the features are counted.
    """
    for name in names:
        if name not in DISTANCES:
            raise UserError(f"--distance: got {name!r}, expected {' or '.join(DISTANCES)}, or both with a comma")
    if names and features == "pixels":
        raise UserError("--distance: is of the features of a network: add --features inception (those of published FID)"
                        ", --features clip, or path/to/file.py:function")
    for name in names:
        count = LEAST
        if name == "fid":
            made = torch.as_tensor(guards.extractor(features)(torch.zeros(2, 3, *size)))
            count = int(made.flatten(1).shape[1]) + 1
        if images < count:
            raise UserError(f"--distance {name}: got {images} images of each model, expected at least {count}"
                            f"{', one more than there are features' if name == 'fid' else ''}: raise --samples, or use "
                            f"a longer suite{', or kid' if name == 'fid' else ''}")


def measure_distances(names: Sequence[str], features: str | Callable, base: Iterable[Tensor], tuned: Iterable[Tensor]
             ) -> dict[str, Any]:
    """Distances by name, the features and the number of images of each set.

    base, tuned: batches of images [B, 3, H, W] in [0, 1], or of clips [B, F, 3, H, W], of which the middle frame is
    taken. Raises UserError for features that are not finite.
    """
    extract = guards.extractor(features)
    sets = [torch.cat([torch.as_tensor(extract(batch if batch.ndim == 4 else batch[:, batch.shape[1] // 2]))
                       .detach().cpu().flatten(1) for batch in batches]) for batches in (base, tuned)]
    for each in sets:
        if not each.isfinite().all():
            raise UserError("--distance: --features returned nan or inf")
    shown = features if isinstance(features, str) else getattr(features, "__name__", type(features).__name__)
    return {"features": shown, "images": len(sets[0]), **{name: DISTANCES[name](*sets) for name in names}}


def structure(base: Tensor | list[str], tuned: Tensor | list[str]) -> dict[str, Any] | None:
    """Mean SSIM of pairs of images [N, 3, H, W] of the same prompts and seeds, and their number; None for anything
    else, and for images smaller than SSIM's window.

    Images are rounded to 8 bits, as in a run's files, and averaged down to a shorter side of about SHORT, as the
    authors of SSIM advise.
    """
    if isinstance(base, list) or isinstance(tuned, list) or base.ndim != 4 or base.shape != tuned.shape:
        return None
    factor = max(1, round(min(base.shape[-2:]) / SHORT))
    if not len(base) or min(base.shape[-2:]) // factor < guards.SIDE:
        return None

    def small(image: Tensor) -> Tensor:
        light = grey(torch.from_numpy(eight_bit(image)).movedim(-1, -3) / 255)
        return torch.nn.functional.avg_pool2d(light[None], factor)[0]

    ssims = [guards.ssim(small(one), small(other)).mean().item() for one, other in zip(base, tuned)]
    return {"ssim": sum(ssims) / len(base), "images": len(base)}


def shuffle(functions: Mapping[str, Any], prompts: Sequence[Prompt]) -> Shuffled:
    """Rewards that score one sample by itself in this process, if PAIRS of the first MOST prompts have another
    prompt."""
    found: Shuffled = {}
    for name, reward in functions.items():
        parts = rewards.inside(reward)
        reads = {read for part in parts for read in part.reads if not read.startswith("metadata.")}
        if any(part.unit != "sample" for part in parts) or not reads <= {FPS} or rewards.slow(reward):
            continue
        rows = [i for i, prompt in enumerate(prompts[:MOST])
                if getattr(reward, "rule", WatchRule()).applies(prompt.metadata)]
        if len(others := _others(rows, prompts)) >= PAIRS:
            found[name] = (rewards.for_trial(reward) if isinstance(reward, rewards.Composed) else reward, others)
    return found


def score_shuffled(shuffled: Shuffled, indices: Sequence[int | None], images: Any, policy: Any) -> torch.Tensor:
    """Score images of the prompts with these indices under the other prompts -> [B, R]; NaN for an index of None, for a
    prompt without another, and where a reward fails. The random state is kept."""
    scores = torch.full((len(indices), len(shuffled)), torch.nan)
    with random_state_kept(policy.device):
        for column, (name, (reward, others)) in enumerate(shuffled.items()):
            paired = {row: others[i] for row, i in enumerate(indices) if i is not None and i in others}
            if not paired:
                continue
            rows, of = [*paired], [*paired.values()]
            some = [images[row] for row in rows] if isinstance(images, list) else images[rows]
            with suppress(UserError):  # it has just scored the same images under their own prompts
                scores[rows, column] = rewards.score(
                    {name: reward}, some, [p.text for p in of], [p.metadata for p in of], fps=policy.fps)[:, 0]
    return scores


def _others(indices: list[int], prompts: Sequence[Prompt]) -> dict[int, Prompt]:
    """Another prompt for each index: that half the list away, or at the distance that gives most of them another text
    or other metadata. Those that get their own are left out."""
    found: dict[int, Prompt] = {}
    count = len(indices)
    for shift in sorted(range(1, count), key=lambda shift: abs(shift - count // 2)):
        moved = {i: prompts[j] for i, j in zip(indices, indices[shift:] + indices[:shift])
                 if (prompts[i].text, prompts[i].metadata) != (prompts[j].text, prompts[j].metadata)}
        found = moved if len(moved) > len(found) else found
    return found

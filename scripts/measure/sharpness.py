"""Compare measures of blur on photographs and on packaged scenes: `python scripts/measure/sharpness.py [MODEL]`.

MODEL: `starter` or `starter_consistency`, whose images of 60 held-out prompts are compared in place of rendered scenes.

Needs the packages scikit-image, scikit-learn and matplotlib for their photographs. Three measures of the literature
and the package's own, of the luminance:

laplacian    variance of the Laplacian (Pech-Pacheco et al. 2000), the reward `sharpness`
contrast     the same over the variance of the luminance
reblur       share of the differences of neighbours that a second blur leaves (Crete et al. 2007), 9 pixels
run length   mean width of the monotone runs across strong edges (Marziliano et al. 2002, the widths of JNB and CPBD)
edge width   `guards.edge_widths`: rms gradient over rms Laplacian, times the root of 2; its inverse is `crispness`

Each number is the measure over that of the unchanged image, a mean over images. `frame`: only the middle quarter of the
image, on a plain ground. A measure of blur stays at 1, and one that content confounds does not. `spread`: standard
deviation over mean of the unchanged images.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy import ndimage

from flowgrpo.data import sets
from flowgrpo.evaluation import samplers
from flowgrpo.evaluation.measured import spread
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.rewards.guards import edge_widths
from flowgrpo.rewards.preprocessing import LUMA
from flowgrpo.rewards.starter import scene
from flowgrpo.starter import scenes
from flowgrpo.types import unwrap

PHOTOGRAPHS = {"skimage": ("data/astronaut.png", "data/chelsea.png", "data/coffee.png", "data/rocket.jpg",
                           "data/motorcycle_left.png"),
               "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
               "matplotlib": ("mpl-data/sample_data/grace_hopper.jpg",)}
SCENES, SEED = 64, 0
GREY = np.float32(LUMA)


def photographs() -> Iterator[np.ndarray]:
    """Yield photographs of installed packages, float [H, W, 3] in [0, 1]."""
    for package, files in PHOTOGRAPHS.items():
        folder = Path(__import__(package).__file__).parent
        for file in files:
            with Image.open(folder / file) as picture:
                yield np.asarray(picture.convert("RGB"), np.float32) / 255


def rendered() -> Iterator[np.ndarray]:
    """Yield scenes, float [64, 64, 3] in [0, 1], their tasks in turn."""
    rng = np.random.default_rng(SEED)
    for i in range(SCENES):
        claims = scenes.sample_claims(rng, scenes.TASKS[i % len(scenes.TASKS)])
        yield scenes.render(claims, rng).astype(np.float32)


def generated(model: str, count: int = 60) -> Iterator[np.ndarray]:
    """Yield images of a packaged model for evenly spaced held-out prompts, seeds 0, 1, ..."""
    prompts = spread(sets.load(unwrap(sets.SETS["starter"].held_out)), count)
    pipe, together, asked = load_pipeline(model), samplers.Together(), samplers.call_arguments(model, None)
    for first in range(0, count, 30):
        for image in together.draw(pipe, prompts[first:first + 30], range(first, first + 30), asked, ""):
            yield image.permute(1, 2, 0).numpy()


def tensor(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None]


# --- measures --------------------------------------------------------------------------------------------------------

def laplacian(image: np.ndarray) -> float:
    return float(ndimage.laplace(image @ GREY)[1:-1, 1:-1].var())


def contrast(image: np.ndarray) -> float:
    return laplacian(image) / float((image @ GREY).var())


def reblur(image: np.ndarray, size: int = 9) -> float:
    light, left = image @ GREY, []
    for axis in (0, 1):
        own = np.abs(np.diff(light, axis=axis))
        blurred = np.abs(np.diff(ndimage.uniform_filter1d(light, size, axis=axis), axis=axis))
        left.append(1 - np.maximum(own - blurred, 0).sum() / own.sum())
    return float(max(left))


def run_length(image: np.ndarray) -> float:
    light, widths = image @ GREY, []
    for turned in (light, light.T):
        slope, edge = np.sign(np.diff(turned, axis=1)), np.abs(ndimage.sobel(turned, 1))[:, :-1]
        strong = 2 * np.sqrt((edge**2).mean())
        for row, along in zip(slope, edge):
            starts = np.r_[0, np.flatnonzero(np.diff(row)) + 1]
            peaks = np.maximum.reduceat(along, starts)
            widths.append(np.diff(np.r_[starts, len(row)])[peaks > strong])
    return float(np.concatenate(widths).mean())


def edge_width(image: np.ndarray) -> float:
    return edge_widths(tensor(image)).item()


def contour(image: np.ndarray) -> float:
    return scene.edge_widths(tensor(image))[0]


MEASURES: dict[str, Callable[[np.ndarray], float]] = {
    "laplacian": laplacian, "contrast": contrast, "reblur": reblur, "run length": run_length, "edge width": edge_width}


# --- changes ---------------------------------------------------------------------------------------------------------

def blurred(sigma: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda image: ndimage.gaussian_filter(image, (sigma, sigma, 0))


def framed(image: np.ndarray) -> np.ndarray:
    height, width = (side // 4 for side in image.shape[:2])
    inside = slice(height, 3 * height), slice(width, 3 * width)
    plain = np.broadcast_to(np.median(image, (0, 1)), image.shape).copy()
    plain[inside] = image[inside]
    return plain


def noisy(image: np.ndarray) -> np.ndarray:
    return np.clip(image + 0.01 * np.random.default_rng(SEED).standard_normal(image.shape, np.float32), 0, 1)


CHANGES = {"0.25": blurred(0.25), "0.5": blurred(0.5), "1": blurred(1), "2": blurred(2), "frame": framed,
           "contrast x 0.7": lambda image: 0.5 + 0.7 * (image - 0.5), "noise 0.01": noisy}


def table(images: list[np.ndarray], measures: dict[str, Callable[[np.ndarray], float]], skipped: tuple[str, ...] = ()
          ) -> Iterator[str]:
    """Yield the rows of a Markdown table: a measure's values over those of the unchanged images, and the number of
    images on which it is monotone in blur."""
    changes = {name: change for name, change in CHANGES.items() if name not in skipped}
    yield f"| measure | {' | '.join(changes)} | spread | monotone |"
    yield f"|---|{'---:|' * (len(changes) + 2)}"
    for name, measure in measures.items():
        base = np.array([measure(image) for image in images])
        values = {label: np.array([measure(change(image)) for image in images]) for label, change in changes.items()}
        levels = np.diff([base, values["0.5"], values["1"], values["2"]], axis=0)
        monotone = int((np.abs(np.sign(levels).sum(0)) == len(levels)).sum())
        shares = " | ".join(f"{np.nanmean(value / base):.2f}" for value in values.values())
        apart = np.nanstd(base) / np.nanmean(base)
        yield f"| {name} | {shares} | {apart:.2f} | {monotone} of {len(images)} |"


if __name__ == "__main__":
    shown = list(generated(sys.argv[1])) if len(sys.argv) > 1 else list(rendered())
    print("\n".join(["photographs", *table(list(photographs()), MEASURES), "", "scenes",
                     *table(shown, MEASURES | {"contours": contour}, ("frame",))]))

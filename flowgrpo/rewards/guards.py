"""Guards against reward hacking: small rewards that fall when a model exploits the main one, safety (safe for work)
among them; and measures of an image without a model: compressibility, sharpness, SSIM of two.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from flowgrpo.data.open_image import require_open
from flowgrpo.errors import UserError
from flowgrpo.packages import import_optional
from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.clip import ClipCosine
from flowgrpo.rewards.local_model import ImageModel, load_parts
from flowgrpo.rewards.preprocessing import eight_bit, grey, read_tensor
from flowgrpo.user_code import load

LICENCE = "Apache-2.0"
SMALL = 16  # side of the miniatures of `pixels`
QUALITY = 95
SIDE, DEVIATION = 11, 1.5  # pixels of SSIM's Gaussian window
FLAT = 1e-12  # mean square of the Laplacian of an image without edges
# Weights of FID, as torch-fidelity converted them.
INCEPTION = ("https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/"
             "weights-inception-2015-12-05-6726825d.pth")
STEADY = 0.01**2, 0.03**2  # SSIM's constants, for values in [0, 1]


def pixels(images: Tensor) -> Tensor:
    """16 by 16 miniatures [B, 768] of images [B, 3, H, W], scaled so that black and white are 1 apart."""
    small = torch.nn.functional.interpolate(images.detach().cpu().double(), (SMALL, SMALL), mode="area")
    return small.flatten(1) / small[0].numel() ** 0.5


def extractor(features: str | dict[str, Any] | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Feature function, images [B, 3, H, W] -> [B, D]: `pixels`, CLIP's of unit length for `clip` (the model of
    `clip_cosine`, or a dictionary of its arguments), those of FID for `inception`, a given function, or one in a
    file."""
    if features == "pixels":
        return pixels
    if features == "inception":
        return inception()
    if features == "clip" or isinstance(features, dict):
        return ClipCosine(**features if isinstance(features, dict) else {}).features
    if callable(features):
        return features
    return load(features)


def inception() -> Callable[[Tensor], Tensor]:
    """Torchmetrics' feature function of FID: images [B, 3, H, W] in [0, 1] -> [B, 2048], of the InceptionV3 of
    torch-fidelity. Raises UserError if a package, or the file of weights in torch's cache, is missing."""
    who = "--features inception"
    import_optional("torch_fidelity", "fid", who)
    network = import_optional("torchmetrics.image.fid", "fid", who).NoTrainInceptionV3
    file = Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION.rpartition("/")[2]
    if not file.is_file():
        raise UserError(f"{who} reads weights that are not here: curl -L --create-dirs -o {file} {INCEPTION}")
    try:
        torch.load(file, weights_only=True)  # torch-fidelity unpickles it: values alone are taken
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(f"{who}: {file} is not a file of weights ({type(error).__name__}): remove it, and fetch it "
                        "again") from None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    extract = network("inception-v3-compat", ["2048"], str(file)).to(device)

    @torch.no_grad()
    def features(images: Tensor) -> Tensor:
        return extract((255 * images).round().clamp(0, 255).byte().to(device)).cpu()

    return features


def distances(features: Tensor) -> Tensor:
    """Mean Euclidean distance of each sample to the others of its group. [P, G, D] -> [P, G]."""
    features = features.double()
    apart = (features[:, :, None] - features[:, None]).norm(dim=-1)
    return apart.sum(-1) / (features.shape[1] - 1)


@built_in("diversity", "variety varied collapse alike different")
class Diversity:
    """Diversity: mean feature distance of a sample to the others of its group.

    features: "pixels" (miniatures of 16 by 16; a distance of 1 is black to white), "clip" (embeddings of unit length),
    arguments of `clip_cosine` such as {device: "cuda:1"}, a function of images [B, 3, H, W] to [B, D], or
    `file.py:function`.
    """

    features: str | dict[str, Any] | Callable[[Tensor], Tensor] = "pixels"
    group = True
    about = About(modality="image", range=(0, None), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        vars(self)["features"] = extractor(self.features)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
                 group: int) -> Tensor:
        assert callable(self.features)  # `extractor` made it so
        features = torch.as_tensor(self.features(images))
        return distances(features.reshape(len(features) // group, group, -1)).flatten()


@built_in("base_similarity", "likeness similar drift preserve")
class BaseSimilarity:
    """Similarity to the base model's image of the prompt: 1 minus the distance of features, 1 for equal features.

    key: metadata key of that image's path (`flowgrpo sample --prompts` writes such a file). The file is read again
    each time and resized to the sample's size. A prompt without one is compared with the base's image from the same
    initial noise, which a run draws for each sample; None if there is none either.
    features: as in `Diversity`.
    Raises UserError for an unreadable file.
    """

    key: str = "base_image"
    features: str | dict[str, Any] | Callable[[Tensor], Tensor] = "pixels"
    base = True
    privileged = True  # reads files that metadata name
    about = About(modality="image", range=(None, 1), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        vars(self)["features"] = extractor(self.features)

    @property
    def made_of(self) -> list[Any]:
        return [self.features]

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
                 base: Tensor | None = None) -> list[float | None]:
        rows = [i for i, entry in enumerate(metadata) if self.key in entry or base is not None]
        if not rows:
            return [None] * len(prompts)
        assert callable(self.features)  # `extractor` made it so
        drawn: Any = base  # there for rows without a file
        bases = torch.stack([_read(metadata[i][self.key], images.shape[-2:]) if self.key in metadata[i]
                             else drawn[i] for i in rows])
        apart = (torch.as_tensor(self.features(images[rows])) - torch.as_tensor(self.features(bases))).norm(dim=-1)
        scores = {i: 1 - distance for i, distance in zip(rows, apart.tolist())}
        return [scores.get(i) for i in range(len(prompts))]


def _read(path: str, size: Sequence[int]) -> Tensor:
    from torchvision.transforms.functional import resize

    require_open()
    try:
        image = read_tensor(path)
    except UserError as error:
        raise UserError(f"reward 'base_similarity': the base model's image {error}") from None
    return image if image.shape[-2:] == tuple(size) else resize(image, list(size), antialias=True)


@built_in("grid_artefacts", "artifact pattern vae checkerboard")
class GridArtefacts:
    """Minus the share of an image's edges that repeat with the latent grid: 0 none, -1 all.

    period: pixels of one patch: those of a latent pixel (8 in most autoencoders) times the transformer's patch size (2
    in most).
    The profile is the mean absolute step between neighbouring columns, over the columns. Its power at the multiples of
    1 / period counts, less the part expected by chance (as in the adjusted R^2 of the profile's means by phase, which
    it equals). Rows likewise; the larger of both counts. A legitimate grid of this very period, such as tiles, is
    penalised too.
    """

    period: int = 16
    about = About(modality="image", range=(-1, 0), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        if self.period < 2:
            raise UserError(f"reward 'grid_artefacts': period is {self.period}, expected 2 pixels or more")

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        light = grey(images)
        if min(light.shape[-2:]) < 3 * self.period + 1:
            raise UserError(f"reward 'grid_artefacts' got images of {list(light.shape[-2:])} pixels, expected at "
                            f"least {3 * self.period + 1}, three periods")
        profiles = light.diff(dim=-1).abs().mean(-2), light.diff(dim=-2).abs().mean(-1)
        return -torch.maximum(*(periodic(profile, self.period) for profile in profiles))


def periodic(profile: Tensor, period: int) -> Tensor:
    """Share of the variance of a profile [..., N] that has that period, in [0, 1], less the mean share of white noise.
    As many whole periods as fit are used; 0 for a flat profile."""
    count = profile.shape[-1] // period
    power = torch.fft.rfft(profile[..., :count * period]).abs().square()
    length = count * period
    power[..., 1:(length + 1) // 2] *= 2  # all but 0 and the highest stand for two frequencies
    total = power[..., 1:].sum(-1)
    rest = total - power[..., count::count].sum(-1)
    unexplained = (rest / (length - period)) / (total / (length - 1)).clamp(min=1e-300)
    return torch.where(total > 1e-12 * power[..., 0], (1 - unexplained).clamp(0, 1), 0)


@built_in("over_saturation", "saturated color colour garish burnt contrast")
class OverSaturation:
    """Minus the excess of an image's colourfulness, 0 to -1.

    0 if no pixel's largest and smallest channel differ by more than `limit`, -1 if all differ by 1.
    """

    limit: float = 0.7
    differentiable = True
    about = About(modality="image", range=(-1, 0), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        if not 0 <= self.limit < 1:
            raise UserError(f"reward 'over_saturation': limit is {self.limit}, expected from 0 to below 1")

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        chroma = images.amax(-3) - images.amin(-3)
        return -(chroma - self.limit).clamp(min=0).mean((-2, -1)) / (1 - self.limit)


@built_in("jpeg_compressibility", "simple smooth file size",
          About(modality="image", range=(None, 0), needs="", licence="Apache-2.0"))
def jpeg_compressibility(images: Tensor, prompts: Sequence[str]) -> list[float]:
    """Minus the size of an image as a JPEG of quality 95, in kilobytes (DDPO)."""
    return [-size for size in jpeg_incompressibility(images, prompts)]


@built_in("jpeg_incompressibility", "detail texture file size",
          About(modality="image", range=(0, None), needs="", licence="Apache-2.0"))
def jpeg_incompressibility(images: Tensor, prompts: Sequence[str]) -> list[float]:
    """Size of an image as a JPEG of quality 95, in kilobytes (DDPO)."""
    sizes = []
    for image in eight_bit(images):
        kept = io.BytesIO()
        Image.fromarray(image).save(kept, "JPEG", quality=QUALITY)
        sizes.append(kept.tell() / 1000)
    return sizes


@built_in("sharpness", "sharp blur blurry crisp focus detail",
          About(modality="image", range=(0, None), needs="", licence="Apache-2.0"))
def sharpness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Variance of the Laplacian of an image's luminance, in [0, 1], without its outermost pixels."""
    light = grey(images)
    if min(light.shape[-2:]) < 3:
        raise UserError(f"reward 'sharpness': got images of {light.shape[-1]} x {light.shape[-2]} pixels, expected "
                        "3 x 3 or more")
    return _laplacian(light).flatten(-2).var(-1, correction=0)


def _laplacian(light: Tensor) -> Tensor:
    """Of luminances [..., H, W]: [..., H-2, W-2]."""
    around = light[..., :-2, 1:-1] + light[..., 2:, 1:-1] + light[..., 1:-1, :-2] + light[..., 1:-1, 2:]
    return around - 4 * light[..., 1:-1, 1:-1]


def edge_widths(images: Tensor) -> Tensor:
    """`widths_of` for the luminance of images [B, 3, H, W]: [B]."""
    return widths_of(grey(images))


def widths_of(light: Tensor) -> Tensor:
    """Mean width [...] of the edges of luminances [..., H, W] in pixels; NaN for one without any.

    sqrt(2) times the root mean square of the gradient, over that of the Laplacian: 1 for a step between two pixels, 2 s
    for an edge with the profile of a Gaussian of deviation s > 1. It does not change with contrast, nor with the share
    of the image that has edges. Noise makes it smaller.
    """
    light = light.double()
    if min(light.shape[-2:]) < 3:
        return light.new_full(light.shape[:-2], torch.nan)
    inside = light[..., 1:-1, 1:-1]
    across, down = light[..., 1:-1, 2:] - inside, light[..., 2:, 1:-1] - inside
    slope = (across.square() + down.square()).flatten(-2).mean(-1)
    bend = _laplacian(light).square().flatten(-2).mean(-1)
    return torch.where(bend > FLAT, (2 * slope / bend.clamp(min=FLAT)).sqrt(), torch.nan)


@built_in("crispness", "sharp blur blurry focus detail",
          About(modality="image", range=(0, None), needs="", licence="Apache-2.0"))
def crispness(images: Tensor, prompts: Sequence[str]) -> list[float | None]:
    """Inverse of the mean width of an image's edges in pixels, whatever their contrast and share; None without edges.

    A blur of 0.5 pixels lowers it by a sixth, one of 1 pixel by a half. See `edge_widths`.
    """
    return [None if width != width else 1 / width for width in edge_widths(images).tolist()]


def ssim(one: Tensor, two: Tensor) -> Tensor:
    """SSIM at each place of two luminances [H, W] in [0, 1] that the window fits into: [H-10, W-10]."""
    places = torch.arange(SIDE, dtype=one.dtype) - SIDE // 2
    line = torch.exp(-places.square() / (2 * DEVIATION**2))
    window = (line[:, None] * line / line.sum() ** 2)[None, None]
    maps = torch.stack([one, two, one * one, two * two, one * two])[:, None]
    mean, other, square, other_square, product = F.conv2d(maps, window)[:, 0]
    variance, other_variance, covariance = square - mean**2, other_square - other**2, product - mean * other
    light, contrast = STEADY
    return ((2 * mean * other + light) * (2 * covariance + contrast)
            / ((mean**2 + other**2 + light) * (variance + other_variance + contrast)))


@built_in("safety", "nsfw nude porn explicit unsafe filter", eq=False)
class Safety(ImageModel):
    """Probability that an image is safe: 1 minus that of the classes `unsafe`.

    model: a folder or a hub id of an image classifier. revision: of a hub id. unsafe: names of classes.
    dtype (fp32), device and batch_size (32): as in `LocalModel`.
    Raises UserError if the weights are unavailable, and for a classifier without these classes (names, in any case).
    """

    model: str = "Falconsai/nsfw_image_detection"
    revision: str | None = None
    unsafe: Sequence[str] = ("nsfw",)
    reward, parameters = "safety", 86e6
    about = About(modality="image", range=(0, 1), needs="", licence="Apache-2.0")

    def _load(self) -> tuple[Any, Any, list[int]]:
        classifier, processor = load_parts(self, "AutoModelForImageClassification", "AutoImageProcessor")
        labels, unsafe = classifier.config.id2label, {name.lower() for name in self.unsafe}
        rows = [row for row, label in labels.items() if label.lower() in unsafe]
        if len(rows) != len(unsafe):
            raise UserError(f"reward 'safety': unsafe is {', '.join(self.unsafe)}, but the classes of {self.model!r} "
                            f"are {', '.join(labels.values())}")
        return classifier, processor, rows

    def _scores(self, images: Tensor, prompts: list[str]) -> Tensor:
        classifier, processor, rows = self.models
        inputs = processor(images=list(eight_bit(images)), return_tensors="pt", input_data_format="channels_last")
        logits = classifier(pixel_values=inputs.pixel_values.to(self.device, self.float_type)).logits.float()
        return 1 - logits.softmax(-1)[:, rows].sum(-1)

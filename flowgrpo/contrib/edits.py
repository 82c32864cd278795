"""Rewards of an edit beside its source: a judge, and preservation of the source without a model.

The judge's wording is ours, the combination of its marks VIEScore's (2312.14867).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo.data.images import CROP, SQUEEZE, fit_of, read_image
from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.guards import SIDE, ssim
from flowgrpo.rewards.preprocessing import grey, tensor_of
from flowgrpo.rewards.vlm_judge.client import Answer
from flowgrpo.rewards.vlm_judge.judge import LICENCE, Asking, sources
from flowgrpo.rewards.vlm_judge.parse import parser

AXES = ("instruction", "preservation", "quality")


@built_in("edit_judge", "vlm gpt instruction editing", eq=False, kw_only=True)
class EditJudge(Asking):
    """Mark of an edit by a judge that sees source and output: of instruction, preservation and quality, 0 to 1.

    Combined as in VIEScore (2312.14867): sqrt(min(instruction, preservation) * quality). None for a prompt without a
    source. axis: "overall", or one of the three alone.
    """

    template: str = ("A source and an output are shown; the output was made from the source by this instruction: "
                     "{prompt}\nRate three things from 0 to 10 each. instruction: is everything that it asks for done, "
                     "and done right? preservation: is all else as it was, persons, objects, background and layout? "
                     "quality: is the output natural, without artefacts, seams or distortions, whatever was asked for? "
                     "An output that equals the source gets 0 for instruction.\nAnswer with JSON alone: "
                     "{\"instruction\": N, \"preservation\": N, \"quality\": N}")
    show: Sequence[str] = ("source", "output")
    axis: str = "overall"
    about = About(modality="image/video", range=(0, 1), needs="server", licence=LICENCE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axis not in ("overall", *AXES):
            raise UserError(f"reward 'edit_judge': axis is {self.axis!r}, expected overall, {', '.join(AXES)}")

    def __call__(self, outputs: Tensor | Sequence[str], prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
                 ) -> list[float | None | Failed]:
        rows = [row for row, entry in enumerate(metadata) if sources(entry)[1]]
        shown: Any = [outputs[row] for row in rows]
        values = dict(zip(rows, self._pointwise(shown, [prompts[row] for row in rows], [metadata[row] for row in rows],
                                                self._combine_axes)))
        return [values.get(row) for row in range(len(prompts))]

    def _combine_axes(self, answer: Answer) -> float | None:
        marks = {axis: parser(f"json {axis} in [0, 10]", (0, 10))(answer.text) for axis in AXES}
        if self.axis != "overall":
            return marks[self.axis]
        instruction, preservation, quality = marks.values()
        if instruction is None or preservation is None or quality is None:
            return None
        return math.sqrt(min(instruction, preservation) * quality)


MEASURES = ("ssim", "distance")


@built_in("preservation", "edit unchanged similar")
class Preservation:
    """Likeness of an edit to its source image, outside of the region that the edit may change.

    The source is brought to the output's size as the pipeline did it in this process: squeezed, as image-to-video
    pipelines do, or else scaled to fill it and cut at the sides that stand over. None for a prompt without a source,
    and for one whose mask leaves nothing to compare.

    key: metadata key of the source's path; a prompt's `image` is under `image`. mask: of the path of an image, white
    (above half) where the edit may change things; prompts without one are compared everywhere.
    measure: `ssim`, or `distance` for 1 - the root mean square difference of the colours, 0 to 1.
    fit: `squeeze` or `crop` for all sources, whatever the pipeline did.
    Raises UserError for an unreadable file, and for outputs too small for the window.
    """

    key: str = "image"
    mask: str = "mask"
    measure: str = "ssim"
    fit: str | None = None
    privileged = True  # reads files that metadata name
    about = About(modality="image", range=(-1, 1), needs="", licence="Apache-2.0")

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise UserError(f"reward 'preservation': measure is {self.measure!r}, expected {' or '.join(MEASURES)}")
        if self.fit not in (None, SQUEEZE, CROP):
            raise UserError(f"reward 'preservation': fit is {self.fit!r}, expected {SQUEEZE}, {CROP} or nothing")

    def __call__(self, images: Tensor, prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        if self.measure == "ssim" and min(images.shape[-2:]) < SIDE:
            raise UserError(f"reward 'preservation': got images of {images.shape[-1]} x {images.shape[-2]} pixels, "
                            f"expected {SIDE} x {SIDE} or more, or measure: distance")
        return [self._score(image, entry) if self.key in entry else None for image, entry in zip(images, metadata)]

    def _score(self, image: Tensor, entry: dict[str, Any]) -> float | None:
        size = image.shape[-2], image.shape[-1]
        fit = self.fit or fit_of(entry[self.key], size)
        source, image = _read(entry[self.key], size, fit).double(), image.detach().cpu().double()
        kept = torch.ones(size, dtype=torch.bool)
        if self.mask in entry:
            kept = grey(_read(entry[self.mask], size, fit, opaque=True)) < 0.5
        if self.measure == "ssim":
            values, edge = ssim(grey(image), grey(source)), SIDE // 2
            kept = kept[edge:size[0] - edge, edge:size[1] - edge]
        else:
            values = (image - source).square().mean(0)
        if not kept.any():
            return None
        mean = values[kept].mean().item()
        return mean if self.measure == "ssim" else 1 - mean**0.5


def _read(path: str, size: tuple[int, int], fit: str, opaque: bool = False) -> Tensor:
    try:
        return tensor_of(read_image(path, size, opaque, fit))
    except UserError as error:
        raise UserError(f"reward 'preservation': {error}") from None

"""Sampling under an expanded prompt or another guidance scale, of prompts that are learned without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from flowgrpo.data.prompts import Guidance, Prompt
from flowgrpo.errors import UserError
from flowgrpo.parts import AtLeast, part

if TYPE_CHECKING:
    from flowgrpo.config.schema import Config


@part("expansion")
class Expansion:
    """Sample every prompt under an expanded text or at another guidance scale; score and learn its samples under the
    prompt itself.

    The ratio is pi(o | prompt) / pi_old(o | expansion), as of Guide-GRPO (2506.13923). A target of finished samples,
    such as noised finals, has no ratio to sampling and takes them as they are.

    text: with {prompt}, such as "{prompt}, each object clearly visible".
    key: of the metadata, under which a prompt has an expansion of its own in place of `text`; empty: none has.
    scale: the guidance scale of sampling, of pipelines; None: `train.guidance`.
    learned: True: the loss reads the expansion and the scale too, so that the first ratio is 1; rewards do not.
    """

    text: str = "{prompt}"
    key: str = ""
    scale: Annotated[float | None, AtLeast(0)] = None
    learned: bool = False

    def __post_init__(self) -> None:
        if "{prompt}" not in self.text:
            raise ValueError(f"Expansion: text is {self.text!r}, expected {{prompt}} in it")

    def require_config(self, config: Config, of_text: bool) -> None:
        """Raise UserError for an expansion under which prompts are sampled as without it."""
        if self.text == "{prompt}" and not self.key and self.scale is None:
            raise UserError("parts.expansion changes nothing: set its text, key or scale")
        require_no_scale("expansion", self.scale, of_text)

    def __call__(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts with their guidance; those that have some already stay."""
        return [prompt if prompt.guided else replace(prompt, guided=Guidance(
            self.expanded(prompt), self.scale, self.learned)) for prompt in prompts]

    def expanded(self, prompt: Prompt) -> str:
        """Return the text under which a prompt is sampled."""
        own = prompt.metadata.get(self.key) if self.key else None
        return self.text.replace("{prompt}", prompt.text) if own is None else str(own)


def require_no_scale(place: str, scale: float | None, of_text: bool) -> None:
    """Raise UserError for a part with a guidance scale in a run of a language model."""
    if of_text and scale is not None:
        raise UserError(f"parts.{place}.scale is {scale}, the guidance of pipelines, and a language model has none: "
                        "leave it out")

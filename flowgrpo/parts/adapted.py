"""Which modules of a pipeline a method trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flowgrpo.config import Config
from flowgrpo.errors import UserError
from flowgrpo.policies.load import denoisers, text_encoders


@dataclass(frozen=True)
class Adapted:
    """The denoisers, the text encoders, which are then in the graph of every replay (TexForce, 2311.15657), or both.

    Called with a pipeline: its modules that are trained, by name. UserError where it has no text encoder.
    """

    denoisers: bool = True
    encoders: bool = False

    def __post_init__(self) -> None:
        if not self.denoisers and not self.encoders:
            raise ValueError("Adapted: denoisers and encoders are both false, expected one of them to be trained")

    def __call__(self, pipe: Any) -> dict[str, torch.nn.Module]:
        found = denoisers(pipe) if self.denoisers else {}
        encoders = text_encoders(pipe) if self.encoders else {}
        if self.encoders and not encoders:
            raise UserError(f"{type(pipe).__name__} has no text encoder to be trained: set parts: {{adapted: "
                            "{encoders: false, denoisers: true}}")
        return found | encoders


def require(config: Config, method: Any) -> None:
    """UserError for options that do not go with text encoders that are trained."""
    if not method.adapted.encoders:
        return
    wrong = {"adapter.rank: 0, which trains all of a denoiser: set a rank": not config.adapter.rank,
             "adapter.dora, which is for denoisers: use false": config.adapter.dora,
             "memory.encoders: cpu, where they would be moved out of the graph: use keep":
                 config.memory.encoders != "keep",
             "memory.shard, whose processes meet in the denoiser alone: use false": config.memory.shard}
    for told in (told for told, found in wrong.items() if found):
        raise UserError(f"text encoders are trained (parts.adapted.encoders), which does not go with {told}")

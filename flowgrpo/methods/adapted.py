"""Modules of a pipeline that a method trains."""

from __future__ import annotations

from flowgrpo.config.schema import Config
from flowgrpo.errors import UserError
from flowgrpo.parts import part


@part("adapted")
class Adapted:
    """Trained modules: denoisers, text encoders, which are then in the graph of every replay (TexForce, 2311.15657), or
    both.
    """

    denoisers: bool = True
    encoders: bool = False

    def __post_init__(self) -> None:
        if not self.denoisers and not self.encoders:
            raise ValueError("Adapted: denoisers and encoders are both false, expected one of them to be trained")

    def require_config(self, config: Config, of_text: bool) -> None:
        """Raise UserError for options that conflict with the training of text encoders."""
        if not self.encoders:
            return
        wrong = {"adapter.rank: 0, which trains all of a denoiser: set a rank": not config.adapter.rank,
                 "adapter.dora, which is for denoisers: use false": config.adapter.dora,
                 "memory.encoders: cpu, where they would be moved out of the graph: use keep":
                     config.memory.encoders != "keep",
                 "memory.shard, whose processes meet in the denoiser alone: use false": config.memory.shard}
        for option in (option for option, applies in wrong.items() if applies):
            raise UserError(f"text encoders are trained (parts.adapted.encoders), which does not go with {option}")

"""A pipeline that stays as it is, with a small policy that edits its final latents, and how both are explored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.edit_networks import Editor, EditWeights, load_editor, prompt_tokens, tokens
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.samplers import latent_edits
from flowgrpo.samplers.grids import make_grid
from flowgrpo.samplers.latent_edits import Edit
from flowgrpo.samplers.scheduler import Segment


class EditPolicy(PipelinePolicy):
    """A `PipelinePolicy` of which nothing is trained, and an `Editor` of its final latents, which is.

    edit: how; or a folder that a run saved, to draw with what it learned. options: those of `PipelinePolicy`.
    """

    def __init__(self, pipe: Any, edit: Edit | Path, **options: Any):
        super().__init__(pipe, None, **options)
        if isinstance(edit, Edit):
            self.editor = Editor(edit, *self._sizes(), self.device, self.states)
        else:
            self.editor = load_editor(Path(edit), self.device)
        self.weights = EditWeights(self.editor)

    def _sizes(self) -> tuple[int, int]:
        """Return the channels of a final latent's tokens and of the prompts'."""
        before, conditioning = self.evaluations, self.encode([""])
        grid, timesteps = make_grid("shifted", 4, 1.0, self.stock, self.strength)
        x, _ = self.run(Segment(grid, range(1), timesteps=timesteps), conditioning, None, self.generators([0]))
        self.evaluations = before
        return tokens(x).shape[-1], prompt_tokens(conditioning).shape[-1]

    @torch.no_grad()
    def generate(self, conditioning: Conditioning, generators: list[torch.Generator], steps: int, guidance: float,
                 output_type: str = "pt") -> torch.Tensor:
        """Return pictures on the CPU: of `candidates` bases and their edits those that the critic values most.

        output_type: "latent" for latents, not decoded.
        The bases are the stock pipeline's; the first is drawn from the row's own generator.
        """
        drawn = [super(EditPolicy, self).generate(conditioning, candidate, steps, guidance, "latent")
                 for candidate in self._candidates(generators)]
        bases = torch.stack(drawn, 1).to(self.device, self.dtype)
        chosen, _ = latent_edits.on_the_fly(self.editor, conditioning, bases)
        return (chosen.float() if output_type == "latent" else self.decode(chosen, conditioning)).cpu()

    def _candidates(self, generators: list[torch.Generator]) -> list[list[torch.Generator]]:
        seeds = [generator.initial_seed() for generator in generators]
        return [generators, *(self.generators(int(np.random.SeedSequence((seed, 3, k)).generate_state(1, np.uint64)[0]
                                                  >> 1) for seed in seeds)
                              for k in range(1, self.editor.edit.candidates))]

"""Frozen pipeline with a small policy that edits its final latents, and the rollouts of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowgrpo.data.prompts import Prompt
from flowgrpo.device import DTYPES
from flowgrpo.policies.pipelines.call import EncodePrompt, guidance_argument
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.edit_networks import Editor, EditWeights, load_editor, prompt_tokens, tokens
from flowgrpo.policies.pipelines.load import denoisers
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.samplers import latent_edits
from flowgrpo.samplers.grids import make_grid
from flowgrpo.samplers.latent_edits import Edit
from flowgrpo.samplers.scheduler import Segment


class EditPolicy(PipelinePolicy):
    """Frozen `PipelinePolicy`, and a trained `Editor` of its final latents.

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

    def draw(self, prompts: Sequence[Prompt], seeds: Sequence[int], arguments: dict[str, Any], negative: str = ""
             ) -> torch.Tensor:
        """Return a picture or clip of each prompt on the CPU, as `generate` of noise with these seeds.

        arguments: `num_inference_steps` and `guidance` of the call; without, the pipeline's defaults. Its others are
        those that the policy has. negative: for a prompt without its own.
        """
        scale, accepts = guidance_argument(self.accepts, self.call, self.denoisers.values()), self.accepts
        guidance = arguments.get("guidance", accepts[scale].default if scale in accepts else self.guidance)
        if guidance != self.guidance:  # prompts are encoded as a call with it encodes them
            self.guidance, self.encode_prompt = guidance, EncodePrompt(self.driver, self.encoders, self.live)
        brought = [prompt.brings for prompt in prompts]
        conditioning = self.encode([prompt.text for prompt in prompts],
                                   [negative if prompt.negative is None else prompt.negative for prompt in prompts],
                                   brought if any(each is not None for each in brought) else None)
        steps = arguments.get("num_inference_steps", accepts["num_inference_steps"].default)
        return self.generate(conditioning, self.generators(seeds), steps, guidance)

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

    def attach(self) -> None:
        """Make the commands that draw with this pipeline draw by this policy (`attached`)."""
        setattr(self.pipe, _ATTACHED, self)

    def _candidates(self, generators: list[torch.Generator]) -> list[list[torch.Generator]]:
        seeds = [generator.initial_seed() for generator in generators]
        return [generators, *(self.generators(int(np.random.SeedSequence((seed, 3, k)).generate_state(1, np.uint64)[0]
                                                  >> 1) for seed in seeds)
                              for k in range(1, self.editor.edit.candidates))]


def over(pipe: Any, edit: Edit | Path, call: dict[str, Any]) -> EditPolicy:
    """Return an edit policy over a loaded pipeline, where it is and in its precision.

    call: a run's arguments of every call. Raises UserError for a folder without an edit policy.
    """
    module = next(iter(denoisers(pipe).values()))
    precision = next(name for name, dtype in DTYPES.items() if dtype == module.dtype)
    return EditPolicy(pipe, edit, device=module.device, precision=precision, call=call)


def attached(pipe: Any) -> EditPolicy | None:
    """Return the edit policy by which a pipeline draws; None for a pipeline without one."""
    return vars(pipe).get(_ATTACHED)


_ATTACHED = "flowgrpo_edits"

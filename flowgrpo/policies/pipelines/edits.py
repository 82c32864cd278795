"""Edits of final latents: a frozen pipeline, a small policy that edits what it draws, and a critic of the result."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flowgrpo.config.sections import Adapter
from flowgrpo.data.prompts import Prompt, encodable
from flowgrpo.device import DTYPES
from flowgrpo.errors import UserError
from flowgrpo.files import parse_json, tensors_of
from flowgrpo.policies.pipelines.call import EncodePrompt, guidance_argument
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.load import denoisers
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights import adapters
from flowgrpo.policies.weights.trainable import TrainableWeights
from flowgrpo.samplers import latent_edits
from flowgrpo.samplers.grids import make_grid
from flowgrpo.samplers.latent_edits import Edit
from flowgrpo.samplers.rollout import fork_seed
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.storage import atomic, paths
from flowgrpo.storage.manifest import order_metadata

FILE = "edit.safetensors"


def tokens(x: Tensor) -> Tensor:
    """Return a latent as tokens [B, L, C]: of [B, C], [B, L, C] (packed), [B, C, H, W] or [B, C, F, H, W]."""
    if x.ndim == 2:
        return x[:, None]
    return x if x.ndim == 3 else x.flatten(2).transpose(1, 2)


def untokens(latent: Tensor, x: Tensor) -> Tensor:
    """Return tokens [B, L, C] in the shape of x; the inverse of `tokens`."""
    return (latent if x.ndim <= 3 else latent.transpose(1, 2)).reshape(x.shape)


def prompt_tokens(conditioning: Conditioning) -> Tensor:
    """Return the encoded prompts [P, T, E]: the first value of `encode_prompt` that has a row for each of them.

    Raises UserError if there is none, or if the pipeline takes one prompt per call.
    """
    if conditioning.parts:
        rows = [prompt_tokens(part) for part in conditioning.parts]
        most = max(row.shape[1] for row in rows)
        return torch.cat([nn.functional.pad(row, (0, 0, 0, most - row.shape[1])) for row in rows])
    for values, flags in zip(conditioning.calls, conditioning.per_prompt):
        for value, per_row in zip(values, flags):
            if per_row and torch.is_tensor(value) and value.is_floating_point() and value.ndim in (2, 3):
                return value if value.ndim == 3 else value[:, None]
    raise UserError("a method with an edit reads encoded prompts, tensors with a row per prompt, and this pipeline has "
                    "none: use another method")


class Trunk(nn.Module):
    """Transformer over a latent's tokens and the prompt's; it returns those of the latent, [B, L, width]."""

    def __init__(self, channels: int, prompt: int, width: int, depth: int):
        super().__init__()
        self.enter, self.read = nn.Linear(channels, width), nn.Linear(prompt, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, nn.functional.gelu, batch_first=True,
                                           norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, x: Tensor, prompts: Tensor) -> Tensor:
        hidden = self.enter(tokens(x))
        count, width = hidden.shape[1:]
        rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
        angles = torch.arange(count)[:, None] * rates  # the sinusoidal code of the tokens' places, [count, width]
        hidden = hidden + torch.stack([angles.sin(), angles.cos()], 2).flatten(1).to(hidden)
        return self.blocks(torch.cat([hidden, self.read(prompts)], 1))[:, :hidden.shape[1]]


class Headed(nn.Module):
    """Trunk and one layer of `outputs` values on it, which are 0 everywhere at its start."""

    def __init__(self, channels: int, prompt: int, width: int, depth: int, outputs: int):
        super().__init__()
        self.trunk, self.leave = Trunk(channels, prompt, width, depth), nn.Linear(width, outputs)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)


class EditNetwork(Headed):
    """(x [B,*D], prompts [B,T,E]) -> the mean of the decision [B,*D]."""

    def forward(self, x: Tensor, prompts: Tensor) -> Tensor:
        return untokens(self.leave(self.trunk(x, prompts)), x)


class Critic(Headed):
    """(x [B,*D], prompts [B,T,E]) -> the reward [B] that it expects of the image."""

    def forward(self, x: Tensor, prompts: Tensor) -> Tensor:
        return self.leave(self.trunk(x, prompts).mean(1))[:, 0]


class Editor:
    """Both networks with their `Edit`: `replay` gives the mean of a decision, `value` the value of a final latent.

    channels, prompt: of a latent's tokens and the prompt's; device: where both are; states: where recorded states
    wait. Initialised by torch's global seed.
    """

    def __init__(self, edit: Edit, channels: int, prompt: int, device: torch.device | str = "cpu",
                 states: torch.device | str = "cpu"):
        self.edit, self.device, self.states = edit, torch.device(device), torch.device(states)
        self.sizes = {"channels": channels, "prompt": prompt}
        sizes = channels, prompt, edit.width, edit.depth
        networks = {"edit": EditNetwork(*sizes, channels), "critic": Critic(*sizes, 1)}
        self.networks = nn.ModuleDict(networks).to(self.device)

    def replay(self, conditioning: Conditioning, x: Tensor, grid: Tensor | None = None,
               step: int | Tensor | None = None, timesteps: Tensor | None = None) -> Tensor:
        """Return the mean of the decision at final states x [B,*D], called as a policy's replay."""
        return self._forward("edit", conditioning, x)

    def value(self, conditioning: Conditioning, x: Tensor, frozen: bool = False) -> Tensor:
        """Return the critic's value [B] of final states x [B,*D]. frozen: its gradient reaches x and not the critic."""
        return self._forward("critic", conditioning, x, frozen)

    def _forward(self, name: str, conditioning: Conditioning, x: Tensor, frozen: bool = False) -> Tensor:
        network = self.networks[name]
        dtype = next(network.parameters()).dtype
        inputs = x.to(self.device, dtype), prompt_tokens(conditioning).to(self.device, dtype)
        if not frozen:
            return network(*inputs)
        return torch.func.functional_call(network, {key: p.detach() for key, p in network.named_parameters()}, inputs)


class EditWeights(TrainableWeights):
    """Weights of an editor's networks; their reference is their start, where no edit is made."""

    def __init__(self, editor: Editor):
        self.editor, self.adapter, self.modules, self.added, self.lr_shares = editor, Adapter(rank=0), {}, {}, {}
        self.named = dict(editor.networks.named_parameters())
        self.first = self.snapshot()

    def save(self, folder: Path) -> str:
        """Write the networks and how they are made, read them back and compare. Returns a sentence for the log."""
        metadata = {"edit": json.dumps(asdict(self.editor.edit)), "sizes": json.dumps(self.editor.sizes)}
        with atomic.replacing(folder / FILE) as file:
            save_file({key: value.contiguous() for key, value in self.snapshot().items()}, file, metadata)
            order_metadata(file)
            paths.readable(file)
        again = dict(load_editor(folder).networks.named_parameters())
        if not all(torch.equal(again[key], value) for key, value in self.snapshot().items()):
            raise RuntimeError(f"{folder / FILE} does not give the weights back as they were saved")
        return f"saved {folder / FILE}; read back: same weights"


def load_editor(folder: Path, device: torch.device | str = "cpu") -> Editor:
    """Return the editor that a run saved. Raises UserError if there is none, or if it cannot be read."""
    try:
        tensors, described = tensors_of(folder / FILE)
        edit, sizes = Edit(**parse_json(described["edit"])), parse_json(described["sizes"])
        if edit.depth > len(tensors):
            raise ValueError(f"{edit.depth} blocks, but {len(tensors)} tensors")
        with torch.device("meta"):  # the shapes are compared before anything is allocated
            expected = Editor(edit, **sizes, device="meta").networks.state_dict()
        if {key: x.shape for key, x in expected.items()} != {key: x.shape for key, x in tensors.items()}:
            raise ValueError(f"its tensors are not those of a width of {edit.width} and {sizes}")
        adapters.require_read(folder / FILE, tensors)
        editor = Editor(edit, **sizes, device=device, states=device)
        editor.networks.load_state_dict(tensors)
    except Exception as error:
        message = " ".join(str(error).split())[:120]
        raise UserError(f"no edit policy at {folder / FILE} ({message}): expected the folder of a finished run that "
                        "trained one") from None
    return editor


class EditPolicy(PipelinePolicy):
    """Frozen `PipelinePolicy`, and a trained `Editor` of its final latents.

    edit: how; or a folder that a run saved, to draw with what it learned. options: those of `PipelinePolicy`.
    """

    def __init__(self, pipe: Any, edit: Edit | Path, **options: Any):
        super().__init__(pipe, None, **options)
        if isinstance(edit, Edit):  # one step shows the channels of a final latent's tokens and of the prompts'
            before, conditioning = self.evaluations, self.encode([""])
            grid, timesteps = make_grid("shifted", 4, 1.0, self.stock, self.strength)
            x, _ = self.run(Segment(grid, range(1), timesteps=timesteps), conditioning, None, self.generators([0]))
            self.evaluations = before
            self.editor = Editor(edit, tokens(x).shape[-1], prompt_tokens(conditioning).shape[-1], self.device,
                                 self.states)
        else:
            self.editor = load_editor(Path(edit), self.device)
        self.weights = EditWeights(self.editor)

    def draw(self, prompts: Sequence[Prompt], seeds: Sequence[int], arguments: dict[str, Any], negative: str = ""
             ) -> torch.Tensor:
        """Return an image or clip of each prompt on the CPU, as `generate` of noise with these seeds.

        arguments: `num_inference_steps` and `guidance` of the call; without, the pipeline's defaults. Its others are
        those that the policy has. negative: for a prompt without its own.
        """
        scale, accepts = guidance_argument(self.accepts, self.denoisers.values()), self.accepts
        guidance = arguments.get("guidance", accepts[scale].default if scale in accepts else self.guidance)
        if guidance != self.guidance:  # prompts are encoded as a call with it encodes them
            self.guidance, self.encode_prompt = guidance, EncodePrompt(self.driver, self.encoders, self.live)
        conditioning = self.encode(*encodable(prompts, negative))
        steps = arguments.get("num_inference_steps", accepts["num_inference_steps"].default)
        return self.generate(conditioning, self.generators(seeds), steps, guidance)

    @torch.no_grad()
    def generate(self, conditioning: Conditioning, generators: list[torch.Generator], steps: int, guidance: float,
                 output_type: str = "pt") -> torch.Tensor:
        """Return images on the CPU: of `candidates` bases and their edits those that the critic values most.

        output_type: "latent" for latents, not decoded.
        The bases are the stock pipeline's; the first is drawn from the row's own generator.
        """
        drawn = [super(EditPolicy, self).generate(conditioning, candidate, steps, guidance, "latent")
                 for candidate in self._candidates(generators)]
        bases = torch.stack(drawn, 1).to(self.device, self.dtype)
        chosen, _ = latent_edits.on_the_fly(self.editor, conditioning, bases)
        return (chosen.float() if output_type == "latent" else self.decode(chosen, conditioning)).cpu()

    def attach(self) -> None:
        """Make the commands that draw with this pipeline draw by this policy (`edit_policy_of`)."""
        setattr(self.pipe, _ATTACHED, self)

    def _candidates(self, generators: list[torch.Generator]) -> list[list[torch.Generator]]:
        seeds = [generator.initial_seed() for generator in generators]
        return [generators, *(self.generators(fork_seed(seed, 3, k) for seed in seeds)
                              for k in range(1, self.editor.edit.candidates))]


def over(pipe: Any, edit: Edit | Path, call: dict[str, Any]) -> EditPolicy:
    """Return an edit policy over a loaded pipeline, where it is and in its precision.

    call: a run's arguments of every call. Raises UserError for a folder without an edit policy.
    """
    module = next(iter(denoisers(pipe).values()))
    precision = next(name for name, dtype in DTYPES.items() if dtype == module.dtype)
    return EditPolicy(pipe, edit, device=module.device, precision=precision, call=call)


def edit_policy_of(pipe: Any) -> EditPolicy | None:
    """Return the edit policy by which a pipeline draws; None for a pipeline without one."""
    return vars(pipe).get(_ATTACHED)


_ATTACHED = "flowgrpo_edits"

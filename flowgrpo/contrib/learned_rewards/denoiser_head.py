"""Features of an image that need no other model: what the frozen denoiser itself sees of it under its prompt.

The image's latent is noised to TIME with one noise for all images, and goes once through the denoiser. The states
behind at most BLOCKS of its blocks, spread evenly, give their mean and deviation over the places of the image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flowgrpo.evaluation.measured import evenly
from flowgrpo.samplers import noised_finals
from flowgrpo.samplers.scheduler import noise_like
from flowgrpo.types import unwrap

if TYPE_CHECKING:
    from flowgrpo.policies.pipelines.conditioning import Conditioning
    from flowgrpo.policies.pipelines.pipeline import PipelinePolicy

TIME, BLOCKS, NOISE_SEED = 0.3, 8, 5
DENOISER = "denoiser"  # kind of network in a reward's folder


def blocks(denoisers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks of denoisers that are looked at: of a transformer its layers, of a U-Net its levels."""
    found = [block for module in denoisers for name, child in module.named_children() if "block" in name
             for block in (child if isinstance(child, nn.ModuleList) else [child]) if isinstance(block, nn.Module)]
    return [found[place] for place in evenly(len(found), BLOCKS)]


def pool(states: Tensor) -> Tensor:
    """Return mean and deviation over all places, [B, 2 C], of tokens [B, L, C] or maps [B, C, ...]."""
    of = states.float() if states.ndim == 3 else states.float().flatten(2).transpose(1, 2)
    return torch.cat([of.mean(1), of.std(1, correction=0)], 1)


@contextmanager
def record_states(modules: Sequence[nn.Module]) -> Iterator[list[list[Tensor]]]:
    """Context manager: yield, for each module and each tensor that it returns, the pooled states of its calls."""
    seen: dict[tuple[int, int], list[Tensor]] = {}

    def hook(number: int) -> Any:
        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
            given = output if isinstance(output, tuple) else (output,)
            for place, states in enumerate(given):
                if isinstance(states, Tensor) and states.ndim > 2:
                    seen.setdefault((number, place), []).append(pool(states))

        return look

    rows: list[list[Tensor]] = []
    with ExitStack() as stack:
        for number, module in enumerate(modules):
            stack.callback(module.register_forward_hook(hook(number)).remove)
        yield rows
    rows += [seen[key] for key in sorted(seen)]


@torch.no_grad()
def states(policy: PipelinePolicy, latents: Tensor, conditioning: Conditioning) -> Tensor:
    """Return features [B, F] in float32, on the CPU, by the weights that are in place.

    latents: clean, [B,*D]; conditioning: of their B prompts.
    """
    vp, count = policy.process == "vp", len(latents)
    alphas = policy.stock.alphas_cumprod.cpu() if vp else None
    times = noised_finals.exploration(torch.tensor([TIME]), 1, noised_finals.matching, False, False, alphas)
    noise = noise_like(latents, policy.generators([NOISE_SEED] * count))
    x, _ = noised_finals.add_noise(latents, noise, float(times.grid[0]), policy.device, vp)
    before = policy.evaluations
    with record_states(blocks([*policy.denoisers.values()])) as rows:
        policy.replay(conditioning, x, times.grid, 0, times.timesteps)
    policy.evaluations = before
    # Under classifier-free guidance, the half with the prompt comes last.
    halved = [torch.cat([call if sum(map(len, calls)) == count else call[len(call) // 2:] for call in calls])
              for calls in rows]
    return torch.cat(halved, 1).cpu()


class DenoiserHead(nn.Module):
    """Linear score of a frozen pipeline's states: (features - mean) / scale @ weight.

    policy: of the pipeline; None for a head that is only written. width: F.
    """

    mean: Tensor
    scale: Tensor
    weight: Tensor

    def __init__(self, policy: PipelinePolicy | None, width: int) -> None:
        super().__init__()
        self.frozen = (policy,)  # a tuple: not registered
        for name in ("mean", "scale", "weight"):
            self.register_buffer(name, torch.zeros(width, dtype=torch.double))

    def prepare(self, images: Tensor) -> Tensor:
        """Return images [B, 3, H, W] as they are."""
        return images

    @torch.no_grad()
    def rows(self, prepared: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Return features [B, F] of images and their prompts."""
        from flowgrpo.policies.pipelines.image_latents import ImageEncoder

        policy = unwrap(self.frozen[0])
        conditioning = policy.encode(list(prompts))
        encoder = ImageEncoder(policy, "reward")
        return {"features": states(policy, encoder.of_images(prepared, conditioning), conditioning)}

    def forward(self, features: Tensor) -> Tensor:
        """Return scores [B, 1]."""
        mean, scale, weight = (held.cpu() for held in (self.mean, self.scale, self.weight))
        return (((features.double() - mean) / scale) @ weight)[:, None]


def frozen_policy(model: str, call: dict[str, Any], device: str | torch.device) -> PipelinePolicy:
    """Return the policy of a pipeline that is not trained, in fp32 on a CPU and bf16 elsewhere.

    model: its folder or hub id. call: arguments of its calls.
    """
    from flowgrpo.config.schema import Config
    from flowgrpo.policies import build
    from flowgrpo.policies.pipelines.pipeline import PipelinePolicy

    config = Config(model=model, precision="fp32" if torch.device(device).type == "cpu" else "bf16")
    return PipelinePolicy(build.load(config), None, device=device, precision=config.precision, call=call)

"""Features of an image that need no other model: what the frozen denoiser itself sees of it under its prompt.

The image's latent is noised to TIME with one noise for all images, and goes once through the denoiser. The states
behind at most BLOCKS of its blocks, spread evenly, give their mean and deviation over the places of the image. They
tell what is drawn. Whether it is what the prompt asks for is told by the denoiser's error, and by how much smaller it
is with the prompt than without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flowgrpo.evaluation.measured import evenly
from flowgrpo.rewards.find import find
from flowgrpo.rewards.score import score
from flowgrpo.samplers import noised_finals
from flowgrpo.samplers.scheduler import noise_like
from flowgrpo.types import unwrap

if TYPE_CHECKING:
    from flowgrpo.policies.pipelines.conditioning import Conditioning
    from flowgrpo.policies.pipelines.pipeline import PipelinePolicy

TIME, BLOCKS, NOISE_SEED = 0.3, 8, 5
LATE = 0.6  # time at which the gain of the prompt is measured
EVIDENCE = 3  # features that are made of errors
LOOKS = 3  # forwards that all features of an image take
DENOISER = "denoiser"  # kind of network in a reward's folder


def blocks(denoisers: Sequence[nn.Module]) -> list[nn.Module]:
    """Blocks of denoisers that are looked at: of a transformer its layers, of a U-Net its levels."""
    found = [block for module in denoisers for name, child in module.named_children() if "block" in name
             for block in (child if isinstance(child, nn.ModuleList) else [child]) if isinstance(block, nn.Module)]
    return [found[place] for place in evenly(len(found), BLOCKS)]


def pool(states: Tensor) -> Tensor:
    """Mean and deviation over all places, [B, 2 C], of tokens [B, L, C] or maps [B, C, ...]."""
    of = states.float() if states.ndim == 3 else states.float().flatten(2).transpose(1, 2)
    return torch.cat([of.mean(1), of.std(1, correction=0)], 1)


@contextmanager
def record_states(modules: Sequence[nn.Module]) -> Iterator[list[list[Tensor]]]:
    """Context manager: yield, for each module and each tensor that it returns, the pooled states of its calls."""
    seen: dict[tuple[int, int], list[Tensor]] = {}

    def look(number: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        for place, states in enumerate(output if isinstance(output, tuple) else (output,)):
            if isinstance(states, Tensor) and states.ndim > 2:
                seen.setdefault((number, place), []).append(pool(states))

    rows: list[list[Tensor]] = []
    with ExitStack() as stack:
        for number, module in enumerate(modules):
            stack.callback(module.register_forward_hook(partial(look, number)).remove)
        yield rows
    rows += [seen[key] for key in sorted(seen)]


@torch.no_grad()
def error(policy: PipelinePolicy, latents: Tensor, conditioning: Conditioning, time: float) -> Tensor:
    """The denoiser's mean squared error [B], on the CPU, at latents [B,*D] noised to `time`."""
    vp, count = policy.process == "vp", len(latents)
    alphas = policy.stock.alphas_cumprod.cpu() if vp else None
    times = noised_finals.exploration(torch.tensor([time]), 1, noised_finals.matching, False, False, alphas)
    noise = noise_like(latents, policy.generators([NOISE_SEED] * count))
    x, target = noised_finals.add_noise(latents, noise, float(times.grid[0]), policy.device, vp)
    before = policy.evaluations
    output = policy.replay(conditioning, x, times.grid, 0, times.timesteps)
    policy.evaluations = before
    return (output.float() - target.to(output.device).float()).square().flatten(1).mean(1).cpu()


@torch.no_grad()
def states(policy: PipelinePolicy, latents: Tensor, conditioning: Conditioning, bare: Conditioning | None = None
           ) -> Tensor:
    """Features [B, F] of clean latents [B,*D], in float32 on the CPU, by the weights that are in place.

    bare: as `without_prompts`. The last EVIDENCE features are then the logarithms of the error at TIME, of that at
    LATE, and of the error at LATE without the prompt over that with it: the evidence of a diffusion classifier
    (2303.16203, 2303.15233) that the image shows its prompt.
    """
    count = len(latents)
    with record_states(blocks([*policy.denoisers.values()])) as rows:
        early = error(policy, latents, conditioning, TIME)
    # Under classifier-free guidance, the half with the prompt comes last.
    found = [torch.cat([call if sum(map(len, calls)) == count else call[len(call) // 2:] for call in calls]).cpu()
             for calls in rows]
    if bare is not None:
        late, without = error(policy, latents, conditioning, LATE), error(policy, latents, bare, LATE)
        found.append(torch.stack([early, late, without / late], 1).log())
    return torch.cat(found, 1)


def without_prompts(conditioning: Conditioning, empty: Conditioning) -> Conditioning:
    """The rows with the empty prompt in place of theirs. empty: of one row."""
    rows = empty.rows(torch.zeros(len(conditioning.prompts), dtype=torch.long))
    return replace(rows, inputs=conditioning.inputs, sizes=conditioning.sizes, scales=conditioning.scales)


class DenoiserHead(nn.Module):
    """Linear score of a frozen pipeline's features: (features - mean) / scale @ weight.

    policy: None for a head that is only written. width: F. evidence: errors are among the features. sees: a reward
    whose score is the last feature.
    """

    mean: Tensor
    scale: Tensor
    weight: Tensor

    def __init__(self, policy: PipelinePolicy | None, width: int, evidence: bool = False,
                 sees: str | None = None) -> None:
        super().__init__()
        self.frozen, self.evidence = (policy,), evidence  # a tuple: not registered
        self.sees = {sees: find(sees)} if sees else {}
        for name in ("mean", "scale", "weight"):
            self.register_buffer(name, torch.zeros(width, dtype=torch.double))

    def prepare(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] as they are."""
        return images

    @torch.no_grad()
    def rows(self, prepared: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Features [B, F] of images and their prompts."""
        from flowgrpo.policies.pipelines.image_latents import ImageEncoder

        policy = unwrap(self.frozen[0])
        conditioning = policy.encode(list(prompts))
        encoder = ImageEncoder(policy, "reward")
        bare = without_prompts(conditioning, policy.encode([""])) if self.evidence else None
        features = [states(policy, encoder.of_images(prepared, conditioning), conditioning, bare)]
        if self.sees:
            features.append(score(self.sees, prepared, prompts, [{}] * len(prompts)).nan_to_num())
        return {"features": torch.cat(features, 1)}

    def forward(self, features: Tensor) -> Tensor:
        mean, scale, weight = (held.cpu() for held in (self.mean, self.scale, self.weight))
        return (((features.double() - mean) / scale) @ weight)[:, None]


def frozen_policy(model: str, call: dict[str, Any], device: str | torch.device) -> PipelinePolicy:
    """Policy of a pipeline that is not trained, in fp32 on a CPU and bf16 elsewhere. call: arguments of its calls."""
    from flowgrpo.config.schema import Config
    from flowgrpo.policies import build
    from flowgrpo.policies.pipelines.pipeline import PipelinePolicy

    config = Config(model=model, precision="fp32" if torch.device(device).type == "cpu" else "bf16")
    return PipelinePolicy(build.load(config), None, device=device, precision=config.precision, call=call)

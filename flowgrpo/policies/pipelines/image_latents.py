"""Images from files as the clean latents of a pipeline, in the shape that its own denoising ends with."""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowgrpo.data.images import read_image
from flowgrpo.errors import UserError
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.frames import rgb
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.samplers.scheduler import Segment

START = Segment(torch.ones(1), range(0))  # no step: what comes is the initial noise
WITHIN = {torch.float32: 1e-4}  # how far the two decodings of a latent may be apart in the mean
ROUNDED = 0.01  # the same of pipelines in half precision


class ImageEncoder:
    """`latents(path, row) -> ([1,*D], [3,H,W])`: the latent of an image, and the image in [0, 1], which is scaled to
    fill the run's size and cut to it.

    row: the Conditioning of any one prompt, with which the pipeline shows once the shapes of its latents and images.
    The latent is the mode of what the autoencoder gives, scaled and packed as the pipeline does, which decoding the
    first one in both ways proves. `known`: the latents so far, on the CPU. key: what names the images in messages.
    UserError for an image that cannot be read, and for a pipeline whose latents are others.
    """

    def __init__(self, policy: PipelinePolicy, key: str = "preferences"):
        self.policy, self.vae, self.key = policy, getattr(policy.pipe, "vae", None), key
        self.known: dict[str, Tensor] = {}
        self.noise: Tensor | None = None
        self.size = (0, 0)

    def __call__(self, path: str, row: Conditioning) -> tuple[Tensor, Tensor]:
        if self.noise is None:
            self._learn(row)
        image = read(path, self.size, self.key)
        if path not in self.known:
            self.known[path] = self._encode(image[None], row).cpu()
        return self.known[path], image

    def of_images(self, images: Tensor, rows: Conditioning) -> Tensor:
        """Return the latents [B,*D] of images [B,3,h,w] in [0, 1], which are scaled to the run's size. rows: of their
        B prompts. UserError as of a call."""
        row = rows.rows(torch.tensor([0]))
        if self.noise is None:
            self._learn(row)
        if tuple(images.shape[-2:]) != self.size:
            images = torch.nn.functional.interpolate(images, self.size, mode="bilinear", antialias=True)
        first = self._encode(images[:1], row)
        self.known.setdefault("", first.cpu())  # the way is proved
        return torch.cat([first, self._encode(images[1:], row)]) if len(images) > 1 else first

    def _learn(self, row: Conditioning) -> None:
        policy = self.policy
        if self.vae is None:
            raise UserError(f"{self.key}: {type(policy.pipe).__name__} has no autoencoder (vae) to encode images")
        self.noise = policy.run(START, row, None, policy.generators([0]))[0].detach()
        height, width = policy.decode(self.noise, row).shape[-2:]
        self.size = height, width

    @torch.no_grad()
    def _encode(self, image: Tensor, row: Conditioning) -> Tensor:
        """Return the latent [1,*D] of an image [1,3,H,W]."""
        if getattr(self.vae.config, "in_channels", 3) == 4:  # the fourth channel is the opacity
            image = torch.cat([image, torch.ones_like(image[:, :1])], 1)
        plain = mode(self.vae, (2 * image - 1).to(self.policy.device, self.vae.dtype))
        latent = scale_latents(plain, self.vae.config)
        if latent.ndim == 5 and self.noise.ndim != 5:
            latent = latent[:, :, 0]
        # The pipeline's own shape, by its function if that takes a latent and its shape, as Flux and Qwen-Image's.
        pack = getattr(self.policy.pipe, "_pack_latents", None)
        if latent.shape != self.noise.shape and pack is not None and len(inspect.signature(pack).parameters) == 5:
            latent = pack(latent, *latent.shape)
        message = f"{self.key}: the images of {type(self.policy.pipe).__name__} cannot be encoded"
        if latent.shape[1:] != self.noise.shape[1:]:
            raise UserError(f"{message}: its latents are {list(self.noise.shape[1:])}, and those of its autoencoder "
                            f"{list(latent.shape[1:])}; use a method that samples its images")
        latent = latent.to(self.noise.dtype)
        if not self.known:  # the first latent: the pipeline has to decode it as the autoencoder does
            shown = self.vae.decode(plain, return_dict=False)[0]
            shown = shown[:, :, 0] if shown.ndim == 5 else shown
            shown = rgb((shown.float() / 2 + 0.5).clamp(0, 1), self.policy.pipe)
            apart = (self.policy.decode(latent, row) - shown).abs().mean().item()
            if apart > WITHIN.get(self.policy.dtype, ROUNDED):
                raise UserError(f"{message}: it decodes what its autoencoder gives to another image ({apart:.2g} apart "
                                "in the mean); use a method that samples its images")
        return latent


def read(path: str | Path, size: tuple[int, int], key: str = "preferences") -> Tensor:
    """Return the image of a file, filling the size (height, width): [3,H,W] in [0, 1]. UserError if it is none."""
    from torchvision.transforms.functional import to_tensor

    try:
        return to_tensor(read_image(path, size))
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


def mode(vae: Any, images: Tensor) -> Tensor:
    """Return the likeliest latents of images [B,3,H,W] in [-1, 1]; those of videos get images of one frame."""
    try:
        encoded = vae.encode(images)
    except (RuntimeError, ValueError):  # an autoencoder of videos
        encoded = vae.encode(images[:, :, None])
    if hasattr(encoded, "latent_dist"):
        return encoded.latent_dist.mode()
    return encoded.latents if hasattr(encoded, "latents") else encoded.latent


def scale_latents(latents: Tensor, config: Any) -> Tensor:
    """Return an autoencoder's latents as a denoiser sees them: by channels' means and deviations, shift and scale."""
    mean, deviation = config.get("latents_mean"), config.get("latents_std")
    if mean is not None and deviation is not None:
        shape = 1, -1, *[1] * (latents.ndim - 2)
        latents = (latents - latents.new_tensor(mean).view(shape)) / latents.new_tensor(deviation).view(shape)
    return (latents - (config.get("shift_factor") or 0)) * (config.get("scaling_factor") or 1)

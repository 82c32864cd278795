"""Memory options: a quantised denoiser, text encoders and denoisers that wait in the CPU's memory, images decoded in
parts.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from flowgrpo.config.sections import Memory
from flowgrpo.errors import UserError
from flowgrpo.host_weights import HostWeights, Offloaded, move_rest
from flowgrpo.methods.setup import Setup, require_compatible
from flowgrpo.packages import present
from flowgrpo.policies.weights.checkpointing import WRONG, supports_checkpointing
from flowgrpo.policies.weights.forwards import blocks, modules_of

BLOCK, LEAF = "block_level", "leaf_level"  # the names that diffusers has for them
PACKAGES = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}


def require_waiting(setup: Setup) -> None:
    """Raise UserError for options that conflict with `memory.denoiser` or `memory.offload`."""
    config, method = setup.config, setup.method
    memory, offloads = config.memory, config.memory.offload != "none"
    if memory.denoiser == "keep" and not offloads:
        return
    setting = f"memory.offload is {memory.offload}" if offloads else "memory.denoiser is cpu"
    preview = method.denoising.preview.precision if method.denoising.preview else "full"
    wrong = {"memory.denoiser: cpu, since blocks wait there anyway: use keep": offloads and memory.denoiser == "cpu",
             "memory.encoders: keep, beside which it would not leave: use cpu":
             not offloads and memory.encoders == "keep",
             f"train.checkpointing: {str(config.train.checkpointing).lower()}, without which a graph keeps the weights "
             "of all blocks: use true": offloads and config.train.checkpointing is not True,
             "adapter.rank: 0, whose weights are all trained: set a rank": not config.adapter.rank,
             "adapter.dora, which reads whole weights: use false": offloads and config.adapter.dora,
             "text encoders that are trained: set parts.adapted.encoders: false": method.denoising.adapted.encoders,
             "memory.weights: nf4, whose packed weights do not wait: use int8 or fp8": memory.weights == "nf4",
             f"load.denoiser: {config.load.denoiser}, whose packed weights do not wait: use a .safetensors file":
             config.load.gguf,
             f"parts.preview.precision: {preview}: use full": preview != "full",
             "memory.shard: use false": bool(memory.shard),
             "memory.context_parallel: use 1": memory.context_parallel > 1,
             "train.compile: use false": config.train.compile}
    require_compatible(setting, wrong)


def offload(module: torch.nn.Module, device: torch.device, level: str) -> list[HostWeights]:
    """Let the frozen weights of a denoiser's blocks wait in the CPU's memory, and come for a forward of their own and
    for its recomputation. What is outside of the blocks moves to the device.

    level: `block_level`, all weights of a block together, or `leaf_level`, those of every layer by themselves.
    UserError for a denoiser without blocks, or whose blocks diffusers cannot checkpoint.
    """
    parts = blocks(module)
    setting = f"memory.offload is {level}, but {type(module).__name__} has no"
    if not parts:
        raise UserError(f"{setting} list of blocks: use none")
    if not supports_checkpointing(module) or type(module).__name__ in WRONG:
        raise UserError(f"{setting} gradient checkpointing by diffusers: use none")
    move_rest(module, device, parts)
    if level == LEAF:
        parts = [part for block in parts for part in block.modules() if part._parameters or part._buffers]
    groups = [HostWeights([part], device, deep=level == BLOCK) for part in parts]
    for part, group in zip(parts, groups):
        part.forward = _there(group)(part.forward)
    return groups


def later(memory: Memory) -> bool:
    """True if denoisers do not come to the device with the other parts of a pipeline."""
    return memory.denoiser != "keep" or memory.offload != "none"


def place(denoisers: Iterable[torch.nn.Module], encoders: "Encoders", device: torch.device, memory: Memory,
          weights: Any = None) -> None:
    """Let the frozen weights of denoisers wait as `memory.denoiser` and `memory.offload` say. weights: a LoRA on them
    that is trained, and stays on the device; without one weights wait block by block."""
    if not later(memory):
        return
    modules = list(denoisers)
    if memory.offload != "none":
        for module in modules:
            offload(module, device, memory.offload if weights is not None else BLOCK)
    else:  # denoisers and text encoders are there by turns: denoisers come with a forward of one
        waiting = encoders.beside = HostWeights(modules, device)

        def load_denoisers(*_: Any) -> None:
            encoders.offload()
            waiting.load()

        for module in modules:
            move_rest(module, device, [module])
            module.register_forward_pre_hook(load_denoisers)
    if weights is not None:
        weights.hold()


@contextlib.contextmanager
def _there(weights: HostWeights) -> Iterator[None]:
    """Context manager and decorator: weights come before what is inside, and leave behind it."""
    weights.load()
    try:
        yield
    finally:
        weights.offload()


def require_package(setting: str, package: str) -> None:
    """Raise UserError if a package is not installed; setting: the option that needs it, with its value."""
    if not present(package):
        raise UserError(f"{setting}, which needs {package}: pip install 'flowgrpo[{package}]'")


def quantisation(names: Iterable[str], weights: str, dtype: torch.dtype) -> Any:
    """Diffusers' quantisation config for the components `names`, whose products are in `dtype`; None for full weights.

    int8 and fp8 (e4m3): a scale per row of a weight, by torchao. nf4: 4 bits of a normal distribution's quantiles with
    a scale per 64 values (QLoRA, 2305.14314), by bitsandbytes."""
    if weights == "full":
        return None
    from diffusers import BitsAndBytesConfig, PipelineQuantizationConfig, TorchAoConfig

    if weights == "nf4":
        form: Any = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    else:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

        # The settings of torch's compiler are global to the process.
        kind = Int8WeightOnlyConfig if weights == "int8" else Float8WeightOnlyConfig
        form = TorchAoConfig(kind(set_inductor_config=False))
    return PipelineQuantizationConfig(quant_mapping=dict.fromkeys(names, form))


class Encoders(Offloaded):
    """Text encoders of a pipeline, which come when a prompt is encoded and leave to the device `away` before other
    work, so that a series of prompts moves them once; with None they stay."""

    def __init__(self, pipe: Any, device: torch.device, away: str | None, later: Iterable[str] = ()):
        """later: the components that come to the device in another way."""
        later = set(later)
        self.beside: HostWeights | None = None  # weights that leave while encoders are on the device
        named = {name: part for name, part in modules_of(pipe).items() if name not in later}
        super().__init__([part for name, part in named.items() if name.startswith("text_encoder")], device, away,
                         here=away is None)
        if away is None and not later:
            pipe.to(device)  # it knows which quantised parts may be moved
        for part in named.values() if away is not None or later else ():
            if away is None or part not in self.modules:
                part.to(device)

    def attend(self, pipe: Any, on_cpu: bool = False) -> None:
        """Make the stock pipeline's own calls bring the encoders for their prompts, and offload them afterwards.
        on_cpu: they encode there, beside a denoiser that leaves them no room."""
        encode, taken = pipe.encode_prompt, inspect.signature(pipe.encode_prompt)

        @functools.wraps(encode)
        def encode_on_cpu(*args: Any, **kwargs: Any) -> Any:
            given = taken.bind_partial(*args, **kwargs)
            given.arguments |= {"device": torch.device("cpu")} if "device" in taken.parameters else {}
            return tree_map_only(torch.Tensor, lambda value: value.to(self.device),
                                 encode(*given.args, **given.kwargs))

        pipe.encode_prompt = encode_on_cpu if on_cpu else _there(self)(encode)

    def load(self) -> None:
        """Copy the encoders to the device, where `beside` gives them room."""
        if self.beside is not None and not self.here:
            self.beside.offload()
        super().load()


ONE_BY_ONE = ("AutoencoderKLHunyuanVideo15",)  # in diffusers 0.42 their attention mask serves one clip alone


def decode_in_parts(pipe: Any, how: str) -> None:
    """Make the pipeline decode image by image ("sliced"), or also tile by tile ("tiled"). With "whole" nothing changes,
    but for autoencoders that cannot decode several images. UserError if its autoencoder cannot."""
    vaes: list[Any] = [part for name, part in modules_of(pipe).items() if "vae" in name or name == "vqgan"]
    if how == "whole" and not any(type(vae).__name__ in ONE_BY_ONE for vae in vaes):
        return
    for option in ["slicing"] + ["tiling"] * (how == "tiled"):
        able = [vae for vae in vaes if hasattr(vae, f"use_{option}")]  # all have the method, but some raise in it
        if not able:
            raise UserError(f"memory.vae is {how!r}, but the autoencoder of {type(pipe).__name__} has no {option}: use "
                            f"{'whole' if option == 'slicing' else 'sliced'}")
        for vae in able:
            getattr(vae, f"enable_{option}")()
            if type(vae).__name__ == "AutoencoderTiny":  # it assumes images 8 times the size of its latents
                factor = vae.config.upsampling_scaling_factor ** (len(vae.config.num_decoder_blocks) - 1)
                vae.spatial_scale_factor, vae.tile_latent_min_size = factor, vae.tile_sample_min_size // factor

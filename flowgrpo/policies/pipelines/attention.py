"""Attention of denoisers: kernels by name, those of diffusers that have a backward; and context parallelism, by which a
team of processes shares the tokens of its rows (Ulysses).
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import distributed

from flowgrpo.errors import UserError
from flowgrpo.log import quiet
from flowgrpo.methods.setup import Setup, require_compatible
from flowgrpo.methods.targets import LatentEdits, RewardGradient
from flowgrpo.packages import present
from flowgrpo.policies.weights.low_precision import capability

# Attention backends of diffusers, the package that each needs, the lowest compute capability of its GPU ((0, 0): any
# device), and whether it computes in bf16 and fp16 alone.
# Sage has no backward. diffusers' own operator around FlashAttention 3 has none either; the one from the hub has.
KERNELS = {
    "native": ("native", None, (0, 0), False),
    "cudnn": ("_native_cudnn", None, (8, 0), True),
    "flash": ("flash", "flash_attn", (8, 0), True),
    "flash3": ("_flash_3_hub", "kernels", (9, 0), True),
    "xformers": ("xformers", "xformers", (7, 0), False),
}


def require_attention(name: str, device: torch.device, precision: str) -> None:
    """Raise UserError if a kernel lacks its package, its GPU or its precision. name: `auto` or one of KERNELS."""
    if name == "auto":
        return
    _, package, needed, half = KERNELS[name]
    setting, fix = f"memory.attention is {name!r}", "use auto"
    if package and not present(package):
        raise UserError(f"{setting}, which needs the package {package}: install it, or {fix}")
    if (here := capability(device)) < needed:
        lowest, of = ".".join(map(str, needed)), ".".join(map(str, here)) if any(here) else "none"
        raise UserError(f"{setting}, which needs a GPU of compute capability {lowest}, and {device} has {of}: {fix}")
    if half and precision == "fp32":
        raise UserError(f"{setting}, which computes in bf16 and fp16, and precision is 'fp32': {fix}, or precision: "
                        "bf16")


def use_attention(name: str, denoisers: Iterable[Any]) -> None:
    """Make the attention of denoisers, diffusers' models, compute with a kernel. `auto` changes nothing. UserError if a
    model calls torch's attention itself, and if diffusers refuses the kernel."""
    if name == "auto":
        return
    from diffusers.models.attention_dispatch import attention_backend

    backend, *_ = KERNELS[name]
    for module in denoisers:
        processors = [part.processor for part in module.modules() if hasattr(part, "processor")]
        if not any(hasattr(processor, "_attention_backend") for processor in processors):
            if name == "native":  # which is what it calls
                continue
            raise UserError(f"memory.attention is {name!r}, but the attention of {type(module).__name__} calls torch's "
                            "scaled_dot_product_attention itself: use auto")
        try:
            with quiet(), attention_backend(backend):  # the latter restores the backend of all other models
                module.set_attention_backend(backend)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise UserError(f"memory.attention is {name!r}, which diffusers refuses "
                            f"({' '.join(str(error).split())[:160]}): use auto") from None


def require_context_parallel(setup: Setup) -> None:
    """Raise UserError for options that conflict with `memory.context_parallel`."""
    config, method = setup.config, setup.method
    if config.memory.context_parallel == 1:
        return
    if method.for_tokens:
        raise UserError(f"memory.context_parallel is {config.memory.context_parallel}, but a language model is trained:"
                        " use 1")
    denoising = method.denoising
    wrong = {"train.compile: use false": config.train.compile,
             "cache, from which some processes would read what others compute: leave it out": config.cache is not None,
             "parts.preview: leave sol_rl out": denoising.preview is not None,
             "parts.pruning or parts.progress, whose choices are by rewards of one process: use null":
             denoising.pruning is not None or method.credit.progress is not None,
             "text encoders that are trained: set parts.adapted.encoders: false": denoising.adapted.encoders,
             f"method {config.method}, which trains more than the denoiser: use another":
             isinstance(method.target, (RewardGradient, LatentEdits)) or denoising.learned_noise is not None}
    require_compatible(f"memory.context_parallel is {config.memory.context_parallel}", wrong,
                       ", or memory.context_parallel: 1")


def enable(denoisers: Iterable[Any], members: int, device: torch.device) -> None:
    """Share the tokens of each denoiser's rows among every `members` processes; all of them call it. UserError for a
    model that diffusers has no plan for, or whose heads the members do not divide."""
    if members == 1 or not distributed.is_initialized():
        return
    from diffusers import ContextParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    shape = (distributed.get_world_size() // members, 1, members)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("team", "ring", "ulysses"))
    for module in denoisers:
        name, heads = type(module).__name__, getattr(module.config, "num_attention_heads", members)
        if getattr(module, "_cp_plan", None) is None:
            raise UserError(f"memory.context_parallel is {members}, but diffusers has no plan to split {name}: use 1")
        if heads % members:
            raise UserError(f"memory.context_parallel is {members}, but {name} has {heads} attention heads, which "
                            f"{members} processes cannot share evenly: use a divisor")
        module.enable_parallelism(config=ContextParallelConfig(ulysses_degree=members, mesh=mesh))
        module.forward = _of_whole_tokens(name, members)(module.forward)


@contextlib.contextmanager
def _of_whole_tokens(name: str, members: int) -> Iterator[None]:
    """Context manager and decorator: UserError where the members do not divide the tokens of a row."""
    try:
        yield
    except AssertionError as error:
        if "divisible by mesh size" not in str(error):
            raise
        raise UserError(f"memory.context_parallel is {members}, which does not divide the tokens of {name}: set "
                        "another image.height, width or frames, or use a divisor") from None

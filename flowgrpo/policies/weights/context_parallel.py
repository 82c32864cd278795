"""Context parallelism of a denoiser: a team of processes shares the tokens of its rows, by diffusers (Ulysses).

Every member runs the same rows. Each block computes a part of the tokens, and each attention a part of the heads for
all tokens. The output is whole on every member; the gradient of a weight is the sum over the members.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed

from flowgrpo.errors import UserError
from flowgrpo.methods.setup import Setup, require_compatible
from flowgrpo.methods.targets import LatentEdits, RewardGradient


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
    """Share the tokens of each denoiser's rows among every `members` processes; all of them call it.

    Raises UserError for a model that diffusers has no plan for, or whose heads the members do not divide.
    """
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
        module.forward = _of_whole_tokens(module.forward, name, members)


def _of_whole_tokens(forward: Callable[..., Any], name: str, members: int) -> Callable[..., Any]:
    """Return the forward with a UserError where the members do not divide the tokens of a row."""
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except AssertionError as error:
            if "divisible by mesh size" not in str(error):
                raise
            raise UserError(f"memory.context_parallel is {members}, which does not divide the tokens of {name}: set "
                            "another picture.height, width or frames, or use a divisor") from None

    return run

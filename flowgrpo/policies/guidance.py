"""What a pipeline's call calls its guidance scale."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch


def guidance_argument(accepted: Collection[str], call: Collection[str], denoisers: Iterable[torch.nn.Module]) -> str:
    """The name of the argument: `true_cfg_scale` where the pipeline has it, no denoiser has its guidance embedded, and
    `call`, the arguments that a person gives, does not set it; else `guidance_scale`.

    accepted: the names of the arguments that the pipeline's call takes.
    """
    embedded = any(getattr(module.config, "guidance_embeds", False) for module in denoisers)
    true = "true_cfg_scale" in accepted and "true_cfg_scale" not in call and not embedded
    return "true_cfg_scale" if true else "guidance_scale"

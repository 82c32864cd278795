"""A model that a person has loaded and handed to a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from flowgrpo.policies.weights.lora_files import take_off
from flowgrpo.policies.weights.trainable import lora_layers


@contextlib.contextmanager
def as_before(loaded: Any) -> Iterator[None]:
    """Inside, a run works on a pipeline or a tuple of a language model and its reader, None for one of the run's own.

    Where it fails, the LoRA, the hooks and the forwards that it added are taken off, so that another run can have the
    model. What it trained is in its checkpoints; of all weights (adapter.rank 0) the trained ones stay.
    """
    found = () if loaded is None else loaded if isinstance(loaded, tuple) else loaded.components.values()
    parts = [part for part in found if isinstance(part, torch.nn.Module)]
    bare = [part for part in parts if not lora_layers(part)]
    before = {module: ({*module._forward_pre_hooks}, vars(module).get("forward"))
              for part in parts for module in part.modules()}
    try:
        yield
    except BaseException:
        for part in bare:
            take_off(part)
        for module, (hooks, forward) in before.items():
            for added in [key for key in module._forward_pre_hooks if key not in hooks]:
                del module._forward_pre_hooks[added]
                module._forward_pre_hooks_with_kwargs.pop(added, None)
            if vars(module).get("forward") is not forward:
                del module.forward
                if forward is not None:
                    module.forward = forward
        raise

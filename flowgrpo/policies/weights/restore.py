"""Restore a loaded model that the user passed to a failed run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from flowgrpo.policies.weights.lora_files import take_off
from flowgrpo.policies.weights.trainable import lora_layers


@contextlib.contextmanager
def as_before(loaded: Any) -> Iterator[None]:
    """Context manager: restore a pipeline, or a tuple of a language model and its reader, if the run fails.

    None: the run loaded the model itself. At failure the added LoRA, hooks and forwards are removed, so another run can
    use the model. The trained weights are in the run's checkpoints; with adapter.rank 0 the trained ones stay.
    """
    components = () if loaded is None else loaded if isinstance(loaded, tuple) else loaded.components.values()
    parts = [part for part in components if isinstance(part, torch.nn.Module)]
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

"""Encoders of reference pictures, run once per input: a replay finds what the rollout encoded."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flowgrpo.policies.pipelines.digest import digest

SIZE = 64  # inputs whose encoding is kept


class EncoderCache:
    """Cache of frozen modules: `encode` of those that have one, the forward of the others.

    Inside `with memo():` a latent distribution gives its mean in place of a sample, so that a picture has one encoding,
    in rollout and replay alike.
    """

    def __init__(self, modules: dict[str, torch.nn.Module]):
        self.modules = modules
        self.rowwise = {name for name, module in modules.items() if hasattr(module, "encode")}
        self._known: OrderedDict[str, Any] = OrderedDict()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        distribution: Any = DiagonalGaussianDistribution
        sample = distribution.sample
        methods = {name: "encode" if name in self.rowwise else "forward" for name in self.modules}
        for name, method in methods.items():
            # On the instance, beside the class's own method, which comes back when this one is deleted.
            setattr(self.modules[name], method, self._once(name, getattr(self.modules[name], method)))
        distribution.sample = lambda self, generator=None: self.mode()
        try:
            yield
        finally:
            distribution.sample = sample
            for name, method in methods.items():
                delattr(self.modules[name], method)

    def _once(self, name: str, method: Callable) -> Callable:
        def one(*args: Any, **kwargs: Any) -> Any:
            key = digest((name, args, kwargs))
            if key not in self._known:
                self._known[key] = method(*args, **kwargs)
            self._known.move_to_end(key)
            while len(self._known) > SIZE:
                self._known.popitem(last=False)
            return self._known[key]

        def remembered(*args: Any, **kwargs: Any) -> Any:
            # Row by row, so that a picture is encoded once whatever the batch that it comes in.
            if name in self.rowwise and args and torch.is_tensor(args[0]) and len(args[0]) > 1:
                return join([one(row, *args[1:], **kwargs) for row in args[0].split(1)])
            return one(*args, **kwargs)
        return remembered


def join(parts: list[Any]) -> Any:
    """Join an autoencoder's `encode` results of single rows to that of a batch."""
    first = parts[0]
    if torch.is_tensor(first):
        return torch.cat(parts)
    if isinstance(first, tuple):
        return tuple(join(list(values)) for values in zip(*parts))
    if isinstance(first, dict):  # of any of diffusers' output classes
        return type(first)(**{key: join([part[key] for part in parts]) for key in first})
    # A latent distribution.
    return None if first is None else type(first)(torch.cat([part.parameters for part in parts]))

"""Teachers of a pipeline: other frozen denoisers in place of its own, to score its samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from flowgrpo.errors import UserError
from flowgrpo.policies.pipelines.load import DENOISERS, denoisers, load_pipeline
from flowgrpo.policies.weights.rlg import guided
from flowgrpo.samplers.predictions import prediction

READS = ("in_channels", "joint_attention_dim", "cross_attention_dim", "pooled_projection_dim", "caption_channels")


class Taught(Protocol):
    """Pipeline policy whose denoisers can be replaced."""

    denoisers: dict[str, torch.nn.Module]
    device: torch.device
    precision: str
    stock: Any


class Teachers:
    """Teachers of a pipeline by name, a directory or a hub id, each loaded at its first use; their text encoders are
    not: they read the policy's embeddings."""

    def __init__(self, policy: Taught):
        self.policy = policy
        self.known: dict[str, dict[str, torch.nn.Module]] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Context manager: the pipeline calls the teacher's denoisers.

        Raises UserError if it does not load, or reads something else than the policy's.
        """
        if name not in self.known:
            self.known[name] = self._loaded(name)
        bases = {module: self.known[name][key].forward for key, module in self.policy.denoisers.items()}
        with guided(bases, 0.0), torch.no_grad():
            yield

    def _loaded(self, name: str) -> dict[str, torch.nn.Module]:
        pipe = load_pipeline(name, self.policy.precision, only=DENOISERS, checker=False)
        taught, here = denoisers(pipe), self.policy.denoisers
        pairs: dict[str, tuple[Any, ...]] = {
            "denoisers": (sorted(taught), sorted(here)),
            "prediction": (prediction(pipe.scheduler), prediction(self.policy.stock))}
        for key in here.keys() & taught.keys():
            configs: tuple[Any, Any] = taught[key].config, here[key].config
            pairs |= {f"{key}.{field}": tuple(config.get(field) for config in configs) for field in READS}
        for what, (its, expected) in pairs.items():
            if its != expected:
                raise UserError(f"the teacher {name!r} has {what} {its}, expected {expected}, as the model has: use "
                                "one of the model's family")
        return {key: module.to(self.policy.device).eval().requires_grad_(False) for key, module in taught.items()}

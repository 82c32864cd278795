"""Teachers: other frozen models in place of a language policy's own, to score its samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from flowgrpo.errors import UserError


class Taught(Protocol):
    """Language policy whose model can be replaced, with the results of its trials."""

    model: Any
    tokenizer: Any
    device: torch.device
    _head_alone: bool | None
    _apart: str | None

    def another(self, model: str) -> tuple[Any, Any]:
        """Load another model of its kind, and its tokenizer."""

    def _count(self, _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the tokens of a forward."""


class Teachers:
    """Teachers of a policy by name, a directory or a hub id, each loaded at its first use.

    policy: its `another(name)` loads a model of its kind, with its tokenizer.
    """

    def __init__(self, policy: Taught):
        self.policy = policy
        self.known: dict[str, tuple[Any, bool | None, str | None]] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Context manager: the teacher is the policy's model.

        Raises UserError if it does not load or has another tokenizer.
        """
        state = self._state()
        self._set(*self.known.get(name) or (self._loaded(name), None, None))
        try:
            with torch.no_grad():
                yield
        finally:
            self.known[name] = self._state()
            self._set(*state)

    def _state(self) -> tuple[Any, bool | None, str | None]:
        """Return the model, and the results of its trials."""
        return self.policy.model, self.policy._head_alone, self.policy._apart

    def _set(self, model: Any, head_alone: bool | None, apart: str | None) -> None:
        self.policy.model, self.policy._head_alone, self.policy._apart = model, head_alone, apart

    def _loaded(self, name: str) -> Any:
        model, tokenizer = self.policy.another(name)
        if tokenizer.get_vocab() != self.policy.tokenizer.get_vocab():
            raise UserError(f"the teacher {name!r} has another tokenizer than the model: expected the same tokens")
        model.base_model.register_forward_pre_hook(self.policy._count, with_kwargs=True)
        return model.to(self.policy.device).eval().requires_grad_(False)

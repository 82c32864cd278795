"""Teachers: other frozen models in place of a language policy's own, to score its samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from flowgrpo.errors import UserError


class Teachers:
    """Teachers of a policy by name, a directory or a hub id, each loaded at its first use.

    policy: a `CausalLM`, whose `another(name)` loads a model of its kind, with its tokenizer.
    """

    def __init__(self, policy: Any):
        self.policy, self.known = policy, {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Context manager: the teacher is the policy's model.

        Raises UserError if it does not load or has another tokenizer.
        """
        own = self._state()
        self._set(*self.known.get(name) or (self._loaded(name), None, None))
        try:
            with torch.no_grad():
                yield
        finally:
            self.known[name] = self._state()
            self._set(*own)

    def _state(self) -> tuple:
        """Return the model, and the results of its trials."""
        return self.policy.model, self.policy._head_alone, self.policy._shares

    def _set(self, model: Any, head_alone: bool | None, shares: bool | None) -> None:
        self.policy.model, self.policy._head_alone, self.policy._shares = model, head_alone, shares

    def _loaded(self, name: str) -> Any:
        model, tokenizer = self.policy.another(name)
        if tokenizer.get_vocab() != self.policy.tokenizer.get_vocab():
            raise UserError(f"the teacher {name!r} has another tokenizer than the model: expected the same tokens")
        model.base_model.register_forward_pre_hook(self.policy._count, with_kwargs=True)
        return model.to(self.policy.device).eval().requires_grad_(False)

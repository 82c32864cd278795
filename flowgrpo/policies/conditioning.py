"""Encoded prompts, kept: every prompt is encoded once per run, or once for all runs that share a folder.

Prompts are encoded one at a time, so that the values do not depend on which prompts happened to be drawn together; a
resumed run, or one with another batch, sees the same numbers.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flowgrpo.policies.pipeline import Conditioning


class Encoder:
    """policy.encode with a memory, on disk too with a `folder`: `encoder(prompts, negatives) -> Conditioning`."""

    def __init__(self, policy, folder: Path | None = None):
        self.policy = policy
        self.folder = folder / fingerprint(policy) if folder else None
        self._known: dict[tuple[str, str], Conditioning] = {}

    def __call__(self, prompts: list[str], negatives: list[str]) -> Conditioning:
        parts = [self._one(prompt, negative) for prompt, negative in zip(prompts, negatives, strict=True)]
        # Some pipelines (Qwen-Image) pad to the longest prompt of a batch: what has another length is encoded together.
        return join(parts) if len({_shapes(part) for part in parts}) == 1 else self.policy.encode(prompts, negatives)

    def _one(self, prompt: str, negative: str) -> Conditioning:
        key = prompt, negative
        if key not in self._known:
            path = self.folder / f"{_digest(json.dumps(key))}.safetensors" if self.folder else None
            if path and path.exists():
                self._known[key] = _read(path, prompt, negative, self.policy.device)
            else:
                self._known[key] = self.policy.encode([prompt], [negative])
                if path:
                    _write(path, self._known[key])
        return self._known[key]


def join(parts: list[Conditioning]) -> Conditioning:
    """One Conditioning with the rows of all; what has no row per prompt is the first one's."""
    first = parts[0]
    calls = tuple(
        tuple(_stack([part.calls[c][v] for part in parts]) if own else first.calls[c][v] for v, own in enumerate(owns))
        for c, owns in enumerate(first.per_prompt))
    return Conditioning([p for part in parts for p in part.prompts], [n for part in parts for n in part.negatives],
                        calls, first.per_prompt)


def _shapes(part: Conditioning) -> tuple:
    return tuple(tuple(value.shape) if torch.is_tensor(value) else None for call in part.calls for value in call)


def _stack(values: list) -> torch.Tensor | list:
    return torch.cat(values) if torch.is_tensor(values[0]) else [item for value in values for item in value]


def fingerprint(policy) -> str:
    """What the encoded prompts depend on: the pipeline, its arguments, its precision, and its encoders' weights."""
    pipe, told = policy.pipe, hashlib.sha256()
    told.update(f"{type(pipe).__name__} {policy.dtype} {sorted(policy.call.items())}".encode())
    for name, module in sorted(pipe.components.items()):
        if isinstance(module, torch.nn.Module) and name.startswith("text_encoder"):
            for key, parameter in module.named_parameters():
                told.update(f"{name}.{key} {tuple(parameter.shape)} {parameter.flatten()[:16].tolist()}".encode())
    return told.hexdigest()[:16]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _write(path: Path, conditioning: Conditioning) -> None:
    """Tensors as `call.value`; what is neither tensor nor None is not kept on disk."""
    values = {f"{c}.{v}": value for c, call in enumerate(conditioning.calls) for v, value in enumerate(call)}
    if any(value is not None and not torch.is_tensor(value) for value in values.values()):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    tensors = {key: value.cpu().contiguous() for key, value in values.items() if value is not None}
    save_file(tensors, temporary, {"per_prompt": json.dumps(conditioning.per_prompt)})
    temporary.replace(path)


def _read(path: Path, prompt: str, negative: str, device: torch.device) -> Conditioning:
    with safe_open(path, "pt", device=str(device)) as file:
        per_prompt = tuple(tuple(own) for own in json.loads(file.metadata()["per_prompt"]))
        present = set(file.keys())
        calls = tuple(tuple(file.get_tensor(f"{c}.{v}") if f"{c}.{v}" in present else None for v in range(len(owns)))
                      for c, owns in enumerate(per_prompt))
    return Conditioning([prompt], [negative], calls, per_prompt)

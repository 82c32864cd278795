"""LoRA of a run on its way to an engine: written to a folder that both read, loaded there, and compared by SHA-256."""

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from flowgrpo.contrib.engine.client import Engine, EngineError
from flowgrpo.errors import UserError
from flowgrpo.policies.weights.lora_files import EXPERT, LORA_FILE, PIPELINE, loader, save_stock

PREFIX = "transformer."  # of the names in a file of a pipeline's LoRA
MISSING = "missing "  # in the words of a server whose modules have other names, such as fused projections


def sha256(tensor: Tensor) -> str:
    """The SHA-256 of a tensor as the engine computes it: of its dtype, its shape and its bytes."""
    tensor = tensor.detach().cpu().contiguous()
    head = f"{tensor.dtype}{tuple(tensor.shape)!r}".encode()
    return hashlib.sha256(head + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


class LoraSender:
    """LoRA of an engine.

    folder: that both programs read; None: a temporary one of this machine, for an engine on it.
    Before a file is given away it is complete; the one before it is then deleted.
    """

    def __init__(self, engine: Engine, folder: str | None = None):
        self.engine, self.number = engine, 0
        self._own = tempfile.TemporaryDirectory(prefix="flowgrpo-engine-") if folder is None else None
        self.folder = Path(self._own.name if self._own is not None else folder or "").resolve()
        self._sent: dict[str, dict[str, str]] = {}  # by module, the hashes of what it holds
        self._checksums: dict[str, str] = {}

    def sync(self, pipe: Any, names: list[str]) -> bool:
        """Send the adapters "default" of a pipeline's denoisers where they changed. Returns True if they did.

        Raises UserError if the pipeline has no such file, and EngineError if the engine holds another LoRA afterwards.
        """
        place = self.folder / f"{self.number + 1:06d}"
        place.mkdir(parents=True, exist_ok=True)
        files = {name: write(pipe, name, place) for name in names}
        # The SHA-256 of the tensors, by their names in the engine's modules.
        found = {name: {key.removeprefix(PREFIX).removesuffix(".weight"): sha256(tensor)
                        for key, tensor in load_file(file).items()} for name, file in files.items()}
        if found == self._sent:
            shutil.rmtree(place)
            return False
        self.number += 1
        for name, file in files.items():
            expected = found[name]
            # A checksum of all weights takes seconds, and is needed where names differ, which the first LoRA shows.
            before = self._checksums.get(name) if name in self._sent else self.engine.checksum([name])[name]
            self.engine.set_lora(str(file), name)
            same, said = self.engine.compare_hashes(name, expected)
            if not same and MISSING in said and "checksum mismatch" not in said:  # names of fused projections differ
                now = self._checksums[name] = self.engine.checksum([name])[name]
                same, said = now != before or expected == self._sent.get(name), "its weights are what they were before"
            if not same:
                raise EngineError("another LoRA", f"{self.engine.url} holds another LoRA than {file}: {said}; can the "
                                                  "engine read that folder (rollout.folder), and has it no other "
                                                  "client?")
            self._sent[name] = expected
        shutil.rmtree(self.folder / f"{self.number - 1:06d}", ignore_errors=True)
        return True

    def require_held(self) -> None:
        """Raise EngineError if the engine no longer holds what was sent."""
        for name, expected in self._sent.items():
            if name in self._checksums:
                same, said = self.engine.checksum([name])[name] == self._checksums[name], "its checksum has changed"
            else:
                same, said = self.engine.compare_hashes(name, expected)
            if not same:
                raise EngineError("another LoRA", f"{self.engine.url} holds another LoRA than the one that was sent: "
                                                  f"{said}; has it another client?")

    def close(self) -> None:
        if self._own is not None:
            self._own.cleanup()
        else:
            shutil.rmtree(self.folder / f"{self.number:06d}", ignore_errors=True)


def write(pipe: Any, name: str, folder: Path) -> Path:
    """Write the adapter "default" of a denoiser in the format of stock diffusers; return the file."""
    how = loader(pipe, name)
    if how not in (PIPELINE, EXPERT) or name not in ("transformer", "transformer_2"):
        raise UserError(f"rollout.engine: {type(pipe).__name__} has no LoRA file for its {name} that an engine loads: "
                        "leave rollout.engine out")
    place = folder / name
    place.mkdir(exist_ok=True)
    save_stock(pipe, place, {"transformer": name})
    return place / LORA_FILE

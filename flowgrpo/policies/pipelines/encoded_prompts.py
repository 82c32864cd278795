"""Prompts that are encoded ahead of a run: text encoders without a denoiser fill the cache, and a run finds them there.

A cache's folder is named by values of the text encoders (`conditioning.fingerprint`). A run that does not load them
finds that name in an index file, by the contents of the encoders' files and the settings of their calls.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import DTYPES
from flowgrpo.errors import UserError
from flowgrpo.policies import sources
from flowgrpo.policies.pipelines.call import EncodePrompt, PipelineCall
from flowgrpo.policies.pipelines.conditioning import Conditioning, PromptCache, PromptEncoder, entry
from flowgrpo.policies.pipelines.frames import with_fps
from flowgrpo.policies.pipelines.load import ENCODERS, load_pipeline, text_encoders
from flowgrpo.policies.pipelines.prompt_inputs import IMAGES
from flowgrpo.starter import FOLDERS
from flowgrpo.storage import atomic
from flowgrpo.types import unwrap

HEAD = 2**16  # bytes of a file that are compared, beside its size
Row = tuple[str, str]  # a prompt and its negative prompt


class TextEncoders:
    """Text encoders of a pipeline, whose denoiser and autoencoder may be without values: encodes prompts as a
    `PipelinePolicy` does."""

    def __init__(self, pipe: Any, config: Config, device: torch.device):
        self.pipe, self.given = pipe, dict[str, Any]()
        self.call = with_fps(type(pipe), config.call, config.fps)
        self.device, self.dtype, self.guidance = device, DTYPES[config.precision], config.train.guidance
        self.frames: int | None = None
        driver = PipelineCall(pipe, self.call, device, self.dtype, (), lambda rows: None)
        driver.loads = driver.casts = False
        for encoder in text_encoders(pipe).values():
            encoder.to(device).eval().requires_grad_(False)
        here: Any = SimpleNamespace(here=True)
        self._encode = EncodePrompt(driver, here, False)

    @torch.no_grad()
    def encode(self, prompts: list[str], negatives: list[str], images: Sequence[Any] | None = None) -> Conditioning:
        """Prompts are encoded in one call. `images` is not read."""
        plain = Conditioning(prompts, negatives)
        if not self._encode.knows(plain):
            self._encode.learn(plain.rows(torch.tensor([0, 0])), self.guidance, lambda: True)
        return self._encode(plain, self.guidance)

    def probe(self, conditioning: Conditioning) -> None:
        """Leave the scheduler alone: nothing is sampled."""


@dataclass(frozen=True)
class Filled:
    """Contents of a cache for a run's prompts: its folder, their number, their bytes, and how many are new."""

    folder: Path
    prompts: int
    size: int
    new: int


def require(config: Config) -> None:
    """Raise UserError for a configuration whose prompts cannot be encoded ahead of a run."""
    wrong = {"cache is not set: name the folder with --cache=FOLDER, in the run too": config.cache is None,
             f"model is the file {config.model!r}: give a pipeline's folder or hub id": sources.is_file(config.model),
             "load.lora may change text encoders, so that the run encodes by itself: leave it out":
             bool(config.load.lora),
             "image.call brings images, with which the run encodes by itself": bool(
                 set(IMAGES) & set(config.call))}
    for reason, applies in wrong.items():
        if applies:
            raise UserError(f"prompts are not encoded ahead: {reason}")


def rows(config: Config, prompts: Iterable[Prompt]) -> list[Row]:
    """Return the prompts with their negative prompts, each once. Raises UserError for one with an image."""
    prompts = list(prompts)
    if pictured := next((prompt for prompt in prompts if prompt.brings is not None), None):
        raise UserError(f"prompts are not encoded ahead: {pictured.text[:60]!r} brings a file, with which the run "
                        "encodes by itself")
    return list(dict.fromkeys((p.text, config.negative_prompt if p.negative is None else p.negative) for p in prompts))


def fill(config: Config, prompts: Iterable[Prompt], device: torch.device, bar: Any) -> Filled:
    """Encode the prompts into the cache of a configuration, whose precision is settled, and write its index. bar: wraps
    the list of rows and shows how many are done. UserError for what cannot be encoded ahead."""
    require(config)
    wanted = rows(config, prompts)
    pipe = load_pipeline(config.model, config.precision, config.trust_remote_code, files=config.load, only=ENCODERS,
                         checker=False)
    kept = Path(str(config.cache))
    cache = PromptCache(TextEncoders(pipe, config, device), kept)
    folder = unwrap(cache.folder)
    before = {path.name for path in folder.glob("*.safetensors")}
    cache.fill(bar(wanted))
    files = [entry(folder, *row) for row in wanted]
    if missing := next((path for path in files if not path.is_file()), None):
        raise UserError(f"encode_prompt of {type(pipe).__name__} returns more than tensors, which is not kept on disk "
                        f"({missing.name} is missing): leave out `flowgrpo prompts encode`, runs encode by themselves")
    index = json.dumps({"model": config.model, "folder": folder.name})
    atomic.write_text(kept / f"encoders-{identity(config)}.json", index, shared=True)  # others may write the same
    return Filled(folder, len(files), sum(path.stat().st_size for path in files),
                  len({path.name for path in files} - before))


def folder_of(config: Config) -> Path | None:
    """Return the folder with the encoded prompts of a configuration, from the index; None without one."""
    if config.cache is None:
        return None
    index = Path(config.cache) / f"encoders-{identity(config)}.json"
    return index.with_name(json.loads(index.read_text())["folder"]) if index.is_file() else None


def complete(config: Config, prompts: Iterable[Prompt]) -> bool:
    """Return True if all prompts of a run are in its cache, so that it needs no text encoders."""
    try:
        require(config)
        wanted = rows(config, prompts)
    except UserError:
        return False
    folder = folder_of(config)
    return folder is not None and all(entry(folder, *row).is_file() for row in wanted)


def prompt_cache(config: Config, policy: PromptEncoder, live: bool = False) -> PromptCache:
    """Return the memory of encoded prompts of a run's policy. live: its text encoders are trained."""
    cache = Path(config.cache) if config.cache and not live else None
    encoders = [part for name, part in policy.pipe.components.items() if name.startswith("text_encoder")]
    left_out = bool(encoders) and all(part is None for part in encoders)
    there = folder_of(config) if cache is not None and left_out else None
    return PromptCache(policy, cache, name=None if there is None else there.name)


def identity(config: Config) -> str:
    """Return a hash of the text encoders' and tokenizers' files, or of their commit on the hub, and of their calls."""
    content = hashlib.sha256(repr([config.precision, sorted(config.call.items()), config.load.variant]).encode())
    folder = Path(FOLDERS.get(config.model, config.model))
    if folder.is_dir():
        content.update(sources.index_file(folder).read_bytes())
    else:
        index = sources.hub_index(config.model, config.load.revision)
        content.update(f"{config.model} {Path(index).parent.name}".encode())  # the snapshot's folder: the commit
    for file in sorted(file for part in ("text_encoder*", "tokenizer*") for file in folder.glob(f"{part}/**/*")):
        if file.is_file():
            content.update(f"{file.relative_to(folder).as_posix()} {file.stat().st_size}".encode())
            with file.open("rb") as opened:
                content.update(opened.read(HEAD))
                opened.seek(max(file.stat().st_size - HEAD, 0))
                content.update(opened.read())
    return content.hexdigest()[:16]

"""Runs and LoRAs of the hub: `hub:OWNER/NAME[@REVISION]`, downloaded once as data. Nothing of them is executed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from flowgrpo.errors import UserError
from flowgrpo.policies import hub

PREFIX = "hub:"
_NAME = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?", re.ASCII)
# Data alone: neither Python nor pickles.
TAKEN = ("*.safetensors", "*.json", "*.jsonl", "*.yaml", "*.jinja")
LEFT = ("checkpoints/*", "merged*/*", "events/*")


def is_named(text: str) -> bool:
    """Return True for a name that begins with `hub:`."""
    return text.startswith(PREFIX)


def is_lora(text: str) -> bool:
    """Return True for a LoRA of the hub: `hub:OWNER/NAME`, or OWNER/NAME where no folder OWNER lies here."""
    named = bool(_NAME.fullmatch(text)) and not text.endswith(".safetensors")
    return is_named(text) or named and not Path(text.partition("/")[0]).exists()


def fetched(text: str) -> Path:
    """Download the data of a repository, and return its folder in the hub's cache.

    A LoRA that is the one .safetensors file of a repository without a run's config.yaml is returned as that file.
    Raises UserError for a name of another form, and for a repository that is gated, missing, without data or neither
    reachable nor in the cache.
    """
    match = _NAME.fullmatch(text.removeprefix(PREFIX))
    if not match:
        raise UserError(f"{text!r}: expected hub:OWNER/NAME or hub:OWNER/NAME@REVISION")
    folder = _downloaded(match["id"], match["revision"])
    files = sorted(folder.glob("*.safetensors"))
    whole = (folder / "config.yaml").is_file() or any(folder.glob("*/*.safetensors"))
    if not files and not whole:
        raise UserError(f"{text}: the repository has no weights in .safetensors; pickles are not downloaded")
    single = len(files) == 1 and not whole and not (folder / "adapter_config.json").is_file()
    return files[0] if single else folder


def _downloaded(repository: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    offline = constants.HF_HUB_OFFLINE or not hub.answers(constants.ENDPOINT)
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=list(TAKEN),
                                        ignore_patterns=list(LEFT), local_files_only=offline))
    except LocalEntryNotFoundError:
        why = f"no network ({constants.ENDPOINT} does not answer)" if offline else "the download did not complete"
        raise UserError(f"{PREFIX}{_at(repository, revision)}: not in the hub's cache, and {why}: `hf download "
                        f"{repository}` where there is one, and give the folder") from None
    except Exception as error:  # of the hub, the network or the file system
        raise UserError(f"{PREFIX}{_at(repository, revision)}: {_why(error, repository, revision)}") from None
    if offline:
        print(f"no network: {_at(repository, revision)} is read from the hub's cache", file=sys.stderr)
    return folder


def _why(error: Exception, repository: str, revision: str | None) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, RevisionNotFoundError):
        return f"the repository has no revision {revision!r}: expected a branch, a tag or a commit"
    if isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
        return "there is no such repository, or it is private: look at its name, or log in with `hf auth login`"
    return hub.refusal(error, repository) or " ".join(str(error).split())[:200] or type(error).__name__


def _at(repository: str, revision: str | None) -> str:
    return repository if revision is None else f"{repository}@{revision}"

"""Bytes of a checkpoint's files: a manifest with the size and the SHA-256 of each, and safetensors files and adapter
configurations with the same bytes for the same content. Loads no torch.
"""

import hashlib
import json
from pathlib import Path

from flowgrpo.storage import atomic

MANIFEST = "manifest.json"


def sha256(file: Path) -> str:
    """In hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def write(folder: Path) -> None:
    """Write the manifest of all files in a folder, and force the folder to the disk."""
    files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)}
             for file in sorted(folder.iterdir()) if file.name != MANIFEST}
    atomic.write_text(folder / MANIFEST, json.dumps({"files": files}, indent=1) + "\n")


def has_manifest(folder: Path) -> bool:
    """True if the folder has a manifest; checkpoints of older runs have none."""
    return (folder / MANIFEST).is_file()


def difference(folder: Path) -> str | None:
    """The first difference between a folder's files and its manifest; None if there is none, or no manifest."""
    if not has_manifest(folder):
        return None
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, expected in files.items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, expected {expected['bytes']}"
            if sha256(file) != expected["sha256"]:
                return f"the SHA-256 of {name} differs"
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    return None


def order_metadata(file: Path) -> None:
    """Sort the metadata in a safetensors file's header, which the library writes in another order every time."""
    with file.open("r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        if "__metadata__" not in header:
            return
        ordered = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
        text = json.dumps(ordered, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:  # else the library escapes a sign otherwise, and the file stays as it is
            opened.seek(8)
            opened.write(text.ljust(size))


def order_config(file: Path) -> None:
    """Sort the lists of names in an adapter's configuration, which peft writes from sets."""
    content = json.loads(file.read_text(encoding="utf-8"))
    for key, value in content.items():
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            content[key] = sorted(value)
    file.write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")

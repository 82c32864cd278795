"""Manifest of a checkpoint: the size and the SHA-256 of every file in it. Loads no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from flowgrpo.storage import atomic

MANIFEST = "manifest.json"
BLOCK = 2**22  # bytes read at once


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal digits."""
    hashed = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(BLOCK):
            hashed.update(block)
    return hashed.hexdigest()


def write(folder: Path) -> None:
    """Write the manifest of all files in a folder, and force the folder to the disk."""
    files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)}
             for file in sorted(folder.iterdir()) if file.name != MANIFEST}
    atomic.write_text(folder / MANIFEST, json.dumps({"files": files}, indent=1) + "\n")


def has_manifest(folder: Path) -> bool:
    """Return True if the folder has a manifest; checkpoints of older runs have none."""
    return (folder / MANIFEST).is_file()


def difference(folder: Path) -> str | None:
    """Return the first difference between a folder's files and its manifest; None if there is none, or no manifest."""
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

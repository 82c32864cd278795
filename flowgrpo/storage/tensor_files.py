"""Safetensors files and adapter configurations with the same bytes for the same content."""

from __future__ import annotations

import json
from pathlib import Path


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

"""Imitation of ffmpeg on the PATH: it records its arguments and input, and writes a file of known bytes."""

import json
import sys
from pathlib import Path

import pytest

BYTES = b"\0\0\0\x20ftypisom"
PROGRAM = """#!{python}
import json, pathlib, sys
pixels = sys.stdin.buffer.read()
pathlib.Path({log!r}).write_text(json.dumps([sys.argv[1:], list(pixels)]))
if {status}:
    sys.exit("Unknown encoder\\n 'libx264'")
pathlib.Path(sys.argv[-1]).write_bytes({content!r})
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, status: int = 0) -> Path:
    """Put the imitation on the PATH in place of any ffmpeg; return the file of its last call."""
    log, program = folder / "call.json", folder / "ffmpeg"
    folder.mkdir(parents=True, exist_ok=True)
    program.write_text(PROGRAM.format(python=sys.executable, log=str(log), status=status, content=BYTES))
    program.chmod(0o755)
    remove(monkeypatch)
    monkeypatch.setenv("PATH", str(folder))
    return log


def remove(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide every ffmpeg."""
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    monkeypatch.setenv("PATH", "")


def call(log: Path) -> tuple[list[str], list[int]]:
    """Return arguments and input of the last call."""
    arguments, pixels = json.loads(log.read_text())
    return arguments, pixels

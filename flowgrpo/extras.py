"""Packages that only some features need: found, imported where they are used, and named with their extra if missing."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from types import ModuleType

from flowgrpo.errors import UserError
from flowgrpo.version import __version__

# The modules that each extra of pyproject.toml brings, by which its packages are found whatever installed them.
EXTRAS = {"clip": ("open_clip",), "server": ("fastapi", "uvicorn", "httpx"), "ocr": ("rapidocr_onnxruntime",),
          "video": ("cv2",), "text": ("math_verify", "jsonschema"), "parquet": ("pyarrow",), "vllm": ("vllm",),
          "wandb": ("wandb",), "torchao": ("torchao",), "bitsandbytes": ("bitsandbytes",)}


def version(package: str) -> str:
    """Return the version of flowgrpo or of a package; "unknown" where the interpreter has no record of it."""
    if package == "flowgrpo":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def present(name: str) -> bool:
    """Find all modules of an extra of flowgrpo, or else the package of that name; imports nothing."""
    if name in EXTRAS:
        return all(importlib.util.find_spec(module) is not None for module in EXTRAS[name])
    return version(name) != "unknown" or importlib.util.find_spec(name.replace("-", "_")) is not None


def needed(module: str, extra: str, told: str) -> ModuleType:
    """Import `module`; UserError that begins with `told` ("reward 'ocr'") and names the extra of flowgrpo to install.

    The import's own error is told as well: a package may be there and lack a library of the system.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{told} needs {module} ({' '.join(str(error).split())}): pip install 'flowgrpo[{extra}]'"
                        ) from None

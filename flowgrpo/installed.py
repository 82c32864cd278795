"""Installed packages: their versions, and the modules of flowgrpo's extras.

flowgrpo itself may be a source tree on the path, of which the interpreter keeps no record.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata

from flowgrpo import __version__

# The modules that each extra of pyproject.toml brings, by which its packages are found whatever installed them.
EXTRAS = {"clip": ("open_clip",), "server": ("fastapi", "uvicorn", "httpx"), "ocr": ("rapidocr_onnxruntime",),
          "video": ("cv2",), "text": ("math_verify", "jsonschema"), "parquet": ("pyarrow",), "vllm": ("vllm",),
          "wandb": ("wandb",), "torchao": ("torchao",), "bitsandbytes": ("bitsandbytes",)}


def version(package: str) -> str:
    """The version of flowgrpo or of an installed package; "unknown" where the interpreter has no record of it."""
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

"""Optional packages: find them, import them at first use, and name their extra if they are missing."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from types import ModuleType

from flowgrpo.errors import UserError
from flowgrpo.version import __version__

# Modules of each extra of pyproject.toml: they identify its packages, however these were installed.
EXTRAS = {"clip": ("open_clip",), "server": ("uvicorn", "httpcore"), "ocr": ("rapidocr_onnxruntime",),
          "video": ("cv2",), "mp4": ("imageio_ffmpeg",), "text": ("math_verify", "jsonschema"), "svg": ("resvg_py",),
          "translation": ("sacrebleu",), "parquet": ("pyarrow",),
          "datasets": ("datasets",), "vllm": ("vllm",), "wandb": ("wandb",), "trackio": ("trackio",),
          "torchao": ("torchao",),
          "bitsandbytes": ("bitsandbytes",)}


def version(package: str) -> str:
    """Return the version of flowgrpo or of a package; "unknown" if the interpreter has no record of it."""
    if package == "flowgrpo":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def present(name: str) -> bool:
    """True if all modules of an extra of flowgrpo, or else the package of that name, are found; imports nothing."""
    if name in EXTRAS:
        return all(importlib.util.find_spec(module) is not None for module in EXTRAS[name])
    return version(name) != "unknown" or importlib.util.find_spec(name.replace("-", "_")) is not None


def needed(module: str, extra: str, who: str) -> ModuleType:
    """Import `module` and return it.

    Raises UserError that begins with `who` ("reward 'ocr'"), names the extra of flowgrpo to install, and quotes the
    import's own error: a package may be installed and lack a system library.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{who} needs {module} ({' '.join(str(error).split())}): pip install 'flowgrpo[{extra}]'"
                        ) from None

"""Packages that only some rewards need: imported where they are used, and named with their extra where missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from flowgrpo.errors import UserError


def needed(module: str, extra: str, told: str) -> ModuleType:
    """Import `module`; UserError that begins with `told` ("reward 'ocr'") and names the extra of flowgrpo to install.

    The import's own error is told as well: a package may be there and lack a library of the system.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{told} needs {module} ({' '.join(str(error).split())}): pip install 'flowgrpo[{extra}]'"
                        ) from None

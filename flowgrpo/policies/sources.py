"""Files that a model is loaded from: checks of `model` and of the section `load`, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from flowgrpo.config.sections import Load
from flowgrpo.errors import UserError
from flowgrpo.starter import FOLDERS


def require(model: str, files: Load) -> None:
    """Raise UserError for settings of `load` that this model does not read."""
    folder = Path(FOLDERS.get(model, model))
    if not folder.exists():
        return
    what = "a packaged model" if model in FOLDERS else "a local folder"
    if files.revision is not None:
        raise UserError(f"load.revision is {files.revision!r}, which is of a repository on the hub, but {model!r} is "
                        f"{what}: leave it out")
    if files.variant is not None and not any(folder.rglob(f"*.{files.variant}[.-]*")):
        raise UserError(f"load.variant is {files.variant!r}, but {model!r} is {what} without such files, expected "
                        f"names like model.{files.variant}.safetensors: leave it out")

"""Packages: whether the required ones fit, which optional ones are here, and why an import failed."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import UserError
from flowgrpo.version import __version__

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# Modules of each extra of pyproject.toml: they identify its packages, however these were installed.
EXTRAS = {"clip": ("open_clip",), "server": ("uvicorn",), "ocr": ("rapidocr", "onnxruntime"),
          "video": ("cv2",), "mp4": ("imageio_ffmpeg",), "text": ("math_verify", "jsonschema"), "svg": ("resvg_py",),
          "fid": ("torchmetrics", "torch_fidelity"),
          "translation": ("sacrebleu",), "parquet": ("pyarrow",),
          "datasets": ("datasets",), "vllm": ("vllm",), "wandb": ("wandb",), "trackio": ("trackio",),
          "torchao": ("torchao",),
          "bitsandbytes": ("bitsandbytes",)}


def version(package: str) -> str:
    """Version of flowgrpo or of a package; "unknown" if the interpreter has no record of it."""
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


def load(place: str) -> Any:
    """Import what "module:name" names: tables name by it what a run may not need."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def import_optional(module: str, extra: str | None, who: str) -> ModuleType:
    """Import a module of a package that may be absent.

    extra: of flowgrpo that brings it; None: no extra does.
    Raises UserError that begins with `who` ("reward 'ocr'"), names what to install, and quotes the import's own error:
    a package may be installed and lack a system library, or not fit the others.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package that does not fit raises anything
        if told := import_failure(error):
            raise UserError(f"{who}: {told}") from error
        if not isinstance(error, ImportError):
            raise
        lacking = module if extra else (error.name or module).partition(".")[0]
        raise UserError(f"{who} needs {lacking} ({_line(error)}): pip install "
                        + (f"'flowgrpo[{extra}]'" if extra else lacking)) from None


@functools.cache
def require_versions() -> None:
    """Raise UserError if a required package is older or newer than flowgrpo declares, with the command that mends it.
    Reads the records of installed packages and imports none. A source tree that is not installed has no record."""
    wrong = []
    for need in _requirements():
        found = version(need.name)
        here = not need.marker or need.marker.evaluate({"extra": ""})
        if here and found != "unknown" and not _fits(need, found):
            wrong.append((need, found))
    if wrong:
        have = ", ".join(f"{need.name} {found}" for need, found in wrong)
        wants = " ".join(f"'{need.name}{need.specifier}'" for need, _ in wrong)
        raise UserError(f"flowgrpo {__version__} does not work with {have}, which this environment has: "
                        f"pip install {wants}")


def import_failure(error: BaseException) -> str | None:
    """Why a package of the environment fails and the command that mends it, in one line; None for other errors. error:
    as raised. What libraries raise in its place has the failed import as its cause or context."""
    chain = [*causes(error)]
    for each in chain:
        if least := re.search(r"version of PEFT .* use a version >= ([\d.]+\d)", str(each)):
            return (f"transformers {version('transformers')} wants peft >= {least[1]}, and peft {version('peft')} is "
                    f"here: pip install 'peft>={least[1]}', or 'transformers<{version('transformers')}'")
    for each in reversed(chain):
        if isinstance(each, (ImportError, AttributeError)) and (name := _importing(each)):
            return _mismatch(each, name)
    return None


def _mismatch(error: BaseException, name: str) -> str:
    """Line about the distribution `name`, which cannot be imported."""
    from packaging.utils import canonicalize_name

    lacking = getattr(error, "name", None) if isinstance(error, ImportError) else None
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        lacking = error.obj.__name__
    other = _distribution(lacking.partition(".")[0]) if lacking else None
    if other is not None and version(other) == "unknown":
        return f"{name} {version(name)} lacks {other} ({_line(error)}): pip install {other}"
    beside = f" with {other} {version(other)}" if other and other != name else ""
    cure = f"pip install --upgrade {name}{f' {other}' if beside else ''}"
    # Packages that extras alone bring can go.
    needs = [need for need in _requirements() if need.name != "flowgrpo"]
    required = {str(canonicalize_name(need.name)) for need in needs if not need.marker}
    extra = {str(canonicalize_name(need.name)) for need in needs if need.marker and "extra" in str(need.marker)}
    if name in extra - required:
        cure += f", or pip uninstall {name}, which is optional"
    return f"{name} {version(name)} does not work{beside} ({_line(error)}): {cure}"


def _importing(error: BaseException) -> str | None:
    """Distribution of which a module raised the error while it was imported; None for another error. A name that an
    installed distribution lacks counts inside of functions too."""
    inside = type(error) is ImportError and error.name is not None
    owner, step = None, error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        parts = Path(code.co_filename).parts
        at = max((i for i, part in enumerate(parts) if part in ("site-packages", "dist-packages")), default=None)
        if Path(__file__).parent in Path(code.co_filename).parents:
            owner = "flowgrpo" if inside else None
        elif code.co_name == "<module>":
            owner = None if at is None else parts[at + 1].removesuffix(".py")
        elif inside and at is not None:
            owner = parts[at + 1].removesuffix(".py")
        step = step.tb_next
    return None if owner is None else _distribution(owner)


def _requirements() -> list[Requirement]:
    from packaging.requirements import Requirement

    with contextlib.suppress(metadata.PackageNotFoundError):
        return [*map(Requirement, metadata.requires("flowgrpo") or [])]
    return []


def _fits(need: Requirement, found: str) -> bool:
    """True if a version fits; a vendor's build such as 2.9.0a0+ab12 counts as its release."""
    from packaging.version import Version

    return need.specifier.contains(Version(Version(found).base_version), prereleases=True)


def _distribution(module: str) -> str:
    return next(iter(metadata.packages_distributions().get(module, ())), module)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause or context, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__

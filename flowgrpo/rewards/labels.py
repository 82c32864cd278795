"""Labels of a recipe's rewards, in their errors and in the lines that they print."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from flowgrpo.errors import UserError

JUDGE = "a judge"  # how the errors of all judges begin

_present: ContextVar[tuple[str, str | None]] = ContextVar("label", default=("", None))


def with_label(text: str, label: str, use: str | None) -> str:
    """Return a text that names a reward as its rule does, by `use`, with its label; any other text as it is."""
    if use in (None, label):
        return text
    if text.startswith(named := f"reward {use!r}"):
        return f"reward {label!r} ({use}){text[len(named):]}"
    return f"reward {label!r}: {text}" if text.startswith(JUDGE) else text


@contextmanager
def relabel_errors(label: str, use: str | None) -> Iterator[None]:
    """Context manager: errors have the label of the reward, and so does what `labelled` returns within."""
    token = _present.set((label, use))
    try:
        yield
    except UserError as error:
        error.args = (with_label(str(error), label, use),)
        raise
    finally:
        _present.reset(token)


def labelled(text: str) -> str:
    """Return `with_label` of a text for the reward that is made."""
    return with_label(text, *_present.get())

"""Data on the literature's mechanisms, with the part and the test of each; tests/test_mechanisms.py reads it.

docs/mechanisms/papers.tsv: class, row, title. docs/mechanisms/evidence.tsv: class, row, kind, test, what, one line per
row that works or works in part: which of the row's tests, by its name alone, compares with a number that is not ours,
and with what. docs/mechanisms/*.tsv besides both: class, row, state, names, tests, note.
"""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "mechanisms"
STATES = ("works", "partial", "reason", "missing")
KINDS = ("paper", "code", "closed form", "none")  # of evidence; "none" for a row that works in part alone


class Row(NamedTuple):
    """Mechanism of a paper; names and tests are separated by ", "."""

    state: str
    names: list[str]
    tests: list[str]
    note: str


class Evidence(NamedTuple):
    """Number that is not ours: its kind, the function of the row's tests that compares with it, and what it is."""

    kind: str
    test: str
    what: str


def papers() -> dict[tuple[str, int], str]:
    """Return the titles by class and row."""
    return {(kind, int(number)): title for kind, number, title in _lines(FOLDER / "papers.tsv", 3)}


def rows() -> dict[tuple[str, int], Row]:
    """Return the rows by class and number. Raises ValueError for a row that two files have."""
    result: dict[tuple[str, int], Row] = {}
    for path in sorted(set(FOLDER.glob("*.tsv")) - {FOLDER / "papers.tsv", FOLDER / "evidence.tsv"}):
        for kind, number, state, names, tests, note in _lines(path, 6):
            key = kind, int(number)
            if key in result or state not in STATES:
                raise ValueError(f"{path}: {kind} {number} {state}: stands twice, or its state is unknown")
            result[key] = Row(state, _split(names), _split(tests), note)
    return result


def evidence() -> dict[tuple[str, int], Evidence]:
    """Return the evidence by class and row. Raises ValueError for a row with two lines or a kind that is unknown."""
    result: dict[tuple[str, int], Evidence] = {}
    for row_class, number, kind, test, what in _lines(path := FOLDER / "evidence.tsv", 5):
        key = row_class, int(number)
        if key in result or kind not in KINDS:
            raise ValueError(f"{path}: {row_class} {number} {kind}: stands twice, or its kind is not of {KINDS}")
        result[key] = Evidence(kind, test, what)
    return result


def _lines(path: Path, fields: int) -> list[list[str]]:
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    for line in lines:
        if len(line) != fields:
            raise ValueError(f"{path}: got {len(line)} fields, expected {fields}: {line}")
    return lines


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(", ") if part.strip()]

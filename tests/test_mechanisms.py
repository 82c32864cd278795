"""docs/mechanisms.md: it is current, and what it names exists."""

from __future__ import annotations

import sys
from pathlib import Path

from flowgrpo import rewards
from flowgrpo.config import schema
from flowgrpo.methods import registry
from flowgrpo.methods.presets import PRESETS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import mechanisms  # noqa: E402

ROWS = {f"{kind} {number}": row for (kind, number), row in mechanisms.rows().items()}
WORKING = {name: row for name, row in ROWS.items() if row.state in ("works", "partial")}


def known() -> set[str]:
    """Names that a recipe or a command line has."""
    places = {f"parts.{place}" for place in registry.MODULES}
    return {*PRESETS, *registry.TYPES, *rewards.BUILT_IN, *schema.fields(), *places}


def test_the_page_is_current():
    assert mechanisms.PAGE.read_text(encoding="utf-8") == mechanisms.text(), "run scripts/mechanisms.py"


def test_every_row_is_of_a_paper():
    assert mechanisms.rows().keys() <= mechanisms.papers().keys()
    assert all(row.note for row in ROWS.values() if row.state in ("reason", "partial"))


def test_names_can_be_written_in_a_recipe():
    for name, row in WORKING.items():
        names = {part.split(":")[0].rstrip("*") for part in row.names}
        commands = {part for part in names if part.startswith(("flowgrpo ", "--"))}
        keys = {part for part in names - commands if part.startswith(("parts.", "train.", "text.", "eval.", "reward."))}
        assert row.names and names - commands - keys <= known(), (name, names - commands - keys - known())


def test_tests_exist():
    for name, row in WORKING.items():
        assert row.tests, name
        for test in row.tests:
            file, function = test.split("::")[:2]
            assert f"def {function.split('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), (name, test)

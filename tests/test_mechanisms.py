"""docs/mechanisms/*.tsv, and planted faults: what they name exists."""

import ast
from pathlib import Path

import mechanisms
import pytest

from flowgrpo import rewards
from flowgrpo.config import schema
from flowgrpo.methods import registry
from flowgrpo.methods.presets import PRESETS
from scripts.measure.plant_faults import FAULTS

ROOT = Path(__file__).parent.parent


ROWS = {f"{kind} {number}": row for (kind, number), row in mechanisms.rows().items()}
WORKING = {name: row for name, row in ROWS.items() if row.state in ("works", "partial")}
EVIDENCE = {f"{kind} {number}": found for (kind, number), found in mechanisms.evidence().items()}


def known() -> set[str]:
    """Names that a recipe or a command line has."""
    places = {f"parts.{place}" for place in registry.MODULES}
    return {*PRESETS, *registry.TYPES, *rewards.BUILT_IN, *schema.fields(), *places}


@pytest.mark.fast
def test_rows_have_papers_names_tests_and_evidence():
    assert mechanisms.rows().keys() <= mechanisms.papers().keys()
    assert all(row.note for row in ROWS.values() if row.state in ("reason", "partial"))
    for name, row in WORKING.items():
        names = {part.split(":")[0].rstrip("*") for part in row.names}
        commands = {part for part in names if part.startswith(("flowgrpo ", "--"))}
        keys = {part for part in names - commands if part.startswith(("parts.", "train.", "text.", "eval.", "reward."))}
        assert row.names and names - commands - keys <= known(), (name, names - commands - keys - known())
    for name, row in WORKING.items():
        assert row.tests, name
        for test in row.tests:
            file, function = test.split("::")[:2]
            assert f"def {function.split('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), (name, test)
    assert EVIDENCE.keys() == WORKING.keys()
    # A row works by a number that is not ours; in part it may have none, and then its evidence says what lacks.
    for name, row in WORKING.items():
        found, named = EVIDENCE[name], [test.split("::")[1] for test in row.tests]
        assert found.what and (found.kind != "none" or row.state == "partial" and not found.test), name
        assert found.kind == "none" or named.count(found.test) == 1, f"{name}: {found.test}: expected one of {named}"


@pytest.mark.parametrize("lines", ["CORE\t1\tours\tt\tw", "CORE\t1\tpaper\tt\tw\nCORE\t1\tcode\tt\tw"])
def test_a_second_line_of_evidence_and_an_unknown_kind_are_refused(lines, tmp_path, monkeypatch):
    (tmp_path / "evidence.tsv").write_text(lines, encoding="utf-8")
    monkeypatch.setattr(mechanisms, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match="CORE 1 (ours|code): stands twice, or its kind is not of"):
        mechanisms.evidence()


def test_every_fault_changes_one_place_and_leaves_code_that_parses():
    assert len({fault.about for fault in FAULTS}) == len(FAULTS) >= 60
    for fault in FAULTS:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.old) == 1, f"{fault.about}: {text.count(fault.old)} places in {fault.file}"
        ast.parse(text.replace(fault.old, fault.new))
        assert fault.rooms and all((ROOT / room).exists() for room in fault.rooms), fault.about

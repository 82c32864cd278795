"""Planted faults of scripts/measure/plant_faults.py: each still applies to the present code."""

import ast
from pathlib import Path

from scripts.measure.plant_faults import FAULTS

ROOT = Path(__file__).parents[1]


def test_every_fault_changes_one_place_and_leaves_code_that_parses():
    assert len({fault.about for fault in FAULTS}) == len(FAULTS) >= 60
    for fault in FAULTS:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.old) == 1, f"{fault.about}: {text.count(fault.old)} places in {fault.file}"
        ast.parse(text.replace(fault.old, fault.new))
        assert fault.rooms and all((ROOT / room).exists() for room in fault.rooms), fault.about

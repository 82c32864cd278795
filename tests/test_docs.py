"""The documents say what the code does: keys, presets, parts and tests that they name exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from flowgrpo import methods
from flowgrpo.config import load

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts"))

import build_docs  # noqa: E402

METHODS = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")


def test_the_table_of_the_configuration_is_current():
    assert build_docs.TARGET.read_text(encoding="utf-8") == build_docs.page(), "run scripts/build_docs.py"


def test_every_preset_has_its_section_and_its_line_in_the_readme():
    assert re.findall(r"^## (.*)$", METHODS, re.M) == list(methods.PRESETS)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in methods.PRESETS if f"| `{name}` |" not in readme] == []


def snippets() -> list[tuple[str, str]]:
    """(preset, its `parts: {...}`) of every section; those before the first section are of mix_grpo."""
    texts = re.split(r"^## (.*)$", METHODS, flags=re.M)
    sections = [("mix_grpo", texts[0]), *zip(texts[1::2], texts[2::2])]
    return [(name, found) for name, text in sections for found in re.findall(r"parts: \{(?:[^{}]|\{[^{}]*\})*\}", text)]


@pytest.mark.parametrize("name, snippet", snippets())
def test_the_parts_that_are_shown_can_be_set(name, snippet):
    method = methods.preset(name)
    assert methods.with_parts(method, yaml.safe_load(snippet)["parts"]) != method


def test_tests_that_are_named_exist():
    named = re.findall(r"`(test_\w+\.py)::(\w+)`((?:,\s+`test_\w+`)*)", METHODS)
    assert len(named) >= 12
    for file, first, others in named:
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        missing = [name for name in [first, *re.findall(r"test_\w+", others)] if f"def {name}(" not in text]
        assert not missing, f"{file} has no {missing}"
    files = re.findall(r"`tests/(test_\w+\.py)`", METHODS)
    assert all((ROOT / "tests" / file).is_file() for file in files), files


def test_recipes_stay_short_and_load():
    for recipe in (ROOT / "configs").glob("*.yaml"):
        assert len(recipe.read_text().splitlines()) < 40 and load(recipe).name == recipe.stem

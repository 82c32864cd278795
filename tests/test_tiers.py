"""Tiers of the tests: what the fast one keeps, and how it follows a change."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import tiers

ROOT = Path(__file__).parents[1]


class Item(SimpleNamespace):
    """A collected test, as far as the selection reads it."""

    def get_closest_marker(self, name: str):
        return name in self.marks or None


def items(function: str, count: int, marks=(), fixture: str | None = None, file: str = "tests/a/test_b.py"):
    """Cases of one test function; fixture: the scope of one that its file defines."""
    definition = SimpleNamespace(scope=fixture, func=SimpleNamespace(__module__="tests.a.test_b"))
    fixtures = SimpleNamespace(name2fixturedefs={"made": [definition]} if fixture else {})
    return [Item(nodeid=f"{file}::{function}[{case}]", path=ROOT / file, marks=marks, _fixtureinfo=fixtures,
                 module=SimpleNamespace(__name__="tests.a.test_b")) for case in range(count)]


def kept(chosen: set[str]) -> list[str]:
    return sorted(nodeid.rpartition("[")[2].rstrip("]") for nodeid in chosen)


@pytest.mark.parametrize("seconds, cases", [
    (0.0, 8),  # not in the file, or too short to be there
    (0.015, 8), (0.05, 3), (0.15, 1), (0.2, 1), (0.3, 0)])
def test_a_function_keeps_as_many_cases_as_fit(seconds, cases):
    durations = {"tests/a/test_b.py::test_c": seconds} if seconds else {}
    chosen = tiers.fast(items("test_c", 8), durations, set())
    assert len(chosen) == cases
    if cases == 3:
        assert kept(chosen) == ["0", "2", "5"]


def test_a_mark_or_a_change_keeps_all_cases_and_the_fixture_of_a_file_counts_for_those_that_read_it():
    durations = {"tests/a/test_b.py::test_c": 9.0}
    assert len(tiers.fast(items("test_c", 4, marks=("fast",)), durations, set())) == 4
    assert len(tiers.fast(items("test_c", 4), durations, {ROOT / "tests/a/test_b.py"})) == 4
    durations = {"tests/a/test_b.py": 9.0}
    assert tiers.fast(items("test_c", 2, fixture="module"), durations, set()) == set()
    assert len(tiers.fast(items("test_c", 2, fixture="function"), durations, set())) == 2
    assert len(tiers.fast(items("test_c", 2), durations, set())) == 2


def test_a_changed_module_keeps_the_tests_that_mirror_or_import_it():
    chosen = tiers.changed_tests({ROOT / "flowgrpo/gaussian.py", ROOT / "docs/index.md"})
    assert {ROOT / "tests/test_gaussian.py", ROOT / "tests/samplers/test_kernels.py"} <= chosen
    assert ROOT / "tests/storage/test_checkpoint.py" not in chosen
    assert tiers.changed_tests({ROOT / "docs/index.md"}) == {ROOT / "docs/index.md"}


def test_durations_exist_and_files_come_longest_first():
    for name in json.loads(tiers.DURATIONS.read_text(encoding="utf-8")):
        file, _, function = name.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not function or f"def {function.split('::')[-1]}(" in text, f"{name}: renew tests/durations.json"
    short, long, fixture = (items(name, 2, file=f"tests/a/test_{name}.py") for name in ("short", "long", "fixture"))
    durations = {"tests/a/test_short.py::short": 0.5, "tests/a/test_long.py::long": 2.0, "tests/a/test_fixture.py": 3.0}
    mixed = [test for three in zip(short, fixture, long) for test in three]
    assert tiers.longest_first(mixed, durations) == long + fixture + short
    [alone], [shares] = items("test_c", 1), items("test_c", 1, fixture="module")
    assert tiers.group_of(alone) is None and tiers.group_of(shares) == "tests/a/test_b.py"
    for item in (alone, shares):
        item.module.launch = print
        assert tiers.group_of(item) == "processes"


GROUPED = """
import pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("case", range(6))
def test_grouped(case):
    pass
"""


def test_a_group_runs_on_one_worker(tmp_path):
    """pytest 9.2 and xdist 3.8 forget groups without a word."""
    (tmp_path / "test_groups.py").write_text(GROUPED)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadgroup"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    workers = re.findall(r"\[(gw\d)\].* PASSED", ran)
    assert len(workers) == 6 and len({*workers}) == 1, ran


@pytest.mark.parametrize("options, place, passed, line", [
    (["--until", "0", "-n", "2"], "usual", 0, "time was up: 6 tests did not start"),
    (["--until", "9e9"], "usual", 6, None), (["--tier", "fast"], "usual", 6, "runs 0 more"),
    (["--tier", "slow"], "usual", 0, None),
    (["--tier", "slow"], "browser", 6, None), (["--tier", "fast"], "browser", 0, "runs 6 more")])
def test_a_session_runs_its_tier_until_its_time(options, place, passed, line, tmp_path):
    (tmp_path / place).mkdir()
    (tmp_path / place / "test_groups.py").write_text(GROUPED)
    plugins = ["-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", "-p", "tests.conftest"]
    command = [sys.executable, "-m", "pytest", *plugins, *options, str(tmp_path / place)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode in (0, 5), ran.stdout  # 5: none ran
    assert f"{passed} passed" in ran.stdout if passed else " passed" not in ran.stdout, ran.stdout
    assert "time was up" not in ran.stdout if line is None else line in ran.stdout, ran.stdout

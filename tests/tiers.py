"""Tiers of the tests: `--tier fast` leaves out slow cases, `--tier slow` runs these alone, `--tier full` all.

`tests/durations.json` has the seconds of every test function and module fixture, as `--save-durations FILE` measures
them in a full run on an idle machine. The fast tier gives each test function SHARE seconds: as many of its cases as fit
are kept, spread over its parameters; a case that takes longer than LIMIT is left out. `@pytest.mark.fast` keeps a case,
and tests of what changed since the merge base with the main branch are kept whole: those whose file changed, mirrors a
changed file, or imports a changed module by name.

`--until TIME` starts no test after that time, in seconds since 1970, and says how many it left out.
"""

import ast
import json
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DURATIONS = ROOT / "tests" / "durations.json"
SHARE, LIMIT = 0.15, 0.2  # seconds: of a test function, of one case with the module fixtures of its file
BASES = ("origin/HEAD", "origin/main", "main")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=("fast", "slow", "full"), default="full",
                     help="fast: leave out the slow tests; slow: those alone")
    parser.addoption("--until", type=float, metavar="TIME", help="start no test after this time, seconds since 1970")
    parser.addoption("--save-durations", type=Path, metavar="FILE", help="write the seconds of all tests that ran")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fast: a slow test that the fast tier keeps")
    config.pluginmanager.register(Tier(config), "tier")
    if config.getoption("--save-durations"):
        config.pluginmanager.register(Stopwatch(config.getoption("--save-durations")), "stopwatch")


def function_of(nodeid: str) -> str:
    """A test function's name, without the case's parameters and xdist's group."""
    return nodeid.split("@")[0].split("[")[0]


class Tier:
    """Selection of a session's tests, and its last line."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.left_out = self.kept = self.late = 0

    @pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Group the tests that belong on one worker, begin with the longest files, and leave out what the fast tier
        does not run."""
        for item in items:
            if group := group_of(item):
                item.add_marker(pytest.mark.xdist_group(group))
        seconds = json.loads(DURATIONS.read_text(encoding="utf-8"))
        if self.config.getoption("--shuffle") is None:
            items[:] = longest_first(items, seconds)
        tier = self.config.getoption("--tier")
        if tier != "full":
            apart = self.config.getini("norecursedirs")  # folders that only `make test-all` names
            usual = [item for item in items if item.path.parent.name not in apart]
            kept = fast(usual, seconds, changed_tests(changed_files()))
            if tier == "slow":
                kept = {item.nodeid for item in items} - kept
            left_out = [item for item in items if item.nodeid not in kept]
            items[:] = [item for item in items if item.nodeid in kept]
            self.left_out, self.kept = len(left_out), len(items)
            self.config.hook.pytest_deselected(items=left_out)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        until = self.config.getoption("--until")
        if until is None or time.time() <= until:
            return None
        self.late += 1
        return True

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["tier"] = (self.left_out, self.kept, self.late)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        """Take the counts from a worker: the process that starts the workers collects nothing itself."""
        self.left_out, self.kept, late = getattr(node, "workeroutput", {}).get("tier", (self.left_out, self.kept, 0))
        self.late += late

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter) -> None:
        if self.config.getoption("--tier") == "fast":
            terminalreporter.write_line(f"fast tier: {self.kept:,} tests; `make test-all` runs {self.left_out:,} more")
        if self.late:
            terminalreporter.write_line(f"time was up: {self.late:,} tests did not start")


def group_of(item: pytest.Item) -> str | None:
    """Return the group of a test, all of which one worker runs; None for a test of its own.

    Files that start processes by `launch`, `together` or `Forked` are one group: pairs that wait for each other's
    turns beside other pairs take several times as long, and each worker would load the libraries for its own. Else
    tests that share a fixture of their file are one.
    """
    if any(hasattr(item.module, name) for name in ("launch", "together", "Forked")):
        return "processes"
    return str(item.path.relative_to(ROOT)) if shares_a_fixture(item) else None


def shares_a_fixture(item: pytest.Item) -> bool:
    """True for a test that reads a fixture of a wider scope, from its own file."""
    definitions = getattr(item, "_fixtureinfo").name2fixturedefs.values()
    return any(each[-1].scope != "function" and each[-1].func.__module__ == item.module.__name__
               for each in definitions)


def longest_first(items: Sequence[pytest.Item], seconds: dict[str, float]) -> list[pytest.Item]:
    """Return the tests by files, those that take longest first: a long one at the end would leave a worker idle.

    seconds: as of `fast`.
    """
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.nodeid.partition("::")[0]].append(item)
    totals = {file: seconds.get(file, 0.0) + sum(seconds.get(function_of(test.nodeid), 0.0) for test in tests)
              for file, tests in files.items()}
    return [test for file in sorted(files, key=totals.__getitem__, reverse=True) for test in files[file]]


def fast(items: Sequence[pytest.Item], seconds: dict[str, float], changed: set[Path]) -> set[str]:
    """Node ids of the tests that the fast tier runs. seconds: by function, and by file for its module fixtures."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[function_of(item.nodeid)].append(item)
    kept = {item.nodeid for item in items if item.get_closest_marker("fast") or item.path in changed}
    for function, cases in functions.items():
        fixture = seconds.get(function.partition("::")[0], 0.0) if any(map(shares_a_fixture, cases)) else 0.0
        each = seconds.get(function, 0.0)
        if each + fixture <= LIMIT:
            kept |= {case.nodeid for case in spread(cases, max(1, int(SHARE / max(each, 1e-3) + 1e-6)))}
    return kept


def spread(cases: Sequence[pytest.Item], count: int) -> list[pytest.Item]:
    """Return so many of the cases, at equal distances, the first among them."""
    return [cases[i * len(cases) // count] for i in range(count)] if count < len(cases) else list(cases)


def changed_files() -> set[Path]:
    """Files that differ from the merge base with the main branch; none outside of a git repository."""
    for base in BASES:
        merge_base = git("merge-base", "HEAD", base)
        if merge_base:
            names = git("diff", "--name-only", merge_base[0]) + git("ls-files", "--others", "--exclude-standard")
            return {ROOT / name for name in names}
    return set()


def git(*arguments: str) -> list[str]:
    """Lines that a git command prints; none if it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    except OSError:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def changed_tests(changed: set[Path]) -> set[Path]:
    """Test files that changed, mirror a changed file of the package, or import a changed module by name."""
    modules = {module_of(file) for file in changed if file.suffix == ".py" and file.is_relative_to(ROOT / "flowgrpo")}
    mirrors = {mirror_of(file) for file in changed if file.is_relative_to(ROOT / "flowgrpo")}
    if not modules:
        return changed
    return changed | {file for file in (ROOT / "tests").rglob("test_*.py")
                      if file in mirrors or not modules.isdisjoint(imported(file))}


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def mirror_of(file: Path) -> Path:
    within = file.relative_to(ROOT / "flowgrpo")
    return ROOT / "tests" / within.with_name(f"test_{within.name}")



def imported(file: Path) -> Iterator[str]:
    """Names of modules, and of names in modules, that a file imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


class Stopwatch:
    """Seconds by test function, the mean of its cases, and by file for module fixtures."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seconds: dict[str, float] = defaultdict(float)
        self.count: Counter[str] = Counter()
        self.fixtures = 0.0  # within the present test

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        if fixturedef.scope == "function":
            return (yield)
        start = time.perf_counter()
        result = yield
        self.seconds[request.node.nodeid.split("::")[0]] += time.perf_counter() - start
        self.fixtures += time.perf_counter() - start
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.fixtures, start = 0.0, time.perf_counter()
        result = yield
        name = function_of(item.nodeid)
        self.seconds[name] += time.perf_counter() - start - self.fixtures
        self.count[name] += 1
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["durations"] = (dict(self.seconds), dict(self.count))
        elif self.count:
            self.write()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        seconds, count = getattr(node, "workeroutput", {}).get("durations", ({}, {}))
        for name, value in seconds.items():
            self.seconds[name] += value
        self.count.update(count)
        self.write()

    def write(self) -> None:
        """Write the slow ones: below .05 s a test is kept in any case."""
        means = {name: round(value / max(1, self.count[name]), 2) for name, value in sorted(self.seconds.items())}
        self.file.write_text(json.dumps({name: value for name, value in means.items() if value > 0.05}, indent=1))

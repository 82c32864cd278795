"""Settings of the test session: threads of workers, and a random order of the tests; fixtures of many tests."""

import gc
import os
import random
from pathlib import Path

import pytest

pytest_plugins = ["tests.tiers"]

# Workers, and what else runs on the machine, leave each other its cores: threads that share one wait for each other.
# torch reads it when it is imported, and so do the processes that tests start. A worker's is 1 whatever the shell says.
if "PYTEST_XDIST_WORKER" in os.environ or not os.environ.get("OMP_NUM_THREADS"):
    os.environ["OMP_NUM_THREADS"] = "1"

gc.disable()  # while modules of torch and its libraries are imported
os.fsync = lambda file: None  # no test cuts the power, and a disk takes a twentieth of the session for it


def pytest_addoption(parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order, by files")


def pytest_collection_modifyitems(config, items: list) -> None:
    """Shuffle files, and the tests within each: module fixtures are still built once per file."""
    if config.getoption("--shuffle") is None:
        return
    shuffled = random.Random(config.getoption("--shuffle"))
    files: dict[str, list] = {}
    for item in items:
        files.setdefault(str(item.path), []).append(item)
    order = list(files.values())
    shuffled.shuffle(order)
    for tests in order:
        shuffled.shuffle(tests)
    items[:] = [item for tests in order for item in tests]


def pytest_collection_finish() -> None:
    """Leave the modules of torch and its libraries out of every later garbage collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The folder of a tiny Stable Diffusion 3."""
    from tests.helpers import tiny  # once the variables above are set
    return tiny.save(tiny.sd3(), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The test's own folder, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path

"""scripts/launch/slurm.sh on a real Slurm of one node: `make test-all` runs this where it is installed."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "fuzz"))
import try_slurm  # noqa: E402


@pytest.fixture(scope="module")
def node():
    with try_slurm.node() as node:
        yield node


@pytest.mark.parametrize("case", try_slurm.cases(rounds=2))
def test_slurm(case, node):
    assert try_slurm.cases(rounds=2)[case](node)

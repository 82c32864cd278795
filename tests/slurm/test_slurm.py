"""scripts/launch/slurm.sh on a real Slurm of one node: `make test-all` runs this where it is installed."""


import pytest
import try_slurm


@pytest.fixture(scope="module")
def node():
    with try_slurm.node() as node:
        yield node


@pytest.mark.parametrize("case", try_slurm.cases(rounds=2))
def test_slurm(case, node):
    assert try_slurm.cases(rounds=2)[case](node)

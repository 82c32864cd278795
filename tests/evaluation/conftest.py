"""Fixtures of evaluations."""

import pytest

from tests.helpers import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny pipeline's folder."""
    return tiny.save(tiny.sd3(), tmp_path_factory.mktemp("model") / "tiny")

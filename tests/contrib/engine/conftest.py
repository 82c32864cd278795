import pytest

from tests.contrib.engine.server import TinyEngine, serving
from tests.helpers import tiny


@pytest.fixture
def own():
    """The engine of a test."""
    return TinyEngine(tiny.sd3())


@pytest.fixture
def url(own):
    with serving(own) as address:
        yield address

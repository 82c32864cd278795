"""Messages of refused calls, each of them one line."""

import pytest

from flowgrpo.errors import UserError


def message(call, *arguments, error: type[BaseException] = UserError, **keywords) -> str:
    """Return what the error of a call says."""
    with pytest.raises(error) as caught:
        call(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)

"""Reachability of the model hub, checked once, before its client tries again and again."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from pathlib import Path

from flowgrpo.config import recipes
from flowgrpo.errors import UserError
from flowgrpo.packages import broken, causes
from flowgrpo.starter import FOLDERS

SECONDS = 4.0  # until an answer
INDICES = ("model_index.json", "config.json")  # of a pipeline, of a language model


class Unreachable(UserError):
    """Error: a model is neither here nor in the hub's cache, and the hub does not answer."""


def require(model: str) -> None:
    """Raise Unreachable if a model is neither here nor in the hub's cache, and the hub does not answer.

    Without an answer a cached model is loaded in the hub's offline mode, which is reported.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if not _is_silent(model):
        return
    try:
        cached = any(isinstance(try_to_load_from_cache(model, name), str) for name in INDICES)
    except ValueError:  # no name that the hub can have
        cached = False
    if not cached:
        fix = f"`hf download {model}` where there is one, and give the folder" if "/" in model else \
            f"give a folder that is there, or a hub id (OWNER/NAME){of_recipe(model)}"
        raise Unreachable(f"cannot load the model {model!r}: no folder of that name, not in the hub's cache, and no "
                          f"network ({constants.ENDPOINT} does not answer): {fix}")
    print(f"no network ({constants.ENDPOINT} does not answer): {model} is loaded from the hub's cache", file=sys.stderr)
    constants.HF_HUB_OFFLINE = True


def of_recipe(model: str) -> str:
    """Return how a folder is made that a packaged recipe of its name expects, as the end of a message; else nothing."""
    return f"; the first lines of the recipe {model} put that folder together" if model in recipes.names() else ""


def read_cache_alone(source: str) -> None:
    """Switch the hub's client to its offline mode if the hub does not answer; nothing is asked for a local path."""
    from huggingface_hub import constants

    if _is_silent(source):
        constants.HF_HUB_OFFLINE = True


def _is_silent(source: str) -> bool:
    """Return True for a name of the hub, if its client may ask and the hub does not answer."""
    from huggingface_hub import constants

    here = source in FOLDERS or Path(source).exists() or source.startswith(("/", ".", "~"))
    return not (here or constants.HF_HUB_OFFLINE or answers(constants.ENDPOINT))


def unreached(error: BaseException) -> str | None:
    """Return the reason of a file that is not in the hub's cache and was not asked for; None for another error."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    if not (constants.HF_HUB_OFFLINE and any(isinstance(cause, (LocalEntryNotFoundError, OfflineModeIsEnabled))
                                             for cause in causes(error))):
        return None
    why = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else \
        f"no network ({constants.ENDPOINT} does not answer)"
    return f"not in the hub's cache, and {why}"


def load_error(error: BaseException, model: str, what: str, expected: str, reason: str | None = None) -> UserError:
    """Return the error for a model that does not load: `refusal` of the hub, or the first line of what was raised.

    what: a noun for the model. expected: what would load. reason: a better one than the raised error's.
    """
    if told := refusal(error, model) or broken(error):
        return UserError(f"cannot load the {what} {model!r}: {told}")
    lines = str(error).strip().splitlines()
    return UserError(f"cannot load the {what} {model!r} ({reason or (lines or [type(error).__name__])[0]}): expected "
                     f"{expected}")


def refusal(error: BaseException, model: str) -> str | None:
    """Return what to do about a hub that refuses a repository's files; None for another error.

    A library's own error may hide the hub's, which is then its cause or context.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError

    for cause in causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        page = f"{constants.ENDPOINT}/{getattr(cause, 'repo_id', None) or model}"
        if isinstance(cause, GatedRepoError):
            return f"the repository is gated: accept its licence at {page}, and log in with `hf auth login`"
        if status in (401, 403):
            return (f"the hub refuses it ({status}): there is no such repository, or it is private or gated; look at "
                    f"{page}, accept its licence if it has one, and log in with `hf auth login`")
    return None


@functools.cache
def answers(endpoint: str) -> bool:
    """Return True if a server answers within SECONDS, whatever it says."""
    from huggingface_hub.utils import get_session

    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):  # of the client's library, or of a proxy
            get_session().head(endpoint, timeout=SECONDS)
            answered.set()

    asking = threading.Thread(target=ask, daemon=True)  # a name server may keep it for longer than its timeout
    asking.start()
    asking.join(SECONDS)
    return answered.is_set()

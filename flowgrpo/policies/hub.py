"""Reachability of the model hub, asked once and before its client tries again and again."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from pathlib import Path

from flowgrpo.errors import UserError
from flowgrpo.starter import FOLDERS

SECONDS = 4.0  # until an answer
INDICES = ("model_index.json", "config.json")  # of a pipeline, of a language model


def require(model: str) -> None:
    """Raise UserError if a model is neither here nor in the hub's cache, and the hub does not answer.

    Without an answer a cached model is loaded in the hub's offline mode, which is reported.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if model in FOLDERS or Path(model).exists() or constants.HF_HUB_OFFLINE or _answers(constants.ENDPOINT):
        return
    try:
        cached = any(isinstance(try_to_load_from_cache(model, name), str) for name in INDICES)
    except ValueError:  # no name that the hub can have
        cached = False
    if not cached:
        raise UserError(f"cannot load the model {model!r}: no folder of that name, not in the hub's cache, and no "
                        f"network ({constants.ENDPOINT} does not answer): `hf download {model}` where there is one, "
                        "and give the folder")
    print(f"no network ({constants.ENDPOINT} does not answer): {model} is loaded from the hub's cache", file=sys.stderr)
    constants.HF_HUB_OFFLINE = True


@functools.cache
def _answers(endpoint: str) -> bool:
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

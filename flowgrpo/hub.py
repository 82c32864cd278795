"""The model hub: reachability, checked once, before its client tries again and again; and runs and LoRAs that lie
there.

`hub:OWNER/NAME[@REVISION]` is downloaded once, as data: nothing of it is executed.
"""

import contextlib
import functools
import os
import re
import sys
import threading
from pathlib import Path

from flowgrpo.config import recipes
from flowgrpo.errors import UserError
from flowgrpo.packages import causes, import_failure
from flowgrpo.starter import FOLDERS

SECONDS = 4.0  # until an answer
INDICES = ("model_index.json", "modular_model_index.json", "config.json")  # of pipelines, of a language model
PREFIX = "hub:"
_NAME = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?", re.ASCII)
# Data alone: neither Python nor pickles.
TAKEN = ("*.safetensors", "*.json", "*.jsonl", "*.yaml", "*.jinja")
LEFT = ("checkpoints/*", "merged*/*", "events/*")


class Unreachable(UserError):
    """Error: a model is neither here nor in the hub's cache, and the hub does not answer."""


def require(model: str) -> None:
    """Raise Unreachable if a model is neither here nor in the hub's cache, and the hub does not answer. Without an
    answer a cached model is loaded in the hub's offline mode, which is reported."""
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
    """End of a message on a missing folder that the packaged recipe of its name explains how to make; else empty."""
    return f"; the first lines of the recipe {model} put that folder together" if model in recipes.names() else ""


def read_cache_alone(source: str) -> None:
    """Switch the hub's client to its offline mode if the hub does not answer; nothing is asked for a local path."""
    from huggingface_hub import constants

    if _is_silent(source):
        constants.HF_HUB_OFFLINE = True


def _is_silent(source: str) -> bool:
    from huggingface_hub import constants

    here = source in FOLDERS or Path(source).exists() or source.startswith(("/", ".", "~"))
    return not (here or constants.HF_HUB_OFFLINE or answers(constants.ENDPOINT))


def offline_reason(error: BaseException) -> str | None:
    """Reason of a file that is not in the hub's cache and was not asked for; None for another error."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    if not (constants.HF_HUB_OFFLINE and any(isinstance(cause, (LocalEntryNotFoundError, OfflineModeIsEnabled))
                                             for cause in causes(error))):
        return None
    why = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else \
        f"no network ({constants.ENDPOINT} does not answer)"
    return f"not in the hub's cache, and {why}"


def load_error(error: BaseException, model: str, what: str, expected: str, reason: str | None = None) -> UserError:
    """Error for a model that does not load: `refusal` of the hub, or the first line of what was raised. what: a noun
    for the model. expected: what would load. reason: a better one than the raised error's."""
    if told := refusal(error, model) or import_failure(error) or _other_sizes(error):
        return UserError(f"cannot load the {what} {model!r}: {told}")
    lines = str(error).strip().splitlines()
    return UserError(f"cannot load the {what} {model!r} ({reason or (lines or [type(error).__name__])[0]}): expected "
                     f"{expected}")


def _other_sizes(error: BaseException) -> str | None:
    """Message on weights whose sizes differ from their configuration; None for another error.

    The error of transformers does not name them. They are read from a local of the frame that raised it.
    """
    for each in causes(error):
        step = each.__traceback__
        while step is not None:
            differing = getattr(step.tb_frame.f_locals.get("loading_info"), "mismatched_keys", None)
            if differing and step.tb_next is None:
                name, got, expected = min(differing)
                others = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
                return (f"{name} is {[*got]} in its weights, but {[*expected]} by its config.json{others}: take the "
                        "config.json that was saved with the weights")
            step = step.tb_next
    return None


def refusal(error: BaseException, model: str) -> str | None:
    """Advice on a hub that refuses a repository's files; None for another error.

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
    """True if a server answers within SECONDS, whatever it says."""
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


def is_named(text: str) -> bool:
    """True for a name that begins with `hub:`."""
    return text.startswith(PREFIX)


def is_lora(text: str) -> bool:
    """True for a LoRA of the hub: `hub:OWNER/NAME`, or OWNER/NAME where no folder OWNER lies here."""
    named = bool(_NAME.fullmatch(text)) and not text.endswith(".safetensors")
    return is_named(text) or named and not Path(text.partition("/")[0]).exists()


def download(text: str) -> Path:
    """Download the data of a repository, and return its folder in the hub's cache.

    A LoRA that is the one .safetensors file of a repository without a run's config.yaml is returned as that file.
    Raises UserError for a name of another form, and for a repository that is gated, missing, without data or neither
    reachable nor in the cache.
    """
    match = _NAME.fullmatch(text.removeprefix(PREFIX))
    if not match:
        raise UserError(f"{text!r}: expected hub:OWNER/NAME or hub:OWNER/NAME@REVISION")
    folder = _download_snapshot(match)
    files = sorted(folder.glob("*.safetensors"))
    whole = (folder / "config.yaml").is_file() or any(folder.glob("*/*.safetensors"))
    if not files and not whole:
        raise UserError(f"{text}: the repository has no weights in .safetensors; pickles are not downloaded")
    single = len(files) == 1 and not whole and not (folder / "adapter_config.json").is_file()
    return files[0] if single else folder


def _download_snapshot(named: re.Match[str]) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    offline = constants.HF_HUB_OFFLINE or not answers(constants.ENDPOINT)
    try:
        folder = Path(snapshot_download(named["id"], revision=named["revision"], allow_patterns=list(TAKEN),
                                        ignore_patterns=list(LEFT), local_files_only=offline))
    except errors.LocalEntryNotFoundError:
        why = f"no network ({constants.ENDPOINT} does not answer)" if offline else "the download did not complete"
        raise UserError(f"{PREFIX}{named[0]}: not in the hub's cache, and {why}: `hf download {named['id']}` where "
                        "there is one, and give the folder") from None
    except Exception as error:  # of the hub, the network or the file system
        why = refusal(error, named["id"]) or " ".join(str(error).split())[:200] or type(error).__name__
        if isinstance(error, errors.RevisionNotFoundError):
            why = f"the repository has no revision {named['revision']!r}: expected a branch, a tag or a commit"
        elif isinstance(error, errors.RepositoryNotFoundError) and not isinstance(error, errors.GatedRepoError):
            why = "there is no such repository, or it is private: look at its name, or log in with `hf auth login`"
        raise UserError(f"{PREFIX}{named[0]}: {why}") from None
    if offline:
        print(f"no network: {named[0]} is read from the hub's cache", file=sys.stderr)
    return folder

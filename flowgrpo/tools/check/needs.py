"""Needs of a recipe: extras of flowgrpo, weights of its model and rewards, prompts of the hub; what of it is missing.

`needs` asks the hub for the files and sizes, if it answers; without it, only what is in its cache is known. `fetch`
downloads: several files at once, each verified, and continued where a download broke off or was killed.
"""

import functools
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub import utils as hub_utils
from huggingface_hub.file_download import repo_folder_name

from flowgrpo import hub
from flowgrpo.config import recipes
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.config.schema import Config
from flowgrpo.data.sets import SETS
from flowgrpo.errors import UserError
from flowgrpo.packages import present
from flowgrpo.policies.weights.memory_options import PACKAGES
from flowgrpo.rewards.about import SERVER, About, lazily
from flowgrpo.rewards.failures import relabel_errors
from flowgrpo.rewards.find import ALIASES, BUILT_IN, find, locate
from flowgrpo.rewards.placement import CHECKPOINTS, local_models
from flowgrpo.storage.manifest import sha256

REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # a hub id
LICENCE = re.compile(r"^# Licence: (?P<name>.+?), (?P<gated>gated|not gated)\b", re.M)  # of a packaged recipe
MODEL = re.compile(r"^model: *(?P<name>\S+)", re.M)
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".onnx_data", ".xml", ".gguf")
VARIANT = re.compile(r"\.(fp16|bf16|fp32|non_ema|ema)[.-]")
NOT_READ = ("onnx", "openvino", "flax", "coreml", "original")  # beginnings of folders' names
TOKENIZER = 0.01  # gigabytes at most
PARTIAL = ".part"  # ending of a file that is being downloaded, beside the cache's blobs
WORKERS, TRIES = 4, 5
_LOCKS: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by blob


@dataclass(frozen=True)
class File:
    """File of a repository; sha: of its content, where the hub says it."""

    name: str
    size: int
    sha: str | None = None


@dataclass(frozen=True)
class Need:
    """One thing that a recipe needs.

    what: "extra", "model", or "reward NAME". name: of the extra or repository. here: nothing of it is missing.
    gigabytes: of all files; None where that is not known. accept: what the user has to do first.
    files: of the repository, that are read; missing: those that are not in the cache.
    """

    what: str
    name: str
    here: bool
    gigabytes: float | None = None
    licence: str = ""
    accept: str = ""
    files: tuple[File, ...] = ()
    missing: tuple[File, ...] = ()
    revision: str | None = None

    @property
    def to_fetch(self) -> float:
        return sum(file.size for file in self.missing) / 1e9 if self.files else 0.0 if self.here else \
            self.gigabytes or 0.0


def needs(config: Config, sizes: Callable[[str], float | None] = lambda _: None) -> list[Need]:
    """Extras and repositories that a configuration needs, the missing first.
    sizes: gigabytes of a published model, for when the hub does not answer."""
    found = [Need("extra", extra, present(extra)) for extra in extras(config)]
    licence, gated = model_licences().get(config.model, ("", False))
    if REPOSITORY.fullmatch(config.model) and not Path(config.model).exists():
        found.append(_repository("model", config.model, licence + ", gated" * gated, sizes(config.model),
                                 revision=config.load.revision, variant=config.load.variant))
    for label, rule in (config.trained | config.extra_rewards).items():
        found += _of_reward(label, rule)
    return sorted(dict.fromkeys(found), key=lambda need: need.here)


def missing(config: Config, sizes: Callable[[str], float | None] = lambda _: None) -> list[Need]:
    """The missing ones of `needs`; empty for a single extra or reward, whose own error has the advice."""
    lacking = [need for need in needs(config, sizes) if not need.here]
    return lacking if len(lacking) > 1 or any(need.what == "model" for need in lacking) else []


def begun(found: Iterable[Need]) -> float:
    """Gigabytes of files that were downloaded in part."""
    return sum(part.stat().st_size for name in {need.name for need in found if need.what != "extra"}
               for part in _blobs(name).glob(f"*{PARTIAL}")) / 1e9


def out_of_reach(lacking: Iterable[Need]) -> list[str]:
    """Names of repositories for which the hub does not answer, and of which the cache holds nothing."""
    return [need.name for need in lacking if need.what != "extra" and not need.files and not need.accept
            and not _blobs(need.name).parent.is_dir()]


def extras(config: Config) -> list[str]:
    """Extras of flowgrpo that a configuration needs: by its prompts, rewards, weights, optimizer, tracker."""
    of_hub = config.prompts in SETS and not SETS[config.prompts].is_packaged
    named = [PACKAGES.get(config.memory.weights, ""), "bitsandbytes" * (config.train.optimizer == "adamw8bit"),
             "datasets" * of_hub, config.tracker * (config.tracker in ("wandb", "trackio"))]
    for label, rule in (config.trained | config.extra_rewards).items():
        made = _build_reward(label, rule)
        parts = () if made is None else (made, *local_models(made))
        named += [about.needs or "" for part in parts if isinstance(about := getattr(part, "about", None), About)]
    return sorted({extra.strip() for text in named for extra in text.split(",")} - {"", SERVER})


@functools.cache
def model_licences() -> dict[str, tuple[str, bool]]:
    """Licence by model of the packaged recipes, as their first lines state it, and whether it is gated."""
    found = {}
    for name in recipes.names():
        text = (recipes.FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
        if (model := MODEL.search(text)) and (licence := LICENCE.search(text)):
            found[model["name"]] = (licence["name"], licence["gated"] == "gated")
    return found


def _build_reward(label: str, rule: WatchRule) -> Any:
    """Reward without its weights; its class where a package that it needs is missing; None for one that is not built
    in."""
    name = rule.use or label
    if ALIASES.get(name, name) not in BUILT_IN:
        return None
    with suppress(UserError), lazily(), relabel_errors(label, rule.use):
        return find(name, dict(rule.args))
    with suppress(UserError):  # said by the run itself, with what is wrong
        return locate(name)
    return None


def _of_reward(label: str, rule: WatchRule) -> Iterator[Need]:
    """Yield what a reward reads of the hub."""
    made = _build_reward(label, rule)
    if made is None:
        return
    of_class = isinstance(made, type)
    for model in [made] if of_class else local_models(made):
        if not is_dataclass(model):
            continue
        about = getattr(model, "about", None) or getattr(made, "about", None)
        parameters = getattr(model, "parameters", None)  # of all its files: they count at the first
        for entry in fields(model):
            value = entry.default if of_class else getattr(model, entry.name)
            if not (isinstance(value, str) and entry.name in (*CHECKPOINTS, "tokenizer", "base")) or \
                    not re.fullmatch(r"[\w.-]+(/[\w.-]+)+", value) or Path(value).exists():
                continue
            owner, repository, *file = value.split("/", 2)
            weights = entry.name in CHECKPOINTS
            size = TOKENIZER if not weights else parameters * 2 / 1e9 if parameters else None
            yield _repository(f"reward {label}", f"{owner}/{repository}", getattr(about, "licence", None) or "", size,
                              file=file[0] if file else None, weights=weights)
            parameters = None if weights else parameters


def _repository(what: str, name: str, licence: str, gigabytes: float | None, *, revision: str | None = None,
                file: str | None = None, weights: bool = True, variant: str | None = None) -> Need:
    """Need of a repository: of one file of it, or of those that are read. weights: False for a tokenizer."""
    def is_cached(path: str) -> bool:
        return isinstance(try_to_load_from_cache(name, path, revision=revision), str)

    if constants.HF_HUB_OFFLINE or not hub.answers(constants.ENDPOINT):
        index = (file,) if file else (*hub.INDICES, "tokenizer_config.json", "tokenizer.json", "vocab.json")
        return Need(what, name, any(map(is_cached, index)), gigabytes, licence, revision=revision)
    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True)
    except Exception as error:  # the network and its libraries can raise anything
        why = hub.refusal(error, name) or " ".join(str(error).split())[:120] or type(error).__name__
        return Need(what, name, False, gigabytes, licence, why, revision=revision)
    listed = [File(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else None)
              for each in info.siblings or []]
    files = tuple(each for each in listed if each.name == file) if file else tuple(
        choose_files(listed, weights, variant))
    missing = tuple(each for each in files if not is_cached(each.name))
    card = getattr(info, "card_data", None)
    licence = licence or str(getattr(card, "license_name", None) or getattr(card, "license", None) or "")
    return Need(what, name, not missing, sum(each.size for each in files) / 1e9, licence,
                _to_accept(name) if info.gated and missing else "", files, missing, revision)


def _to_accept(name: str) -> str:
    """Advice on a gated repository that does not give its files to this user yet; "" if it does."""
    try:
        HfApi().auth_check(name)
        return ""
    except Exception:  # a refusal, or what a network raises
        return f"gated: accept its licence at {constants.ENDPOINT}/{name}, then `hf auth login`"


def choose_files(files: Iterable[File], weights: bool = True, variant: str | None = None) -> Iterator[File]:
    """Yield the files of a repository that diffusers or transformers read: one form of the weights of each folder.
    weights: False for a tokenizer alone. variant: such as fp16."""
    files = [file for file in files if not file.name.startswith(".")]
    pipeline = any(file.name == "model_index.json" for file in files)
    folders: dict[str, list[File]] = {}
    for file in files:
        folder = file.name.rpartition("/")[0]
        if not folder.lower().startswith(NOT_READ) and (pipeline or not folder):
            folders.setdefault(folder, []).append(file)
    for folder, inside in folders.items():
        own = [file for file in inside if file.name.endswith(WEIGHTS)]
        yield from (file for file in inside if file not in own
                    and file.name.rpartition(".")[2] in ("json", "txt", "model", "jinja", "tiktoken", "jsonl"))
        if not weights or (pipeline and not folder):
            continue
        of_kind = [file for file in own if file.name.endswith(".safetensors")] or [
            file for file in own if file.name.endswith((".bin", ".pt", ".pth"))]
        varied = [file for file in of_kind if variant and f".{variant}" in file.name]
        yield from varied or (file for file in of_kind if not VARIANT.search(file.name))


# --- downloads -------------------------------------------------------------------------------------------------------


def fetch(found: Iterable[Need], advance: Callable[[int], None] = lambda _: None) -> None:
    """Download what is missing of repositories into the hub's cache. advance: receives bytes as they come. Raises
    UserError for the first file that cannot be had; files that are whole stay."""
    jobs = list(dict.fromkeys((need.name, need.revision, file) for need in found for file in need.missing))
    stop = threading.Event()
    hub_utils.disable_progress_bars()
    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            running = [pool.submit(_file, *job, advance, stop) for job in jobs]
            try:
                for each in running:
                    each.result()
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        hub_utils.enable_progress_bars()


def _blobs(repository: str) -> Path:
    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"), "blobs")


def _file(repository: str, revision: str | None, file: File, advance: Callable[[int], None], stop: threading.Event
          ) -> None:
    """Download a file, verify it, and put it where the hub's client looks for it."""
    what = f"{repository}/{file.name}"
    try:
        url = hf_hub_url(repository, file.name, revision=revision)
        metadata = get_hf_file_metadata(url)
        blobs = _blobs(repository)
        blobs.mkdir(parents=True, exist_ok=True)
        blob, partial = blobs / str(metadata.etag), blobs / f"{metadata.etag}{PARTIAL}"
        with _LOCKS[str(blob)]:  # files of one content are one blob
            if blob.exists():
                advance(file.size)
            else:
                _stream(url, partial, file, advance, stop)
                if stop.is_set():
                    return
                os.replace(partial, blob)
        hf_hub_download(repository, file.name, revision=revision)  # its links and its reference, without the content
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:  # the network and its libraries can raise anything
        why = hub.refusal(error, repository) or " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{what} was not downloaded ({why}): the same command continues") from None


def _stream(url: str, partial: Path, file: File, advance: Callable[[int], None], stop: threading.Event) -> None:
    """Append to a partial file until it is whole. Raises UserError if its content is not the hub's."""
    advance(partial.stat().st_size if partial.exists() else 0)
    for attempt in range(TRIES):
        begun = partial.stat().st_size if partial.exists() else 0
        if begun >= file.size and partial.exists():
            break
        headers = hub_utils.build_hf_headers() | {"Accept-Encoding": "identity"}
        headers |= {"Range": f"bytes={begun}-"} if begun else {}
        try:
            with hub_utils.get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
                hub_utils.hf_raise_for_status(response)
                if begun and response.status_code != 206:  # a server that begins anew
                    advance(-begun)
                    partial.unlink()
                with partial.open("ab") as out:
                    for piece in response.iter_bytes():  # as they come: none waits for others
                        out.write(piece)
                        advance(len(piece))
                        if stop.is_set():
                            return
        except Exception as error:
            if getattr(getattr(error, "response", None), "status_code", 500) < 500 or attempt + 1 == TRIES:
                raise
            time.sleep(min(0.2 * 2 ** attempt, 5))
    if partial.stat().st_size != file.size or (file.sha and sha256(partial) != file.sha):
        size = partial.stat().st_size
        partial.unlink()
        advance(-size)
        raise UserError(f"{file.name} is not what the hub lists ({size:,} of {file.size:,} bytes, or another SHA-256): "
                        "it was deleted, and the same command downloads it anew")

"""Reward behind any JSON API: a request per sample, made of a template, and one number at a path of its answer.

    reward:
      brand:
        use: http
        args:
          url: https://api.example.com/v2/score
          request: {text: "{prompt}", image: "{image}", options: {strict: true}}
          answer: result.scores.0
          key_env: BRAND_KEY
        on_error: skip

Retries, deadlines and the limits of an answer are those of `Service`.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from flowgrpo.errors import UserError, nearest
from flowgrpo.escaped import one_line
from flowgrpo.nouns import quantity
from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.failures import Failed, TimedOut
from flowgrpo.rewards.remote.exchange import Service, as_json, environment_key, side_by_side, split_address
from flowgrpo.rewards.vlm_judge.client import PASSING
from flowgrpo.rewards.vlm_judge.judge import ENCODINGS, data_url, frame_index

if TYPE_CHECKING:
    from torch import Tensor

WHO = "reward 'http'"
NAMES = ("prompt", "image", "frames", "text", "metadata")  # of slots; metadata.KEY too
SLOT = re.compile(r"\{([A-Za-z]\w*(?:\.[\w-]+)*)\}")
SENT = {"prompt": "prompts", "metadata": "metadata", "text": "texts", "image": "images", "frames": "frames"}


@dataclass(frozen=True)
class Template:
    """JSON with slots in its strings, such as {prompt}. Raises UserError for an unknown slot.

    longest, encoding, frames: as of `Http`.
    """

    json: Any
    longest: int = 1024
    encoding: str = "png"
    frames: int = 8

    def __post_init__(self) -> None:
        for name in _slots(self.json):
            if name not in NAMES and not name.startswith("metadata."):
                raise UserError(f"{WHO}: its request has the slot {{{name}}}"
                                f"{nearest(name, [*NAMES, 'metadata.KEY'])}")

    @property
    def sends(self) -> list[str]:
        """Contents of requests, in words, which a run prints."""
        names = {name.partition(".")[0] for name in _slots(self.json)}
        return [word for name, word in SENT.items() if name in names] or ["requests"]

    def fill(self, output: Tensor | str, prompt: str, entry: dict[str, Any]) -> Any:
        """The JSON of a sample.

        output: an image [3, H, W] or a video [F, 3, H, W] in [0, 1], or a text. entry: the prompt's metadata.
        Raises Failed for metadata that the prompt lacks and an image that is not finite, UserError for a slot of
        another kind of samples.
        """
        return _fill(self.json, {name: self._value(name, output, prompt, entry) for name in {*_slots(self.json)}})

    def _value(self, name: str, output: Tensor | str, prompt: str, entry: dict[str, Any]) -> Any:
        if name == "prompt":
            return prompt
        if name.startswith("metadata"):
            return value_at(entry, name.partition(".")[2], f"{WHO}: the prompt's metadata")
        kind = "text" if isinstance(output, str) else "image" if output.ndim == 3 else "frames"
        if name != kind and (name, kind) != ("frames", "image"):
            raise UserError(f"{WHO}: its request has the slot {{{name}}}, and its samples are "
                            f"{'videos' if kind == 'frames' else SENT[kind]}: write {{{kind}}}")
        if isinstance(output, str):
            return output
        if name == "image":
            return self._base64(output)
        images = output[None] if kind == "image" else output[frame_index(len(output), self.frames)]
        return [self._base64(image) for image in images]

    def _base64(self, image: Tensor) -> str:
        if not image.isfinite().all():
            raise Failed(f"{WHO}: an image holds NaN or an infinity")
        return data_url(image, self.longest, self.encoding).partition(",")[2]


def value_at(value: Any, path: str, whose: str) -> Any:
    """Value at a path of keys and of places in lists, joined by dots; "" is the whole value.
    Raises Failed, which begins with `whose`, if there is none."""
    for part in path.split(".") if path else ():
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            what = f"a list of {len(value)}" if isinstance(value, list) else f"a value of type {type(value).__name__}"
            if isinstance(value, dict):
                what = f"an object of {one_line(', '.join(map(str, value)))[:200] or 'no keys'}"
            raise Failed(f"{whose} has no {path!r}: {part!r} is not in {what}")
    return value


def _slots(template: Any) -> Iterator[str]:
    if isinstance(template, str):
        yield from SLOT.findall(template)
    elif isinstance(template, (dict, list)):
        for inner in template.values() if isinstance(template, dict) else template:
            yield from _slots(inner)


def _fill(template: Any, values: Mapping[str, Any]) -> Any:
    """Template with its slots replaced; what stands in a value is not replaced again."""
    if isinstance(template, dict):
        return {key: _fill(inner, values) for key, inner in template.items()}
    if isinstance(template, list):
        return [_fill(inner, values) for inner in template]
    if not isinstance(template, str):
        return template
    if whole := SLOT.fullmatch(template):
        return values[whole[1]]
    return SLOT.sub(lambda slot: values[slot[1]] if isinstance(values[slot[1]], str) else json.dumps(values[slot[1]]),
                    template)


REQUEST = {"prompt": "{prompt}", "image": "{image}"}
NAME = r"[\w-]+"  # of a header
SECRET = re.compile("auth|key|token|secret|password|signature|cookie", re.I)  # in the name of a header or of a query
LARGEST = 1e38  # absolute score, as of float32


class Meter:
    """Count of this process's requests.

    cost: of one, in any currency. budget: of all; rate: requests a second; None for no limit. who: begins its lines.
    """

    def __init__(self, cost: float, budget: float | None, rate: float | None, who: str = WHO) -> None:
        self.who, self.cost, self.budget, self.rate = who, cost, budget, rate
        self.requests, self._free, self._lock = 0, -math.inf, threading.Lock()

    @property
    def total_cost(self) -> float:
        return self.requests * self.cost

    def begin(self, now: float) -> float:
        """Count a request; return the seconds after the time `now` at which it may begin. Raises UserError if it would
        exceed the budget."""
        with self._lock:
            if self.budget is not None and self.total_cost + self.cost > self.budget * (1 + 1e-9):
                raise UserError(f"{WHO}: {quantity(self.requests, 'request')} of this process cost "
                                f"{self.total_cost:.10g}, and the next would exceed its budget of {self.budget:.10g}: "
                                "raise budget in its args, or score fewer samples")
            self.requests += 1
            begins = max(now, self._free)
            self._free = begins + (1 / self.rate if self.rate else 0.0)
            return begins - now

    def tell(self) -> None:
        if self.requests:
            print(f"{self.who}: {quantity(self.requests, 'request')} cost {self.total_cost:.10g}", file=sys.stderr)


@built_in("http", "api server service remote own scorer")
class Http:
    """Score of a JSON API: a request per sample, and one number of the answer.

    url: of the API, several joined by commas.
    request: the JSON body. In its strings, {prompt} is replaced by the prompt, {image} by the image in base64,
    {frames} by a list of a video's frames in base64, {text} by a completion, {metadata.KEY} by an entry of the prompt's
    metadata. A string of one slot alone takes the value with its type.
    answer: path to the number in the answer, such as `result.scores.0`; "" for an answer that is the number. True and
    false count as 1 and 0, null as not applicable.
    key_env: the NAME of the environment variable that holds the key. key_header: carries it, after "Bearer " in
    Authorization. headers: further ones.
    concurrency: simultaneous requests of a process. timeout: seconds for one request. retries: further attempts.
    wait: seconds before the first retry, doubled for each next, or the time the API asks for, 60 at most.
    rate: requests a second of all processes together.
    cost: of one request in any currency, retries count too; the sum is printed at the end. budget: that a run may cost,
    until it ends or is resumed.
    longest: pixels of an image's longer side; larger ones are shrunk. encoding: png, or webp, which is slightly lossy.
    frames: sent frames of a video, evenly spaced.

    A call raises `TimedOut` if no URL gives a proper answer to a sample. A sample whose request is rejected, or whose
    answer has no number, is `Failed`. Raises UserError for invalid settings, and in a call for the user's mistake (the
    key, the URL, a slot that the samples cannot fill, the budget).
    """

    privileged = True  # spends the user's key
    about = About(modality="image/video/text", range=(None, None), needs="server", licence="Apache-2.0, the service's")

    def __init__(self, url: str, request: Any = REQUEST, answer: str = "score", key_env: str | None = None,
                 key_header: str = "Authorization", headers: Mapping[str, str] = {}, concurrency: int = 16,
                 timeout: float = 60.0, retries: int = 4, wait: float = 1.0, rate: float | None = None,
                 cost: float = 0.0, budget: float | None = None, longest: int = 1024, encoding: str = "png",
                 frames: int = 8) -> None:
        _require("1 or more", concurrency=(concurrency, concurrency >= 1), longest=(longest, longest >= 1),
                 frames=(frames, frames >= 1))
        _require("0 or more", retries=(retries, retries >= 0), wait=(wait, wait >= 0), cost=(cost, cost >= 0))
        _require("above 0", timeout=(timeout, timeout > 0), rate=(rate, rate is None or rate > 0))
        _require("above 0, with a cost above 0", budget=(budget, budget is None or budget > 0 and cost > 0))
        _require(" or ".join(ENCODINGS), encoding=(encoding, encoding in ENCODINGS))
        self.answer, self.concurrency = answer, concurrency
        self._template = Template(request, longest, encoding, frames)
        as_json(WHO, "request", request)
        self._key_env, key = key_env, environment_key(WHO, key_env)
        bearer = "Bearer " if key_header.lower() == "authorization" else ""
        own = {key_header: bearer + key.value} if key else {}
        _require("a header's name", key_header=(key_header, re.fullmatch(NAME, key_header, re.ASCII) is not None))
        self._service = Service(WHO, _urls(url), timeout, retries, wait, _public(headers) | own, concurrency, key=key,
                                sent=self._template.sends)
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        budget, rate = (None if limit is None else limit / processes for limit in (budget, rate))
        self.meter = Meter(cost, budget, rate, self._service.who)
        if cost:
            atexit.register(self.meter.tell)

    def __call__(self, outputs: Tensor | Sequence[Tensor] | Sequence[str], prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None | Failed]:
        """B scores, None where the API answers null, Failed where it rejects a sample."""
        def one(row: int) -> float | None | Failed:
            def attempt(url: str) -> Any:
                time.sleep(self.meter.begin(time.monotonic()))
                return self._service.request("POST", url, body, _json, self._raise_for_status)

            try:
                body = as_json(WHO, "a request", self._template.fill(outputs[row], prompts[row], metadata[row]))
                value = value_at(self._service.try_urls(attempt), self.answer, f"{WHO}: its answer")
                if value is None:
                    return None
                if not isinstance(value, (bool, int, float)) or not abs(value) <= LARGEST:
                    # An answer's own text is in no message, since it may hold what was sent.
                    raise Failed(f"{WHO}: its answer has a value of type {type(value).__name__} for a score: expected "
                                 "a finite number, true, false or null")
                return float(value)
            except TimedOut:
                raise
            except Failed as failed:
                return failed

        return side_by_side(one, range(len(prompts)), self.concurrency)

    def _raise_for_status(self, url: str, status: int, body: bytes) -> str:
        """Raise the error for a status, the user's or this sample's; return the message of a transient one."""
        said = self._service.quote(body.decode("utf-8", "replace"))
        message = f"{url} answered {status}" + (f": {said}" if said else "")
        if status in (401, 403):
            how = f"the key in {self._key_env} is not accepted" if self._key_env else \
                "set key_env to the name of the environment variable that holds your key"
            raise UserError(f"{WHO}: {url} answered {status}: {how}")
        if status in (404, 405):
            raise UserError(f"{WHO}: {message}: expected an address that takes POST requests")
        if status == 413:
            raise UserError(f"{WHO}: {message}: make longest smaller")
        if status < 500 and status not in PASSING:
            raise Failed(f"{WHO}: {message}")
        return message


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError(f"expected JSON, got {len(body)} other bytes") from None


def _require(expected: str, **settings: tuple[object, bool]) -> None:
    """Raise UserError for the first setting, a value and True if it fits, that does not."""
    for name, (value, fits) in settings.items():
        if not fits:
            raise UserError(f"{WHO}: {name} is {value!r}, expected {expected}: change it in its args")


def _public(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers as texts. Raises UserError for one that may hold a secret."""
    for name in headers:
        if SECRET.search(name):
            raise UserError(f"{WHO}: the header {name!r} may hold a secret, and args are written into a run's files: "
                            f"use key_env: NAME_OF_A_VARIABLE and key_header: {name}")
        if not re.fullmatch(r"[!-~]+(?: +[!-~]+)*", str(headers[name])) or not re.fullmatch(NAME, name, re.ASCII):
            raise UserError(f"{WHO}: the header {name!r} has the value {headers[name]!r}, expected printable ASCII "
                            "without spaces at its ends")
    return {name: str(value) for name, value in headers.items()}


def _urls(urls: str) -> list[str]:
    """Split URLs joined by commas.
    Raises UserError, which shows no query, for one that is not http(s)://host[:port]/... or holds a secret."""
    split = [url.strip() for url in urls.split(",")]
    for url in split:
        shown = url.partition("?")[0].rpartition("@")[2]
        parts = split_address(url)
        if parts is None or parts.fragment:
            raise UserError(f"{WHO}: url is {shown!r}, expected https://host/path, several joined by commas")
        if parts.username is not None or any(SECRET.search(name) for name, _ in parse_qsl(parts.query, True)):
            raise UserError(f"{WHO}: the url of {shown} holds a name or a key, and args are written into a run's "
                            "files: use key_env: NAME_OF_A_VARIABLE")
    return split

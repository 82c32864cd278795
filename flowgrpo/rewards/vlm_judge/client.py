"""Client of an OpenAI-compatible endpoint (`POST URL/chat/completions`): vLLM, SGLang, a hosted service."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.escaped import one_line
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.remote.exchange import Later, Service, Unanswered, addresses, seconds, side_by_side

FILTERED = ("content_filter", "content_policy_violation")  # codes of a refusal


@dataclass(frozen=True)
class Answer:
    """Answer of a model.

    refused: the model, or the service for it, declined.
    cut: it reached `max_tokens`.
    tokens: those of the text, each with its likeliest alternatives and their log-probabilities, if the endpoint gave
    them.
    """

    text: str
    refused: bool = False
    cut: bool = False
    tokens: tuple[tuple[str, dict[str, float]], ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Endpoint:
    """Address and settings of a judge.

    url: of the API, several joined by commas. model: None for the only one served there.
    key_env: the NAME of the environment variable that holds the key.
    temperature, max_tokens: None to omit them. extra: further keys of every request.
    concurrency: simultaneous requests. timeout: seconds for one request. retries: further attempts.
    wait: seconds before the first retry, doubled for each next, or the time the endpoint asks for, 60 at most.

    A request raises `TimedOut` if the endpoint gives no proper answer, and `Failed` if it rejects the request.
    Raises UserError for invalid settings, and in a request for the user's mistake (the key, the URL, the model).
    """

    url: str = "http://127.0.0.1:8000/v1"
    model: str | None = None
    key_env: str | None = None
    temperature: float | None = 0.0
    max_tokens: int | None = 1024
    extra: dict[str, Any] = field(default_factory=dict)
    concurrency: int = 16
    timeout: float = 60.0
    retries: int = 4
    wait: float = 1.0
    privileged = True  # spends the user's key
    _served: dict[str, str] = field(init=False, repr=False)
    _lock: threading.Lock = field(init=False, repr=False)
    _service: Service = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not (self.concurrency >= 1 and self.timeout > 0 and self.retries >= 0 and self.wait >= 0):
            raise UserError(f"a judge has concurrency {self.concurrency}, timeout {self.timeout}, retries "
                            f"{self.retries}, wait {self.wait}: expected 1 or more, above 0, and the others 0 or more")
        self._set(_served={}, _lock=threading.Lock(), _service=Service(
            "a judge", addresses(self.url), self.timeout, self.retries, self.wait, _authorisation(self.key_env),
            connections=self.concurrency))

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def ask(self, messages: Callable[[int], list[dict[str, Any]]], count: int) -> list[Answer]:
        """Return the answers to `messages(0)` to `messages(count - 1)`, in order, with `concurrency` requests at a
        time."""

        def one(part: range) -> Answer:
            body = {"messages": messages(part.start), "temperature": self.temperature, "max_tokens": self.max_tokens}
            return self._answered({key: value for key, value in (body | self.extra).items() if value is not None})

        return side_by_side(one, [range(i, i + 1) for i in range(count)], self.concurrency)

    def _answered(self, body: dict[str, Any]) -> Answer:
        def attempt(url: str) -> Answer:
            named = {"model": self.model or self._only_model(url)} | body
            return self._service.request("POST", f"{url}/chat/completions", json.dumps(named).encode(), answer,
                                         self._refused)

        return self._service.asked(attempt)

    def _only_model(self, url: str) -> str:
        """Return the only model served at a URL."""
        with self._lock:
            if url not in self._served:
                names = self._service.request("GET", f"{url}/models", None, _models, self._refused)
                assert isinstance(names, list)  # a refusal by content answers questions alone
                if len(names) != 1:
                    raise UserError(f"a judge: {url} serves {len(names)} models: set model to one of "
                                    f"{one_line(', '.join(names)) or 'them'}")
                self._served[url] = names[0]
            return self._served[url]

    def _refused(self, url: str, status: int, headers: Mapping[str, str], body: bytes) -> Answer:
        """Return a refusal of the service; else raise the error for a status: the user's, this request's, or a
        transient one."""
        after, error = headers.get("retry-after"), _error(body)
        message = f"{url} answered {status}" + (f": {one_line(error['message'])}" if error.get("message") else "")
        if status in (401, 403):
            how = f"the key in {self.key_env} is not accepted" if self.key_env else "set key_env to the name of the " \
                "environment variable that holds your key"
            raise UserError(f"a judge: {url} answered {status}: {how}")
        if status == 404:
            raise UserError(f"a judge: {message} (is the url that of the API, such as http://host:8000/v1, and does it "
                            f"serve the model {self.model!r}?)")
        if 400 <= status < 500 and error.get("code") in FILTERED:
            return Answer("", refused=True)
        if 400 <= status < 500 and status not in (408, 409, 425, 429):
            raise Failed(f"a judge: {message}")
        raise Later(message, seconds(after)) if after else Unanswered(message)


def answer(body: bytes) -> Answer:
    """Parse a chat completion as an `Answer`.
    Raises ValueError for anything else."""
    try:
        choice = json.loads(body)["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        text = message.get("content") or ""
        if isinstance(text, list):
            text = "".join(part["text"] for part in text if part.get("type") == "text")
        if not isinstance(text, str):
            raise TypeError("its content is no text")
        refused = bool(message.get("refusal")) or reason == "content_filter"
        return Answer(text, refused, reason == "length", _tokens(choice.get("logprobs")))
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"no chat completion ({type(error).__name__}: {error})") from None


def _tokens(logprobs: Any) -> tuple[tuple[str, dict[str, float]], ...]:
    """Return tokens with their alternatives; alternatives that differ only in spaces stay separate."""
    content = (logprobs or {}).get("content") or ()
    return tuple((token["token"], {other["token"]: float(other["logprob"]) for other in token["top_logprobs"]})
                 for token in content if token.get("top_logprobs"))


def _models(body: bytes) -> list[str]:
    try:
        return [str(model["id"]) for model in json.loads(body)["data"]]
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ValueError("no list of models") from None


def _error(body: bytes) -> dict[str, Any]:
    """Return the error that an answer states, {} if none: {"error": {...}}, {"error": "..."} or the object."""
    try:
        record = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    error = record.get("error", record) if isinstance(record, dict) else {}
    return error if isinstance(error, dict) else {"message": error}


def _authorisation(key_env: str | None) -> dict[str, str]:
    """Return the header with the key.
    Raises UserError, which never contains the key, if there is none."""
    if key_env is None:
        return {}
    key = os.environ.get(key_env, "").strip()
    if not key or not all("!" <= character <= "~" for character in key):
        raise UserError(f"a judge's key_env is {key_env!r}: expected the NAME of an environment variable that holds "
                        "a key of printable ASCII without spaces")
    return {"Authorization": f"Bearer {key}"}


def user(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of one question."""
    return [{"role": "user", "content": list(parts)}]

"""Client of an OpenAI-compatible endpoint (`POST URL/chat/completions`): vLLM, SGLang, a hosted service.

Servers differ in the keys that they take. A request begins with what most of them know; an own key that a server
refuses is renamed or left out from then on, which is printed.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.rewards.failures import JUDGE, Failed
from flowgrpo.rewards.remote.exchange import (
    Absent,
    Service,
    addresses,
    as_json,
    environment_key,
    side_by_side,
    tell,
    trying,
)

WHO = JUDGE
FILTERED = ("content_filter", "content_policy_violation")  # codes of a refusal
SPENT = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")  # codes that no wait changes
PASSING = (408, 409, 425, 429)  # statuses below 500 after which another attempt may succeed
PREFILL = "continue_final_message"  # the key by which vLLM and SGLang go on from the last message
GOING_ON = ("vllm", "sglang")  # by `owned_by` of their models
# Own keys of a request that some servers refuse, with the name that these have for it; None: it is left out.
DIALECT: dict[str, str | None] = {"max_tokens": "max_completion_tokens", "temperature": None, "logprobs": None,
                                  "top_logprobs": None, PREFILL: None, "add_generation_prompt": None}
_UNKNOWN = re.compile("unsupported|unexpected|unknown|unrecogni[sz]ed|not support|not permitted|not allowed|forbidden|"
                      "max_completion_tokens|additional propert|extra (?:field|input)", re.I)


class _Unknown(Exception):
    """Refusal of keys that a server does not take."""

    def __init__(self, keys: list[str]) -> None:
        super().__init__(", ".join(keys))
        self.keys = keys


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
    temperature, max_tokens: None to omit them. extra: further keys of every request, which are never left out.
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
    sends = ("prompts",)  # what requests hold, in words
    _served: dict[str, list[tuple[str, str]]] = field(init=False, repr=False, default_factory=dict)
    _dialects: dict[str, dict[str, str | None]] = field(init=False, repr=False, default_factory=dict)
    _lock: threading.Lock = field(init=False, repr=False, default_factory=threading.Lock)
    _given: frozenset[str] = field(init=False, repr=False)
    _service: Service = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not (self.concurrency >= 1 and self.timeout > 0 and self.retries >= 0 and self.wait >= 0):
            raise UserError(f"a judge has concurrency {self.concurrency}, timeout {self.timeout}, retries "
                            f"{self.retries}, wait {self.wait}: expected 1 or more, above 0, and the others 0 or more")
        as_json(WHO, "extra, temperature or max_tokens", [self.extra, self.temperature, self.max_tokens])
        key, urls = environment_key(WHO, self.key_env), addresses(self.url, f"{WHO}: url", "http://host:port/v1")
        vars(self).update(_given=frozenset(self.extra), _service=Service(
            WHO, [url.removesuffix("/chat/completions") for url in urls], self.timeout, self.retries, self.wait,
            {"Authorization": f"Bearer {key.value}"} if key else {}, connections=self.concurrency, sent=self.sends,
            key=key))

    def ask(self, messages: Callable[[int], list[dict[str, Any]]], count: int) -> list[Answer]:
        """Answers to `messages(0)` to `messages(count - 1)`, in order, with `concurrency` requests at a time."""

        def one(number: int) -> Answer:
            body = {"messages": messages(number), "temperature": self.temperature, "max_tokens": self.max_tokens}
            body = {key: value for key, value in (body | self.extra).items() if value is not None}
            return self._service.try_urls(partial(self._attempt, body=body))

        return side_by_side(one, range(count), self.concurrency)

    def _attempt(self, url: str, body: dict[str, Any]) -> Answer:
        """A URL's answer. Own keys that it refuses are sent as it takes them, once each."""
        while True:
            names = [self.model] if self.model else [name for name, _ in self._models(url)]
            if len(names) != 1:
                raise UserError(f"{WHO}: {url} serves {len(names)} models: set model to one of "
                                f"{self._service.quote(', '.join(names)) or 'them'}")
            sent = {"model": names[0]} | self._in_dialect(url, body)
            try:
                return self._service.request("POST", f"{url}/chat/completions", json.dumps(sent).encode(), answer,
                                             partial(self._handle_error, sent=sent))
            except _Unknown as error:
                with self._lock:
                    for key in error.keys:
                        self._dialects.setdefault(url, {})[key] = name = DIALECT[key]
                        tell(f"{self._service.who}: {url} does not take {key}: it is "
                             + (f"sent as {name}" if name else "left out"))

    def _in_dialect(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """Request in the keys that a URL takes. Without the key for it, the beginning of an answer is left out too."""
        known = dict(self._dialects.get(url, {}))
        if body.get(PREFILL) and PREFILL not in self._given:
            try:
                owner = next(iter(self._models(url)), ("", ""))[1]
            except (Absent, UserError):  # it lists no models
                owner = ""
                with self._lock:
                    self._served[url] = []
            if owner not in GOING_ON:
                known |= {PREFILL: None, "add_generation_prompt": None}
        sent = {name: value for key, value in body.items() if (name := known.get(key, key)) is not None}
        if body.get(PREFILL) and PREFILL not in sent and sent["messages"][-1]["role"] == "assistant":
            sent["messages"] = sent["messages"][:-1]
        return sent

    def _models(self, url: str) -> list[tuple[str, str]]:
        with self._lock:
            if url not in self._served:
                self._served[url] = self._service.request("GET", f"{url}/models", None, _models, self._handle_error)
            return self._served[url]

    def _handle_error(self, url: str, status: int, body: bytes, sent: Mapping[str, Any] = {}) -> Any:
        """A refusal of the service, or the message of a transient status; else raises the error for one: the user's,
        this request's, or that of keys which the server does not take.

        sent: the request.
        """
        error = _error(body)
        reason, codes = self._service.quote(error["message"]), (error["code"], error["type"])
        message = f"{url} answered {status}" + (f": {reason}" if reason else "")
        if status in (401, 403):
            how = f"the key in {self.key_env} is not accepted" if self.key_env else "set key_env to the name of the " \
                "environment variable that holds your key"
            raise UserError(f"{WHO}: {message} ({how})" if reason else f"{WHO}: {message}: {how}")
        if status == 402 or any(code in SPENT for code in codes):
            raise UserError(f"{WHO}: {message} (the account has nothing left to spend, which no wait changes)")
        if status == 404:
            raise UserError(f"{WHO}: {message} (is the url that of the API, such as http://host:8000/v1, and does it "
                            f"serve the model {self.model!r}?)")
        if sent and 400 <= status < 500 and any(code in FILTERED for code in codes):
            return Answer("", refused=True)
        if status in (400, 422) and _UNKNOWN.search(why := f"{message} {error['param']}"):
            if keys := [key for key in DIALECT if key in sent and key not in self._given
                        and re.search(rf"\b{key}\b", why)]:
                raise _Unknown(keys)
        if 400 <= status < 500 and status not in PASSING:
            raise (UserError if trying() else Failed)(f"{WHO}: {message}")
        return message


def answer(body: bytes) -> Answer:
    """Parse a chat completion as an `Answer`; one that comes as a stream of events is put together.

    Where a message has no content, its text is that of its tools' arguments, or of its reasoning if it ended.
    Raises ValueError for anything else.
    """
    try:
        stream = body.lstrip()[:6].lower()
        streams = stream.startswith((b"data:", b"event:", b":"))
        choice = _parse_stream(body) if streams else json.loads(body)["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        text = _text(message.get("content"))
        if not text:
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            given = [call.get("arguments") or "" for call in [*calls, message.get("function_call") or {}]]
            text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in given)
        if not text and reason != "length":
            text = _text(message.get("reasoning_content")) or _text(message.get("reasoning"))
        refused = bool(message.get("refusal")) or reason == "content_filter"
        tokens = (choice.get("logprobs") or {}).get("content") or ()
        return Answer(text, refused, reason == "length", tuple(  # alternatives that differ only in spaces stay separate
            (token["token"], {other["token"]: float(other["logprob"]) for other in token["top_logprobs"]})
            for token in tokens if token.get("top_logprobs")))
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
        said = _error(body)["message"] if isinstance(error, KeyError) and body.strip() != b"{}" else ""
        raise ValueError(f"no chat completion ({said[:300] or f'{type(error).__name__}: {error}'})") from None


def _text(content: Any) -> str:
    """content: a text, parts of it, or None. Raises TypeError for anything else."""
    if isinstance(content, list):
        content = "".join(part if isinstance(part, str) else part["text"] for part in content
                          if isinstance(part, str) or part.get("type") in ("text", "output_text"))
    if not isinstance(content or "", str):
        raise TypeError("its content is no text")
    return content or ""


def _parse_stream(body: bytes) -> dict[str, Any]:
    """Choice that the events of a stream make together. Raises ValueError if they make none, or end within it."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    tokens: list[Any] = []
    reason, ended = None, False
    for line in body.decode("utf-8").splitlines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        ended |= data == "[DONE]"
        for choice in (json.loads(data).get("choices") or ())[:1] if data and data != "[DONE]" else ():
            delta = choice.get("delta") or choice.get("message") or {}
            message["content"] += _text(delta.get("content"))
            message["reasoning_content"] += _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
            message["refusal"] = message.get("refusal") or delta.get("refusal")
            calls = message["tool_calls"]
            for part in delta.get("tool_calls") or ():  # one of a new index begins another call
                if not calls or part.get("index", 0) != calls[-1]["index"]:
                    calls.append({"index": part.get("index", 0), "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += (part.get("function") or {}).get("arguments") or ""
            tokens += (choice.get("logprobs") or {}).get("content") or ()
            reason = choice.get("finish_reason") or reason
    if not (ended or reason):
        raise ValueError("the stream of events ends within the answer")
    return {"message": message, "finish_reason": reason, "logprobs": {"content": tokens}}


def _models(body: bytes) -> list[tuple[str, str]]:
    try:
        return [(str(model["id"]), str(model.get("owned_by", ""))) for model in json.loads(body)["data"]]
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise ValueError("no list of models") from None


def _error(body: bytes) -> dict[str, str]:
    """Message, code, type and param of a server's refusal, empty where it states none. The message is under `error`,
    `message` or `detail`, a text or a list of pydantic's errors, or is the body itself."""
    try:
        record = json.loads(body)
    except (ValueError, RecursionError):
        record = re.sub(r"<(style|script|head)\b.*?</\1\s*>|<[^>]*>", " ", body[:4000].decode("utf-8", "replace"),
                        flags=re.S | re.I)
    inner = record.get("error") or record if isinstance(record, dict) else record
    facts = inner if isinstance(inner, dict) else {}
    said = next((facts[key] for key in ("message", "detail", "msg", "error", "errors", "title") if facts.get(key)),
                "" if facts else inner)
    return {"message": _reason(said)} | {key: str(facts.get(key) or "") for key in ("code", "type", "param")}


def _reason(value: Any) -> str:
    """Reason as a text: of pydantic's errors the places and what is wrong there."""
    if isinstance(value, list):
        return "; ".join(map(_reason, value[:3]))
    if isinstance(value, dict):
        place = ".".join(map(str, value["loc"])) if isinstance(value.get("loc"), list) else ""
        text = value.get("msg") or value.get("message") or json.dumps(value)
        return f"{place}: {text}" if place else str(text)
    return "" if value is None else str(value)


def user(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of one question. Text alone goes as a text, which every server takes."""
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return [{"role": "user", "content": "\n".join(texts) if len(texts) == len(parts) else list(parts)}]

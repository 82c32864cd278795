"""HTTP requests to one of several URLs in turn, with retries and with limits on an answer's time and size."""

import base64
import functools
import itertools
import json
import math
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import SplitResult, quote, urlsplit

from flowgrpo import trust
from flowgrpo.errors import UserError
from flowgrpo.escaped import one_line
from flowgrpo.nouns import quantity
from flowgrpo.rewards.failures import LONGEST_WAIT, TimedOut, labelled
from flowgrpo.trust import is_here

CONNECT = 10.0  # seconds within which a live server accepts a connection
REST = 30.0  # seconds for which a failed URL is used only if all others failed as well
BRIEF_CONNECT, BRIEF = 4.0, 6.0  # seconds in `brief`: connection timeout, and the time after which no attempt begins
T = TypeVar("T")
U = TypeVar("U")

VARIABLE = re.compile("[A-Z_][A-Z0-9_]*")
MASK = "[key]"  # in place of a text that repeats the key

_told: set[str] = set()  # printed lines of what goes where
_brief = 0  # number of open `brief` contexts


@contextmanager
def brief() -> Iterator[None]:
    """Context manager, for every thread: only find out if a service is there. `Absent` becomes a UserError after one
    attempt at each URL. After a few seconds no attempt begins, unless the server has given a time."""
    global _brief
    _brief += 1
    try:
        yield
    finally:
        _brief -= 1


def trying() -> bool:
    """True in `brief`: what is asked for is a trial."""
    return _brief > 0


class Unanswered(Exception):
    """One attempt without a proper answer; another may succeed."""


class Absent(Unanswered):
    """No connection, or an answer in another form; another attempt at that URL would hardly differ."""


class Later(Unanswered):
    """Attempt that the server asked to repeat after some seconds."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


@dataclass(eq=False)
class _Place:
    url: str
    busy: int = 0  # open requests
    turn: int = 0  # the number of its last request
    rests_until: float = 0.0


class Places:
    """URLs in turn: the least busy one is next, and on a tie the one used longest ago. A failed one rests, and until
    then is used only if all of them rest."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._places, self._turns, self._lock = [_Place(url) for url in urls], itertools.count(1), threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[str]:
        """Context manager: the next URL; one in whose turn `Unanswered` is raised then rests."""
        with self._lock:
            now = time.monotonic()
            place = min(self._places, key=lambda each: (max(each.rests_until - now, 0), each.busy, each.turn))
            place.busy, place.turn = place.busy + 1, next(self._turns)
        try:
            yield place.url
            place.rests_until = 0.0
        except Unanswered:
            place.rests_until = time.monotonic() + REST
            raise
        finally:
            with self._lock:
                place.busy -= 1


@dataclass(frozen=True)
class Key:
    """Secret of a request's header. source: in words, for what a run prints. name: of its variable or file. plain:
    hosts of the user's own network, to which it may also go unencrypted. further: the end of the error for other hosts.
    agreed: the environment names the hosts that get it."""

    value: str = field(repr=False)
    source: str
    name: str = ""
    plain: frozenset[str] = frozenset()
    further: str = ""
    agreed: bool = False

    def require_private(self, who: str, urls: Sequence[str]) -> None:
        """Raise UserError for the first URL by which the key would leave this machine unencrypted."""
        import httpx

        for url in urls:
            parts = httpx.URL(url)
            if parts.scheme != "https" and not is_here(parts.host) and parts.host not in self.plain:
                raise UserError(f"{who}: {self.source} would go to {_without_query(url)} unencrypted: use https://, or "
                                f"a tunnel, `ssh -N -L 8000:127.0.0.1:PORT {parts.host}` and http://127.0.0.1:8000"
                                f"{self.further}")

    def mask(self, text: str) -> str:
        """Text that a server sent, with MASK for the key; MASK alone if it repeats the key encoded."""
        text = text.replace(self.value, MASK)
        bare = "".join(text.split()).lower()
        return MASK if any(form in bare for form in self._forms) else text

    @functools.cached_property
    def _forms(self) -> frozenset[str]:
        """The key in small letters as a text may hold it: itself, reversed, escaped, in base64 or hexadecimal.
        Of base64, which depends on the place, the letters that any place gives."""
        data, forms = self.value.encode(), {self.value, self.value[::-1], self.value.encode().hex()}
        for letter in (r"\u{:04x}", r"\x{:02x}", "%{:02x}", "&#{};", "&#x{:x};"):
            forms.add("".join(letter.format(byte) for byte in data))
        forms.add(quote(self.value, safe=""))
        for code in (base64.b64encode, base64.urlsafe_b64encode):
            for shift in range(3):
                whole = code(bytes(shift) + data).decode().rstrip("=")
                forms.add(whole[(shift * 8 + 5) // 6:(shift * 8 + len(data) * 8) // 6])
        return frozenset(form.lower() for form in forms if len(form) > 3)


def environment_key(who: str, variable: str | None) -> Key | None:
    """Key in an environment variable; None for no variable.
    Raises UserError, which contains neither the key nor what is no variable's name, if there is none."""
    if variable is None:
        return None
    if not isinstance(variable, str) or not VARIABLE.fullmatch(variable):
        raise UserError(f"{who}: key_env is no name of an environment variable: set a variable to the key, and key_env "
                        "to its NAME")
    key = os.environ.get(variable, "").strip()
    if not key or not all("!" <= character <= "~" for character in key):
        raise UserError(f"{who}: key_env is {variable!r}: expected an environment variable of that name, with a key of "
                        "printable ASCII without spaces")
    return Key(key, f"the key in {variable}", variable)


def as_json(who: str, name: str, value: object) -> bytes:
    """Value as JSON. Raises UserError for one that JSON does not have, such as NaN or a date."""
    try:
        return json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{who}: {name} is not JSON ({one_line(error)}): expected strings, finite numbers, true, "
                        "false, null, lists and objects of these") from None


def announce(who: str, sent: Sequence[str], urls: Sequence[str], key: Key | None = None) -> str:
    """Print what goes where, `sent` in words, and return `who` with the label of the reward that is made.
    Raises UserError for an address, and for a key, that may not leave this machine."""
    import httpx

    try:
        away = [url for url in urls if not is_here(httpx.URL(url).host)]  # reads hosts as the requests do
    except httpx.InvalidURL as error:
        raise UserError(f"{who}: {one_line(urls)}: expected an address that HTTP knows ({one_line(error)})") from None
    if key is not None:
        key.require_private(who, urls)
    trust.require_address(who, away, *((key.source, key.name) if key and not key.agreed else ()))
    listed = [*sent, *([key.source] if key else [])]
    who = labelled(who)
    tell(f"{who} sends {', '.join(listed[:-1])}{' and ' if listed[1:] else ''}{listed[-1]} to "
         f"{', '.join(map(_without_query, urls))}")
    return who


def tell(line: str) -> None:
    """Print a line to stderr, once in the first process."""
    if line not in _told and os.environ.get("RANK", "0") == "0":
        _told.add(line)
        print(line, file=sys.stderr, flush=True)


class Service:
    """URLs that answer alike; what it will send is printed.

    who: name at the start of errors and lines, with which goes the label of the reward that is made.
    timeout: seconds for one request.
    retries: further attempts, after one request to every URL.
    wait: seconds before the first retry, doubled for each next, times a random number from 0.5 to 1.5.
    headers: of every request. connections: at the same time. sent: what requests hold, in words. key: a secret among
    the headers.
    Raises UserError for a key that would go elsewhere unencrypted.
    """

    def __init__(self, who: str, urls: Sequence[str], timeout: float, retries: int, wait: float,
                 headers: dict[str, str], connections: int = 100, sent: Sequence[str] = ("prompts", "samples"),
                 key: Key | None = None) -> None:
        from flowgrpo.rewards.remote.http import Client  # here: httpx takes time to import

        self.who, self.timeout, self.wait, self.key = announce(who, sent, urls, key), timeout, wait, key
        self.urls, self.attempts, self._places = len(urls), retries + len(urls), Places(urls)
        self._random = random.Random()  # leaves the run's random state untouched
        self._http = Client({"Content-Type": "application/json"} | headers, connections)

    def try_urls(self, attempt: Callable[[str], T]) -> T:
        """`attempt(url)` of the first URL with a proper answer.
        Raises TimedOut if none has one, and in `brief` UserError if no server is there."""
        began = time.monotonic()
        for number in range(1, self.attempts + 1):
            try:
                with self._places.turn() as url:
                    return attempt(url)
            except Unanswered as error:
                last = error
            wait = self.wait * 2.0 ** (number - 1) * self._random.uniform(0.5, 1.5)
            wait = min(max(wait, getattr(last, "seconds", 0.0)), LONGEST_WAIT)
            if _brief and number >= self.urls and isinstance(last, Absent):
                raise UserError(f"{self.who}: {last}: is a server running there, and is the URL right?")
            late = time.monotonic() + wait - began > BRIEF and not isinstance(last, Later)  # a server may ask for it
            if _brief and late or number == self.attempts:
                break
            time.sleep(wait)
        raise TimedOut(f"{self.who}: {last} (asked {quantity(number, 'time')})")

    def request(self, method: str, url: str, body: bytes | None, read: Callable[[bytes], T],
                refused: Callable[[str, int, bytes], T | str]) -> T:
        """`read` of an answer. refused: (url, status, answer) of a status other than 200 -> the result, or a message
        where another attempt may succeed; it raises any other error.
        Raises Unanswered if none came in time, a redirect, or that message, and then `Later` if the server asks for it;
        `Absent` without a connection, and if `read` raises ValueError."""
        import httpx

        connect = min(self.timeout, BRIEF_CONNECT if _brief else CONNECT)
        try:
            status, headers, answer = self._http.exchange(method, url, body, self.timeout, connect)
            if status == 200:
                return read(answer)
        except httpx.ConnectTimeout:
            raise Absent(f"{url} took no connection within {connect:g} s") from None
        except httpx.TimeoutException:
            raise Unanswered(f"{url} gave no answer within {self.timeout:g} s") from None
        except self._http.faults as error:
            absent = isinstance(error, (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.InvalidURL))
            kind = Absent if absent else Unanswered
            raise kind(f"{url} gave no answer ({type(error).__name__}: {one_line(error)})") from None
        except ValueError as error:
            raise Absent(f"{url} gave no proper answer: {one_line(error)}") from None
        if 300 <= status < 400:
            place = self.quote(headers.get("location", "")) or "another address"
            raise Unanswered(f"{url} answered {status}, a redirect to {place}, which is not followed: name the address "
                             "that answers")
        result = refused(url, status, answer)
        if not isinstance(result, str):
            return result
        raise Later(result, seconds(headers["retry-after"])) if headers.get("retry-after") else Unanswered(result)

    def quote(self, text: str) -> str:
        """Text of a server as one line for a message, without the key."""
        return one_line(self.key.mask(text) if self.key else text)


def _without_query(url: str) -> str:  # which may hold a secret
    return url.partition("?")[0]


def is_address(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def split_address(url: str) -> SplitResult | None:
    """Parts of an http or https address of a host, with a port that there is; None for any other text."""
    try:
        parts = urlsplit(url)
        return parts if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 else None
    except ValueError:
        return None


def addresses(urls: str, who: str = "", expected: str = "http://host:port/NAME") -> list[str]:
    """Split URLs joined by commas.
    Raises UserError, which begins with `who`, for one that is not of the form http(s)://host[:port]/NAME."""
    split = [url.strip().rstrip("/") for url in urls.split(",")]
    for url in split:
        parts = split_address(url)
        if parts is None or not (is_address(url) and parts.path.strip("/")) or parts.query or parts.fragment \
                or parts.username is not None:
            raise UserError(f"{who or f'reward {urls!r}'}: got {url!r}, expected {expected}, several joined by commas")
    return split


def seconds(after: str) -> float:
    """Retry-After in seconds, given as a number or a date; 0 for anything else."""
    try:
        wait = float(after)
    except ValueError:
        try:
            date = parsedate_to_datetime(after)
        except (TypeError, ValueError):
            return 0.0
        date = date if date.tzinfo else date.replace(tzinfo=timezone.utc)
        wait = (date - datetime.now(timezone.utc)).total_seconds()
    return max(wait, 0.0) if math.isfinite(wait) else 0.0


def side_by_side(call: Callable[[U], T], items: Sequence[U], lanes: int) -> list[T]:
    """Call `call` on every item, up to `lanes` at the same time; return the results in order, or raise the first error.
    Unlike an executor's, these threads do not keep the run from ending."""
    lanes = min(lanes, len(items))
    if lanes <= 1:
        return list(map(call, items))
    results: list[Any] = [None] * len(items)
    errors: list[BaseException] = []

    def lane(first: int) -> None:
        for i in range(first, len(items), lanes):
            try:
                if not errors:
                    results[i] = call(items[i])
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=lane, args=(first,), daemon=True) for first in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results

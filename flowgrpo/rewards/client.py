"""A reward that a server computes: `http://host:port/NAME` in a recipe, several URLs joined by commas.

What goes over the wire is in wire.py, the server in server.py.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from flowgrpo.errors import UserError
from flowgrpo.rewards import wire
from flowgrpo.rewards.about import About
from flowgrpo.rewards.exchange import exchange
from flowgrpo.rewards.failures import LONGEST_WAIT, Failed, TimedOut
from flowgrpo.rewards.needs import needed

TOKEN = "FLOWGRPO_REWARD_TOKEN"  # the environment variable
CONNECT = 10.0  # seconds in which a server that is there accepts a connection
REST = 30.0  # seconds for which a URL that failed is asked only if all others failed as well
LONGEST_ANSWER = 2**24  # bytes
T = TypeVar("T")


class Unanswered(Exception):
    """One attempt that led to no proper answer: another may."""


class Remote:
    """A reward behind one or several URLs, called as any other.

    timeout: seconds for one request. retries: further attempts, after every URL was asked once; wait: seconds before
    the first of them, doubled for each next, times a random number from 0.5 to 1.5. token_file: holds the server's
    token; without it, the environment variable FLOWGRPO_REWARD_TOKEN does, if it is set. exact: send the floats
    themselves, not rounded to 8 bits.

    A batch is sent in parts that keep the server's limits, and to all URLs at the same time. The server is asked what
    it serves when the object is made: UserError where none answers, or serves another reward. A call raises `Failed`
    where the reward failed over there, `TimedOut` where no URL gave a proper answer, and UserError for a person's
    mistake (the token, a limit, a package that the server lacks).
    """

    def __init__(self, urls: str, timeout: float = 60.0, retries: int = 3, wait: float = 0.5,
                 token_file: str | None = None, exact: bool = False) -> None:
        if not (timeout > 0 and retries >= 0 and wait >= 0):
            raise UserError(f"reward {urls!r}: got timeout {timeout}, retries {retries}, wait {wait}, expected a "
                            "timeout above 0 and the others not below")
        self._httpx = needed("httpx", "server", f"reward {urls!r}")
        self.name, self._urls, self._token = urls, addresses(urls), token(token_file)
        self.timeout, self.retries, self.wait, self.exact = timeout, retries, wait, exact
        self._places, self._random = Places(self._urls), random.Random()  # the run's own random numbers stay untouched
        self._http = self._httpx.Client(
            headers={"Accept-Encoding": "identity", "Content-Type": "application/json"}
            | ({"Authorization": f"Bearer {self._token}"} if self._token else {}),
            timeout=self._httpx.Timeout(timeout, connect=min(timeout, CONNECT)), trust_env=False)
        self.info = self._asked_for_info()

    @property
    def about(self) -> About:
        return About(self.info.about.modality, self.info.about.range, "server", self.info.about.licence)

    @property
    def group(self) -> bool:
        """Whether the reward sees whole groups."""
        return self.info.group

    def __call__(self, outputs: Any, prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
                 group: int = 1) -> list[float | None | Failed]:
        """B scores, None where the reward does not apply, Failed where it has no answer. outputs: as of any
        reward; group: the size of the groups."""
        samples = [wire.packed(*sample, self.exact) for sample in zip(outputs, prompts, metadata)]
        pixels = outputs.shape[1:].numel() // 3 if hasattr(outputs, "shape") else 0
        try:
            parts = wire.parted([len(sample) for sample in samples], pixels, self.info.limits, group, len(self._urls))
        except wire.TooLarge as error:
            raise UserError(f"reward {self.name!r}: {error}: start the server with a larger --max-mb or --max-batch, "
                            "or make the pictures or groups smaller") from None

        def ask(part: range) -> list[float | None | Failed]:
            body = wire.request([samples[row] for row in part], group)
            return self._answer("POST", lambda url: url, body, lambda answer: wire.scores(answer, len(part)))

        return [score for found in side_by_side(ask, parts, len(self._urls)) for score in found]

    def _asked_for_info(self) -> wire.Info:
        try:
            info = self._answer("GET", lambda url: f"{url.rpartition('/')[0]}/info", None, wire.Info.read)
        except TimedOut as error:
            raise UserError(f"{error}: is `flowgrpo serve-reward` running there?") from None
        for url in self._urls:
            if unquote(url.rpartition("/")[2]) != info.name:
                raise UserError(f"reward {self.name!r}: the server has the reward {info.name!r}, and {url} names "
                                "another")
        return info

    def _answer(self, method: str, at: Callable[[str], str], body: bytes | None, read: Callable[[bytes], T]) -> T:
        """What `read` makes of the answer of the first URL that gives a proper one; TimedOut where none does."""
        attempts = self.retries + len(self._urls)
        for attempt in range(attempts):
            if attempt:
                wait = self.wait * 2 ** (attempt - 1) * self._random.uniform(0.5, 1.5)
                time.sleep(min(wait, LONGEST_WAIT))
            try:
                with self._places.turn() as url:
                    return self._attempt(method, at(url), body, read)
            except Unanswered as error:
                last = error
        raise TimedOut(f"reward {self.name!r}: {last} (asked {attempts} times)")

    def _attempt(self, method: str, url: str, body: bytes | None, read: Callable[[bytes], T]) -> T:
        try:
            status, _, answer = exchange(self._http, method, url, body, self.timeout, LONGEST_ANSWER, unpacked=False)
            if status == 200:
                return read(answer)
        except self._httpx.ConnectTimeout:
            raise Unanswered(f"{url} took no connection within {min(self.timeout, CONNECT):g} s") from None
        except self._httpx.TimeoutException:
            raise Unanswered(f"{url} gave no answer within {self.timeout:g} s") from None
        except self._httpx.TransportError as error:
            raise Unanswered(f"{url} gave no answer ({type(error).__name__}: {error})") from None
        except ValueError as error:
            raise Unanswered(f"{url} gave no proper answer: {error}") from None
        raise self._refused(url, status, wire.refusal(answer))

    def _refused(self, url: str, status: int, line: str | None) -> Exception:
        """The error for a status: of the reward, of a person, or one that another attempt may not meet. A refusal that
        is not in our format comes from something in between, and may pass."""
        if status in (401, 403):
            how = "another token" if self._token else f"a token: set {TOKEN}, or token_file in its args"
            return UserError(f"reward {self.name!r}: {url} expects {how}")
        told = f"{url} answered {status}" + (f": {line}" if line else "")
        if status == 422 and line:
            return Failed(f"reward {self.name!r}: {told}")
        if status == 413 or (line and 400 <= status < 500 and status not in (408, 429)):
            return UserError(f"reward {self.name!r}: {told}")
        return Unanswered(told)


@dataclass(eq=False)
class _Place:
    url: str
    busy: int = 0  # requests under way
    turn: int = 0  # the number of its last request
    rests_until: float = 0.0


class Places:
    """URLs in turn: the least busy one is next, and among equals that which was asked the longest ago. One that gave no
    answer rests, and is asked again before that only where all of them rest."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._places, self._turns, self._lock = [_Place(url) for url in urls], itertools.count(1), threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[str]:
        """The next URL; one in whose turn `Unanswered` is raised rests from then on."""
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


def side_by_side(call: Callable[[range], T], parts: Sequence[range], lanes: int) -> list[T]:
    """`call` of every part, in order, up to `lanes` of them at the same time; the first error is raised.

    The threads do not keep the run from ending, which those of an executor would.
    """
    lanes = min(lanes, len(parts))
    if lanes <= 1:
        return [call(part) for part in parts]
    found: dict[int, T] = {}
    errors: list[BaseException] = []

    def lane(first: int) -> None:
        for i in range(first, len(parts), lanes):
            try:
                if not errors:
                    found[i] = call(parts[i])
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=lane, args=(first,), daemon=True) for first in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[i] for i in range(len(parts))]


def is_address(name: str) -> bool:
    """Whether a reward's name is a URL."""
    return name.startswith(("http://", "https://"))


def addresses(urls: str) -> list[str]:
    """URLs joined by commas. UserError for one that is not http(s)://host[:port]/NAME."""
    found = [url.strip().rstrip("/") for url in urls.split(",")]
    for url in found:
        try:
            parts = urlsplit(url)
            port, proper = parts.port, is_address(url) and parts.hostname and parts.path.strip("/")
        except ValueError:
            port, proper = 0, False
        if not proper or port == 0 or parts.query or parts.fragment or parts.username is not None:
            raise UserError(f"reward {urls!r}: got {url!r}, expected http://host:port/NAME, several joined by commas")
    return found


def token(file: str | Path | None) -> str | None:
    """The token in a file, or else in the environment; None where there is none. UserError for an unfit one."""
    if file is None:
        found, told = os.environ.get(TOKEN), f"the environment variable {TOKEN}"
        if found is None:
            return None
    else:
        told = f"the token file {file}"
        try:
            found = Path(file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{told} cannot be read ({type(error).__name__}): expected a file of one line") from None
    if not found or not all("!" <= character <= "~" for character in found):
        raise UserError(f"{told} holds no token: expected printable ASCII without spaces, such as `openssl rand -hex "
                        "32` prints")
    return found

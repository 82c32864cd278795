"""Reward computed by a server: `http://host:port/NAME` in a recipe, several URLs joined by commas.

The protocol is in wire.py, the server in server.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.failures import Failed, TimedOut
from flowgrpo.rewards.remote.exchange import Key, Service, addresses, brief, side_by_side
from flowgrpo.serving import wire
from flowgrpo.trust import is_here

if TYPE_CHECKING:
    from torch import Tensor

TOKEN = "FLOWGRPO_REWARD_TOKEN"  # environment variable
HOSTS = "FLOWGRPO_REWARD_HOSTS"  # likewise: those that get the token, joined by commas


class Remote:
    """Reward behind one or several URLs, called like any other.

    timeout: seconds for one request. retries: further attempts, after one request to every URL.
    wait: seconds before the first retry, doubled for each next, times a random number from 0.5 to 1.5.
    token_file: holds the server's token; default: the environment variable FLOWGRPO_REWARD_TOKEN, if set. Where
    FLOWGRPO_REWARD_HOSTS is set, that one goes to these hosts and to this machine alone.
    exact: send the floats themselves, not rounded to 8 bits.

    A batch is sent in parts that keep the server's limits, to all URLs at the same time. A new object asks the server
    which reward it serves. A call raises `Failed` if the reward failed on the server, and `TimedOut` if no URL gave a
    proper answer.
    Raises UserError if no server answers or it serves another reward, and in a call for the user's mistake (the token,
    a limit, a package that the server lacks).
    """

    privileged = True  # passes requests on with the user's token

    def __init__(self, urls: str, timeout: float = 60.0, retries: int = 3, wait: float = 0.5,
                 token_file: str | None = None, exact: bool = False) -> None:
        if not (timeout > 0 and retries >= 0 and wait >= 0):
            raise UserError(f"reward {urls!r}: got timeout {timeout}, retries {retries}, wait {wait}, expected a "
                            "timeout above 0 and the others not below")
        self.name, self._urls, self.exact = urls, addresses(urls), exact
        self._key = bound_token(token_file, self._urls)
        headers = {"Authorization": f"Bearer {self._key.value}"} if self._key else {}
        self._service = Service(f"reward {urls!r}", self._urls, timeout, retries, wait, headers,
                                sent=("prompts", "metadata", "samples"), key=self._key)
        self.info = info = self._request_info()
        self.about = About(info.about.modality, info.about.range, "server", info.about.licence)
        self.group = info.group

    def __call__(self, outputs: Tensor | Sequence[str], prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
                 group: int = 1) -> list[float | None | Failed]:
        """B scores, None where the reward does not apply, Failed where it has no answer. outputs: as for any reward.
        group: the size of the groups."""
        samples = [wire.pack(*sample, self.exact) for sample in zip(outputs, prompts, metadata)]
        pixels = outputs.shape[1:].numel() // 3 if hasattr(outputs, "shape") else 0
        try:
            parts = wire.split_requests(list(map(len, samples)), pixels, self.info.limits, group, len(self._urls))
        except wire.TooLarge as error:
            raise UserError(f"reward {self.name!r}: {error}: start the server with a larger --max-mb or --max-batch, "
                            "or make the images or groups smaller") from None

        def ask(part: range) -> list[float | None | Failed]:
            body = wire.request([samples[row] for row in part], group)
            return self._service.try_urls(lambda url: self._service.request(
                "POST", url, body, lambda answer: wire.scores(answer, len(part)), self._raise_for_status))

        return [score for scores in side_by_side(ask, parts, len(self._urls)) for score in scores]

    def _request_info(self) -> wire.Info:
        try:
            with brief():
                info = self._service.try_urls(lambda url: self._service.request(
                    "GET", f"{url.rpartition('/')[0]}/info", None, wire.Info.read, self._raise_for_status))
        except TimedOut as error:
            raise UserError(f"{error}: is `flowgrpo reward serve` running there?") from None
        for url in self._urls:
            if unquote(url.rpartition("/")[2]) != info.name:
                raise UserError(f"reward {self.name!r}: the server has the reward {info.name!r}, and {url} names "
                                "another")
        return info

    def _raise_for_status(self, url: str, status: int, answer: bytes) -> str:
        """Raise the error for a status, the reward's or the user's; return the message of one that may pass on retry.
        A refusal in another format comes from a proxy between, and may pass."""
        line = wire.refusal(answer)
        line = line and self._service.quote(line)
        message = f"{url} answered {status}" + (f": {line}" if line else "")
        if status == 401 or status == 403 and not line:
            how = "another token" if self._key else f"a token: set {TOKEN}, or token_file in its args"
            raise UserError(f"reward {self.name!r}: {url} expects {how}")
        if status == 422 and line:
            raise Failed(f"reward {self.name!r}: {message}")
        if status == 413 or (line and 400 <= status < 500 and status not in (408, 429)):
            raise UserError(f"reward {self.name!r}: {message}")
        return message


def bound_token(file: str | Path | None, urls: Sequence[str]) -> Key | None:
    """Token for these URLs; None without one, and for that of the environment if HOSTS names other hosts. HOSTS are
    also those of the user's own network, to which a token may go unencrypted."""
    value = token(file)
    hosts = frozenset(host for name in os.environ.get(HOSTS, "").split(",") if (host := name.strip().lower()))
    if value is None or file is None and hosts and not all((host := urlsplit(url).hostname or "") in hosts
                                                           or is_here(host) for url in urls):
        return None
    return Key(value, f"the token of the file {file}" if file else f"the token in {TOKEN}", str(file or TOKEN), hosts,
               f"; within a network of your own, {HOSTS}=HOST allows it", file is None and bool(hosts))


def token(file: str | Path | None) -> str | None:
    """Token in a file, or else in the environment; None if there is none. Raises UserError for an invalid one."""
    if file is None:
        value, source = os.environ.get(TOKEN), f"the environment variable {TOKEN}"
        if value is None:
            return None
    else:
        source = f"the token file {file}"
        try:
            value = Path(file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{source} cannot be read ({type(error).__name__}): expected a file of one line") from None
    if not value or not all("!" <= character <= "~" for character in value):
        raise UserError(f"{source} holds no token: expected printable ASCII without spaces, such as `openssl rand -hex "
                        "32` prints")
    return value

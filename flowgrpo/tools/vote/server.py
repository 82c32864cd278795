"""Web pages of `flowgrpo compare vote` and `flowgrpo taste`, for browsers of this machine: images and keys to vote.

All addresses begin with a token: /TOKEN/ is the page, /TOKEN/state what it shows.
Of pairs, /TOKEN/12/left is the image on a side of pair 12, /TOKEN/12/left.mp4 its video, /TOKEN/12/source/0 the first
image that its prompt brings. POST /TOKEN/vote takes {"pair": 12, "choice": "left"}, /TOKEN/undo {}.
Of a live ballot, /TOKEN/3.q7/0 is the first image of question 3.q7. POST /TOKEN/vote takes {"question": "3.q7",
"shown": [0, 1, 2, 3], "choice": 2}, a choice "tie" or "skip" too, /TOKEN/undo {} and /TOKEN/finish {}.
"""

from __future__ import annotations

import hmac
import io
import json
import re
import secrets
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from flowgrpo import loopback
from flowgrpo.contrib.taste.votes import SKIP, TIE
from flowgrpo.data.images import read_image
from flowgrpo.errors import UserError
from flowgrpo.evaluation.pages.sources import SHOWN
from flowgrpo.loopback import Refused
from flowgrpo.tools.vote.ballot import CHOICES, Ballot, Changed
from flowgrpo.tools.vote.live import Late, LiveBallot

FOLDER = Path(__file__).parent
LARGEST = 4096  # bytes of a request
KINDS = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp", ".mp4": "video/mp4"}
POLICY = ("default-src 'none'; img-src 'self' data:; media-src blob:; connect-src 'self'; style-src 'unsafe-inline'; "
          "script-src 'nonce-{}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


def server(ballot: Ballot | LiveBallot, port: int) -> ThreadingHTTPServer:
    """Return a server of the page. port: 0 takes a free one.

    Raises UserError if the port is taken.
    """
    handler = LiveHandler if isinstance(ballot, LiveBallot) else PairHandler
    return loopback.listen(type("Handler", (handler,), {"ballot": ballot, "token": secrets.token_urlsafe(16)}), port)


def address(serving: ThreadingHTTPServer) -> str:
    """Return the address of the page."""
    return f"http://{loopback.HOST}:{serving.server_port}/{serving.RequestHandlerClass.token}/"  # type: ignore[attr-defined]


class Handler(loopback.Handler):
    """Request handler for one ballot behind a token. page: the file of the page, with [[NONCE]], and [[STYLE]] and
    [[SCRIPT]] in the place of what all pages share. printed_by: the command that printed its address."""

    ballot: Any
    token: str
    page: ClassVar[str] = ""
    printed_by: ClassVar[str] = ""

    def _path_after_token(self) -> str:
        """Return what follows the token. Raises Refused for another token."""
        _, token, *rest = [*self.path.split("/", 2), ""]
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            raise Refused(403, f"expected the address that `{self.printed_by}` printed, with its token")
        return rest[0]

    def get(self) -> None:
        path = self._path_after_token()
        if path == "":
            nonce = secrets.token_urlsafe(12)
            text = (FOLDER / self.page).read_text(encoding="utf-8")
            for name, file in (("[[STYLE]]", "shared.css"), ("[[SCRIPT]]", "shared.js")):
                text = text.replace(name, (FOLDER / file).read_text(encoding="utf-8"))
            text = text.replace("[[NONCE]]", nonce).replace("[[COMMAND]]", self.printed_by)
            self.send(text.encode(), "text/html; charset=utf-8", Content_Security_Policy=POLICY.format(nonce))
        elif path == "state":
            self._state()
        else:
            self._file(path)

    def _file(self, path: str) -> None:
        """Send a file of the ballot. Raises Refused for another address."""
        raise Refused(404, "no such page")

    def _state(self) -> None:
        self.send(json.dumps(self.ballot.state(), allow_nan=False).encode(), "application/json")

    def _send_file(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise Refused(404, f"this image's file cannot be read ({error.strerror})") from None
        self.send(content, KINDS[path.suffix.lower()], Cache_Control="private, max-age=3600")

    def post(self) -> None:
        path, content = self._path_after_token(), _object(self.body(LARGEST))
        try:
            if path == "vote":
                self.ballot.vote(*self._vote(content))
            elif path == "undo":
                self.ballot.undo()
            else:
                self._further(path)
        except (Changed, Late) as error:
            raise Refused(409, str(error)) from None
        except OSError as error:
            raise Refused(500, f"the vote was not kept: {self.ballot.output} cannot be written ({error.strerror})"
                          ) from None
        self._state()

    def _further(self, path: str) -> None:
        """Do what the page of a kind of ballot alone asks for. Raises Refused for another address."""
        raise Refused(404, "no such page")

    def _vote(self, content: dict[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of a vote. Raises Refused for anything else."""
        raise NotImplementedError


class PairHandler(Handler):
    """Request handler for pairs."""

    ballot: Ballot
    page, printed_by = "page.html", "flowgrpo compare vote"

    def _file(self, path: str) -> None:
        if match := re.fullmatch(r"(\d{1,9})/(left|right)(\.mp4)?", path):
            self._image(int(match[1]), match[2], match[3] or "")
        elif match := re.fullmatch(r"(\d{1,9})/source/(\d{1,3})", path):
            self._source(int(match[1]), int(match[2]))
        else:
            super()._file(path)

    def _source(self, number: int, place: int) -> None:
        """Send an image that a prompt brings, upright and at most SHOWN pixels long, as WebP: it may be of any format.
        """
        if number >= len(self.ballot.comparisons) or (file := self.ballot.source(number, place)) is None:
            raise Refused(404, "no such image")
        try:
            image = read_image(file)
        except UserError as error:
            raise Refused(404, str(error)) from None
        image.thumbnail((SHOWN, SHOWN))
        content = io.BytesIO()
        image.save(content, "WEBP", quality=90)
        self.send(content.getvalue(), "image/webp")

    def _image(self, number: int, side: str, ending: str) -> None:
        if number >= len(self.ballot.comparisons):
            raise Refused(404, f"expected a pair below {len(self.ballot.comparisons)}")
        path = self.ballot.file(number, side, ending)
        if path is None:
            raise Refused(404, "this image's file is gone" if not ending else "this image has no video")
        self._send_file(path)

    def _vote(self, content: dict[str, Any]) -> tuple[int, str]:
        """Return the pair and the choice of a vote. Raises Refused for anything else."""
        number, choice = content.get("pair"), content.get("choice")
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(self.ballot.comparisons):
            raise Refused(400, f"pair: expected a number below {len(self.ballot.comparisons)}")
        if not isinstance(choice, str) or choice not in CHOICES:
            raise Refused(400, f"choice: expected one of {', '.join(CHOICES)}")
        return number, choice


class LiveHandler(Handler):
    """Request handler for a live ballot."""

    ballot: LiveBallot
    page, printed_by = "live.html", "flowgrpo taste"

    def _file(self, path: str) -> None:
        match = re.fullmatch(r"(\d{1,6}\.[cq]\d{1,4})/(\d)", path)
        file = match and self.ballot.file(match[1], int(match[2]))
        if not file:
            raise Refused(404, "no such image")
        self._send_file(file)

    def _further(self, path: str) -> None:
        if path != "finish":
            raise Refused(404, "no such page")
        self.ballot.finish()

    def _vote(self, content: dict[str, Any]) -> tuple[str, list[int], int | str]:
        name, shown, choice = (content.get(key) for key in ("question", "shown", "choice"))
        question = self.ballot.questions.get(name) if isinstance(name, str) else None
        if question is None:
            raise Refused(400, "question: expected the name of one that was asked")
        places = [*range(len(question.files))]
        if shown not in (places, places[:2]):
            raise Refused(400, f"shown: expected {places} or {places[:2]}")
        if choice not in (TIE, SKIP) and (type(choice) is not int or choice not in shown):
            raise Refused(400, f"choice: expected one of {shown}, {TIE!r} or {SKIP!r}")
        return question.name, shown, choice


def _object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request. Raises Refused for anything else."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise Refused(400, "expected a JSON object")
    return content

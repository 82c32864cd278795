"""Web page of `flowgrpo compare vote` and `flowgrpo taste`, for browsers of this machine: images and keys to vote.

All addresses begin with a token: /TOKEN/ is the page, /TOKEN/state what it shows. /TOKEN/3.q7/0 is the first image of
question 3.q7, /TOKEN/12/1.mp4 the video of a clip of pair 12, /TOKEN/12/source/0 the first image of its prompt.
POST /TOKEN/vote takes {"question": "3.q7", "shown": [0, 1, 2, 3], "choice": 2}, a choice "tie" or "skip" too;
/TOKEN/undo and /TOKEN/finish take {}.
"""

import hmac
import io
import json
import re
import secrets
from collections.abc import Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from flowgrpo import loopback
from flowgrpo.contrib.taste.votes import SKIP, TIE
from flowgrpo.data.images import read_image
from flowgrpo.errors import UserError
from flowgrpo.escaped import fill
from flowgrpo.evaluation.pages.sources import SHOWN
from flowgrpo.loopback import Refused
from flowgrpo.tools.vote.ballot import Ballot, clip_of
from flowgrpo.tools.vote.live import LiveBallot

PAGE = Path(__file__).parent / "page.html"  # with [[NONCE]] and [[COMMAND]]
LARGEST = 4096  # bytes of a request
KINDS = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp", ".mp4": "video/mp4"}
POLICY = ("default-src 'none'; img-src 'self' data:; media-src blob:; connect-src 'self'; style-src 'unsafe-inline'; "
          "script-src 'nonce-{}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


def server(subject: Ballot | LiveBallot, port: int) -> ThreadingHTTPServer:
    """Server of the page; port 0 takes a free one. Raises UserError for a taken one."""
    return loopback.listen(type("Handler", (Handler,), {"subject": subject, "token": secrets.token_urlsafe(16)}), port)


def address(serving: ThreadingHTTPServer) -> str:
    return f"http://{loopback.HOST}:{serving.server_port}/{serving.RequestHandlerClass.token}/"  # type: ignore[attr-defined]


def _at(files: Sequence[Path], place: int) -> Path:
    """File at a place; the current folder, which is no file, behind the last."""
    return files[place] if place < len(files) else Path()


class Handler(loopback.Handler):
    """Request handler for one subject behind a token."""

    subject: Ballot | LiveBallot
    token: str

    def _path_after_token(self) -> str:
        _, token, *rest = [*self.path.split("/", 2), ""]
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            raise Refused(403, f"expected the address that `{self.subject.command}` printed, with its token")
        return rest[0]

    def get(self) -> None:
        path = self._path_after_token()
        if path == "":
            nonce = secrets.token_urlsafe(12)
            self.send(fill(PAGE, NONCE=nonce, COMMAND=self.subject.command).encode(), "text/html; charset=utf-8",
                      Content_Security_Policy=POLICY.format(nonce))
        elif path == "state":
            self._state()
        elif match := re.fullmatch(r"([\w.]{1,12})/(\d)(\.mp4)?", path):
            file = _at(self.subject.files(match[1]), int(match[2]))
            self._image(clip_of(file) if match[3] else file)
        elif match := re.fullmatch(r"([\w.]{1,12})/source/(\d{1,3})", path):
            self._source(_at(self.subject.sources(match[1]), int(match[2])))
        else:
            raise Refused(404, "no such page")

    def _state(self) -> None:
        self.send(json.dumps(self.subject.state(), allow_nan=False).encode(), "application/json")

    def _image(self, file: Path) -> None:
        if not file.is_file():
            raise Refused(404, "no such image, or its file is gone")
        try:
            content = file.read_bytes()
        except OSError as error:
            raise Refused(404, f"this image's file cannot be read ({error.strerror})") from None
        self.send(content, KINDS[file.suffix.lower()], Cache_Control="private, max-age=3600")

    def _source(self, file: Path) -> None:
        """Send an image that a prompt brings, of any format, upright and at most SHOWN pixels long, as WebP."""
        if not file.is_file():
            raise Refused(404, "no such image")
        try:
            image = read_image(file)
        except UserError as error:
            raise Refused(404, str(error)) from None
        image.thumbnail((SHOWN, SHOWN))
        content = io.BytesIO()
        image.save(content, "WEBP", quality=90)
        self.send(content.getvalue(), "image/webp")

    def post(self) -> None:
        path = self._path_after_token()
        try:
            content = json.loads(self.body(LARGEST))
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise Refused(400, "expected a JSON object")
        try:
            if path == "vote":
                self._vote(content)
            elif path == "undo":
                self.subject.undo()
            elif path == "finish":
                self.subject.finish()
            else:
                raise Refused(404, "no such page")
        except OSError as error:
            raise Refused(500, f"the vote was not kept: {self.subject.output} cannot be written ({error.strerror})"
                          ) from None
        self._state()

    def _vote(self, content: dict[str, Any]) -> None:
        """Keep a vote: on all images of a question, or on the first two. Raises Refused for anything else."""
        name, shown, choice = (content.get(key) for key in ("question", "shown", "choice"))
        places = [*range(len(self.subject.files(name)))] if isinstance(name, str) else []
        if not isinstance(name, str) or not places:
            raise Refused(400, "question: expected the name of one that was asked")
        if not isinstance(shown, list) or shown not in (places, places[:2]):
            raise Refused(400, f"shown: expected {places} or {places[:2]}")
        if choice not in (TIE, SKIP) and (type(choice) is not int or choice not in shown):
            raise Refused(400, f"choice: expected one of {shown}, {TIE!r} or {SKIP!r}")
        self.subject.vote(name, shown, choice)

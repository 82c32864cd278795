"""Stand-in for a model hub: the endpoints of uploads and snapshots, on a port of this machine."""

import base64
import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants

from tests.helpers.servers import running

SHA = "a" * 40


class Hub(ThreadingHTTPServer):
    """Repositories by name, each a dictionary of files; refusals by name: (status, error code).

    asked: the requests, with the body of a POST or the range of a GET. gated: names, whose files are `allowed` or not.
    breaks: byte counts by file, after each of which a download of it breaks off once. damaged: files whose first byte
    is sent wrong. slow: a file that is sent in small pieces.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.refused: dict[str, tuple[int, str]] = {}
        self.branches: set[str] = set()
        self.asked: list[tuple[str, str, dict]] = []
        self.gated: set[str] = set()
        self.allowed = False
        self.breaks: dict[str, list[int]] = {}
        self.damaged: set[str] = set()
        self.slow = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def reach(hub: Hub, patch: Any, cache: Path) -> None:
    """Let the hub's client ask this one, and keep what it downloads in a folder of its own."""
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    for name, value in (("HUGGINGFACE_CO_URL_TEMPLATE", template), ("ENDPOINT", hub.url), ("HF_HUB_OFFLINE", False),
                        ("HF_HUB_CACHE", str(cache))):
        patch.setattr(constants, name, value)


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def json(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        begin = self.headers.get("Range", "")
        if path == "/":
            return self.answer(200)
        name = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        rest = path.partition(name)[2].strip("/")
        self.server.asked.append((self.command, path, {"Range": begin} if begin else {}))
        if name in self.server.refused or name not in self.server.files:
            status, code = self.server.refused.get(name, (404, "RepoNotFound"))
            return self.answer(status, X_Error_Code=code, X_Error_Message=code)
        files = self.server.files[name]
        if rest.startswith("revision/") and rest[9:] not in {"main", SHA, *self.server.branches}:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        if rest.startswith("tree/"):
            return self.json([{"type": "file", "path": file, "size": len(content),
                               "oid": hashlib.sha1(content).hexdigest()} for file, content in files.items()])
        if rest.startswith("resolve/"):
            return self.content(rest.split("/", 2)[2], files[rest.split("/", 2)[2]], begin)
        if rest == "auth-check" and name in self.server.gated and not self.server.allowed:
            return self.answer(403, X_Error_Code="GatedRepo", X_Error_Message="gated")
        listed = [{"rfilename": file, "size": len(content), "lfs": {
            "sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}}
            for file, content in files.items()]
        return self.json({"id": name, "sha": SHA, "siblings": listed, "gated": "auto" * (name in self.server.gated)
                          or False})

    def content(self, file: str, content: bytes, begin: str) -> None:
        """Send a file, or its end, which may break off, be damaged or slow."""
        start = int(begin.removeprefix("bytes=").rstrip("-") or 0)
        tag = hashlib.sha1(content).hexdigest()
        if file in self.server.damaged:
            content = b"?" + content[1:]
        self.send_response(206 if begin else 200)
        for name, value in {"Content-Length": str(len(content) - start), "ETag": f'"{tag}"',
                            "X-Repo-Commit": SHA}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        ends = [end for end in self.server.breaks.get(file, []) if end > start]
        piece = 2**14 if file == self.server.slow else 2**20
        for at in range(start, ends[0] if ends else len(content), piece):
            self.wfile.write(content[at:min(at + piece, ends[0] if ends else len(content))])
            if file == self.server.slow:
                time.sleep(0.02)
        if ends:
            self.server.breaks[file].remove(ends[0])
            self.close_connection = True

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        path = unquote(urlsplit(self.path).path)
        lines = [json.loads(line) for line in body.splitlines() if line] if "/commit/" in path else [json.loads(body)]
        self.server.asked.append(("POST", path, lines[0]))
        name = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        if name in self.server.refused:
            status, code = self.server.refused[name]
            return self.answer(status, X_Error_Code=code, X_Error_Message=code)
        if "/branch/" in path:
            self.server.branches.add(path.partition("/branch/")[2])
        if "/preupload/" in path:
            return self.json({"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                                        for file in lines[0]["files"]]})
        if "/commit/" in path:
            self.server.files.setdefault(name, {}).update({
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines if line["key"] == "file"})
            return self.json({"success": True, "commitOid": SHA, "commitUrl": f"{self.server.url}/{name}/commit/{SHA}"})
        return self.json({"url": f"{self.server.url}/{name}", "errors": [], "warnings": []})


@contextlib.contextmanager
def served() -> Iterator[Hub]:
    """Context manager: a hub that answers until its end."""
    with running(Hub()) as hub:
        yield hub

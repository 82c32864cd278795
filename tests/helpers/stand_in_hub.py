"""Stand-in for a model hub: the endpoints of uploads and snapshots, on a port of this machine."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

SHA = "a" * 40


class Hub(ThreadingHTTPServer):
    """Repositories by name, each a dictionary of files; refusals by name: (status, error code). asked: the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.refused: dict[str, tuple[int, str]] = {}
        self.branches: set[str] = set()
        self.asked: list[tuple[str, str, dict]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


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
        if path == "/":
            return self.answer(200)
        name = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        rest = path.partition(name)[2].strip("/")
        self.server.asked.append((self.command, path, {}))
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
            content = files[rest.split("/", 2)[2]]
            return self.answer(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=SHA)
        return self.json({"id": name, "sha": SHA, "siblings": [{"rfilename": file} for file in files]})

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
    hub = Hub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()

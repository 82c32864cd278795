"""`flowgrpo report --live`: serve the report of a running run to browsers of this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from flowgrpo.errors import UserError
from flowgrpo.evaluation.report import report

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # accepted host names: any other belongs to a foreign page that resolves to this machine


def server(run: Path, port: int) -> ThreadingHTTPServer:
    """Return a server of `/`, the report, and `/data.json`, its data, both made on request. It serves nothing else.

    port: 0 takes a free one.
    Raises UserError if the port is taken, or the folder is not a run.
    """
    report.data(run)
    try:
        return ThreadingHTTPServer((HOST, port), type("Handler", (Handler,), {"run": run}))
    except OSError as error:
        raise UserError(f"port {port} cannot be used ({error.strerror}): give another one with --port") from None


class Handler(BaseHTTPRequestHandler):
    """Request handler for one run."""

    run: Path

    def do_GET(self) -> None:
        if self.headers.get("Host", "").partition(":")[0] not in NAMES:
            return self.send_error(403)
        pages: dict[str, tuple[str, Callable[[dict], str]]] = {
            "/": ("text/html", lambda content: report.page(content, live=True)),
            "/data.json": ("application/json", lambda content: json.dumps(content, allow_nan=False))}
        if self.path not in pages:
            return self.send_error(404)
        kind, text = pages[self.path]
        self.answer(kind, text)

    def answer(self, kind: str, text: Callable[[dict], str]) -> None:
        """Answer with the report's data as text; 304 if the client already has it."""
        version = f'"{report.changed(self.run)}"'
        if self.headers.get("If-None-Match") == version:
            self.send_response(304)
            self.end_headers()
            return
        body = text(report.data(self.run) | {"version": version}).encode("utf-8")
        self.send_response(200)
        for key, value in (("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(body))),
                           ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff")):
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: a page asks every few seconds."""

"""`flowgrpo report --live`: serve the report of a running run to browsers of this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path

from flowgrpo import loopback
from flowgrpo.evaluation.report import report


def server(run: Path, port: int) -> ThreadingHTTPServer:
    """Return a server of `/`, the report, and `/data.json`, its data, both made on request. It serves nothing else.

    port: 0 takes a free one.
    Raises UserError if the port is taken, or the folder is not a run.
    """
    report.data(run)
    return loopback.listen(type("Handler", (Handler,), {"run": run}), port)


class Handler(loopback.Handler):
    """Request handler for one run."""

    run: Path

    def get(self) -> None:
        pages: dict[str, tuple[str, Callable[[dict], str]]] = {
            "/": ("text/html", lambda content: report.page(content, live=True)),
            "/data.json": ("application/json", lambda content: json.dumps(content, allow_nan=False))}
        if self.path not in pages:
            raise loopback.Refused(404, "no such page")
        kind, text = pages[self.path]
        version = f'"{report.changed(self.run)}"'
        if self.headers.get("If-None-Match") == version:
            self.send_response(304)
            self.end_headers()
            return
        self.send(text(report.data(self.run) | {"version": version}).encode("utf-8"), f"{kind}; charset=utf-8")

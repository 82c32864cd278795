"""`flowgrpo report --live`: serve the report of a running run to browsers of this machine."""

from __future__ import annotations

import json
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from flowgrpo import loopback
from flowgrpo.evaluation.report import report
from flowgrpo.storage.places import run_of


def server(run: Path, port: int) -> ThreadingHTTPServer:
    """Return a server of `/`, the report, and `/data.json`, its data, both made on request. It serves nothing else.

    port: 0 takes a free one.
    Raises UserError if the port is taken, or the folder is not a run.
    """
    return loopback.listen(type("Handler", (Handler,), {"live": Live(run_of(run))}), port)


class Live:
    """Report of a run that may change, be damaged or be deleted.

    Raises UserError at first if the folder is not a run.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._text = json.dumps(report.data(run), allow_nan=False)

    def version(self) -> str:
        """Return a mark that changes with the run's files."""
        return f'"{report.changed(self._run)}"'

    def content(self) -> dict[str, Any]:
        """Return the report's data.

        Where it cannot be made, the data of the last time, with one line about the fault under `notice`.
        """
        notice = None
        try:
            self._text = json.dumps(report.data(self._run), allow_nan=False)
        except Exception as error:  # of half-written, damaged and deleted files
            notice = f"Not up to date: {' '.join(str(error).split())[:300] or type(error).__name__}"
        return json.loads(self._text) | {"notice": notice}


class Handler(loopback.Handler):
    """Request handler for one run."""

    live: Live

    def get(self) -> None:
        if self.path not in ("/", "/data.json"):
            raise loopback.Refused(404, "no such page")
        version = self.live.version()
        if self.headers.get("If-None-Match") == version:
            self.send_response(304)
            self.end_headers()
            return
        content = self.live.content() | {"version": version}
        if self.path == "/":
            self.send(report.page(content, live=True).encode(), "text/html; charset=utf-8")
        else:
            self.send(json.dumps(content, allow_nan=False).encode(), "application/json; charset=utf-8")

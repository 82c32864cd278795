"""Watch of a run's processes: when one is lost, the others end with its reason, not when a collective times out.

Every process keeps a connection to the first one, and says why it ends. The system closes the connection of a process
that is killed; a machine that is gone no longer answers the system's probes. No process has to send anything in time.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import sys
import threading
from types import TracebackType
from typing import Any

from torch import distributed

from flowgrpo.distributed.processes import Processes
from flowgrpo.distributed.signals import Stopped
from flowgrpo.errors import UserError

GRACE = 20.0  # seconds in which the others may end by themselves, as after an error that all of them learned of
NOTICE = 5.0  # seconds between a collective's error and the reason for it
CONNECT = 60.0  # seconds for all processes to connect
HELLO = 256  # bytes of the first message: token, rank and host
DONE = b"done"
KILLED = "was killed, or its machine is gone"
RESUME = "--resume goes on from the last checkpoint"
# Probes of a silent connection: the first after 10 s, then one in 5 s; four without an answer end it.
PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


class Watch:
    """Context manager around a run of several processes; of one process it does nothing.

    lost: the line about a lost process, or None.

    Within `grace` seconds after a loss the process ends with this line and exit code 2, wherever it waits. If it fails
    before, because a collective did, it raises UserError with the line.
    """

    def __init__(self, processes: Processes, grace: float = GRACE):
        self.processes, self.grace = processes, grace
        self.lost: str | None = None
        self._links: dict[socket.socket, str] = {}  # connections to the others, with their names
        self._noticed, self._ended = threading.Event(), threading.Event()

    def __enter__(self) -> Watch:
        if self.processes.count > 1:
            try:
                self._connect()
            except OSError as error:
                raise UserError(f"process {self.processes.rank} on {socket.gethostname()}: the processes cannot "
                                f"connect to the first one ({error}): expected open TCP ports between the machines"
                                ) from None
            threading.Thread(target=self._listen, daemon=True, name="watch").start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not self._links:
            return
        collective = isinstance(error, RuntimeError)  # perhaps that of a collective that another process has left
        if collective:
            self._noticed.wait(NOTICE)
        self._ended.set()
        orderly = error is None or isinstance(error, Stopped) or self.lost is not None
        self._tell(DONE if orderly else _reason(error).encode())
        if collective and self.lost is not None:
            raise UserError(self.lost) from None

    def _connect(self) -> None:
        """Connect every process to the first one, at the launcher's address."""
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        local = address in ("127.0.0.1", "localhost")
        server, meeting = None, list[Any]([None])
        if self.processes.first:
            server = socket.create_server(("127.0.0.1" if local else "", 0))
            meeting = [(server.getsockname()[1], secrets.token_hex(16), socket.gethostname())]
        distributed.broadcast_object_list(meeting, 0)
        port, token, host = meeting[0]
        if server is None:
            link = socket.create_connection((address, port), CONNECT)
            link.sendall(f"{token} {self.processes.rank} {socket.gethostname()}".encode()[:HELLO].ljust(HELLO))
            self._keep(link, _name(0, host))
            return
        with server:
            server.settimeout(CONNECT)
            while len(self._links) < self.processes.count - 1:
                link, _ = server.accept()
                link.settimeout(CONNECT)
                with contextlib.suppress(OSError, ValueError):  # of a stranger
                    given, rank, name = link.recv(HELLO, socket.MSG_WAITALL).decode().split()
                    if secrets.compare_digest(given, token):
                        self._keep(link, _name(rank, name))

    def _keep(self, link: socket.socket, name: str) -> None:
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in PROBES.items():
            if hasattr(socket, option):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._links[link] = name

    def _listen(self) -> None:
        """Wait for the end of each of the others; at a loss tell the rest, and end this process after the grace."""
        with selectors.DefaultSelector() as selector:
            for link, name in self._links.items():
                selector.register(link, selectors.EVENT_READ, (name, bytearray()))
            while selector.get_map() and self.lost is None:
                for key, _ in selector.select():
                    name, said = key.data
                    with contextlib.suppress(OSError):
                        if received := key.fileobj.recv(65536):
                            said += received
                            continue
                    selector.unregister(key.fileobj)
                    if said != DONE:
                        self._lose(name, said.decode(errors="replace"))
                        break
        for link in self._links if self.lost is None else ():
            link.close()
        if self.lost is not None and not self._ended.wait(self.grace):
            print(f"flowgrpo: error: {self.lost}", file=sys.stderr, flush=True)
            os._exit(2)

    def _lose(self, name: str, said: str) -> None:
        """Note the loss of a process and tell the others; the first process hands on a whole line."""
        told = said if said.startswith("process ") else f"{name} {said or KILLED}; {RESUME}"
        self.lost = told
        self._noticed.set()
        if self.processes.first:
            self._tell(told.encode())

    def _tell(self, line: bytes) -> None:
        """Send the others the last line that this process has for them."""
        for link in self._links:
            with contextlib.suppress(OSError):  # it is gone, or was told before
                link.sendall(line)
                link.shutdown(socket.SHUT_WR)


def _name(rank: int | str, host: str) -> str:
    return f"process {rank} on {host}"


def _reason(error: BaseException | None) -> str:
    """Return in one line why a process ends."""
    text = " ".join(str(error).split())
    return f"failed ({text if isinstance(error, UserError) else f'{type(error).__name__}: {text}'})"[:2000]

"""Watch of a run's processes: when one is lost, the others end with its reason, not when a collective times out.

Every process keeps a connection to the first one, and says why it ends. The system closes the connection of a process
that is killed; a machine that is gone no longer answers the system's probes. A thread sends a heartbeat every second:
a process that is frozen, or whose interpreter is held, is noticed by its silence. The connection also reports that a
process was asked to stop. A process that has failed, and waits in vain for the others to leave with it, ends them all.
"""

import contextlib
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from torch import distributed

from flowgrpo.distributed import signals
from flowgrpo.distributed.processes import Processes, failures
from flowgrpo.distributed.signals import Stopped
from flowgrpo.errors import UserError

GRACE = 20.0  # seconds in which the others may end by themselves, as after an error that all of them learned of
NOTICE = 5.0  # seconds between a collective's error and the reason for it
CONNECT = 60.0  # seconds for all processes to connect
BEAT = 1.0  # seconds between two heartbeats
SILENCE = 40.0  # seconds without a heartbeat after which a process is lost
FAILED = 40.0  # seconds in which the others meet a process that has failed
HELLO = 256  # bytes of the first message: token, rank and host
DONE, STOP = b"done", b"stop"
REFUSED = ": "  # before the user's error of a process
KILLED = "was killed, or its machine is gone"
RESUME, NOTHING = "--resume goes on from the last checkpoint", "no checkpoint was saved"
# Probes of a silent connection: the first after 10 s, then one in 5 s; four without an answer end it.
PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


class Watch:
    """Context manager around a run of several processes; of one process it does nothing.

    lost: the line about a lost process, or None. Within `grace` seconds after a loss the process ends with this line
    and exit code 2, wherever it waits. If it fails before, because a collective did, it raises UserError with the line.
    folder: of the run. silence, failed: seconds, see SILENCE and FAILED.
    """

    def __init__(self, processes: Processes, folder: Path | None = None, grace: float = GRACE, silence: float = SILENCE,
                 failed: float = FAILED):
        self.folder = folder
        self.processes, self.grace, self.silence, self.failed = processes, grace, silence, failed
        self.lost: str | None = None
        self._links: dict[socket.socket, str] = {}  # connections to the others, with their names
        self._heard: dict[socket.socket, float] = {}  # when, of those that have not ended
        self._noticed, self._ended = threading.Event(), threading.Event()
        self._sending = threading.Lock()

    def __enter__(self) -> "Watch":
        if self.processes.count > 1:
            try:
                self._connect()
            except OSError as error:
                raise UserError(f"process {self.processes.rank} on {socket.gethostname()}: the processes cannot "
                                f"connect to the first one ({error}): expected open TCP ports between the machines"
                                ) from None
            signals.limits.append(signals.PATIENCE)
            threading.Thread(target=self._listen, daemon=True, name="watch").start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not self._links:
            return
        signals.limits.pop()
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
                with contextlib.suppress(OSError, ValueError):  # of another program
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
                self._heard[link] = time.monotonic()
                selector.register(link, selectors.EVENT_READ, (name, bytearray()))
            stopping, beaten = False, 0.0
            while selector.get_map() and self.lost is None:
                before = time.monotonic()
                for key, _ in selector.select(BEAT):
                    name, said = key.data
                    if not self._hear(cast(socket.socket, key.fileobj), name, said):
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if now - beaten >= BEAT and not self._ended.is_set():
                    beaten, news = now, signals.stop_requested() and not stopping
                    stopping = stopping or news
                    self._tell(STOP + b"\n" if news else b"\n", last=False)
                if now - before < 2 * BEAT:  # after a pause of its own, this process first reads what was sent in it
                    self._look(now)
        for link in self._links if self.lost is None else ():
            link.close()
        if self.lost is not None and not self._ended.wait(self.grace):
            print(f"flowgrpo: error: {self.lost}", file=sys.stderr, flush=True)
            os._exit(2)

    def _hear(self, link: socket.socket, name: str, said: bytearray) -> bool:
        """Read what a process sends, `said` before; return False at its end."""
        with contextlib.suppress(OSError):
            if received := link.recv(65536):
                self._heard[link] = time.monotonic()
                said += received
                *lines, rest = said.split(b"\n")
                said[:] = rest
                if STOP in lines:
                    signals.ask()
                return True
        del self._heard[link]
        if said != DONE:
            self._lose(name, said.decode(errors="replace"))
        return False

    def _look(self, now: float) -> None:
        """Note the loss of a process that is silent, and of this one if it has failed and none comes to meet it."""
        for link, heard in [*self._heard.items()]:
            if now - heard > self.silence:
                self._lose(self._links[link], f"has sent nothing for {self.silence:g} s, frozen or cut off")
        for since, error in failures if self.lost is None else ():
            if now - since > self.failed:
                self._lose(_name(self.processes.rank, socket.gethostname()), _reason(error))
                if not self.processes.first:
                    self._tell(_reason(error).encode())

    def _lose(self, name: str, said: str) -> None:
        """Note the loss of a process and tell the others; the first process forwards a whole line."""
        if self.lost is not None:
            return
        saved = self.folder is None or any((self.folder / "checkpoints").glob("epoch-*"))
        told = said if said.startswith("process ") else f"{name}{said}" if said.startswith(REFUSED) else \
            f"{name} {said or KILLED}; {RESUME if saved else NOTHING}"
        self.lost = told
        self._noticed.set()
        if self.processes.first:
            self._tell(told.encode())

    def _tell(self, line: bytes, last: bool = True) -> None:
        for link in self._links:
            with contextlib.suppress(OSError), self._sending:  # it is gone, or has the message already
                link.sendall(line)
                if last:
                    link.shutdown(socket.SHUT_WR)


def _name(rank: int | str, host: str) -> str:
    return f"process {rank} on {host}"


def _reason(error: BaseException | None) -> str:
    text = " ".join(str(error).split())
    return (REFUSED + text if isinstance(error, UserError) else "was ended by a second signal"
            if isinstance(error, KeyboardInterrupt) else f"failed ({type(error).__name__}: {text})")[:2000]

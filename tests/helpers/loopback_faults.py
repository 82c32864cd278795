"""Loopback servers that misbehave, by real sockets."""

import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Fault = Callable[[socket.socket, threading.Event], None]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@contextmanager
def misbehaving(fault: Fault, buffer: int | None = None) -> Iterator[str]:
    """Context manager: a server whose connections are handled by `fault(connection, ended)`; yields its root URL.

    buffer: bytes that the system keeps of what a client sends."""
    ended = threading.Event()

    def handle(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            fault(connection, ended)

    def accept() -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                connection, _ = listening.accept()
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        if buffer is not None:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        listening.settimeout(0.05)
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            ended.set()
            thread.join()


def repeated(first: bytes, again: bytes, pause: float = 0.02) -> Fault:
    """Return a fault that sends `first`, and then `again` without end."""
    def fault(connection: socket.socket, ended: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(first)
        while not ended.wait(pause):
            connection.sendall(again)

    return fault


def once(*parts: bytes) -> Fault:
    """Return a fault that answers a request with these bytes, and waits."""
    def fault(connection: socket.socket, ended: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(b"".join(parts))
        ended.wait(20)

    return fault


def mute(connection: socket.socket, ended: threading.Event) -> None:
    """Read nothing and send nothing."""
    ended.wait(20)


def zeros(mebibytes: int, wbits: int = 31) -> bytes:
    """Return so many MiB of zeros as gzip."""
    machine = zlib.compressobj(9, wbits=wbits)
    packed = b"".join(machine.compress(bytes(2**20)) for _ in range(mebibytes))
    return packed + machine.flush()


def packed(content: bytes, coding: str = "gzip") -> bytes:
    """Return an answer of that encoding with these bytes."""
    return HEAD + b"Content-Encoding: %s\r\nContent-Length: %d\r\n\r\n" % (coding.encode(), len(content)) + content

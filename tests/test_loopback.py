"""Pages of this machine: foreign host names and sites, requests without end, and faults of one request."""

import socket
import struct
import threading
from contextlib import contextmanager, suppress

import pytest

from flowgrpo import loopback
from tests.helpers.servers import running


class Echo(loopback.Handler):
    def get(self) -> None:
        self.send(b"%d" % (1 // (self.path != "/fault")), "text/plain")

    def post(self) -> None:
        self.send(self.body(1000), "text/plain")


@contextmanager
def echoing(seconds: float = 30.0):
    """A server whose requests have to arrive within so many seconds; yields its port."""
    with running(loopback.listen(type("Short", (Echo,), {"timeout": seconds}), 0)) as server:
        yield server.server_port


def answered(port: int, sent: bytes, drip: bytes = b"") -> bytes:
    """Send bytes, and `drip` again and again until the answer; return all of it."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(sent)
        connection.settimeout(0.05 if drip else 60)
        with suppress(ConnectionError):  # an end with unread bytes
            while True:
                try:
                    some = connection.recv(65536)
                    if not some:
                        break
                    answer += some
                except TimeoutError:
                    connection.sendall(drip)
    return answer


POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"


def test_requests_are_answered_or_fail_alone():
    with echoing() as port:
        assert answered(port, POST % 2 + b"\r\n{}").endswith(b"\r\n\r\n{}")
    with echoing() as port:
        line = b"internal error (ZeroDivisionError)"
        assert answered(port, b"GET /fault HTTP/1.1\r\nHost: localhost\r\n\r\n").endswith(line)
        assert b"200 OK" in answered(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")


@pytest.mark.parametrize("sent, drip, status", [
    (b"", b"", b""), (b"POST / HT", b"T", b""), (POST % 2, b"X-More: 1\r\n", b" 408 "),
    (POST % 900 + b"\r\n", b" ", b" 408 "), (POST % 900 + b"\r\n", b"", b" 408 "),
], ids=["nothing", "line", "headers", "body", "silence"])
def test_a_request_without_end_is_cut_off(sent, drip, status):
    with echoing(0.5) as port:
        answer = answered(port, sent, drip)
        assert status in answer and b"200 OK" not in answer
        assert b"200 OK" in answered(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")


@pytest.mark.parametrize("header, name", [
    ("localhost", "localhost"), ("LocalHost:80", "localhost"), ("127.0.0.1:1", "127.0.0.1"), ("[::1]:80", "::1"),
    ("a.example", "a.example"), ("localhost@evil.example", ""), ("localhost:x", ""), ("[::1", ""), ("", ""),
    ("localhost evil", ""), ("localhost:123456", "")])
def test_the_name_of_a_host_header(header, name):
    assert loopback.host_name(header) == name


def test_a_foreign_page_is_refused():
    with echoing() as port:
        request = b"GET / HTTP/1.1\r\nHost: %s\r\n%s\r\n"
        assert b" 403 " in answered(port, request % (b"evil.example", b""))
        assert b" 403 " in answered(port, request % (b"localhost", b"Origin: http://evil.example\r\n"))
        assert b" 200 " in answered(port, request % (b"localhost", b"Origin: http://localhost\r\n"))


def test_a_client_that_resets_while_an_error_page_is_written_prints_nothing(capfd):
    """The request line is too long for the standard library, which answers 414 by itself."""
    with echoing() as port:
        headers = b"".join(b"X-%d: 1\r\n" % i for i in range(200))
        for sent in [b"GET /" + b"a" * 200_000] * 5 + [b"GET / HTTP/1.1\r\n" + headers] * 5:
            connection = socket.create_connection(("127.0.0.1", port), timeout=60)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(ConnectionError):
                connection.sendall(sent)
            connection.close()  # a reset, as of the lingering
        assert b"200 OK" in answered(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert capfd.readouterr().err == ""


class Gone(Echo):
    """The error page of the standard library finds no client any more."""

    def send_error(self, *_: object) -> None:
        raise BrokenPipeError


def test_an_error_page_for_nobody_prints_nothing(capfd):
    with running(loopback.listen(Gone, 0)) as server:
        assert answered(server.server_port, b"BREW / HTTP/1.1\r\n\r\n") == b""
    assert capfd.readouterr().err == ""


def test_half_open_connections_take_a_thread_each_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(loopback, "CONNECTIONS", 20)
    before = threading.active_count()
    with echoing() as port:
        held = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(15)]
        for _ in range(3):
            assert b"200 OK" in answered(port, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert threading.active_count() - before <= 21  # one listens
        held += [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(10)]
        ended = 0
        for connection in held:
            connection.settimeout(0.1)
            with suppress(TimeoutError, ConnectionError):
                ended += connection.recv(1) == b""
            connection.close()
        assert 5 <= ended <= 8  # threads of the last answers may not have ended yet

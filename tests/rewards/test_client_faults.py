"""Clients of rewards, judges and detectors against servers that misbehave: they end by their time-out, within a bounded
memory, and go nowhere else."""

import gzip
import json
import socket
import threading
import time
import tracemalloc

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.errors import UserError
from flowgrpo.rewards.failures import TimedOut
from flowgrpo.rewards.geneval import detectors
from flowgrpo.rewards.remote.exchange import Later, Service
from flowgrpo.rewards.remote.http import LONGEST_ANSWER, Body
from flowgrpo.rewards.vlm_judge.client import Endpoint
from flowgrpo.serving.client import Remote
from tests.helpers.loopback_faults import HEAD, misbehaving, mute, once, packed, repeated, zeros

SHORT, GENEROUS = 0.5, 15.0  # seconds: the time-out, and what a loaded machine may add to it


def reward(root: str, timeout: float = SHORT) -> None:
    rewards.find(f"{root}/mine", {"timeout": timeout, "retries": 0})


def judge(root: str, timeout: float = SHORT, text: str = "?") -> str:
    [answer] = Endpoint(url=root + "/v1", model="m", timeout=timeout, retries=0).ask(
        lambda i: [{"role": "user", "content": text}], 1)
    return answer.text


def detector(root: str, timeout: float = SHORT) -> None:
    detectors.Remote(f"{root}/detect", timeout)(torch.zeros(1, 3, 4, 4))


CLIENTS = {"reward": (reward, UserError), "judge": (judge, TimedOut), "detector": (detector, RuntimeError)}
WITHOUT_END = {
    "nothing": mute,
    "a status line that drips": repeated(b"HTTP/1.1 2", b"0"),
    "headers that drip": repeated(HEAD, b"X-More: 1\r\n"),
    "a header that drips": repeated(HEAD + b"X-More: ", b"1"),
    "interim answers": repeated(b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
    "a flood of interim answers": repeated(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100, pause=0.001),
    "a body that drips": repeated(HEAD + b"Content-Length: 100000\r\n\r\n", b" "),
    "a body without a length that drips": repeated(HEAD + b"\r\n", b" "),
    "chunks that drip": repeated(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "gzip that drips": repeated(HEAD + b"Content-Encoding: gzip\r\n\r\n" + zeros(1)[:20], b"\0"),
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("fault", WITHOUT_END)
def test_an_answer_without_end_ends_by_the_time_out(fault, client):
    call, error = CLIENTS[client]
    with misbehaving(WITHOUT_END[fault]) as root:
        began = time.monotonic()
        with pytest.raises(error) as caught:
            call(root)
        assert time.monotonic() - began < SHORT + GENEROUS
    assert "\n" not in str(caught.value) and root in str(caught.value)


def test_a_server_that_reads_nothing_ends_by_the_time_out():
    with misbehaving(mute, buffer=4096) as root:
        began = time.monotonic()
        with pytest.raises(TimedOut, match="gave no answer within 0.5 s"):
            judge(root, text="x" * 2**24)
        assert time.monotonic() - began < SHORT + GENEROUS


def test_a_tls_handshake_without_end_ends_by_the_time_out():
    with misbehaving(mute) as root:
        began = time.monotonic()
        with pytest.raises(TimedOut, match="took no connection within 0.5 s"):
            judge(root.replace("http:", "https:"))
        assert time.monotonic() - began < SHORT + GENEROUS


def test_a_name_that_is_not_resolved_ends_by_the_time_out(monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: go_on.wait(60) or [])
    began = time.monotonic()
    with pytest.raises(TimedOut, match="took no connection"):
        judge("http://slow.invalid")
    assert time.monotonic() - began < SHORT + GENEROUS
    go_on.set()


# --- memory ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("client", CLIENTS)
def test_a_gzip_bomb_is_refused_within_a_bounded_memory(client):
    call, error = CLIENTS[client]
    bomb = packed(zeros(256))
    with misbehaving(once(bomb)) as root:
        tracemalloc.start()
        try:
            with pytest.raises(error, match=f"it sent more than {LONGEST_ANSWER} bytes"):
                call(root, timeout=20)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 4 * LONGEST_ANSWER


@pytest.mark.parametrize("coding, content, line", [
    ("gzip, gzip", gzip.compress(gzip.compress(b"{}")), "its encoding is 'gzip, gzip'"),
    ("br", b"{}", "its encoding is 'br'"), ("gzip", b"{}", "its gzip is damaged"),
    ("gzip", gzip.compress(b"{}" * 99)[:-9], "its gzip is cut off"),
], ids=["twice", "br", "damaged", "cut"])  # the content holds the time
def test_another_encoding_is_refused(coding, content, line):
    with misbehaving(once(packed(content, coding))) as root, pytest.raises(TimedOut, match=line):
        judge(root, timeout=20)


def test_a_compressed_answer_is_read():
    answer = json.dumps({"choices": [{"message": {"content": "7"}}]}).encode()
    with misbehaving(once(packed(gzip.compress(answer)))) as root:
        judge(root, timeout=20)
    packed_body, plain = Body(" Deflate"), Body("")
    assert packed_body.add(zeros(1, wbits=15)) and packed_body.whole() == bytes(2**20)
    assert not plain.add(b"a") and not plain.add(b"b") and plain.whole() == b"ab"


def test_what_follows_a_compressed_answer_is_not_read():
    answer = json.dumps({"choices": [{"message": {"content": "7"}}]}).encode()
    endless = repeated(HEAD + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(answer), b"more")
    with misbehaving(endless) as root:
        assert judge(root, timeout=60) == "7"


# --- elsewhere -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused(status, client):
    call, error = CLIENTS[client]
    seen = []
    def elsewhere(connection, ended):
        seen.append(connection.recv(65536))
    with misbehaving(elsewhere) as other:
        answer = b"HTTP/1.1 %d Go\r\nLocation: %s/x\r\nContent-Length: 0\r\n\r\n" % (status, other.encode())
        with misbehaving(once(answer)) as root, pytest.raises(error, match=f"{status}, a redirect|status {status}"):
            call(root, timeout=20)
    assert seen == []


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    seen = []
    def proxy(connection, ended):
        seen.append(connection.recv(65536))
    with misbehaving(proxy) as other, misbehaving(once(HEAD + b"Content-Length: 0\r\n\r\n")) as root:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, other)
        with pytest.raises(TimedOut, match="no chat completion"):
            judge(root, timeout=20)
    assert seen == []


def test_the_time_that_a_server_asks_for_is_kept():
    remote = object.__new__(Remote)
    remote.name, remote._service = "r", Service("r", [], 1, 0, 0, {})
    with pytest.raises(Later, match="answered 503: busy") as caught:
        remote._refused("http://a/r", 503, {"retry-after": "7"}, b'{"error": "busy"}')
    assert caught.value.seconds == 7


def test_a_connection_is_used_again():
    taken, asked = [], []
    def twice(connection, ended):
        taken.append(connection)
        for _ in range(2):
            asked.append(connection.recv(65536).splitlines()[0])
            connection.sendall(HEAD + b"Content-Length: 2\r\n\r\n{}")
        ended.wait(20)
    with misbehaving(twice) as root:
        service = Service("r", [root], 20, 0, 0, {})
        for _ in range(2):
            assert service.request("GET", f"{root}/gr\u00f6\u00dfe", None, bytes, lambda *_: b"") == b"{}"
    assert len(taken) == 1 and asked == [b"GET /gr%C3%B6%C3%9Fe HTTP/1.1"] * 2

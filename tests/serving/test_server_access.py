"""Access to a reward server, and its load and end: tokens, paths, queues, metrics, draining."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from open_clip.model import CLIP
from PIL import Image

from flowgrpo import rewards
from flowgrpo.contrib.edits import Preservation
from flowgrpo.data import images
from flowgrpo.rewards.clip import SubjectScore
from flowgrpo.rewards.guards import BaseSimilarity
from flowgrpo.rewards.reward import is_privileged
from flowgrpo.rewards.vlm_judge.judge import Judge
from flowgrpo.serving import wire
from flowgrpo.serving.client import TOKEN
from flowgrpo.serving.gate import Bounds, Refused
from flowgrpo.serving.server import score_request
from tests.helpers.refusals import message, refused
from tests.helpers.reward_server import JSON, held_reward, lengths, raw, request, running, status_of
from tests.helpers.tiny_scorers import TINY


# --- who may ask -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method, path", [("POST", "/mine"), ("GET", "/info"), ("GET", "/health"), ("GET", "/metrics")])
def test_another_host_name_is_refused(method, path):
    with running() as server:
        for host in ("", "a b", "evil.example:80", "127.0.0.1.evil.example", "localhost@evil.example", "evil.example"):
            status, _, text = server.ask(method, path, Host=host)
            assert status in (400, 403), host
        assert "is not this server's: expected its address, or start the server with a token" in text
        for host in ("localhost", f"LOCALHOST:{server.port}", "127.0.0.1:9", "[::1]:9", "10.0.0.7",
                     socket.gethostname()):
            assert server.ask(method, path, Host=host)[0] == 200, host


def test_a_client_is_told_that_the_server_knows_another_name(monkeypatch):
    lookup = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **named: lookup("127.0.0.1", *more, **named))
    with running() as server:
        refused("the Host 'alias.example:.*start the server with a token", rewards.find,
                f"http://alias.example:{server.port}/mine", {"retries": 0})


def test_web_pages_and_tokens():
    with running() as server, running(token="word") as guarded:
        for origin in ("http://evil.example", "null", f"http://127.0.0.1:{server.port}"):
            assert server.ask(Origin=origin)[0] == server.ask("GET", "/info", Origin=origin)[0] == 403
            assert guarded.ask(Origin=origin, Authorization="Bearer word")[0] == 403
        assert guarded.ask(Host="rewards.example", Authorization="Bearer word")[0] == 200
        assert guarded.ask(Host="rewards.example", Authorization="Bearer work")[0] == 401
        assert guarded.ask("GET", "/metrics")[0] == 401 and guarded.ask("GET", "/health")[0] == 200
        assert guarded.ask("GET", "/health", Host="rewards.example")[0] == 403


@pytest.mark.parametrize("name, args, asks", [
    ("code_run", {"accept_risk": True}, True), ("base_similarity", {}, True), ("preservation", {}, True),
    ("judge", {}, True),
    ("scene", {}, False), ("jpeg_compressibility", {}, False), ("exact_match", {}, False),
    ("harmonic", {"rewards": ["scene", "sharpness"]}, False),
    ("harmonic", {"rewards": ["scene", "preservation"]}, True),
    ("question_answers", {"by": "judge", "judge": {"model": "m"}}, True),
    ("frames", {"reward": "base_similarity"}, True), ("frames", {"reward": "scene"}, False)])
def test_rewards_that_do_more_than_score_ask_for_a_token(name, args, asks):
    assert is_privileged(rewards.find(name, args)) is asks


def test_rewards_of_files_ask_for_a_token(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def red(images, prompts):\n    return [0.0] * len(prompts)\n")
    assert is_privileged(rewards.find(f"{file}:red")) and is_privileged(lengths)
    assert is_privileged(rewards.find("harmonic", {"rewards": ["scene", f"{file}:red"]}))


# --- what may be asked -----------------------------------------------------------------------------------------------
def test_a_path_is_not_normalised():
    with running() as server:
        for path in ("/mine/../mine", "/./mine", "//mine", "/mine/", "/x/../mine", "/mine%2f..%2fmine", "/MINE",
                     "/mine/.", "/%2e/mine", "/"):
            assert status_of(server.begin(raw(request(), path=path))) == 404, path
        for method in ("PUT", "DELETE", "OPTIONS", "PATCH"):
            assert server.ask(method)[0] == 405, method


# --- files -----------------------------------------------------------------------------------------------------------
REFUSAL = "this reward reads files that the metadata name, and a reward server opens none of a client's"


@pytest.mark.parametrize("reward, key", [
    (BaseSimilarity(), "base_image"), (Preservation(), "image"), (Preservation(key="video"), "video"),
    (Judge(model="m", show=("output", "source")), "image"), (Judge(model="m", show=("output", "source")), "images"),
    (Judge(model="m", show=("output", "source")), "video"), (Preservation(key="control_image"), "control_image"),
    (SubjectScore(device="cpu", parts=(CLIP(**TINY).eval(), None)), "subject"),
], ids=lambda value: value if isinstance(value, str) else type(value).__name__)
def test_a_path_of_a_client_is_not_opened(reward, key, tmp_path):
    there, absent = tmp_path / "there.png", tmp_path / "absent.png"
    Image.new("RGB", (16, 16)).save(there)
    lines = []
    for path in (there, absent, tmp_path):
        sample = wire.pack(torch.zeros(3, 16, 16), "p", {key: [str(path)] if key == "images" else str(path)})
        with pytest.raises(Refused) as caught:
            score_request("mine", reward, wire.request([sample]), wire.Limits())
        assert caught.value.status == 400 and str(tmp_path) not in str(caught.value)
        lines.append(str(caught.value))
    assert REFUSAL in lines[0] and len(set(lines)) == 1


@pytest.mark.parametrize("reader", [
    images.read_image, images.image_size, images.frame_count, lambda path: images.Clip.open(path, 1),
], ids=["picture", "size", "frames", "clip"])
def test_no_reader_opens_a_path_of_a_client(reader, tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "there.png")
    def reading(outputs, prompts, metadata):
        one, other = (message(reader, str(tmp_path / name)) for name in ("there.png", "absent.png"))
        assert one == other and REFUSAL in one
        return [1.0]
    assert score_request("mine", reading, request(), wire.Limits())["scores"] == [1.0]
    assert reader(str(tmp_path / "there.png")) is not None  # outside of a server's request


# --- bodies without end ----------------------------------------------------------------------------------------------
def test_bodies_and_headers_without_end():
    with running(bounds=Bounds(read=1.0)) as server:
        held = [server.begin(raw(b"{", length=1000)) for _ in range(34)]
        server.until(lambda: server.application.metrics.in_flight == 34)
        assert server.ask()[0] == 200
        assert [status_of(connection) for connection in held] == [408] * 34
    with running(bounds=Bounds(read=0.5)) as server:
        for sent in (b"", b"POST /mine HTTP/1.1\r\nHost: local"):
            with server.begin(sent) as connection:
                assert connection.recv(65536) == b""
        assert server.ask()[0] == 200


def test_a_length_above_the_limit_is_refused_before_the_body_comes():
    with running(bounds=Bounds(read=60.0), limits=wire.Limits(size=1000)) as server:
        for length in (1001, 4000, 10**10, 10**18):
            answer = b""
            with server.begin(raw(b"", length=length)) as connection:
                while b"larger --max-mb" not in answer:  # nothing of the body is sent
                    part = connection.recv(65536)
                    assert part, f"the server closed after {answer!r}"
                    answer += part
            assert answer.startswith(b"HTTP/1.1 413")
            server.until(lambda: server.application.metrics.in_flight == 0)
            assert server.ask()[0] == 200


def test_a_body_that_drips_ends_by_the_time_limit():
    with running(bounds=Bounds(read=0.5)) as server:
        connection = server.begin(raw(b"{", length=100_000))
        connection.settimeout(0.05)
        answer = b""
        while b"did not arrive within 0.5 s" not in answer:  # head and body may come apart
            try:
                part = connection.recv(65536)
            except TimeoutError:
                if not answer:
                    connection.sendall(b" ")
                continue
            assert part, f"the server closed after {answer!r}"
            answer += part
    assert answer.startswith(b"HTTP/1.1 408")


def test_readers_and_bytes_are_bounded():
    with running(bounds=Bounds(readers=2)) as server:
        held = [server.begin(raw(b"{", length=1000)) for _ in range(2)]
        server.until(lambda: server.application.metrics.in_flight == 2)
        status, headers, text = server.ask()
        assert (status, headers["Retry-After"]) == (503, "5") and "2 requests are arriving already" in text
        for connection in held:
            connection.close()
        server.until(lambda: server.application.metrics.in_flight == 0)
        assert server.ask()[0] == 200
    with running(bounds=Bounds(bodies=1), limits=wire.Limits(size=1000)) as server:
        with server.begin(raw(b"{" * 950, length=1000)):
            server.until(lambda: server.application.gate._held == 950)
            status, headers, text = server.ask()
            assert (status, headers["Retry-After"]) == (503, "5") and "too many bytes are waiting" in text
        server.until(lambda: server.application.gate._held == 0)
        assert server.ask()[0] == 200


@pytest.mark.fast
def test_many_connections_and_a_full_queue():
    with held_reward() as (reward, begun, go_on), running(reward, Bounds(queue=1)) as server:
        first = server.begin(raw(request()))
        assert begun.wait(20)
        second = server.begin(raw(request()))
        server.until(lambda: server.application.metrics.queue == 1)
        status, headers, text = server.ask()
        assert (status, headers["Retry-After"]) == (503, "5") and "1 requests are waiting already" in text
        go_on.set()
        assert status_of(first) == status_of(second) == 200
    with running() as server:
        held = [server.begin(b"") for _ in range(200)]
        for connection in held:
            connection.sendall(raw(request()))
        assert [status_of(connection) for connection in held] == [200] * 200


def test_a_reward_that_exits_does_not_end_the_server():
    def leaving(outputs, prompts):
        raise SystemExit(3)
    with running(leaving) as server:
        for _ in range(2):
            assert server.ask()[0] in (422, 500)


@pytest.mark.parametrize("signals, drain", [([signal.SIGTERM], 0.3), ([signal.SIGINT] * 2, 1000)])
def test_a_reward_that_hangs_does_not_hold_the_end(signals, drain):
    """Neither beyond the time for what is being scored, nor after a second signal."""
    with held_reward() as (reward, begun, _), running(reward, Bounds(drain=drain)) as server:
        with server.begin(raw(request())):
            assert begun.wait(20)
            for each in signals:
                server.server.handle_exit(each, None)
            server.thread.join(20)
            assert not server.thread.is_alive()


# --- metrics ---------------------------------------------------------------------------------------------------------
def test_metrics_are_in_prometheus_form():
    with held_reward() as (reward, begun, go_on), running(reward) as server:
        assert server.ask(path="/other")[0] == 404
        held = [server.begin(raw(request()))]
        assert begun.wait(20)
        held.append(server.begin(raw(request())))
        server.until(lambda: server.application.metrics.queue == 1)
        status, headers, text = server.ask("GET", "/metrics")
        assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert "flowgrpo_reward_in_flight 2\n" in text and "flowgrpo_reward_queue_length 1\n" in text
        go_on.set()
        assert list(map(status_of, held)) == [200, 200]
        server.until(lambda: server.application.metrics.in_flight == 0)
        lines = server.ask("GET", "/metrics")[2].splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert all(re.fullmatch(r"# TYPE \w+ (counter|gauge|histogram)", line) for line in lines if line.startswith("#"))
    assert values['flowgrpo_reward_requests_total{status="200"}'] == "2"
    assert values['flowgrpo_reward_requests_total{status="404"}'] == "1"
    assert values['flowgrpo_reward_seconds_bucket{le="+Inf"}'] == values["flowgrpo_reward_seconds_count"] == "3"
    buckets = [int(value) for name, value in values.items() if "bucket" in name]
    assert buckets == sorted(buckets) and float(values["flowgrpo_reward_seconds_sum"]) >= 0


# --- the end ---------------------------------------------------------------------------------------------------------
def test_a_stopping_server_finishes_what_runs_and_refuses_the_rest():
    with held_reward() as (reward, begun, go_on), running(reward) as server:
        first = server.begin(raw(request()))
        assert begun.wait(20)
        waiting, arriving = server.begin(raw(request())), server.begin(raw(b"{", length=1000))
        server.until(lambda: server.application.metrics.in_flight == 3 and server.application.metrics.queue == 1)
        server.server.handle_exit(signal.SIGTERM, None)
        assert status_of(waiting) == status_of(arriving) == 503
        status, headers, text = server.ask()
        assert (status, headers["Retry-After"]) == (503, "5") and "the server is stopping" in text
        assert server.ask("GET", "/health")[0] == 503
        go_on.set()
        assert status_of(first) == 200
        server.thread.join(20)
        assert not server.thread.is_alive() and "Stopping" in server.said[0]


def test_the_command_makes_a_token_and_drains_on_sigterm(tmp_path):
    (tmp_path / "reward.py").write_text(
        "import pathlib, time\n\ndef slow(texts, prompts):\n    pathlib.Path('begun').touch()\n"
        "    while not pathlib.Path('go').exists():\n        time.sleep(0.01)\n    return [7.0] * len(prompts)\n")
    environment = {name: value for name, value in os.environ.items() if name != TOKEN}
    process = subprocess.Popen(
        [sys.executable, "-m", "flowgrpo", "reward", "serve", "reward.py:slow", "--port", "0"], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        port = int(re.search(r"127\.0\.0\.1:(\d+)/slow, asks for its token\n", process.stdout.readline())[1])
        token = re.fullmatch(rf".*, so a token was made: {TOKEN}=([\w-]{{43}})\n", process.stdout.readline())[1]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/slow", request(), JSON | {"Authorization": f"Bearer {token}"})
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "Stopping: what is being scored has 25 s; a second signal ends it.\n"
        (tmp_path / "go").touch()
        answer = connection.getresponse()
        assert answer.status == 200 and json.loads(answer.read())["scores"] == [7.0]
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()

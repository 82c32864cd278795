"""Access to a reward server: host names, web pages, tokens, paths, and files that a client names."""

import base64
import json
import socket

import pytest
import torch
from PIL import Image
from safetensors.torch import save

from flowgrpo import rewards
from flowgrpo.contrib.edits import Preservation
from flowgrpo.data import images
from flowgrpo.errors import UserError
from flowgrpo.rewards import clip
from flowgrpo.rewards.guards import BaseSimilarity
from flowgrpo.rewards.reward import is_privileged
from flowgrpo.rewards.vlm_judge.judge import Judge
from flowgrpo.serving import wire
from flowgrpo.serving.gate import Refused
from flowgrpo.serving.server import scored
from tests.helpers.refusals import message
from tests.helpers.reward_server import lengths, raw, request, running, status_of


# --- who may ask -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method, path", [("POST", "/mine"), ("GET", "/info"), ("GET", "/health"), ("GET", "/metrics")])
def test_another_host_name_is_refused(method, path):
    with running() as server:
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost@evil.example", "a b", ""):
            status, _, text = server.ask(method, path, Host=host)
            assert status in (400, 403), host
        assert "is not this server's: expected its address, or start the server with a token" in \
            server.ask(method, path, Host="evil.example")[2]
        for host in ("localhost", f"LOCALHOST:{server.port}", "127.0.0.1:9", "[::1]:9", "10.0.0.7",
                     socket.gethostname()):
            assert server.ask(method, path, Host=host)[0] == 200, host


def test_a_client_is_told_that_the_server_knows_another_name(monkeypatch):
    lookup = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **named: lookup("127.0.0.1", *more, **named))
    with running() as server, pytest.raises(UserError, match="the Host 'alias.example:.*start the server with a token"):
        rewards.find(f"http://alias.example:{server.port}/mine", {"retries": 0})


def test_web_pages_and_tokens():
    with running() as server, running(token="word") as guarded:
        for origin in ("http://evil.example", "null", f"http://127.0.0.1:{server.port}"):
            assert server.ask(Origin=origin)[0] == server.ask("GET", "/info", Origin=origin)[0] == 403
            assert guarded.ask(Origin=origin, Authorization="Bearer word")[0] == 403
    with running(token="word") as server:
        assert server.ask(Host="rewards.example", Authorization="Bearer word")[0] == 200
        assert server.ask(Host="rewards.example", Authorization="Bearer work")[0] == 401
        assert server.ask("GET", "/metrics")[0] == 401 and server.ask("GET", "/health")[0] == 200
        assert server.ask("GET", "/health", Host="rewards.example")[0] == 403


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
@pytest.mark.parametrize("path", ["/mine/../mine", "/./mine", "//mine", "/mine/", "/x/../mine", "/mine%2f..%2fmine",
                                  "/MINE", "/mine/.", "/%2e/mine", "/"])
def test_a_path_is_not_normalised(path):
    with running() as server:
        connection = server.begin(raw(request(), path=path))
        assert status_of(connection) == 404


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH"])
def test_other_methods_are_refused(method):
    with running() as server:
        assert server.ask(method)[0] == 405


def of_tensor(shape: tuple[int, ...], value: float) -> bytes:
    content = base64.b64encode(save({"output": torch.full(shape, float(value))})).decode()
    return json.dumps({"format": 1, "samples": [{"prompt": "p", "metadata": {}, "safetensors": content}]}).encode()


@pytest.mark.parametrize("shape, value, line", [
    ((3, 0, 0), 0, "expected one frame and one pixel at least"), ((3, 4, 0), 0, "one pixel"),
    ((0, 3, 4, 4), 0, "one frame"), ((0, 3, 0, 0), 0, "one frame"), ((2, 3, 0, 4), 0, "one pixel"),
    ((3, 4, 4), float("nan"), "holds NaN or an infinity")])
def test_a_tensor_without_pixels_or_frames_is_refused(shape, value, line):
    with running() as server:
        status, _, text = server.ask(body=of_tensor(shape, value))
    assert status == 400 and line in json.loads(text)["error"] and "\n" not in json.loads(text)["error"]


# --- files -----------------------------------------------------------------------------------------------------------
REFUSAL = "this reward reads files that the metadata name, and a reward server opens none of a client's"


@pytest.mark.parametrize("reward, key", [
    (BaseSimilarity(), "base_image"), (Preservation(), "image"), (Preservation(key="video"), "video"),
    (Judge(model="m", show=("output", "source")), "image"), (Judge(model="m", show=("output", "source")), "images"),
    (Judge(model="m", show=("output", "source")), "video"), (Preservation(key="control_image"), "control_image"),
], ids=lambda value: value if isinstance(value, str) else type(value).__name__)
def test_a_path_of_a_client_is_not_opened(reward, key, tmp_path):
    there, absent = tmp_path / "there.png", tmp_path / "absent.png"
    Image.new("RGB", (16, 16)).save(there)
    lines = []
    for path in (there, absent, tmp_path):
        sample = wire.packed(torch.zeros(3, 16, 16), "p", {key: [str(path)] if key == "images" else str(path)})
        with pytest.raises(Refused) as caught:
            scored("mine", reward, wire.request([sample]), wire.Limits())
        assert caught.value.status == 400 and str(tmp_path) not in str(caught.value)
        lines.append(str(caught.value))
    assert REFUSAL in lines[0] and len(set(lines)) == 1


@pytest.mark.parametrize("reader", [
    images.read_image, images.image_size, images.frame_count, lambda path: images.Clip.of(path, 1),
    clip._read,
], ids=["picture", "size", "frames", "clip", "subject"])
def test_no_reader_opens_a_path_of_a_client(reader, tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "there.png")
    def reading(outputs, prompts, metadata):
        lines = []
        for name in ("there.png", "absent.png"):
            lines.append(message(lambda: reader(str(tmp_path / name))))
        assert lines[0] == lines[1] and REFUSAL in lines[0]
        return [1.0]
    assert scored("mine", reading, request(), wire.Limits())["scores"] == [1.0]
    assert reader(str(tmp_path / "there.png")) is not None  # outside of a server's request

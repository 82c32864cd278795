"""Rewards behind a server: what goes over the wire, what is refused, and what a client makes of every fault.

Servers are real ones, on free ports: ours, and scripted ones that misbehave.
"""

import base64
import contextlib
import inspect
import io
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from PIL import Image

from flowgrpo import config, rewards
from flowgrpo.config.reward_rules import Retry, RewardRule
from flowgrpo.errors import UserError
from flowgrpo.rewards import About, Composed, Failed, Tally
from flowgrpo.rewards.failures import TimedOut
from flowgrpo.rewards.remote.exchange import Places, Unanswered, side_by_side
from flowgrpo.serving import wire
from flowgrpo.serving.client import TOKEN, Remote, addresses, token
from flowgrpo.serving.server import url_name
from flowgrpo.serving.wire import Limits, TooLarge
from flowgrpo.types import Completion
from tests.data.test_untrusted import png as png_head
from tests.helpers.chat_endpoint import endpoint
from tests.helpers.refusals import message, only_line
from tests.helpers.reward_server import held_reward, lengths, raw, running

PROMPTS = ["a", "bb", "ccc", "dddd", "eeeee"]
FACTS = [{"task": "größe", "count": i} for i in range(5)]
QUICK = {"wait": 0.001, "timeout": 20}


def pictures(count: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 3, 4, 6, generator=torch.Generator().manual_seed(seed))


def rounded(outputs: torch.Tensor) -> torch.Tensor:
    return (outputs * 255).round() / 255


@contextmanager
def serving(reward, name: str = "mine", limits: Limits = Limits(), token: str | None = None):
    """Our server -> the reward's URL."""
    with running(reward, token=token, limits=limits, name=name) as server:
        yield f"http://127.0.0.1:{server.port}/{name}"


def dead() -> str:
    """A URL where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"http://127.0.0.1:{closed.getsockname()[1]}/mine"


def body(*prompts: str, **more) -> bytes:
    samples = [wire.pack(picture, prompt, {}) for picture, prompt in zip(pictures(len(prompts)), prompts)]
    return json.dumps(json.loads(wire.request(samples)) | more).encode()


def post(url: str, content: bytes, **headers) -> tuple[int, str]:
    """Status and line of a refusal."""
    sent = {"Content-Type": "application/json"} | headers
    answer = httpx.post(url, content=content, headers=sent, trust_env=False)
    told = answer.json()
    assert told.keys() == {"error"} and "\n" not in told["error"] and "Traceback" not in answer.text
    return answer.status_code, told["error"]


def brightness(images, prompts, metadata):
    """The mean of an image, times its count; None for a prompt of three letters."""
    return [None if len(prompt) == 3 else picture.double().mean().item() * entry["count"]
            for picture, prompt, entry in zip(images, prompts, metadata)]


brightness.about = About(modality="image", range=(0, None), needs="", licence="MIT")


def recorded(reward=lengths):
    """`reward`, with the prompts of every call under `calls`."""
    def recording(outputs, prompts):
        recording.calls.append(list(prompts))
        return reward(outputs, prompts)
    recording.calls = []
    return recording


# --- the wire --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [(3, 4, 6), (2, 3, 4, 6)])
def test_images_and_videos_arrive(shape, exact):
    outputs = torch.rand(5, *shape, generator=torch.Generator().manual_seed(1))
    samples = [wire.pack(*sample, exact) for sample in zip(outputs, PROMPTS, FACTS)]
    got = wire.unpack(wire.request(samples, 5), Limits())
    assert got.samples.dtype == torch.float32 and torch.equal(got.samples, outputs if exact else rounded(outputs))
    assert (got.prompts, got.metadata, got.group) == (PROMPTS, FACTS, 5)


def test_requests_by_hand_texts_and_sizes():
    got = wire.unpack(wire.request([wire.pack("ünd\n\0", "p", {})]), Limits())
    assert got.samples == ["ünd\n\0"]
    got = wire.unpack(of({"png": png(2, 1, colour=(255, 0, 51))}), Limits())
    assert got.group == 1 and got.samples.shape == (1, 3, 1, 2)
    torch.testing.assert_close(got.samples[0, :, 0, 0], torch.tensor([1, 0, 0.2]), rtol=0, atol=1e-7)
    samples = [wire.pack(picture, "p", {}) for picture in pictures()]
    size = len(wire.request(samples, 5))
    assert size <= wire._size([len(sample) for sample in samples], range(5)) <= size + 64


def png(width: int, height: int, mode: str = "RGB", colour=0) -> str:
    file = io.BytesIO()
    Image.new(mode, (width, height), colour).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def of(*contents: dict, **more) -> bytes:
    samples = [{"prompt": "p", "metadata": {}} | content for content in contents]
    return json.dumps({"format": 1, "samples": samples} | more).encode()


def tensors(**named: torch.Tensor) -> str:
    from safetensors.torch import save
    return base64.b64encode(save(named)).decode()


def of_tensor(output: torch.Tensor) -> bytes:
    return of({"safetensors": tensors(output=output)})


@pytest.mark.parametrize("sent, line", [
    (b"\x80\x04K\x01.", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'{"format": 1, "samples": [%s[]]}' % (b"[]," * 2**20), "not JSON of 1048576 lists and objects at most"),
    (b"[]", "format: got no object, expected 1"),
    (of({"text": "t"}, format=2), "format: got 2, expected 1"),
    (of(), "expected `samples`, a list of objects"),
    (of(samples=[3]), "expected `samples`, a list of objects"),
    (of({"text": "t"}, group=0), "group is 0, expected a divisor of the 1 sample"),
    (of({"text": "t"}, group=2), "group is 2"),
    (of({"text": "t"}, group=True), "group is True"),
    (of({"text": "t", "prompt": None}), "expected a text under `prompt`"),
    (of({"text": "t", "metadata": []}), "an object under `metadata`"),
    (of({}), "expected one of `png`, `safetensors` and `text`"),
    (of({"text": "t"}, {"png": png(1, 1)}), "the same in every sample"),
    (of({"text": 3}), "expected a text under `text`"),
    (of({"png": 3}), "expected base64"),
    (of({"png": "%%%"}), "base64"),
    (of({"png": base64.b64encode(b"GIF89a").decode()}), "not a PNG"),
    (of({"png": base64.b64encode(wire.SIGNATURE + b"\0\0\0\r").decode()}), "a PNG that is cut in its header"),
    (of({"png": png(40, 40)[:80]}), "not a whole PNG"),
    (of({"png": png(1, 1, "RGBA")}), "a PNG of the mode RGBA, expected RGB"),
    (of({"png": []}), "frames"),
    (of({"png": [png(1, 1), png(2, 1)]}), "frames of a video to be of one size"),
    (of({"png": png(1, 1)}, {"png": png(2, 1)}), "images or videos of one size"),
    (of({"safetensors": "AAAA"}), "not a safetensors file"),
    (of({"safetensors": tensors(a=torch.zeros(1), b=torch.zeros(1))}), "not a safetensors file with one tensor"),
    (of_tensor(torch.zeros(1, 4, 4)), "expected floats 'output'"),
    (of_tensor(torch.zeros(3, 4, 4).int()), "expected floats 'output'"),
    (of({"safetensors": tensors(other=torch.zeros(3, 4, 4))}), "expected floats 'output'"),
    (of_tensor(torch.zeros(3, 1, 1).to(torch.float8_e4m3fn)), "is float8_e4m3fn [3, 1, 1]"),
    (of_tensor(torch.zeros(3, 1, 1).to(torch.float8_e5m2)), "or float64"),
    (of_tensor(torch.full((3, 4, 4), 1e30)), "values from 1e+30 to 1e+30, expected 0 to 1"),
    (of_tensor(torch.full((3, 4, 4), -0.5)), "values from -0.5 to -0.5"),
    (of_tensor(torch.zeros(3, 0, 0)), "expected one frame and one pixel at least"),
    (of_tensor(torch.zeros(3, 4, 0)), "one pixel"), (of_tensor(torch.zeros(0, 3, 4, 4)), "one frame"),
    (of_tensor(torch.zeros(0, 3, 0, 0)), "one frame"), (of_tensor(torch.zeros(2, 3, 0, 4)), "one pixel"),
    (of_tensor(torch.full((3, 4, 4), math.nan)), "holds NaN or an infinity")])
def test_what_is_no_request_is_refused(sent, line):
    assert line in message(wire.unpack, sent, Limits(), error=ValueError)


def test_floats_of_every_common_width_arrive():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        sent = torch.tensor([0.0, 0.25, 1.0], dtype=dtype).view(3, 1, 1)
        got = wire.unpack(of_tensor(sent), Limits()).samples
        assert got.dtype == torch.float32 and torch.equal(got[0], sent.float())


def head(width: int, height: int) -> str:
    """A PNG that says how large it is, and holds nothing."""
    return base64.b64encode(png_head(width, height)).decode()


@pytest.mark.parametrize("sent", [
    of({"png": head(2049, 2048)}), of({"png": head(2**30, 1)}),
    of({"png": [png(1000, 1000)] * 3}), of(*[{"png": png(1000, 1000)}] * 2, {"png": head(1000, 1000)}),
    of_tensor(torch.zeros(3, 3, 1000, 1000, dtype=torch.float16)), of(*[{"text": "t"}] * 5),
], ids=["bomb", "wide", "frames", "batch", "tensor", "samples"])
def test_what_is_too_large_is_refused_before_it_is_unpacked(sent):
    assert message(wire.unpack, sent, Limits(samples=4, all_pixels=2_500_000), error=TooLarge)


@pytest.mark.parametrize("answer, line", [
    (b"<html>busy</html>", "not JSON"), (b"{}", "format"), (b'{"format": 1}', "no list of scores, expected 2"),
    (b'{"format": 1, "scores": [1]}', "it sent 1 scores, expected 2"),
    (b'{"format": 1, "scores": [1, NaN]}', "the score nan"), (b'{"format": 1, "scores": [-Infinity, 0]}', "-inf"),
    (b'{"format": 1, "scores": [1, 1e39]}', "1e+39"), (b'{"format": 1, "scores": [1, "1"]}', "'1'"),
    (b'{"format": 1, "scores": [1, true]}', "True"), (b'{"format": 1, "scores": [1, [0]]}', "[0]"),
    (b'{"format": 1, "scores": [1, 1%s]}' % (b"0" * 400), "finite")])
def test_answers_are_checked(answer, line):
    assert line in message(wire.scores, answer, 2, error=ValueError)
    assert wire.scores(b'{"format": 1, "scores": [1, -2.5, null]}', 3) == [1, -2.5, None]


def test_what_cannot_be_sent_is_told():
    broken = pictures(1)[0]
    broken[0, 0, 0] = math.nan
    assert "holds NaN or an infinity (prompt: 'p')" in message(wire.pack, broken, "p", {}, error=Failed)
    for value in ({1, 2}, math.inf):
        told = message(wire.pack, pictures(1)[0], "p", {"of": value})
        assert "metadata that go to a reward server have to be JSON" in told


@pytest.mark.parametrize("sizes, pixels, limits, unit, ways, parts", [
    ([100] * 5, 1, Limits(samples=2), 1, 1, [(0, 2), (2, 4), (4, 5)]),
    ([100] * 5, 1, Limits(), 1, 1, [(0, 5)]),
    ([100] * 5, 1, Limits(), 1, 2, [(0, 3), (3, 5)]),
    ([100] * 2, 1, Limits(), 1, 5, [(0, 1), (1, 2)]),
    ([100] * 5, 30, Limits(all_pixels=100), 1, 1, [(0, 3), (3, 5)]),
    ([100, 100, 300, 100], 1, Limits(size=64 + 404), 1, 1, [(0, 2), (2, 4)]),  # 200 + 4 and 400 + 4
    ([100, 100, 300, 100], 1, Limits(size=64 + 403), 1, 1, [(0, 2), (2, 3), (3, 4)]),
    ([100] * 6, 1, Limits(samples=5), 2, 1, [(0, 4), (4, 6)]),
    ([100] * 6, 1, Limits(), 2, 2, [(0, 4), (4, 6)]),
    ([], 1, Limits(), 1, 2, [])])
def test_a_batch_is_parted_within_the_limits(sizes, pixels, limits, unit, ways, parts):
    assert wire.split_requests(sizes, pixels, limits, unit, ways) == [range(*part) for part in parts]


def test_a_group_that_does_not_fit_is_told():
    for limits in (Limits(samples=1), Limits(size=200), Limits(all_pixels=19)):
        told = message(wire.split_requests, [100] * 4, 10, limits, 2, error=TooLarge)
        assert "2 samples of 0.0 MiB and 20 pixels" in told


# --- a server and its client -----------------------------------------------------------------------------------------
def test_a_remote_reward_scores_as_the_reward_itself():
    outputs = rounded(pictures())
    expected = rewards.score({"r": brightness}, outputs, PROMPTS, FACTS)
    with serving(brightness) as url:
        for exact in (False, True):
            remote = rewards.find(url, QUICK | {"exact": exact})
            assert remote(outputs, PROMPTS, FACTS)[2] is None
            found = rewards.score({"r": remote}, outputs, PROMPTS, FACTS)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            assert remote([], [], []) == []
        assert remote.about == About("image", (0, None), "server", "MIT")
        assert "'http" in message(rewards.require_modality, {url: remote}, "text")
        assert httpx.get(url.replace("mine", "health"), trust_env=False).json() == {"status": "ok"}


def test_recipes_name_a_server():
    with serving(lengths) as url:
        rules = config.validate({"reward": {url: 1.0, "far": {"use": url, "args": QUICK, "cache": True}}}).trained
        with tempfile.TemporaryDirectory() as folder:
            found = rewards.compose(rules, cache=folder)
            assert rewards.score(found, pictures(2), PROMPTS[:2], FACTS[:2]).tolist() == [[1, 1], [2, 2]]
        assert list(config.validate({"reward": url}).trained) == [url]
    page = (Path(__file__).parents[2] / "docs" / "reward_server.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```\n(reward:\n  \"http.*?)```", page, re.S)
    rules = config.validate(yaml.safe_load(block)).trained
    assert rules["far"].on_error == "skip" and len(addresses(rules["far"].use)) == 2
    for name, rule in rules.items():
        inspect.signature(rewards.locate(rule.use or name)).bind(**rule.args)


@pytest.mark.fast
def test_texts_metadata_and_exact_floats():
    with serving(lambda texts, prompts: [len(text) for text in texts]) as url:
        assert Remote(url, **QUICK)(["a", "", "ccc"], PROMPTS[:3], [{}] * 3) == [1, 0, 3]
    facts = [{"answer": "Gr\u00f6\u00dfe"}, {}, {"answer": "x"}]
    with serving(rewards.find("exact_match")) as url:
        remote = Remote(url, **QUICK)
        found = rewards.score({"r": remote}, ["gr\u00f6\u00dfe\u2028", "b", ""], PROMPTS[:3], facts)
        thought = rewards.score({"r": remote}, [Completion("x", 1, opened=tag) for tag in ("", "<think>")],
                                PROMPTS[:2], [{"answer": "x"}] * 2)
    assert remote.about.modality == "text" and found[:, 0].nan_to_num(9).tolist() == [1, 9, 0]
    assert thought[:, 0].tolist() == [1, 0]
    with serving(lambda images, prompts: images[:, 0, 0, 0]) as url:
        fine = torch.full((1, 3, 4, 4), 0.1234567)
        assert Remote(url, exact=True, **QUICK)(fine, ["p"], [{}]) == [fine[0, 0, 0, 0].item()]
        assert Remote(url, **QUICK)(fine, ["p"], [{}]) == [pytest.approx(31 / 255, abs=1e-7)]


def test_a_judge_sees_whole_groups():
    def longer(first, second, prompts, metadata):
        return (first.mean((1, 2, 3)) > second.mean((1, 2, 3))).double().tolist()
    longer.pairwise = True
    outputs, prompts = rounded(pictures(6)), ["a"] * 3 + ["b"] * 3
    expected = rewards.score({"r": longer}, outputs, prompts, [{}] * 6, group=3)
    with serving(longer, limits=Limits(samples=5)) as url:
        remote = Remote(url, **QUICK)
        assert remote.group and torch.equal(rewards.score({"r": remote}, outputs, prompts, [{}] * 6, group=3), expected)
        assert "compares the samples of a group" in message(rewards.score, {"r": remote}, outputs, prompts, [{}] * 6)


def test_a_batch_goes_to_all_servers_in_parts():
    first, second = recorded(), recorded()
    with serving(first, limits=Limits(samples=2)) as one, serving(second, limits=Limits(samples=2)) as other:
        assert Remote(f"{one}, {other}/", **QUICK)(pictures(), PROMPTS, FACTS) == [1, 2, 3, 4, 5]
    assert sorted(first.calls + second.calls) == [["a", "bb"], ["ccc", "dddd"], ["eeeee"]]
    assert first.calls and second.calls


def test_one_batch_is_scored_at_a_time():
    inside, most = [], []
    def slow(images, prompts):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return lengths(images, prompts)
    with serving(slow) as url:
        remote = Remote(url, **QUICK)
        found = side_by_side(lambda part: remote(pictures(1), [PROMPTS[part.start]], [{}]),
                             [range(i, i) for i in range(5)], 5)
    assert found == [[1], [2], [3], [4], [5]] and most == [1] * 5


def test_what_nobody_waits_for_is_not_scored():
    with held_reward() as (held, begun, go_on), serving(seen := recorded(held)) as url:
        first = threading.Thread(target=Remote(url, **QUICK), args=(pictures(1), ["first"], [{}]))
        first.start()
        assert begun.wait(20)
        with pytest.raises(TimedOut):
            Remote(url, timeout=1, retries=0)(pictures(1), ["given up"], [{}])
        go_on.set()
        assert Remote(url, **QUICK)(pictures(1), ["last"], [{}]) == [4]
        first.join()
    assert seen.calls == [["first"], ["last"]]


# --- what a server refuses -------------------------------------------------------------------------------------------
def test_a_reward_that_fails_is_told_in_one_line():
    def broken(images, prompts):
        raise ArithmeticError("first\nsecond")
    with serving(broken) as url:
        status, line = post(url, body("a"))
        assert status == 422 and "reward 'mine' raised on 1 sample" in line and "ArithmeticError: first second" in line
        told = message(Remote(url, **QUICK), pictures(1), ["a"], [{}], error=Failed)
        assert told.startswith(f"reward '{url}': {url} answered 422: reward 'mine' raised") and "asked" not in told
    answers = iter([[1], [1, math.nan], None, "scores", [1, [2, 3]]])
    with serving(lambda images, prompts: next(answers)) as url:
        for _ in range(5):
            status, line = post(url, body("a", "b"))
            assert status == 422 and "reward 'mine' returned" in line


@pytest.mark.fast
def test_failures_over_there():
    def choking(images, prompts):
        if "bb" in prompts:
            raise ArithmeticError("too much")
        return lengths(images, prompts)
    with serving(choking) as url:
        tally, remote = Tally(), Composed(Remote(url, **QUICK), RewardRule(on_error="skip"))
        found = rewards.score({"r": remote}, pictures(3), PROMPTS[:3], [{}] * 3, tally=tally)[:, 0].tolist()
    assert found[::2] == [1, 3] and math.isnan(found[1]) and tally.failed == {"r": 1}
    def shy(images, prompts):
        return [Failed("a judge\ndeclined") if prompt == "bb" else None if prompt == "a" else 1 for prompt in prompts]
    with serving(shy) as url:
        tally = Tally()
        found = rewards.score({"r": Remote(url, **QUICK)}, pictures(3), PROMPTS[:3], [{}] * 3, tally=tally)[:, 0]
    assert found.isnan().tolist() == [True, True, False]
    assert tally.failed == {"r": 1} and tally.said == {"r": "a judge declined"}
    def lacking(images, prompts):
        raise UserError("reward 'mine' needs a package")
    with serving(lacking) as url:
        assert post(url, body("a")) == (400, "reward 'mine' needs a package")
        remote = Composed(Remote(url, **QUICK), RewardRule(on_error="skip"))
        told = message(rewards.score, {"r": remote}, pictures(1), ["a"], [{}])
        assert told == f"reward '{url}': {url} answered 400: reward 'mine' needs a package"


def test_unfit_requests_are_refused_and_the_server_lives():
    with serving(lengths, limits=Limits(size=30_000, samples=2)) as url:
        for sent, status in ((b"garbage", 400), (of({"png": head(5000, 5000)}), 413), (of(*[{"text": "t"}] * 3), 413),
                             (b" " * 30_001, 413), (b" " * 100_000, 413)):
            assert post(url, sent)[0] == status
            assert Remote(url, **QUICK)(pictures(1), ["a"], [{}]) == [1]
        with contextlib.suppress(httpx.TransportError):  # the refusal may be lost with what was not read
            assert post(url, b" " * 2_000_000)[0] == 413
        assert Remote(url, **QUICK)(pictures(1), ["a"], [{}]) == [1]


def test_foreign_requests_and_a_client_that_breaks_off(caplog):
    with serving(lengths) as url:
        assert post(url + "r", body("a")) == (404, "this server has the reward 'mine' alone")
        assert post(url, body("a"), **{"Content-Type": "text/plain"})[0] == 415
        assert httpx.get(url.replace("mine", "docs"), trust_env=False).status_code in (404, 405)
        with socket.create_connection(("127.0.0.1", int(url.split(":")[2].partition("/")[0]))) as half:
            half.sendall(raw(b"{", length=99))
        assert Remote(url, **QUICK)(pictures(1), ["a"], [{}]) == [1]
    assert "Exception in ASGI" not in caplog.text


def test_unfit_requests_are_told_in_the_words_of_the_protocol():
    with serving(lengths) as url:
        for sent, headers, status, told in (
                (b"\x1f\x8b\x08\x00", {"Content-Encoding": "gzip"}, 415, "the Content-Encoding 'gzip', expected none"),
                (of({"png": "AAAA"}), {}, 400, "not a PNG: it begins with the bytes 00 00 00"),
                (of({"text": "t"}, format=True), {}, 400, "format: got True, expected 1"),
                (of({"text": "t \ud83d"}), {}, 400, "half of a surrogate pair"),
                (of({"text": "t", "prompt": "\ud800"}), {}, 400, "half of a surrogate pair")):
            found, line = post(url, sent, **headers)
            assert found == status and told in line and "0x" not in line
        kind = {"Content-Type": "Application/JSON"}
        assert httpx.post(url, content=of({"text": "\U0001f600"}), headers=kind, trust_env=False).status_code == 200


def test_a_sample_beyond_the_limits_is_told_with_the_option():
    with serving(lengths, limits=Limits(size=300)) as url:
        told = message(Remote(url, **QUICK), torch.rand(1, 3, 32, 32), ["a"], [{}])
        assert "--max-mb" in told and url in told
    with serving(lengths, limits=Limits(pixels=100)) as url:
        told = message(Remote(url, **QUICK), torch.rand(1, 3, 32, 32), ["a"], [{}])
        assert "answered 413: an image of 32 x 32" in told


def test_the_token(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("s3cret\n")
    wrong.write_text("s3cres")
    with serving(lengths, token=token(right)) as url:
        for headers in ({}, {"Authorization": "s3cret"}, {"Authorization": "Bearer s3cre"},
                        {"Authorization": "Bearer s3cret\xe9".encode("latin-1")}):
            status, line = post(url, b"never read", **headers)
            assert status == 401 and "s3cret" not in line
        assert httpx.get(url.replace("mine", "info"), trust_env=False).status_code == 401
        assert httpx.get(url.replace("mine", "health"), trust_env=False).status_code == 200
        assert f"expects a token: set {TOKEN}" in message(rewards.find, url, QUICK)
        assert "expects another token" in message(rewards.find, url, QUICK | {"token_file": str(wrong)})
        assert rewards.find(url, QUICK | {"token_file": str(right)})(pictures(1), ["a"], [{}]) == [1]
        monkeypatch.setenv(TOKEN, "s3cret")
        assert Remote(url, **QUICK)(pictures(1), ["a"], [{}]) == [1]
    monkeypatch.setenv(TOKEN, "two words")
    assert f"the environment variable {TOKEN} holds no token" in message(token, None)
    right.write_text("\n")
    assert "holds no token" in message(token, right)
    assert "cannot be read (FileNotFoundError)" in message(token, tmp_path / "none")


# --- faults ----------------------------------------------------------------------------------------------------------
@contextmanager
def faulty(*steps):
    """A server whose POSTs go wrong in turn: steps are (status, body), "cut" (half an answer), or "hang"; after them it
    answers the lengths of the prompts."""
    def reply(body, number):
        well = {"format": 1, "scores": [len(sample["prompt"]) for sample in body["samples"]]}
        step = steps[number - 1] if number <= len(steps) else "well"
        if not isinstance(step, str):
            return step[0], {}, step[1]
        length = {"cut": {"Content-Length": "500"}}.get(step, {})
        return 200, {"Connection": "close"} | length, threading.Event() if step == "hang" else well
    with endpoint(reply) as server:
        server.models = 200, {"Connection": "close"}, wire.Info("mine", About(), False, Limits()).as_json()
        yield server


FAULTS = {
    "500": ((500, b'{"error": "out of memory"}'), "answered 500: out of memory"),
    "503": ((503, b"<html>"), "answered 503"),
    "429": ((429, b'{"error": "slowly"}'), "answered 429: slowly"),
    "a 404 of something between": ((404, b"<html>no backend</html>"), "answered 404"),
    "a redirection": ((302, b""), "answered 302"),
    "garbage": ((200, b"\x80\x04]\x94."), "gave no proper answer: not JSON"),
    "too few": ((200, b'{"format": 1, "scores": [1.0]}'), "it sent 1 scores, expected 2"),
    "too many": ((200, b'{"format": 1, "scores": [1, 2, 3]}'), "it sent 3 scores, expected 2"),
    "not a number": ((200, b'{"format": 1, "scores": [1, NaN]}'), "it sent the score nan"),
    "another format": ((200, b'{"format": 2, "scores": [1, 2]}'), "format: got 2, expected 1"),
    "without end": ((200, b"x" * (2**24 + 1)), "it sent more than"),
    "cut": ("cut", "gave no answer (RemoteProtocolError"),
    "slow": ("hang", "gave no answer within 1 s")}


@pytest.mark.fast
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_retried_and_told(fault):
    (step, line), asked = FAULTS[fault], (pictures(2), PROMPTS[:2], FACTS[:2])
    with faulty(step, "well", step, step) as server:
        url = f"{server.url}/mine"
        remote = Remote(url, timeout=1 if fault == "slow" else 20, wait=0.001, retries=1)
        assert remote(*asked) == [1, 2] and len(server.seen) == 2
        told = message(remote, *asked, error=TimedOut)
        assert told.startswith(f"reward '{url}': {url} ") and line in told and told.endswith("(asked 2 times)")
        assert len(server.seen) == 4


def test_an_outage_follows_the_policy_of_the_recipe():
    with faulty(*[(500, b"")] * 9) as server:
        tally, remote = Tally(), Remote(f"{server.url}/mine", wait=0.001, retries=0)
        def ask(on_error) -> list[float]:
            rule = RewardRule(on_error=on_error)
            return rewards.score({"r": Composed(remote, rule)}, pictures(2), PROMPTS[:2], FACTS[:2], tally=tally)[:, 0]
        assert ask("skip").isnan().all() and tally.failed == {"r": 2} and "answered 500" in tally.said["r"]
        assert len(server.seen) == 1  # not sample by sample
        assert "answered 500" in message(ask, "raise") and len(server.seen) == 2
        assert ask(Retry(retry=8, wait=0)).tolist() == [1, 2] and len(server.seen) == 10


def test_a_dead_server_is_passed_over():
    gone = dead()
    with faulty((500, b"")) as server:
        remote = Remote(f"{gone},{server.url}/mine", wait=0.001, retries=1)
        assert remote(pictures(), PROMPTS, FACTS) == [1, 2, 3, 4, 5]
        asked = len(server.seen)
        for _ in range(3):
            assert remote(pictures(1), ["a"], [{}]) == [1]
        assert len(server.seen) == asked + 3
    told = message(remote, pictures(1), ["a"], [{}], error=TimedOut)
    assert "ConnectError" in told and "(asked 3 times)" in told


def test_urls_take_turns_and_rest_after_a_failure(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    places, taken = Places(["a", "b", "c"]), []
    def take(fails: bool = False) -> str:
        with places.turn() as url:
            taken.append(url)
            if fails:
                raise Unanswered
        return url
    assert [take() for _ in range(4)] == ["a", "b", "c", "a"]
    with pytest.raises(Unanswered):
        take(fails=True)
    assert taken[-1] == "b" and [take() for _ in range(3)] == ["c", "a", "c"]
    with places.turn() as busy:
        assert busy == "a" and [take() for _ in range(2)] == ["c", "c"]
    now[0] = 31.0
    assert take() == "b"
    for failed in ("a", "c", "b"):
        now[0] += 1
        with pytest.raises(Unanswered):
            take(fails=True)
        assert taken[-1] == failed
    assert take() == "a"  # all rest: the one that has rested the longest


    def call(part: range) -> int:  # the first error of several parts is raised
        if part.start == 1:
            raise Failed("second")
        return part.start
    assert "second" in message(side_by_side, call, [range(i, i) for i in range(4)], 2, error=Failed)


def test_a_server_killed_mid_batch_is_replaced_by_the_other(tmp_path):
    """The whole command: what it prints, what it serves, and a kill while it scores."""
    (tmp_path / "reward.py").write_text(
        "import pathlib, time\n\ndef slow(images, prompts):\n"
        "    if 'wait' in prompts:\n        pathlib.Path('begun').touch()\n        time.sleep(600)\n"
        "    return [10 * len(prompt) for prompt in prompts]\n")
    (tmp_path / "token").write_text("word\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "flowgrpo", "reward", "serve", "reward.py:slow", "--port", "0", "--token-file", "token"],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        line = process.stdout.readline()
        assert line.startswith("reward 'slow' at http://127.0.0.1:") and line.endswith("/slow, asks for its token\n")
        url, answers = line.split()[3].rstrip(","), []
        with serving(lengths, "slow", token="word") as other:
            alone = Remote(url, token_file=tmp_path / "token", **QUICK)
            assert alone(pictures(2), ["a", "bb"], [{}, {}]) == [10, 20]
            both = Remote(f"{url},{other}", token_file=tmp_path / "token", **QUICK)  # asks the first for its info
            both(pictures(1), ["x"], [{}])  # the other's turn
            asking = threading.Thread(target=lambda: answers.extend(both(pictures(1), ["wait"], [{}])))
            asking.start()
            while not (tmp_path / "begun").exists():
                assert asking.is_alive()
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            asking.join()
            assert answers == [4]
        assert "ConnectError" in message(Remote.__call__, alone, pictures(1), ["a"], [{}], error=TimedOut)
    finally:
        process.kill()
        process.communicate()


# --- names, arguments, commands --------------------------------------------------------------------------------------
def test_a_server_and_its_url():
    assert callable(rewards.locate(dead()))
    assert url_name("a/b.py:red") == "red" and url_name("scene") == "scene"
    info = wire.Info("mine", brightness.about, True, Limits(samples=3))
    assert wire.Info.read(json.dumps(info.as_json()).encode()) == info
    for name in ("http://", "http://host", "http://host/", "http://host:0/a", "http://host:x/a", "http://u:p@host/a",
                 "http://host/a?b=1", "http://host/a,", "http://host/a,ftp://b/a"):
        assert "expected http://host:port/NAME" in message(rewards.locate, name)
    assert addresses("http://[::1]:1/a/, https://b/a") == ["http://[::1]:1/a", "https://b/a"]


def test_what_is_wrong_at_the_start_is_told():
    gone = dead()
    told = message(rewards.find, gone, {"wait": 0.001, "retries": 1})
    assert gone.replace("mine", "info") in told and told.endswith("is a server running there, and is the URL right?")
    with serving(lengths) as url:
        assert f"the server has the reward 'mine', and {url}r names another" in message(rewards.find, url + "r", QUICK)
        assert "takes no argument 'timeot'" in message(rewards.find, url, {"timeot": 3})
        assert "got timeout 0" in message(rewards.find, url, {"timeout": 0})
    with faulty() as server:
        assert rewards.find(f"{server.url}/mine").about == About(needs="server")
    for info in (b"{}", b'{"format": 1}', b'{"format": 1, "name": "mine", "about": 3, "group": false}',
                 json.dumps(wire.Info("m", About(), False, Limits(samples=0)).as_json()).encode()):
        assert message(wire.Info.read, info, error=ValueError)


def test_mistakes_of_the_command_are_told(capsys, tmp_path, monkeypatch):
    assert "unknown reward 'scenne': did you mean 'scene'?" in only_line(capsys, "reward", "serve", "scenne")
    assert "cannot be read" in only_line(capsys, "reward", "serve", "scene", "--token-file", tmp_path / "none")
    assert "--max-batch" in only_line(capsys, "reward", "serve", "scene", "--max-batch", 0)
    assert "takes no argument 'lang'" in only_line(capsys, "reward", "serve", "ocr", "--args", "{lang: en}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"listen on 127.0.0.1 port {port}" in only_line(capsys, "reward", "serve", "scene", "--port", port)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'flowgrpo[server]'" in only_line(capsys, "reward", "serve", "scene")


def test_the_help_loads_neither_torch_nor_a_server():
    code = ("import sys, flowgrpo.cli as c; r = c.main(['serve-reward', '--help']); "
            "sys.exit(r or any(m in sys.modules for m in ('torch', 'uvicorn', 'httpx')) * 7)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "--token-file" in done.stdout

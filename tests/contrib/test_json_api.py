"""Rewards behind a JSON API: what is sent, what is read of every answer, and what becomes of every fault, against real
servers on this machine."""

import base64
import contextlib
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo import rewards
from flowgrpo.config import load
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.contrib.json_api import Http, Meter, Template, value_at
from flowgrpo.errors import UserError
from flowgrpo.rewards import Failed
from flowgrpo.rewards.failures import TimedOut
from tests.helpers.chat_endpoint import endpoint
from tests.helpers.refusals import message
from tests.helpers.servers import running
from tests.helpers.tiny_runs import lines

ROOT = Path(__file__).parents[2]
KEY = "k-2f9a.secret_of-the-test"
IMAGE = torch.arange(48).view(3, 4, 4) / 255


@contextlib.contextmanager
def api(answer: Callable[[dict, dict], tuple[int, object]]) -> Iterator[str]:
    """URL of an API that answers `answer(request, headers)`, a status and JSON, or bytes."""
    def reply(body: dict, number: int) -> tuple[int, dict, object]:
        path, headers, _ = server.seen[number - 1]
        status, content = answer(body, headers | {"path": path})
        return status, {}, content
    with endpoint(reply) as server:
        yield server.url.removesuffix("/v1")


def scored(url: str, count: int = 1, **settings) -> list:
    reward = Http(url=url, **{"request": {"p": "{prompt}"}, "wait": 0.0, "retries": 0} | settings)
    return reward(IMAGE.expand(count, -1, -1, -1), [f"p{i}" for i in range(count)], [{"i": i} for i in range(count)])


# --- what is sent -----------------------------------------------------------------------------------------------------
def decoded(text: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


def test_templates_take_values_images_videos_and_texts():
    template = Template({"a": ["{prompt}", 1, None],
                         "b": {"c": "{metadata.of.n}", "d": "n={metadata.of.n} {prompt}"},
                         "url": "data:image/png;base64,{image}",
                         "all": "{metadata}", "{prompt}": "{}"})
    filled = template.fill(IMAGE, "say {image}", {"of": {"n": 3}})
    picture = filled.pop("url").partition("data:image/png;base64,")[2]
    assert (decoded(picture) == np.arange(48).reshape(3, 4, 4).transpose(1, 2, 0)).all()
    assert filled == {"a": ["say {image}", 1, None], "b": {"c": 3, "d": "n=3 say {image}"}, "all": {"of": {"n": 3}},
                      "{prompt}": "{}"}
    clip = torch.stack([IMAGE + i / 255 for i in range(5)])
    frames = Template("{frames}", frames=3).fill(clip, "", {})
    assert [int(decoded(frame)[0, 0, 0]) for frame in frames] == [0, 2, 4]
    assert len(Template("{frames}").fill(IMAGE, "", {})) == 1
    assert Template(["{text}"]).fill("an answer", "", {}) == ["an answer"]
    assert decoded(Template("{image}", longest=2).fill(IMAGE, "", {})).shape == (2, 2, 3)


@pytest.mark.parametrize("slot, output, said", [
    ("{image}", "text", "its samples are texts: write {text}"),
    ("{image}", IMAGE[None], "its samples are videos: write {frames}"),
    ("{text}", IMAGE, "its samples are images: write {image}"),
    ("{metadata.b}", "text", "the prompt's metadata has no 'b': 'b' is not in an object of a"),
    ("{image}", IMAGE / 0, "holds NaN")])
def test_a_slot_that_cannot_be_filled_is_told(slot, output, said):
    assert said in message(Template({"x": slot}).fill, output, "", {"a": 1})


def test_unknown_slots_and_missing_keys():
    assert message(Http, url="http://h/s", request={"x": ["{promt}"]}) == \
        "reward 'http': its request has the slot {promt}: did you mean 'prompt'?"
    assert value_at([1, {"a": 2}], "1.a", "x") == 2
    assert message(value_at, {"a": {}}, "a.b", "its answer") == \
        "its answer has no 'a.b': 'b' is not in an object of no keys"


# --- what is read -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("answer, path, score", [
    ({"score": 0.5}, "score", 0.5), ({"a": [{"b": 2}, {"b": -3}]}, "a.1.b", -3.0), (7, "", 7.0),
    ({"ok": True}, "ok", 1.0), ({"ok": False}, "ok", 0.0), ({"score": None}, "score", None)])
def test_a_number_at_a_path_is_the_score(answer, path, score):
    with api(lambda request, headers: (200, answer)) as url:
        assert scored(url, answer=path) == [score]


@pytest.mark.parametrize("answer, said", [
    ({"error": "busy", "id": 3}, "has no 'score.0': 'score' is not in an object of error, id"),
    ({"score": [], }, "'0' is not in a list of 0"), ({"score": 4}, "'0' is not in a value of type int"),
    ({"score": ["high"]}, "a value of type str for a score"), ({"score": [10**400]}, "a value of type int for a score"),
    (b'{"score": [NaN]}', "a value of type float for a score")])
def test_an_answer_without_a_number_fails_its_sample_alone(answer, said):
    with api(lambda request, headers: (200, answer if request["p"] == "p1" else {"score": [1]})) as url:
        first, second, third = scored(url, 3, answer="score.0")
    assert (first, third) == (1.0, 1.0) and isinstance(second, Failed) and said in str(second)


def test_requests_keep_their_order_and_faults_are_asked_again():
    with api(lambda request, headers: (200, {"score": int(request["p"][1:])})) as url:
        assert scored(url, 40, concurrency=8) == list(range(40))
    seen: list[int] = []
    def answer(request, headers):
        seen.append(0)
        return ((500, {}), (429, {}), (200, b"no JSON"), (200, {"score": 4}))[len(seen) - 1]
    with api(answer) as url:
        reward = Http(url=url + "/s", retries=3, wait=0.0, cost=0.25)
        assert reward(IMAGE[None], ["p"], [{}]) == [4.0]
    assert len(seen) == 4 and reward.meter.total_cost == 1.0
    with api(lambda request, headers: (503, {"error": "down"})) as url:
        said = message(scored, url + "/s", retries=1, error=TimedOut)
    assert said == f"reward 'http': {url}/s answered 503: {{\"error\": \"down\"}} (asked 2 times)"


def test_no_more_requests_than_allowed_are_open():
    open_, most, lock = 0, 0, threading.Lock()
    three = threading.Barrier(3, timeout=20)
    def answer(request, headers):
        nonlocal open_, most
        with lock:
            open_, most = open_ + 1, max(most, open_ + 1)
        three.wait()  # proves that three are open, and would break with fewer
        with lock:
            open_ -= 1
        three.wait()
        return 200, {"score": 0}
    with api(answer) as url:
        assert scored(url, 9, concurrency=3) == [0.0] * 9
    assert most == 3


# --- faults -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("status, said", [
    (401, "set key_env to the name of the environment variable"), (404, "expected an address that takes POST requests"),
    (405, "expected an address that takes POST"), (413, "make longest smaller")])
def test_a_mistake_of_the_user_ends_the_run(status, said):
    with api(lambda request, headers: (status, {})) as url:
        error = message(scored, url)
    assert said in error and f"answered {status}" in error


@pytest.mark.parametrize("status", [202, 400, 422])
def test_a_rejected_sample_fails_alone(status):
    with api(lambda request, headers: (status, {"error": "unsafe"}) if request["p"] == "p0" else (200, {"score": 2})
             ) as url:
        first, second = scored(url, 2)
    assert isinstance(first, Failed) and f"answered {status}: " in str(first) and second == 2.0


@pytest.mark.parametrize("use, named", [("http", "reward 'brand' (http): "), ("judge", "reward 'brand': a judge")])
@pytest.mark.parametrize("status, told", [(400, "answered 400"), (401, "answered 401"), (503, "answered 503")])
def test_errors_and_lines_have_the_label(use, named, status, told, capsys):
    """Of a rejected sample, of a mistake of the user, and of a service that does not answer."""
    tally = rewards.Tally()
    with api(lambda request, headers: (status, {"error": "no"})) as url:
        args = {"url": f"{url}/v1", "retries": 0} | ({"model": "m"} if use == "judge" else {})
        made = rewards.compose({"brand": WatchRule(use=use, args=args, on_error="skip")})
        assert capsys.readouterr().err.startswith(f"{named.removesuffix(': ')} sends ")
        def score():
            rewards.score(made, IMAGE[None], ["p"], [{}], tally=tally)
        if status == 401:
            said = message(score)
        else:
            score()
            said = tally.said["brand"]
    assert said.startswith(named) and told in said and said.count("brand") == 1


@pytest.mark.parametrize("settings, said", [
    ({"url": "ftp://h/s"}, "url is 'ftp://h/s', expected https://host/path"),
    ({"url": "http://h:port/s"}, "expected https://host/path"), ({"url": "score"}, "url is 'score'"),
    ({"concurrency": 0}, "concurrency is 0, expected 1 or more"), ({"timeout": 0}, "timeout is 0, expected above 0"),
    ({"rate": 0}, "rate is 0"), ({"budget": 3}, "budget is 3, expected above 0, with a cost above 0"),
    ({"encoding": "jpg"}, "encoding is 'jpg', expected png or webp"),
    ({"headers": {"X-A": "\u00e9"}}, "the header 'X-A' has the value '\u00e9', expected printable ASCII"),
    ({"headers": {"X-A": "a\r\nB: c"}}, "expected printable ASCII"),
    ({"headers": {"X A": "a"}}, "expected printable ASCII"),
    ({"request": {"x": float("nan")}}, "request is not JSON"), ({"request": {"x": {1, 2}}}, "request is not JSON"),
    ({"key_header": "X\u00e9"}, "key_header is 'X\u00e9', expected a header's name"),
    ({"key_env": KEY}, "key_env is no name of an environment variable"),
    ({"key_env": "NO_SUCH_KEY"}, "key_env is 'NO_SUCH_KEY': expected an environment variable of that name"),
    ({"headers": {"X-Api-Key": KEY}}, "the header 'X-Api-Key' may hold a secret"),
    ({"url": f"https://h/s?api_key={KEY}"}, "the url of https://h/s holds a name or a key"),
    ({"url": f"https://me:{KEY}@h/s"}, "the url of h/s holds a name or a key")])
def test_wrong_settings_are_told_without_a_key(settings, said):
    error = message(Http, **{"url": "http://h/s"} | settings)
    assert said in error and KEY not in error


# --- rate and cost ----------------------------------------------------------------------------------------------------
def test_requests_keep_their_rate_and_budget(monkeypatch):
    meter = Meter(0, None, rate=4.0)
    assert [meter.begin(now) for now in (10.0, 10.0, 10.1, 20.0, 20.25)] == pytest.approx([0, 0.25, 0.4, 0, 0])
    assert [Meter(0, None, None).begin(1.0) for _ in range(3)] == [0, 0, 0]
    with api(lambda request, headers: (200, {"score": 1})) as url:
        reward = Http(url=url, cost=0.1, budget=0.3, concurrency=2)
        assert reward(IMAGE.expand(3, -1, -1, -1), ["p"] * 3, [{}] * 3) == [1.0] * 3
        assert message(reward, IMAGE[None], ["p"], [{}]) == (
            "reward 'http': 3 requests of this process cost 0.3, and the next would exceed its budget of 0.3: "
            "raise budget in its args, or score fewer samples")
    monkeypatch.setenv("WORLD_SIZE", "4")  # processes share both
    meter = Http(url="http://h/s", cost=1, budget=8, rate=10).meter
    assert (meter.budget, meter.rate) == (2, 2.5)


# --- the key ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("header, sent", [("Authorization", f"Bearer {KEY}"), ("X-Api-Key", KEY)])
def test_the_key_of_the_environment_is_sent(header, sent, monkeypatch):
    monkeypatch.setenv("BRAND_KEY", KEY)
    got: list[dict] = []
    with api(lambda request, headers: got.append(headers) or (200, {"score": 1})) as url:
        scored(url + "/v1/score/?version=2", key_env="BRAND_KEY", key_header=header, headers={"X-Version": 7})
    assert (got[0][header], got[0]["X-Version"], got[0]["path"]) == (sent, "7", "/v1/score/?version=2")


def test_the_key_is_in_no_message(monkeypatch):
    monkeypatch.setenv("BRAND_KEY", KEY)
    for status, error in ((401, UserError), (404, UserError), (500, TimedOut)):
        with api(lambda request, headers: (status, {"you sent": headers["Authorization"]})) as url:
            said = message(scored, url, key_env="BRAND_KEY", error=error)
        assert KEY not in said and (status == 401 or "Bearer [key]" in said)
    for content in ({"score": f"Bearer {KEY}"}, f"Bearer {KEY}".encode()):
        with api(lambda request, headers: (200, content)) as url:
            try:
                [said] = scored(url, key_env="BRAND_KEY")
            except TimedOut as error:
                said = error
        assert KEY not in str(said)
    assert KEY not in repr(vars(Http(url="https://h/s", key_env="BRAND_KEY", headers={})))


# --- the example ------------------------------------------------------------------------------------------------------
@pytest.fixture
def example(monkeypatch) -> Iterator[str]:
    """Address of the example's API."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from http_reward import Api
    monkeypatch.setenv("BRAND_KEY", KEY)
    with running(ThreadingHTTPServer(("127.0.0.1", 0), Api)) as server:
        yield f"127.0.0.1:{server.server_port}"


def test_the_example_trains_and_leaves_no_key(example, tmp_path):
    recipe = (ROOT / "examples" / "http_reward.yaml").read_text(encoding="utf-8")
    recipe = recipe.replace("127.0.0.1:8900", example).replace("../configs", str(ROOT / "configs"))
    (tmp_path / "mine.yaml").write_text(recipe)
    done = subprocess.run(
        [sys.executable, "-m", "flowgrpo", "train", "mine.yaml", "--train.epochs=1", "--train.group=4",
         "--train.prompts=2", "--train.steps=4", "--eval.prompts=2", "--eval.steps=2", "--name=brand"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    sent, cost = [line for line in done.stderr.splitlines() if line.startswith("reward ")]
    assert sent.startswith("reward 'brand' (http) sends prompts, images and the key in BRAND_KEY to http://127.0.0.1:")
    count = int(cost.split()[3])
    assert count >= 9 and cost == f"reward 'brand' (http): {count} requests cost {count * 1e-4:.10g}"
    [metrics] = (tmp_path / "runs").glob("*/metrics.jsonl")
    assert any(0 < epoch.get("reward/brand/mean", 0) < 1 for epoch in lines(metrics.parent))
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(written) > 5 and not any(KEY.encode() in file.read_bytes() for file in written)
    assert KEY not in done.stdout + done.stderr


def test_the_example_as_it_stands_is_a_recipe(example, monkeypatch):
    rule = load(ROOT / "examples" / "http_reward.yaml").trained["brand"]
    reward = rewards.find("http", rule.args | {"url": f"http://{example}/v1/score"})
    red = torch.zeros(2, 3, 8, 8)
    red[1, 0] = 1
    assert reward(red, ["p", "p"], [{}, {}]) == [0.0, 1.0]
    monkeypatch.setenv("BRAND_KEY", "another")
    assert message(reward, red, ["p", "p"], [{}, {}]).endswith("answered 401: the key in BRAND_KEY is not accepted")

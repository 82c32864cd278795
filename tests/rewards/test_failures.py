"""A reward that fails, and clients of servers that misbehave: told, tried again, or left out and counted; never a 0."""

import gzip
import json
import math
import socket
import threading
import time
import tracemalloc
from types import SimpleNamespace

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.advantages.group import ORDERS, SCALES, Advantage
from flowgrpo.config.reward_rules import Retry, RewardRule
from flowgrpo.errors import UserError
from flowgrpo.rewards import Composed, Failed, Tally
from flowgrpo.rewards.failures import TimedOut, score_with_policy
from flowgrpo.rewards.geneval import detectors
from flowgrpo.rewards.remote.exchange import Later, Service
from flowgrpo.rewards.remote.http import LONGEST_ANSWER, Body
from flowgrpo.rewards.vlm_judge.client import Endpoint
from flowgrpo.serving.client import Remote
from flowgrpo.training import sampling
from flowgrpo.types import Context, PromptGroups
from tests.helpers import loop, tiny
from tests.helpers.loopback_faults import HEAD, misbehaving, mute, once, packed, repeated, zeros
from tests.helpers.refusals import message, refused

NAN = math.nan
PROMPTS = ["a", "bb", "ccc", "dddd"]


def values(reward, tally=None, group: int = 1) -> list:
    found = rewards.score({"mine": reward}, torch.zeros(4, 3, 2, 2), PROMPTS, [{}] * 4, group, tally)
    return [None if math.isnan(value) else value for value in found[:, 0].tolist()]


def skipped(reward, on_error="skip", group: int = 1) -> tuple[list, dict]:
    """The values under a rule that skips failures, and the number of failed samples by reward."""
    tally = Tally()
    return values(Composed(reward, RewardRule(on_error=on_error)), tally, group), dict(tally.failed)


def lengths(images, prompts):
    return [len(prompt) for prompt in prompts]


def choking(*on: str, error=ArithmeticError("too much")):
    """The length of a prompt; calls that hold one of `on` fail."""
    def reward(images, prompts):
        if set(on) & set(prompts):
            raise error
        return lengths(images, prompts)
    return reward


def failing(times: int):
    """Fails so many times, then answers; `calls` counts both."""
    def reward(images, prompts):
        reward.calls += 1
        if reward.calls <= times:
            raise ConnectionError("refused")
        return lengths(images, prompts)
    reward.calls = 0
    return reward


# --- raise -----------------------------------------------------------------------------------------------------------
def test_without_a_rule_a_failure_ends_the_run():
    assert "reward 'mine' raised on 4 samples" in message(values, choking("bb"))
    assert "reward 'mine' raised on 4 samples" in message(values, Composed(choking("bb"), RewardRule()))


# --- skip ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("broken", [
    choking("bb"), choking("bb", error=SystemExit(1)), choking("bb", error=BaseException("a class of their own")),
    lambda images, prompts: [NAN if prompt == "bb" else len(prompt) for prompt in prompts],
    lambda images, prompts: [math.inf if prompt == "bb" else len(prompt) for prompt in prompts],
    lambda images, prompts: lengths(images, prompts)[:None if "bb" not in prompts else -1],
    lambda images, prompts: None if "bb" in prompts else lengths(images, prompts)])
def test_what_fails_alone_is_left_out_and_counted_once(broken):
    tally = Tally()
    assert values(Composed(broken, RewardRule(on_error="skip")), tally) == [1, None, 3, 4]
    assert tally.failed == {"mine": 1} and "'mine'" in tally.said["mine"]
    assert values(Composed(lengths, RewardRule(on_error="skip")), tally) == [1, 2, 3, 4]
    assert tally.failed == {"mine": 1}


def test_what_is_no_failure():
    def alone(images, prompts):
        assert len(prompts) == 1
        return lengths(images, prompts)
    assert skipped(alone) == ([1, 2, 3, 4], {})
    assert skipped(lambda images, prompts: [None, 0, None, 0]) == ([None, 0, None, 0], {})
    tally = Tally()
    assert values(lambda images, prompts: [1, Failed("no idea"), None, 4], tally) == [1, None, None, 4]
    assert tally.failed == {"mine": 1} and tally.said == {"mine": "no idea"}


def test_groups_are_left_out_whole_and_mistakes_never():
    def of_groups(images, prompts, metadata, group):
        assert len(prompts) % group == 0
        return choking("dddd")(images, prompts)
    of_groups.group = True
    assert skipped(of_groups, group=2) == ([1, 2, None, None], {"mine": 2})
    asked = []
    def needs(images, prompts):
        asked.append(prompts)
        raise UserError("install it")
    for policy in ("skip", Retry(retry=3, wait=0)):
        assert message(values, Composed(needs, RewardRule(on_error=policy))) == "install it"
    assert len(asked) == 2


# --- retry -----------------------------------------------------------------------------------------------------------
def test_attempts_and_skips_are_as_said():
    reward = failing(2)
    assert values(Composed(reward, RewardRule(on_error=Retry(retry=2, wait=0)))) == [1, 2, 3, 4] and reward.calls == 3
    reward = failing(3)
    told = message(values, Composed(reward, RewardRule(on_error=Retry(retry=2, wait=0))))
    assert "ConnectionError: refused" in told and told.endswith("(asked 3 times)") and reward.calls == 3
    assert skipped(choking("a", "ccc"), Retry(retry=1, wait=0, then="skip")) == ([None, 2, None, 4], {"mine": 2})


def test_waits_double(monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    def ask(rows):
        raise Failed("no")
    with pytest.raises(Failed):
        score_with_policy(ask, [0], Retry(retry=8, wait=1.5))
    assert waits == [1.5, 3, 6, 12, 24, 48, 60, 60]


# --- time-outs -------------------------------------------------------------------------------------------------------
@pytest.fixture
def hanging():
    """A reward that does not answer until the test is over, but on a prompt "a" alone."""
    over = threading.Event()
    def reward(images, prompts):
        reward.calls += 1
        if prompts != ["a"]:
            over.wait()
        return lengths(images, prompts)
    reward.calls = 0
    yield reward
    over.set()


def test_a_reward_that_hangs_is_told_and_skipped_without_asking_for_each_sample(hanging):
    assert message(values, Composed(hanging, RewardRule(timeout=0.05))) == (
        "reward 'mine' hangs on 4 samples (first prompt of the batch: 'a'): no answer within 0.05 s")
    tally = Tally()
    assert values(Composed(hanging, RewardRule(timeout=0.05, on_error="skip")), tally) == [None] * 4
    assert tally.failed == {"mine": 4} and hanging.calls == 2


def test_a_reward_that_hangs_once_is_asked_again(hanging):
    def reward(images, prompts):
        return hanging(images, prompts) if not hanging.calls else lengths(images, prompts)
    assert values(Composed(reward, RewardRule(timeout=2, on_error=Retry(retry=1, wait=0)))) == [1, 2, 3, 4]


def test_in_time_all_is_as_without():
    weight = torch.ones(4, requires_grad=True)
    recorded = []
    def learned(images, prompts):
        recorded.append((weight * 2).requires_grad)
        return weight * 2
    assert values(Composed(learned, RewardRule(timeout=60))) == [2] * 4 and recorded == [False]
    told = message(values, Composed(choking("bb"), RewardRule(timeout=60)))
    assert "ArithmeticError: too much (test_failures.py, line " in told


# --- what becomes of a sample without any reward ---------------------------------------------------------------------
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scale", [*SCALES, "running"])
def test_missing_rewards_are_as_if_not_sampled(scale, order):
    """The advantages of five samples of which the second has no reward are those of the other four, and a 0."""
    torch.manual_seed(0)
    others = torch.randn(3, 4, 2, dtype=torch.float64)
    lost = torch.full((3, 1, 2), NAN, dtype=torch.float64)
    with_lost = torch.cat([others[:, :1], lost, others[:, 1:]], 1)
    found, expected = (Advantage(scale, order)(each, [1.0, 0.5], Context(groups=PromptGroups(["p", "q", "r"])))
                       for each in (with_lost, others))
    torch.testing.assert_close(found[:, [0, 2, 3, 4]], expected, rtol=0, atol=1e-12)
    assert (found[:, 1] == 0).all() and expected.abs().min() > 0
    nothing = torch.full((2, 3, 2), NAN)
    assert (Advantage(scale, order)(nothing, [1.0, 0.5], Context(groups=PromptGroups(["p", "q"]))) == 0).all()


def missing(*places: int):
    """The red channel, with failures on some images of every epoch, counted from 0."""
    def reward(images, prompts):
        start, reward.seen = reward.seen, reward.seen + len(prompts)
        if any(place in places for place in range(start, start + len(prompts))):
            reward.seen = start if len(prompts) > 1 else reward.seen
            raise ArithmeticError("out of order")
        return tiny.red(images, prompts)
    reward.seen = 0
    return reward


def test_a_sample_that_was_skipped_is_not_trained_on():
    """Eight images in parts of four, the third and the sixth without a reward: six decisions a step are left."""
    trainer = tiny.trainer(reward={"red": {"on_error": "skip"}}, rewards={
        "red": Composed(missing(2, 5), RewardRule(on_error="skip"))}, parts__plan__size=2)
    said = []
    trainer.log = said.append
    batch = trainer.prompts[:2]
    parts, conditioning, grouped = sampling.sample(trainer, batch)
    assert grouped.isnan().flatten().nonzero().flatten().tolist() == [2, 5]
    credited = list(loop.credit(trainer, parts, grouped, [prompt.text for prompt in batch]))
    kept = [[len(advantage) for advantage in part.advantages] for part in credited]
    assert kept == [[3, 3], [3, 3]] and all(len(part.transitions[0].x_next) == 3 for part in credited)
    expected = Advantage()(grouped[:, :, :1], [1.0])
    found = torch.stack([part.advantages[0] for part in credited])
    torch.testing.assert_close(found.flatten(), expected.flatten()[[0, 1, 3, 4, 6, 7]])
    metrics = trainer.scoring.metrics(grouped, said.append)
    assert metrics["reward/red/failed"] == 2 and trainer.scoring.reward_failures == {"red": 2}
    assert metrics["reward/red/mean"] == pytest.approx(grouped.nanmean().item())
    assert metrics["reward/red/zero_variance_groups"] == 0
    assert len(said) == 1 and said[0].startswith("left out: 2 samples that a reward failed on; the last: reward 'red'")
    again = trainer.scoring.metrics(grouped, said.append)
    assert again["reward/red/failed"] == 0 and trainer.scoring.reward_failures == {"red": 2}


def test_a_skipped_reward_neither_raises_nor_lowers_a_samples_total():
    """One reward is about -100 and fails on the third image; its group's mean stands in, and the image is not shown
    as the best one."""
    costly = missing(2)
    trainer = tiny.trainer(reward={"cost": {"on_error": "skip"}, "red": 1.0}, parts__plan__size=2, rewards={
        "cost": Composed(lambda images, prompts: costly(images, prompts) - 100, RewardRule(on_error="skip")),
        "red": Composed(tiny.red)})
    batch = trainer.prompts[:2]
    _, _, grouped = sampling.sample(trainer, batch)
    assert grouped.isnan().nonzero().tolist() == [[0, 2, 0]]
    totals = trainer.scoring.sum_rewards(grouped)
    assert totals[0, 2] == pytest.approx((grouped[0, [0, 1, 3], 0].mean() + grouped[0, 2, 1]).item(), abs=1e-4)
    totals[0, 2] = NAN
    best = {prompt.text: total for total, prompt, *_ in trainer.scoring.extremes.best}
    assert best == {prompt.text: pytest.approx(own[~own.isnan()].max().item(), abs=1e-4)
                    for prompt, own in zip(batch, totals)}


def test_epochs_without_rewards_and_transforms():
    trainer = tiny.trainer(rewards={"red": Composed(choking(*tiny.PROMPTS), RewardRule(on_error="skip"))})
    trainer.log = [].append
    before = trainer.policy.weights.snapshot()
    metrics = trainer.run_epoch()
    assert metrics["reward/red/failed"] == 8 and metrics["loss"] == 0.0
    assert all(torch.equal(before[key], value) for key, value in trainer.policy.weights.snapshot().items())
    rule = RewardRule(transform=["rank"])
    trainer = tiny.trainer(rewards={"red": Composed(tiny.red, rule)}, method="mix_grpo", parts__plan__size=2)
    batch = trainer.prompts[:2]
    parts, conditioning, grouped = sampling.sample(trainer, batch)
    credited = list(loop.credit(trainer, parts, grouped, [prompt.text for prompt in batch]))
    assert 0 < grouped.std() < 0.2  # the mean of a channel, not its rank
    places = grouped[..., 0].argsort(1).argsort(1).double()[..., None] / 3
    found = torch.stack([part.advantages[0] for part in credited])
    torch.testing.assert_close(found.double(), Advantage()(places, [1.0]), rtol=0, atol=1e-5)
    assert trainer.scoring.metrics(grouped, [].append)["reward/red/mean"] == pytest.approx(grouped.mean().item())


def test_a_first_epoch_without_any_score_stops_and_a_later_one_is_said_once():
    """Nothing failed: the rewards do not apply to these prompts."""
    rewards_of_none = dict.fromkeys(["red", "blue"], lambda images, prompts: [None] * len(prompts))
    trainer = tiny.trainer(rewards=rewards_of_none, reward=dict.fromkeys(rewards_of_none, 1.0))
    told, said = message(trainer.run_epoch), []
    assert told.startswith("no sample of the first epoch had a score from 'red' or 'blue': expected prompts to which")
    assert any(repr(prompt) in told for prompt in tiny.PROMPTS) and trainer.optimization.update == 0
    trainer.log, before = said.append, trainer.policy.weights.snapshot()
    for trainer.epoch in (1, 2):
        assert trainer.run_epoch()["loss"] == 0.0
    assert said == ["no sample of epoch 2 had a score from 'red' or 'blue': nothing is trained in such epochs"]
    assert all(torch.equal(before[key], value) for key, value in trainer.policy.weights.snapshot().items())


def test_a_run_tells_what_it_waited_for_and_what_failed(tmp_path):
    from flowgrpo.run import run
    settings = tiny.config(tmp_path, reward={"red": {"on_error": "skip", "when": {"of": "red"}}, "all": 1.0},
                           eval__rewards={"held": {"timeout": 60}}, train__epochs=1)
    functions = {"red": choking("a cat"), "all": tiny.red, "held": lengths}
    prompts = [tiny.Prompt(text, metadata={"of": "red"}) for text in tiny.PROMPTS]
    summary = run(settings, pipe=tiny.sd3(), functions=functions, prompts=prompts)
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    [line] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert written["reward_wait_seconds"] == summary["reward_wait_seconds"] >= 0 and line["seconds/reward"] >= 0
    assert written["reward_failures"]["trained"] == {"red": line["reward/red/failed"], "all": 0}
    held = json.loads((tmp_path / "run" / "before.json").read_text())["scores"]["red"]
    assert written["reward_failures"]["before"] == {"red": held.count(None), "all": 0, "held": 0}
    assert written["rewards"]["trained"] == {"red": 1.0, "all": 1.0}


def test_a_route_that_no_prompt_takes_is_told_before_anything_is_loaded(tmp_path):
    from flowgrpo.run import run
    settings = tiny.config(tmp_path, reward={"red": {"when": {"of": "rde"}}})
    prompts = [tiny.Prompt(text, metadata={"of": "red"}) for text in tiny.PROMPTS]
    told = message(lambda: run(settings, functions={"red": tiny.red}, prompts=prompts))
    assert "reward 'red' applies to no prompt" in told and "(of: 'red')" in told


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
    "gzip that drips": repeated(HEAD + b"Content-Encoding: gzip\r\n\r\n" + zeros(1)[:20], b"\0")}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("fault", WITHOUT_END)
def test_an_answer_without_end_ends_by_the_time_out(fault, client):
    call, error = CLIENTS[client]
    with misbehaving(WITHOUT_END[fault]) as root:
        assert root in in_time(call, root, error=error)


def in_time(*call, **more) -> str:
    """What the error of a call says, which ends by the time-out."""
    began = time.monotonic()
    told = message(*call, **more)
    assert time.monotonic() - began < SHORT + GENEROUS
    return told


@pytest.mark.fast
def test_servers_that_say_nothing_end_by_the_time_out():
    with misbehaving(mute, buffer=4096) as root:
        assert "gave no answer within 0.5 s" in in_time(judge, root, text="x" * 2**24, error=TimedOut)
    with misbehaving(mute) as root:
        assert "took no connection within 0.5 s" in in_time(judge, root.replace("http:", "https:"), error=TimedOut)


def test_a_name_that_is_not_resolved_ends_by_the_time_out(monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: go_on.wait(60) or [])
    assert "took no connection" in in_time(judge, "http://slow.invalid", error=TimedOut)
    go_on.set()


# --- memory ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("client", CLIENTS)
def test_a_gzip_bomb_is_refused_within_a_bounded_memory(client):
    call, error = CLIENTS[client]
    bomb = packed(zeros(256))
    with misbehaving(once(bomb)) as root:
        tracemalloc.start()
        try:
            refused(f"it sent more than {LONGEST_ANSWER} bytes", call, root, timeout=20, error=error)
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
    with misbehaving(once(packed(content, coding))) as root:
        assert line in message(judge, root, timeout=20, error=TimedOut)


def test_answers_compressed_and_after_a_wait():
    answer = json.dumps({"choices": [{"message": {"content": "7"}}]}).encode()
    with misbehaving(once(packed(gzip.compress(answer)))) as root:
        judge(root, timeout=20)
    packed_body, plain = Body(" Deflate"), Body("")
    assert packed_body.add(zeros(1, wbits=15)) and packed_body.whole() == bytes(2**20)
    assert not plain.add(b"a") and not plain.add(b"b") and plain.whole() == b"ab"
    endless = repeated(HEAD + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(answer), b"more")
    with misbehaving(endless) as root:
        assert judge(root, timeout=60) == "7"
    remote = object.__new__(Remote)
    remote.name, remote._service = "r", Service("r", [], 1, 0, 0, {})
    busy = 503, {"retry-after": "7"}, b'{"error": "busy"}'
    remote._service._http = SimpleNamespace(exchange=lambda *_: busy, faults=())
    with pytest.raises(Later, match="answered 503: busy") as caught:
        remote._service.request("POST", "http://a/r", b"", bytes, remote._raise_for_status)
    assert caught.value.seconds == 7


# --- elsewhere -------------------------------------------------------------------------------------------------------
@pytest.fixture
def elsewhere():
    """A server that nobody may ask."""
    seen = []
    with misbehaving(lambda connection, ended: seen.append(connection.recv(65536))) as root:
        yield root
    assert seen == []


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused(status, client, elsewhere):
    call, error = CLIENTS[client]
    answer = b"HTTP/1.1 %d Go\r\nLocation: %s/x\r\nContent-Length: 0\r\n\r\n" % (status, elsewhere.encode())
    with misbehaving(once(answer)) as root:
        refused(f"{status}, a redirect|status {status}", call, root, timeout=20, error=error)


def test_proxies_of_the_environment_are_not_used(monkeypatch, elsewhere):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, elsewhere)
    with misbehaving(once(HEAD + b"Content-Length: 0\r\n\r\n")) as root:
        assert "no chat completion" in message(judge, root, timeout=20, error=TimedOut)


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

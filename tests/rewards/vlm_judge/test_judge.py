"""Judges: what their answers say, and what they make of every answer and fault of an endpoint, a real HTTP server."""

import json
import math
import re
import threading
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo import rewards
from flowgrpo.cli import main
from flowgrpo.config.reward_rules import Retry, RewardRule
from flowgrpo.contrib.criteria import Criterion, JudgeRubric, TextJudgeRubric, answers, share
from flowgrpo.errors import UserError
from flowgrpo.rewards import Composed, Failed, Tally
from flowgrpo.rewards.failures import TimedOut
from flowgrpo.rewards.remote.exchange import brief, seconds
from flowgrpo.rewards.vlm_judge.judge import Judge, JudgePairs, data_url, fill_template, frame_index
from flowgrpo.rewards.vlm_judge.parse import expected_level, level, parser, verdict, verdict_parser
from flowgrpo.rewards.vlm_judge.released import DeQA
from tests.helpers.chat_endpoint import ONE, QUICK, endpoint, level_of, opened, parts, said, shades
from tests.helpers.refusals import message

# --- what an answer says ---------------------------------------------------------------------------------------------
REFUSAL = "I'm sorry, but I can't rate this image. Score: 0"


@pytest.mark.parametrize("text, score", [
    ("8", 8), ("8.5", 8.5), (" 8.\n", 8), ("8/10", 8), ("8 / 10", 8), ("8 out of 10", 8), ("0", 0), ("10", 10),
    ("Score: 8", 8), ("score = 8", 8), ("**Score:** 8", 8), ("**Score: 8**", 8), ("Score: **8**/10", 8),
    ("Score: `8`", 8), ("Score (0-10): 7", 7), ("The score is 7.", 7), ("a score of 6", 6), ("Score - 6", 6),
    ("Rating: 8 out of 10", 8), ("A score from 0 to 10.\nScore: 4", 4),
    ("A score of 1 to 5 is low.\nFinal score: 9", 9), ("Alignment score: 7, quality score: 5", 5),
    ("Final Score: 6 (alignment score: 7)", 6),
    ("I see 3 cats.\n\n8", 8), ("9\nbecause it has 3 cats", 9), ("I would give it 7/10, for its 3 cats.", 7),
    ('{"score": 8}', 8), ('```json\n{"score": 8, "why": "3 cats"}\n```', 8), ('Here: {"score": "8/10"} Done.', 8),
    ('{"result": {"score": 4}}', 4), ('{broken {"score": 5}', 5), ('{"score": 1} no, {"score": 2}', 2),
    ("<think>score: 1, or 2?</think>Score: 7", 7), ("<think>a</think><answer>7</answer>", 7),
    # no answer
    ("", None), ("It is good.", None), ("I see 3 cats.", None), ("11", None), ("-1", None), ("Score: 11", None),
    ("Score: 1e2", None), ("Score: 7e-1", None),
    ("Score: -1", None), ("4/5", None), ("Score: 4/5", None), ("a score of 1 to 5", None), ("score: high", None),
    ('{"score": null}', None), ('{"score": NaN}', None), ('{"score": 1e400}', None), ('{"score": [8]}', None),
    ("<think>Score: 7", None), (REFUSAL, None), ("As an AI, I cannot. Score: 5", None), ("[" * 3000, None),
    ("{" * 3000, None), ("I\u2019m sorry. 5/10", None), ("I cannot see any flaw. Score: 9", 9),
    ("I am unable to find a flaw. Score: 9", 9), ("I am unable to rate it. Score: 9", None), ("Score: 1,000", None),
    ("Score: 5-8", None), ("Score: 8" + "0" * 5000, None), ("score (" * 1400, None), ("1" * 9999, None)])
def test_a_score_is_found(text, score):
    assert parser("score in [0, 10]")(text) == score


@pytest.mark.parametrize("parse, scale, text, score", [
    ("score in [1, 5]", [1, 5], "Score: 4", 0.75), ("score in [1, 5]", None, "Score: 6", None),
    ("score in [0, 100]", [0, 100], "85/100", 0.85), ("score in [-1, 1]", None, "Score: -0.5", -0.5),
    ("json rating", None, '{"rating": 3, "score": 9}', 3), ("json rating", None, '{"score": 9}', None),
    ("json rating in [0, 2]", None, '{"rating": 3}', None), ("json ok", None, '{"ok": true}', 1),
    ("json ok", None, '{"ok": "no"}', 0), ("json a.b", None, '{"a.b": 2}', 2),
    ("json rating", [0, 4], '{"rating": 5}', None),
    (r"mark <(\d+)>", None, "mark <3> mark <4>", 4), (r"mark <(.*?)>", None, "mark <high>", None),
    (r"mark <(\d+)>", [0, 8], "mark <2>", 0.25), (r"mark <(\d+)>", [0, 8], "mark <9>", None),
    (r"<answer>(\d)</answer>", None, "<think>x</think><answer>3</answer>", 3), (r"(\d)", None, REFUSAL, None)])
def test_a_score_in_another_form(parse, scale, text, score):
    assert parser(parse, scale)(text) == score


@pytest.mark.parametrize("parse, scale, told", [
    ("score", None, "has 0 groups"), ("(a)(b)", None, "has 2 groups"), ("(", None, "no regular expression"),
    ("score in [5, 1]", None, "range is [5, 1]"), ("score in [a]", None, "range is None"),
    ("score in [0, 10]", [0], "range is [0]"), ("score in [0, 10]", 10, "range is 10")])
def test_a_form_that_is_none(parse, scale, told):
    assert told in message(parser, parse, scale)


@pytest.mark.parametrize("text, first", [
    ("Image 1 is better than Image 2.", 1), ("Image 2 is better than Image 1.", 0),
    ("Both images are equally good.", 0.5), ("Video 2 is clearly the better one", 0),
    ("The first image is slightly better.", 1), ("Image 1 is worse.", 0),
    ("Image A is better in colour. Image B is better in shape. Overall, Image B is better than Image A.", 0),
    ("Answer: 1", 1), ("Answer: 2.", 0), ("Answer: tie", 0.5), ("**Answer:** [[B]]", 0), ("The winner is image 1", 1),
    ("1", 1), ("[[A]]", 1), ("B.", 0), ("Image 2", 0), ("tie", 0.5), ("It is a tie.", 0.5), ("second", 0),
    ('{"better": 2}', 0), ('```json\n{"winner": "Image 1"}\n```', 1), ('{"better": "tie"}', 0.5),
    ("<think>Image 1 is better</think><answer>Image 2 is better</answer>", 0), ("the first one wins", 1),
    ("", None), ("Image 1 is a cat.", None), ("Image 2 is not better.", None), ("3", None), ('{"better": 3}', None),
    ("I cannot judge these images. Answer: 1", None), ("The answer is a picture of a cat.", None),
    ("Sorry, Image 1 is better", None)])
def test_a_verdict_is_found(text, first):
    assert verdict(text) == first


def test_verdicts_and_levels_in_other_forms():
    read = verdict_parser(r"PICK (\w+)")
    assert [read("PICK A, no: PICK B"), read("PICK first"), read("PICK 9"), read("none")] == [0, 1, None, None]
    assert "expected `verdict`" in message(verdict_parser, "prefer")
    told = {" good": math.log(0.5), " Good": math.log(0.1), " fair": math.log(0.2), " cat": math.log(0.1)}
    tokens = [(" The", {" The": 0.0}), (" good", told), (" bad", {" bad": 0.0})]
    assert expected_level(tokens) == pytest.approx((4 * 0.6 + 3 * 0.2) / 0.8, abs=1e-12)
    assert expected_level([("ex", {"ex": math.log(0.5), "po": math.log(0.25)})]) == pytest.approx(4, abs=1e-12)
    assert expected_level([("cat", told)]) is None and expected_level([]) is None
    assert expected_level([("good", {"cat": 0.0})]) is None
    assert fill_template('{prompt} {"a": {}} {criteria}', prompt="{criteria}", criteria="c") == '{criteria} {"a": {}} c'


@pytest.mark.parametrize("text, met", [
    ('{"1": "yes", "2": "no", "3": "unsure"}', [True, False, None]), ('{"1": true, "3": 0}', [True, None, False]),
    ('```json\n{"criterion 2": "Yes."}\n```', [None, True, None]), ("1. yes\n2: no\n3) unsure", [True, False, None]),
    ("- 1: met\n- 2: not met", [True, False, None]), ("Criterion 3: Yes, it is", [None, None, True]),
    ("1. yes\n1. no", [None] * 3), ('{"4": "yes", "0": "no"}', [None] * 3), ("yes", [None] * 3),
    ("I can't help with that.\n1. yes", [None] * 3), ('{"a": "yes"}', [None] * 3)])
def test_criteria_are_read(text, met):
    assert answers(text, 3) == met


@pytest.mark.parametrize("met, criteria, expected", [
    ([True, False], [(1,), (1,)], 0.5), ([True, None, False], [(3,), (5,), (1,)], 0.75), ([True], [(2,)], 1),
    ([None, None], [(1,), (1,)], None), ([False, False], [(1,), (2,)], 0), ([], [], None),
    ([True, True], [(3,), (-1,)], 2 / 3), ([False, True], [(1,), (-1,)], 0), ([None, True], [(1,), (-1,)], None),
    ([True, False], [(1,), (1, True)], 0), ([True, True], [(1,), (-1, True)], 0), ([None, True], [(1,), (-1, True)], 0),
    ([True, False], [(1,), (-1, True)], 1), ([True, None], [(1,), (1, True)], 1)])
def test_flaws_lower_the_share_and_vetoes_zero_it(met, criteria, expected):
    assert share(met, [Criterion("", *each) for each in criteria]) == expected


@pytest.mark.parametrize("text, value", [
    ("excellent", 5), ("Good.", 4), ("The quality of the image is fair.", 3), ("**Poor**", 2), ("bad", 1),
    ("good to excellent", None), ("not good", None), ("goodness", None), ("fairly", None), ("", None)])
def test_a_level_is_found(text, value):
    assert level(text) == value


# --- what is sent ----------------------------------------------------------------------------------------------------
def test_frames_are_spread_and_images_are_sent_as_they_are_or_smaller():
    for count, wanted, rows in ((9, 3, [0, 4, 8]), (9, 1, [4]), (3, 8, [0, 1, 2]), (16, 4, [0, 5, 10, 15]),
                                (2, 2, [0, 1])):
        assert frame_index(count, wanted) == rows
    picture = torch.rand(3, 8, 20, generator=torch.Generator().manual_seed(0))
    got = torch.from_numpy(np.array(opened(data_url(picture, 20, "png")))).movedim(-1, 0)
    assert torch.equal(got, (picture * 255).round().to(torch.uint8))
    assert opened(data_url(picture, 10, "webp")).size == (10, 4)
    assert opened(data_url(torch.zeros(3, 1, 50), 10, "png")).size == (10, 1)
    assert "NaN" in message(data_url, picture / 0, 20, "png", error=Failed)


# --- an endpoint -----------------------------------------------------------------------------------------------------
def answered(values: list) -> list:
    return ["failed" if isinstance(value, Failed) else value for value in values]


def test_every_output_has_its_own_score():
    def reply(body, number):
        return said(f"{parts(body, 'text')[0]}\nScore: {level_of(body) / 10}")
    outputs = shades(*range(0, 90, 10))
    with endpoint(reply) as server:
        judge = Judge(url=server.url, template="about {prompt}", concurrency=3, **QUICK)
        assert judge(outputs, [f"p{i}" for i in range(9)]) == list(range(9))
    path, headers, body = server.seen[0]
    assert path == "/v1/chat/completions" and "Authorization" not in headers
    assert {key: body[key] for key in ("model", "temperature", "max_tokens")} == {
        "model": "m", "temperature": 0, "max_tokens": 1024}
    asked = {(level_of(body), parts(body, "text")[0]) for _, _, body in server.seen}
    assert asked == {(10 * i, f"about p{i}") for i in range(9)}


def test_as_many_are_asked_at_once_as_may_be():
    together, lock, under_way, most = threading.Barrier(3), threading.Lock(), [], []
    def reply(body, number):
        with lock:
            under_way.append(number)
            most.append(len(under_way))
        together.wait(20)  # passed by three at a time alone
        with lock:
            under_way.remove(number)
        return said("5")
    with endpoint(reply) as server:
        assert Judge(url=server.url, concurrency=3, **QUICK)(ONE.expand(9, 3, 4, 4), ["p"] * 9) == [5] * 9
    assert max(most) == 3


def test_settings_and_the_key_arrive(monkeypatch, tmp_path):
    monkeypatch.setenv("MY_JUDGE_KEY", "s3cret")
    (tmp_path / "question.txt").write_text("größe of {prompt}?", encoding="utf-8")
    with endpoint([said("5")]) as server:
        judge = Judge(url=server.url, key_env="MY_JUDGE_KEY", temperature=None, max_tokens=None, wait=0.001,
                      extra={"max_completion_tokens": 7}, template=str(tmp_path / "question.txt"))
        assert judge(["a text"], ["p"]) == [5] and judge(["a text"], ["p"]) == [5]
    _, headers, body = server.seen[0]
    assert headers["Authorization"] == "Bearer s3cret" and "s3cret" not in repr(judge)
    assert body.keys() == {"model", "messages", "max_completion_tokens"} and body["model"] == "only-one"
    assert parts(body, "text") == ["a text\ngröße of p?"]


def test_frames_of_a_video_are_shown_in_order():
    videos = torch.linspace(0, 1, 9)[None, :, None, None, None].expand(1, 9, 3, 4, 4)
    with endpoint([said("Score: 7")]) as server:
        found = Judge(url=server.url, template="How is the motion?", frames=3, **QUICK)(videos, ["p"])
        assert found == [7]
        shown = [opened(part["url"]).getpixel((0, 0))[0] for part in parts(server.seen[0][2], "image_url")]
        assert shown == [0, 128, 255]
        shown_too = Judge(url=server.url, template="Does it show {prompt}?", **QUICK)
        assert rewards.score({"ta": shown_too}, videos, ["a cat"], [{}]).tolist() == [[7]]
        assert "a cat" in parts(server.seen[1][2], "text")[0] and "a cat" not in parts(server.seen[0][2], "text")[0]


@pytest.mark.parametrize("reply, told", [
    (said("It is nice."), "gave no answer in the form: 'It is nice.'"), (said(REFUSAL), "can't rate"),
    (said(None, message={"refusal": "I can't."}), "declined"), (said("Score: 8", reason="content_filter"), "declined"),
    (said("Score: 1", reason="length"), "cut off at max_tokens"), (said(None), "gave no answer"),
    ((400, {}, {"error": {"code": "content_filter", "message": "no"}}), "declined"),
    (said([{"type": "text", "text": "none"}]), "'none'")])
def test_an_answer_that_says_nothing_is_no_score_and_counted(reply, told):
    tally = Tally()
    with endpoint(lambda body, number: reply if level_of(body) else said("Score: 3")) as server:
        judge = Judge(url=server.url, **QUICK)
        found = rewards.score({"j": judge}, shades(0, 255), ["a", "b"], [{}, {}], tally=tally)
    assert found[0, 0] == 3 and found[1, 0].isnan() and tally.failed == {"j": 1} and told in tally.said["j"]
    assert len(server.seen) == 2


@pytest.mark.parametrize("name, given", [
    ("gated", {"thresholds": [0.5]}), ("tiered", {"thresholds": [0.5]}), ("checklist", {"thresholds": [0.5, 0]})])
def test_a_gate_does_not_open_where_its_judge_declines(name, given):
    """Of three images the judge passes the first, declines the second, and marks the third too low."""
    tally = Tally()
    with endpoint(lambda body, number: said({9: "Score: 9", 5: REFUSAL, 0: "Score: 0"}[level_of(body)])) as server:
        safe = {"use": "judge", "args": {"url": server.url, "scale": [0, 10], **QUICK}}
        reward = rewards.find(name, {"rewards": [safe, lambda images, prompts: [0.25] * len(prompts)], **given})
        found = rewards.score({"it": reward}, shades(9, 5, 0), ["a"] * 3, [{}] * 3, tally=tally)[:, 0].tolist()
    assert found[::2] == {"gated": [0.25, 0], "tiered": [pytest.approx(1.15), 0], "checklist": [1, 0.5]}[name]
    assert math.isnan(found[1]) and tally.failed == {"it": 1} and "can't rate" in tally.said["it"]


def test_a_clip_whose_frame_the_judge_declines_has_no_score():
    tally, clips = Tally(), shades(9, 9, 9, 5).unflatten(0, (2, 2))
    with endpoint(lambda body, number: said(REFUSAL if level_of(body) == 5 else "Score: 9")) as server:
        reward = rewards.find("frames", {"reward": "judge", "args": {"url": server.url, **QUICK}})
        found = rewards.score({"it": reward}, clips, ["a"] * 2, [{}] * 2, tally=tally)[:, 0].tolist()
    assert found[0] == 9 and math.isnan(found[1]) and tally.failed == {"it": 1}


# --- faults ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fault", [
    (500, {}, {"error": "oops"}), (503, {}, b"<html>"), (429, {"Retry-After": "0"}, {"error": {"message": "slow"}}),
    (429, {}, b""), (200, {}, b"garbage"), (200, {}, {"choices": []}), (200, {}, []), (200, {}, b"[" * 100_000),
    (200, {}, {"choices": [{"message": {"content": 5}}]}), (302, {"Location": "/"}, b""), (200, {}, None)])
def test_what_passes_is_asked_again(fault):
    with endpoint([fault, fault, said("Score: 4")]) as server:
        assert Judge(url=server.url, **QUICK)(ONE, ["p"]) == [4]
    assert len(server.seen) == 3


@pytest.mark.parametrize("fault, told", [
    ((500, {}, {"error": "oops"}), "answered 500: oops (asked 3 times)"),
    ((429, {}, {"error": {"message": "slow\ndown"}}), "answered 429: slow down (asked 3 times)"),
    ((200, {}, b"garbage"), "gave no proper answer: no chat completion"), ((200, {}, None), "gave no answer (Remote"),
    ((200, {}, {"error": {"message": "it loads"}}), "no chat completion (it loads)"),
    ((200, {}, {"detail": "busy"}), "no chat completion (busy)"), ((200, {}, {}), "(KeyError: 'choices')")])
def test_an_outage_follows_the_policy(fault, told):
    with endpoint([fault]) as server:
        judge = Judge(url=server.url, **QUICK)
        assert told in message(judge, ONE, ["p"], error=TimedOut)
        tally = Tally()
        found = rewards.score({"j": Composed(judge, RewardRule(on_error="skip"))}, ONE, ["p"], [{}], tally=tally)
        assert found.isnan().all() and tally.failed == {"j": 1} and told in tally.said["j"]
    assert len(server.seen) == 6


def test_slow_endpoints_are_left_for_another_url():
    hold = threading.Event()
    with endpoint([(200, {}, hold)]) as server:
        judge = Judge(url=server.url, model="m", retries=1, wait=0.001, timeout=0.2)
        assert "gave no answer within 0.2 s (asked 2 times)" in message(judge, ONE, ["p"], error=TimedOut)
        hold.set()
    with endpoint([(500, {}, b"")]) as one, endpoint([said("Score: 2")]) as two:
        judge = Judge(url=f"{one.url},{two.url}", concurrency=1, **QUICK)
        assert judge(ONE.expand(4, 3, 4, 4), ["p"] * 4) == [2] * 4
    assert (len(one.seen), len(two.seen)) == (1, 4)


def test_a_rejected_request_fails_alone():
    def reply(body, number):
        return said("Score: 6") if level_of(body) else (400, {}, {"error": {"message": "too long"}})
    outputs, tally = shades(255, 0, 255), Tally()
    with endpoint(reply) as server:
        judge = Judge(url=server.url, **QUICK)
        assert "answered 400: too long" in message(judge, outputs, ["p"] * 3, error=Failed)
        rule = RewardRule(on_error=Retry(retry=1, wait=0, then="skip"))
        found = rewards.score({"j": Composed(judge, rule)}, outputs, ["p"] * 3, [{}] * 3, tally=tally)[:, 0].tolist()
    assert found[0] == found[2] == 6 and math.isnan(found[1]) and tally.failed == {"j": 1}


QUOTA = {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}


@pytest.mark.parametrize("status, reply, told", [
    (401, {}, "set key_env"), (403, {}, "set key_env"), (404, {}, "serve the model 'm'"),
    (429, QUOTA, "nothing left to spend"), (402, {"error": {"message": "No credits", "code": 402}}, "nothing left to"),
    (429, {"error": {"message": "Hard limit", "type": "billing_hard_limit_reached"}}, "nothing left to spend")])
def test_a_persons_mistake_and_an_account_with_nothing_left_end_the_run(status, reply, told):
    with endpoint([(status, {}, reply)]) as server:
        judge = Composed(Judge(url=server.url, **QUICK), RewardRule(on_error="skip"))
        with pytest.raises(UserError, match=told) as caught:
            rewards.score({"j": judge}, ONE, ["p"], [{}])
        assert not isinstance(caught.value, Failed) and len(server.seen) == 1


def test_models_addresses_and_streams():
    with endpoint([said("5")]) as server:
        server.models = (200, {}, {"data": [{"id": "a"}, {"id": "b"}]})
        told = message(Judge(url=server.url, wait=0.001), ONE, ["p"])
        assert "serves 2 models: set model to one of a, b" in told and server.seen == []
    with endpoint([(200, {}, events({"delta": {"content": "Score: 3"}})), said("Score: 7")]) as server:
        assert Judge(url=server.url, **QUICK)(ONE, ["p"]) == [7]
    with endpoint([said("5")]) as server:
        assert Judge(url=f"{server.url}/chat/completions", **QUICK)(ONE, ["p"]) == [5]
    assert server.seen[0][0] == "/v1/chat/completions"


def test_waits_grow_and_are_those_that_are_asked_for(monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    busy = [(429, {"Retry-After": after}, b"") for after in ("7", "500")]
    with endpoint([*busy, (500, {}, b""), (500, {}, b""), said("Score: 1")]) as server:
        assert Judge(url=server.url, model="m", wait=0.25, retries=4)(ONE, ["p"]) == [1]
    assert waits[:2] == [7, 60] and 0.5 <= waits[2] <= 1.5 and 1 <= waits[3] <= 3


def test_how_long_to_stay_away():
    told = ("7", "0.5", "-3", "soon", "nan", "Wed, 21 Oct 2015 07:28:00 GMT")
    assert [seconds(after) for after in told] == [7, 0.5, 0, 0, 0, 0]
    tomorrow = datetime.now(timezone.utc) + timedelta(days=1)
    assert 80_000 <= seconds(format_datetime(tomorrow, usegmt=True)) <= 86_400


@pytest.mark.parametrize("settings, told", [
    ({"url": "localhost:8000"}, "expected http://"), ({"concurrency": 0}, "concurrency 0"),
    ({"url": "http://127.0.0.1:8112"}, "a judge: url: got 'http://127.0.0.1:8112', expected http://host:port/v1"),
    ({"timeout": 0}, "timeout 0"), ({"encoding": "gif"}, "encoding 'gif'"), ({"frames": 0}, "frames 0"),
    ({"parse": "mark"}, "has 0 groups"), ({"key_env": "NO_SUCH_KEY_AT_ALL"}, "'NO_SUCH_KEY_AT_ALL'"),
    ({"key_env": "sk-123"}, "key_env is no name of an"), ({"template": "nowhere.txt"}, "nowhere.txt cannot be read"),
    ({"modle": "m"}, "did you mean 'model'?"), ({"extra": {"when": math.nan}}, "is not JSON"),
    ({"temperature": math.inf}, "is not JSON"), ({"extra": {"day": datetime(2026, 1, 1)}}, "is not JSON")])
def test_mistakes_are_told_at_once(settings, told):
    assert told in message(rewards.find, "judge", settings)


# --- pairs, criteria, forms ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("both", [True, False])
def test_pairs_become_win_rates(both):
    def reply(body, number):  # the brighter one; for a difference of 10 the first one shown, whichever that is
        first, second = (opened(part["url"]).getpixel((0, 0))[0] for part in parts(body, "image_url"))
        return said(f"Image {1 if first - second >= -10 else 2} is better than the other.")
    with endpoint(reply) as server:
        named = JudgePairs(url=server.url, both_orders=both, **QUICK)
        found = rewards.score({"j": named}, shades(10, 60, 70, 200), ["a cat"] * 4, [{}] * 4, group=4)[:, 0].tolist()
    assert len(server.seen) == (12 if both else 6)
    assert found[0] == 0 and found[3] == 1 and sum(found) == pytest.approx(2)
    if both:
        assert found == pytest.approx([0, 0.5, 0.5, 1])
    texts = parts(server.seen[0][2], "text")
    assert texts[:2] == ["Image 1:", "Image 2:"] and "a cat" in texts[2]


def test_a_pair_without_an_answer_does_not_count():
    def reply(body, number):
        return said("no idea" if "dog" in parts(body, "text")[-1] else "Answer: 1")
    with endpoint(reply) as server:
        judge = JudgePairs(url=server.url, **QUICK)
        assert answered(judge(shades(1, 2), shades(3, 4), ["dog", "cat"])) == ["failed", 1]
        tally = Tally()
        found = rewards.score({"j": judge}, shades(1, 2), ["dog"] * 2, [{}] * 2, group=2, tally=tally)
        assert found.isnan().all() and tally.failed == {"j": 2} and "gave no answer in the form" in tally.said["j"]
        assert judge(["a"], ["b"], ["cat"]) == [1]
        assert parts(server.seen[-1][2], "text")[0].startswith("Text 1:\na\nText 2:\nb\nTwo results")


def test_criteria_of_the_recipe_and_of_the_prompt():
    def reply(body, number):
        text = parts(body, "text")[0]
        if "mute" in text:
            return said("", message={"refusal": "no"})
        return said(json.dumps({n: "unsure" if "odd" in line else "yes" if "is" in line else "no"
                                for n, line in re.findall(r"^(\d+)\. (.+)$", text, re.M)}))
    entries = [{"criteria": ["is red", {"text": "has legs", "weight": 3}, "odd"]}, {}, {"criteria": ["mute"]}]
    with endpoint(reply) as server:
        plain = JudgeRubric(url=server.url, **QUICK)
        assert answered(plain(shades(1, 2, 3), ["p"] * 3, entries)) == [0.25, None, "failed"]
        assert len(server.seen) == 2
        always = JudgeRubric(url=server.url, criteria=["is sharp"], **QUICK)
        assert always(shades(1, 2), ["p"] * 2, entries[:2]) == [0.4, 1]
        flaws = JudgeRubric(url=server.url, criteria=[{"text": "is loud", "weight": -0.5},
                                                      {"text": "has mud", "weight": -1, "needed": True}], **QUICK)
        assert flaws(shades(1, 2), ["p"] * 2, [{"criteria": ["is red"]}, {}]) == [0.5, None]
    assert "criterion is {'text': 'a', 'weight': 0}" in message(JudgeRubric, criteria=[{"text": "a", "weight": 0}])
    assert "names no {criteria}" in message(JudgeRubric, template="{prompt}")
    assert "criterion is 5" in message(plain, ONE, ["p"], [{"criteria": 5}])


def test_criteria_are_written_once_per_prompt(tmp_path):
    def reply(body, number):
        text = parts(body, "text")[0]
        if "Write at most 8 criteria" in text:
            return said("no idea" if "fog" in text else json.dumps(
                [{"text": f"fits {number}", "weight": 3}, {"text": "boasts", "weight": -1}, {"text": "", "weight": 0}]))
        return said(json.dumps({"1": "yes", "2": "yes"}))
    with endpoint(reply) as server:
        settings = {"url": server.url, "writer": {"url": server.url, **QUICK}, "file": str(tmp_path / "c.jsonl"),
                    "concurrency": 1, **QUICK}
        reward = TextJudgeRubric(**settings)
        prompts, own = ["dose?", "fog", "dose?"], [{}, {}, {"criteria": ["is short"]}]
        # Weights 3 and -1, both met: 2 of 3; nothing was written for fog; a prompt's own criteria stand.
        assert answered(reward(["a", "b", "c"], prompts, own)) == [pytest.approx(2 / 3), None, 1]
        assert len(server.seen) == 4  # two prompts were written for, two completions judged
        kept = json.loads((tmp_path / "c.jsonl").read_text())
        assert kept["prompt"] == "dose?" and [entry["weight"] for entry in kept["criteria"]] == [3, -1]
        assert TextJudgeRubric(**settings)(["a"], ["dose?"], [{}]) == [pytest.approx(2 / 3)]
        assert len(server.seen) == 5
    assert "give writer, or leave it out" in message(TextJudgeRubric, file="x.jsonl")


def test_deqa_takes_probabilities_where_there_are_any():
    top = [{"token": "fair", "logprob": math.log(0.25)}, {"token": "good", "logprob": math.log(0.75)}]
    replies = [said("good", reason="length", logprobs={"content": [{"token": "good", "top_logprobs": top}]}),
               said("good", logprobs=None), said("good", logprobs={"content": []}), said("nice"),
               said("Sorry, it is good", logprobs={"content": [{"token": "good", "top_logprobs": top}]})]
    with endpoint(replies) as server:
        reward = DeQA(url=server.url, concurrency=1, **QUICK)
        found = answered(reward(shades(1, 2, 3, 4, 5), ["p"] * 5))
        assert found == [pytest.approx(3.75, abs=1e-12), 4, 4, "failed", "failed"]
        DeQA(url=server.url, alternatives=0, **QUICK)(ONE, ["p"])
        assert "logprobs" not in server.seen[-1][2] and len(server.seen[-1][2]["messages"]) == 2
        DeQA(url=server.url, begun="", **QUICK)(ONE, ["p"])
        assert len(server.seen[-1][2]["messages"]) == 1 and "continue_final_message" not in server.seen[-1][2]
        DeQA(url=server.url, template="How is it?", begun="The quality is", **QUICK)(ONE, ["p"])
    first = server.seen[0][2]  # the question and the beginning that its weights were trained on
    assert first["messages"][0]["content"][-1]["text"] == "How would you rate the quality of this image?"
    assert first["messages"][1] == {"role": "assistant", "content": "The quality of the image is"}
    assert server.seen[0][2]["logprobs"] is True and server.seen[0][2]["top_logprobs"] == 20
    begun = server.seen[-1][2]  # the answer goes on from the words that it is given
    assert begun["messages"][1:] == [{"role": "assistant", "content": "The quality is"}]
    assert begun["messages"][0]["content"][-1]["text"] == "How is it?"
    assert (begun["continue_final_message"], begun["add_generation_prompt"]) == (True, False)


# --- dialects of servers ----------------------------------------------------------------------------------------------
REASONING = {"error": {"message": "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
                                  "'max_completion_tokens' instead.", "code": "unsupported_parameter"}}
FIELDS = {"detail": "Unexpected fields in the request: {'top_logprobs', 'logprobs'}"}
FORBIDDEN = {"detail": [{"loc": ["body", "temperature"], "msg": "Extra inputs are not permitted", "input": 0.0}]}


@pytest.mark.parametrize("refusal, status, sent, told", [
    (REASONING, 400, {"max_completion_tokens", "temperature"}, "does not take max_tokens: it is sent as"),
    (FORBIDDEN, 422, {"max_tokens"}, "does not take temperature: it is left out")])
def test_a_key_that_a_server_refuses_is_not_sent_again(refusal, status, sent, told, capsys):
    with endpoint([(status, {}, refusal), said("Score: 5")]) as server:
        judge = Judge(url=server.url, **QUICK)
        assert judge(ONE, ["p"]) == [5] and judge(ONE, ["p"]) == [5]
    assert [body.keys() - {"model", "messages"} for _, _, body in server.seen] == [
        {"max_tokens", "temperature"}, sent, sent]
    assert told in capsys.readouterr().err


def test_extra_keys_probabilities_and_beginnings():
    with endpoint([(400, {}, REASONING)]) as server:
        judge = Judge(url=server.url, extra={"max_tokens": 9}, **QUICK)
        assert "Use 'max_completion_tokens' instead" in message(judge, ONE, ["p"], error=Failed)
    assert len(server.seen) == 1
    with endpoint([(422, {}, FIELDS), said("good")]) as server:
        assert DeQA(url=server.url, **QUICK)(ONE, ["p"]) == [4]
    assert {"logprobs", "top_logprobs"} <= server.seen[0][2].keys()
    assert not {"logprobs", "top_logprobs"} & server.seen[1][2].keys()
    for owner, known in (("vllm", True), ("sglang", True), ("local", False), ("me", False)):
        with endpoint([said("good")]) as server:
            server.models = (200, {}, {"data": [{"id": "m", "owned_by": owner}]})
            assert DeQA(url=server.url, **QUICK)(ONE, ["p"]) == [4]
        body = server.seen[0][2]
        assert [each["role"] for each in body["messages"]] == ["user"] + ["assistant"] * known
        assert ("continue_final_message" in body, "add_generation_prompt" in body) == (known, known)


# Servers that were not run here, by their documentation: owner of their models, the keys of a request that it lists,
# and the answer to an unknown model.
OLLAMA = ("library", {*"""model messages frequency_penalty presence_penalty response_format seed stop stream tools
                          stream_options temperature top_p max_tokens reasoning_effort reasoning""".split()},
          {"message": 'model "m" not found, try pulling it first', "type": "not_found_error", "param": None,
           "code": None})
LM_STUDIO = ("organization_owner", {*"""model messages top_p top_k temperature max_tokens stream stop presence_penalty
                                        frequency_penalty logit_bias repeat_penalty seed""".split()},
             {"message": 'Model "m" not found. Please specify a valid model.', "type": "invalid_request_error",
              "param": "model", "code": "model_not_found"})


@pytest.mark.parametrize("owner, fields, refusal", [OLLAMA, LM_STUDIO], ids=["Ollama", "LM Studio"])
def test_servers_by_their_documentation(owner, fields, refusal):
    """A judge sends listed keys alone; DeQA adds two, which a server may ignore or refuse by name, and no beginning."""
    with endpoint([said("Score: 5")]) as server:
        server.models = (200, {}, {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": owner}]})
        assert Judge(url=server.url, **QUICK)(ONE, ["p"]) == [5]
        body = server.seen[0][2]
    assert body.keys() <= fields and parts(body, "image_url")[0]["url"].startswith("data:image/")
    refused = (400, {}, {"error": "Unrecognized keys in the request: 'logprobs', 'top_logprobs'"})
    for replies in ([said("good")], [refused, said("good")]):
        with endpoint(replies) as server:
            server.models = (200, {}, {"data": [{"id": "m", "owned_by": owner}]})
            assert DeQA(url=server.url, **QUICK)(ONE, ["p"]) == [4]
        [question] = server.seen[-1][2]["messages"]
        added = server.seen[-1][2].keys() - fields
        assert question["role"] == "user" and added == ({"logprobs", "top_logprobs"} if len(replies) == 1 else set())
    with endpoint([(404, {}, {"error": refusal})]) as server:
        assert f"answered 404: {refusal['message']}" in message(Judge(url=server.url, **QUICK), ONE, ["p"])
    assert len(server.seen) == 1


@pytest.mark.parametrize("status, reply, told", [
    (422, {"detail": "Field required"}, "answered 422: Field required"),
    (400, {"detail": [{"loc": ["body", "messages", 0], "msg": "no"}]}, "answered 400: body.messages.0: no"),
    (400, {"message": "no such thing"}, "answered 400: no such thing"), (400, {"error": "bad"}, "answered 400: bad"),
    (400, {"error": {"message": "much"}}, "answered 400: much"), (400, b"plain words", "answered 400: plain words"),
    (400, b"<html><head><title>x</title></head><h1>Bad</h1> gateway</html>", "answered 400: Bad gateway"),
    (400, {"object": "error", "message": "old vLLM", "code": 400}, "answered 400: old vLLM"),
    (400, [1, 2], "answered 400: 1; 2"), (400, b"", "answered 400"), (400, {"errors": [{"message": "a"}]}, "400: a")])
def test_every_server_says_why_and_a_trial_ends_with_it(status, reply, told):
    with endpoint([(status, {}, reply)]) as server:
        judge = Judge(url=server.url, **QUICK)
        assert message(judge, ONE, ["p"], error=Failed).endswith(told)
        with brief():
            found = pytest.raises(UserError, judge, ONE, ["p"]).value
    assert str(found).endswith(told) and not isinstance(found, Failed) and len(server.seen) == 2


def events(*choices: dict) -> bytes:
    return b"".join(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n" for choice in choices)


CALL = [{"index": 0, "function": {"name": "score", "arguments": '{"sco'}}]


@pytest.mark.parametrize("reply, score", [
    (events({"delta": {"role": "assistant", "content": ""}}, {"delta": {"content": "Score: "}},
            {"delta": {"content": "7"}, "finish_reason": "stop"}) + b"data: [DONE]\n\n", 7),
    (b": ping\r\n\r\n" + events({"delta": {"content": "Score: 7"}, "finish_reason": "stop"}), 7),
    (events({"delta": {"tool_calls": CALL}}, {"delta": {"tool_calls": [{"index": 0, "function": {"arguments":
            're": 7}'}}]}, "finish_reason": "tool_calls"}), 7),
    (events({"delta": {"content": "Score: 7"}, "finish_reason": "length"}), "failed"),
    ({"content": None, "tool_calls": [{"function": {"name": "score", "arguments": '{"score": 7}'}}]}, 7),
    ({"content": None, "tool_calls": [{"function": {"name": "score", "arguments": {"score": 7}}}]}, 7),
    ({"content": None, "function_call": {"name": "score", "arguments": '{"score": 7}'}}, 7),
    ({"content": None, "reasoning_content": "It fits. Score: 7"}, 7), ({"content": "", "reasoning": "Score: 7"}, 7),
    ({"content": "Score: 7", "reasoning_content": "Score: 3"}, 7),
    ({"content": [{"type": "output_text", "text": "Score: 7"}]}, 7),
    ({"content": [{"type": "thinking", "thinking": "Score: 3"}, {"type": "text", "text": "Score: 7"}]}, 7),
    ({"content": ["Score: 7"]}, 7)])
def test_an_answer_in_every_form_is_read(reply, score):
    whole = reply if isinstance(reply, bytes) else {"choices": [{"message": reply, "finish_reason": "stop"}]}
    with endpoint([(200, {}, whole)]) as server:
        assert answered(Judge(url=server.url, **QUICK)(ONE, ["p"])) == [score]
    assert len(server.seen) == 1


def test_reward_score_says_why_there_is_none(tmp_path, capsys):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with endpoint([said("It is fine.")]) as server:
        command = ["reward", "score", "judge", str(tmp_path / "a.png"), "--prompt", "x", "--args",
                   json.dumps({"url": server.url, "model": "m"})]
        assert main(command) == 0 and "a judge gave no answer in the form: 'It is" in capsys.readouterr().out
        assert main([*command, "--json"]) == 0
        [row] = json.loads(capsys.readouterr().out)["scores"]
    assert row["score"] is None and row["reason"] == "a judge gave no answer in the form: 'It is fine.'"

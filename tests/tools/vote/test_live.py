"""The live ballot of `flowgrpo taste`: questions that come while it serves, votes on disk, undo, checks, the page."""

import json
import threading
from pathlib import Path

import pytest
from PIL import Image

from flowgrpo.contrib.taste.votes import SKIP, TIE, Question, Vote, VoteLog
from flowgrpo.data.pairs import load_pairs
from flowgrpo.loopback import Refused
from flowgrpo.tools.vote.live import LiveBallot
from tests.helpers.refusals import message
from tests.tools.vote.test_vote import serving


def questions(place: Path, batch: int, count: int = 2, check: bool = False) -> list[Question]:
    """Questions of a batch, each with its own grey images."""
    made = []
    for number in range(count):
        name = f"{batch}-{'c' if check else 'q'}{number}"
        files = tuple(place / f"{name}-{shade}.png" for shade in range(2 if check else 4))
        for shade, file in enumerate(files):
            Image.new("RGB", (8, 8), (10 + shade,) * 3).save(file)
        made.append(Question(batch, number, f"prompt {batch} {number}", files, check))
    return made


def never() -> None:
    """No stop is asked for."""


def place_of(live: LiveBallot, name: str, image: int) -> int:
    """Where the page shows an image of a question."""
    return live.files(name).index(live.questions[name].files[image])


@pytest.fixture
def ballot(tmp_path):
    return lambda **options: LiveBallot(VoteLog(tmp_path / "votes.jsonl"), **options)


def test_a_batch_is_learned_once_each_of_its_questions_has_a_vote(ballot, tmp_path):
    live = ballot()
    live.ask(questions(tmp_path, 0))
    live.vote("0.q0", [0, 1, 2, 3], place_of(live, "0.q0", 2))
    live.vote("0.q1", [0, 1], TIE)
    votes = live.wait(0, never)
    assert votes[0].choice == 2 and sorted(votes[0].shown) == [0, 1, 2, 3]
    assert votes[1].choice == TIE and live.files("0.q1")[:2] == tuple(
        live.questions["0.q1"].files[shown] for shown in votes[1].shown)
    assert live.state()["question"] is None and not live.state()["undo"]
    with pytest.raises(Refused):
        live.vote("0.q1", [0, 1], 0)
    live.undo()
    assert len(live.log.votes) == 2
    live.ask(questions(tmp_path, 1))
    assert live.state()["question"] == {"name": "1.q0", "count": 4} and live.state()["title"] == "prompt 1 0"
    assert (live.state()["clicks"], live.state()["done"], live.state()["total"]) == (2, 0, 2)


def test_undo_takes_votes_back_until_their_batch_is_learned(ballot, tmp_path):
    live = ballot()
    live.ask(questions(tmp_path, 0) + questions(tmp_path, 1))
    for name in ("0.q0", "0.q1", "1.q0"):
        live.vote(name, [0, 1, 2, 3], 0)
    live.wait(0, never)
    live.undo()
    live.undo()
    assert list(live.log.votes) == ["0.q0", "0.q1"] and live.state()["question"]["name"] == "1.q0"


def test_a_line_that_cannot_be_written_is_no_vote(ballot, tmp_path):
    live = ballot()
    live.ask(questions(tmp_path, 0))
    (tmp_path / "votes.jsonl").mkdir()
    with serving(live) as ask:
        status, text = ask("vote", {"question": "0.q0", "shown": [0, 1], "choice": 0})
    assert status == 500 and b"the vote was not kept" in text and json.dumps(live.state()["undo"]) == "false"


def test_a_loop_that_waits_is_woken_by_the_last_vote_and_by_the_end(ballot, tmp_path):
    live, got = ballot(), []
    live.ask(questions(tmp_path, 0, 1) + questions(tmp_path, 1, 1))
    def loop():
        got.append(live.wait(0, never))
        got.append(live.wait(1, never))
    thread = threading.Thread(target=loop)
    thread.start()
    live.vote("0.q0", [0, 1, 2, 3], SKIP)
    live.finish()
    thread.join(10)
    assert got[0][0].choice == SKIP and got[1] is None and not live.state()["live"]
    with pytest.raises(Refused):
        live.vote("1.q0", [0, 1, 2, 3], 0)


def test_the_session_ends_with_its_time(ballot, tmp_path):
    now = [0.0]
    live = ballot(seconds=60, clock=lambda: now[0])
    now[0] = 100.0
    assert live.seconds_left == 60 and not live.is_finished
    live.ask(questions(tmp_path, 0))
    now[0] = 159.0
    assert live.seconds_left == 1 and live.state()["question"]
    now[0] = 160.0
    assert live.is_finished and live.state()["question"] is None and live.wait(0, never) is None


def test_votes_are_on_disk_before_the_next_one_and_a_cut_line_is_dropped(ballot, tmp_path):
    live = ballot()
    live.ask(questions(tmp_path, 0, 3))
    live.vote("0.q0", [0, 1, 2, 3], place_of(live, "0.q0", 3))
    live.vote("0.q1", [0, 1], 1)
    live.undo()
    live.vote("0.q1", [0, 1], 0)
    file = tmp_path / "votes.jsonl"
    assert file.read_text().count("\n") == 4
    file.write_bytes(file.read_bytes() + b'{"question": "0.q2", "sho')
    again = ballot()
    again.ask(questions(tmp_path, 0, 3))
    assert again.log.votes == live.log.votes and again.log.votes["0.q0"].choice == 3
    assert again.log.votes["0.q1"].choice == again.log.votes["0.q1"].shown[0]
    assert again.files("0.q2") == live.files("0.q2") and len(live.files("0.q2")) == 4
    assert again.state()["question"]["name"] == "0.q2"
    again.vote("0.q2", [0, 1, 2, 3], TIE)
    assert len(VoteLog(file).votes) == 3
    file.write_text('{"prompt": "a"}\n')
    assert "votes.jsonl:1 is no vote: expected the file that" in message(VoteLog, file)


def test_checks_are_blind_and_count_a_tie_as_one_half(ballot, tmp_path):
    live = ballot(seed=1)
    live.ask(questions(tmp_path, 0, 12, check=True))
    left = {name: live.files(name)[0] for name in live.questions}
    assert {file.stem[-1] for file in left.values()} == {"0", "1"}  # base and now on both sides
    for number, (name, file) in enumerate(left.items()):
        now = 0 if file.stem.endswith("1") else 1
        live.vote(name, [0, 1], TIE if number < 2 else now if number < 10 else 1 - now)
    assert live.against() == {"wins": 9.0, "of": 12, "share": "0.75 [0.47, 0.91]"}
    assert live.wait(0, never) == {} and live.state()["clicks"] == 0


def test_images_are_in_random_places_of_the_seed(ballot, tmp_path):
    """Whoever always chooses the first place chooses each image about as often: 60 questions, deviation 3.4 of 15."""
    live, other = ballot(seed=2), LiveBallot(VoteLog(tmp_path / "others.jsonl"), seed=3)
    for each in (live, other):
        each.ask(questions(tmp_path, 0, 60))
        for number in range(60):
            each.vote(f"0.q{number}", [0, 1, 2, 3], 0)
    first = [vote.choice for vote in live.log.votes.values()]
    assert all(8 <= first.count(image) <= 24 for image in range(4))
    assert first != [vote.choice for vote in other.log.votes.values()]


def test_the_targets_of_votes_and_their_pairs(tmp_path):
    assert Vote((0, 1, 2, 3), 2).target == [0, 0, 1, 0] and Vote((0, 1), TIE).target == [0.5, 0.5]
    assert Vote((0, 1, 2, 3), TIE).target == [0.25] * 4 and Vote((0, 1), SKIP).target is None
    log = VoteLog(tmp_path / "votes.jsonl")
    votes = Vote((0, 1, 2, 3), 2), Vote((0, 1), TIE), Vote((0, 1, 2, 3), TIE), Vote((0, 1), SKIP)
    for question, vote in zip(questions(tmp_path, 0, 4), votes):
        log.add(question, vote)
    assert VoteLog(tmp_path / "votes.jsonl").write_pairs(tmp_path / "pairs.jsonl") == 4
    pairs = load_pairs(tmp_path / "pairs.jsonl")
    assert [(Path(pair.chosen).stem, Path(pair.rejected).stem) for pair in pairs] == [
        ("0-q0-2", "0-q0-0"), ("0-q0-2", "0-q0-1"), ("0-q0-2", "0-q0-3"), ("0-q1-0", "0-q1-1")]
    assert [pair.verdicts["overall"] for pair in pairs] == [1, 1, 1, 0.5]


def test_the_page_votes_over_http(ballot, tmp_path):
    live = ballot()
    live.ask(questions(tmp_path, 0))
    with serving(live) as ask:
        status, text = ask("")
        assert status == 200 and b"[[" not in text and b"http" not in text
        assert ask("state")[1]["question"]["name"] == "0.q0" and ask("0.q0/3")[1][:4] == b"\x89PNG"
        state = ask("vote", {"question": "0.q0", "shown": [0, 1, 2, 3], "choice": 2})[1]
        assert state["question"]["name"] == "0.q1" and state["undo"] and state["clicks"] == 1
        assert ask("undo", {})[1]["question"]["name"] == "0.q0"
        live.tell(updates=3, foretold={"right": 2, "of": 3}, looks={"edge_width": 0.9, "diversity": None})
        assert ask("state")[1]["facts"] == "2 of the last 3 clicks were predicted \u00b7 width of edges 0.90 of " \
            "the base's \u00b7 3 updates"
        live.tell(updates=0, evidence=3.21, needed=20.0, foretold={}, looks={})
        assert ask("state")[1]["facts"] == "evidence of a taste: 3.2 of 20, from where it trains"
        assert ask("state", root=f"/{'x' * 22}/")[1] == \
            b"expected the address that `flowgrpo taste` printed, with its token"
        assert not ask("finish", {})[1]["live"]
        assert ask("vote", {"question": "0.q1", "shown": [0, 1], "choice": 0})[0] == 409
    assert not live.log.votes


@pytest.mark.parametrize("path, content, headers, status", [
    ("finish", {}, {"Origin": "null"}, 403), ("vote", {"question": "0.q9", "shown": [0, 1], "choice": 0}, {}, 400),
    ("vote", {"question": "0.q0", "shown": [0, 2], "choice": 0}, {}, 400),
    ("vote", {"question": "0.q0", "shown": [0, 1], "choice": 2}, {}, 400),
    ("vote", {"question": "0.q0", "shown": [0, 1], "choice": True}, {}, 400),
    ("vote", {"question": ["0.q0"], "shown": [0, 1], "choice": 0}, {}, 400),
    ("0.q0/4", None, {}, 404), ("0.q9/0", None, {}, 404), ("0.q0/0.mp4", None, {}, 404)])
def test_refusals(ballot, tmp_path, path, content, headers, status):
    live = ballot()
    live.ask(questions(tmp_path, 0))
    with serving(live) as ask:
        assert ask(path, content, **headers)[0] == status
        assert ask(path, content, root=f"/{'x' * 22}/", **headers)[0] == 403
    assert not live.log.votes and not live.is_finished and not (tmp_path / "votes.jsonl").exists()

"""`flowgrpo compare vote`: sources of pairs, the page over HTTP, and the file that rewards and runs read."""

import http.client
import json
import re
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowgrpo.config.sections import Adapter
from flowgrpo.contrib.taste.votes import SKIP, TIE
from flowgrpo.data.pairs import OVERALL, load_pairs, split
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation import image_files
from flowgrpo.evaluation.measured import Measured
from flowgrpo.evaluation.pages.before_after import draw_measured
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.tools.learned_rewards import training as reward_training
from flowgrpo.tools.vote import judged, sources
from flowgrpo.tools.vote import server as page
from flowgrpo.tools.vote.ballot import Ballot, count_votes
from flowgrpo.tools.vote.sources import pairs
from tests.helpers import ffmpeg, tiny, tiny_runs
from tests.helpers.refusals import error_line, message, printed
from tests.helpers.servers import running

COUNT = 8


def folders(place, count=COUNT):
    """Return two folders of `count` images, red in a and blue in b, whose files say their prompts."""
    for name, channel in (("a", 0), ("b", 2)):
        (place / name).mkdir(parents=True)
        for i in range(count):
            picture = torch.zeros(3, 16, 16)
            picture[channel] = 0.5 + i / 20
            text = image_files.parameters(f"prompt {i}", i, picture, {"Steps": 2})
            image_files.save(place / name / f"{i}.png", picture, text)
    return [place / "a", place / "b"]


@pytest.fixture
def ballot(tmp_path):
    return lambda seed=0: Ballot(*pairs(folders(tmp_path) if not (tmp_path / "a").exists() else
                                        [tmp_path / "a", tmp_path / "b"]), tmp_path / "out" / "pairs.jsonl", seed)


@contextmanager
def serving(ballot):
    """Context manager: serve a ballot; yield a function that sends a request and returns status and content."""
    with running(page.server(ballot, 0)) as server:
        root = re.fullmatch(r"http://127.0.0.1:\d+(/[\w-]{22}/)", page.address(server))[1]
        def ask(path, content=None, root=root, **headers):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
            body = None if content is None else content if isinstance(content, bytes) else json.dumps(content)
            kind = {} if content is None else {"Content-Type": "application/json"}
            connection.request("GET" if body is None else "POST", root + path, body, kind | headers)
            answer = connection.getresponse()
            text = answer.read()
            is_json = answer.headers["Content-Type"] == "application/json"
            return answer.status, json.loads(text) if is_json else text
        yield ask


def voted(name, choice):
    """Vote on a pair as the page sends it."""
    return {"question": name, "shown": [0, 1], "choice": choice}


def rows(ballot):
    return [json.loads(line) for line in ballot.output.read_text().splitlines()]


# --- over HTTP -------------------------------------------------------------------------------------------------------
def test_votes_over_http_are_pairs_that_a_reward_trains_on(ballot, tmp_path):
    first = ballot()
    with serving(first) as ask:
        state = ask("state")[1]
        assert (state["done"], state["total"], state["undo"]) == (0, COUNT, False)
        shown = set()
        while state["question"]:
            name = state["question"]["name"]
            status, content = ask(f"{name}/0")
            (tmp_path / "left.png").write_bytes(content)
            red = Image.open(tmp_path / "left.png").getpixel((1, 1))[0] > 0
            shown.add(red)
            status, state = ask("vote", voted(name, int(red)))  # blue is preferred
            assert status == 200
    assert shown == {True, False}  # sides change
    for row in rows(first):
        assert set(row) == {"prompt", "chosen", "rejected"} and row["chosen"].startswith("../b/")
    every = load_pairs(first.output)
    assert sorted(pair.prompt for pair in every) == [f"prompt {i}" for i in range(COUNT)]
    assert state["summary"] == [["prompts", "votes", "for b", "ties", "share for b over a, 95 %"],
                                ["all prompts", "8", "8", "0", "1.00 [0.68, 1.00]"]]
    assert state["facts"].startswith("Share of the votes for b over a, without ties")
    settings = reward_training.Settings(size=16, epochs=1, batch=4)
    accuracies = reward_training.train(*split(every, 0.25), tmp_path / "reward", settings)
    assert set(accuracies) == {OVERALL} and (tmp_path / "reward" / "reward.json").is_file()


def test_tie_skip_undo_and_resume(ballot):
    first = ballot(seed=3)
    with serving(first) as ask:
        order = []
        for choice in (TIE, SKIP, 0, 1):
            order.append(ask("state")[1]["question"]["name"])
            state = ask("vote", voted(order[-1], choice))[1]
        assert state["done"] == 3 and state["progress"] == "3 of 8, 1 skipped"
        assert rows(first)[0]["aspects"] == {OVERALL: "tie"} and load_pairs(first.output)[0].verdicts[OVERALL] == 0.5
        state = ask("undo", {})[1]
        assert state["question"]["name"] == order[3] and state["done"] == 2 and len(rows(first)) == 2
        for place in (2, 1, 0):
            state = ask("undo", {})[1]
            assert state["question"]["name"] == order[place]
        assert not state["undo"] and first.output.read_text() == "" and ask("undo", {})[0] == 200
        ask("vote", voted(order[0], 0))
        ask("vote", voted(order[1], TIE))
        assert ask("vote", voted(order[1], 1))[1]["done"] == 2  # in another window
    again = ballot(seed=3)
    assert again.verdicts == first.verdicts and again.state()["done"] == 2 and again.state()["undo"]
    assert again.state()["question"]["name"] == order[2]
    again.undo()
    assert len(rows(again)) == 1 and again.state()["question"]["name"] == order[1]


def test_rows_of_other_pairs_are_kept(ballot, tmp_path):
    folders(tmp_path / "other", 1)
    (tmp_path / "out").mkdir()
    other = {"prompt": "else", "chosen": "../other/a/0.png", "rejected": "../other/b/0.png", "aspects": {"hue": "tie"}}
    (tmp_path / "out" / "pairs.jsonl").write_text(json.dumps(other) + "\n")
    first = ballot()
    assert first.state()["done"] == 0 and not first.state()["undo"]
    first.vote("2", [0, 1], TIE)
    first.undo()
    first.vote("1", [0, 1], 0)
    assert rows(first)[0] == other and len(rows(first)) == 2
    (tmp_path / "out" / "pairs.jsonl").write_text("")
    with serving(first) as ask:
        status, text = ask("vote", voted("3", 0))
    assert status == 409 and b"another program has changed " in text and b"pairs.jsonl: start `flowgrpo c" in text
    assert 3 not in first.verdicts and first.output.read_text() == ""


def test_order_and_sides_are_of_the_seed(ballot):
    first, same, other = ballot(1), ballot(1), ballot(2)
    assert (first.order, first.b_left) == (same.order, same.b_left) != (other.order, other.b_left)
    assert sorted(first.order) == list(range(COUNT)) and len({*first.b_left}) == 2


def test_its_own_page_is_answered_and_tells_no_side(ballot):
    with serving(ballot()) as ask:
        status, text = ask("")
        assert status == 200 and b"[[" not in text and b"http" not in text
        status, state = ask("vote", voted("0", 0), Host="localhost:9", Origin="http://localhost:9")
        assert status == 200 and state["done"] == 1
        assert set(state["question"]) == {"name", "count", "sources", "video"} and state["summary"] is None


@pytest.mark.parametrize("path, content, headers, status", [
    ("state", None, {"Host": "evil.example"}, 403),
    ("state", None, {"Origin": "https://evil.example"}, 403),
    ("vote", voted("0", 0), {"Origin": "null"}, 403),
    ("vote", voted("0", 0), {"Content-Type": "text/plain"}, 415),
    ("vote", b"x" * 5000, {}, 413), ("vote", b"[[[", {}, 400), ("vote", [], {}, 400),
    ("vote", voted(str(COUNT), 0), {}, 400), ("vote", voted(0, 0), {}, 400),
    ("vote", voted("-1", 0), {}, 400), ("vote", voted("0", "b"), {}, 400),
    ("vote", voted("0", [0]), {}, 400), ("vote", voted("0", 0) | {"shown": [1, 0]}, {}, 400), ("else", {}, {}, 404),
    ("finish", {}, {}, 404), ("../a/0.png", None, {}, 404), (f"{COUNT}/0", None, {}, 404), ("0/2", None, {}, 404),
    ("0/0.mp4", None, {}, 404), ("0/source/0", None, {}, 404), ("0/0.png", None, {}, 404),
    ("page.html", None, {}, 404)])
def test_refusals(ballot, path, content, headers, status):
    refusing = ballot()
    with serving(refusing) as ask:
        assert ask(path, content, **headers)[0] == status
        assert ask(path, content, root="/", **headers)[0] in (403, 404)
        assert ask(path, content, root=f"/{'x' * 22}/", **headers)[0] == 403
    assert not refusing.verdicts and not refusing.output.exists()


def test_pairs_are_drawn_with_the_base_and_a_lora(tmp_path, monkeypatch, capsys):
    """By the command a user types, up to its server."""
    PipelinePolicy(load_pipeline("starter"), Adapter(rank=1)).weights.save(tmp_path / "lora")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": text, "metadata": {"task": text[-4:]}}) + "\n"
                                              for text in ("a red star", "a blue ring")))
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", lambda self: None)
    arguments = ["compare", "vote", "starter", "--lora", str(tmp_path / "lora"), "--prompts", str(tmp_path / "p.jsonl"),
                 "--output", str(tmp_path / "pairs.jsonl"), "--port", "0"]
    out = printed(capsys, *arguments)
    assert "2 pairs, 0 with a vote: http://127.0.0.1:" in out and "share for lora over base" in out
    listed, names = sources.drawn_pairs(Path("starter"), [tmp_path / "lora"], tmp_path / "p.jsonl", 5, 0,
                                tmp_path / "pairs-pictures")
    assert names == ("base", "lora") and [each.category for each in listed] == ["star", "ring"]
    assert [each.a.relative_to(tmp_path).parts[:2] for each in listed] == [("pairs-pictures", "a")] * 2
    assert Image.open(listed[0].b).size == Image.open(listed[0].a).size
    assert not (tmp_path / "other-images").exists()
    arguments = ["compare", "vote", "starter", "--prompts", str(tmp_path / "p.jsonl"), "--count", "1", "--output",
                 str(tmp_path / "other.jsonl"), "--port", "0"]
    assert "share for seed 1 over seed 0" in printed(capsys, *arguments)
    one, other = (Image.open(*(tmp_path / "other-images" / side).rglob("*.png")) for side in "ab")
    assert one.size == other.size and one.tobytes() != other.tobytes()


# --- sources ---------------------------------------------------------------------------------------------------------
def test_a_page_of_images_names_its_columns_and_tasks(tmp_path):
    prompts = [Prompt(f"prompt {i}", metadata={"task": "few" if i < 3 else "many"}) for i in range(6)]
    base, after = (Measured(prompts, {}, torch.full((6, 3, 8, 8), value)) for value in (0.2, 0.8))
    file = tmp_path / "grid.png"
    kept = image_files.save_columns(file, ("base", "epoch 40"), [base.images, after.images])
    assert kept == ["grid/0-base", "grid/1-epoch-40"]
    draw_measured(file, {"base": base, "epoch 40": after},
                  image_files.facts(tmp_path, ("base", "epoch 40"), prompts, kept))
    listed, names = pairs([file])
    assert names == ("base", "epoch 40") and [each.category for each in listed] == ["few"] * 3 + ["many"] * 3
    assert Image.open(listed[5].b).getpixel((0, 0)) == (204, 204, 204) and listed[5].prompt == "prompt 5"
    ballot = Ballot(listed, names, tmp_path / "pairs.jsonl")
    for number in range(4):
        ballot.vote(str(number), [0, 1], TIE if not number else int(not ballot.b_left[number]))
    shown = ballot.summary()
    assert shown["all prompts"] == {"votes": 4, "ties": 1, "b": 3, "share": "1.00 [0.44, 1.00]"}
    assert (shown["few"]["b"], shown["few"]["ties"], shown["many"]["votes"]) == (2, 1, 1)
    (tmp_path / "grid" / "0-base" / "000.png").unlink()
    assert "grid.png has 6 prompts, but 5 and 6 images in" in message(pairs, [file])


def test_the_sources_of_edits_stand_above_their_pairs(tmp_path):
    """Two prompts of one text; a file outside of the page's folder is not shown."""
    for name, shade in (("a", 40), ("b", 220)):
        Image.new("RGB", (900, 600), (shade,) * 3).save(tmp_path / f"{name}.png")
    prompts = [Prompt("make it red", image=str(tmp_path / f"{name}.png")) for name in "ab"]
    base = after = torch.rand(2, 3, 8, 8)
    file = tmp_path / "grid.png"
    kept = image_files.save_columns(file, ("base", "tuned"), [base, after])
    brought = image_files.save_sources(file, prompts, base)
    assert brought == [["grid/source/000-image.png"], ["grid/source/001-image.png"]]
    measured = Measured(prompts, {}, base)
    draw_measured(file, {"base": measured, "tuned": measured}, image_files.facts(
        tmp_path, ("base", "tuned"), prompts, kept, [["../x.png", *brought[0]], brought[1]]))
    listed, names = pairs([file])
    assert [[source.name for source in each.sources] for each in listed] == [["000-image.png"], ["001-image.png"]]
    ballot = Ballot(listed, names, tmp_path / "pairs.jsonl")
    assert ballot.state()["question"]["sources"] == 1 and len(ballot.sources("0")) == 1
    assert Image.open(ballot.sources("1")[0]).getpixel((0, 0)) == (220, 220, 220)


@pytest.mark.fast
def test_finished_runs_and_paths_of_images(tmp_path):
    tiny_runs.whole(tiny.config(tmp_path, train__group=3, train__prompts=1, train__epochs=1, train__lr=1e-2,
                                eval__grid=2))
    listed, names = pairs([tmp_path / "run"])
    assert names == ("before", "after") and {each.prompt for each in listed} < set(tiny.PROMPTS)
    assert [(each.a.parent.name, each.b.parent.name) for each in listed] == [("before", "after")] * 2
    assert any(Image.open(each.a).tobytes() != Image.open(each.b).tobytes() for each in listed)
    for name, path in (("a", "x.png"), ("b", tmp_path / "b" / "x.png")):
        named(tmp_path / name, path)
        Image.new("RGB", (4, 4)).save(tmp_path / name / "x.png")
    [pair], _ = sources.pairs([tmp_path / "a", tmp_path / "b"])
    assert (pair.a, pair.b) == (tmp_path / "a" / "x.png", tmp_path / "b" / "x.png")


def test_clips_have_a_video_and_its_fallback(tmp_path, monkeypatch):
    ffmpeg.install(tmp_path / "bin", monkeypatch)
    clips = torch.rand(2, 3, 3, 8, 8)
    for name in "ab":
        image_files.save_rows(tmp_path / name, clips)
        Image.new("RGB", (8, 24)).save(tmp_path / name / "000.png")  # the same frames, as a run and `eval` keep them
    with serving(Ballot(*pairs([tmp_path / "a", tmp_path / "b"]), tmp_path / "pairs.jsonl")) as ask:
        assert ask("state")[1]["total"] == 2
        assert ask("state")[1]["question"]["video"] == [True, True]
        assert ask("1/1.mp4") == (200, ffmpeg.BYTES) and ask("1/1")[1][8:12] == b"WEBP"


def test_folders_without_a_common_name_or_prompt(tmp_path):
    a, b = folders(tmp_path, 1)
    (tmp_path / "c").mkdir()
    assert "no images of equal file names (1 and 0 images)" in message(lambda: pairs([a, tmp_path / "c"]))
    image_files.save(b / "0.png", torch.zeros(3, 8, 8), "another\nNegative prompt: \nSteps: 2")
    with pytest.raises(UserError, match="was generated for 'prompt 0', and .* for 'another'"):
        pairs([a, b])
    for name in "ac":
        Image.new("RGB", (8, 8)).save(tmp_path / name / "z.png")
    (tmp_path / "a" / "z.txt").write_text("a red star\n")
    (tmp_path / "c" / "z.txt").write_text("a red star")
    assert pairs([a, tmp_path / "c"])[0][0].prompt == "a red star"


@pytest.mark.parametrize("arguments, line", [
    (["none"], "none: expected a finished run, the PNG that"), (["a", "b", "c"], "got 3 paths, expected a run"),
    (["a", "none"], "no folder at"), (["a", "b", "--output", "x.json"], "expected a .jsonl file"),
    (["a", "b", "--prompts", "p.txt"], "--prompts: goes with one run or model, got 2 paths"),
    (["starter", "--prompts", "p.txt"], "p.txt"),
    (["starter", "--prompts", "starter", "--lora", "missing"], "no weights at missing"),
    (["a/0.png"], "names no two folders of images"),
    (["a", "b", "--lora", "x"], "--lora: goes with one run or model, got 2 paths"),
    (["starter", "--lora", "x"], "starter is no run, whose held-out prompts could be used: expected --prompts")])
def test_what_is_no_source_is_told(tmp_path, monkeypatch, capsys, arguments, line):
    folders(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    assert line in error_line(capsys, "compare", "vote", *arguments)


def test_counted():
    assert count_votes([]) == {"votes": 0, "ties": 0, "b": 0, "share": "-"}
    assert count_votes([1, 0, 1, 0.5]) == {"votes": 4, "ties": 1, "b": 2, "share": "0.67 [0.21, 0.94]"}


def named(folder, path) -> None:
    """A folder whose prompts.jsonl names an image."""
    folder.mkdir(exist_ok=True)
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "a", "metadata": {"base_image": str(path)}}) + "\n")


@pytest.mark.parametrize("place", ["../private.png", "{top}/private.png", "{top}/secret", "link.png", "notes.txt"])
def test_prompts_of_a_folder_name_images_inside_it_alone(place, tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "private.png")
    (tmp_path / "secret").write_text("s")
    for name in ("a", "b"):
        named(tmp_path / name, place.format(top=tmp_path))
        (tmp_path / name / "notes.txt").write_text("n")
        (tmp_path / name / "link.png").symlink_to(tmp_path / "private.png")
    for read in (lambda: sources.pairs([tmp_path / "a", tmp_path / "b"]), lambda: judged.groups([tmp_path / "a"])):
        with pytest.raises(UserError, match="prompts.jsonl names .* expected an image inside its folder"):
            read()

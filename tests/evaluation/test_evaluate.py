"""`flowgrpo eval`: its numbers are those of its images, it goes on where it was killed, and processes share it."""

import json
import shutil
import socket

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.cli import main
from flowgrpo.cli.options import parse_rewards
from flowgrpo.config import load, validate
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.data.suites import load_suite
from flowgrpo.evaluation import findings, statistics
from flowgrpo.evaluation.evaluate import evaluate
from flowgrpo.evaluation.findings import count_trained, notes
from flowgrpo.evaluation.plan import Ledger, Place
from flowgrpo.storage.json_files import finite
from flowgrpo.user_code import forget_changed
from tests.evaluation.test_images import make_run, stock
from tests.helpers.forked import Forked
from tests.helpers.refusals import only_line, refused

SUITE = [("a dog", "animals"), ("a cat", "animals"), ("a hat", "things"), ("a cup", "things"), ("fog", "weather")]
DARK = "def dark(images, prompts):\n    return (1 - images.flatten(1).mean(1)).tolist()\n"
FRAGILE = '''
import os
import signal
from pathlib import Path

calls = 0

def fragile(images, prompts):
    """The red of the picture; where a plan says so, the process is killed in its third call."""
    global calls
    calls += 1
    plan = Path(__file__).with_name("kill")
    if plan.exists() and calls == 3 and os.environ.get("RANK", "0") == "1":
        plan.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return images[:, 0].mean((1, 2)).tolist()
'''


@pytest.fixture(scope="module")
def world(tmp_path_factory, model):
    """A finished run, and files beside it: a suite and rewards."""
    folder = tmp_path_factory.mktemp("world")
    make_run(folder / "run", model, 0.3)
    (folder / "suite.jsonl").write_text("".join(
        json.dumps({"prompt": text, "metadata": {"category": kind}}) + "\n" for text, kind in SUITE))
    (folder / "dark.py").write_text(DARK)
    (folder / "fragile.py").write_text(FRAGILE)
    return folder


@pytest.fixture(scope="module")
def found(world):
    """Base and tuned, two images of each prompt, by the run's own reward and a held-out one."""
    names = [f"{world}/run/bright.py:bright", f"{world}/dark.py:dark"]
    results = evaluate(str(world / "run"), str(world / "suite.jsonl"), names, world / "out", base=True, samples=2)
    return results, names, world / "out"


def pictures(folder, arm: str) -> np.ndarray:
    """[N, S, H, W, 3] in [0, 1]."""
    return np.stack([np.stack([np.asarray(Image.open(folder / "pictures" / arm / f"{i:05d}-{k:02d}.png")) / 255
                               for k in range(2)]) for i in range(len(SUITE))])


def test_means_and_pairs_are_those_of_the_images(found):
    results, [bright, dark], folder = found
    for arm in ("base", "tuned"):
        values = pictures(folder, arm).mean((2, 3, 4))
        told = results["arms"][arm][bright]
        assert told["all prompts"]["mean"] == pytest.approx(values.mean(), abs=1e-6)
        assert results["arms"][arm][dark]["all prompts"]["mean"] == pytest.approx(1 - values.mean(), abs=1e-6)
        for name, rows in {"animals": [0, 1], "things": [2, 3], "weather": [4]}.items():
            assert told[name]["mean"] == pytest.approx(values[rows].mean(), abs=1e-6)
            assert told[name]["prompts"] == len(rows)
        assert results["category_means"][arm][bright]["mean"] == pytest.approx(
            (values[:2].mean() + values[2:4].mean() + values[4].mean()) / 3, abs=1e-6)
    base, tuned = (pictures(folder, arm).mean((2, 3, 4)) for arm in ("base", "tuned"))
    told = results["compared"][bright]
    assert told["change"]["all prompts"]["mean"] == pytest.approx((tuned - base).mean(), abs=1e-6)
    assert told["win_rate"]["all prompts"]["mean"] == pytest.approx((tuned > base).mean(), abs=1e-6)
    expected = statistics.interval((tuned > base).astype(float), statistics.STUDENT)
    assert told["win_rate"]["all prompts"]["low"] == pytest.approx(expected.low, abs=1e-6)
    opposite = results["compared"][dark]["win_rate"]["all prompts"]["mean"]
    assert opposite == pytest.approx(1 - told["win_rate"]["all prompts"]["mean"], abs=1e-6)


def test_drift_and_diversity_of_images(found):
    results, [bright, dark], folder = found
    base, tuned = (pictures(folder, arm).mean((2, 3, 4)) for arm in ("base", "tuned"))
    changes = {bright: statistics.change(base, tuned), dark: statistics.change(tuned, base)}
    told = results["compared"][bright]["change"]["all prompts"]
    assert (told["low"], told["high"]) == (pytest.approx(changes[bright].low, abs=1e-6),
                                           pytest.approx(changes[bright].high, abs=1e-6))
    assert results["drift"] == [f"nothing is said of drift in {name}: it has scores on 5 prompts, and at least 20 are "
                                "needed" for name in (bright, dark)]
    for arm in ("base", "tuned"):
        shots = pictures(folder, arm)  # 16 x 16 already, as its miniatures are
        apart = np.sqrt(((shots[:, 0] - shots[:, 1]) ** 2).reshape(len(SUITE), -1).mean(1))
        assert results["diversity"][arm]["mean"] == pytest.approx(apart.mean(), abs=1e-6)
    change = results["diversity"]["tuned"]["mean"] - results["diversity"]["base"]["mean"]
    assert results["diversity"]["change"]["mean"] == pytest.approx(change, abs=1e-9)


@pytest.mark.fast
def test_a_run_that_hacks_is_told(world, tmp_path):
    """The run was trained on `bright`; the images of its result are brighter ones of the base, laid in its place."""
    (tmp_path / "suite.txt").write_text("".join(f"picture {i}\n" for i in range(24)))
    given = {"source": str(world / "run"), "suite": str(tmp_path / "suite.txt"), "output": tmp_path / "out",
             "base": True, "steps": 1}
    names = [f"{world}/run/bright.py:bright", f"{world}/dark.py:dark"]
    evaluate(names=["sharpness"], **given)
    for file in (tmp_path / "out" / "pictures" / "base").iterdir():
        shot = np.asarray(Image.open(file)).astype(int)
        Image.fromarray((shot + (255 - shot) // 4).astype(np.uint8)).save(tmp_path / "out" / "pictures" / "tuned" /
                                                                          file.name)
    told = evaluate(names=names, **given)["drift"]
    assert len(told) == 1 and told[0].startswith(f"possible reward hacking: {names[0]} rose by")
    assert f"trained on, while {names[1]} fell by" in told[0]


def test_a_image_is_the_stock_pipelines(world, model, tmp_path):
    evaluate(str(model), str(world / "suite.jsonl"), [f"{world}/dark.py:dark"], tmp_path, lora=world / "run" /
             "pytorch_lora_weights.safetensors", base=True, steps=2, guidance=1.5, seed=3, precision="fp32")
    for arm, lora in (("base", None), ("tuned", world / "run")):
        ours = np.asarray(Image.open(tmp_path / "pictures" / arm / "00001-00.png")).astype(int)
        assert np.abs(ours - stock(model, lora, (1, 0), num_inference_steps=2, guidance_scale=1.5)).max() <= 1
    told = json.loads((tmp_path / "results.json").read_text())
    assert "nothing is said of drift" in told["drift"][0] and told["diversity"] == {}


def test_what_is_written(found):
    results, names, folder = found
    assert json.loads((folder / "results.json").read_text()) == finite(results)
    text = (folder / "table.md").read_text()
    for name in names:
        heads, lines = findings.table(results, name)
        assert heads == ["category", "prompts", "base", "tuned", "change", "win rate"]
        assert [line[:2] for line in lines] == [["animals", "2"], ["things", "2"], ["weather", "1"],
                                                ["all prompts", "5"]]
        assert all("| " + " | ".join(line) + " |" in text for line in lines)
    how = [findings.methods(results, name) for name in names]
    assert all(told.startswith("95 % intervals: ") and told.endswith("Student's t over prompts") for told in how)
    assert all(told in text for told in [*how, *results["drift"]])
    assert Image.open(folder / "grid.png").width > 400


def test_a_reward_is_added_without_drawing_again(found, world, tmp_path):
    _, [bright, dark], folder = found
    folder, config = shutil.copytree(folder, tmp_path / "out"), load(world / "run" / "config.yaml")
    drawn = {file: file.stat().st_mtime_ns for file in folder.rglob("0*.png")}
    more = evaluate(str(world / "run"), str(world / "suite.jsonl"), [bright, f"{world}/fragile.py:fragile"], folder,
                    base=True, samples=2)
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("0*.png")} == drawn and len(drawn) == 20
    red = pictures(folder, "tuned")[..., 0].mean()
    told = more["arms"]["tuned"]
    assert told[f"{world}/fragile.py:fragile"]["all prompts"]["mean"] == pytest.approx(red, abs=1e-6)
    assert told[bright]["all prompts"] == found[0]["arms"]["tuned"][bright]["all prompts"]
    assert list(json.loads((folder / "settings.json").read_text())["rewards"]) == [
        bright, dark, f"{world}/fragile.py:fragile"] and config.trained.keys() == {bright}


def test_an_edited_reward_scores_again_without_drawing_again(found, world, tmp_path, capfd):
    """A comment is no edit; the scores of another reward stay, and those of a second process go too."""
    file, folder = tmp_path / "shade.py", tmp_path / "out"
    file.write_text(DARK.replace("dark", "shade"))
    given = {"source": str(world / "run"), "suite": str(world / "suite.jsonl"), "output": folder}
    name = f"{file}:shade"
    first = evaluate(names=[name, f"{world}/dark.py:dark"], **given)["arms"]["tuned"]
    drawn = {image: image.stat().st_mtime_ns for image in folder.rglob("0*.png")}
    with (folder / "scores-0.jsonl").open() as lines, (folder / "scores-1.jsonl").open("w") as second:
        second.write(next(lines))
    file.write_text(f"# lighter\n{file.read_text()}")
    assert evaluate(names=[name], **given)["arms"]["tuned"][name] == first[name]
    assert "scored again" not in capfd.readouterr().err
    file.write_text(file.read_text().replace("(1 - ", "(2 - "))
    forget_changed()
    second = evaluate(names=[name], **given)["arms"]["tuned"]
    assert f"the file of {name} has changed since it scored these samples: they are scored again" in \
        capfd.readouterr().err
    assert second[name]["all prompts"]["mean"] == pytest.approx(first[name]["all prompts"]["mean"] + 1)
    assert {image: image.stat().st_mtime_ns for image in folder.rglob("0*.png")} == drawn
    kept = [json.loads(line)["scores"] for line in (folder / "scores-0.jsonl").read_text().splitlines()]
    assert sum(f"{world}/dark.py:dark" in scores for scores in kept) == len(SUITE)


def test_a_damaged_image_is_told_and_drawn_again_once_it_is_removed(found, world, tmp_path):
    results, names, folder = found
    given = {"source": str(world / "run"), "suite": str(world / "suite.jsonl"), "names": names[:1], "base": True,
             "samples": 2, "output": shutil.copytree(folder, tmp_path / "out")}
    file = tmp_path / "out" / "pictures" / "tuned" / "00002-01.png"
    whole = file.read_bytes()
    for damaged in (whole[:len(whole) // 2], b"", b"no image"):
        file.write_bytes(damaged)
        refused(r"00002-01.png is damaged \(.+\): remove it, and the same command", evaluate, **given)
    file.unlink()
    again = evaluate(**given)
    assert file.read_bytes() == whole and again["arms"]["tuned"][names[0]] == results["arms"]["tuned"][names[0]]


@pytest.mark.parametrize("text", ["{", "[]", '{"rewards": 3}', ""])
def test_damaged_settings_are_told(world, tmp_path, capsys, text):
    (tmp_path / "settings.json").write_text(text)
    said = only_line(capsys, "eval", world / "run", f"--suite={world}/suite.jsonl", "--trust-run", "--output", tmp_path)
    assert "settings.json is damaged" in said and "another --output" in said


@pytest.mark.parametrize("change, told", [
    ({"seed": 1}, "an evaluation with another seed .0, now 1.: give another --output"),
    ({"steps": 3}, "another call"), ({"samples": 3}, "another samples")])
def test_a_folder_of_another_evaluation_is_told(found, world, change, told):
    refused(told, evaluate, str(world / "run"), str(world / "suite.jsonl"), found[1], found[2],
            **{"base": True, "samples": 2} | change)


@pytest.mark.parametrize("options, told", [
    ({"lora": "x"}, "is a run, which brings its weights: leave out --lora"),
    ({"source": "starter", "base": True}, "--base compares with a result: give a run"),
    ({"source": "starter", "names": []}, "--rewards: expected the names of rewards"),
    ({"suite": "nothing"}, "expected one that `flowgrpo list prompts` lists"),
    ({"names": ["diversity"]}, "'diversity' compares the samples of a group")])
def test_mistakes_are_told_before_anything_is_drawn(world, tmp_path, options, told):
    given = {"source": str(world / "run"), "suite": str(world / "suite.jsonl"), "names": ["sharpness"]} | options
    refused(told, evaluate, output=tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_a_plain_model_is_scored_by_rewards_with_arguments(world, model, tmp_path, monkeypatch):
    """A file of rules, in place of names: one with arguments, under a label of its own, and one that fails on a fog."""
    monkeypatch.chdir(tmp_path)  # the rules are the user's own
    (tmp_path / "level.py").write_text("class Level:\n    def __init__(self, level):\n        self.level = level\n\n"
                                       "    def __call__(self, images, prompts):\n        assert 'fog' not in prompts\n"
                                       "        return [self.level] * len(prompts)\n")
    (tmp_path / "rules.yaml").write_text(f"level:\n  use: {tmp_path}/level.py:Level\n  args: {{level: 0.25}}\n"
                                         "  on_error: skip\nsharpness: {}\n")
    results = evaluate(str(model), str(world / "suite.jsonl"), parse_rewards(str(tmp_path / "rules.yaml")),
                       tmp_path / "out", steps=1)
    assert set(results["failed"]) == {"level", "sharpness"} and results["failed"]["level"] == 1
    scores = Ledger(tmp_path / "out", 0).read()
    assert [scores[Place("base", i, 0)]["level"] for i in range(4)] == [0.25] * 4


@pytest.mark.parametrize("text, told", [
    ("", "expected rewards with their rules, such as geneval"), ("- ocr\n", "expected keys with values at the top"),
    ("ocr: {argz: {}}\n", "rules.yaml: unknown key 'eval.rewards.ocr.argz': did you mean 'args'"),
    (None, "expected a YAML file")])
def test_a_broken_file_of_rewards_is_told(tmp_path, text, told):
    if text is not None:
        (tmp_path / "rules.yaml").write_text(text)
    refused(told, parse_rewards, str(tmp_path / "rules.yaml"))


def launch(arguments: list[str]) -> list[Forked]:
    """Two processes of the command line, as a launcher starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [Forked(main, arguments, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                   ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1", RANK=rank, LOCAL_RANK=rank) for rank in "01"]


def test_two_processes_share_it_and_a_killed_one_goes_on(world, tmp_path):
    """20 images, ten of each process: the second is killed when it has written down 9 and drawn the last."""
    (tmp_path / "suite.txt").write_text("".join(f"picture {i}\n" for i in range(20)))
    arguments = ["eval", str(world / "run"), "--suite", str(tmp_path / "suite.txt"), "--rewards",
                 f"{world}/fragile.py:fragile", "--output", str(tmp_path / "out")]
    (world / "kill").write_text("")
    both = launch(arguments)
    assert both[1].wait() == -9
    both[0].kill()
    done = Ledger(tmp_path / "out").read()
    drawn = {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "pictures").rglob("*.png")}
    assert {place for place in done if place.prompt >= 10} == {Place("tuned", i, 0) for i in range(10, 19)}
    assert not (tmp_path / "out" / "results.json").exists() and len(drawn) >= 10
    with (tmp_path / "out" / "scores-1.jsonl").open("a") as file:
        file.write('{"place": ["tuned", 19')  # a kill in the midst of a line
    whole = launch(arguments)
    assert [each.wait() for each in whole] == [0, 0], [each.streams() for each in whole]
    assert ["all prompts" in each.streams()[0] for each in whole] == [True, False]
    assert drawn.items() <= {file: file.stat().st_mtime_ns for file in drawn}.items()
    alone = evaluate(str(world / "run"), str(tmp_path / "suite.txt"), [f"{world}/fragile.py:fragile"], tmp_path / "one")
    assert json.loads((tmp_path / "out" / "results.json").read_text())["arms"] == finite(alone)["arms"]
    assert len(Ledger(tmp_path / "out").read()) == 20


def test_the_command_line_prints_the_tables(world, tmp_path, capsys):
    code = main(["eval", str(world / "run"), "--suite", str(world / "suite.jsonl"), "--rewards",
                 f"{world}/dark.py:dark", "--steps", "1", "--output", str(tmp_path / "out")])
    told = capsys.readouterr().out
    assert code == 0 and "weather" in told and "mean over the categories" in told and "table.md" in told


def test_failures_that_may_be_skipped_are_counted(world, model, tmp_path):
    run = make_run(tmp_path / "run", model, 0.3)
    (run / "picky.py").write_text('def picky(images, prompts):\n    if "fog" in prompts:\n        raise OSError("no")\n'
                                  "    return [1.0] * len(prompts)\n")
    text = (run / "config.yaml").read_text().replace(
        "  rewards: []", f"  rewards:\n    {run}/picky.py:picky: {{on_error: skip}}")
    (run / "config.yaml").write_text(text)
    results = evaluate(str(run), str(world / "suite.jsonl"), [], tmp_path / "out")
    assert results["failed"] == {f"{run}/bright.py:bright": 0, f"{run}/picky.py:picky": 1}
    assert results["arms"]["tuned"][f"{run}/picky.py:picky"]["all prompts"]["prompts"] == 4


def test_what_failed_is_asked_for_again_by_the_same_command(world, model, tmp_path):
    """An outage, one that has ended but for a prompt, and none; what has an answer is not asked for again."""
    (tmp_path / "service.py").write_text(
        "from pathlib import Path\n\nHERE = Path(__file__).parent\n\n\ndef service(images, prompts):\n"
        "    down = (HERE / 'down').read_text().split()\n"
        "    if any(word in down for prompt in prompts for word in prompt.split()):\n"
        "        raise OSError('no route')\n"
        "    with (HERE / 'asked').open('a') as file:\n        file.writelines(f'{prompt}\\n' for prompt in prompts)\n"
        "    return [None if prompt == 'a cup' else 0.25 for prompt in prompts]\n")
    rules = {"service": WatchRule(use=f"{tmp_path}/service.py:service", on_error="skip")}
    told = []
    for down in ("a fog", "fog", ""):
        (tmp_path / "down").write_text(down)
        results = evaluate(str(model), str(world / "suite.jsonl"), rules, tmp_path / "out", steps=1)
        entry = results["arms"]["base"]["service"]["all prompts"]
        said = f"service failed on {results['failed']['service']} images, which are left out: the same command asks"
        told.append((results["failed"]["service"], entry["prompts"], said in (tmp_path / "out/table.md").read_text()))
    assert told == [(5, 0, True), (1, 3, True), (0, 4, False)] and entry["mean"] == 0.25
    assert (tmp_path / "asked").read_text().split("\n") == [*(text for text, _ in SUITE), ""]
    (tmp_path / "down").write_text("a fog")  # nothing is left to ask
    again = evaluate(str(model), str(world / "suite.jsonl"), rules, tmp_path / "out", steps=1)
    assert finite(again) == finite(results)


@pytest.mark.parametrize("shape", [(3, 8, 16), (5, 3, 8, 16)])
def test_images_and_clips_come_back(tmp_path, shape):
    ledger, picture = Ledger(tmp_path), torch.randint(0, 256, shape).float() / 255
    ledger.save(Place("base", 0, 0), picture)
    assert torch.equal(ledger.load(Place("base", 0, 0)), picture)
    assert (tmp_path / "pictures" / "base" / "00000-00.webp").exists() == (len(shape) == 4)


def test_a_suite_says_how_many_of_its_prompts_the_run_trained_on(world, tmp_path):
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a dog", "fog", "a tree")))
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "a cup"}))
    settings = validate({"prompts": str(train), "held_out": str(tmp_path / "held.jsonl"), "reward": "red"})
    suite = load_suite(str(world / "suite.jsonl"))
    assert count_trained(settings, suite) == 2
    assert count_trained(None, suite) == 0
    assert count_trained(settings.model_copy(update={"prompts": "gone.jsonl"}), suite) == 0
    told = {"arms": {"tuned": {}}, "category_means": {"tuned": {}}, "unit": "image", "failed": {}, "tries": {},
            "diversity": {}, "drift": [], "suite": {"prompts": 5, "trained": 2}}
    assert notes(told) == [
        "the run trained on 2 of the 5 prompts: what it does on new ones, a suite without them shows"]

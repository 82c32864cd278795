"""`flowgrpo eval` of language models: its numbers are those of its texts, it goes on where it ended, and processes
share it."""

import json

import numpy as np
import pytest

from flowgrpo.cli import main
from flowgrpo.data.suites import load_suite
from flowgrpo.evaluation.draw import text_distance
from flowgrpo.evaluation.evaluate import evaluate
from flowgrpo.evaluation.plan import Place, TextLedger
from flowgrpo.policies import checkpoints
from flowgrpo.samplers.rollout import seeder
from flowgrpo.storage.json_files import finite
from flowgrpo.text import evaluation as texts
from flowgrpo.types import Completion
from tests.evaluation.test_evaluate import launch
from tests.helpers import tiny_masked, tiny_vision
from tests.helpers import tiny_text as tiny
from tests.helpers.refusals import error_line, message, refused

QUESTIONS = [("1+2=", "3", "sum"), ("33+4=", "7", "sum"), ("5;66=", "<<5;66=-61>>so\n#### 1,0", "rest")]
SHORT = "def short(texts, prompts):\n    return [float(len(text) < 4) for text in texts]\n"
LONG = "def long(texts, prompts, metadata):\n    return [float(m['completion_tokens']) for m in metadata]\n"
SAMPLES = 4


def finished(folder, own, **options):
    """A run's folder, as training would leave it."""
    settings = tiny.config(folder.parent, name=folder.name, **options)
    tiny.stir(own, 0.3).weights.save(folder)
    (folder / "config.yaml").write_text(settings.yaml())
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A finished run, and files beside it: a suite and rewards."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "short.py").write_text(SHORT)
    (folder / "long.py").write_text(LONG)
    (folder / "suite.jsonl").write_text("".join(
        json.dumps({"question": text, "answer": answer, "subject": kind}) + "\n" for text, answer, kind in QUESTIONS))
    lm = tiny.save(folder / "lm", tiny.model())
    finished(folder / "run", tiny.policy(), model=str(lm), reward=f"{folder}/short.py:short")
    return folder


@pytest.fixture(scope="module")
def found(world):
    names = [f"{world}/short.py:short", "numeric_match"]
    results = evaluate(str(world / "run"), str(world / "suite.jsonl"), names, world / "out", base=True, samples=SAMPLES)
    return results, names, world / "out"


def written(folder, arm):
    """The texts [N,S], as another process would read them."""
    ledger = TextLedger(folder, 9)
    return [[ledger.load(Place(arm, i, k)) for k in range(SAMPLES)] for i in range(len(QUESTIONS))]


def test_texts_are_those_of_the_policy_and_their_seeds(world, found):
    config = checkpoints.run_config(world / "run")
    config = config.model_copy(update={"text": config.text.model_copy(update={"eval_temperature": 1.0})})
    of = seeder(0, 0)
    for arm, lora in (("base", None), ("tuned", world / "run")):
        own = texts.load(config, lora)
        told = written(found[2], arm)
        for i, (question, *_) in enumerate(QUESTIONS):
            made = own.generate(own.encode([question] * SAMPLES), own.generators(of(i, k) for k in range(SAMPLES)))
            assert told[i] == made and [each.tokens for each in told[i]] == [each.tokens for each in made]
    assert written(found[2], "base") != written(found[2], "tuned")


def test_means_are_those_of_the_texts(found):
    results, [short, numeric], folder = found
    for arm in ("base", "tuned"):
        values = np.array([[len(text) < 4 for text in row] for row in written(folder, arm)], float)
        told = results["arms"][arm][short]
        assert told["all prompts"]["mean"] == pytest.approx(values.mean())
        assert told["sum"]["mean"] == pytest.approx(values[:2].mean()) and told["rest"]["prompts"] == 1
        right = values.sum(1)
        assert results["tries"][arm][short]["pass@2"]["mean"] == pytest.approx(np.mean(
            [1 - (4 - c) * (3 - c) / 12 for c in right]))
        assert list(results["tries"][arm][numeric]) == ["pass@1", "pass@2", "pass@4", "maj@4"]
        apart = [text_distance(row) for row in written(folder, arm)]
        assert results["diversity"][arm]["mean"] == pytest.approx(np.mean(apart))
    base, tuned = (results["arms"][arm][short]["all prompts"]["mean"] for arm in ("base", "tuned"))
    assert results["compared"][short]["change"]["all prompts"]["mean"] == pytest.approx(tuned - base)
    assert results["unit"] == "text" and results["call"]["eval_temperature"] == 1.0
    table = (folder / "table.md").read_text()
    assert "| sum | 2 |" in table and f"{short}, tuned: pass@1 " in table and "distance between the texts of" in table
    assert (folder / "grid.png").is_file() and json.loads((folder / "results.json").read_text()) == finite(results)


def test_a_killed_evaluation_goes_on_and_a_reward_is_added(world, found, tmp_path):
    """What is left of another folder's files, the last lines lost or cut off, becomes the same evaluation again."""
    results, names, folder = found
    for name in ("settings.json", "scores-0.jsonl", "texts-0.jsonl"):
        lines = (folder / name).read_text()
        (tmp_path / name).write_text(lines if name == "settings.json" else lines[:int(len(lines) * 0.7)])
    kept = (tmp_path / "texts-0.jsonl").read_text().rpartition("\n")[0]
    given = dict(source=str(world / "run"), suite=str(world / "suite.jsonl"), output=tmp_path, base=True,
                 samples=SAMPLES)
    again = evaluate(names=names, **given)
    assert finite(again) == finite(results)
    whole = (tmp_path / "texts-0.jsonl").read_text()
    assert whole.startswith(kept) and len(whole) > len(kept)
    more = evaluate(names=[f"{world}/long.py:long", "repetition"], **given)
    assert more["arms"]["tuned"]["repetition"]["all prompts"]["mean"] == 0  # its best, and no share of right texts
    assert more["tries"] == {"base": {}, "tuned": {}}
    assert (tmp_path / "texts-0.jsonl").read_text() == whole
    tokens = [text.tokens for row in written(tmp_path, "tuned") for text in row]
    assert more["arms"]["tuned"][f"{world}/long.py:long"]["all prompts"]["mean"] == pytest.approx(np.mean(tokens))


def test_two_processes_share_it(world, found):
    results, names, _ = found
    arguments = ["eval", str(world / "run"), "--suite", str(world / "suite.jsonl"), "--rewards", ",".join(names),
                 "--base", "--samples", str(SAMPLES), "--output", str(world / "both")]
    whole = launch(arguments)
    assert [each.wait() for each in whole] == [0, 0], [each.streams() for each in whole]
    assert ["pass@4" in each.streams()[0] for each in whole] == [True, False]
    assert json.loads((world / "both" / "results.json").read_text())["arms"] == finite(results)["arms"]
    counts = [len((world / "both" / f"texts-{rank}.jsonl").read_text().splitlines()) for rank in range(2)]
    assert counts == [12, 12]


def test_one_greedy_text_of_a_model_alone(world, tmp_path):
    results = evaluate(str(world / "lm"), str(world / "suite.jsonl"), ["numeric_match"], tmp_path, max_tokens=3,
                       precision="fp32")
    own = texts.load(tiny.config(model=str(world / "lm"), text__max_tokens=3), None)
    [row] = [own.generate(own.encode([q for q, *_ in QUESTIONS]), own.generators(range(3)))]
    ledger = TextLedger(tmp_path)
    assert [ledger.load(Place("base", i, 0)) for i in range(3)] == row and max(text.tokens for text in row) <= 3
    assert results["arms"].keys() == {"base"} and results["tries"] == {"base": {}} and results["diversity"] == {}


def test_an_evaluation_sees_what_the_chat_template_ends_with(world, tmp_path):
    """Also where texts are read from its folder, for a further reward."""
    model, tokenizer = tiny.model()
    tokenizer.chat_template += "<think>"
    lm = tiny.save(tmp_path / "lm", (model, tokenizer))
    (tmp_path / "tag.py").write_text("def tag(texts, prompts):\n"
                                     "    return [float(text.opened == '<think>') for text in texts]\n"
                                     "def again(texts, prompts):\n    return tag(texts, prompts)\n")
    for names in (["tag"], ["tag", "again"]):
        evaluate(str(lm), str(world / "suite.jsonl"), [f"{tmp_path}/tag.py:{name}" for name in names], tmp_path / "out",
                 max_tokens=3, precision="fp32")
        rows = [json.loads(line) for line in (tmp_path / "out" / "scores-0.jsonl").read_text().splitlines()]
        assert rows and all(set(row["scores"].values()) == {1.0} for row in rows)


def test_masked_models_and_models_that_read_images(tmp_path):
    masked = tiny.save(tmp_path / "masked", tiny_masked.model())
    (tmp_path / "suite.txt").write_text("1+2=\n7+8=\n")
    (tmp_path / "long.py").write_text(LONG)
    name = [f"{tmp_path}/long.py:long"]
    told = evaluate(str(masked), str(tmp_path / "suite.txt"), name, tmp_path / "one", max_tokens=4)
    assert 1 <= told["arms"]["base"][name[0]]["all prompts"]["mean"] <= 4
    eyes = tiny.save(tmp_path / "eyes", tiny_vision.llava())
    files = tiny_vision.files(tmp_path)
    (tmp_path / "suite.jsonl").write_text("".join(json.dumps({"prompt": "1+2=", "image": file}) + "\n"
                                                  for file in files))
    evaluate(str(eyes), str(tmp_path / "suite.jsonl"), name, tmp_path / "two", max_tokens=4, precision="fp32")
    ledger, own = TextLedger(tmp_path / "two"), texts.load(tiny.config(model=str(eyes), text__max_tokens=4), None)
    made = own.generate(own.encode(["1+2="] * 3, images=files), own.generators(range(3)))
    assert [ledger.load(Place("base", i, 0)) for i in range(3)] == made
    assert len({str(ids.tolist()) for ids in own.encode(["1+2="] * 2, images=[files[0], None]).ids}) == 2


def test_a_image_is_shown_on_the_command_line(tmp_path, capsys):
    eyes = tiny.save(tmp_path / "eyes", tiny_vision.llava())
    [red, green, _] = tiny_vision.files(tmp_path)
    own = texts.load(tiny.config(model=str(eyes), text__max_tokens=256), None)
    expected = [own.generate(own.encode(["1+2="], images=[image]), own.generators([0]))[0] for image in (red, green)]
    for image, text in zip((red, green), expected):
        assert main(["sample", str(eyes), "--prompt", "1+2=", "--image", image, "--precision", "fp32"]) == 0
        assert capsys.readouterr().out == text + "\n"
    assert "takes no image" in error_line(capsys, "sample", "starter_text", "--prompt", "1+2=", "--image", red)
    assert main(["sample", "starter", "--prompt", "a red circle", "--image", red]) == 2
    assert "--image: StableDiffusion3Pipeline takes no image" in capsys.readouterr().err


@pytest.mark.parametrize("options, told", [
    ({"steps": 3}, "--steps: is of a denoiser, and the model generates texts"),
    ({"rlg": [2.0]}, "--rlg: is of a denoiser"), ({"features": "x.py:x"}, "--features: are of images"),
    ({"names": ["scene"]}, "'scene' judges image, but what is generated here is text"),
    ({"lora": "x"}, "is a run, which brings its weights"),
    ({"source": "starter", "temperature": 1.0}, "--temperature: is of a language model, and the model generates")])
def test_mistakes_are_told_before_anything_is_drawn(world, tmp_path, options, told):
    given = {"source": str(world / "run"), "suite": str(world / "suite.jsonl"), "names": ["numeric_match"]} | options
    assert told in message(evaluate, output=tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_other_temperatures_and_distances_of_texts(world, found):
    refused("holds an evaluation with another call", evaluate, str(world / "run"), str(world / "suite.jsonl"), found[1],
            found[2], base=True, samples=SAMPLES, temperature=0.5)
    # Pairs of neighbours, ends included: "a b" has {^a, ab, b$}, "a c" {^a, ac, c$}: one of five in common.
    assert text_distance(["a b", "a c"]) == pytest.approx(4 / 5)
    assert text_distance(["71", "71"]) == 0 and text_distance(["71", "72", "71"]) == pytest.approx(2 / 3)


def test_texts_come_back_with_their_tokens_from_every_process(tmp_path):
    one, two = TextLedger(tmp_path), TextLedger(tmp_path, 1)
    assert not one.has(Place("base", 0, 0))
    two.save(Place("base", 0, 0), Completion("a\nb \u2028\"", 3))
    assert not one.has(Place("base", 0, 0)) and one.load(Place("base", 0, 0)) == "a\nb \u2028\""
    assert one.batch([Place("base", 0, 0)])[0].tokens == 3


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_suites_of_questions(tmp_path, ending):
    path = tmp_path / f"suite.{ending}"
    if ending == "jsonl":
        path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a, _ in QUESTIONS))
    else:
        path.write_text('question,answer,level\n"1+2=","3",1\n33+4=,37,2\n5;66=,"#### 1,0",2\n')
    suite = load_suite(str(path))
    assert suite.form == "questions" and [prompt.text for prompt in suite.prompts] == ["1+2=", "33+4=", "5;66="]
    assert [prompt.metadata["answer"] for prompt in suite.prompts] == ["3", "7" if ending == "jsonl" else "37", "10"]
    assert suite.categories == ({} if ending == "jsonl" else {"1": [0], "2": [1, 2]})


def test_the_text_starters_suite_is_its_held_out_file():
    suite = load_suite("starter_text")
    assert len(suite.cases) > 100 and suite.form == "flowgrpo" and "5 numbers" in suite.categories
    assert all(prompt.metadata["answer"] for prompt in suite.prompts)

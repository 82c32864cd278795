"""A run that Python made from objects: other commands find the model, the rewards and the prompts again."""

import importlib
import json
import re
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

import flowgrpo
from flowgrpo import user_code
from flowgrpo.advantages.shaping import Shaping
from flowgrpo.arguments import OMITTED, build_config
from flowgrpo.cli import main
from flowgrpo.config import load
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.data import prompts, provenance, sets
from flowgrpo.errors import UserError
from flowgrpo.evaluation.report.report import data
from flowgrpo.methods import PRESETS, Method, overlay, preset, registry
from flowgrpo.methods.overlay import with_parts
from flowgrpo.policies import checkpoints
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.rewards import code_hashes, find
from flowgrpo.samplers import plans
from flowgrpo.tools.check import tiny as pipelines
from tests.helpers import tiny
from tests.helpers.refusals import error_line, message, refused

find_module = importlib.import_module("flowgrpo.rewards.find")
TEXTS = [*tiny.PROMPTS, " a caf\u00e9 "]
small = partial(tiny.options, train__epochs=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    pipe = load_pipeline(str(tiny.save(tiny.sd3(), folder / "model")))
    summary = flowgrpo.align(pipe, {tiny.red: {"weight": 0.5, "timeout": 60}}, TEXTS, **small(folder))
    assert summary["rewards"]["trained"] == {"red": 0.5} and summary["model"] == str(folder / "model")
    return folder / "run"


@pytest.fixture(scope="module")
def nameless(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("nameless")
    flowgrpo.align(tiny.sd3(), tiny.red, TEXTS, **small(folder))
    return folder / "run"


def test_the_configuration_names_what_lies_in_files_and_commands_of_the_run_work(run, tmp_path):
    config = load(run / "config.yaml")
    assert config.trained["red"].use == f"{tiny.__file__}:red" and config.trained["red"].timeout == 60
    assert [prompt.text for prompt in prompts.load_prompts(config.prompts)] == [text.strip() for text in TEXTS]
    assert {prompt.text for side in sets.resolve(config) for prompt in side} == {text.strip() for text in TEXTS}
    assert main(["compare", "grid", str(run), "--output", str(tmp_path / "grid.png")]) == 0
    assert main(["export", str(run), "--form", "merged", "--output", str(tmp_path / "merged")]) == 0
    assert (tmp_path / "grid.png").is_file() and (tmp_path / "merged" / "model_index.json").is_file()


def test_its_configuration_repeats_the_run_and_both_keep_their_prompts(run, tmp_path):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    assert main(["train", "--trust", str(folder / "config.yaml"), f"--output={tmp_path}"]) == 0
    earlier = tmp_path / "run.1"
    for each in (folder, earlier):
        assert (each / provenance.PROMPTS).read_text() == (run / provenance.PROMPTS).read_text()
    assert checkpoints.run_config(folder).prompts == str(folder / provenance.PROMPTS)
    assert checkpoints.run_config(earlier).prompts == str(earlier / provenance.PROMPTS)


def test_a_copied_folder_repeats_with_the_files_in_it(tmp_path, monkeypatch):
    """Prompts with images, a reward, held-out prompts and a LoRA, which a script had put into the run's folder."""
    (tmp_path / "one").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    model, own = tiny.save(pipelines.make("FluxKontextPipeline")[0], tmp_path / "model"), Path("runs/run")
    (own / "made").mkdir(parents=True)
    (own / "red.py").write_text("def red(images, prompts):\n    return images[:, 0].mean((1, 2))\n")
    Image.new("RGB", (16, 16), "red").save(own / "made" / "a.png")
    (own / "held_out.jsonl").write_text(json.dumps({"prompt": "held out", "image": "made/a.png"}))
    call = pipelines.make("FluxKontextPipeline")[1] | {"height": 16, "width": 16, "max_area": 256}
    call |= {"_auto_resize": False}
    settings = tiny.config("runs", model=str(model), train__epochs=1, held_out="runs/run/held_out.jsonl",
                           image__call={key: value for key, value in call.items() if key != "image"},
                           reward="runs/run/red.py:red").model_dump(exclude_unset=True)
    tiny.stir(tiny.policy(load_pipeline(str(model)), call=call)).weights.save(own / "first")
    settings["adapter"] = {"rank": 2, "init": "runs/run/first"}
    listed = [{"prompt": text, "image": "runs/run/made/a.png"} for text in tiny.PROMPTS]
    flowgrpo.align(settings.pop("model"), settings.pop("reward"), listed, **settings)
    copy = Path(shutil.copytree("runs/run", tmp_path / "two" / "mine"))
    shutil.rmtree(tmp_path / "one")
    monkeypatch.chdir(tmp_path / "two")
    assert main(["train", "--trust", "mine/config.yaml"]) == 0
    made, kept = load("runs/run/config.yaml"), load(copy / "config.yaml")
    assert made.prompts == str(Path("mine") / provenance.PROMPTS) and made.held_out == "mine/held_out.jsonl"
    assert [*made.reward] == ["mine/red.py:red"] and made.adapter.init == "mine/first"
    for prompt in sets.resolve(kept)[0]:
        assert prompt.image == prompt.metadata["image"] == str(copy / "made" / "a.png")
    first, again = (json.loads(Path(folder, "metrics.jsonl").read_text().splitlines()[0])
                    for folder in (copy, "runs/run"))
    assert again["reward/mine/red.py:red/mean"] == pytest.approx(first["reward/runs/run/red.py:red/mean"], rel=1e-4)


@pytest.mark.parametrize("command", [("compare grid",), ("export", "--form", "merged"), ("eval", "--suite", "starter")])
def test_a_model_without_a_folder_is_told_without_asking_the_hub(nameless, command, tmp_path, capsys):
    name, *options = command
    line = error_line(capsys, *name.split(), str(nameless), *options, "--trust-run", "--output", str(tmp_path / "out"))
    assert "cannot load the model 'StableDiffusion3Pipeline': that is a class, as a run says that was made from" in line


def test_training_it_again_is_told(nameless, capsys):
    assert "that is a class" in error_line(capsys, "train", "--trust", str(nameless / "config.yaml"))
    assert (nameless / "summary.json").is_file()


def test_a_run_ends_with_the_sentences_of_its_report(tmp_path, capfd):
    """Of all changes, and of the check of the first ratio; the progress bar has the reward, clip and gradient norm."""
    flowgrpo.align(tiny.sd3(), tiny.red, TEXTS, **small(tmp_path))
    out, err = capfd.readouterr()
    sentences = [each["text"] for each in data(tmp_path / "run")["sentences"]]
    assert len(sentences) > 2 and sentences[1].startswith("red, trained on, ")
    assert " ".join(out.split()).endswith(" ".join(" ".join(sentences).split()))
    assert re.search(r"red=\d\.\d{3}, clip=\d\.\d\d, grad=", err)


def test_an_edited_file_is_imported_again_by_the_next_run(tmp_path):
    """Not within a run, nor under the name of another file; the edit has the same size, in the same second."""
    def score(file):
        return user_code.load(f"{file}:red")([], [])

    file, other = tmp_path / "my_red.py", tmp_path / "my-red.py"
    for path, value in ((file, 1), (other, 3)):
        path.write_text(f"def red(images, prompts):\n    return {value}\n")
    assert (score(file), score(other)) == (1, 3)
    file.write_text(file.read_text().replace("1", "2"))
    assert score(file) == 1
    build_config("starter", f"{file}:red", "starter", OMITTED, None, {})
    assert (score(file), score(other)) == (2, 3)
    file.write_text(file.read_text().replace("2", "4"))
    assert main(["list", "recipes", "starter"]) == 0
    assert score(file) == 4


def test_a_reward_without_a_file_goes_by_its_name(tmp_path):
    flowgrpo.align(tiny.sd3(), {lambda images, prompts: tiny.red(images, prompts): 1.0}, TEXTS, **small(tmp_path))
    assert load(tmp_path / "run" / "config.yaml").trained["<lambda>"].use is None
    refused("unknown reward '<lambda>'.* given from Python has to be in a file", find, "<lambda>")


def test_definitions_of_a_file_are_what_an_import_reads(tmp_path):
    file, hashes = tmp_path / "red.py", []
    for text in ("import flowgrpo\ndef red(images, prompts):\n    return [1.0]\n",
                 '"""Red."""\nimport flowgrpo\n\ndef red(images, prompts):  # one\n    return [1.0]\n',
                 "import flowgrpo\ndef red(images, prompts):\n    return [1.0]\nflowgrpo.align('starter', red)\n",
                 "import flowgrpo\ndef red(images, prompts):\n    return [1.0]\n"
                 "if __name__ == '__main__':\n    n = 3\n    flowgrpo.align('starter', red, seed=n)\n",
                 "import flowgrpo\nONE = 1.0\ndef red(images, prompts):\n    return [1.0]\n",
                 "import flowgrpo\ndef red(images, prompts):\n    return [2.0]\n"):
        file.write_text(text)
        hashes.append(user_code.definitions(file))
    assert len({*hashes[:4]}) == 1 and len({*hashes}) == 3
    rules = {"a": WatchRule(use=f"{file}:red"), "b": WatchRule(use="frames", args={"of": [{"x": f"{file}:red"}]}),
             "c": WatchRule(use="frames"), "d": WatchRule(use="no.py:red")}
    found = code_hashes({name: SimpleNamespace(rule=rule) for name, rule in rules.items()} | {f"{file}:red": len})
    assert found == dict.fromkeys(["a", "b", f"{file}:red"], hashes[-1])


@pytest.fixture
def decorated(tmp_path):
    """A file with decorated rewards: a function, and a lambda that stands under no name of the file."""
    file = tmp_path / "decorated.py"
    file.write_text("import flowgrpo\n\n\n@flowgrpo.reward('reddish')\ndef anything(images, prompts):\n"
                    "    return images[:, 0].mean((1, 2))\n\n\n"
                    "flowgrpo.reward('dark')(lambda images, prompts: -images.mean((1, 2, 3)))\n")
    yield file
    for name in ("reddish", "dark"):
        find_module._registered.pop(name, None)


@pytest.mark.fast
def test_decorated_rewards_are_found_again(decorated, tmp_path):
    assert find(f"{decorated}:reddish") is find(f"{decorated}:anything") and find("reddish").__name__ == "anything"
    assert find(f"{decorated}:dark").__name__ == "<lambda>"
    assert "has no 'darc': did you mean 'dark'" in message(find, f"{decorated}:darc")
    find(f"{decorated}:reddish")  # as in a script that has it
    flowgrpo.align(tiny.sd3(), {"reddish": 0.5, "dark": {"weight": 2.0}}, TEXTS, **small(tmp_path))
    rules = load(tmp_path / "run" / "config.yaml").trained
    assert rules["reddish"].use == f"{decorated}:reddish" and rules["reddish"].weight == 0.5
    assert rules["dark"].use == f"{decorated}:dark" and rules["dark"].weight == 2.0


@dataclass(frozen=True)
class Halves(Shaping):
    """Rewards times `factor`."""

    factor: float = 0.5

    def __call__(self, rewards, context=None):
        return rewards * self.factor


def local_part() -> type:
    @dataclass(frozen=True)
    class Local(Halves):
        """The same in no file."""

    return Local


@pytest.mark.parametrize("method, expected", [
    (preset("dance_grpo"), ("dance_grpo", {})),
    (Method(), ("flow_grpo", {"kl": {"type": "GaussianKL", "weight": 0.0}})),
    (preset("mix_grpo").having(plan=plans.Sliding(size=2)), ("mix_grpo", {"plan": {"type": "Sliding", "size": 2}})),
    (preset("mix_grpo").having(roots=None), ("mix_grpo", {"roots": None})),
    (preset("dapo").having(shaping=None), ("dapo", {"shaping": None})),
    (preset("mix_grpo").having(shaping=Halves(0.25)),
     ("mix_grpo", {"shaping": {"type": f"{__file__}:Halves", "factor": 0.25}}))])
def test_a_method_is_recorded_as_a_preset_and_parts(method, expected):
    name, parts = overlay.preset_and_parts(method)
    assert (name, parts) == expected and with_parts(preset(name), parts) == method


def test_every_preset_is_recorded_by_its_name():
    for name, make in PRESETS.items():
        recorded, parts = overlay.preset_and_parts(make())
        assert parts == {} and overlay._differing(PRESETS[recorded](), make()) == {}, name


def test_a_method_with_a_part_of_no_file_trains_and_is_asked_for_on_resume(tmp_path, capsys):
    method = preset("mix_grpo").having(plan=plans.Sliding(size=1), shaping=local_part()(0.25))
    given = dict(rewards=tiny.red, prompts=TEXTS, **small(tmp_path))
    flowgrpo.align(load_pipeline(str(tiny.save(tiny.sd3(), tmp_path / "model"))), method=method, **given)
    config = load(tmp_path / "run" / "config.yaml")
    assert config.method == "mix_grpo"
    assert config.parts == {"plan": {"type": "Sliding", "size": 1}, "shaping": {"type": "object:Local", "factor": 0.25}}
    more = given | {"train": given["train"] | {"epochs": 2}}
    assert flowgrpo.align(load_pipeline(str(tmp_path / "model")), method=method, resume=True, **more)["epochs"] == 2
    registry.GIVEN.clear()  # as in another process
    line = error_line(capsys, "train", "--trust", str(tmp_path / "run" / "config.yaml"), "--resume")
    assert "parts.shaping.type: object:Local was an object of a Python run, in no file: pass it again" in line


def test_values_and_scripts_that_no_recipe_holds(tmp_path):
    with pytest.raises(UserError, match="parts: the method is an object, which has its parts"):
        flowgrpo.align(tiny.sd3(), tiny.red, TEXTS, Method(), parts={"roots": 1}, **small(tmp_path))
    with pytest.raises(UserError, match=r"method.shaping is a function: expected a frozen dataclass, or a value"):
        overlay.preset_and_parts(Method().having(shaping=lambda rewards, context=None: rewards))
    script = tmp_path / "script.py"
    script.write_text("import flowgrpo\n\n\ndef red(images, prompts):\n    return images[:, 0].mean((1, 2))\n\n\n"
                      f"flowgrpo.align('starter', red, ['a', 'b'], output={str(tmp_path / 'runs')!r})\n")
    assert "script.py calls align while it is read for a reward: put that call below" in message(find, f"{script}:red")
    assert not (tmp_path / "runs").exists()


def test_a_dataset_of_torch_and_of_datasets_is_a_list_of_prompts(tmp_path):
    from datasets import Dataset
    from torch.utils.data import Dataset as Rows

    records = [{"prompt": text, "metadata": {"count": number}} for number, text in enumerate(tiny.PROMPTS)]

    class Own(Rows):
        def __len__(self):
            return len(records)

        def __getitem__(self, row):
            return records[row]

    found = []
    for name, given in (("list", records), ("torch", Own()), ("datasets", Dataset.from_list(records))):
        flowgrpo.align(tiny.sd3(), tiny.red, given, **small(tmp_path / name))
        found.append([(prompt.text, prompt.metadata) for prompt in prompts.load_prompts(
            tmp_path / name / "run" / "prompts.jsonl")])
    assert found[0] == found[1] == found[2] == [(row["prompt"], row["metadata"]) for row in records]

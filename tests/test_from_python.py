"""A run that Python made from objects: other commands find the model, the rewards and the prompts again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import flowgrpo
from flowgrpo.cli import main
from flowgrpo.config import load
from flowgrpo.data import prompts, provenance, splits
from flowgrpo.errors import UserError
from flowgrpo.evaluation import checkpoints
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.rewards import find
from tests.helpers import tiny

TEXTS = [*tiny.PROMPTS, " a caf\u00e9 "]


def small(output: Path) -> dict:
    kept = tiny.config(output, train__epochs=1).model_dump(exclude_unset=True)
    return {key: value for key, value in kept.items() if key not in ("reward", "method", "model", "prompts")}


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


def told(capsys, *arguments: str) -> str:
    """The one line of a command that is refused."""
    capsys.readouterr()
    assert main([*arguments]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    return line


def test_the_configuration_names_what_lies_in_files(run):
    config = load(run / "config.yaml")
    assert config.trained["red"].use == f"{tiny.__file__}:red" and config.trained["red"].timeout == 60
    assert [prompt.text for prompt in prompts.load_prompts(config.prompts)] == [text.strip() for text in TEXTS]
    assert {prompt.text for side in splits.resolve(config) for prompt in side} == {text.strip() for text in TEXTS}


def test_commands_of_a_run_work(run, tmp_path):
    assert main(["grid", str(run), "--output", str(tmp_path / "grid.png")]) == 0
    assert main(["export", str(run), "--form", "merged", "--output", str(tmp_path / "merged")]) == 0
    assert (tmp_path / "grid.png").is_file() and (tmp_path / "merged" / "model_index.json").is_file()


def test_its_configuration_repeats_the_run_and_both_keep_their_prompts(run, tmp_path):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    assert main(["train", str(folder / "config.yaml"), f"--output={tmp_path}",
                 f"--prompts={folder / provenance.PROMPTS}"]) == 0
    earlier = tmp_path / "run.1"
    for each in (folder, earlier):
        assert (each / provenance.PROMPTS).read_text() == (run / provenance.PROMPTS).read_text()
    assert checkpoints.run_config(folder).prompts == str(folder / provenance.PROMPTS)
    assert checkpoints.run_config(earlier).prompts == str(earlier / provenance.PROMPTS)


@pytest.mark.parametrize("command", [("grid",), ("export", "--form", "merged"), ("eval", "--suite", "starter")])
def test_a_model_without_a_folder_is_told_without_asking_the_hub(nameless, command, tmp_path, capsys):
    name, *options = command
    line = told(capsys, name, str(nameless), *options, "--output", str(tmp_path / "out"))
    assert "cannot load the model 'StableDiffusion3Pipeline': that is a class, as a run says that was made from" in line


def test_training_it_again_is_told(nameless, capsys):
    assert "that is a class" in told(capsys, "train", str(nameless / "config.yaml"))
    assert (nameless / "summary.json").is_file()


def test_a_reward_without_a_file_goes_by_its_name(tmp_path):
    flowgrpo.align(tiny.sd3(), {lambda images, prompts: tiny.red(images, prompts): 1.0}, TEXTS, **small(tmp_path))
    config = load(tmp_path / "run" / "config.yaml")
    assert config.trained["<lambda>"].use is None
    with pytest.raises(UserError, match="unknown reward '<lambda>'.* from Python in no file is not found again"):
        find("<lambda>")


def test_a_script_that_is_read_for_its_reward_does_not_train_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import flowgrpo\n\n\ndef red(images, prompts):\n    return images[:, 0].mean((1, 2))\n\n\n"
                      f"flowgrpo.align('starter', red, ['a', 'b'], output={str(tmp_path / 'runs')!r})\n")
    with pytest.raises(UserError, match="script.py calls align while it is read for a reward: put that call below"):
        find(f"{script}:red")
    assert not (tmp_path / "runs").exists()

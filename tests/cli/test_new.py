"""`flowgrpo new`: what it writes passes its own test as it stands, and nothing is overwritten."""

import inspect
import runpy

import pytest

from flowgrpo.cli import main
from flowgrpo.config import load
from flowgrpo.config.geometry import geometry
from flowgrpo.methods.validate import resolve
from tests.cli.test_cli import told
from tests.helpers import tiny


@pytest.mark.parametrize("kind, name", [("method", "my_loss"), ("method", "Loss"), ("reward", "my_reward")])
def test_the_written_test_passes(kind, name, tmp_path, capsys):
    assert main(["new", kind, name, "--output", str(tmp_path / "mine")]) == 0
    files = [tmp_path / "mine" / f"{name}.py", tmp_path / "mine" / f"test_{name}.py"]
    assert capsys.readouterr().out.split() == [str(file) for file in files]
    tests = [thing for key, thing in runpy.run_path(str(files[1])).items()
             if key.startswith("test_") and inspect.isfunction(thing)]
    assert len(tests) == 3
    for test in tests:
        test()


def test_the_written_method_trains(tmp_path, monkeypatch):
    assert main(["new", "method", "one_sided", "--output", str(tmp_path)]) == 0
    trainer = tiny.trainer(method=f"flow_grpo+{tmp_path / 'one_sided.py'}:one_sided",
                           parts={"surrogate": {"high": 0.1}}, train__steps=4, train__group=4)
    assert trainer.method.loss.surrogate.high == 0.1 and trainer.run_epoch()["grad_norm"] > 0


def test_the_written_recipe_loads(tmp_path):
    assert main(["new", "recipe", "mine", "--output", str(tmp_path)]) == 0
    config = load(tmp_path / "mine.yaml")
    assert (config.name, config.train.epochs, list(config.watched)) == ("mine", 60, ["sharpness"])
    assert resolve(config).rollout and geometry(config.train, 1).group == 12


@pytest.mark.parametrize("kind, existing", [("method", "a.py"), ("reward", "test_a.py"), ("recipe", "a.yaml")])
def test_no_file_is_overwritten(kind, existing, tmp_path, capsys):
    (tmp_path / existing).write_text("mine\n")
    line = told(capsys, "new", kind, "a", "--output", tmp_path)
    assert f"no file is overwritten, and there is {tmp_path / existing}: give another name" in line
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(existing, "mine\n")]


@pytest.mark.parametrize("kind, name, line", [
    ("method", "my-loss", "got the name 'my-loss', expected letters, digits and underscores, such as my_loss"),
    ("reward", "class", "got the name 'class', expected letters"),
    ("reward", "_1", "got the name '_1', expected letters"),
    ("method", "random", "got the name 'random', which Python or flowgrpo has already: expected another one, such as "
                         "my_random"),
    ("method", "surrogate", "got the name 'surrogate', which Python or flowgrpo has already"),
    ("reward", "rewards", "got the name 'rewards', which Python or flowgrpo has already"),
    ("loss", "mine", "'loss' is not one of 'method', 'reward', 'recipe'")])
def test_names_that_cannot_be_used_are_refused(kind, name, line, tmp_path, capsys):
    assert line in told(capsys, "new", kind, name, "--output", tmp_path / "new")
    assert not (tmp_path / "new").exists()

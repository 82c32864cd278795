"""docs/extending.md: its files train as they stand there, and are as short as it says."""

import copy
import inspect
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from flowgrpo import rewards
from flowgrpo.cli import main
from flowgrpo.config.parse import load
from flowgrpo.config.yaml_text import Loader
from flowgrpo.methods import preset, registry
from flowgrpo.methods.overlay import preset_and_parts, with_parts
from flowgrpo.methods.validate import resolve
from flowgrpo.objectives.surrogates import Clip
from flowgrpo.samplers import kernels
from flowgrpo.training import sampling
from flowgrpo.types import Context
from flowgrpo.user_code import from_file
from tests.helpers import tiny
from tests.helpers.refusals import message, refused
from tests.helpers.tables import close, f64

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS = (ROOT / "examples" / "blocks.py").read_text(encoding="utf-8")
FILES = {re.match(r"# (\w+\.py)\n", code)[1]: code.split("\n", 1)[1]
         for code in re.findall(r"```python\n(.*?)```", PAGE, re.S)}
BEFORE, PACKAGE = PAGE.split("## In a package")
RECIPES = [yaml.load(recipe, Loader) for recipe in re.findall(r"```yaml\n(.*?)```", BEFORE, re.S)]


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory):
    """A folder with the page's files, which the run's commands are called in."""
    folder = tmp_path_factory.mktemp("extending")
    (folder / "examples").mkdir()
    for name, code in (FILES | {"examples/blocks.py": BLOCKS}).items():
        (folder / name).write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def part(name: str) -> type:
    return from_file(name, "part")


@pytest.mark.parametrize("recipe", RECIPES, ids=[str(recipe)[:60] for recipe in RECIPES])
def test_every_recipe_of_the_page_trains(recipe, tmp_path):
    """Its method and parts train a tiny model, and the recipe loads as it stands there, with its parts."""
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    loaded = load(tmp_path / "mine.yaml")
    assert recipe["extends"] == "starter" and loaded.method == recipe["method"]
    assert resolve(loaded) == with_parts(preset(recipe["method"]), recipe.get("parts", {}))
    own = {key: value for key, value in recipe.items() if key != "extends"}
    trainer = tiny.trainer(**{"train__steps": 6, "train__group": 4} | own)
    epochs = [trainer.run_epoch() for _ in range(2)]
    assert trainer.first_ratio.max_log_ratio <= 1e-5 and all(each["grad_norm"] > 0 for each in epochs)


def test_every_file_of_the_page_is_as_short_as_it_says():
    most = int(re.search(r"tested file of at most (\d+) lines", PAGE)[1])
    assert max(len(code.strip().splitlines()) for code in FILES.values()) == most


def test_the_loss_by_hand():
    loss = part("soft_gate.py:SoftGate")(2.0)
    log_ratio = f64([[0.0, 0.5]]).requires_grad_()
    value = loss(log_ratio, f64([[1.0]]), torch.zeros(1, 2))
    close(value.detach(), [[-1.0, -2 * torch.sigmoid(2 * f64(0.5).expm1()).item()]])
    value.sum().backward()
    close(log_ratio.grad[:, :1], [[-1.0]])  # as a plain ratio at r = 1


@pytest.fixture
def sampler_test(tmp_path, monkeypatch):
    """The page's test of its sampler, of a sampler with this code."""
    def made(code: str):
        for name, text in {"fading.py": code, "test_fading.py": FILES["test_fading.py"]}.items():
            (tmp_path / name).write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "fading", raising=False)
        return runpy.run_path(str(tmp_path / "test_fading.py"))["test_a_small_step_keeps_the_variance"]
    return made


@pytest.mark.parametrize("level", [0.0, 0.7])
def test_the_sampler_passes_its_test(sampler_test, level):
    assert sampler_test(FILES["fading.py"])(level) is None  # it asserts itself


def test_a_sampler_that_takes_nothing_back_fails_the_test(sampler_test):
    code = FILES["fading.py"].replace(" - pull * noise", "")
    assert code != FILES["fading.py"]
    sampler_test(code)(0.0)
    with pytest.raises(AssertionError):
        sampler_test(code)(0.7)


def test_the_rule_by_hand():
    scores = f64([[0.0, 2.0, 2.0, torch.nan]])[..., None]
    close(part("ranks.py:Ranks")()(scores, [1.0]), [[-2 / 3, 1 / 3, 1 / 3, 0.0]])
    close(part("ranks.py:Ranks")()(scores[:, :3], [1.0]), [[-1.0, 0.5, 0.5]])  # as the page says


def test_a_context_says_where_a_field_is():
    for old, new in (("epoch", "context.run.epoch"), ("weights", "context.rewards.weights"),
                     ("prompts", "context.groups.prompts"), ("logp", "context.samples.logp"),
                     ("epochen", "one of run, rewards, groups, samples")):
        told = message(getattr, Context(), old, error=AttributeError)
        assert told.startswith(f"Context has no '{old}': expected {new}")
    assert copy.deepcopy(Context()).run.epoch == 0


def test_a_part_reports_a_metric_of_its_own():
    rewards, context = f64([[[0.2], [0.9], [torch.nan]]]), Context()
    capped = part("ceiling.py:Ceiling")(0.8)(rewards, context)
    assert capped[0, 2].isnan()
    close(capped[:, :2], [[[0.2], [0.8]]])
    assert context.run.metrics == {"ceiling/above": 0.5}  # as the page says
    trainer = tiny.trainer(method="flow_grpo", parts={"shaping": {"type": "ceiling.py:Ceiling", "most": -1.0}})
    assert trainer.run_epoch()["ceiling/above"] == 1.0
    trainer.method = replace(trainer.method, credit=replace(trainer.method.credit, shaping=None))
    assert "ceiling/above" not in trainer.run_epoch()  # of its own epoch alone


# --- contracts -------------------------------------------------------------------------------------------------------
ROWS = {place: (extends, methods) for place, extends, methods in re.findall(
    r"^- `([\w.]+)`(?: \(([^)]+)\))?: (.+(?:\n  .+)*)", PAGE.split("## Contracts")[1].partition("What they mean:")[0],
    re.M)}
WITHOUT_METHODS = {"adapted", "tail", "preview", "value", "data.source", "distil"}  # fields only


def test_every_place_of_the_registry_has_its_contract():
    assert set(ROWS) == set(registry.MODULES)


@pytest.mark.parametrize("place", ROWS)
def test_contracts_are_those_of_the_parts(place):
    """The class to extend is that which recipes require, or a part of the place; methods take the arguments."""
    extends, methods = ROWS[place]
    names, signatures = re.findall(r"`(\w+)`", extends), re.findall(r"`(\w*)\(([\w, ]*)\)`", methods)
    parts = [registry.TYPES[name] for name in registry.of_place(place)]
    if place in registry.BASES:
        assert names == [registry.BASES[place].__name__]
    else:
        assert set(names) <= {part.__name__ for part in parts}
    assert bool(signatures) == (place not in WITHOUT_METHODS)
    for kind in parts:
        for name, arguments in signatures:
            bound = getattr(kind, name or "__call__")
            inspect.signature(bound).bind(None, *arguments.split(", "))


# --- files of the page -----------------------------------------------------------------------------------------------
def test_the_kernel_by_hand():
    """Compare with DanceSDE at the level of each step, and at level 0 with the Euler step."""
    fading, grid = part("fading.py:FadingSDE"), f64([1.0, 0.75, 0.5, 0.0])
    x, v = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind(0)
    for i, now in enumerate(grid[:-1].tolist()):
        step, same = fading(0.8)(x, v, grid, i), kernels.DanceSDE(0.8 * now)(x, v, grid, i)
        close(step.mean, same.mean)
        close(step.std, same.std)
        close(fading(0.0)(x, v, grid, i).mean, kernels.ODE()(x, v, grid, i).mean)
    close(fading(0.8)(x, v, grid, 1).std, 0.8 * 0.75 * 0.25**0.5)


def test_blocks_of_one_step_are_recorded_steps_and_longer_ones_their_means():
    parts, scores = {}, {}
    for size in (0, 1, 3):
        blocks = {"target": {"type": "examples/blocks.py:Blocks", "size": size}} if size else {}
        trainer = tiny.trainer(method="flow_grpo", parts=blocks | {"kl": {"weight": 0.0}}, train__steps=7)
        batch = trainer.prompts[:2]
        [parts[size], *_], conditioning, _ = sampling.sample(trainer, batch)
        scores[size] = [new.logp for _, _, new in trainer.rollouts.replay(parts[size], conditioning)]
    old = {size: torch.cat([taken.old.logp for taken in made.transitions], 1) for size, made in parts.items()}
    assert torch.equal(old[0], old[1])
    torch.testing.assert_close(old[3], old[0].view(-1, 2, 3).mean(2))
    torch.testing.assert_close(torch.cat(scores[3]).flatten(), old[3].T.flatten(), rtol=1e-5, atol=1e-6)


def test_a_preset_of_a_file_stands_in_a_chain():
    method = preset("flow_grpo+my_methods.py:two_steps+grpo_guard")
    assert (method.rollout.plan.size, method.rollout.roots) == (2, 1)
    assert method.loss == preset("flow_grpo+grpo_guard").loss


@pytest.mark.parametrize("parts, line", [
    ({"surrogate": {"type": "ranks.py:Ranks"}}, "parts.surrogate.type: got ranks.py:Ranks, expected a frozen dataclass "
     "that extends flowgrpo.objectives.surrogates.Surrogate"),
    ({"surrogate": {"type": "nowhere.py:Loss"}}, "part 'nowhere.py:Loss': no file at nowhere.py"),
    ({"surrogate": {"type": "soft_gate.py:SoftGat"}}, "part file soft_gate.py has no 'SoftGat': did you mean"),
    ({"surrogate": {"type": "soft_gate.py:SoftGate", "temperature": 0}},
     "SoftGate: temperature is 0, expected above 0"),
    ({"kernel": {"type": "fading.py:FadingSDE", "level": -1}}, "FadingSDE: level is -1, expected 0 or more"),
    ({"surrogate": {"type": "soft_gate.py:SoftGate", "heat": 1}}, "unknown key parts.surrogate.heat"),
    ({"kernel": {"type": "my_methods.py:two_steps"}}, "got my_methods.py:two_steps, expected a frozen dataclass"),
    ({"target": {"type": "examples/blocks.py:Blocks"}, "step_weight": {"type": "Sigma"}},
     "a method that trains blocks of steps reads no step_weight")])
def test_mistakes_are_one_line(parts, line):
    assert line in message(resolve, tiny.config(method="flow_grpo", parts={"kl": {"weight": 0.0}} | parts))


def test_a_preset_that_raises_or_returns_no_method_is_told(files):
    (files / "broken.py").write_text("def wrong(method):\n    return method.plan\n")
    refused(r"method broken.py:wrong: AttributeError: .*\(broken.py, line 2\)", preset, "flow_grpo+broken.py:wrong")
    (files / "forgets.py").write_text("def change(method):\n    method.having(roots=1)\n")
    assert "method forgets.py:change: returned a NoneType, expected a method" in message(
        preset, "flow_grpo+forgets.py:change")


def test_the_package_of_the_page_is_found(tmp_path, monkeypatch):
    """Resolve the recipe of the page with its entry points, of a package that holds the page's files."""
    folder, info = tmp_path / "my_package", tmp_path / "my_package-1.0.dist-info"
    folder.mkdir()
    info.mkdir()
    for name, file in (("methods", "my_methods.py"), ("losses", "soft_gate.py")):
        (folder / f"{name}.py").write_text(FILES[file])
    (folder / "rewards.py").write_text("def red(images, prompts):\n    return images[:, 0].mean((1, 2))\n")
    [toml] = re.findall(r"```toml\n(.*?)```", PACKAGE, re.S)
    groups = re.sub(r'\[project\.entry-points\."(.*?)"\]', r"[\1]", toml)
    (info / "entry_points.txt").write_text(groups.replace('"', ""))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    monkeypatch.setattr(sys.modules["flowgrpo.rewards.find"], "_registered", {})  # functions of other tests' runs
    monkeypatch.syspath_prepend(tmp_path)
    [recipe] = re.findall(r"```yaml\n(.*?)```", PACKAGE, re.S)
    (tmp_path / "recipe.yaml").write_text(recipe)
    config = load(tmp_path / "recipe.yaml")
    method = resolve(config)
    assert method.rollout.plan.size == 2 and type(method.loss.surrogate).__name__ == "SoftGate"
    assert rewards.find(config.reward)(torch.ones(1, 3, 2, 2), [""]).tolist() == [1.0]
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a package with a preset, a part, and ones that cannot be used."""
    (tmp_path / "far_methods.py").write_text(FILES["soft_gate.py"] + FILES["my_methods.py"] + "NUMBER = 3\n")
    info = tmp_path / "far-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: far\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[flowgrpo.methods]\ntwo_far_steps = far_methods:two_steps\nnumber = far_methods:NUMBER\n"
        "lost = far_methods:nothing\n[flowgrpo.parts]\nFarGate = far_methods:SoftGate\nClip = far_methods:NUMBER\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("far_methods", None)


def test_an_installed_package_brings_methods_and_parts(package, capsys):
    config = tiny.config(method="flow_grpo+two_far_steps", parts={"surrogate": {"type": "FarGate", "temperature": 2.0}})
    method = resolve(config)
    assert (method.rollout.plan.size, type(method.loss.surrogate).__module__) == (2, "far_methods")
    assert preset_and_parts(preset("flow_grpo").having(surrogate=type(method.loss.surrogate)(2.0))) == (
        "flow_grpo", {"surrogate": {"type": "FarGate", "temperature": 2.0}})
    assert resolve(tiny.config(method="mix_grpo", parts={"surrogate": {"type": "Clip"}})).loss.surrogate == Clip()
    assert main(["list", "methods", "two_far"]) == 0
    assert re.search(r"two_far_steps +far_methods:two_steps +package far", capsys.readouterr().out)


@pytest.mark.parametrize("method, parts, line", [
    ("two_far_step", {}, "unknown method 'two_far_step': did you mean 'two_far_steps'?"),
    ("number", {}, "method number: got a value of type int, expected a function from a method to a method"),
    ("lost", {}, "method 'lost' does not import: AttributeError: "),
    ("flow_grpo", {"surrogate": {"type": "FarGat"}}, "parts.surrogate.type: unknown part 'FarGat': did you mean "
                                                     "'FarGate'?"),
    ("flow_grpo", {"kl": {"type": "FarGate"}}, "parts.kl.type: got FarGate, expected a frozen dataclass that extends "
                                               "flowgrpo.objectives.kl.Penalty")])
def test_mistakes_with_an_installed_package_are_one_line(method, parts, line, package):
    assert line in message(resolve, tiny.config(method=method, parts=parts))


@pytest.mark.parametrize("name, place", [("soft_gate.py:SoftGate", "surrogate"), ("ranks.py:Ranks", "advantage"),
                                         ("fading.py:FadingSDE", "PLACE")])
def test_a_part_in_place_of_a_preset_is_refused_with_its_place(name, place):
    assert message(preset, f"flow_grpo+{name}") == (
        f"method {name}: got a part, expected a function from a method to a method: name the part by its place, "
        f"parts: {{{place}: {{type: {name}}}}}")

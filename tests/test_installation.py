"""An installation with the declared dependencies alone: every recipe's pipeline reads its prompts, every reward of a
recipe runs or names its extra, and a source tree that is not installed trains."""

import ast
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from flowgrpo import packages, rewards
from flowgrpo.config import load
from flowgrpo.packages import EXTRAS
from tests.test_recipes import FOLDER, LANGUAGE_MODELS, PIPELINES, STARTERS

PROJECT = (FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8")
ALWAYS = {"setuptools", "pip"}  # of every virtual environment


def declared(name: str) -> list[Requirement]:
    """A list of requirements of pyproject.toml."""
    [block] = re.findall(rf"^{name} = (\[.*?\])$", PROJECT, re.M | re.S)
    return [Requirement(each) for each in ast.literal_eval(block)]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def brought() -> set[str]:
    """The distributions that installing flowgrpo without extras brings here."""
    found, left = set(), declared("dependencies")
    while left:
        need = left.pop()
        if canonical(need.name) in found or need.marker and not any(
                need.marker.evaluate({"extra": extra}) for extra in ("", *need.extras)):
            continue
        try:
            of_it = metadata.requires(need.name) or []
        except metadata.PackageNotFoundError:  # of another platform
            continue
        found.add(canonical(need.name))
        left += [Requirement(each) for each in of_it]
    return found


def others() -> set[str]:
    """The top-level modules here that such an installation lacks."""
    there = brought() | ALWAYS
    return {module for module, names in metadata.packages_distributions().items()
            if not {canonical(name) for name in names} & there} - {"flowgrpo"}


FRESH = """
import sys
from importlib.machinery import PathFinder

class Fresh(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in LACKING else super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *given, **named):
        return [each for each in super().find_distributions(*given, **named)
                if (each.name or "").lower().replace("-", "_") not in {"flowgrpo", *LACKING}]

sys.meta_path[:] = [Fresh if finder is PathFinder else finder for finder in sys.meta_path]
"""

ENCODE = """
import json, tempfile
from flowgrpo.tools.check import tiny
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.config.sections import Adapter

found = {}
for name in NAMES:
    pipe, call = tiny.make(name)
    with tempfile.TemporaryDirectory() as folder:
        modular = hasattr(pipe, "_component_specs")
        pipe.save_pretrained(folder, **{"overwrite_modular_index": True} if modular else {})
        if not modular:
            index = json.load(open(f"{folder}/model_index.json"))
            index |= {key: [None, None] for key, part in pipe.components.items() if part is None}
            json.dump(index, open(f"{folder}/model_index.json", "w"))
        loaded = load_pipeline(folder)
        if not modular and hasattr(pipe, "vae_scale_factor"):  # a tiny pipeline's own, which no file keeps
            loaded.vae_scale_factor = pipe.vae_scale_factor
        policy = PipelinePolicy(loaded, Adapter(rank=2), call=call)
        found[name] = type(policy.encode(["a cat"])).__name__
print(json.dumps(found))
"""

TRAIN = """
import sys
from importlib import metadata
try:
    print(metadata.version("flowgrpo"))
except metadata.PackageNotFoundError:
    from flowgrpo.cli import main
    sys.exit(main(["train", RECIPE]) or main(["list", "rewards", "clip_score", "--json"]))
"""


def run(script: str, path: Path = FOLDER.parent, **names: object) -> str:
    """The output of a script in another interpreter that lacks what others() names, with flowgrpo from the path."""
    given = "".join(f"{name} = {value!r}\n" for name, value in {"LACKING": sorted(others()), **names}.items())
    code = f"import sys\nsys.path.insert(0, {str(path)!r})\n" + given + FRESH + script
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_hidden_packages_and_pipelines():
    assert "ftfy" in brought() and "open-clip-torch" not in brought()
    assert {"open_clip", "sentencepiece", "timm"} & set(metadata.packages_distributions()) <= others()
    names = sorted({name for name, _ in PIPELINES.values()} | {"WanImageToVideoPipeline"})
    assert json.loads(run(ENCODE, NAMES=names).splitlines()[-1]) == dict.fromkeys(names, "Conditioning")


@pytest.mark.parametrize("name", sorted({*PIPELINES, *LANGUAGE_MODELS, *STARTERS}))
def test_what_the_rewards_of_a_recipe_need_is_nothing_or_an_extra(name):
    config = load(FOLDER / f"{name}.yaml")
    for label, rule in (config.trained | config.extra_rewards).items():
        if label == "preferred":
            continue
        inner = rule.args.get("reward"), *rule.args.get("rewards", ())
        for reward in filter(None, (rule.use or label, *inner)):
            needs = rewards.about(rewards.locate(reward)).needs
            assert needs == "" or needs in EXTRAS


def test_the_modules_of_extras_are_those_of_the_project():
    extras = re.findall(r"^(\w+) = \[", PROJECT.partition("[project.optional-dependencies]")[2].partition("\n[")[0],
                        re.M)
    assert set(extras) - {"docs", "test", "browser", "lint"} == set(EXTRAS)
    modules = {name: {canonical(each) for each in of_it} for name, of_it in metadata.packages_distributions().items()}
    for extra, known in EXTRAS.items():
        needs = {canonical(need.name) for need in declared(extra)}
        assert len(needs) == len(known)
        for module in known:
            assert module not in modules or modules[module] & needs or module == "cv2"  # whose forms bring one module


def test_a_source_tree_that_is_not_installed_trains(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        f"output: {tmp_path}\nreward: sharpness\ntracker: none\nprecision: fp32\ndevice: cpu\n"
        "train: {epochs: 1, prompts: 1, group: 2, micro_batch: 2, steps: 6}\neval: {steps: 2, prompts: 2}\n")
    out = run(TRAIN, RECIPE=str(tmp_path / "recipe.yaml"))
    [listed] = [row for row in json.loads(out[out.rindex("\n[\n"):]) if row["name"] == "clip_score"]
    assert (listed["needs"], listed["installed"]) == ("clip", False)
    machine = json.loads((tmp_path / "recipe" / "report" / "machine.json").read_text())
    assert machine["flowgrpo"] == packages.version("flowgrpo") != "unknown" and machine["precision"] == "fp32"

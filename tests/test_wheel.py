"""The wheel, in a folder of its own: it has the recipes, and its commands find them without a clone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flowgrpo.config import load

ROOT = Path(__file__).parents[1]
SMALL = ("--train.epochs=1", "--train.prompts=2", "--train.group=4", "--train.micro_batch=8", "--eval.prompts=4",
         "--eval.steps=2", "--eval.grid=2", "--device=cpu")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the package alone, from a wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, source)
    for name in ("flowgrpo", "configs", "docs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", folder], cwd=source,
                   check=True)
    [wheel] = folder.glob("flowgrpo-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", folder / "site", wheel], check=True)
    shutil.rmtree(source)
    return folder / "site"


def run(installed: Path, where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "flowgrpo", *arguments], cwd=where, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"})


def test_the_wheel_runs_its_recipes_and_the_demo(installed, tmp_path):
    packaged = installed / "flowgrpo" / "recipes"
    assert not packaged.is_symlink() and not any(file.is_symlink() for file in packaged.iterdir())
    assert {file.name: file.read_text() for file in packaged.iterdir()} == \
        {file.name: file.read_text() for file in (ROOT / "configs").glob("*.yaml")}
    pages = {str(file.relative_to(ROOT / "docs")): file.read_text() for file in (ROOT / "docs").rglob("*.md")}
    kept = installed / "flowgrpo" / "docs"
    assert {str(file.relative_to(kept)): file.read_text() for file in kept.rglob("*.md")} == pages
    assert run(installed, tmp_path, "docs", "rewards").stdout.startswith("# Rewards")
    assert run(installed, tmp_path, "constraints").stdout.strip() == (ROOT / "constraints.txt").read_text().strip()
    # The reward is looked for after the recipe is read and before a model is loaded.
    done = run(installed, tmp_path, "train", "sdxl_24gb", "--reward=pickscor")
    assert done.returncode == 2 and "did you mean 'pickscore'" in done.stderr
    done = run(installed, tmp_path, "train", "sdxl_24g")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("flowgrpo: error: no recipe 'sdxl_24g': did you mean 'sdxl_24gb'?")
    # With the configuration of configs/starter.yaml but for the keys of the command line.
    done = run(installed, tmp_path, "demo", *SMALL)
    assert done.returncode == 0, done.stderr
    assert set(json.loads((tmp_path / "runs" / "starter" / "summary.json").read_text())["after"]) >= {"scene"}
    wanted = load(ROOT / "configs" / "starter.yaml", dict(option[2:].split("=") for option in SMALL))
    found = load(tmp_path / "runs" / "starter" / "config.yaml")
    assert found == wanted.model_copy(update={"precision": found.precision})

"""Blocks of YAML and Python in README.md and docs/, and notebooks of examples/, work as they stand."""

import ast
import importlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.config.geometry import geometry
from flowgrpo.data.prompt_writer import load_templates
from flowgrpo.tools.bench import models

ROOT = Path(__file__).parent.parent
# One epoch of one prompt, measured on two.
SHORT = {'recipe="starter"': 'recipe="starter", name="first", eval={"prompts": 2, "steps": 2}, '
         'train={"epochs": 1, "prompts": 1, "group": 4, "micro_batch": 4}', '"runs/starter"': '"runs/first"'}


def blocks(language: str, page: Path) -> Iterator[str]:
    """Yield the code blocks of a page in a language, without their indentation."""
    text = page.read_text(encoding="utf-8")
    for indent, block in re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, re.S | re.M):
        yield re.sub(f"^{indent}", "", block, flags=re.M)


def documents() -> Iterator[Any]:
    """Yield a parameter (YAML document) for every document of every page but those of the methods."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if page.parent.name == "methods":
            continue
        for number, block in enumerate(blocks("yaml", page)):
            for document in block.split("\n---\n"):
                yield pytest.param(document, id=f"{page.stem}-{number}")


def test_documents_are_found():
    assert len([*documents()]) > 35


@pytest.mark.parametrize("document", [*documents()])
def test_yaml_that_is_shown_loads(document, tmp_path):
    """A recipe, or templates of prompts, or named rewards of `flowgrpo reward label --rewards`."""
    content = yaml.safe_load(document)
    if "extends" in content:
        shutil.copytree(ROOT / "configs", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "shown.yaml"
    file.write_text(document)
    if "templates" in content:
        assert len(load_templates(file).write(5, 0)) == 5
    elif all(isinstance(value, dict) and "use" in value for value in content.values()):
        assert config.validate({"reward": content}).rewards.keys() == content.keys()
    else:
        assert config.load(file).model_dump(exclude_unset=True).keys() >= content.keys() - {"extends"}


def test_the_laptops_python_trains_and_stock_diffusers_reads_it(here):
    """The call of docs/get_started/laptop.md, shortened, and the pipeline of docs/reference/files.md with its LoRA."""
    (here / "flowgrpo").symlink_to(ROOT / "flowgrpo")
    [call] = blocks("python", ROOT / "docs" / "get_started" / "laptop.md")
    [loading] = blocks("python", ROOT / "docs" / "reference" / "files.md")
    names: dict[str, Any] = {}
    for block in (call, loading):
        for shown, short in SHORT.items():
            block = block.replace(shown, short)
        exec(compile(block, "shown.py", "exec"), names)
    assert {"before", "after"} <= names["summary"].keys() and (here / "runs" / "first").is_dir()
    assert names["image"].size == (64, 64) and (here / "star.png").exists()


def test_rewards_that_are_shown_score():
    """Those of docs/rewards.md, whose later blocks read names of earlier ones."""
    names: dict[str, Any] = {}
    for block in blocks("python", ROOT / "docs" / "rewards.md"):
        exec(compile(block, "shown.py", "exec"), names)
        if "About(" in block:
            assert names["red"].about.modality == "image"
    pictures, latents, two = torch.rand(2, 3, 8, 8), torch.rand(2, 4, 4, 4), ["p", "q"]
    assert names["red"](pictures, two).shape == names["smooth"](latents, two, [{}] * 2).shape == (2,)
    assert names["kept"](pictures, two, [{}] * 2, base=pictures).tolist() == [0.0, 0.0]
    assert names["kept"](pictures, two, [{}] * 2) == [None, None]
    assert names["red"].differentiable and names["purines"].differentiable


def test_the_reward_of_edits_compares_with_the_source_as_the_model_saw_it(tmp_path):
    """An image that is stored sideways, half red and half blue, of another aspect ratio than the output."""
    [block] = blocks("python", ROOT / "docs" / "edits.md")
    names: dict[str, Any] = {}
    exec(compile(block, "shown.py", "exec"), names)
    upright, exif = Image.new("RGB", (32, 16), "red"), Image.Exif()
    upright.paste((0, 0, 255), (0, 8, 32, 16))
    exif[0x0112] = 6
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "phone.png", exif=exif)
    same = torch.zeros(3, 16, 16)
    same[0, :8] = same[2, 8:] = 1
    found = names["kept"](torch.stack([same, same.flip(1)]), ["p"] * 2, [{"image": str(tmp_path / "phone.png")}] * 2)
    assert found.tolist() == pytest.approx([1, 1 / 3])


def test_the_readmes_reward_prefers_red():
    [block] = blocks("python", ROOT / "README.md")
    names: dict[str, Any] = {}
    exec(compile(block, "red.py", "exec"), names)
    red, grey = torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1).expand(3, 4, 4), torch.full((3, 4, 4), 0.5)
    assert names["red"](torch.stack([red, grey]), ["p"] * 2, [{}] * 2) == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize("number, methods", [
    (0, {"from_pretrained", "to", "load_lora_weights"}),
    (1, {"from_pretrained", "load_lora_weights", "enable_model_cpu_offload"})])
def test_what_the_page_of_one_gpu_imports_exists(number, methods):
    tree = ast.parse([*blocks("python", ROOT / "docs" / "get_started" / "one_gpu.md")][number])
    pipeline, *others = [getattr(importlib.import_module(str(node.module)), alias.name) for node in tree.body
                         if isinstance(node, ast.ImportFrom) for alias in node.names]
    called = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call)
              and isinstance(node.func, ast.Attribute)}
    assert called == methods and all(hasattr(pipeline, name) for name in called)
    assert all(callable(other) for other in others)


def test_make_targets_and_the_benchs_recipe():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shown = {target for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
             for target in re.findall(r"(?:`|^)make ([a-z]+)", page.read_text(encoding="utf-8"), re.M)}
    assert {"test", "demo"} <= shown and [name for name in shown if not re.search(f"^{name}:", makefile, re.M)] == []
    # Over the settings that the bench shares; losses differ from the second update on.
    shown = yaml.safe_load(bench_example()[0])
    train = {key[6:]: value for key, value in models.common_settings("starter").items() if key.startswith("train.")}
    made = geometry(config.validate({"train": train | shown["train"]}).train, 1)
    assert made.updates == 2 and made.micro_batch == 48


def bench_example() -> tuple[str, str]:
    """Return mine.yaml and mix2.yaml of docs/bench.md."""
    [mine] = blocks("yaml", ROOT / "docs" / "bench.md")
    return mine, "".join(line for line in mine.splitlines(True) if not line.startswith("parts:"))


def test_the_benchs_own_methods_run(here, capsys):
    """The commands of docs/bench.md with files as printed, for one epoch of each method."""
    Path("soft_gate.py").write_text(next(blocks("python", ROOT / "docs" / "extending.md")))
    for name, text in zip(("mine.yaml", "mix2.yaml"), bench_example()):
        Path(name).write_text(text)
    (here / "configs").symlink_to(ROOT / "configs")
    text = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    [written, compared] = re.findall(r"^flowgrpo (new method .*|compare methods .*my_loss.*)$", text, re.M)
    assert main(written.split()) == 0
    assert main([*compared.split(), "--evaluations", "1"]) == 2
    assert "takes 1,068: expected at least as many" in capsys.readouterr().err  # all of it was planned
    [two] = re.findall(r"`(--methods mine.yaml,mix2.yaml --reference mix2.yaml)`", text)
    small = ["--evaluations", "1200", "--seeds", "1", "--points", "1", "--prompts", "2", "--jobs", "1"]
    assert main(["compare", "methods", *two.split(), *small, "--output", "bench"]) == 0
    assert "Unlike the recipe `starter`: `adapter.targets: [" in Path("bench/results.md").read_text()

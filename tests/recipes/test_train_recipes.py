"""The round of the recipes: what it changes and builds, its table, and the whole round of three shallow ones."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
import train_recipes
from PIL import Image

from flowgrpo import published
from flowgrpo.config import load
from flowgrpo.tools.dry_run import from_configs
from tests.helpers import loop

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", train_recipes.recipes())
def test_what_a_cpu_forces_is_a_valid_recipe_that_keeps_its_method(name, tmp_path):
    keys = train_recipes.forced(name, tmp_path)
    before, after = load(CONFIGS / f"{name}.yaml"), load(CONFIGS / f"{name}.yaml", keys)
    assert (after.method, after.adapter, after.train.lr, after.train.guidance) == (
        before.method, before.adapter, before.train.lr, before.train.guidance)
    assert set(before.parts) == set(after.parts)
    loop.setup(after)  # whose parts go together
    if before.image.frames:  # of clips, also of one frame
        assert [rule.use for rule in after.reward.values()] == ["frames"]
    assert (after.call.get("use_resolution_binning") is False) == name.startswith("sana")  # which would draw 512 pixels
    assert after.parts.get("plan", {}).get("size", 0) <= after.train.steps // 2  # flow_grpo_fast's window is there


@pytest.mark.parametrize("model, depths, width", [
    ("black-forest-labs/FLUX.1-dev", {"num_layers": 1, "num_single_layers": 1}, ("num_attention_heads", None)),
    ("stabilityai/stable-diffusion-3.5-medium", {"num_layers": 2}, ("num_attention_heads", 24)),
    ("Wan-AI/Wan2.1-T2V-14B-Diffusers", {"num_layers": 1}, ("ffn_dim", None)),
    ("stabilityai/stable-diffusion-xl-base-1.0", {"layers_per_block": 1, "transformer_layers_per_block": [1, 1, 1]},
     ("block_out_channels", (320, 640, 1280)))])
def test_a_denoiser_keeps_its_width_and_loses_depth(model, depths, width):
    parts = published.MODELS[model].parts
    kind, config = parts.get("unet") or parts["transformer"]
    cls = getattr(diffusers, kind)
    made = train_recipes.shallow(cls, config, train_recipes.depths_of(cls, config))
    assert {key: made[key] for key in depths} == depths
    assert made.get(width[0]) == width[1]


def test_an_encoder_whose_layers_are_read_keeps_them_and_is_narrow():
    read = train_recipes.encoder_of("Flux2KleinPipeline")
    assert read["num_hidden_layers"] == 28 and read["intermediate_size"] == 256
    assert train_recipes.encoder_of("SanaPipeline") == train_recipes.ENCODER


@pytest.mark.fast
def test_failing_steps_and_exports_without_names(tmp_path):
    """A step is a process of its own; its last line and its exit code are kept, and the same call goes on there."""
    def failing():
        print("begun")
        raise ValueError("no such thing")
    found = train_recipes.ran(failing, tmp_path / "log", 60)
    assert found.code == 1 and found.said == "ValueError: no such thing" and found.peak > 0
    assert train_recipes.ran(lambda: 3, tmp_path / "log", 60).code == 3
    assert train_recipes.ran(lambda: __import__("time").sleep(60), tmp_path / "log", 0.5) is None
    assert train_recipes.exported("sana_24gb", tmp_path) == ["--form=merged", f"--output={tmp_path / 'merged'}"]
    assert train_recipes.exported("wan22", tmp_path) == [f"--output={tmp_path / 'lora.safetensors'}"]


def test_the_table_tells_what_ran_and_what_failed(tmp_path):
    step = {"code": 0, "seconds": 2.0, "processor": 1.0, "peak": 0.5, "said": "fine"}
    (tmp_path / "sd15").mkdir()
    (tmp_path / "sd15" / "steps.json").write_text(json.dumps({
        "build": step | {"said": "678 M parameters"}, "check": step | {"estimate": 1.4},
        "train": step | {"code": 2, "said": "error: a | b"}}))
    (tmp_path / "flux_kontext").mkdir()
    (tmp_path / "flux_kontext" / "steps.json").write_text(json.dumps({"build": step}))
    [edits] = train_recipes.rows(["flux_kontext"], tmp_path)
    assert edits["forced"]["prompts"] == "prompts.jsonl"  # the file names no folder of the machine
    [row] = train_recipes.rows(["sd15", "sdxl"], tmp_path)
    assert row["ran"] == ["build", "check"] and row["failed"] == "train: error: a | b" and row["processor"] == 3
    assert row["forced"]["image.height"] == 64 and row["forced"]["train.epochs"] == 1
    last = train_recipes.table([row]).splitlines()[-1]
    assert last == "| `sd15` | 678 M parameters | build, check; failed: train: error: a \\| b | 3 | - | 1.4 | - |"


def test_a_whole_model_has_its_published_depth_and_a_row_of_its_own(tmp_path, monkeypatch, capsys):
    """Of SD 1.5's classes with the widths of a starter, since whole ones take a minute."""
    kind, config = published.MODELS["stable-diffusion-v1-5/stable-diffusion-v1-5"].parts["unet"]
    parts = published.MODELS["stable-diffusion-v1-5/stable-diffusion-v1-5"].parts
    narrow = {"block_out_channels": (32, 32, 32, 32), "attention_head_dim": 8}
    known = dataclasses.replace(train_recipes.model_of("sd15"), parts=parts | {"unet": (kind, config | narrow)})
    monkeypatch.setattr(train_recipes, "model_of", lambda name: known)
    depths = {}
    for whole in (False, True):
        train_recipes.build("sd15", tmp_path / str(whole), None, whole)
        saved = tmp_path / str(whole) / "model"
        depths[whole] = [json.loads((saved / part / "config.json").read_text())[key] for part, key in (
            ("unet", "layers_per_block"), ("text_encoder", "num_hidden_layers"), ("text_encoder", "vocab_size"))]
    assert depths == {False: [1, 2, 512], True: [2, 12, 49408]}
    told = capsys.readouterr().out
    assert "\nwhole, " in told and not told.startswith("whole")
    shallow, whole = ({"recipe": "sd15", "size": size} for size in ("1 M parameters", "whole, 2 M parameters"))
    (tmp_path / "rows.json").write_text(json.dumps([whole | {"seconds": 1}, shallow]))
    assert train_recipes.joined(tmp_path / "rows.json", [whole]) == [shallow, whole]


@pytest.mark.fast
def test_stand_ins_and_constants_that_are_reduced(tmp_path):
    values = np.array([[[[0.0, 0.5, 1.0]]], [[[0.25, 0.1, 0.9]]]])  # as numpy: 2 frames of one pixel
    assert train_recipes.bytes_of(values).tolist() == [[[[0, 128, 255]]], [[[64, 26, 230]]]]
    assert train_recipes.bytes_of([Image.new("RGB", (1, 1), (7, 0, 255))]).tolist() == [[[[7, 0, 255]]]]
    known = published.MODELS["hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"]
    pipe = from_configs.assemble(known, lambda name, kind, config: from_configs.part(kind, config, torch.bfloat16))
    for text, words in (("a red fox", 3), ("", 0)):  # an empty one has a token too, as every published template has
        ids = pipe.tokenizer.apply_chat_template([{"role": "user", "content": text}], return_dict=True).input_ids
        assert len(ids) == pipe.prompt_template_encode_start_idx + words + 1
    for pipeline, areas in train_recipes.AREAS.items():
        module = sys.modules[getattr(diffusers, pipeline).__module__]
        assert all(getattr(module, name) > area for name, area in areas.items())
    (tmp_path / "qwen_image_edit").mkdir()
    (tmp_path / "qwen_image_edit" / "steps.json").write_text(json.dumps({"build": {
        "code": 0, "seconds": 1.0, "processor": 1.0, "peak": 1.0, "said": "1 M parameters"}}))
    [row] = train_recipes.rows(["qwen_image_edit"], tmp_path)
    assert row["forced"]["VAE_IMAGE_SIZE"] == 64 * 64


ROOT = Path(__file__).parents[2]


STEPS = ["build", "check", "train", "sample", "grid", "export", "stock"]


@pytest.mark.parametrize("names, stock", [(["qwen3_0_6b", "smollm2_135m"], "the same text"),
                                          (["sd15"], r"largest difference [01] of 255, mean (0|\d(\.\d+)?e-0[4-9]);")],
                         ids=["texts", "images"])
def test_a_recipe_runs_from_its_model_to_stock_libraries(names, stock, tmp_path, monkeypatch):
    """The card's lines draw and write what `sample` does, up to a level of few pixels; the table can be printed again.

    On some CPUs our attention and torch's round differently, and a value lies between two levels.
    """
    command = [sys.executable, str(ROOT / "scripts" / "docs" / "train_recipes.py"), *names, f"--folder={tmp_path}",
               f"--json={tmp_path / 'rows.json'}"]
    told = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert told.returncode == 0, told.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["recipe"] for row in rows] == sorted(names)
    for row in rows:
        assert row["failed"] is None and row["ran"] == STEPS, told.stdout
        assert re.match(stock, row["stock"]) and row["peak"] > 0.1 and row["estimate"] > 0
    exact = [row | {"stock": re.sub("difference 1 of", "difference 0 of", row["stock"])} for row in rows]
    (tmp_path / "rows.json").write_text(json.dumps(exact))
    monkeypatch.setattr(train_recipes, "ROUND", tmp_path / "rows.json")
    section = " ".join(train_recipes.section().split())
    assert f" took {len(names)} recipes " in section and "Failed" not in section and "every pixel. `docs" in section
    (tmp_path / "rows.json").write_text(json.dumps([
        rows[0] | {"stock": "largest difference 5 of 255, mean 1"}, {"recipe": "sdxl", "failed": "train: x"}]))
    section = " ".join(train_recipes.section().split())
    assert f"except for differences of 255: `{names[0]}` 5. Of int8 weights" in section
    assert "a GPU. Failed: `sdxl` (train). Images" in section
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    again = subprocess.run([*command, "--table"], capture_output=True, text=True)
    assert again.returncode == 0
    assert sorted(json.loads((tmp_path / "rows.json").read_text()), key=str) == sorted(rows, key=str)

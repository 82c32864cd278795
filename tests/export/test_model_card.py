"""The model card: metadata that a hub reads, a snippet that runs as it is, results with intervals, few settings."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image

from flowgrpo.check.tiny import make
from flowgrpo.config import validate
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation.compared import compared
from flowgrpo.evaluation.measured import Measured
from flowgrpo.export import export, model_card, usage
from flowgrpo.storage.json_files import finite
from tests.export.test_export import SUMMARY, make_run
from tests.export.test_export_text import finished
from tests.helpers import tiny


@pytest.fixture(scope="module")
def sd3(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("sd3"), tiny.sd3(), tiny.CALL)


def code(card: str) -> str:
    [found] = re.findall(r"```python\n(.*?)```", card, re.S)
    return found


def test_the_card_says_what_the_run_says(sd3):
    text = export.card(sd3).read_text()
    assert "with `mix_grpo+grpo_guard` to 2 `bright`" in text and "| bright | 0.250 | 0.500 | +0.250 | yes |" in text
    assert "Means over 4 held-out pictures (2 steps, guidance 1), with the pipeline's own scheduler.\n" in text
    assert "1,234 denoiser evaluations" in text and "| LoRA | rank 2, alpha 3 |" in text
    assert len(text.splitlines()) < 70 and "text:" not in text
    assert (sd3 / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_results_have_intervals():
    prompts, scores = [Prompt(str(i)) for i in range(4)], ([0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0])
    before, after = (Measured(prompts, {"bright": values}, torch.empty(0)) for values in scores)
    told = model_card.results(validate({"reward": "bright"}), SUMMARY | {"compared": compared(before, after, 1)})
    assert "| bright | 0.250 [0.046, 0.699] | 0.750 [0.301, 0.954] | +0.500 [" in told
    assert told.endswith("95 % intervals: Wilson.")


@pytest.mark.parametrize("front, expected, said", [
    ("---\nlicense: apache-2.0\n---\n# A model", {"license": "apache-2.0"}, "`apache-2.0`"),
    ("---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE.md\n---\n",
     {"license": "other", "license_name": "own", "license_link": "LICENSE.md"}, "`other`"),
    ("# A model without metadata", {}, "unknown"), ("---\n: {\n---\n", {}, "unknown"), (None, {}, "unknown")])
def test_the_licence_is_the_base_models(sd3, front, expected, said):
    file = sd3 / "model" / "README.md"
    try:
        if front is not None:
            file.write_text(front)
        assert model_card.licence_of(str(sd3 / "model")) == expected
        card = ModelCard(export.card(sd3).read_text())
        assert card.data.license == expected.get("license", "unknown")
        assert f"Of the base model `{sd3 / 'model'}`: {said}" in card.text
    finally:
        file.unlink(missing_ok=True)


def test_the_metadata_is_what_a_hub_reads(sd3):
    card = ModelCard(export.card(sd3).read_text())
    assert card.data.base_model is None and card.data.library_name == "diffusers"  # a folder here is no hub id
    assert card.data.tags == ["flowgrpo", "reinforcement-learning", "lora"]
    assert card.data.pipeline_tag == "text-to-image"
    on_hub = validate({"model": "owner/a-model", "reward": "bright"})
    told = model_card.metadata(on_hub, {}, "clip", True)
    assert told["base_model"] == "owner/a-model" and told["base_model_relation"] == "adapter"
    assert told["pipeline_tag"] == "text-to-video" and told["license"] == "unknown"
    assert model_card.licence_of("starter") == {"license": "apache-2.0"} and model_card.licence_of("no/model") == {}


@pytest.mark.parametrize("which", ["sd3", "whole", "pixart"])
def test_the_snippet_of_a_pipeline_runs_as_it_is(sd3, which, tmp_path, monkeypatch):
    run = {"sd3": lambda: sd3, "whole": lambda: make_run(tmp_path / "run", tiny.sd3(), tiny.CALL, rank=0),
           "pixart": lambda: make_run(tmp_path / "run", *make("PixArtSigmaPipeline"))}[which]()
    monkeypatch.chdir(tmp_path)
    written = code(export.card(run).read_text())
    here: dict = {}
    exec(written, here)
    tuned = np.asarray(Image.open("picture.png")).astype(int)
    exec(re.sub(r"(?m)^(pipe\.load_lora_weights|load_lora|pipe\.\w+ = type).*\n", "", written)
         .replace("picture.png", "base.png"), {})
    assert which != "sd3" or here["pipe"].transformer.peft_config
    assert tuned.std() > 0 and ("load" in written or "from_pretrained" in written)
    states = here["pipe"].transformer.state_dict()
    assert all(torch.isfinite(value).all() for value in states.values() if value.is_floating_point())
    assert (tuned != np.asarray(Image.open("base.png")).astype(int)).any()


@pytest.mark.parametrize("rank", [2, 0])
def test_the_snippet_of_a_language_model_runs_as_it_is(tmp_path, rank, capsys):
    run, own = finished(tmp_path, rank)
    card = export.card(run).read_text()
    here: dict = {}
    exec(code(card), here)
    expected = own.model.generate(**here["inputs"], max_new_tokens=own.text.max_tokens, do_sample=False)
    assert torch.equal(here["output"], expected) and capsys.readouterr().out
    assert "| completions | up to" in card and "pipeline_tag: text-generation" in card


@pytest.mark.parametrize("model, lines", [
    ("starter", ["from flowgrpo.starter import FOLDERS", "str(FOLDERS['starter'])", "text_encoder_3=None",
                 "guidance_scale=2.0", "max_sequence_length=1"]),
    ("starter_video", ["export_to_video(frames", "num_frames=5"]), ("starter_consistency", ["load_pipeline("])])
def test_snippets_of_packaged_models(model, lines, tmp_path):
    config = validate({"model": model, "reward": "scene", "eval": {"guidance": 2.0}})
    (tmp_path / "pytorch_lora_weights.safetensors").touch()
    told = usage.snippet(config, tmp_path, "me/repository", "a star")
    assert all(line in told for line in lines) and "pipe.load_lora_weights('me/repository')" in told
    compile(told, "snippet", "exec")


def test_the_snippet_of_an_upload_loads_the_repository(tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "adapter_config.json").touch()
    told = usage.snippet(validate({"model": "owner/model", "reward": "scene"}), tmp_path, "me/repository", "a star")
    assert "load_lora(pipe, {'transformer': pipe.transformer}, Path(snapshot_download('me/repository')))" in told


def test_a_reward_that_applied_to_no_held_out_prompt_has_no_mean_in_the_card(tmp_path):
    (tmp_path / "config.yaml").write_text(validate({"model": "starter", "reward": {"bright": 1, "dark": 1}}).yaml())
    told = SUMMARY | {"before": {"bright": None, "dark": 0.5}, "after": {"bright": 0.25, "dark": None}}
    (tmp_path / "summary.json").write_text(json.dumps(finite(told)))
    lines = [{"evaluations": 5, "reward/bright/mean": None, "reward/dark/mean": 0.5, "reward/dark/std": 1.0},
             {"evaluations": 9, "reward/bright/mean": None, "reward/dark/mean": None, "held_out/dark": 0.75},
             {"evaluations": 14, "held_out/dark": 1.0, "loss": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = export.card(tmp_path).read_text()
    assert "| bright | - | 0.250 | - | yes |" in text and "| dark | 0.500 | - | - | yes |" in text
    assert model_card.points(lines) == {"reward/dark": [(5, 0.5)], "held_out/dark": [(9, 0.75), (14, 1.0)]}


def test_the_card_of_a_video_run_shows_its_clips(sd3):
    clip = sd3 / "before_after.webp"
    try:
        assert "(before_after.png)" in export.card(sd3).read_text()
        clip.touch()
        assert "(before_after.webp)" in export.card(sd3).read_text()
    finally:
        clip.unlink()


@pytest.mark.parametrize("model, method", [("owner/model", "mix_grpo"), ("owner/text", "grpo")])
def test_the_snippet_loads_the_revision_and_the_variant_of_the_run(model, method, tmp_path):
    files = {"variant": "fp16", "revision": "v2"}
    config = validate({"model": model, "method": method, "reward": "scene", "load": files})
    told = usage.snippet(config, tmp_path, "me/repository", "a star")
    assert "variant='fp16', revision='v2'" in told
    compile(told, "snippet", "exec")


def test_the_snippet_sets_the_guider_of_a_pipeline_that_has_one(tmp_path):
    model = tmp_path / "model"
    make("HunyuanVideo15Pipeline")[0].save_pretrained(model)
    config = validate({"model": str(model), "reward": "scene", "eval": {"guidance": 3.5}})
    told = usage.snippet(config, tmp_path, "me/repository", "a star")
    [last] = [line for line in told.splitlines() if ".frames[0]" in line]
    assert "pipe.guider = pipe.guider.new(guidance_scale=3.5)" in told and "guidance_scale" not in last
    compile(told, "snippet", "exec")


def test_the_snippet_of_a_replaced_denoiser_loads_it(tmp_path):
    config = validate({"model": "owner/model", "reward": "scene", "precision": "bf16", "load": {"denoiser": "d.gguf"}})
    told = usage.snippet(config, tmp_path, "me/repository", "a star")
    assert "pipe = load_pipeline('owner/model', 'bf16', files=Load(denoiser='d.gguf'))" in told
    assert "from flowgrpo.config.sections import Load" in told
    compile(told, "snippet", "exec")

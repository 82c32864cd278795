"""The forms of a language model's run: a merged model that says what the run's policy says, a true card, a refusal."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowgrpo.cli import main
from flowgrpo.errors import UserError
from flowgrpo.evaluation.plan import digest, weights_digest
from flowgrpo.export import export
from tests.helpers import tiny_text

SUMMARY = {"before": {"short": None}, "after": {"short": 0.5},
           "evaluation": {"prompts": 4, "steps": 20, "guidance": 4.5, "of": "completions (greedy)"}, "epochs": 2,
           "updates": 2, "denoiser_evaluations": 1234, "unit": "tokens", "seconds": 3.0, "seed": 7}
IDS = torch.tensor([[3, 4, 5, 6, 7]])


def finished(folder, rank: int = 2, precision: str = "fp32"):
    """(a finished run's folder, its policy, whose trained weights are far from the base's)."""
    loaded = tiny_text.model()
    for each in loaded:
        each.save_pretrained(folder / "base")
    own = tiny_text.stir(tiny_text.policy(loaded, rank))
    own.weights.save(folder)
    settings = tiny_text.config(model=str(folder / "base"), adapter__rank=rank, precision=precision)
    (folder / "config.yaml").write_text(settings.yaml())
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    lines = [{"evaluations": 10 * i, "reward/short/mean": 0.1 * i} for i in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder, own


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("rank", [2, 0])
def test_a_merged_model_says_what_the_policy_says(tmp_path, rank, capsys):
    run, own = finished(tmp_path, rank)
    weights = weights_digest(run)
    assert main(["export", str(run)]) == 0  # the form of a language model
    assert weights_digest(run) == weights != digest([])
    assert capsys.readouterr().out.splitlines()[-1] == str(run / "merged")
    base, merged = (AutoModelForCausalLM.from_pretrained(run / name) for name in ("base", "merged"))
    assert base.state_dict().keys() == merged.state_dict().keys()
    torch.testing.assert_close(logits(merged), logits(own.model), rtol=1e-5, atol=1e-5)
    assert (logits(base) - logits(merged)).abs().max() > 1e-3
    assert AutoTokenizer.from_pretrained(run / "merged")("1+2=").input_ids == own.tokenizer("1+2=").input_ids


def test_a_merged_model_is_added_up_in_fp32_and_rounded_to_the_runs_precision(tmp_path):
    run, own = finished(tmp_path, precision="bf16")
    merged = AutoModelForCausalLM.from_pretrained(export.merged(run, tmp_path / "out"), dtype="auto").state_dict()
    [(name, layer)] = [(key, module) for key, module in own.model.named_modules() if key.endswith("0.mlp.up_proj")]
    layer.merge()
    assert {value.dtype for value in merged.values()} == {torch.bfloat16}
    assert torch.equal(merged[f"{name}.weight"], layer.base_layer.weight.to(torch.bfloat16))


@pytest.mark.parametrize("rank, library, tags", [(2, "peft", "- lora"), (0, "transformers", "-learning")])
def test_the_card_is_of_texts(tmp_path, rank, library, tags):
    run, _ = finished(tmp_path, rank)
    text = export.card(run).read_text()
    assert f"\nlibrary_name: {library}\n" in text and f"{tags}\n---" in text
    assert "| short | - | 0.500 | - | yes |" in text and "Means over 4 held-out completions (greedy).\n" in text
    assert "1,234 tokens, 3 s of training" in text and "(before_after.png)" in text  # which shows texts
    assert not any(word in text for word in ("pictures", "scheduler", "denoiser", "guidance"))


def test_a_lora_that_does_not_fit_is_told_in_one_line(tmp_path):
    run, _ = finished(tmp_path)
    for each in tiny_text.model(layers=1, hidden_size=16):
        each.save_pretrained(run / "base")
    with pytest.raises(UserError, match="does not load into Qwen3ForCausalLM: .*size mismatch") as error:
        export.merged(run, tmp_path / "out")
    assert "\n" not in str(error.value)


def test_comfyui_has_no_language_models(tmp_path):
    run, _ = finished(tmp_path)
    with pytest.raises(UserError, match="is of a language model, which ComfyUI does not load: use --form merged"):
        export.lora(run, tmp_path / "out.safetensors", "comfyui")

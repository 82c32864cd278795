"""What `flowgrpo check` says of language models that can be trained and of those that cannot."""

import json

import pytest
import torch

from flowgrpo.cli import main
from flowgrpo.config import load
from flowgrpo.text.policies.causal_lm import TARGETS
from flowgrpo.text.rewards.sandbox import choose
from flowgrpo.tools.check import report
from flowgrpo.tools.check.tiny import LARGEST
from tests.helpers import tiny, tiny_masked, tiny_text, tiny_vision
from tests.text.test_text_evaluate import save


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("model") / "lm", tiny_text.model()))


def test_a_model_that_can_be_trained(model):
    told = report.report(model)
    # Rank 4 on layers of width 32 with 4 heads of 8, 2 of keys and values, and 48 in the middle; two of them.
    layer = 4 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 48))
    assert told == told | {
        "model": model, "drivable": True, "reason": None, "kind": "causal language model", "class": "Qwen3ForCausalLM",
        "chat_template": True, "end_tokens": ["</s> (2)"], "pad_token": "<pad> (0)", "vocabulary": 16,
        "parameters": sum(p.numel() for p in tiny_text.model()[0].parameters()), "lora_parameters": 2 * layer,
        "lora_targets": sorted(TARGETS), "prompt_tokens": 5, "shared_prefix": True, "head_alone": True,
        "code_boundary": choose.described()}
    assert told["first_log_ratio"] <= 1e-5 and told["lora_grad"] > 0 and told["gradient_error"] <= 0.01
    assert told == report.report(model)


def test_memory_by_hand(tmp_path, model):
    (tmp_path / "recipe.yaml").write_text("method: grpo\nprecision: fp32\ntext: {max_tokens: 1000}\nadapter: "
                                          "{rank: 64}\ntrain: {micro_batch: 16, group: 16}\n")
    found = {}
    from flowgrpo.text import memory as text_memory
    from flowgrpo.text.policies import kinds
    config = load(tmp_path / "recipe.yaml")
    policy = kinds.make_policy(config, tiny_text.model(), config.adapter)
    asked = policy.encode(["1+2="])
    for rows in (8, 16):
        own = config.model_copy(update={"train": config.train.model_copy(update={"micro_batch": rows})})
        found[rows] = text_memory.memory(policy, own, asked)
    trained = 64 * 2 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 48)) * 4
    assert found[16]["rollout"]["trained"] == trained
    assert found[16]["update"]["gradients and optimizer"] == 3 * trained
    assert found[16]["rollout"]["cache"] == 16 * 2 * 2 * (2 * 8) * 4 * (5 + 1000)  # layers, keys and values, heads
    assert found[16]["update"]["logits"] == 2 * 4 * 16 * 1024  # of a chunk, whatever the batch
    assert found[16]["update"]["activations"] == 2 * found[8]["update"]["activations"] > 0
    weights = sum(p.numel() for p in tiny_text.model()[0].parameters()) * 4
    assert 0 <= found[16]["rollout"]["model"] - weights < 1000  # and its frequencies
    told = report.report(model, config)["memory"]
    assert told["rollout"] == pytest.approx(sum(found[16]["rollout"].values()) / 2**30, abs=1e-3)


def test_the_pipeline_that_draws_for_a_reward_counts(tmp_path, model):
    """In the rollout and, unless it leaves the device, in the update."""
    pipe = tiny.sd3()
    (tmp_path / "red.py").write_text("def red(images, prompts):\n    return images[:, 0].mean((1, 2)).tolist()\n")
    args = {"pipeline": str(tiny.save(pipe, tmp_path / "pipe")), "rewards": [f"{tmp_path}/red.py:red"], "device": "cpu"}
    weights = sum(tensor.numel() * tensor.element_size() for part in pipe.components.values()
                  if isinstance(part, torch.nn.Module) for tensor in [*part.parameters(), *part.buffers()])
    from flowgrpo.text import memory as text_memory
    from flowgrpo.training import reward_memory
    for place, phases in (("keep", ["rollout", "update"]), ("cpu", ["rollout"])):
        config = tiny_text.config(reward={"pictured": {"args": args}}, memory__rewards=place)
        assert reward_memory.reward_weights(config) == {"pictured": {"cpu": weights}}
        told = report.report(model, config, "cpu")
        assert told["drivable"] and told["rewards"]["pictured"].startswith("0.000 GiB on cpu")
        assert told["leaves_device"] == (["reward models"] if place == "cpu" else None)
        policy = tiny_text.policy()
        counted = text_memory.memory(policy, config, policy.encode(["1+2="]), weights)
        assert [name for name, parts in counted.items() if parts.get("reward models") == weights] == phases


def test_kinds_of_models_and_activations():
    """Foretold from short ones, and measured."""
    from flowgrpo.text import memory as text_memory
    policy = tiny_text.policy()
    row = policy.encode(["1+2="])
    foretold = text_memory._at(50, lambda length: text_memory._activations(policy, row, length))
    assert foretold == pytest.approx(text_memory._activations(policy, row, 50), rel=0.02)
    told = report.report(tiny_masked.model())
    assert told["drivable"], told["reason"]
    assert told["kind"] == "masked language model" and told["class"] == "BertForMaskedLM"
    assert {"query", "key", "value", "dense"} == set(told["lora_targets"]) and "cache" not in told["memory_parts"]
    told = report.report(tiny_vision.llava())
    assert told["drivable"], told["reason"]
    assert told["kind"] == "language model that reads images" and told["chat_template"]
    assert told["prompt_tokens"] > 5 + 4  # the image's are among them
    config = load(None, {"method": "grpo", "text.generates": "image", "precision": "fp32", "train.guidance": 3.0})
    told = report.report(tiny_vision.janus(), config, "cpu")
    assert told["drivable"], told["reason"]
    assert told["kind"] == "language model that draws images" and told["completion_tokens"] == 4
    assert told["first_log_ratio"] <= 3e-5 and told["lora_grad"] > 0 and told["gradient_error"] <= 0.01
    assert "vision_head" in told["lora_targets"]  # the image head's


@pytest.mark.parametrize("name, cls", [("Qwen3ForCausalLM", "Qwen3ForCausalLM"), ("llama", "LlamaForCausalLM"),
                                       ("BertForMaskedLM", "BertForMaskedLM")])
def test_a_tiny_instance_by_its_name(name, cls):
    told = report.report(name)
    assert told["drivable"], told["reason"]
    assert told["class"] == cls and told["parameters"] < LARGEST and told["first_log_ratio"] <= 1e-4


def test_what_cannot_be_trained_says_why():
    model, tokenizer = tiny_text.model()
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    assert "which token ends a completion" in report.report((model, tokenizer))["reason"]
    model, tokenizer = tiny_text.model()
    model.model.layers[0].register_forward_hook(lambda _, args, out: out + 0.1 * torch.randn_like(out))
    told = report.report((model, tokenizer))
    assert not told["drivable"] and told["reason"].startswith("replay and rollout disagree")
    model, tokenizer = tiny_text.model()
    model.model.layers[0].mlp.register_forward_hook(lambda _, args, out: out.detach())
    assert "runs without gradients" in report.report((model, tokenizer))["reason"]
    told = report.report("gpt2")
    assert not told["drivable"] and "adapter.targets" in told["reason"] and told["class"] == "GPT2LMHeadModel"


def test_the_command_line(model, capsys):
    assert main(["check", model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chat_template"] is True
    assert main(["check", "starter_text"]) == 0
    told = capsys.readouterr().out
    assert "drivable" in told and "</s>" in told and "rollout" in told
    assert main(["check", "gpt2"]) == 2
    assert "adapter.targets" in capsys.readouterr().out

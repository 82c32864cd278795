"""What `flowgrpo check` says of pipelines and language models that can be trained and of those that cannot."""

import json

import pytest
import torch
from diffusers import EDMEulerScheduler

from flowgrpo.cli import main
from flowgrpo.config import Config, load
from flowgrpo.config.sections import Adapter
from flowgrpo.errors import UserError
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.samplers import cost
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.kernels import Euler, FlowSDE
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.text import memory as text_memory
from flowgrpo.text.policies import kinds
from flowgrpo.text.policies.causal_lm import TARGETS
from flowgrpo.text.rewards.sandbox import choose
from flowgrpo.tools.check import replays, report
from flowgrpo.tools.check.tiny import LARGEST, make
from flowgrpo.training import memory
from tests.helpers import tiny, tiny_masked, tiny_text, tiny_vision
from tests.helpers.refusals import printed
from tests.helpers.tiny_text import save


def exhausted(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny.save(tiny.sd3(), tmp_path_factory.mktemp("model") / "sd3"))


def test_a_pipeline_that_can_be_trained(model):
    told = report.report(model)
    denoiser = tiny.sd3().transformer
    # Rank 4 on eight layers of width 16 in two blocks; the last block's text side has no output layer.
    assert told == told | {
        "model": model, "supported": True, "reason": None, "pipeline": "StableDiffusion3Pipeline",
        "scheduler": "FlowMatchEulerDiscreteScheduler", "prediction": "velocity", "denoisers": ["transformer"],
        "parameters": sum(p.numel() for p in denoiser.parameters()), "lora_parameters": (8 + 7) * 2 * 4 * 16,
        "lora_targets": Adapter().targets, "guidance": "one batch of twice the rows",
        "timesteps_per_call": "one per row", "latent_shape": [4, 8, 8],
        "sample_shape": [3, 16, 16], "replay_error": 0.0, "first_log_ratio": 0.0, "evaluations_per_sample": 10.0,
        "evaluations_per_sample_shared": 6.79}  # 10 - 3.5 * 11/12
    assert told["lora_grad"] > 0 and set(told) == {"model", "supported", "reason", *report.FIELDS}
    assert told == report.report(model)


def test_pipelines_by_class_name_packed_guided_or_with_images_as_conditioning():
    told = report.report("StableDiffusion3Pipeline")
    assert told == report.report((tiny.sd3(), tiny.CALL)) and told["supported"] and told["latent_shape"] == [4, 8, 8]
    assert told["conditioning"] == ["prompt", "negative_prompt"] and told["prompts_per_call"] == "any number"
    assert told["lora_loader"] == ["load_lora_weights"]
    told = report.report((tiny.flux(), tiny.FLUX_CALL))
    assert told["supported"], told["reason"]
    assert told["guidance"] == "embedded: one evaluation per step" and told["pipeline"] == "FluxPipeline"
    assert len(told["latent_shape"]) == 2 and told["latent_shape"][1] == 16
    assert told["replay_error"] == told["first_log_ratio"] == 0
    told = report.report("FluxKontextPipeline")
    assert told["supported"] and told["conditioning"] == ["prompt", "negative_prompt", "image"]


def test_pipelines_that_cannot_and_a_clip_of_a_pipelines_own_length_as_a_cause(tmp_path, capsys):
    pipe = tiny.sd3()
    pipe.register_modules(scheduler=EDMEulerScheduler())
    told = report.report(str(tiny.save(pipe, tmp_path / "edm")))
    assert not told["supported"] and told["prediction"] == "epsilon"
    assert told["reason"].startswith("EDMEulerScheduler (prediction 'epsilon') cannot be driven: expected")
    told = report.report(str(tmp_path))
    assert not told["supported"] and "\n" not in told["reason"]
    assert told["reason"].startswith(f"cannot load the model '{tmp_path}'")
    assert main(["check", str(tiny.save(make("WanPipeline")[0], tmp_path / "wan")), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)["reason"]
    assert told.startswith("WanPipeline refuses its arguments: RuntimeError: shape")
    assert told.endswith("; it was called with its own number of frames, and image.frames sets another")


@pytest.mark.parametrize("name, reason", [
    ("HiDreamImagePipeline", "the gradient is off by "),
    ("OmniGenPipeline", "OmniGenPipeline has no encode_prompt"),
    ("StableDiffusion4Pipeline", "no tiny 'StableDiffusion4Pipeline' can be built: did you mean"),
    ("StableDiffusionPipelin", "no tiny 'StableDiffusionPipelin' can be built: did you mean 'StableDiffusionPipel")])
def test_a_class_that_cannot_be_driven_is_told_without_a_model(name, reason):
    told = report.report(name)
    assert not told["supported"] and told["reason"].startswith(reason)


def test_the_estimate_is_for_the_recipes_guidance_and_checkpointing():
    def activations(**train):  # one prompt with 4096 samples at once, so that GiB are not 0
        room = {"prompts": 1, "group": 4096, "micro_batch": 4096, "steps": 2} | train
        told = report.report("StableDiffusion3Pipeline", Config(method="flow_grpo", precision="fp32", train=room,
                                                                adapter={"rank": 4}))
        assert told["supported"] and list(told["memory"]) == ["encode", "rollout", "decode", "update"]
        return told["memory_parts"]["activations"]
    plain, guided, both = activations(), activations(guidance=4.0), activations(guidance=4.0, checkpointing=True)
    assert 1.9 < guided / plain < 2.1 and 0 < both < 0.2 * guided


def test_of_a_dora_the_gradients_error_is_left_out_and_that_is_said(capsys, tmp_path):
    (tmp_path / "recipe.yaml").write_text("precision: fp32\nadapter: {rank: 4, dora: true}\n")
    told = printed(capsys, "check", "StableDiffusion3Pipeline", "--recipe", str(tmp_path / "recipe.yaml"))
    assert "gradient error" not in told and "the gradient's error is left out: with adapter.dora peft holds" in told
    text = report.report("Qwen3ForCausalLM", Config(method="grpo", precision="fp32", adapter={"rank": 4, "dora": True}))
    assert text["supported"] and text["gradient_error"] is None and "adapter.dora" in text["notes"][0]


@pytest.mark.parametrize("options, reason", [
    ({"memory": {"shard": True}, "adapter": {"rank": 4, "dora": True}}, "memory.shard is true, which does not go with"),
    ({"labels": "rewards"}, "labels is 'rewards', but preferences is not set")])
def test_what_training_refuses_of_a_recipe_check_refuses_too(options, reason):
    told = report.report("StableDiffusion3Pipeline", Config(**options))
    assert not told["supported"] and told["reason"].startswith(reason)


def test_weights_and_costs_of_shared_runs():
    told = report.report("StableDiffusion3Pipeline", Config(memory={"shard": True}, adapter={"rank": 4}))
    assert told["supported"] and told["notes"][0].startswith("memory is of one process that holds all weights")
    # A float32 weight of 2**27 numbers, not touched, and so in no memory, is half a GiB.
    assert memory.weights_gib([torch.nn.Linear(2**14, 2**13, bias=False, device="meta"), None, "tokenizer"]) == 0.5
    window = Schedule((2, 3), (2, 3))
    shared, alone = (RolloutSpec(shift_grid(5, 3.0), window, FlowSDE(), Euler(), 4, roots) for roots in (1, 4))
    # 3 prompts through steps 0, 1 and the parting step 2; 12 rows through the other two. A replay: 3 rows, then 12.
    assert cost.rollout([shared], 3) == 3 * 3 + 12 * 2 and cost.rollout([alone], 3) == 12 * 5 == cost.alone([shared], 3)
    assert cost.update([shared], 3, 1) == 3 + 12 and cost.update([alone], 3, 2) == 2 * 24


@pytest.mark.parametrize("name", ["OmniGenPipeline", "no/such/folder"])
def test_what_is_unknown_of_a_pipeline_is_told_as_such(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    told = report.report(name)
    assert not told["supported"] and told["replay_error"] is None and told["memory"] is None
    assert list(told) == ["model", "supported", "reason", *report.FIELDS]


def test_random_denoisers_and_frozen_adapters_are_found_out():
    policy = PipelinePolicy(tiny.sd3(), Adapter(rank=4), call=tiny.CALL)
    policy.pipe.transformer.register_forward_hook(lambda _, args, out: (out[0] + 0.01 * torch.randn(out[0].shape),))
    found = {}
    with pytest.raises(UserError, match=r"replay and rollout disagree: \|log ratio\| "):
        replays.check_replay(policy, policy.encode(["a"]), found)
        replays.require_equal(policy.exact, found)
    assert found["first_log_ratio"] > 1e-6 and found["replay_error"] > 0
    policy = PipelinePolicy(tiny.sd3(), Adapter(rank=4), call=tiny.CALL)
    first = policy.weights.parameters()[0]
    policy.pipe.transformer.register_forward_hook(lambda _, args, out: (out[0].detach() + 0 * first.sum(),))
    with pytest.raises(UserError, match="the gradient that reaches the adapter has the norm 0.0"):
        replays.check_replay(policy, policy.encode(["a"]), {})


def test_a_replay_is_compared_with_the_pipelines_own_loop(capsys):
    told = report.report("FluxInpaintPipeline")  # whose loop puts its image back in, with another noise in a replay
    assert told["first_log_ratio"] > 0.01 and told["replay_error"] > 0.1 and not told["supported"]
    assert main(["check", "StableDiffusionInpaintPipeline (4 channels)"]) == 2
    assert "does not go on from the middle of its loop" in capsys.readouterr().out


@pytest.mark.parametrize("exhaust", [lambda *_: torch.empty(2**58), exhausted])  # bytes that no machine has
@pytest.mark.parametrize("make", [lambda: (tiny.sd3(), tiny.CALL), tiny_text.model])
def test_where_memory_runs_out_nothing_is_known(make, exhaust):
    loaded = make()
    getattr(loaded[0], "transformer", loaded[0]).register_forward_pre_hook(exhaust)
    told = report.report(loaded, device="cpu")
    assert told["supported"] is None and told["weights"] == 0.0  # GiB, rounded
    assert told["reason"].startswith("memory ran out on cpu, where the weights alone take 0.0 GiB, so that nothing is ")
    assert ("memory.encoders" in told["reason"]) == ("pipeline" in told)


@pytest.mark.parametrize("options, alone, shared", [
    ({"method": "flow_grpo"}, 6.0, 6.0), ({"method": "dance_grpo"}, 6.0, round((1 + 4 * 5) / 4, 2)),
    ({"method": "draft", "reward": "scene_soft"}, None, None)])
def test_a_recipes_rollout_costs_what_its_own_plan_says(options, alone, shared):
    """6 steps and groups of 4; dance_grpo's share their initial noise, and so the first step."""
    recipe = load(None, {"train.steps": 6, "train.group": 4, "adapter.rank": 2} | options)
    told = report.report("StableDiffusion3Pipeline", recipe, "cpu")
    assert (told["evaluations_per_sample"], told["evaluations_per_sample_shared"]) == (alone, shared)


def test_the_device_is_asked_for_and_of_a_class_without_a_tiny_instance_nothing_is_known(capsys):
    told = printed(capsys, "check", "StableDiffusion3Pipeline", "--device", "cpu")
    assert "Pipeline (a tiny random instance: its sizes are not those of a model)\n" in told and "GiB" not in told
    assert "\nevaluations per sample         10\n" in told
    assert main(["check", "StableDiffusion3Pipeline", "--device", "tpu"]) == 2
    assert "--device is 'tpu', but the check runs on " in capsys.readouterr().err
    assert main(["check", "HunyuanDiTPAGPipeline"]) == 2
    assert capsys.readouterr().out.splitlines() == [
        "model      HunyuanDiTPAGPipeline", "supported  unknown",
        "reason     there is no tiny instance of HunyuanDiTPAGPipeline, so that nothing is known of it: give a "
        "directory or a hub id of such a pipeline"]
    assert report.report("HunyuanDiTPAGPipeline")["supported"] is None


def test_the_command_exits_with_2_where_it_cannot(model, language_model, tmp_path, capsys):
    for trainable, key in ((model, "supported"), (language_model, "chat_template")):
        assert json.loads(printed(capsys, "check", trainable, "--json"))[key] is True
    for asked, code, told in (("starter_text", 0, ["supported", "</s>", "rollout"]), ("gpt2", 2, ["adapter.targets"]),
                              (str(tmp_path), 2, ["supported  no", "reason     cannot load the model"])):
        assert main(["check", asked]) == code
        out = capsys.readouterr().out
        assert all(text in out for text in told), out


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("model") / "lm", tiny_text.model()))


def test_a_model_that_can_be_trained(language_model):
    told = report.report(language_model)
    # Rank 4 on layers of width 32 with 4 heads of 8, 2 of keys and values, and 48 in the middle; two of them.
    layer = 4 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 48))
    assert told == told | {
        "model": language_model, "supported": True, "reason": None, "kind": "causal language model",
        "class": "Qwen3ForCausalLM", "chat_template": True, "end_tokens": ["</s> (2)"], "vocabulary": 16,
        "pad_token": "<pad> (0)",
        "parameters": sum(p.numel() for p in tiny_text.model()[0].parameters()), "lora_parameters": 2 * layer,
        "lora_targets": sorted(TARGETS), "prompt_tokens": 5, "shared_prefix": True, "head_alone": True,
        "code_boundary": choose.describe_boundary()}
    assert told["first_log_ratio"] <= 1e-5 and told["lora_grad"] > 0 and told["gradient_error"] <= 0.01
    assert told == report.report(language_model)


def test_memory_by_hand(tmp_path, language_model):
    (tmp_path / "recipe.yaml").write_text("method: grpo\nprecision: fp32\ntext: {max_tokens: 1000}\nadapter: "
                                          "{rank: 64}\ntrain: {micro_batch: 16, generation_batch: 16, group: 16}\n")
    found = {}
    config = load(tmp_path / "recipe.yaml")
    policy = kinds.make_policy(config, tiny_text.model(), config.adapter)
    asked = policy.encode(["1+2="])
    for rows in (8, 16):
        train = config.train.model_copy(update={"micro_batch": rows, "generation_batch": rows})
        found[rows] = text_memory.memory(policy, config.model_copy(update={"train": train}), asked)
    trained = 64 * 2 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 48)) * 4
    assert found[16]["rollout"]["trained"] == trained
    assert found[16]["update"]["gradients and optimizer"] == 3 * trained
    assert found[16]["rollout"]["cache"] == 16 * 2 * 2 * (2 * 8) * 4 * (5 + 1000)  # layers, keys and values, heads
    assert found[16]["update"]["logits"] == 2 * 4 * 16 * 1024  # of a chunk, whatever the batch
    assert found[16]["update"]["activations"] == 2 * found[8]["update"]["activations"] > 0
    weights = sum(p.numel() for p in tiny_text.model()[0].parameters()) * 4
    assert 0 <= found[16]["rollout"]["model"] - weights < 1000  # and its frequencies
    told = report.report(language_model, config)["memory"]
    assert told["rollout"] == pytest.approx(sum(found[16]["rollout"].values()) / 2**30, abs=1e-3)


def test_the_pipeline_that_draws_for_a_reward_counts(tmp_path, language_model):
    """In the rollout and, unless it leaves the device, in the update."""
    pipe = tiny.sd3()
    (tmp_path / "red.py").write_text("def red(images, prompts):\n    return images[:, 0].mean((1, 2)).tolist()\n")
    args = {"pipeline": str(tiny.save(pipe, tmp_path / "pipe")), "rewards": [f"{tmp_path}/red.py:red"], "device": "cpu"}
    weights = sum(tensor.numel() * tensor.element_size() for part in pipe.components.values()
                  if isinstance(part, torch.nn.Module) for tensor in [*part.parameters(), *part.buffers()])
    for place, phases in (("keep", ["rollout", "update"]), ("cpu", ["rollout"])):
        config = tiny_text.config(reward={"pictured": {"args": args}}, memory__rewards=place)
        assert memory.reward_weights(config) == {"pictured": {"cpu": weights}}
        told = report.report(language_model, config, "cpu")
        assert told["supported"] and told["rewards"]["pictured"].startswith("0.000 GiB on cpu")
        assert told["leaves_device"] == (["reward models"] if place == "cpu" else None)
        policy = tiny_text.policy()
        counted = text_memory.memory(policy, config, policy.encode(["1+2="]), weights)
        assert [name for name, parts in counted.items() if parts.get("reward models") == weights] == phases


@pytest.mark.fast
def test_kinds_of_models_and_activations():
    """Foretold from short ones, and measured."""
    policy = tiny_text.policy()
    row = policy.encode(["1+2="])
    foretold = text_memory._at(50, lambda length: text_memory._activations(policy, row, length))
    assert foretold == pytest.approx(text_memory._activations(policy, row, 50), rel=0.02)
    told = report.report(tiny_masked.model())
    assert told["supported"], told["reason"]
    assert told["kind"] == "masked language model" and told["class"] == "BertForMaskedLM"
    assert {"query", "key", "value", "dense"} == set(told["lora_targets"]) and "cache" not in told["memory_parts"]
    told = report.report(tiny_vision.llava())
    assert told["supported"], told["reason"]
    assert told["kind"] == "language model that reads images" and told["chat_template"]
    assert told["prompt_tokens"] > 5 + 4  # the image's are among them
    config = load(None, {"method": "grpo", "text.generates": "image", "precision": "fp32", "train.guidance": 3.0})
    told = report.report(tiny_vision.janus(), config, "cpu")
    assert told["supported"], told["reason"]
    assert told["kind"] == "language model that draws images" and told["completion_tokens"] == 4
    assert told["first_log_ratio"] <= 3e-5 and told["lora_grad"] > 0 and told["gradient_error"] <= 0.01
    assert "vision_head" in told["lora_targets"]  # the image head's


@pytest.mark.parametrize("name, cls", [("Qwen3ForCausalLM", "Qwen3ForCausalLM"), ("llama", "LlamaForCausalLM"),
                                       ("BertForMaskedLM", "BertForMaskedLM")])
def test_a_tiny_instance_by_its_name(name, cls):
    told = report.report(name)
    assert told["supported"], told["reason"]
    assert told["class"] == cls and told["parameters"] < LARGEST and told["first_log_ratio"] <= 1e-4


def test_what_cannot_be_trained_says_why():
    language_model, tokenizer = tiny_text.model()
    language_model.generation_config.eos_token_id = tokenizer.eos_token = None
    assert "which token ends a completion" in report.report((language_model, tokenizer))["reason"]
    language_model, tokenizer = tiny_text.model()
    language_model.model.layers[0].register_forward_hook(lambda _, args, out: out + 0.1 * torch.randn_like(out))
    told = report.report((language_model, tokenizer))
    assert not told["supported"] and told["reason"].startswith("replay and rollout disagree")
    language_model, tokenizer = tiny_text.model()
    language_model.model.layers[0].mlp.register_forward_hook(lambda _, args, out: out.detach())
    assert "runs without gradients" in report.report((language_model, tokenizer))["reason"]
    told = report.report("gpt2")
    assert not told["supported"] and "adapter.targets" in told["reason"] and told["class"] == "GPT2LMHeadModel"


"""A pipeline as a policy: replay, reference, gradients, and a LoRA that stock diffusers loads."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from transformers import CLIPConfig, CLIPImageProcessor

from flowgrpo.config.sections import Adapter
from flowgrpo.methods import preset
from flowgrpo.methods.presets import presets_for
from flowgrpo.methods.targets import RecordedSteps
from flowgrpo.policies import build, options
from flowgrpo.policies.loading import make_pipeline
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights import adapters
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.growth import explore, replay
from flowgrpo.samplers.kernels import Euler, FlowSDE
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.rollout import RolloutSpec, seeder
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.tools.check import tiny as tiny_pipelines
from flowgrpo.tools.check.report import report
from flowgrpo.training import announcement
from tests.helpers import loop, tiny
from tests.helpers.refusals import message
from tests.helpers.tables import near

# The others are met in tests/samplers/test_noised_finals.py, tests/samplers/test_reward_gradient.py and
# tests/samplers/test_reinflow.py.
METHODS = [*(name for name in presets_for("flow") if type(preset(name).target) is RecordedSteps), "mix_grpo+grpo_guard"]
ROOM = {"train__steps": 11, "train__group": 16}  # that trees need for their splits

def rollout(trainer):
    """One epoch's parts, with their means, and the conditioning they come from."""
    batch = trainer.prompts[:2]
    conditioning = trainer.policy.encode([p.text for p in batch])
    explorations = [replace(each, keep_means=True) for each in trainer.rollouts.explorations(trainer.epoch)]
    return list(explore(trainer.policy, conditioning, explorations, 16, seeder(0, 0))), conditioning


def replays(trainer, parts, conditioning):
    """(old, new) of every batch of a replay."""
    for part in parts:
        for k, rows, new in replay(trainer.policy, conditioning, part, 16):
            yield part.transitions[k].old.rows(rows), new


# --- replay ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
def test_the_first_ratio_is_one(method):
    """With guidance; without it every preset's is that of its golden metrics."""
    trainer = tiny.trainer(method=method, train__guidance=3.0, **ROOM)
    tiny.stir(trainer.policy)
    for old, new in replays(trainer, *rollout(trainer)):
        assert (new.logp - old.logp).abs().max() <= 1e-6
        assert trainer.method.loss.log_ratio(new, old).abs().max() <= 1e-6
        torch.testing.assert_close(new.mean.detach(), old.mean, rtol=0, atol=1e-5)
        assert torch.equal(new.std, old.std)


@pytest.mark.parametrize("method", [pytest.param("flow_grpo", marks=pytest.mark.fast), "mix_grpo", "branch_grpo",
                                    "tempflow_grpo"])
def test_the_first_ratio_is_one_in_half_precision(method):
    policy = tiny.policy(tiny.sd3().to(torch.bfloat16), precision="bf16", guidance=3.0)
    trainer = tiny.trainer(tiny.stir(policy), method=method, precision="bf16", **ROOM)
    parts, conditioning = rollout(trainer)
    assert parts[0].finals[0].dtype == torch.bfloat16 and parts[0].transitions[0].old.logp.dtype == torch.float32
    assert all(parameter.dtype == torch.float32 for parameter in policy.weights.parameters())
    assert all(torch.equal(new.logp, old.logp) for old, new in replays(trainer, parts, conditioning))


def test_another_guidance_in_the_replay_is_found_out():
    trainer = tiny.trainer()
    parts, conditioning = rollout(trainer)
    trainer.policy.guidance = 3.0
    assert max((new.logp - old.logp).abs().max() for old, new in replays(trainer, parts, conditioning)) > 1e-3


# --- what is trained -------------------------------------------------------------------------------------------------
def gradient_of(policy) -> None:
    policy.replay(policy.encode(["red"]), torch.ones(1, *tiny.LATENTS), shift_grid(4, 3.0), 1).square().sum().backward()


def test_the_gradient_reaches_all_weights_where_they_are_trained_and_nothing_else():
    """That of a LoRA is shown of every class by test_conformance.py."""
    policy = tiny.stir(tiny.policy(rank=0), 0.01)
    gradient_of(policy)
    trained = {id(parameter) for parameter in policy.weights.parameters()}
    for module in (each for each in policy.pipe.components.values() if isinstance(each, torch.nn.Module)):
        assert not module.training
        for parameter in module.parameters():
            assert parameter.requires_grad == (id(parameter) in trained)
            assert parameter.grad is None or id(parameter) in trained
    assert sum(p.grad is not None and bool(p.grad.abs().max() > 0) for p in policy.weights.parameters()) > 20


def test_a_lora_starts_as_the_base_and_its_gradient_at_b():
    policy = tiny.policy()
    assert torch.equal(output(policy), base_output(1.0))
    gradient_of(policy)
    sides = {side: [p.grad.abs().max() for key, p in policy.weights.named.items() if side in key and p.grad is not None]
             for side in ("lora_A", "lora_B")}
    assert max(sides["lora_A"]) == 0 and max(sides["lora_B"]) > 0


def output(policy) -> torch.Tensor:
    x = torch.randn(2, *tiny.LATENTS, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return policy.replay(policy.encode(["red", "blue"]), x, shift_grid(4, 3.0), 1)


def base_output(guidance: float) -> torch.Tensor:
    """What the pipeline gives that nobody has touched: all of its weights are trainable, none has moved."""
    return output(tiny.policy(rank=0, guidance=guidance))


@pytest.mark.parametrize("rank", [2, 0])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_reference_is_the_base_to_the_last_bit(rank, guidance):
    policy = tiny.stir(tiny.policy(rank=rank, guidance=guidance))
    tuned, kept = output(policy), policy.weights.snapshot()
    with policy.reference():
        assert torch.equal(output(policy), base_output(guidance))
        assert not torch.is_grad_enabled()
    assert (tuned - base_output(guidance)).abs().max() > 1e-3
    assert torch.equal(output(policy), tuned)
    with pytest.raises(ZeroDivisionError), policy.reference():  # it ends with an error too
        1 / 0
    assert torch.equal(output(policy), tuned)
    assert all(torch.equal(kept[key], parameter) and parameter.requires_grad
               for key, parameter in policy.weights.named.items())


@pytest.mark.parametrize("rank", [2, 0])
def test_swapped_weights_come_back(rank):
    policy = tiny.stir(tiny.policy(rank=rank))
    tuned, kept = output(policy), policy.weights.snapshot()
    other = {key: torch.full_like(value, 0.1) for key, value in kept.items()}
    with pytest.raises(ZeroDivisionError), policy.weights.swap(other):
        assert all((parameter == 0.1).all() for parameter in policy.weights.parameters())
        assert not torch.equal(output(policy), tuned)
        1 / 0
    assert torch.equal(output(policy), tuned)
    assert all(torch.equal(kept[key], parameter) for key, parameter in policy.weights.named.items())


@pytest.mark.parametrize("make, told", [
    (lambda: tiny.policy(tiny.policy().pipe), "has an adapter already"),
    (lambda: tiny.policy(tiny.sd3().to(torch.bfloat16)), "transformer is in torch.bfloat16, but precision is 'fp32'"),
    *((lambda name=name: PipelinePolicy(tiny.sd3(), Adapter(targets=[name])),
       f"{name}.*match no module of the transformer.*to_add_out, to_k, to_q, to_v")
      for name in ("to_qq", "attn")),  # attn exists, but is no layer that takes a LoRA
    *((lambda call=call: PipelinePolicy(tiny.sd3(), Adapter(), call=call).encode(["red"]), told) for call, told in (
        ({"num_frames": 8}, "takes no 'num_frames'"), ({"height": 17}, "refuses its arguments:.*17"),
        ({"max_sequence_len": 8}, "takes no 'max_sequence_len'.*did you mean 'max_sequence_length'")))])
def test_what_a_pipeline_does_not_take_is_told(make, told):
    assert re.search(told, message(make))


def test_targets_are_whole_names():
    policy = PipelinePolicy(tiny.sd3(), Adapter(rank=2, targets=["to_out.0"]))
    assert {key.split(".lora_")[0].removeprefix("transformer.") for key in policy.weights.named} == \
        {f"transformer_blocks.{i}.attn.to_out.0" for i in (0, 1)}


@pytest.mark.parametrize("name, scale, other", [
    ("FluxPipeline", "guidance_scale", "true_cfg_scale"), ("StableDiffusion3Pipeline", "guidance_scale", None),
    ("QwenImagePipeline", "true_cfg_scale", "guidance_scale"), ("WanPipeline", "guidance_scale", "guidance_scale_2")])
def test_the_scale_of_the_guidance_is_no_argument_of_a_call(name, scale, other, tmp_path):
    """Of FLUX it is embedded, and of Qwen-Image it is that of a second forward."""
    pipe, needed = tiny_pipelines.make(name)
    told = f"call has {scale}, which the key guidance sets (train.guidance, eval.guidance): leave it out of call"
    assert message(PipelinePolicy, pipe, None, call=needed | {scale: 3.0}) == told
    if other:
        assert other in PipelinePolicy(pipe, None, call=needed | {other: 3.0}).call
    pipe.save_pretrained(tmp_path / "model")
    settings = tiny.config(model=str(tmp_path / "model"), image__call={scale: 3.0})
    known = name in ("StableDiffusion3Pipeline", "WanPipeline")  # before it is loaded: it has one scale only
    assert not known or message(options.check_call, loop.setup(settings, "pipeline")) == told


def test_arguments_of_a_call_are_checked_before_a_folder_is_loaded(tmp_path):
    tiny.sd3().save_pretrained(tmp_path)
    for call, told in (({"max_sequence_len": 2}, "takes no 'max_sequence_len': did you mean 'max_sequence_length'?"),
                       ({"num_frames": 5}, "takes no 'num_frames'")):
        setup = loop.setup(tiny.config(model=str(tmp_path), image__call=call), "pipeline")
        assert told in message(options.check_call, setup)
    options.check_call(loop.setup(tiny.config(model="none/here", image__call={"max_sequence_len": 2}), "pipeline"))


@pytest.mark.parametrize("grid, train, evaluated, told", [
    ("stock", 4, 4, ""), ("shifted", 9, 4, ""),
    ("shifted", 4, 9, "image.call has 4 sigmas, and eval.steps is 9: set it to 4, or leave sigmas out"),
    ("stock", 9, 4, "image.call has 4 sigmas, and train.steps is 9: set it to 4, or leave sigmas out")])
def test_sigmas_of_a_call_are_as_many_as_its_steps(grid, train, evaluated, told):
    setup = loop.setup(tiny.config(model="none/here", image__call={"sigmas": [1.0, 0.75, 0.5, 0.25]}, train__grid=grid,
                                   train__steps=train, eval__steps=evaluated, parts={"plan": {"size": 2}}), "pipeline")
    assert message(options.check_call, setup) == told if told else options.check_call(setup) is None


@pytest.mark.parametrize("name, call, told", [
    ("StableDiffusion3Pipeline", {"joint_attention_kwargs": 3}, "AttributeError: 'int' object has no attribute"),
    ("StableDiffusionPipeline", {"cross_attention_kwargs": 3}, "'int' object"),
    ("LTXPipeline", {"attention_kwargs": 3}, "AttributeError: 'int' object has no attribute")])
def test_an_argument_of_another_type_is_one_line(name, call, told):
    pipe, needed = tiny_pipelines.make(name)
    policy = PipelinePolicy(pipe, Adapter(rank=2), call=needed | call)
    assert re.search(f"^{name} refuses its arguments: .*{told}", message(policy.encode, ["red"]))


def test_what_a_pipeline_refuses_in_its_decoding_or_evaluation_is_one_line():
    pipe, needed = tiny_pipelines.make("StableDiffusionPipeline")
    policy = PipelinePolicy(pipe, Adapter(rank=2), call=needed | {"guidance_rescale": "a"})
    conditioning = policy.encode(["red"])
    told = "StableDiffusionPipeline refuses its arguments: "
    assert message(policy.generate, conditioning, policy.generators([0]), 2, 5.0).startswith(told)
    assert message(policy.decode, torch.zeros(1, 3, 2, 2), conditioning).startswith(f"{told}RuntimeError")


# --- files -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pipe", [tiny.sd3, tiny.flux])
def test_stock_diffusers_loads_the_lora_and_gives_the_same_latents(pipe, tmp_path):
    policy = tiny.stir(tiny.policy(pipe(), rank=2, alpha=7.0), 0.3)
    assert "same scale" in policy.weights.save(tmp_path)
    ours = policy.generate(policy.encode(["red", "blue"], ["old", "old"]), policy.generators([1, 2]), 3, 2.5, "latent")
    stock = pipe()
    def latents():
        options = {"negative_prompt": ["old", "old"]} if pipe is tiny.sd3 else {}
        return stock(["red", "blue"], num_inference_steps=3, guidance_scale=2.5, output_type="latent",
                     generator=PipelinePolicy.generators([1, 2]), **tiny.call_of(stock), **options).images
    untuned = latents()
    stock.load_lora_weights(tmp_path)
    near(latents(), ours, depth=3 * 2 * 6)  # 3 steps through 2 blocks of 6 layers
    assert (untuned - ours).abs().max() > 0.05


@pytest.mark.parametrize("precision, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_file_carries_rank_alpha_and_targets(precision, dtype, tmp_path):
    policy = tiny.stir(tiny.policy(tiny.sd3().to(dtype), rank=2, alpha=7.0, precision=precision))
    assert LORA_FILE in policy.weights.save(tmp_path)
    with safe_open(tmp_path / LORA_FILE, "pt") as file:
        [told] = [json.loads(text) for key, text in file.metadata().items() if "lora_adapter_metadata" in key]
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    assert (told["transformer.r"], told["transformer.lora_alpha"]) == (2, 2)
    assert "transformer_blocks.0.attn.to_q" in told["transformer.target_modules"]
    assert len(tensors) == 2 * len(told["transformer.target_modules"])
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())


def test_the_format_of_peft_is_saved_with_the_same_bytes(tmp_path):
    policy, saved = tiny.policy(), set()
    config = policy.pipe.transformer.peft_config["default"]
    names = sorted(config.target_modules)
    for folder, order in ((tmp_path / "one", names), (tmp_path / "two", names[::-1])):
        config.target_modules = order
        adapters.save(policy.pipe.transformer, folder)
        saved.add(tuple((folder / f"adapter_{name}").read_bytes() for name in ("config.json", "model.safetensors")))
    assert len(names) > 1 and len(saved) == 1


def test_saving_leaves_the_adapter_as_it_was(tmp_path):
    policy = tiny.stir(tiny.policy())
    before, kept = output(policy), policy.weights.snapshot()
    policy.weights.save(tmp_path)
    assert torch.equal(output(policy), before)
    gradient_of(policy)
    assert all(torch.equal(kept[key], p) and p.requires_grad for key, p in policy.weights.named.items())
    assert list(policy.pipe.transformer.peft_config) == ["default"]


def test_all_weights_are_saved_as_a_denoiser(tmp_path):
    policy = tiny.stir(tiny.policy(rank=0), 0.01)
    policy.weights.save(tmp_path)
    loaded = type(policy.pipe.transformer).from_pretrained(tmp_path / "transformer")
    assert all(torch.equal(policy.weights.named[f"transformer.{key}"], value)
               for key, value in loaded.named_parameters())


# --- prompts and images --------------------------------------------------------------------------------------------
def test_rows_of_the_conditioning_follow_the_prompts():
    policy = tiny.policy()
    conditioning = policy.encode(["red", "blue", "green"], ["old", "", "old"])
    rows = conditioning.rows(torch.tensor([2, 0, 0]))
    assert rows.prompts == ["green", "red", "red"] and rows.negatives == ["old", "old", "old"]
    for whole, taken in zip(conditioning.calls[0], rows.calls[0], strict=True):
        assert len(whole) == 3 and torch.equal(taken, whole[[2, 0, 0]])
    assert all((value[0] != value[1]).any() for value in conditioning.calls[0])
    alone = policy.encode(["green"], ["old"])
    for whole, one in zip(conditioning.calls[0], alone.calls[0], strict=True):
        torch.testing.assert_close(one[0], whole[2])


def test_values_without_a_row_per_prompt_serve_all():
    policy = tiny.policy(tiny.flux())
    conditioning = policy.encode(["red"] * 16)  # as many prompts as tokens: a length alone would not tell
    embeddings, pooled, text_ids = conditioning.calls[0]
    assert embeddings.shape == (16, 16, 16) and pooled.shape == (16, 16) and text_ids.shape == (16, 3)
    assert conditioning.per_prompt == ((True, True, False),)
    rows = conditioning.rows(torch.tensor([1, 1, 0, 1]))
    assert [len(value) for value in rows.calls[0]] == [4, 4, 16]
    assert rows.calls[0][2] is text_ids


def test_lists_and_absent_values_are_rows_too():
    conditioning = Conditioning(["a", "b"], ["", ""], (([torch.zeros(1), torch.ones(2)], None),), ((True, False),))
    [(values, absent)] = conditioning.rows(torch.tensor([1, 0, 1])).calls
    assert [len(value) for value in values] == [2, 1, 2] and absent is None


def test_a_pipeline_that_encodes_negative_prompts_by_themselves():
    policy = tiny.policy(tiny.flux(), call=tiny.FLUX_CALL | {"true_cfg_scale": 4.0}, guidance=2.0)
    conditioning = policy.encode(["red", "blue"], ["old", "old"])
    assert len(conditioning.calls) == 2 and not torch.equal(conditioning.calls[0][0], conditioning.calls[1][0])
    plan = RolloutSpec(shift_grid(3, 3.0), Schedule((1,), (1,)), FlowSDE(0.7), Euler(), 2, roots=2)
    policy.evaluations = 0
    [part] = explore(policy, conditioning, [plan], 4, seeder(0, 0))
    assert policy.evaluations == 2 * 4 * 3
    [(_, _, new)] = replay(policy, conditioning, part, 4)
    assert (new.logp - part.transitions[0].old.logp).abs().max() <= 1e-6
    ours = policy.generate(conditioning, policy.generators([1, 2]), 3, 2.0, "latent")
    stock = tiny.flux()(["red", "blue"], negative_prompt=["old", "old"], true_cfg_scale=4.0, num_inference_steps=3,
                        guidance_scale=2.0, output_type="latent", generator=policy.generators([1, 2]), **tiny.FLUX_CALL)
    torch.testing.assert_close(ours, stock.images, rtol=0, atol=1e-4)


@pytest.mark.parametrize("pipe", [tiny.sd3, tiny.flux])
def test_decoding_is_what_the_pipeline_does_at_its_end(pipe):
    policy = tiny.policy(pipe())
    conditioning = policy.encode(["red", "blue"])
    latents, expected = (policy.generate(conditioning, policy.generators([1, 2]), 3, 1.0, kind)
                         for kind in ("latent", "pt"))
    pictures = policy.decode(latents, conditioning)
    torch.testing.assert_close(pictures, expected, rtol=0, atol=1e-6)
    assert pictures.shape == (2, 3, 16, 16) and pictures.min() >= 0 and pictures.max() <= 1 and pictures.std() > 0.01


def test_the_pipeline_is_left_as_it_was():
    pipe = tiny.sd3()
    scheduler = pipe.scheduler
    policy = tiny.policy(pipe)
    output(policy)
    assert pipe.scheduler is scheduler and "encode_prompt" not in vars(pipe)
    with pytest.raises(RuntimeError):
        policy.run(Segment(shift_grid(2, 3.0), range(2)), policy.encode(["red"]), torch.ones(1, 4, 3, 3))
    assert pipe.scheduler is scheduler and "encode_prompt" not in vars(pipe)


class Blackening(torch.nn.Module):
    """Safety checker that flags every image."""

    dtype, device = torch.float32, torch.device("cpu")

    def forward(self, clip_input, images):
        return torch.zeros_like(images), [True] * len(images)


def with_checker(folder):
    """Save SD 1.5 with a safety checker of published form to a folder."""
    from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    checker = StableDiffusionSafetyChecker(CLIPConfig(
        vision_config=sizes | dict(image_size=16, patch_size=8), text_config=sizes, projection_dim=8))
    pipe = tiny.sd15()
    pipe.register_modules(safety_checker=checker, feature_extractor=CLIPImageProcessor(size=16, crop_size=16))
    pipe.register_to_config(requires_safety_checker=True)
    pipe.save_pretrained(folder)
    return checker, folder


def test_a_safety_checker_is_not_loaded_where_images_are_scored(tmp_path, capsys):
    checker, folder = with_checker(tmp_path / "model")
    config = tiny.config(tmp_path, model=str(folder), method="ddpo", reward="sharpness", image__call={},
                         train__guidance=4.0)
    assert build.load(config).components["safety_checker"] is None
    assert "not to disable the safety checker" not in capsys.readouterr().err
    assert make_pipeline(str(folder), "fp32").components["safety_checker"] is None
    whole = load_pipeline(str(folder)).components["safety_checker"]
    assert sum(p.numel() for p in whole.parameters()) == sum(p.numel() for p in checker.parameters()) > 0
    assert build.has_checker(config) and not build.has_checker(config.model_copy(update={"model": "starter"}))
    told = report(str(folder), config)
    assert told["reason"] is None and told["memory_parts"]["other"] == 0


def test_a_safety_checker_does_not_blacken_what_is_scored():
    pipe = tiny.sd15()
    pipe.register_modules(safety_checker=Blackening(), feature_extractor=CLIPImageProcessor(size=16, crop_size=16))
    policy = tiny.policy(pipe)
    latents = torch.randn(2, *tiny.LATENTS, generator=torch.Generator().manual_seed(0))
    conditioning = policy.encode(["red", "blue"])
    pictures = policy.decode(latents, conditioning)
    assert pictures.abs().sum() > 0
    assert policy.generate(conditioning, policy.generators([0, 1]), 2, 1.0).abs().sum() > 0
    assert isinstance(pipe.safety_checker, Blackening) and pipe.config["safety_checker"][1] == "Blackening"
    assert pipe("red", num_inference_steps=2, output_type="pt").images.abs().sum() == 0, "the stock pipeline keeps it"
    assert announcement.describe_model(pipe).endswith(announcement.SAFETY)

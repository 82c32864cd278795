"""Less memory changes where things are and how they are kept, and nothing else of a run."""

import collections
import copy
import dataclasses
import itertools
import json
import re
import types

import pytest
import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from flowgrpo.config import load
from flowgrpo.config.sections import Adapter, Memory, Train
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation import held_out
from flowgrpo.policies.options import require_memory
from flowgrpo.policies.pipelines.conditioning import PromptCache
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights import memory_options, trainable
from flowgrpo.policies.weights.forwards import compile_blocks
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.policies.weights.trainable import TrainableWeights
from flowgrpo.run import run
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.growth import explore, replay
from flowgrpo.samplers.kernels import Euler, FlowSDE
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.rollout import RolloutSpec, seeder
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.storage import checkpoint
from flowgrpo.tools.check import tiny as pipelines
from flowgrpo.training import memory
from flowgrpo.training.optimizer import make_optimizer
from tests.helpers import loop, tiny
from tests.helpers.refusals import message
from tests.helpers.tiny_runs import assert_same_weights

PLAN = RolloutSpec(shift_grid(4, 3.0), Schedule((1, 2), (1, 2)), FlowSDE(0.7), Euler(), 4, keep_means=True)


def rollout(policy, conditioning=None, plan=PLAN):
    [part] = explore(policy, conditioning or policy.encode(["red"]), [plan], 4, seeder(0, 0))
    return part


def first_log_ratio(policy, part, conditioning=None) -> float:
    """The largest |log ratio| of the replay, whose gradient is left in the parameters."""
    largest = 0.0
    for k, rows, new in replay(policy, conditioning or policy.encode(["red"]), part, 4):
        largest = max(largest, (new.logp - part.transitions[k].old.logp[rows]).abs().max().item())
        new.logp.sum().backward()
    return largest


# --- a quantised denoiser ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def policies(model):
    """The same model with the same LoRA, in full, in int8 and in fp8."""
    def made(weights: str) -> PipelinePolicy:
        pipe = load_pipeline(str(model), weights=weights)
        torch.manual_seed(0)
        return tiny.stir(PipelinePolicy(pipe, Adapter(rank=2, alpha=3.0), call=tiny.CALL))
    return {weights: made(weights) for weights in ("full", "int8", "fp8")}


def quantised(policy) -> dict[str, torch.Tensor]:
    return {key: p for key, p in policy.denoisers["transformer"].named_parameters() if hasattr(p, "qdata")}


def test_int8_weights_are_integers_near_the_full_ones(policies):
    full, low = policies["full"], quantised(policies["int8"])
    weights = dict(full.denoisers["transformer"].named_parameters())
    assert len(low) > 10 and not quantised(full) and not any("lora_" in key for key in low)
    for key, weight in low.items():
        step = weights[key].abs().amax(1, keepdim=True) / 127
        assert weight.qdata.dtype == torch.int8 and ((weight.dequantize() - weights[key]).abs() <= 0.51 * step).all()


def test_fp8_weights_are_floats_of_three_bits_near_the_full_ones(policies):
    """A row's largest value is scaled to 448, the largest of e4m3; others round to 3 bits of mantissa, or, below
    2^-6, to multiples of 2^-9."""
    weights, low = dict(policies["full"].denoisers["transformer"].named_parameters()), quantised(policies["fp8"])
    assert low.keys() == quantised(policies["int8"]).keys()
    for key, weight in low.items():
        scale = weights[key].abs().amax(1, keepdim=True) / 448
        bound = torch.maximum(weights[key].abs() * 2**-4, scale * 2**-10) * 1.001
        assert weight.qdata.dtype == torch.float8_e4m3fn and ((weight.dequantize() - weights[key]).abs() <= bound).all()


def test_zero_rows_of_fp8_weights_are_zero(tmp_path):
    pipe = tiny.sd3()
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    with torch.no_grad():
        layer.weight[3] = 0
    loaded = load_pipeline(str(tiny.save(pipe, tmp_path)), weights="fp8")
    weight = loaded.transformer.transformer_blocks[0].attn.to_q.weight
    assert weight.dequantize().isfinite().all() and not weight.dequantize()[3].any() and weight.scale[3] == 1


@pytest.mark.parametrize("weights, most", [("int8", 0.05), ("fp8", 0.1)])
def test_a_lora_on_low_weights_samples_replays_and_is_saved_as_ever(weights, most, policies, tmp_path):
    policy, whole = policies[weights], policies["full"]
    full, low = (rollout(each).finals[0] for each in (whole, policy))
    assert 0 < ((low - full).norm() / full.norm()).item() < most
    assert first_log_ratio(policy, rollout(policy)) <= 1e-6
    ours = {id(p) for p in policy.weights.parameters()}
    reached = [id(p) for p in policy.denoisers["transformer"].parameters() if p.grad is not None and p.grad.any()]
    assert reached and set(reached) <= ours
    for each, name in ((whole, "full"), (policy, "low")):
        each.weights.save(tmp_path / name)  # reads it back beside the live one
    (tensors, told), (low, low_told) = (contents(tmp_path / name / LORA_FILE) for name in ("full", "low"))
    assert_same_weights(tensors, low)
    assert told == low_told and told["transformer.lora_alpha"] == told["transformer.r"]


def contents(file):
    """The tensors of a LoRA's file, and what it says of itself; sets are written in any order."""
    with safe_open(file, "pt") as opened:
        told = json.loads(opened.metadata()["lora_adapter_metadata"])
        told = {key: sorted(value) if isinstance(value, list) else value for key, value in told.items()}
        return {key: opened.get_tensor(key) for key in opened.keys()}, told  # noqa: SIM118, it is no dictionary


def test_the_estimate_counts_int8_weights_as_they_are_kept(policies):
    config = load(None, {"train.micro_batch": 4, "train.group": 4})
    full, low = (memory.memory(policies[kind], config, policies[kind].encode(["red"]))["update"]["denoisers"]
                 for kind in ("full", "int8"))
    # From four bytes a value to one, and per row a scale of four bytes and a zero point of one.
    assert full - low == sum(3 * weight.numel() - 5 * len(weight) for weight in quantised(policies["int8"]).values())


@pytest.mark.fast
def test_a_run_with_all_that_saves_memory(model, tmp_path):
    config = tiny.config(tmp_path, model=str(model), memory={"weights": "int8", "encoders": "cpu", "states": "cpu"},
                         train__optimizer="adamw8bit", train__lr=1e-2, train__checkpointing=True, adapter__rslora=True)
    summary = run(config, functions={"red": tiny.red}, prompts=[Prompt(text) for text in tiny.PROMPTS])
    assert summary["max_first_log_ratio"] <= 1e-6 and summary["updates"] == 2
    tensors, told = contents(config.folder / LORA_FILE)
    assert not told["transformer.use_rslora"] and max(t.abs().max() for k, t in tensors.items() if "lora_B" in k) > 0


def test_nf4_is_asked_of_diffusers_for_every_denoiser():
    form = memory_options.quantisation(["transformer", "transformer_2"], "nf4", torch.bfloat16).quant_mapping
    assert set(form) == {"transformer", "transformer_2"}
    asked = form["transformer_2"]
    assert asked.load_in_4bit and asked.bnb_4bit_quant_type == "nf4" and asked.bnb_4bit_compute_dtype == torch.bfloat16
    assert memory_options.quantisation(["transformer"], "full", torch.bfloat16) is None


def test_a_pipeline_that_is_loaded_already_is_not_quantised():
    config = load(None, {"memory.weights": "int8"})
    require_memory(loop.setup(config))
    assert "when you load it" in message(require_memory, loop.setup(config, loaded=object()))


# --- who waits where -----------------------------------------------------------------------------------------------
def test_only_text_encoders_leave():
    pipe = tiny.sd3()
    encoders = memory_options.Encoders(pipe, torch.device("meta"), "cpu")
    encoders.load()
    encoders.offload()
    where = {name: part.device.type for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    assert where == {"text_encoder": "cpu", "text_encoder_2": "cpu", "transformer": "meta", "vae": "meta"}


class Moves(TorchDispatchMode):
    """Counts copies from device to device."""

    def __init__(self):
        super().__init__()
        self.counted = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if torch.is_tensor(output) and args and torch.is_tensor(args[0]) and output.device != args[0].device:
            self.counted[args[0].device.type, output.device.type] += 1
        return output


def test_text_encoders_are_copied_to_the_device_and_not_back():
    pipe = tiny.sd3()
    encoders = memory_options.Encoders(pipe, torch.device("meta"), "cpu")
    pipe.text_encoder.twin = pipe.text_encoder.text_model  # tied weights
    tensors = {tensor.data_ptr(): tensor.clone() for module in encoders.modules
               for tensor in [*module.parameters(), *module.buffers()]}
    with Moves() as moves:
        for _ in range(2):
            encoders.load()
            assert {tensor.device.type for module in encoders.modules
                    for tensor in [*module.parameters(), *module.buffers()]} == {"meta"}
            assert pipe.text_encoder.twin.embeddings.token_embedding.weight is \
                pipe.text_encoder.text_model.embeddings.token_embedding.weight
            encoders.offload()
    assert moves.counted == {("cpu", "meta"): 2 * len(tensors)}
    for module in encoders.modules:
        for tensor in [*module.parameters(), *module.buffers()]:
            assert torch.equal(tensor, tensors[tensor.data_ptr()])


def test_text_encoders_are_there_whenever_they_run_and_away_otherwise():
    policy, seen = tiny.policy(memory=Memory(encoders="cpu")), []
    for encoder in policy.encoders.modules:
        encoder.register_forward_pre_hook(lambda *_: seen.append(policy.encoders.here))
    policy.denoisers["transformer"].register_forward_pre_hook(lambda *_: seen.append(not policy.encoders.here))
    conditioning = policy.encode(["red"])
    part = rollout(policy, conditioning)
    assert first_log_ratio(policy, part, conditioning) == 0
    policy.encode(["blue"])
    assert policy.encoders.here
    policy.decode(part.finals[0], conditioning.rows(part.prompts))
    assert not policy.encoders.here and len(seen) > 10 and all(seen)


def test_text_encoders_come_for_a_stock_pipelines_own_call():
    pipe, seen = tiny.sd3(), []
    asked = dict(num_inference_steps=2, output_type="pt", return_dict=False, **tiny.CALL)
    plain = pipe("red", generator=torch.Generator().manual_seed(0), **asked)[0]
    encoders = memory_options.Encoders(pipe, torch.device("cpu"), "cpu")
    encoders.attend(pipe)
    for encoder in encoders.modules:
        encoder.register_forward_pre_hook(lambda *_: seen.append(encoders.here))
    pipe.transformer.register_forward_pre_hook(lambda *_: seen.append(not encoders.here))
    assert torch.equal(pipe("red", generator=torch.Generator().manual_seed(0), **asked)[0], plain)
    assert not encoders.here and len(seen) >= 6 and all(seen)


def test_text_encoders_come_once_for_a_row_of_prompts():
    policy = tiny.policy(memory=Memory(encoders="cpu"))
    policy.encode(["red"])  # looks at the pipeline, too
    encoder, ran = PromptCache(policy), phases(policy)
    conditioning = encoder(["red", "blue", "a cat"], ["", "", ""])
    rollout(policy, conditioning.rows(torch.tensor([1])))
    rollout(policy, encoder(["blue"], [""]))
    assert [phase for phase, _ in itertools.groupby(ran)] == ["encode", "denoise"]


def test_text_encoders_come_once_for_an_evaluation_of_several_micro_batches():
    trainer = tiny.trainer(memory={"encoders": "cpu"}, eval__prompts=6, eval__samples=2, train__micro_batch=4)
    trainer.rollouts.conditioning(trainer.prompts[:1])  # looks at the pipeline, too
    trainer.held_out, ran = [Prompt(f"new {i}") for i in range(6)], phases(trainer.policy)
    measured = held_out.measure_side(trainer, {"red": tiny.red}, "before")
    assert len(measured.prompts) == 12 and ran.count("denoise") == 3 * 3 and ran.count("encode") >= 6
    assert [phase for phase, _ in itertools.groupby(ran)] == ["encode", "denoise"]


def phases(policy) -> list[str]:
    """What runs from now on, call by call: a text encoder, or the denoiser."""
    ran: list[str] = []
    for module, phase in ((policy.encoders.modules[0], "encode"), (policy.denoisers["transformer"], "denoise")):
        module.register_forward_pre_hook(lambda *_, phase=phase: ran.append(phase))
    return ran


@pytest.mark.parametrize("how", ["sliced", "tiled"])
def test_images_are_decoded_one_by_one(how):
    (one, call), (two, _) = (pipelines.make("WanPipeline") for _ in range(2))
    whole, parts = tiny.policy(one, call=call), tiny.policy(two, call=call, memory=Memory(vae=how))
    vae, seen = parts.pipe.vae, []
    assert vae.use_slicing and vae.use_tiling == (how == "tiled")
    decode = vae._decode
    vae._decode = lambda z, **options: (seen.append(len(z)), decode(z, **options))[1]
    conditioning = whole.encode(["red", "blue", "a cat"])
    parts.encode(["red"])
    x, _ = whole.run(Segment(PLAN.grid, range(0)), conditioning, None, whole.generators(range(3)))
    torch.testing.assert_close(parts.decode(x, conditioning), whole.decode(x, conditioning), rtol=0, atol=1e-5)
    assert seen[-3:] == [1, 1, 1]


def test_the_starters_images_are_decoded_tile_by_tile():
    """Of its autoencoder diffusers thinks that an image has 8 times the size of its latents."""
    pipe = load_pipeline("starter")
    pipe.vae.tile_sample_min_size = 64
    whole = PipelinePolicy(pipe, None, guidance=2.0)
    conditioning, tiles = whole.encode(["two red circles"]), []
    grid = shift_grid(8, 3.0)
    latents = whole.run(Segment(grid, range(8)), conditioning, None, whole.generators([0]))[0].repeat(1, 1, 2, 2)
    expected = whole.decode(latents, conditioning)
    tiled = PipelinePolicy(pipe, None, guidance=2.0, memory=Memory(vae="tiled"))
    pipe.vae.decoder.register_forward_hook(lambda _, args, out: tiles.append((args[0].shape[-1], out.shape[-1])))
    found = tiled.decode(latents, conditioning)
    assert found.shape == expected.shape == (1, 3, 128, 128) and len(tiles) == 9 and tiles[0] == (16, 64)
    assert (found - expected).abs().mean() < 0.1 * expected.std() and expected.std() > 0.1
    torch.testing.assert_close(found[..., :32, :32], expected[..., :32, :32], rtol=0, atol=1e-3)


def test_an_autoencoder_of_sound_has_no_tiles_and_hinders_none():
    pipe, _ = pipelines.make("LTX2Pipeline")
    memory_options.decode_in_parts(pipe, "tiled")
    assert pipe.vae.use_tiling and pipe.vae.use_slicing and not hasattr(pipe.audio_vae, "use_tiling")


def test_an_autoencoder_without_parts_is_told():
    pipe = types.SimpleNamespace(components={"vae": torch.nn.Identity()})
    assert "no slicing: use whole" in message(memory_options.decode_in_parts, pipe, "tiled")


def test_recorded_states_and_means_wait_elsewhere_each_of_them_once():
    policy = tiny.policy()
    policy.states = torch.device("meta")
    first, second = rollout(policy, plan=dataclasses.replace(PLAN, roots=4)).transitions  # both steps in one run
    away = [first.x, first.x_next, first.old.mean, second.x, second.x_next, second.old.mean]
    assert {value.device.type for value in away} == {"meta"}
    assert first.x_next is second.x
    assert first.old.logp.device.type == second.old.logp.device.type == "cpu"


def test_the_estimate_leaves_out_what_waits_elsewhere():
    told = {}
    for name, options in {"plain": {}, "away": {"memory.encoders": "cpu", "train.optimizer": "adamw8bit"}}.items():
        config = load(None, {"train.group": 4, "train.micro_batch": 4} | options)
        policy = tiny.policy(memory=config.memory)
        if name == "away":
            policy.states = torch.device("meta")
        told[name] = memory.memory(policy, config, policy.encode(["red"]))
    plain, away = told["plain"], told["away"]
    assert away["encode"] == plain["encode"] and plain["update"]["text encoders"] > 0
    assert away["update"]["text encoders"] == away["rollout"]["text encoders"] == 0
    assert plain["rollout"]["recorded states"] > 0 == away["rollout"]["recorded states"]
    trained = plain["update"]["trained"]
    assert plain["update"]["gradients and optimizer"] == 3 * trained
    assert away["update"]["gradients and optimizer"] == trained + trained // 2


# --- the optimizer and the compiler --------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
def test_without_trained_weights_there_is_a_line(kind):
    assert re.search("no weight is trained: .*flowgrpo check", message(make_optimizer, Train(optimizer=kind), []))


def quadratic(kind: str):
    """Two tensors, their optimizer, and steps on a loss whose gradient is known."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in (8192, 5000)]
    optimizer = make_optimizer(Train(optimizer=kind, lr=0.1, weight_decay=0.0), parameters)
    def step(times: int) -> None:
        for _ in range(times):
            for parameter in parameters:
                parameter.grad = 2 * (parameter.detach() - 1)
            optimizer.step()
    return parameters, optimizer, step


def test_the_first_step_of_adamw_is_the_learning_rate_in_either_form():
    """Its moments are g and g^2 after their correction: every value moves by lr * sign(g)."""
    for kind in ("adamw", "adamw8bit"):
        parameters, optimizer, step = quadratic(kind)
        before = [p.detach().clone() for p in parameters]
        step(1)
        for old, new in zip(before, parameters):
            far = (old - 1).abs() > 1e-3
            torch.testing.assert_close((new - old)[far], -0.1 * (old - 1).sign()[far], rtol=0, atol=1e-4)
    state = optimizer.state[parameters[0]]
    assert state["state1"].dtype == state["state2"].dtype == torch.uint8


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
def test_an_optimizer_goes_on_from_its_tensors_bit_for_bit(kind, tmp_path):
    whole, _, step = quadratic(kind)
    step(5)
    first, optimizer, step = quadratic(kind)
    step(2)
    folder = checkpoint.save(tmp_path, 1, checkpoint.optimizer_tensors(optimizer), {}, 1)
    second, fresh, step = quadratic(kind)
    with torch.no_grad():
        for to, of in zip(second, first):
            to.copy_(of)
    checkpoint.load_optimizer(fresh, checkpoint.load(folder)[0])
    step(3)
    assert all(torch.equal(a, b) for a, b in zip(whole, second))


def test_a_policy_that_samples_in_grad_mode_draws_the_same_and_keeps_no_graph():
    plain, other = seeded(), seeded()
    other.compiled = True
    expected, found = rollout(plain), rollout(other)
    assert torch.equal(found.finals[0], expected.finals[0])
    for taken in found.transitions:
        assert not any(value.requires_grad for value in (taken.x, taken.x_next, taken.old.logp, taken.old.mean))
    assert first_log_ratio(other, found) == 0


def test_compiled_blocks_sample_and_replay_alike():
    plain, policy, plan = seeded(), seeded(), dataclasses.replace(PLAN, roots=4)  # one shape, one graph per block
    policy.compiled = True
    transformer = policy.denoisers["transformer"]
    assert compile_blocks(transformer, backend="eager") == len(transformer.transformer_blocks) == 2
    part = rollout(policy, plan=plan)
    torch.testing.assert_close(part.finals[0], rollout(plain, plan=plan).finals[0], rtol=0, atol=1e-4)
    assert first_log_ratio(policy, part) <= 1e-6
    assert any(p.grad.any() for p in policy.weights.parameters())
    assert compile_blocks(torch.nn.Linear(2, 2), backend="eager") == 1


def test_compiled_blocks_that_recompute_have_the_same_gradient_and_are_compiled_once():
    plain, policy, plan = seeded(), seeded(), dataclasses.replace(PLAN, roots=4)
    first_log_ratio(plain, rollout(plain, plan=plan))
    policy.compiled = True
    compile_blocks(policy.denoisers["transformer"], backend="eager")
    policy.checkpoint(1.0)
    assert first_log_ratio(policy, rollout(policy, plan=plan)) <= 1e-6
    for own, other in zip(policy.weights.parameters(), plain.weights.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(2):
        assert first_log_ratio(policy, rollout(policy, plan=plan)) <= 1e-6
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0


def seeded():
    """A policy whose LoRA is the same every time."""
    torch.manual_seed(0)
    return tiny.stir(tiny.policy())


# --- reference predictions -----------------------------------------------------------------------------------------
def epoch_of(again: bool, passes: int = 2, **options):
    """(weights, evaluations of the update, KL) of an epoch of some passes with a KL; `again`: nothing is kept."""
    trainer = tiny.trainer(train__inner_epochs=passes, train__lr=1e-2,
                           parts={"kl": {"type": "GaussianKL", "weight": 1.0}}, **options)
    tiny.stir(trainer.policy, 0.01 if "adapter__rank" in options else 0.1)
    assert trainer.kl_reference.keep == (passes > 1)
    trainer.kl_reference.keep = not again
    drawn: list[int] = []
    loop.watch(trainer, on_drawn=lambda epoch: drawn.append(trainer.policy.evaluations))
    metrics = trainer.run_epoch()
    return trainer.policy.weights.snapshot(), trainer.policy.evaluations - drawn[0], metrics["kl"]


def test_reference_predictions_are_computed_once_for_all_inner_epochs():
    (kept, few, kl), (again, many, same) = epoch_of(False), epoch_of(True)
    assert_same_weights(kept, again)
    assert kl == same > 0
    unit = many // 5  # the first ratio's look, and in either pass the policy's forward and the reference's
    assert many == 5 * unit and few == 4 * unit


def test_a_large_reference_is_put_in_place_once_per_epoch(monkeypatch):
    entered, swapped = [], TrainableWeights.swap
    def counted(self, values):
        entered.append(len(values))
        return swapped(self, values)
    monkeypatch.setattr(TrainableWeights, "swap", counted)
    few, count = epoch_of(False, 1, adapter__rank=0), len(entered)
    monkeypatch.setattr(trainable, "KEPT", 1000)
    once = epoch_of(False, 1, adapter__rank=0)
    assert count == 2 and len(entered) - count == 1  # of two parts
    assert_same_weights(few[0], once[0])
    assert few[1:] == once[1:] and few[2] > 0


# --- other kinds of LoRA -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options, scale", [
    ({"dora": True}, 2.0), ({"dora": True, "alpha": 3.0}, 0.75),
    ({"rslora": True}, 2.0), ({"rslora": True, "alpha": 8.0}, 4.0)])
def test_dora_and_rslora_load_in_stock_diffusers(options, scale, tmp_path):
    policy = tiny.stir(PipelinePolicy(tiny.sd3(), Adapter(rank=4, **options), call=tiny.CALL))
    assert {each for layer in policy.weights.layers().values() for each in layer.scaling.values()} == {scale}
    assert any("magnitude" in key for key in policy.weights.named) == bool(options.get("dora"))
    policy.weights.save(tmp_path)
    stock = tiny.sd3()
    base = copy.deepcopy(stock)
    stock.load_lora_weights(tmp_path, weight_name=LORA_FILE)
    conditioning = policy.encode(["red"])
    tuned, loaded, plain = (generated(pipe, conditioning) for pipe in (policy.pipe, stock, base))
    torch.testing.assert_close(loaded, tuned, rtol=0, atol=1e-5)
    assert (loaded - plain).abs().max() > 1e-3


def generated(pipe, conditioning) -> torch.Tensor:
    """What a stock pipeline gives for the encoded prompt."""
    prompt, _, pooled, _ = conditioning.calls[0]
    with torch.no_grad():
        return pipe(prompt_embeds=prompt, pooled_prompt_embeds=pooled, num_inference_steps=3, guidance_scale=1.0,
                    generator=torch.Generator().manual_seed(0), output_type="latent").images

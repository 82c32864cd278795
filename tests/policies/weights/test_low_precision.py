"""Previews in low precision: near to full precision, from the same noise, and without a trace in the weights."""

import gc
import re
import weakref

import pytest
import torch
from preview_correlation import agreement

from flowgrpo.policies.weights.low_precision import (
    _quantise,
    form,
    notice,
    require_low_precision,
    resolve_auto,
    with_quantised_weights,
)
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.preview import PRECISIONS, Preview, previews
from flowgrpo.samplers.rollout import seeder
from flowgrpo.training import sampling
from tests.helpers import tiny
from tests.helpers.refusals import message
from tests.helpers.tiny_runs import assert_same_weights

LARGEST = 0.03  # relative error of a preview: weights and inputs are off by half a step of 1/127


@pytest.fixture(scope="module")
def policy():
    return tiny.stir(tiny.policy())


def looked(policy, conditioning) -> torch.Tensor:
    return previews(policy, conditioning, shift_grid(3, 3.0), None, 4, 8, seeder(0, 0))


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def test_a_preview_differs_little_and_leaves_the_weights_as_they_were(policy):
    conditioning, before = policy.encode(["red", "a cat"]), tiny.weights(policy)
    parameters = dict(policy.denoisers["transformer"].named_parameters())
    full = looked(policy, conditioning)
    with with_quantised_weights(policy, "int8"):
        low = looked(policy, conditioning)
    assert 0 < far(low, full) < LARGEST
    assert_same_weights(tiny.weights(policy), before)
    now = dict(policy.denoisers["transformer"].named_parameters())
    assert all(now[key] is parameter for key, parameter in parameters.items())
    assert torch.equal(looked(policy, conditioning), full)


@pytest.mark.parametrize("capability, refused", [((8, 0), ["fp8", "nvfp4"]), ((9, 0), ["nvfp4"]), ((10, 0), [])])
def test_a_precision_that_a_gpu_lacks_is_told(capability, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for precision in PRECISIONS:
        if precision in refused:
            assert re.search(f"^previews in {precision} need a GPU of compute capability .*, and cuda:1 has "
                             f"{capability[0]}.{capability[1]}: set parts: .*precision: auto",
                             message(require_low_precision, precision, torch.device("cuda:1")))
        else:
            require_low_precision(precision, torch.device("cuda:1"))


def test_a_cpu_previews_in_int8_alone():
    preview = {"pool": 9, "steps": 2, "precision": "fp8"}
    told = message(tiny.trainer, method="mix_grpo+sol_rl", parts__preview=preview)
    assert "previews in fp8 need a GPU of compute capability 8.9, and cpu has none" in told


@pytest.mark.parametrize("dtype, fp8", [(torch.bfloat16, "PerRow"), (torch.float16, "PerTensor")])
def test_every_form_quantises_the_inputs_too(dtype, fp8):
    found = {precision: form(precision, dtype) for precision in ("int8", "fp8", "nvfp4")}
    assert {precision: type(each).__name__ for precision, each in found.items()} == {
        "int8": "Int8DynamicActivationInt8WeightConfig", "fp8": "Float8DynamicActivationFloat8WeightConfig",
        "nvfp4": "NVFP4DynamicActivationNVFP4WeightConfig"}
    assert [type(each).__name__ for each in found["fp8"].granularity] == [fp8, fp8]
    assert type(form("int8", dtype, inputs=False)).__name__ == "Int8WeightOnlyConfig"


@pytest.fixture
def fp8_here(monkeypatch):
    """fp8 on a CPU: torch has the products, and torchao asserts a GPU before it makes the weights."""
    from torchao.quantization import quant_api
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularities: None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_of_zeros_have_the_product_zero_in_fp8(fp8_here, dtype):
    """Padding of prompts and absent encoders give inputs of zeros; weights that nobody trained are zero."""
    torch.manual_seed(0)
    layer, inputs = torch.nn.Linear(32, 48, dtype=dtype), torch.randn(3, 4, 32, dtype=dtype)
    inputs[0], inputs[1, 2] = 0, 0
    layer.weight.data[5] = 0
    with torch.no_grad():
        full = layer(inputs)
        layer.weight = _quantise(layer.weight, "fp8")
        low, none = layer(inputs), layer(0 * inputs)
    assert torch.equal(low[0], full[0]) and torch.equal(low[1, 2], full[1, 2]) and torch.equal(none[2], full[0])
    assert torch.equal(low[..., 5], full[..., 5])
    assert 0 < far(low.float(), full.float()) < 0.06


def test_a_weight_of_zeros_is_zeros_in_fp8(fp8_here):
    for dtype in (torch.bfloat16, torch.float32):
        low = _quantise(torch.zeros(32, 32, dtype=dtype), "fp8")
        assert torch.equal(low.dequantize(), torch.zeros(32, 32, dtype=dtype)) and (low.scale == 1).all()


def test_the_adapter_stays_in_full_precision_and_is_the_present_one(policy):
    """Only base weights are quantised; a LoRA that has moved since is seen by the next preview."""
    conditioning, kept = policy.encode(["red"]), policy.weights.snapshot()
    with with_quantised_weights(policy, "int8"):
        assert {type(p) for p in policy.weights.parameters()} == {torch.nn.Parameter}
        layers = [layer for name, layer in policy.denoisers["transformer"].named_modules()
                  if isinstance(layer, torch.nn.Linear) and "lora_" not in name]
        changed = [type(layer.weight.data).__name__ for layer in layers]
        first = looked(policy, conditioning)
    fitting = [layer for layer in layers if not any(side % 16 for side in layer.weight.shape)]
    assert len(fitting) > 10 and len([name for name in changed if name != "Tensor"]) == len(fitting)
    tiny.stir(policy)
    with with_quantised_weights(policy, "int8"):
        assert far(looked(policy, conditioning), first) > 1e-2
    policy.weights.load(kept)


def test_weights_that_are_all_trained_are_copied_anew():
    policy = tiny.policy(rank=0)
    conditioning = policy.encode(["red"])
    with with_quantised_weights(policy, "int8"):
        first = looked(policy, conditioning)
    tiny.stir(policy)
    with with_quantised_weights(policy, "int8"):
        assert far(looked(policy, conditioning), first) > 1e-2
    assert all(parameter.requires_grad for parameter in policy.weights.parameters())


def test_the_copies_are_freed_even_after_an_error(policy):
    before = tiny.weights(policy)
    layer = next(layer for name, layer in policy.denoisers["transformer"].named_modules()
                 if isinstance(layer, torch.nn.Linear) and "lora_" not in name)
    with pytest.raises(ArithmeticError), with_quantised_weights(policy, "int8"):
        copy = weakref.ref(layer.weight)
        raise ArithmeticError
    gc.collect()
    assert copy() is None
    assert_same_weights(tiny.weights(policy), before)


@pytest.mark.parametrize("precision", ["full", Preview().precision])
def test_full_precision_and_auto_on_a_cpu_change_nothing(policy, precision):
    layer = next(layer for layer in policy.denoisers["transformer"].modules() if isinstance(layer, torch.nn.Linear))
    weight, conditioning = layer.weight, policy.encode(["red"])
    full = looked(policy, conditioning)
    with with_quantised_weights(policy, precision):
        assert layer.weight is weight and torch.is_grad_enabled() and torch.equal(looked(policy, conditioning), full)


def test_half_precision_models_are_quantised_too():
    policy = tiny.stir(tiny.policy(tiny.sd3().to(torch.bfloat16), precision="bf16"))
    conditioning = policy.encode(["red"])
    full = looked(policy, conditioning)
    with with_quantised_weights(policy, "int8"):
        assert 0 < far(looked(policy, conditioning).float(), full.float()) < LARGEST + 0.05


SUITS = {(0, 0): "int8", (7, 5): "int8", (8, 0): "int8", (8, 6): "int8", (8, 9): "fp8", (9, 0): "fp8",
         (10, 0): "nvfp4", (10, 3): "nvfp4", (12, 0): "nvfp4"}  # by compute capability


@pytest.mark.parametrize("device, capability, torchao, taken, told", [
    ("cpu", None, True, "full", "in full precision: a low one is for GPUs, and the device is cpu"),
    *(("cuda", capability, True, taken, f"in {taken}") for capability, taken in SUITS.items()),
    ("cuda", (9, 0), False, "full", "in full precision: torchao is not installed (pip install 'flowgrpo[torchao]')")])
def test_auto_is_low_where_the_device_has_it_and_full_elsewhere(device, capability, torchao, taken, told, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if torchao else None)
    assert resolve_auto("auto", torch.device(device)) == taken and resolve_auto("fp8", torch.device(device)) == "fp8"
    assert notice("auto", torch.device(device)) == f"previews are drawn {told}"
    assert notice("full", torch.device(device)) is None
    require_low_precision("auto", torch.device(device))


def test_an_absent_torchao_is_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    require_low_precision("full", torch.device("cpu"))
    told = message(require_low_precision, "fp8", torch.device("cpu"))
    assert "previews in fp8 need torchao: pip install 'flowgrpo[torchao]', or set" in told


def noises(prompt: int, samples) -> torch.Tensor:
    """The initial noises of epoch 0, from their seeds."""
    generators = [torch.Generator().manual_seed(seeder(0, 0)(prompt, int(sample))) for sample in samples]
    return torch.cat([torch.randn(1, *tiny.LATENTS, generator=generator) for generator in generators])


def test_the_chosen_images_start_from_bit_identical_noise():
    trainer = tiny.trainer(method="mix_grpo+sol_rl", parts__preview={"pool": 9, "steps": 2, "precision": "int8"})
    tiny.stir(trainer.policy)
    before = tiny.weights(trainer.policy)
    parts, conditioning, _ = sampling.sample(trainer, trainer.prompts[:2])
    assert_same_weights(tiny.weights(trainer.policy), before)
    with with_quantised_weights(trainer.policy, "int8"):
        finals = previews(trainer.policy, conditioning, shift_grid(2, 3.0), None, 9, 4, seeder(0, 0))
    scores = tiny.red(trainer.rollouts.decode(finals, conditioning.rows(torch.arange(2).repeat_interleave(9))), None)
    for prompt, part in enumerate(parts):
        ranked = scores.view(2, 9)[prompt].argsort(descending=True)
        assert torch.equal(part.transitions[0].x, noises(prompt, [*ranked[:2], *ranked[-2:]]))


def test_the_agreement_of_two_rankings_by_hand():
    """The last two of four have changed places: 1 - 6 * 2 / 60, (5 - 1) / 6, and of the extremes only the worst is the
    same. A pool without ranks says nothing."""
    low, full = torch.tensor([[1.0, 2, 3, 4], [5, 5, 5, 5]]), torch.tensor([[1.0, 2, 4, 3], [1, 2, 3, 4]])
    assert agreement(low, full, 2) == [pytest.approx((0.8, 2 / 3, 0.5))]
    assert agreement(full, full, 4) == [pytest.approx((1, 1, 1))] * 2


def test_previews_count_among_the_evaluations_of_a_rollout():
    found = {}
    for name, parts in (("mix_grpo", {}), ("mix_grpo+sol_rl", {"preview": {"pool": 9, "steps": 2}})):
        trainer = tiny.trainer(method=name, parts=parts | {"roots": 4})
        sampling.sample(trainer, trainer.prompts[:2])
        rollouts = trainer.rollouts
        found[name] = rollouts.rollout_evaluations, trainer.policy.evaluations, rollouts.saved_evaluations
    without, beside = found.values()
    assert beside == (without[0] + 2 * 9 * 2, without[1] + 2 * 9 * 2, without[2])

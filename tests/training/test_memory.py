"""Memory: what `check` foretells, the micro-batch and checkpointing of `auto`, and runs that run out of it."""

import functools
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from flowgrpo.config.geometry import geometry
from flowgrpo.config.parse import load
from flowgrpo.config.sections import Adapter, Memory
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import free_memory
from flowgrpo.evaluation import held_out
from flowgrpo.policies.build import make_policy
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.kernels import Euler, FlowSDE
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.tools.check.tiny import make
from flowgrpo.train import Trainer
from flowgrpo.training import memory, state
from flowgrpo.training.batch_size import choose, measure_estimate, micro_batches
from tests.helpers import tiny, tiny_runs, tiny_text
from tests.helpers.refusals import refused


def test_parts_of_a_run_by_hand():
    policy = tiny.policy()
    conditioning, found = policy.encode(["red"]), geometry(tiny.config().train)
    phases = memory.memory(policy, tiny.config(), conditioning)
    parts = phases["update"]
    prompt = sum(value.numel() * 4 for call in conditioning.calls for value in call if value is not None)
    assert parts["prompt embeddings"] == prompt * (found.prompts + found.micro_batch)
    lora = sum(parameter.numel() for parameter in policy.weights.parameters())
    whole = sum(p.numel() for p in policy.pipe.transformer.parameters())
    assert parts["trained"] == 4 * lora and parts["gradients and optimizer"] == 12 * lora
    buffers = sum(b.numel() * b.element_size() for b in policy.pipe.transformer.buffers())
    assert parts["denoisers"] == 4 * (whole - lora) + buffers
    encoders = [policy.pipe.text_encoder, policy.pipe.text_encoder_2]
    assert parts["text encoders"] == sum(each.numel() * each.element_size() for encoder in encoders
                                         for each in [*encoder.parameters(), *encoder.buffers()])
    assert parts["recorded states"] % (4 * 4 * 8 * 8) == 0  # a state is 4 x 8 x 8 numbers in fp32
    assert set(phases["encode"]) < set(phases["rollout"]) < set(parts)
    assert set(phases["decode"]) - set(phases["rollout"]) == {"decoding"}
    assert memory.total({"a": 2**30, "b": 2**29}) == 1.5


def test_reward_models_count_while_they_are_on_the_device():
    policy = tiny.policy()
    conditioning, gib = policy.encode(["red"]), 986_000_000 * 4
    for place, phases in (("keep", ["encode", "rollout", "decode", "update"]), ("cpu", ["rollout", "decode"])):
        config = tiny.config(memory__rewards=place, reward={"pickscore": 1.0, "scene": 1.0})
        sizes = memory.reward_weights(config)
        assert sizes == {"pickscore": {"cpu": gib}}  # counted without reading the checkpoint
        counted = memory.memory(policy, config, conditioning, memory.on_device(sizes, torch.device("cpu")))
        assert [name for name, parts in counted.items() if parts.get("reward models") == gib] == phases


def test_epochs_that_are_drawn_ahead_wait_beside_every_phase():
    policy = tiny.policy()
    conditioning = policy.encode(["red"])
    plain, ahead = (memory.memory(policy, tiny.config(train__staleness=count), conditioning) for count in (0, 3))
    waiting = {"epochs drawn ahead": 3 * plain["update"]["recorded states"]}
    assert ahead == {name: parts | waiting for name, parts in plain.items()} and min(waiting.values()) > 0


def test_the_report_of_rewards_names_bytes_device_and_what_leaves():
    config = tiny.config(memory__rewards="cpu", memory__encoders="cpu",
                         reward={"pickscore": {"args": {"dtype": "bf16"}}, "hpsv3": 1.0})
    sizes = {"pickscore": {"cuda:1": 2**30}, "hpsv3": None, "safety": {"cpu": 2**28}}
    assert memory.describe_rewards(sizes, config) == {
        "pickscore": "1.000 GiB on cuda:1, which it leaves after scoring", "hpsv3": "unknown",
        "safety": "0.250 GiB on cpu"}
    assert memory.parts_that_leave(config) == ["text encoders", "reward models"]
    assert memory.on_device(sizes, torch.device("cuda:1")) == 2**30
    assert memory.on_device(sizes, torch.device("cuda")) == 0


@pytest.mark.parametrize("roots, trained, keep_means, expected", [
    (1, (1, 2), False, (1 + 4 + 4 + 4, 0)),  # x of the split, its four draws, theirs, the ends
    (4, (1, 2), False, (4 + 4 + 4 + 4, 0)),
    (4, (1, 2), True, (4 + 4 + 4 + 4, 4 + 4)),  # a mean for every draw
    (4, (0, 2), False, (4 + 4 + 4 + 4 + 4, 0)),  # steps that do not follow on each other share no state
    (4, (2, 3), False, (4 + 4 + 4, 0)),  # the last draw is the end
])
def test_states_of_a_group_by_hand(roots, trained, keep_means, expected):
    schedule = Schedule(trained if roots == 4 else (1, 2), trained)
    exploration = RolloutSpec(shift_grid(4, 3.0), schedule, FlowSDE(), Euler(), 4, roots, keep_means=keep_means)
    assert memory._per_group(exploration) == expected


@pytest.mark.parametrize("layers, expected", [
    # Inputs of both layers and of the activation: 3 x (8 + 16 + 16) numbers; weights do not count.
    ([torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)], 4 * 3 * (8 + 16 + 16)),
    ([torch.nn.Sigmoid()], 4 * 3 * 8)])  # its own output
def test_activations_are_those_that_the_backward_reads_and_freed_at_once(layers, expected):
    inner, x = [], torch.ones(3, 8, requires_grad=True)
    def forward() -> torch.Tensor:
        output = torch.nn.Sequential(*layers)(x)
        inner.append(weakref.ref(output))
        return output.sum()
    gc.disable()  # a cycle would stay
    try:
        assert memory.activation_bytes(layers, forward) == expected and inner[0]() is None
    finally:
        gc.enable()


def test_guidance_doubles_the_activations_and_decoding_image_by_image_takes_as_much_as_one_and_the_images():
    plain, guided = (memory.memory(policy, tiny.config(), policy.encode(["red"]))["update"]["activations"]
                     for policy in (tiny.policy(guidance=guidance) for guidance in (1.0, 3.0)))
    assert 1.9 < guided / plain < 2.1
    whole, sliced = (memory.memory(policy, tiny.config(), policy.encode(["red"]))["decode"]["decoding"]
                     for policy in (tiny.policy(memory=Memory(vae=vae)) for vae in ("whole", "sliced")))
    rows, picture = geometry(tiny.config().train).micro_batch, 4 * 3 * 16 * 16
    assert rows > 1 and rows * picture < sliced < whole


def test_the_largest_number_of_bytes_at_a_time():
    x = torch.ones(1000)
    with memory.Peak() as seen:
        for _ in range(5):
            x = x * 2 + 1  # x, twice x, and the sum
        assert x.view(10, 100)[2:].shape == (8, 100)  # the same storage
    assert seen.most == 3 * 4000


def estimate(rows: int, share: float) -> float:
    """10 for the weights; of a row 4, or 1 where all blocks recompute."""
    return 10 + rows * (4 - 3 * share)


@pytest.mark.parametrize("room, shares, expected", [
    (100, (0.0, 0.5, 1.0), (8, 0.0)),
    (42, (0.0, 0.5, 1.0), (8, 0.0)),
    (41, (0.0, 0.5, 1.0), (4, 0.0)),
    (14, (0.0, 0.5, 1.0), (1, 0.0)),  # with checkpointing 2 would fit
    (13, (0.0, 0.5, 1.0), (1, 0.5)),
    (12, (0.0, 0.5, 1.0), (2, 1.0)),
    (10, (0.0, 0.5, 1.0), None),
    (30, (1.0,), (8, 1.0)),  # checkpointing: true in the recipe
])
def test_the_largest_micro_batch_with_the_least_checkpointing(room, shares, expected):
    assert choose([1, 2, 4, 8], shares, room, estimate) == expected


@pytest.mark.parametrize("train, processes, expected", [
    ({"prompts": 8, "group": 12}, 1, [1, 2, 4, 8, 16, 32, 64]),
    ({"prompts": 8, "group": 12}, 2, [1, 2, 4, 8, 16, 32]),
    ({"prompts": 4, "group": 4, "updates": 2}, 1, [1, 2, 4, 8]),  # 16 rows would be one part, for two updates
    ({"prompts": 8, "group": 12, "micro_batch": 6}, 1, [6]),
])
def test_micro_batches_are_powers_of_two_up_to_the_samples_of_a_process(train, processes, expected):
    options = {f"train__{key}": value for key, value in {"micro_batch": "auto", **train}.items()}
    assert micro_batches(tiny.config(**options), processes) == expected


def test_the_estimate_is_that_of_the_check_and_of_a_language_model_too():
    pipe, call = make("StableDiffusionPipeline")
    policy = PipelinePolicy(pipe, Adapter(rank=2), call=call)
    settings = tiny.config(method="ddpo", train__checkpointing="auto")
    estimated, shares = measure_estimate(settings, policy, Prompt("red"))
    assert shares == [0.0, 0.5, 1.0] and policy.checkpointing == 0 and policy.evaluations == 0
    plain, half, whole = (estimated(64, share) for share in shares)
    sizes = []
    for share in (0.0, 1.0):
        policy.checkpoint(share)
        phases = memory.memory(policy, tiny.config(method="ddpo", train__micro_batch=64), policy.encode(["red"]))
        sizes.append(max(sum(parts.values()) for parts in phases.values()))
    # The check does not count the block that recomputes, and here it is one of two.
    assert plain == sizes[0] == half > whole > sizes[1]
    settings = tiny_text.config(train__micro_batch="auto", train__checkpointing="auto")
    estimated, shares = measure_estimate(settings, tiny_text.policy(), Prompt("1+2="))
    assert len(shares) == 3 and estimated(64, 1.0) < estimated(64, 0.0) and estimated(64, 0.0) > estimated(1, 0.0)


def leave(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    """Let the host have so many bytes."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=size))
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: SimpleNamespace(rss=0))


def trained(settings: Any, resume: bool = False) -> Any:
    tiny_runs.whole(settings, resume=resume)
    return load(settings.folder / "config.yaml").train


def test_a_run_chooses_tells_writes_and_keeps_it(tmp_path, monkeypatch, capsys):
    policy = make_policy(tiny.config(), "cpu", tiny.sd3())
    estimated, _ = measure_estimate(tiny.config(train__checkpointing="auto"), policy, Prompt("red"))
    settings = tiny.config(tmp_path, train__micro_batch="auto", train__checkpointing="auto", train__epochs=1)
    leave(monkeypatch, 1.001 * estimated(4, 0.0) / 0.9)
    train = trained(settings)
    assert (train.micro_batch, train.checkpointing) == (4, False)
    said = capsys.readouterr().out
    assert "train.micro_batch: 4, train.checkpointing: false (auto: " in said and "; 8 would take " in said
    leave(monkeypatch, 1e12)
    longer = tiny.config(tmp_path, train__micro_batch="auto", train__checkpointing="auto", train__epochs=2)
    assert trained(longer, resume=True).micro_batch == 4 and "(auto: " not in capsys.readouterr().out


def test_free_memory_is_that_of_the_host_and_a_run_without_room_for_one_row_says_so(tmp_path, monkeypatch):
    assert 0 < free_memory("cpu") <= psutil.virtual_memory().total
    leave(monkeypatch, 100_000)  # for the generators of eight samples
    refused("^train.micro_batch 1 with train.checkpointing True takes .* GiB, and 90% of ", trained,
            tiny.config(tmp_path, train__micro_batch="auto", train__checkpointing="auto"))


METHODS: dict[str, dict[str, Any]] = {
    "mix_grpo": dict(method="mix_grpo", train__updates=2),
    # Scores of the reference are kept for the second pass, in batches.
    "flow_grpo": dict(method="flow_grpo", parts__kl={"weight": 0.04}, train__inner_epochs=2),
    "diffusion_nft": dict(method="diffusion_nft"),
}


def trainer(**options: Any) -> Trainer:
    made = tiny.trainer(**dict(train__lr=1e-3) | options)
    made.lines = []
    made.log = made.lines.append
    return made


CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand much more")
CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")


def refuse_above(made: Trainer, rows: int, when: Callable[[], bool], error: Exception = CUDA) -> None:
    """Let calls of the denoiser with more rows run out of memory, while `when()`."""
    def refuse(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if len(kwargs["hidden_states"]) > rows and when():
            raise error
    made.policy.pipe.transformer.register_forward_pre_hook(refuse, with_kwargs=True)


def epochs(made: Trainer, count: int = 2) -> dict[str, torch.Tensor]:
    tiny_runs.epochs(made, count)
    return made.policy.weights.snapshot()


assert_equal = functools.partial(tiny_runs.assert_same_weights, atol=1e-6)


def test_a_cpu_without_memory_takes_half_the_micro_batch():
    made = trainer(train__micro_batch=4, **METHODS["mix_grpo"])
    refuse_above(made, 2, lambda: True, CPU)
    assert_equal(epochs(made, 1), epochs(trainer(train__micro_batch=2, **METHODS["mix_grpo"]), 1))
    assert made.lines == ["out of memory in the rollout: train.micro_batch 4 -> 2 from here on"]


@pytest.mark.parametrize("phase", ["rollout", "update"])
@pytest.mark.parametrize("method", METHODS)
def test_the_weights_are_those_of_the_smaller_micro_batch_from_the_start(method, phase):
    expected = epochs(trainer(train__micro_batch=2, **METHODS[method]))
    made = trainer(train__micro_batch=4, **METHODS[method])
    # In the update only from its second step, or of the second epoch, on: what was done before stays.
    refuse_above(made, 2, lambda: torch.is_grad_enabled() and made.optimization.update > 0 if phase == "update"
                 else not torch.is_grad_enabled() and made.epoch > 0)
    learned = epochs(made)
    assert_equal(learned, expected)
    assert any(tensor.abs().max() > 0 for key, tensor in learned.items() if "lora_B" in key)
    assert made.lines == [f"out of memory in the {phase}: train.micro_batch 4 -> 2 from here on"]
    assert made.geometry.micro_batch == 2


def test_a_decoder_without_room_decodes_less_at_once(monkeypatch):
    expected = epochs(trainer(train__micro_batch=2), 1)
    made = trainer(train__micro_batch=4)
    decode = made.policy.decode
    def refusing(latents, conditioning):
        if len(latents) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return decode(latents, conditioning)
    monkeypatch.setattr(made.policy, "decode", refusing)
    assert_equal(epochs(made, 1), expected)
    assert made.lines == ["out of memory in the decode: train.micro_batch 4 -> 2 from here on"]


def test_an_evaluation_without_room_draws_less_at_once(tmp_path):
    found = []
    for size, full in ((1, False), (4, True)):
        made = trainer(train__micro_batch=size, eval__prompts=4, output=str(tmp_path))
        made.held_out = made.prompts[:4]
        refuse_above(made, 1, lambda full=full: full)
        found.append(held_out.measure_side(made, {"red": tiny.red}, "held-out"))
    assert found[0].scores["red"] == pytest.approx(found[1].scores["red"], abs=1e-6)
    assert made.lines == [f"out of memory in the evaluation: train.micro_batch {was} -> {was // 2} from here on"
                          for was in (4, 2)]


def test_without_room_for_a_single_row_the_run_says_what_to_change():
    made = trainer(train__micro_batch=2)
    refuse_above(made, 0, torch.is_grad_enabled)
    refused("^out of memory in the update with train.micro_batch 1 .CUDA out of memory.* GiB.: set train.checkpointing:"
            " true or another", made.run_epoch)
    assert made.lines == ["out of memory in the update: train.micro_batch 2 -> 1 from here on"]


@pytest.mark.parametrize("configured, expected", [(4, 2), (3, 3)])
def test_a_resumed_run_keeps_the_smaller_micro_batch(tmp_path, configured, expected):
    made, again = trainer(train__micro_batch=4), trainer(train__micro_batch=configured)
    made.geometry.micro_batch = 2
    made.epoch, made.progress.saved_counters = 1, state.counters(made) | {"epoch": 1}
    tiny_runs.resume(made, again, tmp_path)
    assert again.geometry.micro_batch == expected

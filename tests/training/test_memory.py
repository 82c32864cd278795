"""The memory that `check` foretells, against sizes worked by hand."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from flowgrpo.config.geometry import geometry
from flowgrpo.config.sections import Memory
from flowgrpo.samplers.grids import shifted
from flowgrpo.samplers.kernels import Euler, FlowSDE
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.training import memory, reward_memory
from tests.helpers import tiny


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
        sizes = reward_memory.reward_weights(config)
        assert sizes == {"pickscore": {"cpu": gib}}  # counted without reading the checkpoint
        counted = memory.memory(policy, config, conditioning, reward_memory.on_device(sizes, torch.device("cpu")))
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
    assert reward_memory.describe_rewards(sizes, config) == {
        "pickscore": "1.000 GiB on cuda:1, which it leaves after scoring", "hpsv3": "unknown",
        "safety": "0.250 GiB on cpu"}
    assert reward_memory.parts_that_leave(config) == ["text encoders", "reward models"]
    assert reward_memory.on_device(sizes, torch.device("cuda:1")) == 2**30
    assert reward_memory.on_device(sizes, torch.device("cuda")) == 0


@pytest.mark.parametrize("roots, trained, keep_means, expected", [
    (1, (1, 2), False, (1 + 4 + 4 + 4, 0)),  # x of the split, its four draws, theirs, the ends
    (4, (1, 2), False, (4 + 4 + 4 + 4, 0)),
    (4, (1, 2), True, (4 + 4 + 4 + 4, 4 + 4)),  # a mean for every draw
    (4, (0, 2), False, (4 + 4 + 4 + 4 + 4, 0)),  # steps that do not follow on each other share no state
    (4, (2, 3), False, (4 + 4 + 4, 0)),  # the last draw is the end
])
def test_states_of_a_group_by_hand(roots, trained, keep_means, expected):
    schedule = Schedule(trained if roots == 4 else (1, 2), trained)
    exploration = RolloutSpec(shifted(4, 3.0), schedule, FlowSDE(), Euler(), 4, roots, keep_means=keep_means)
    assert memory._per_group(exploration) == expected


def test_activations_are_those_that_the_backward_reads():
    layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    x = torch.ones(3, 8, requires_grad=True)
    # Inputs of both layers and of the activation: 3 x (8 + 16 + 16) numbers; weights do not count.
    assert memory.activation_bytes([layer], lambda: layer(x)) == 4 * 3 * (8 + 16 + 16)


def test_what_the_backward_reads_is_freed_at_once():
    layer, inner = torch.nn.Linear(8, 8), []
    def forward() -> torch.Tensor:
        output = layer(torch.ones(3, 8)).exp()
        inner.append(weakref.ref(output))
        return output
    collecting = gc.isenabled()
    gc.disable()  # a cycle would stay
    try:
        assert memory.activation_bytes([layer], lambda: forward().sum()) > 0 and inner[0]() is None
    finally:
        if collecting:
            gc.enable()


def test_guidance_doubles_the_activations():
    plain, guided = (memory.memory(policy, tiny.config(), policy.encode(["red"]))["update"]["activations"]
                     for policy in (tiny.policy(guidance=guidance) for guidance in (1.0, 3.0)))
    assert 1.9 < guided / plain < 2.1


def test_the_largest_number_of_bytes_at_a_time():
    x = torch.ones(1000)
    with memory.Peak() as seen:
        for _ in range(5):
            x = x * 2 + 1  # x, twice x, and the sum
        assert x.view(10, 100)[2:].shape == (8, 100)  # the same storage
    assert seen.most == 3 * 4000


def test_decoding_image_by_image_takes_as_much_as_one_and_the_images():
    whole, sliced = (memory.memory(policy, tiny.config(), policy.encode(["red"]))["decode"]["decoding"]
                     for policy in (tiny.policy(memory=Memory(vae=vae)) for vae in ("whole", "sliced")))
    rows, picture = geometry(tiny.config().train).micro_batch, 4 * 3 * 16 * 16
    assert rows > 1 and rows * picture < sliced < whole


def test_measured_activations_are_freed():
    x, outputs = torch.ones(4, requires_grad=True), []
    def forward():
        output = x.sigmoid()  # keeps its own output
        outputs.append(weakref.ref(output))
        return output.sum()
    gc.disable()
    try:
        assert memory.activation_bytes([], forward) == 16 and outputs[0]() is None
    finally:
        gc.enable()

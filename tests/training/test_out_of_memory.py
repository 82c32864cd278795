"""Out of memory in a run: the phase is repeated with half the micro-batch, to the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowgrpo.errors import UserError
from flowgrpo.evaluation import held_out
from flowgrpo.train import Trainer
from flowgrpo.training import state
from tests.helpers import tiny

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
    for made.epoch in range(count):
        made.metrics = made.run_epoch()
    return made.policy.weights.snapshot()


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(tensor, other[key], rtol=0, atol=1e-6)


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
    for size, refused in ((1, False), (4, True)):
        made = trainer(train__micro_batch=size, eval__prompts=4, output=str(tmp_path))
        made.held_out = made.prompts[:4]
        refuse_above(made, 1, lambda refused=refused: refused)
        found.append(held_out._measure(made, {"red": tiny.red}, "held-out"))
    assert found[0].scores["red"] == pytest.approx(found[1].scores["red"], abs=1e-6)
    assert made.lines == [f"out of memory in the evaluation: train.micro_batch {was} -> {was // 2} from here on"
                          for was in (4, 2)]


def test_without_room_for_a_single_row_the_run_says_what_to_change():
    made = trainer(train__micro_batch=2)
    refuse_above(made, 0, torch.is_grad_enabled)
    with pytest.raises(UserError, match="^out of memory in the update with train.micro_batch 1 .CUDA out of memory.* "
                                        "GiB.: set train.checkpointing: true or another"):
        made.run_epoch()
    assert made.lines == ["out of memory in the update: train.micro_batch 2 -> 1 from here on"]


@pytest.mark.parametrize("configured, expected", [(4, 2), (3, 3)])
def test_a_resumed_run_keeps_the_smaller_micro_batch(tmp_path, configured, expected):
    made = trainer(train__micro_batch=4)
    made.geometry.micro_batch = 2
    made.epoch, made.progress.saved_counters = 1, state.counters(made) | {"epoch": 1}
    state.save(made, tmp_path)
    again = trainer(train__micro_batch=configured)
    state.restore(again, tmp_path / "checkpoints" / "epoch-00001")
    assert again.geometry.micro_batch == expected

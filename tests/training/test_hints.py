"""Hints: each on its condition, once, with the numbers."""

from __future__ import annotations

import pytest
import torch

from flowgrpo import device
from flowgrpo.advantages.group import Advantage
from flowgrpo.advantages.reward_weights import Influence
from flowgrpo.training import hints
from tests.helpers import tiny


def test_one_reward_that_never_varies_and_one_of_another_scale_are_named_once(capsys):
    def large(images, prompts):
        return [float(1000 * (i % 4)) for i in range(len(prompts))]

    def small(images, prompts):
        return [0.25 * (i % 4) for i in range(len(prompts))]

    def constant(images, prompts):
        return [0.5] * len(prompts)

    functions = {"large": large, "small": small, "constant": constant}
    trainer = tiny.trainer(rewards=functions, reward={"large": 1.0, "small": 2.0, "constant": 1.0}, train__group=4,
                           parts={"advantage": {"type": "Advantage", "order": "rewards"}})
    lines: list[str] = []
    trainer.say = lines.append
    for trainer.epoch in range(2):
        trainer.run_epoch()
    silent, scale = [line for line in lines if "reward" in line]
    assert silent == ("epoch 1: reward 'constant' is the same for all samples of every group (mean 0.5), so that it "
                      "teaches nothing")
    # deviations of 0, 1, 2, 3: 1.291; times 1000, and 0.25 with the weight 2
    assert scale.startswith("epoch 1: reward 'large' varies by 1.29e+03 within groups and 'small' by 0.645, weights")


@pytest.mark.parametrize("rule, expected", [
    (Advantage(), False), (Advantage(order="gdpo"), False), (Advantage(order="rewards"), True),
    (Advantage(scale="none"), True), (Influence(), False)])
def test_rules_that_add_rewards_of_any_scale(rule, expected):
    assert hints.adds(rule) is expected


def test_bf16_that_a_cpu_emulates_is_named_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(hints, "bf16_speed", lambda: 0.28)
    [line] = hints.of_machine("bf16", "cpu")
    assert "multiplies it 0.28 times as fast as fp32: --precision=fp32" in line
    assert [*hints.of_machine("auto", "cpu"), *hints.of_machine("fp32", "cpu"), *hints.of_machine("bf16", "cuda")] == []
    monkeypatch.setattr(hints, "bf16_speed", lambda: 4.0)
    assert [*hints.of_machine("bf16", "cpu")] == []
    assert device.bf16_speed() > 0


@pytest.mark.parametrize("threads, cores, load, hinted", [
    (1, 2, 9.0, None), (2, 2, 0.4, None), (2, 2, 1.2, "2 threads, but of 2 cores 1 is free (load 1.2)"),
    (16, 4, 0.0, "OMP_NUM_THREADS=4"), (8, 16, 6.0, None)])
def test_more_threads_than_free_cores(threads, cores, load, hinted):
    line = hints.busy(threads, cores, load)
    assert (line is None) if hinted is None else hinted in line


@pytest.mark.parametrize("quota, most", [("100000 100000", 1), ("50000 100000", 1), ("max 100000", 10**6)])
def test_cores_of_a_container_are_its_quota(tmp_path, quota, most):
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert hints.available_cores(tmp_path / "cpu.max") == min(most, hints.available_cores(tmp_path / "none"))

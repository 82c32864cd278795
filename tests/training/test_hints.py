"""Hints on a machine: each on its condition, with the numbers."""

from __future__ import annotations

import torch

from flowgrpo import device
from flowgrpo.training import hints


def test_bf16_that_a_cpu_emulates_is_named_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(hints, "bf16_speed", lambda: 0.28)
    [line] = hints.of_machine("bf16", "cpu")
    assert "multiplies it 0.28 times as fast as fp32: --precision=fp32" in line
    assert [*hints.of_machine("auto", "cpu"), *hints.of_machine("fp32", "cpu"), *hints.of_machine("bf16", "cuda")] == []
    monkeypatch.setattr(hints, "bf16_speed", lambda: 4.0)
    assert [*hints.of_machine("bf16", "cpu")] == []
    assert device.bf16_speed() > 0

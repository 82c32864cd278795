"""Hints on a machine: each on its condition, with the numbers."""

from __future__ import annotations

import pytest
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

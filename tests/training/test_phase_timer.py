"""Seconds of phases: of the host, and between events of a GPU, whose calls are patched here."""

from __future__ import annotations

import time

import pytest
import torch

from flowgrpo.log import PhaseTimer


def test_without_a_gpu_phases_take_the_hosts_seconds(monkeypatch):
    now = iter([1.0, 3.0, 10.0, 10.5, 20.0, 20.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = PhaseTimer()
    for phase in ("rollout", "update", "rollout"):
        with clock(phase):
            pass
    assert clock.pop() == {"seconds/rollout": 2.25, "seconds/update": 0.5} and clock.pop() == {}


def test_on_a_gpu_phases_take_the_seconds_between_its_events_and_wait_once(monkeypatch):
    """The host queues work of 1, 2, 4 and 8 s and waits for none of it; a phase that raises counts too."""
    gpu, waits = [0.0], []
    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            self.at = gpu[0]

        def synchronize(self) -> None:
            waits.append(self.at)

        def elapsed_time(self, end: Event) -> float:
            return 1000 * (end.at - self.at)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = PhaseTimer(events=True)
    for phase, seconds in (("rollout", 1), ("decode", 2), ("rollout", 4)):
        with clock(phase):
            gpu[0] += seconds
    with pytest.raises(ArithmeticError), clock("update"):
        gpu[0] += 8
        raise ArithmeticError
    assert waits == []
    assert clock.pop() == {"seconds/rollout": 5, "seconds/decode": 2, "seconds/update": 8}
    assert waits == [15] and clock.pop() == {}

"""Throughput of an epoch and seconds of its phases by hand, and FLOPs that are counted once."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flowgrpo.log import PhaseTimer
from flowgrpo.training import throughput
from flowgrpo.training.throughput import FlopMeter, Throughput, peak
from tests.helpers import tiny


@pytest.mark.parametrize("name, half, single", [
    ("NVIDIA A100-SXM4-80GB", 312, 19.5), ("NVIDIA H100 80GB HBM3", 989, 67), ("NVIDIA H100 PCIe", 756, 51),
    ("NVIDIA H200", 989, 67), ("NVIDIA B200", 2250, 75), ("NVIDIA GeForce RTX 4090", 165, 82.6),
    ("NVIDIA GeForce RTX 5090", 210, 105), ("NVIDIA A10", 125, 31.2), ("NVIDIA GeForce RTX 3090", 71, 35.6),
    ("NVIDIA RTX 6000 Ada Generation", 364, 91.1), ("NVIDIA RTX A6000", 155, 38.7),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 504, 125),
    *((other, None, None) for other in ("Tesla T4", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D",
                                        "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A16",
                                        "NVIDIA GeForce RTX 3090 Ti"))])
def test_peaks_are_found_by_the_devices_name(name, half, single):
    found = [peak(name, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    assert found == [each and each * 1e12 for each in (half, half, single)]


class Net(torch.nn.Module):
    """A frozen layer of 4 x 8 between trained scales: 64 FLOPs a row."""

    def __init__(self):
        super().__init__()
        self.scale, self.layer = torch.nn.Parameter(torch.ones(4)), torch.nn.Linear(4, 8).requires_grad_(False)

    def forward(self, states, fails=False):
        if fails:
            raise ArithmeticError
        return (self.layer(states * self.scale),)


def test_flops_of_a_row_are_counted_once_and_backwards_are_forwards():
    net = Net()
    meter = FlopMeter([net], backward=1)
    with pytest.raises(ArithmeticError):
        net(torch.ones(2, 4), fails=True)
    with torch.no_grad():
        net(torch.ones(3, 4))
        assert meter.total == 3 * 64
        net(states=torch.ones(5, 4))
    assert meter.total == 8 * 64
    net(torch.ones(2, 4))  # its graph is dropped
    net(torch.ones(2, 4))[0].sum().backward()
    assert meter.total == (8 + 2 + 2 + 2) * 64


@pytest.mark.parametrize("make", [tiny.sd3, tiny.flux])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_flops_of_an_epoch_are_those_of_its_evaluations_and_backwards(make, checkpointing):
    """2 rows of a shared first step and 8 of 5 others; the first two are replayed for the first ratio, and trained."""
    trainer = tiny.trainer(tiny.policy(make(), checkpointing=checkpointing), parts__plan__size=2)
    [denoiser] = trainer.policy.denoisers.values()
    conditioning = trainer.policy.encode(["red"])  # its trials of the pipeline are no evaluations
    meter = FlopMeter([denoiser], backward=1)
    trainer.run_epoch()
    assert trainer.policy.evaluations == 42 + 10 + 10
    per_row, others = meter.total / (62 + 10), meter.total
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        trainer.policy.generate(conditioning, trainer.policy.generators([0]), 2, 1.0, "latent")
    assert meter.total - others == pytest.approx(2 * per_row)
    assert counter.get_total_flops() == pytest.approx(2 * per_row, rel=1e-3)


def meter_of(trainer) -> Throughput:
    return Throughput(trainer.config, trainer.policy, trainer.processes)


def test_an_epochs_throughput_by_hand(monkeypatch):
    """4 seconds: 16 samples, 96 evaluations in this process, and a half of the peak."""
    now = iter([10.0, 14.0])
    monkeypatch.setattr(throughput, "perf_counter", lambda: next(now))
    trainer, sampled = tiny.trainer(), iter([8, 24])
    measured = meter_of(trainer)
    measured.meter, measured.peak = FlopMeter([], 1), 500.0
    with measured.epoch(lambda: next(sampled)) as found:
        trainer.policy.evaluations += 96
        measured.meter.total += 1000
        found["loss"] = 1.0
    assert found.pop("memory/host") > 0
    assert found == {"loss": 1.0, "samples_per_second": 4, "evaluations_per_second": 24, "mfu": 0.5}


def test_a_gpus_peaks_are_those_of_the_epoch(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", calls.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 7)
    measured = meter_of(tiny.trainer())
    measured.device = torch.device("cuda:0")
    with measured.epoch(lambda: 0) as found:
        calls.append("run")
    assert calls == [torch.device("cuda:0"), "run"]
    assert (found["memory/allocated"], found["memory/reserved"]) == (5, 7) and "memory/host" not in found


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

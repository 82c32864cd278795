"""Benchmark of scripts/: an epoch's overhead."""

import sys
from pathlib import Path

from tests.helpers import tiny

sys.path.append(str(Path(__file__).parent.parent / "scripts" / "measure"))

import bench_overhead  # noqa: E402


def test_an_epochs_calls_of_the_denoiser_are_recorded_and_run_again():
    trainer = tiny.trainer(parts__plan__size=2, train__micro_batch=8)
    bench_overhead.epoch(trainer)  # looks at the first ratio
    before = trainer.policy.evaluations
    calls = bench_overhead.recorded(trainer)
    # 6 steps and the replay of a window of 2, in one batch each.
    assert [backward for *_, backward in calls] == [False] * 6 + [True] * 2
    spent = trainer.policy.evaluations - before
    bench_overhead.bare(trainer, calls)
    assert trainer.policy.evaluations - before == 2 * spent


def test_calls_behind_a_trained_text_encoder_have_backwards_too():
    trainer = tiny.trainer(method="mix_grpo+texforce", parts__plan__size=2, train__micro_batch=8)
    bench_overhead.epoch(trainer)
    calls = bench_overhead.recorded(trainer)
    assert any(backward for *_, backward in calls)
    bench_overhead.bare(trainer, calls)

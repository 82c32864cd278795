"""Choice of a sweep, from the files of its runs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from flowgrpo.bench.collect import best_factors

PUBLISHED, LOW, HIGH = (1.0, 1.0), (1 / 3, 1.0), (3.0, 1.0)


@pytest.fixture
def sweep(tmp_path):
    """Return a function: (factors, seed, accuracy, ...) to finished runs of a method; an accuracy of None is a failed
    one."""
    def made(*given, label="ddpo"):
        for (lr, clip), seed, accuracy in given:
            folder = tmp_path / f"{label}-{lr:.2f}-{clip:.2f}-{seed}"
            folder.mkdir()
            run = SimpleNamespace(entry=SimpleNamespace(label=label), seed=seed, lr=lr, clip=clip, folder=folder,
                                  result=folder / "result.json")
            if accuracy is not None:
                run.result.write_text("{}")
                (folder / "summary.json").write_text(json.dumps({"after": {"scene": accuracy}}))
            yield run
    return made


@pytest.mark.parametrize("given, chosen", [
    ([(PUBLISHED, 3, 0.5), (LOW, 3, 0.4), (HIGH, 3, 0.6)], HIGH),  # before its confirmation
    ([(PUBLISHED, 3, 0.5), (LOW, 3, 0.5), (HIGH, 3, 0.5)], PUBLISHED),  # the first among equals
    ([(PUBLISHED, 3, 0.5), (HIGH, 3, 0.6), (HIGH, 4, 0.5), (HIGH, 5, 0.5)], HIGH),  # a mean of 0.53
    ([(PUBLISHED, 3, 0.5), (HIGH, 3, 0.6), (HIGH, 4, 0.0), (HIGH, 5, 0.7)], PUBLISHED),  # 0.43: one seed fell
    ([(PUBLISHED, 3, 0.5), (LOW, 3, 0.55), (HIGH, 3, 0.6), (HIGH, 4, 0.0)], PUBLISHED),  # the second is not confirmed
    ([(HIGH, 5, 0.9), (HIGH, 4, 0.8), (PUBLISHED, 3, 0.6), (HIGH, 3, 0.5)], PUBLISHED),  # the first seed chooses
    ([(PUBLISHED, 3, None), (LOW, 3, 0.2), (HIGH, 3, 0.1)], LOW),  # nothing to compare with
])
def test_a_winner_is_the_first_seeds_and_stays_if_its_mean_is_above_the_published_setting(sweep, given, chosen):
    assert best_factors([*sweep(*given)], "scene") == {"ddpo": pytest.approx(chosen)}


def test_methods_without_a_finished_run_are_absent(sweep):
    runs = [*sweep((PUBLISHED, 3, None)), *sweep((PUBLISHED, 3, 0.5), label="refl")]
    assert best_factors(runs, "scene") == {"refl": PUBLISHED}

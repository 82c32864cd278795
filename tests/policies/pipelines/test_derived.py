"""Pipelines that have the parts of others, ModularPipelines among them: each is checked and trains an epoch.

The one thing that is known of each is its row in tiny/derived.py.
"""

import pytest

from flowgrpo.tools.check import report, tiny
from flowgrpo.tools.check.tiny import derived
from scripts.docs import build_pipelines
from scripts.docs.build_pipelines import epoch
from tests.helpers.tiny import UNFIT

CLASSES = sorted({*derived.FACTORIES} - {*UNFIT})


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_replays_exactly_and_its_gradient_is_right(name):
    told = report.report(name)
    assert told["supported"], told["reason"]
    assert told["replay_error"] <= 1e-6 and told["first_log_ratio"] <= 1e-6 and told["gradient_error"] <= 0.01


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_trains_an_epoch(name):
    """On README's own reward; the first log-ratio of the epoch is below 1e-6 too."""
    assert epoch(*tiny.make(name)) is None


def test_the_page_counts_what_it_has_and_reaches_the_bounds():
    """A row without the double dagger is a class whose epoch ran for the page."""
    page = build_pipelines.TARGET.read_text(encoding="utf-8")
    counted = build_pipelines.counts(page, build_pipelines.live())
    for each, (done, of) in counted.items():
        assert f"{done} of {of} {build_pipelines.NOUNS[each]}" in page
    assert counted["base"][0] >= 60 and counted["modular"][0] >= 30 and counted["others"][0] >= 25


def test_the_page_is_read_as_it_was_written():
    rows = build_pipelines.of_page(build_pipelines.TARGET.read_text(encoding="utf-8"))
    body = build_pipelines.table(rows, build_pipelines.live())
    assert body in build_pipelines.TARGET.read_text(encoding="utf-8")


def test_every_pipeline_class_has_one_count():
    kinds = {name: build_pipelines.kind(name) for name in (
        "FluxPipeline", "FluxModularPipeline", "FluxControlNetPipeline", "WanImageToVideoPipeline", "WanPipeline")}
    assert [*kinds.values()] == ["base", "modular", "others", "others", "base"]

"""Length of the path of an epoch: files, classes and moves between files, at most as many as listed here.

`python scripts/measure/trace_epoch.py` prints the numbers. The list may only shrink.
"""

import inspect
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import concepts_code
import pytest

from flowgrpo.distributed import signals
from flowgrpo.distributed.signals import Stop
from tests.helpers.threads import one_thread

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "measure"))

from common import make_trainer  # noqa: E402
from trace_epoch import Trace, configuration, traced  # noqa: E402

# Of a starter's recipe and a method, or None for the recipe's own: files, classes and moves of a run's second epoch.
# Counted by Python 3.11; later versions count fewer moves, since they enter no frame for a comprehension.
MOST = {("starter", None): (48, 44, 757),
        ("starter", "mix_grpo"): (47, 44, 647),
        ("starter", "flow_grpo"): (52, 47, 1107),
        ("starter_text", None): (40, 32, 349)}


@pytest.mark.parametrize("recipe, method", [pytest.param(*key, marks=[pytest.mark.fast] if key[1] is None else [])
                                            for key in MOST])
def test_an_epoch_enters_no_more_files_and_classes_than_listed(recipe, method):
    with one_thread():
        trace = traced(configuration(recipe, method))
    assert trace.files["train.py"] and "Trainer" in {entered.__name__ for entered in trace.classes}
    assert all(found <= most for found, most in zip(trace.counts, MOST[recipe, method])), trace.counts


def test_the_way_of_an_image_is_that_of_the_page():
    """The functions of docs/concepts are first called in the page's order."""
    codes = {inspect.unwrap(concepts_code.locate(place)).__code__: place for place, _ in concepts_code.WAY[2:]}
    seen = dict[str, None]()

    def profile(frame, event, argument):
        if event == "call" and frame.f_code in codes:
            seen.setdefault(codes[frame.f_code])

    trainer = make_trainer(configuration())
    with one_thread():
        trainer.run_epoch()  # which encodes the prompts too
        trainer.epoch += 1
        sys.setprofile(profile)
        try:
            trainer.run_epoch()
        finally:
            sys.setprofile(None)
    assert list(seen) == [place for place, _ in concepts_code.WAY[2:]]


def test_waiting_for_a_slow_reward_adds_nothing():
    trace, stop, future = Trace(), Stop(), Future[int]()
    threading.Timer(3 * signals.TICK, future.set_result, [1]).start()
    sys.setprofile(trace)
    try:
        signals.result(future, stop.check)
    finally:
        sys.setprofile(None)
    assert trace.counts == (1, 0, 1)


def test_the_first_epoch_of_a_run_is_longer_than_its_second():
    config = configuration("starter_text")
    with one_thread():
        assert traced(config, first=True).counts > traced(config).counts

"""Samples that lie on a GPU: who gets them there, who a copy, and how another thread takes them over.

Tensors of the meta device stand for those of a GPU.
"""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from flowgrpo import device, rewards
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.distributed.processes import Processes
from flowgrpo.distributed.signals import Stop
from flowgrpo.rewards import Batch, differentiable
from flowgrpo.rewards.reward import as_reward
from flowgrpo.rollouts import denoising
from flowgrpo.training.sampling import Scorer
from flowgrpo.training.scoring import Scoring
from tests.helpers import tiny
from tests.helpers.syncs import META, HostSyncs


class Seeing:
    """Reward that keeps what it was given."""

    def __init__(self, place: str, follows: bool = True):
        self.device, self.differentiable, self.seen = place, follows, []

    def __call__(self, images, prompts):
        self.seen.append(images)
        return [0.0] * len(prompts)


def images(where: str | torch.device = META) -> torch.Tensor:
    return torch.ones(2, 3, 4, 4, device=where)


def scored(functions: dict, shown: torch.Tensor, times: int = 2) -> int:
    """Number of copies to the host of some calls."""
    with HostSyncs() as host:
        for _ in range(times):
            rewards.score(functions, shown, ["a", "b"], [{}, {}])
    return sum(count for place, count in host.waits.items() if place.startswith("to the host"))


def test_a_reward_on_their_device_gets_the_very_samples_and_others_share_one_copy():
    near, far, plain = Seeing("meta"), Seeing("cuda:1"), Seeing("meta", follows=False)
    functions = rewards.compose({name: WatchRule() for name in ("near", "far", "plain")},
                                given={"near": near, "far": far, "plain": plain})
    shown = images()
    assert scored(functions, shown) == 2  # one per call
    assert near.seen[1] is shown and near.seen[0].device == META  # the first is a copy: it might write there
    for other in (far, plain):
        assert [each.device.type for each in other.seen] == ["cpu", "cpu"]
    assert scored({"near": functions["near"]}, shown) == 0
    on_cpu = images("cpu")
    assert scored(functions, on_cpu) == 0 and far.seen[-1] is on_cpu


def test_a_reward_that_compares_with_the_base_gets_both_on_the_cpu():
    @differentiable
    def apart(images, prompts, base):
        return (images - base).flatten(1).sum(1)

    apart.device = "meta"
    with HostSyncs():
        view = Batch(images(), ["a", "b"], [{}, {}], base=images("cpu")).view_for("apart", as_reward(apart))
    assert view.samples.device == view.base.device


@pytest.mark.parametrize("place, behind, stays", [("meta", False, True), ("meta", True, False), ("cpu", False, False)])
def test_samples_wait_on_their_device_for_a_reward_there_that_is_not_behind(place, behind, stays):
    scoring, shown = Scoring({"seeing": Seeing(place)}, {"seeing": 1.0}, 2, Processes()), images()
    with HostSyncs():
        found = scoring.where_read(shown, behind)
    assert (found is shown) == stays and found.device.type == ("meta" if stays else "cpu")
    assert scoring.where_read(["a text"], behind) == ["a text"] and scoring.where_read(None, behind) is None


class OnGpu(TorchFunctionMode):
    """Inside, all tensors are said to be on a GPU, and copies to the CPU are counted."""

    copies = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function == torch.Tensor.is_cuda.__get__:
            return True
        self.copies += function is torch.Tensor.cpu
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("most, copies", [(2**28, 0), (100, 2)])
def test_decoded_images_stay_where_they_are_few(most, copies, monkeypatch):
    made = tiny.trainer(train__micro_batch=2, train__group=4)
    monkeypatch.setattr(denoising, "ON_DEVICE", most)
    conditioning = made.rollouts.conditioning([made.prompts[0]]).rows(torch.zeros(4, dtype=torch.int64))
    finals = torch.randn(4, *tiny.LATENTS)
    alone = made.rollouts.decode(finals, conditioning)
    with OnGpu() as seen:
        found = made.rollouts.decode(finals, conditioning)
    assert seen.copies == copies and torch.equal(found, alone)


# --- another thread --------------------------------------------------------------------------------------------------
class Far(torch.Tensor):
    """Tensor that is said to be on a GPU; the streams that keep its memory."""

    is_cuda, kept = True, []

    def record_stream(self, stream):
        self.kept.append(stream)


def test_another_thread_waits_for_the_gpus_work_on_a_stream_of_its_own(monkeypatch):
    device.second_stream.cache_clear()
    done, current, first = [], threading.local(), SimpleNamespace(device="cuda:1")
    current.stream = first

    def event(blocking):
        assert blocking
        return SimpleNamespace(record=lambda: done.append(("recorded", current.stream)),
                               synchronize=lambda: done.append(("waited", current.stream)))

    for name, value in {"is_initialized": lambda: True, "Event": event, "Stream": lambda gpu: f"second of {gpu}",
                        "set_stream": lambda chosen: setattr(current, "stream", chosen),
                        "current_stream": lambda device=None: current.stream}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    shown, near = torch.ones(2).as_subclass(Far), torch.ones(2)
    with Scorer(Stop(), waits=True) as scorer:
        assert not scorer.behind
        future = scorer.submit(lambda *given: done.append("scored") or given[0], shown, near, ["a text"])
        assert scorer.behind and done == [("recorded", first)]
        [found] = scorer.results([future])
    second = "second of cuda:1"
    assert found is shown and done == [("recorded", first), ("waited", second), "scored"] and Far.kept == [second]
    device.second_stream.cache_clear()


def test_without_a_gpu_nothing_is_waited_for():
    shown = torch.ones(2)
    assert device.hand_over(lambda *given: given, shown, 3)() == (shown, 3)
    assert device.current_stream() is None

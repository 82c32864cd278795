"""Rewards run in threads, and every new thread begins on the first GPU: they are put on that of their process.

The calls of torch.cuda are replaced, as there need not be a GPU here.
"""

import threading

import pytest
import torch

from flowgrpo.rewards.failures import within
from flowgrpo.rewards.local_model import resolve_device
from flowgrpo.training import sampling
from tests.helpers import tiny


@pytest.fixture
def chosen(monkeypatch) -> dict[int, int]:
    """The GPU of every thread, by its identity, as torch.cuda would keep it; the main thread's is the fourth."""
    gpus = {threading.get_ident(): 3}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpus.get(threading.get_ident(), 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: gpus.update({threading.get_ident(): index}))
    return gpus


def test_a_reward_is_placed_on_its_processs_gpu(chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device(None) == "cuda:3" and resolve_device("cuda:1") == "cuda:1" and resolve_device("cpu") == "cpu"


def test_a_call_with_a_time_limit_is_made_on_its_callers_gpu(chosen):
    assert within(60, "it", torch.cuda.current_device) == within(None, "it", torch.cuda.current_device) == 3


def test_the_thread_that_scores_is_on_its_processs_gpu(chosen):
    seen = []
    def score(images, prompts):
        seen.append((threading.get_ident(), torch.cuda.current_device()))
        return images[:, 0].mean((1, 2))
    trainer = tiny.trainer(rewards={"red": score})
    sampling.sample(trainer, trainer.prompts[:2])
    assert {gpu for _, gpu in seen} == {3} and threading.get_ident() not in dict(seen)


def test_without_cuda_no_thread_asks_for_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: pytest.fail("a GPU was asked for"))
    assert within(60, "it", lambda: 1) == 1

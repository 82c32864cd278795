"""Micro-batch and checkpointing of `auto`: the choice by hand, and a run that makes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from flowgrpo.config.parse import load
from flowgrpo.config.sections import Adapter
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import free_memory
from flowgrpo.errors import UserError
from flowgrpo.policies.build import make_policy
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.run import run
from flowgrpo.tools.check.tiny import make
from flowgrpo.training import memory
from flowgrpo.training.batch_size import Choice, choose, measure_estimate, micro_batches
from tests.helpers import tiny, tiny_text


def estimate(rows: int, share: float) -> float:
    """10 for the weights; of a row 4, or 1 where all blocks recompute."""
    return 10 + rows * (4 - 3 * share)


@pytest.mark.parametrize("room, shares, expected", [
    (100, (0.0, 0.5, 1.0), Choice(8, 0.0, 42.0)),
    (42, (0.0, 0.5, 1.0), Choice(8, 0.0, 42.0)),
    (41, (0.0, 0.5, 1.0), Choice(4, 0.0, 26.0)),
    (14, (0.0, 0.5, 1.0), Choice(1, 0.0, 14.0)),  # with checkpointing 2 would fit
    (13, (0.0, 0.5, 1.0), Choice(1, 0.5, 12.5)),
    (12, (0.0, 0.5, 1.0), Choice(2, 1.0, 12.0)),
    (10, (0.0, 0.5, 1.0), None),
    (30, (1.0,), Choice(8, 1.0, 18.0)),  # checkpointing: true in the recipe
])
def test_the_largest_micro_batch_with_the_least_checkpointing(room, shares, expected):
    assert choose([1, 2, 4, 8], shares, room, estimate) == expected


@pytest.mark.parametrize("train, processes, expected", [
    ({"prompts": 8, "group": 12}, 1, [1, 2, 4, 8, 16, 32, 64]),
    ({"prompts": 8, "group": 12}, 2, [1, 2, 4, 8, 16, 32]),
    ({"prompts": 4, "group": 4, "updates": 2}, 1, [1, 2, 4, 8]),  # 16 rows would be one part, for two updates
    ({"prompts": 8, "group": 12, "micro_batch": 6}, 1, [6]),
])
def test_micro_batches_are_powers_of_two_up_to_the_samples_of_a_process(train, processes, expected):
    options = {f"train__{key}": value for key, value in {"micro_batch": "auto", **train}.items()}
    assert micro_batches(tiny.config(**options), processes) == expected


def test_the_estimate_is_that_of_the_check():
    pipe, call = make("StableDiffusionPipeline")
    policy = PipelinePolicy(pipe, Adapter(rank=2), call=call)
    settings = tiny.config(method="ddpo", train__checkpointing="auto")
    estimated, shares = measure_estimate(settings, policy, Prompt("red"))
    assert shares == [0.0, 0.5, 1.0] and policy.checkpointing == 0 and policy.evaluations == 0
    plain, half, whole = (estimated(64, share) for share in shares)
    sizes = []
    for share in (0.0, 1.0):
        policy.checkpoint(share)
        phases = memory.memory(policy, tiny.config(method="ddpo", train__micro_batch=64), policy.encode(["red"]))
        sizes.append(max(sum(parts.values()) for parts in phases.values()))
    # The check does not count the block that recomputes, and here it is one of two.
    assert plain == sizes[0] == half > whole > sizes[1]


def test_a_language_model_is_measured_too():
    settings = tiny_text.config(train__micro_batch="auto", train__checkpointing="auto")
    estimated, shares = measure_estimate(settings, tiny_text.policy(), Prompt("1+2="))
    assert len(shares) == 3 and estimated(64, 1.0) < estimated(64, 0.0) and estimated(64, 0.0) > estimated(1, 0.0)


def leave(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    """Let the host have so many bytes."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=size))
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: SimpleNamespace(rss=0))


def trained(settings: Any, resume: bool = False) -> Any:
    run(settings, resume, pipe=tiny.sd3(), functions={"red": tiny.red}, prompts=[Prompt(text) for text in tiny.PROMPTS])
    return load(settings.folder / "config.yaml").train


def test_a_run_chooses_tells_writes_and_keeps_it(tmp_path, monkeypatch, capsys):
    policy = make_policy(tiny.config(), "cpu", tiny.sd3())
    estimated, _ = measure_estimate(tiny.config(train__checkpointing="auto"), policy, Prompt("red"))
    settings = tiny.config(tmp_path, train__micro_batch="auto", train__checkpointing="auto", train__epochs=1)
    leave(monkeypatch, 1.001 * estimated(4, 0.0) / 0.9)
    train = trained(settings)
    assert (train.micro_batch, train.checkpointing) == (4, False)
    said = capsys.readouterr().out
    assert "train.micro_batch: 4, train.checkpointing: false (auto: " in said and "; 8 would take " in said
    leave(monkeypatch, 1e12)
    longer = tiny.config(tmp_path, train__micro_batch="auto", train__checkpointing="auto", train__epochs=2)
    assert trained(longer, resume=True).micro_batch == 4 and "(auto: " not in capsys.readouterr().out


def test_a_run_without_room_for_one_row_says_so(tmp_path, monkeypatch):
    leave(monkeypatch, 100_000)  # for the generators of eight samples
    with pytest.raises(UserError, match="^train.micro_batch 1 with train.checkpointing True takes .* GiB, and 90% of "):
        trained(tiny.config(tmp_path, train__micro_batch="auto", train__checkpointing="auto"))


def test_free_memory_is_at_most_that_of_the_host():
    assert 0 < free_memory("cpu") <= psutil.virtual_memory().total

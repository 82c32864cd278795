"""Dry runs of a model of image tokens: its counts against those of the model itself, and the packaged recipe."""

import json

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flowgrpo.cli import main
from flowgrpo.config import load
from flowgrpo.errors import UserError
from flowgrpo.gpus import GPUS
from flowgrpo.policies import build
from flowgrpo.published import LANGUAGE
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.tools.dry_run import fit, tokens
from flowgrpo.tools.dry_run.meta_gpu import MetaGPU
from tests.helpers import tiny_vision


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with the config.json of the tiny Janus alone."""
    folder = tmp_path_factory.mktemp("janus")
    tiny_vision.janus()[0].config.save_pretrained(folder)
    return folder


def recipe(model, **options):
    usual = {"model": str(model), "method": "grpo", "text.generates": "image", "precision": "fp32",
             "reward": "red.py:red", "train.guidance": 3.0, "train.prompts": 2, "train.group": 4,
             "train.micro_batch": 4}
    return load(None, usual | {key.replace("__", "."): value for key, value in options.items()})


def test_memory_and_phases_of_an_epoch(model):
    counts = tokens.dry_run(recipe(model), GPUS["4090"])
    assert list(counts.phases) == ["rollout", "decode", "base", "update"]
    assert all(phase.flops > 0 and phase.allocated > 0 for phase in counts.phases.values())
    weights = sum(tensor.numel() for tensor in tiny_vision.janus()[0].parameters()) * 4
    assert weights < counts.peak < 3 * weights
    assert counts.seconds == pytest.approx(sum(phase.taken for phase in counts.phases.values()))
    # Both halves go through the model: twice the work of a rollout and of a replay, and the same decoder.
    plain = tokens.dry_run(recipe(model, train__guidance=1.0), GPUS["4090"])
    for name, times in (("rollout", 2), ("base", 2), ("update", 2), ("decode", 1)):
        assert counts.phases[name].flops == pytest.approx(times * plain.phases[name].flops, rel=0.02)
    # An epoch of four times the prompts has four times the micro-batches, in the memory of one.
    more = tokens.dry_run(recipe(model, train__prompts=8), GPUS["4090"])
    assert more.phases["rollout"].flops == 4 * counts.phases["rollout"].flops
    assert more.phases["rollout"].allocated == counts.phases["rollout"].allocated


def test_a_replay_has_the_flops_of_the_models_own(model):
    config = recipe(model, train__guidance=1.0, parts__kl__weight=0.0, train__prompts=1)
    counted = tokens.dry_run(config, GPUS["4090"]).phases["update"].flops
    own = build.make_policy(config, "cpu", tiny_vision.janus())
    asked = own.encode(["5"])
    prompt = tokens._Epoch(config, tokens._policy(config), MetaGPU(GPUS["4090"]), 4).prompt
    asked.ids[0] = torch.full((len(prompt),), 3)
    ids = torch.full((4, own.grid), own.first)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops:  # others are not counted on a CPU
        own.log_probs(asked, torch.zeros(4, dtype=torch.int64), ids, torch.ones_like(ids, dtype=torch.bool),
                      Decoding()).logp.sum().backward()
    assert counted == pytest.approx(flops.get_total_flops(), rel=0.05)


def test_questions_are_a_phase(model):
    counts = tokens.dry_run(recipe(model, method="unirl", parts__data__batch=4, parts__data__length=3), GPUS["4090"])
    assert list(counts.phases)[-1] == tokens.ANSWERS and counts.phases[tokens.ANSWERS].flops > 0


def test_the_recipe_fits_a_4090_and_its_7b_too(monkeypatch, capsys):
    few = {name: config | {"text_config": config["text_config"] | {"num_hidden_layers": 2}}
           for name, config in LANGUAGE.items()}
    for name in few:
        monkeypatch.setitem(LANGUAGE, name, few[name])
        assert main(["check", name, "--recipe", "janus_pro_1b", "--gpu", "4090", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["hours"] > 0 and not told["above"] and {"rollout", "decode", "update"} <= set(told["phases"])


def test_settings_that_fit_are_those_of_the_loop(model):
    config = recipe(model, train__micro_batch=8)
    room = tokens.dry_run(recipe(model, train__micro_batch=4), GPUS["4090"]).peak
    from tests.tools.dry_run.test_estimate import gpu
    settings, found = fit.nearest_settings(config, gpu(room), tokens.dry_run(config, gpu(room)))
    assert not found.above(gpu(room).room) and set(settings) <= {"train.checkpointing", "train.micro_batch"}


def test_what_is_not_known_is_told(model):
    with pytest.raises(UserError, match="the sizes of 'someone/else' are not known: give a folder that has its config"):
        tokens.dry_run(recipe("someone/else"), GPUS["4090"])
    with pytest.raises(UserError, match="does not cover adapter.dora"):
        tokens.dry_run(recipe(model, adapter__dora=True), GPUS["4090"])

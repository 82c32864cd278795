"""Dry runs of recipes: phases, extrapolation, and that the host never waits in the loop."""

from __future__ import annotations

import json

import pytest
import torch

from flowgrpo.dry_run import estimate, from_configs
from flowgrpo.dry_run.estimate import dry_run, fits
from flowgrpo.errors import UserError
from tests.helpers import tiny


def config(folder, **options):
    return tiny.config(folder, model=str(folder / "model"), precision="bf16", **options)


@pytest.fixture
def model(tmp_path):
    """A folder with the configuration files of a pipeline and without weights."""
    tiny.sd3().save_pretrained(tmp_path / "model")
    for file in (tmp_path / "model").rglob("*.safetensors"):
        file.unlink()
    return tmp_path


def test_a_pipeline_of_configuration_files_has_all_its_shapes(model):
    made, real = from_configs.pipeline(str(model / "model"), torch.bfloat16), tiny.sd3()
    for name in ("transformer", "vae", "text_encoder"):
        ours, theirs = (dict(getattr(pipe, name).named_parameters()) for pipe in (made, real))
        assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}
        assert all(value.is_meta and value.dtype == torch.bfloat16 for value in ours.values())


def test_phases_of_an_epoch(model):
    found = dry_run(config(model), "RTX4090")
    assert list(found) == list(estimate.PHASES) and fits(found, "RTX4090")
    assert all(phase.peak > 0 and phase.kernels > 0 and phase.seconds > 0 for phase in found.values())
    assert found["update"].tflops > 0 and found["rollout"].tflops > found["decode"].tflops * 0


def test_more_prompts_cost_in_proportion(model):
    few, many = (dry_run(config(model, train__prompts=count), "H100") for count in (4, 8))
    for name in ("rollout", "update"):
        assert many[name].tflops == pytest.approx(2 * few[name].tflops, rel=0.02)
    half = dry_run(config(model, train__prompts=8), "H100", processes=2)
    assert half["rollout"].tflops == pytest.approx(few["rollout"].tflops, rel=0.02)


def test_the_host_waits_for_nothing_in_rollout_and_replay(model):
    found = dry_run(config(model, method="mix_grpo"), "H100")
    assert found["rollout"].waits == {} and found["update"].waits == {}


@pytest.mark.parametrize("options, told", [
    ({"adapter__rank": 0}, "does not cover adapter.rank: 0"), ({"adapter__dora": True}, "adapter.dora")])
def test_what_is_not_covered_is_refused(model, options, told):
    with pytest.raises(UserError, match=told):
        dry_run(config(model, **options))


def test_a_folder_without_a_pipeline_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match="no model_index.json in"):
        from_configs.pipeline(str(tmp_path), torch.bfloat16)

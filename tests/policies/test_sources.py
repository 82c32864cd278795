"""Where a model's files are: variants and revisions, on tiny models and a hub's cache without a network."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from flowgrpo.config import validate
from flowgrpo.config.sections import Load
from flowgrpo.errors import UserError
from flowgrpo.policies import build, options, sources
from flowgrpo.policies.pipelines.load import load_pipeline
from tests.helpers import loop, tiny, tiny_text
from tests.helpers.refusals import message
from tests.policies.pipelines.test_single_file import OTHER, same

HERE = Path(__file__).parent


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Return a function that makes a folder in the cache of a hub that nothing may ask."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    def folder(repository: str, revision: str):
        place = tmp_path / f"models--{repository.replace('/', '--')}"
        (place / "refs").mkdir(parents=True, exist_ok=True)
        commit = {"main": "a" * 40, "v2": "b" * 40}[revision]
        (place / "refs" / revision).write_text(commit)
        return place / "snapshots" / commit
    return folder


def test_a_variant_is_loaded_from_a_folder_that_has_one(tmp_path):
    pipe = tiny.sd3(seed=OTHER)
    folder = tiny.save(tiny.sd3(), tmp_path / "both")
    pipe.transformer.save_pretrained(folder / "transformer", variant="fp16")
    assert same(load_pipeline(str(folder), files=Load(variant="fp16")).transformer, pipe.transformer)
    assert same(load_pipeline(str(folder)).transformer, tiny.sd3().transformer)


@pytest.mark.parametrize("model, files, told", [
    (str(HERE), {"variant": "fp16"}, " is a local folder without such files, expected names like model.fp16.safe"),
    (str(HERE), {"revision": "v2"}, " is a local folder: leave it out")])
def test_what_a_local_model_does_not_read_is_refused(model, files, told):
    assert told in message(options.require_load, loop.setup(validate({"model": model, "load": files}), "pipeline"))


def test_no_setting_goes_with_an_object():
    with pytest.raises(UserError, match="^load.variant is 'fp16', but the model is an object that is loaded already"):
        options.require_load(loop.setup(validate({"load": {"variant": "fp16"}}), "pipeline", loaded=object()))
    options.require_load(loop.setup(validate({}), "pipeline", loaded=object()))
    sources.require("owner/name", Load(variant="fp16", revision="v2"))


def test_a_revision_of_a_pipeline_is_that_of_the_hub(hub):
    for revision, seed in (("main", 0), ("v2", OTHER)):
        tiny.save(tiny.sd3(seed), hub("owner/tiny", revision))
    for revision, seed in ((None, 0), ("v2", OTHER)):
        pipe = build.load(validate({"model": "owner/tiny", "precision": "fp32", "load": {"revision": revision}}))
        assert same(pipe.transformer, tiny.sd3(seed).transformer)


def test_a_revision_and_a_variant_of_a_language_model(hub):
    model, tokenizer = tiny_text.model()
    for revision, change, variant in (("main", 0.0, None), ("v2", 1.0, "small")):
        with torch.no_grad():
            model.get_input_embeddings().weight.add_(change)
        folder = hub("owner/text", revision)
        model.save_pretrained(folder, variant=variant)
        tokenizer.save_pretrained(folder)
    asked = {"model": "owner/text", "method": "grpo", "precision": "fp32",
             "load": {"revision": "v2", "variant": "small"}}
    assert same(build.load(validate(asked))[0], model)
    assert not same(build.load(validate(asked | {"load": {}}))[0], model)

"""The hub where nothing answers: one line at once, or the cache."""

from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from diffusers import DiffusionPipeline
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM

from flowgrpo import hub
from flowgrpo.cli import main
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.text.policies.text_weights import load_causal_lm
from tests.helpers.refusals import error_line, message
from tests.helpers.servers import running
from tests.helpers.tiny_masked import load_masked_lm


@pytest.fixture
def silent(monkeypatch, tmp_path):
    """A hub at a port where nothing listens, and an empty cache."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_model_of_a_hub_that_does_not_answer_is_refused_in_one_line(silent, capsys):
    expected = "not in the hub's cache, and no network (http://127.0.0.1:9 does not answer): `hf download owner/name`"
    for model in ("owner/name", "name", "no/name/at/all"):
        assert "no network" in message(hub.require, model)
    assert expected in error_line(capsys, "sample", "owner/name", "--prompt=x")
    assert error_line(capsys, "train", "--model=owner/name").startswith(
        "flowgrpo: error: owner/name: missing, and the hub does not answer: where there is a network, "
        "`flowgrpo prepare --model=owner/name`")
    assert main(["check", "owner/name"]) == 2
    out = capsys.readouterr().out
    assert "supported  unknown\n" in out and expected in out
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("offline", [False, True])
def test_a_folder_that_a_recipe_puts_together_is_no_hub_id(offline, silent, capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    assert main(["check", "skyreels_i2v"]) == 2
    said = capsys.readouterr().out
    assert "hf download" not in said
    assert "hub id" in said and "; the first lines of the recipe skyreels_i2v put that folder together" in said


def test_any_answer_is_one(monkeypatch):
    """A server that refuses the request is there."""
    class Refusing(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(403)

        def log_message(self, *arguments):
            """Print nothing."""

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # an earlier test may have found no hub
    with running(HTTPServer(("127.0.0.1", 0), Refusing)) as server:
        assert hub.answers(f"http://127.0.0.1:{server.server_port}")


def test_nothing_is_asked_for_a_model_that_is_here_and_a_cached_one_is_loaded_from_the_cache(silent, tmp_path, capsys):
    hub.require("starter")
    hub.require(str(tmp_path))
    assert not constants.HF_HUB_OFFLINE
    place = silent / "models--owner--name"
    (place / "snapshots" / "abc").mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    (place / "snapshots" / "abc" / "model_index.json").write_text("{}")
    hub.require("owner/name")
    assert constants.HF_HUB_OFFLINE
    assert "owner/name is loaded from the hub's cache" in capsys.readouterr().err


class Answer:
    """A hub's answer, as its client's errors hold one."""

    headers: dict[str, str] = {}
    request = None

    def __init__(self, status: int):
        self.status_code = status


def gated() -> GatedRepoError:
    return GatedRepoError("403 Client Error. Access is restricted.\nVisit the page.", response=Answer(403))


def hidden() -> OSError:
    """An error of transformers, whose cause is the hub's."""
    error = OSError("You are trying to access a gated repo.\nMake sure to have access to it.")
    error.__cause__ = gated()
    return error


@pytest.mark.parametrize("error, told", [
    (gated, "the repository is gated: accept its licence at {page}, and log in with `hf auth login`"),
    (hidden, "the repository is gated: accept its licence at {page}, and log in with `hf auth login`"),
    (lambda: RepositoryNotFoundError("401", response=Answer(401)), "the hub refuses it (401): there is no such"),
    (lambda: HfHubHTTPError("403", response=Answer(403)), "the hub refuses it (403): there is no such"),
    (lambda: HfHubHTTPError("500 of the server", response=Answer(500)), "(500 of the server): expected "),
    (lambda: ValueError(), "(ValueError): expected ")])
def test_a_repository_that_the_hub_refuses_is_told_in_one_line(error, told, monkeypatch):
    def refuse(*arguments, **options):
        raise error()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(DiffusionPipeline, "load_config", refuse)
    for cls in (AutoConfig, AutoModelForCausalLM):
        monkeypatch.setattr(cls, "from_pretrained", refuse)
    for load in (load_pipeline, load_causal_lm, load_masked_lm):
        caught = message(load, "owner/name")
        assert told.format(page=f"{constants.ENDPOINT}/owner/name") in caught
        assert caught.startswith("cannot load the ") and "'owner/name'" in caught

"""What a recipe needs and what of it is missing, and its downloads, against a stand-in of the hub."""

import importlib.metadata
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from flowgrpo import hub
from flowgrpo.cli import main, prepare
from flowgrpo.config import load, validate
from flowgrpo.errors import UserError
from flowgrpo.tools.check import needs
from flowgrpo.tools.check.needs import File
from tests.helpers import stand_in_hub
from tests.helpers.commands import Terminal
from tests.helpers.refusals import error_line, printed

MODEL, SCORER, WORDS = "owner/pipe", "yuvalkirstain/PickScore_v1", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
LARGE = bytes(range(256)) * 4096  # 1 MiB
FILES = {MODEL: {"model_index.json": b"{}", "unet/config.json": b"{}",
                 "unet/diffusion_pytorch_model.safetensors": LARGE, "unet/diffusion_pytorch_model.bin": b"old",
                 "unet/diffusion_pytorch_model.fp16.safetensors": b"half", "whole.safetensors": b"one file",
                 "onnx/model.onnx": b"no"},
         SCORER: {"config.json": b"{}", "model.safetensors": b"scores", "pytorch_model.bin": b"old"},
         WORDS: {"tokenizer.json": b"{}", "open_clip_pytorch_model.bin": b"not read"}}


@pytest.fixture
def serving(tmp_path, monkeypatch):
    with stand_in_hub.served() as made:
        made.files = {name: dict(files) for name, files in FILES.items()}
        stand_in_hub.reach(made, monkeypatch, tmp_path / "hub")
        monkeypatch.setenv("HF_ENDPOINT", made.url)  # of another process
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        hub.answers.cache_clear()
        yield made
    hub.answers.cache_clear()


def recipe(**more):
    return load(None, {"model": MODEL, "reward": "pickscore", "tracker": "none", "method": "mix_grpo"} | more)


def cached(root: Path, repository: str) -> set[str]:
    folder = root / "hub" / f"models--{repository.replace('/', '--')}" / "snapshots"
    return {str(path.relative_to(next(folder.iterdir()))) for path in folder.rglob("*") if path.is_file()}


def test_all_that_is_missing_is_listed_at_once_with_the_page_of_a_gated_licence(serving):
    found = needs.needs(recipe(**{"memory.weights": "nf4"}))
    listed = {(need.what, need.name): [file.name for file in need.missing] for need in found}
    assert listed[("model", MODEL)] == ["model_index.json", "unet/config.json",
                                        "unet/diffusion_pytorch_model.safetensors"]
    assert listed[("reward pickscore", SCORER)] == ["config.json", "model.safetensors"]
    assert listed[("reward pickscore", WORDS)] == ["tokenizer.json"] and ("extra", "bitsandbytes") in listed
    assert [need.gigabytes for need in found if need.name == SCORER] == [8e-9]
    serving.gated = {MODEL}
    [model] = [need for need in needs.needs(recipe()) if need.what == "model"]
    assert model.accept == f"gated: accept its licence at {serving.url}/{MODEL}, then `hf auth login`"
    serving.allowed = True
    assert [need.accept for need in needs.needs(recipe()) if need.what == "model"] == [""]


def test_what_is_missing_is_downloaded_and_verified(serving, tmp_path):
    serving.breaks = {"unet/diffusion_pytorch_model.safetensors": [300_000, 700_000]}
    told: list[int] = []
    found = needs.needs(recipe())
    needs.fetch(found, told.append)
    assert all(need.here for need in needs.needs(recipe()))
    assert cached(tmp_path, MODEL) == {"model_index.json", "unet/config.json",
                                       "unet/diffusion_pytorch_model.safetensors"}
    assert sum(told) == sum(file.size for need in found for file in need.missing)
    ranges = [asked[2]["Range"] for asked in serving.asked if asked[2].get("Range")]
    assert ranges == ["bytes=300000-", "bytes=700000-"]


def test_a_file_that_is_not_what_the_hub_lists_is_deleted(serving, tmp_path):
    serving.damaged = {"model.safetensors"}
    with pytest.raises(UserError, match="model.safetensors is not what the hub lists .* it was deleted"):
        needs.fetch(needs.needs(recipe()))
    blobs = tmp_path / "hub" / f"models--{SCORER.replace('/', '--')}" / "blobs"
    assert not [path for path in blobs.glob("*.part") if path.stat().st_size == len(b"scores")]
    serving.damaged = set()
    needs.fetch(needs.needs(recipe()))
    assert all(need.here for need in needs.needs(recipe()))


def test_a_killed_download_continues_where_it_was(serving, tmp_path):
    serving.slow = "unet/diffusion_pytorch_model.safetensors"
    script = ("from flowgrpo.tools.check import needs; from flowgrpo.config import load; "
              f"needs.fetch(needs.needs(load(None, {{'model': {MODEL!r}, 'reward': 'jpeg_compressibility', "
              "'method': 'mix_grpo'})))")
    running = subprocess.Popen([sys.executable, "-c", script])
    blobs = tmp_path / "hub" / f"models--{MODEL.replace('/', '--')}" / "blobs"
    while not (parts := [path for path in blobs.glob("*.part") if path.stat().st_size > 100_000]):
        assert running.poll() is None
        time.sleep(0.02)
    running.kill()
    running.wait()
    had, serving.slow = parts[0].stat().st_size, ""
    serving.asked.clear()
    needs.fetch(needs.needs(recipe()))
    [begun] = [int(asked[2]["Range"][6:-1]) for asked in serving.asked if asked[2].get("Range")]
    assert begun == had and all(need.here for need in needs.needs(recipe()))


def test_without_the_hub_the_cache_and_the_parameters_are_known(serving, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = {need.name: need for need in needs.needs(recipe(), sizes=lambda model: 3.5)}
    assert found[MODEL].gigabytes == 3.5 and not found[MODEL].here and found[SCORER].gigabytes == 1.972
    assert found[WORDS].gigabytes == needs.TOKENIZER


@pytest.mark.parametrize("model", ["starter", "./nowhere", "nowhere", "a/b/c", "model.safetensors"])
def test_a_model_that_is_no_name_of_the_hub_is_not_asked_for(serving, model):
    assert [need for need in needs.needs(recipe(model=model)) if need.what == "model"] == []


def test_weights_licences_and_extras():
    names = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "pytorch_model.bin",
             "tf_model.h5", "model.fp16.safetensors", "original/model.pth", "README.md"]
    files = [File(name, 1) for name in names]
    assert [file.name for file in needs.choose_files(files)] == names[:3]
    assert [file.name for file in needs.choose_files(files, variant="fp16")] == ["config.json",
                                                                                 "model.fp16.safetensors"]
    assert [file.name for file in needs.choose_files(files, weights=False)] == ["config.json"]
    licences = needs.model_licences()
    assert licences["stabilityai/stable-diffusion-xl-base-1.0"] == ("CreativeML Open RAIL++-M", False)
    assert licences["black-forest-labs/FLUX.1-dev"] == ("FLUX.1 [dev] Non-Commercial License", True)
    assert needs.extras(validate({"reward": {"http": {"args": {"url": "http://127.0.0.1:1/s"}}, "ocr": 1}})) == ["ocr"]
    assert [text.partition(">")[0].partition("=")[0] for text in prepare.requirements(["clip", "datasets"])] == [
        "datasets", "open-clip-torch"]


def test_the_sum_says_what_it_leaves_out(capsys):
    def last_lines(*found: needs.Need) -> str:
        prepare.show(found)
        return capsys.readouterr().out
    known, unknown = needs.Need("model", "a/b", False, 3.0), needs.Need("model", "a/b", False)
    assert "to download: 3.0 GB; free in" in last_lines(known)
    assert "to download: 3.0 GB and what has a ? above; free in" in last_lines(known, unknown)
    assert "to download: what has a ? above; free in" in last_lines(unknown)
    assert "to download" not in last_lines(needs.Need("extra", "clip", False), needs.Need("model", "a/b", True, 3.0))


def test_a_disk_that_is_too_small_is_refused_before_a_download(serving, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10, 10, 0))
    assert "0.0 GB are to be downloaded, and 0.0 GB are free: make room" in error_line(
        capsys, "prepare", "--yes", f"--model={MODEL}", "--reward=pickscore", "--method=mix_grpo")
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.safetensors"))
    for name in (MODEL, SCORER):  # what a killed download left needs no room again
        blobs = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"
        blobs.mkdir(parents=True)
        (blobs / "x.part").write_bytes(bytes(len(LARGE)))
    assert needs.begun(needs.needs(recipe())) == 2 * len(LARGE) / 1e9
    assert main(["prepare", "--yes", f"--model={MODEL}", "--reward=pickscore", "--method=mix_grpo"]) == 0


def test_prepare_lists_downloads_and_says_the_next_command(serving, capsys):
    arguments = [f"--model={MODEL}", "--reward=pickscore", "--method=mix_grpo"]
    assert "nothing was installed or downloaded: give --yes" in error_line(capsys, "prepare", *arguments)
    said = printed(capsys, "prepare", "--yes", *arguments)
    assert "downloaded and verified 6 files: flowgrpo train --model=owner/pipe --reward=pickscore" in said
    assert "nothing is missing: flowgrpo train" in printed(capsys, "prepare", *arguments)


def test_train_lists_all_that_is_missing_before_it_fails(serving, here, capsys, monkeypatch):
    """With gigabytes and the command that downloads it, in which options are as the user gave them; without the hub the
    sizes of a published model are known too."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    words = ["train", "sd15_short", "--reward={pickscore: 1, aesthetic: 0.5}", "--precision=fp32"]
    assert main([*words, "--eval.rewards=[]", "--tracker=none"]) == 2
    said = capsys.readouterr()
    out, command = said.out.splitlines(), ("flowgrpo prepare sd15_short --precision=fp32 '--eval.rewards=[]' "
                                           "--tracker=none '--reward={pickscore: 1, aesthetic: 0.5}'")
    table = [line.split() for line in out if line.strip().endswith("missing")]
    assert table[0][:3] == ["model", "stable-diffusion-v1-5/stable-diffusion-v1-5", "2.1"]
    assert {row[2] for row in table if row[0] == "reward"} == {
        SCORER, WORDS, "openai/clip-vit-large-patch14", "trl-lib/ddpo-aesthetic-predictor"}
    assert needs.out_of_reach([needs.Need("reward", "owner/scorer", False), needs.Need("extra", "clip", False)]) == [
        "owner/scorer"]
    (Path(constants.HF_HUB_CACHE) / "models--owner--scorer").mkdir(parents=True)  # it may be whole under other names
    assert needs.out_of_reach([needs.Need("reward", "owner/scorer", False)]) == []
    error = said.err.splitlines()[-1]
    assert error.endswith(f"missing, and the hub does not answer: where there is a network, `{command}`; of a local "
                          "copy of the model, --model=FOLDER")
    assert not any(line.startswith("model:") for line in out)


def test_a_person_is_asked_and_no_downloads_nothing(serving, tmp_path, capsys, monkeypatch):
    arguments = [f"--model={MODEL}", "--reward=jpeg_compressibility", "--method=mix_grpo"]
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    assert main(["prepare", *arguments]) != 0
    assert "install and download what is missing? [Y/n]" in capsys.readouterr().out
    assert not list((tmp_path / "hub").rglob("*.safetensors"))
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert main(["prepare", *arguments]) == 0
    assert "unet/diffusion_pytorch_model.safetensors" in cached(tmp_path, MODEL)


def test_extras_are_installed_by_pip_whose_failure_is_one_line(capfd, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [
        "pip; extra == 'here'", "no-such-package-of-ours>=1; extra == 'gone'"])
    prepare.install(["here"])
    assert "pip install -c " in capfd.readouterr().out
    with pytest.raises(UserError, match="^pip did not install no-such-package-of-ours>=1: its lines above say why$"):
        prepare.install(["gone"])
    assert "no-such-package-of-ours" in capfd.readouterr().err

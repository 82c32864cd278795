"""`flowgrpo push` and runs of the hub, beside a stand-in for one on this machine."""

import json
import shutil

import huggingface_hub
import pytest
from PIL import Image
from safetensors.torch import load_file

from flowgrpo.config import load
from flowgrpo.export import push
from flowgrpo.hub import download, is_lora
from flowgrpo.policies.weights.lora_files import LORA_FILE
from tests.export.test_export import make_run
from tests.helpers import stand_in_hub, tiny
from tests.helpers.refusals import error_line, printed


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("sd3"), tiny.sd3(), tiny.CALL, eval={"steps": 1})


@pytest.fixture
def run(trained, tmp_path):
    """A copy of a finished run, with files of a run that are not uploaded."""
    copied = shutil.copytree(trained, tmp_path / "mine")
    shutil.rmtree(copied / "model")
    for name in KEPT:
        (copied / name).parent.mkdir(parents=True, exist_ok=True)
        (copied / name).write_bytes(b"kept")
    return copied


KEPT = ("checkpoints/epoch-00001/state.safetensors", "checkpoints/epoch-00001/state.json", "optimizer.pt", "evil.py",
        "weights.bin", "report.html", "before/000.png", "samples/epoch-00010.png", "events/events.out.1",
        "merged/model_index.json", "merged/unet/diffusion_pytorch_model.safetensors", ".env", "prompts.jsonl")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with stand_in_hub.served() as serving:
        stand_in_hub.reach(serving, monkeypatch, tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", "hf_x")
        yield serving


def test_a_push_sends_what_the_dry_run_lists_and_nothing_else(run, hub, capsys):
    listed = printed(capsys, "push", run, "me/mine", "--dry-run").splitlines()
    names = [line.split()[1] for line in listed[:-1]]
    assert names == ["README.md", "config.yaml", "curves.png", "metrics.jsonl", LORA_FILE, "summary.json"]
    assert listed[-1].endswith("bytes in 6 files, to me/mine; nothing was uploaded") and not hub.asked
    address = printed(capsys, "push", run, "me/mine", "--private", "--revision=second", "--message=Better").strip()
    assert address.startswith(f"{hub.url}/me/mine/commit/")
    assert hub.files["me/mine"] == {name: (run / name).read_bytes() for name in names}
    sent = {path: body for method, path, body in hub.asked if method == "POST"}
    assert sent["/api/repos/create"]["visibility"] == "private" and "/api/models/me/mine/branch/second" in sent
    assert sent["/api/models/me/mine/commit/second"]["value"]["summary"] == "Better"


@pytest.mark.parametrize("name", ["mine", "a/b/c", "me/-x", "me/x..y", "me/ x", "../x", "me/x.git"])
def test_a_malformed_name_is_refused_before_anything(run, hub, capsys, name):
    assert "expected OWNER/NAME" in error_line(capsys, "push", run, "--", name)
    assert not hub.asked and not (run / "README.md").exists()


def test_refusals_of_the_hub_and_what_it_needs_are_one_line(run, hub, capsys, monkeypatch):
    hub.refused["me/mine"] = (403, "Forbidden")
    assert "the upload to me/mine failed: the hub refuses it (403)" in error_line(capsys, "push", run, "me/mine")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(run / "no-token"))
    assert "needs a login: `hf auth login`" in error_line(capsys, "push", run, "me/mine")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "needs a network (HF_HUB_OFFLINE is set); --dry-run" in error_line(capsys, "push", run, "me/mine")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 does not answer" in error_line(capsys, "push", run, "me/mine")
    assert "got the checkpoint" in error_line(capsys, "push", run / "checkpoints" / "epoch-00001", "me/mine")
    (run / "summary.json").unlink()
    assert "the run has not finished: --resume it" in error_line(capsys, "push", run, "me/mine")


def test_files_of_whole_weights_and_language_models(tmp_path):
    names = ["model/config.json", "model/model.safetensors", "model/tokenizer.json", "model/tokenizer_config.json",
             "text_encoder_2/adapter_config.json", "transformer/config.json",
             "transformer/diffusion_pytorch_model.safetensors", "unet/adapter_model.safetensors"]
    for name in [*names, "unet/optimizer.bin", "model/evil.py", "other/x.safetensors"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "linked.safetensors").symlink_to(tmp_path / "other" / "x.safetensors")
    assert [path.as_posix() for path in push.files(tmp_path)] == names


# --- loading ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def shared(run, hub, capsys):
    """A run on the hub, with a file of Python and a pickle beside it."""
    printed(capsys, "push", run, "me/mine")
    hub.files["me/mine"] |= {"evil.py": b"raise SystemExit", "pytorch_model.bin": b"x", "checkpoints/a.json": b"{}"}
    return hub


def test_data_of_a_repository_is_downloaded_once_and_read_offline(shared, trained, capsys, monkeypatch):
    folder = download("hub:me/mine@main")
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "metrics.jsonl", LORA_FILE, "summary.json"}
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert download("me/mine") == folder
    assert capsys.readouterr().err.endswith("no network: me/mine is read from the hub's cache\n")


def test_commands_take_a_run_of_the_hub(shared, trained, here, capsys):
    model, common = trained / "model", ["--prompt=red", "--steps=1"]
    paths = [printed(capsys, "sample", *source, *common).strip().splitlines()[-1]
             for source in (["hub:me/mine"], [model, "--lora", "me/mine"], [trained], [model])]
    pictures = [Image.open(path).tobytes() for path in paths]
    assert pictures[0] == pictures[1] == pictures[2] != pictures[3]
    name = load(trained / "config.yaml").name
    assert printed(capsys, "export", "hub:me/mine").strip() == f"comfyui/{name}.safetensors"
    printed(capsys, "export", trained, "--output", "own.safetensors")
    own, theirs = load_file("own.safetensors"), load_file(f"comfyui/{name}.safetensors")
    assert own.keys() == theirs.keys() and all((value == theirs[key]).all() for key, value in own.items())
    line = error_line(capsys, "export", "hub:me/mine", "--form=card")
    assert "--form card: got hub:me/mine, whose card is on the hub" in line


@pytest.mark.parametrize("name, line", [
    ("hub:no/such", "hub:no/such: there is no such repository, or it is private"),
    ("hub:me/mine@v9", "hub:me/mine@v9: the repository has no revision 'v9'"),
    ("hub:me/gated", "hub:me/gated: the repository is gated: accept its licence at"),
    ("hub:me/pickles", "hub:me/pickles: the repository has no weights in .safetensors"),
    ("hub:mine", "'hub:mine': expected hub:OWNER/NAME"), ("hub:me/mine/../x", "expected hub:OWNER/NAME")])
def test_what_cannot_be_loaded_is_one_line(shared, capsys, name, line):
    shared.refused["me/gated"] = (403, "GatedRepo")
    shared.files["me/pickles"] = {"pytorch_lora_weights.bin": b"x", "config.json": b"{}"}
    assert line in error_line(capsys, "sample", "starter", "--lora", name, "--prompt=x")


def test_a_repository_of_one_lora_file_and_names_of_files_here(shared, tmp_path, monkeypatch):
    shared.files["them/lora"] = {"style.safetensors": shared.files["me/mine"][LORA_FILE], "README.md": b""}
    assert download("them/lora").name == "style.safetensors"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert is_lora("them/lora") and not is_lora("runs/lora")
    assert not is_lora("them/lora.safetensors") and is_lora("hub:runs/lora")


def test_a_run_of_the_hub_executes_nothing_that_it_names(shared, trained, here, capsys):
    (here / "evil.py").write_text(f"open({str(here / 'marker')!r}, 'w')\n")
    (here / "p.txt").write_text("red\nblue\n")
    config = shared.files["me/mine"]["config.yaml"].decode().replace("bright:", "evil.py:bad:").replace(
        "trust_remote_code: false", "trust_remote_code: true")
    shared.files["me/mine"]["config.yaml"] = config.encode()
    assert printed(capsys, "grid", "hub:me/mine", "--prompts=p.txt", "--count=1").strip() == "grid.png"
    assert not (here / "marker").exists() and json.loads(shared.files["me/mine"]["summary.json"])


@pytest.mark.parametrize("command", [("push", "me/x", "--dry-run"), ("export", "--form=card")])
@pytest.mark.parametrize("name, told", [
    ("model/README.md", "model/README.md: not UTF-8 text (invalid continuation byte at byte 26): save it as UTF-8"),
    ("metrics.jsonl", "metrics.jsonl, line 1: damaged"), ("summary.json", "summary.json is damaged ('utf-8'"),
    ("config.yaml", "config.yaml is not valid YAML: 'utf-8' codec can't decode")])
def test_a_file_in_another_encoding_is_one_line(command, name, told, trained, tmp_path, capsys):
    run = shutil.copytree(trained, tmp_path / "mine")
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace(str(trained), str(run)))
    (run / name).write_bytes("---\nlicense: mit\n---\n# Modèle\n".encode("latin-1"))
    assert f"{run}/{told}" in error_line(capsys, command[0], run, *command[1:])

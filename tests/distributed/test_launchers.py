"""What `accelerate launch` was configured for is read: by accelerate's own command, and in two processes each."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file, save_file

from flowgrpo.config import load
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed import launchers
from flowgrpo.distributed.processes import make_accelerator
from flowgrpo.errors import UserError
from flowgrpo.run import run
from flowgrpo.tools.check.tiny import make
from flowgrpo.training import checks
from tests.helpers import tiny, tiny_text
from tests.helpers.forked import Forked
from tests.helpers.processes import free_ports, together
from tests.helpers.refusals import refused

FSDP2 = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}


def sizes(**given: int) -> dict:
    return {"parallelism_config": {f"parallelism_config_{name}_size": size for name, size in given.items()}}


def launched(folder: Path, config: dict, processes: int = 2) -> dict[str, str]:
    """The environment of a process under `accelerate launch --config_file`, as far as it differs from that of here."""
    file = folder / "accelerate.yaml"
    file.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU",
                                    "num_machines": 1, "machine_rank": 0, "num_processes": processes,
                                    "mixed_precision": "no", "main_process_port": 29511} | config))
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "-m", "flowgrpo", "train"])
    with mock.patch.dict(os.environ):
        environment = prepare_multi_gpu_env(_validate_launch_command(arguments)[0])
        return {key: value for key, value in environment.items() if os.environ.get(key) != value} | {
            "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}


@pytest.mark.parametrize("config, processes, keys", [
    ({}, 2, {}),
    (FSDP2, 2, {"memory.shard": True}),
    (FSDP2 | {"fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}}, 2,
     {"memory.shard": True, "train.checkpointing": True}),
    (sizes(dp_replicate=2), 2, {}),
    (sizes(cp=2), 4 // 2, {"memory.context_parallel": 2}),
    (sizes(cp=2, dp_replicate=2), 4, {"memory.context_parallel": 2}),
    (sizes(sp=2, dp_replicate=2), 4, {"memory.context_parallel": 2}),
    (FSDP2 | sizes(dp_shard=4), 4, {"memory.shard": True}),
    (FSDP2 | sizes(dp_shard=2, cp=2), 4, {"memory.shard": True, "memory.context_parallel": 2}),
    (FSDP2 | sizes(cp=2), 2, {"memory.shard": True, "memory.context_parallel": 2})], ids=repr)
def test_a_configuration_of_accelerates_stands_for_keys_of_the_recipe(config, processes, keys, tmp_path):
    environment = launched(tmp_path, config, processes)
    assert launchers.take_over(environment) == keys
    assert not launchers.accelerate_kinds(environment, (launchers.THEIRS,))  # nothing else acts on it
    assert launchers.take_over(environment) == keys  # a second run of the same process reads the same


def test_shards_of_a_node_are_copied_from_node_to_node(tmp_path):
    environment = launched(tmp_path, FSDP2 | sizes(dp_shard=2, dp_replicate=2), 4)
    refused("^launched with a ParallelismConfig of dp_replicate_size 2, but its shards of "
            "2 processes are not those of a node, 4: set dp_shard_size to 4, or", launchers.take_over, environment)
    assert launchers.take_over(environment | {"LOCAL_WORLD_SIZE": "2"}) == {"memory.shard": "nodes"}


@pytest.mark.parametrize("config, said", [
    ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}, "fsdp_version 1, expected 2: set fsdp_"),
    (FSDP2 | {"fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}}, "fsdp_offload_params: true, .*false"),
    (FSDP2 | {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}}, "set it to true"),
    (sizes(tp=2), "of tp_size 2, but tensor parallelism is not supported: set it to 1, and dp_shard_size to 2"),
    (sizes(cp=2, sp=2), "of cp_size 2 and sp_size 2, which are the same here: set one of them to 1"),
    (sizes(cp=4), "multiply to 4, but there are 2 processes: set dp_shard_size, dp_replicate_size, cp_size or"),
    (FSDP2 | sizes(dp_replicate=2), "of dp_shard_size 1, but with FSDP: set dp_shard_size to 2")], ids=repr)
def test_what_a_run_cannot_do_is_refused_with_the_cure(config, said, tmp_path):
    refused(f"^launched with .*{said}", launchers.take_over, launched(tmp_path, config))


def test_deepspeed_and_megatron_are_refused(monkeypatch):
    for kind in ("DEEPSPEED", "MEGATRON_LM"):
        with pytest.raises(UserError, match=f"^launched with {kind}, which is not supported: use FSDP2 .fsdp_v"):
            launchers.take_over({f"ACCELERATE_USE_{kind}": "true"})
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    refused("^launched with FSDP, which only flowgrpo train and align read: use accel", make_accelerator, "cpu")


def test_a_recipe_that_says_otherwise_and_a_language_model_are_refused(tmp_path):
    with mock.patch.dict(os.environ, launched(tmp_path, FSDP2 | sizes(cp=2))):
        with pytest.raises(UserError, match="^memory.context_parallel is 4 in the recipe, but accelerate was "
                                            "configured for 2: make them equal, or leave the key out"):
            checks.check(load(None, {"memory.context_parallel": 4}))
        with pytest.raises(UserError, match="^launched with accelerate's FSDP .*, but a language model is trained"):
            checks.check(tiny_text.config(), pipe=tiny_text.model())


# --- two processes ---------------------------------------------------------------------------------------------------
CASES = {"shards": FSDP2, "tokens": sizes(cp=2), "shards and tokens": FSDP2 | sizes(cp=2)}


def bright(videos, prompts):
    """The mean of a clip."""
    return videos.flatten(1).mean(1)


def trained(folder: Path) -> tuple:
    """A tiny Wan that a run in a folder has aligned, and its configuration; the launcher says how it is spread."""
    pipe, call = make("WanPipeline")
    config = tiny.config(folder, model="tiny", method="mix_grpo", parts={"plan": {"size": 2}}, reward="bright",
                         image__call=call, train__steps=4, train__lr=1e-3, eval__steps=2, eval__prompts=1)
    run(config, pipe=pipe, functions={"bright": bright}, prompts=[Prompt(text) for text in tiny.PROMPTS])
    return pipe, load(folder / "run" / "config.yaml", {})


def lora(pipe) -> dict[str, torch.Tensor]:
    """The trained weights, which are whole everywhere."""
    return {key: value.detach().clone().contiguous() for key, value in pipe.transformer.named_parameters()
            if "lora" in key}


def one_of_two(folder: Path, case: str) -> None:
    rank = os.environ["RANK"]
    with mock.patch("torch.accelerator.device_count", return_value=1):  # diffusers divides by it
        pipe, config = trained(folder / case)
    save_file(lora(pipe), folder / f"{case}{rank}.safetensors")
    held = sum(getattr(each, "_local_tensor", each).numel() for each in pipe.transformer.parameters())
    found = {"held": held, "shard": config.memory.shard, "members": config.memory.context_parallel}
    (folder / f"{case}{rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("case", CASES)
def test_two_processes_that_accelerate_configured_train_as_one(case, tmp_path):
    environment = launched(tmp_path, CASES[case])
    port = free_ports(1)[0]
    (out, _), _ = together(one_of_two, 2, tmp_path, case, timeout=300, **environment | {"MASTER_PORT": port})
    pipe, _ = trained(tmp_path / "alone")
    whole, weights = sum(each.numel() for each in pipe.transformer.parameters()), lora(pipe)
    assert max(value.abs().max() for key, value in weights.items() if "lora_B" in key) > 1e-4
    for rank in range(2):
        found = json.loads((tmp_path / f"{case}{rank}.json").read_text())
        assert found["shard"] is ("shards" in case) and found["members"] == 1 + ("tokens" in case)
        assert (found["held"] < 0.8 * whole) == ("shards" in case)
        torch.testing.assert_close(load_file(tmp_path / f"{case}{rank}.safetensors"), weights, rtol=0, atol=1e-6)
    assert ("memory.shard: true (from accelerate's configuration)" in out) == ("shards" in case)
    assert ("memory.context_parallel: 2 (from accelerate's configuration)" in out) == ("tokens" in case)


ACCELERATE, TORCHRUN = "accelerate launch --cpu --num_processes 1", "torchrun --nproc_per_node 1 --master_port"


@pytest.mark.parametrize("launcher, program, code, told", [
    *((launcher, f"exit {code}", code, "") for launcher in (ACCELERATE, TORCHRUN) for code in (0, 2, 3)),
    (ACCELERATE, "kill -KILL $$", 137, "flowgrpo: error: the process was killed by SIGKILL\n"),
    (TORCHRUN, "kill -KILL $$$$", 137, "flowgrpo: error: process 0 was killed by SIGKILL\n"),  # it replaces $$ by $
    (TORCHRUN, "trap 'exit 130' TERM; kill -TERM $PPID; sleep 60 & wait", 130, "")])
def test_a_launcher_ends_without_a_traceback(launcher, program, code, told):
    """The processes print why they end."""
    command = [*launcher.split(), *free_ports(launcher == TORCHRUN), "--no_python", "bash", "-c", program]
    ended = Forked(launchers.main, command)
    try:
        assert ended.wait(60) == code
        said = ended.streams()[1].splitlines(True)
        assert "Traceback" not in "".join(said) and "".join(said if launcher == TORCHRUN else said[-1:]) == told
    finally:
        ended.kill()


@pytest.mark.parametrize("rank, seconds", [("0", []), ("1", [launchers.FIRST])])
def test_the_error_of_all_processes_is_printed_by_the_first(rank, seconds, monkeypatch):
    """torch's launcher ends the others before they print it."""
    waited: list[float] = []
    monkeypatch.setattr(launchers.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", rank)
    launchers.let_the_first_speak()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    launchers.let_the_first_speak()
    assert waited == seconds


@pytest.mark.parametrize("plain", [True, False])
def test_the_first_of_two_processes_prints_an_error_that_torchruns_own_report_repeats(plain, tmp_path):
    arguments = ["torchrun", "--nproc_per_node", "2", "--master_port", str(free_ports(1)[0]), "-m", "flowgrpo", "train",
                 "starter", "--train.lrr=3"]
    command = [sys.executable, *(["-m", "torch.distributed.run", *arguments[1:]] if plain else
                                 ["-m", "flowgrpo.distributed.launchers", *arguments])]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ})
    error = "flowgrpo: error: unknown option --train.lrr: did you mean '--train.lr'?"
    assert found.stderr.splitlines().count(error) == 1 and not found.stdout
    if plain:  # its traceback cannot be prevented
        assert found.returncode == 1 and f"traceback : {error}" in found.stderr
    else:
        assert found.returncode == 2 and found.stderr.splitlines() == [error]

"""Options of the model, its memory and its adapter that do not go together: one line of the command, exit code 2."""

import pytest

from flowgrpo.config import load
from flowgrpo.policies import options
from tests.helpers import loop
from tests.helpers.commands import refusal
from tests.helpers.refusals import message

BLOCKS = {"memory.offload": "block_level", "train.checkpointing": True}
LEAVES = {"memory.offload": "leaf_level", "train.checkpointing": True}
SIZES = {"image.sizes": [[16, 16], [8, 16], [16, 8]]}
TEXFORCE = {"method": "flow_grpo+texforce"}
COMMANDS = [
    ({"memory.denoiser": "cpu"}, "memory.encoders: keep"),
    ({"memory.offload": "block_level"}, "train.checkpointing: false"),
    ({"memory.offload": "block_level", "train.checkpointing": 0.5}, "train.checkpointing: 0.5"),
    (LEAVES | {"memory.shard": True}, "memory.shard: use false"), (LEAVES | {"train.compile": True}, "train.compile"),
    (BLOCKS | {"adapter.rank": 0}, "set a rank"), (BLOCKS | {"adapter.dora": True}, "adapter.dora"),
    (BLOCKS | {"memory.denoiser": "cpu"}, "use keep"),
    ({"memory.weights": "nf4"}, "only onto a GPU"),
    ({"memory.weights": "int8", "adapter.rank": 0}, "cannot be trained"),
    ({"memory.weights": "int8", "adapter.dora": True}, "adapter.dora"),
    ({"memory.weights": "fp8", "adapter.rank": 0}, "memory.weights is 'fp8', but adapter.rank is 0"),
    ({"memory.weights": "int8", "method": "mix_grpo+sol_rl", "parts": {"preview": {"precision": "int8"}}}, "once"),
    ({"adapter.rank": 0, "adapter.rslora": True}, "set a rank"),
    ({"adapter.dora": True, "parts": {"reference": {"type": "WeightAverage"}, "kl": {"weight": 0.1}}},
     "EMA or PreviousPolicy"),
    ({"parts": {"reference": {"type": "Soup", "models": ["nowhere"]}, "kl": {"weight": 0.1}}},
     "parts.reference.models is 'nowhere', which has no LoRA"),
    ({"adapter.init": "gone"}, "adapter.init is 'gone', which has no LoRA: expected a finished run, a fold"),
    *(({"memory.shard": True} | more, f"memory.shard is true, which does not go with {[*more][0]}") for more in (
        {"memory.weights": "int8"}, {"adapter.dora": True}, {"train.compile": True}, {"cache": "k"})),
    *(({"memory.shard": shard, "adapter.rank": 0} | more,
       f"memory.shard is {str(shard).lower()}, which does not go with adapter.rank") for shard, more in (
        ("nodes", {"train.optimizer": "adamw8bit"}), (True, {"precision": "fp16"}))),
    *(({"memory.shard": "nodes", "method": method}, f"method {method}, {why}") for method, why in (
        ("reinflow", "whose graph has many steps"), ("refl", "whose graph has many steps"),
        ("draft", "whose graph has many steps"), ("expo", "which trains nothing of the pipeline"))),
    (SIZES | {"method": "mix_grpo+sol_rl"}, "parts.preview"), (SIZES | {"method": "expo"}, "trains more than the den"),
    (SIZES | {"memory.shard": True}, "memory.shard: use false"),
    *((TEXFORCE | {key: value}, f"text encoders are trained (parts.adapted.encoders), which does not go with {key}")
      for key, value in (("adapter.rank", 0), ("adapter.dora", True), ("memory.encoders", "cpu"))),
    ({"model": "gone.safetensors"}, "model is 'gone.safetensors', but there is no such file"),
    ({"model": "model.ckpt"}, "model is 'model.ckpt': expected a .safetensors file"),
    ({"load.config": "a/b"}, "load.config is 'a/b', which is of a single file, but model is 'starter'"),
    ({"load.denoiser": "a.bin"}, "load.denoiser is 'a.bin': expected a .safetensors or .gguf file"),
    ({"load.denoiser": "a.gguf"}, "load.denoiser is 'a.gguf', but there is no such file"),
    ({"load.lora": ["gone"]}, "load.lora is 'gone', which has no LoRA"),
    ({"load.lora": [{"path": "a", "scal": 1}]}, "unknown key 'load.lora.0.scal': did you mean 'scale'"),
    ({"load.textual_inversion": ["a.pt"]}, "load.textual_inversion is 'a.pt': expected a .safetensors file"),
    ({"load.variant": "fp16"}, "load.variant is 'fp16', but 'starter' is a packaged model without such files"),
    ({"load.revision": "v2"}, "load.revision is 'v2', which is of a repository on the hub, but 'starter' is a ")]


@pytest.mark.parametrize("given, told", COMMANDS)
def test_what_does_not_go_together_is_refused_by_the_command(given, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert told in refusal(capsys, given)
    assert not (tmp_path / "runs").exists()


# Of several processes, or of files that are read first.
TEAM = "memory.context_parallel is 2, which does not go with "


@pytest.mark.parametrize("given, told", [
    ({"memory.denoiser": "cpu", "memory.encoders": "cpu"}, "context_parallel: use 1"),
    ({"train.compile": True}, f"{TEAM}train.compile: use false"), ({"cache": "k"}, f"{TEAM}cache, from which"),
    ({"method": "draft"}, f"{TEAM}method draft, which trains more than the denoiser"),
    ({"method": "reinflow"}, f"{TEAM}method reinflow, which trains more than the denoiser"),
    ({"method": "flow_grpo+sol_rl"}, f"{TEAM}parts.preview: leave sol_rl out"),
    ({"method": "ddpo+texforce"}, f"{TEAM}text encoders that are trained"),
    (SIZES | {"preferences": "pairs.jsonl", "method": "diffusion_dpo", "memory.context_parallel": 1}, "preferences")])
def test_what_does_not_go_with_a_team_or_with_sizes_is_refused_in_one_line(given, told):
    assert told in message(options.check, loop.setup(load(None, {"memory.context_parallel": 2} | given)))

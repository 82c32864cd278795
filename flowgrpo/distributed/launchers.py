"""Launchers: their end without a traceback, and the configuration of `accelerate launch` as keys of the recipe.

`python -m flowgrpo.distributed.launchers torchrun ...` (or `accelerate launch ...`) takes the launcher's own arguments.

A run shards weights and shares tokens itself (`memory.shard`, `memory.context_parallel`). It reads what accelerate was
configured for from the environment, and then turns it off there: accelerate would wrap the denoiser, and transformers
would load weights on the first process alone.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from flowgrpo.errors import UserError

KINDS = ("PARALLELISM_CONFIG", "FSDP", "DEEPSPEED", "MEGATRON_LM")
THEIRS, OURS = "ACCELERATE_USE_", "FLOWGRPO_USE_"  # the second of what a run has taken over
HEARD = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"  # signals that the launcher passes on to its processes
SECONDS = "3600"  # in which they may save; who sent the signal has a limit of its own
FIRST = 5.0  # seconds that an error of another process than the first is held back
PLAIN = "use accelerate launch --multi_gpu, or configs/accelerate/one_machine.yaml"


def accelerate_kinds(environment: Mapping[str, str], prefixes: tuple[str, ...] = (THEIRS, OURS)) -> list[str]:
    return [kind for kind in KINDS if any(_true(environment, f"{prefix}{kind}") for prefix in prefixes)]


def _true(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "false").lower() == "true"


def take_over(environment: MutableMapping[str, str]) -> dict[str, Any]:
    """Take the keys of the recipe that stand for accelerate's configuration, and turn it off in the environment.
    Raises UserError for what a run cannot do."""
    kinds = accelerate_kinds(environment)
    for kind in ("DEEPSPEED", "MEGATRON_LM"):
        if kind in kinds:
            raise UserError(f"launched with {kind}, which is not supported: use FSDP2 (fsdp_version: 2) or, without "
                            f"sharding, {PLAIN}")
    keys = _of_sizes(environment, "FSDP" in kinds) if "PARALLELISM_CONFIG" in kinds else \
        {"memory.shard": True} if "FSDP" in kinds else {}
    keys |= _of_fsdp(environment) if "FSDP" in kinds else {}
    for kind in accelerate_kinds(environment, (THEIRS,)):
        environment.update({f"{THEIRS}{kind}": "false", f"{OURS}{kind}": "true"})
    return keys


def _of_fsdp(environment: Mapping[str, str]) -> dict[str, Any]:
    """The key of accelerate's FSDP besides sharding. Raises UserError for other options than a run has."""
    version = environment.get("FSDP_VERSION", "1")
    wrong = {f"fsdp_version {version}, expected 2: set fsdp_version: 2": version != "2",
             "fsdp_offload_params: true, which does not go with sharding: set it to false":
                 _true(environment, "FSDP_OFFLOAD_PARAMS"),
             "fsdp_reshard_after_forward: false, but shards are always dropped after use: set it to true":
                 environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false"}
    for reason in (reason for reason, applies in wrong.items() if applies):
        raise UserError(f"launched with FSDP, with {reason} in accelerate's configuration")
    return {"train.checkpointing": True} if _true(environment, "FSDP_ACTIVATION_CHECKPOINTING") else {}


def _of_sizes(environment: Mapping[str, str], fsdp: bool) -> dict[str, Any]:
    """The keys for the sizes of a ParallelismConfig. fsdp: FSDP is on too. UserError for sizes that a run cannot have.
    """
    names = ("DP_REPLICATE", "DP_SHARD", "CP", "SP", "TP")
    sizes = {name: int(environment.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1")) for name in names}
    replicate, shard, tokens, sequence, tensor = sizes.values()
    members, count = tokens * sequence, int(environment.get("WORLD_SIZE", "1"))
    said = "launched with a ParallelismConfig "
    if tensor > 1:
        raise UserError(f"{said}of tp_size {tensor}, but tensor parallelism is not supported: set it to 1, and "
                        f"dp_shard_size to {shard * tensor}")
    if tokens > 1 and sequence > 1:
        raise UserError(f"{said}of cp_size {tokens} and sp_size {sequence}, which are the same here: set one of them "
                        "to 1")
    # The sizes have to account for all processes.
    product = replicate * shard * members
    if product not in (1, count):
        raise UserError(f"{said}whose sizes multiply to {product}, but there are {count} processes: set dp_shard_size, "
                        "dp_replicate_size, cp_size or sp_size so that they multiply to it")
    shards = shard * members if fsdp else shard
    if fsdp and shards == 1:
        raise UserError(f"{said}of dp_shard_size 1, but with FSDP: set dp_shard_size to {count}, or use no FSDP")
    keys: dict[str, Any] = {"memory.context_parallel": members} if members > 1 else {}
    if shards == 1:
        return keys
    # Copies of shards are those of nodes here, so that only gradients cross the network.
    node = int(environment.get("LOCAL_WORLD_SIZE", count))
    if replicate > 1 and shard * members != node:
        raise UserError(f"{said}of dp_replicate_size {replicate}, but its shards of {shard * members} processes are "
                        f"not those of a node, {node}: set dp_shard_size to {max(node // members, 1)}, or "
                        "dp_replicate_size to 1")
    return keys | {"memory.shard": "nodes" if replicate > 1 else True}


def main(command: list[str]) -> int:
    """Run `torchrun` or `accelerate launch` with its arguments, without a log and traceback of theirs at its end.
    Returns 0; 130 after a signal, which is passed on to the processes; else the exit code of the first that failed."""
    # Let the launcher pass on the signals of a stop, and wait until a checkpoint is written.
    for name in ("PET_SIGNALS_TO_HANDLE", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        os.environ.setdefault(name, HEARD)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SECONDS)
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if "LOGLEVEL" not in os.environ:  # torch's own name for it
        logging.disable(logging.ERROR)
    sys.argv = command
    # Each end that is no fault of the launcher becomes an exit code and at most one line.
    try:
        if command[:1] == ["torchrun"]:
            run.main()
        elif command[:2] == ["accelerate", "launch"]:
            from accelerate.commands.accelerate_cli import main as accelerate

            accelerate()
        else:
            raise UserError(f"got {' '.join(command[:2]) or 'no command'}, expected torchrun or accelerate launch")
    except SignalException:
        for name in HEARD.split(","):  # further signals of the stop
            signal.signal(signal.Signals[name], signal.SIG_IGN)
        return 130
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _code(failure.exitcode, f"process {rank}")
    except subprocess.CalledProcessError as error:  # accelerate's, of a single process
        return _code(error.returncode, "the process")
    except (DistError, ConnectionError, UserError) as error:
        _say(str(error))
        return 2
    return 0


def let_the_first_speak(text: str = "") -> None:
    """Wait before this process prints an error, unless it is the first: torch's launcher ends it as soon as the first
    one, which has the same error as a rule, has printed it. text: the error, which becomes the cause in the report that
    plain `torchrun` prints in any case."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if os.environ.get("RANK", "0") != "0":
        time.sleep(FIRST)
    if text and (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        with contextlib.suppress(OSError):
            cause = {"message": f"flowgrpo: error: {text}", "extraInfo": {"timestamp": int(time.time())}}
            Path(file).write_text(json.dumps({"message": cause}), encoding="utf-8")


def _code(code: int, who: str) -> int:
    """who: the process, which is named if a signal killed it."""
    if code < 0:
        _say(f"{who} was killed by {signal.Signals(-code).name}")
    return code if code > 0 else 128 - code


def _say(text: str) -> None:
    print(f"flowgrpo: error: {UserError(text)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

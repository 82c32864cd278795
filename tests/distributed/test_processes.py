"""Two processes train as one: the same weights, the same memory, the same numbers; and they stop and resume together.

One launch does all that takes two: `one_of_two`, run in each process, leaves what it found in a folder.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flowgrpo.cli import main
from flowgrpo.cli.train import UNTRAINED
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from flowgrpo.distributed.signals import Stopped
from flowgrpo.errors import UserError
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.training import state, trial
from flowgrpo.training.optimizer import chunks
from tests.helpers import tiny
from tests.helpers.processes import free_ports, together
from tests.helpers.tiny_runs import assert_same_weights, command

# Prompts are sampled one by one, so that one process and two replay the very same batches.
SMALL = dict(train__prompts=4, train__group=4, train__micro_batch=4, train__lr=1e-3)
CASES = {
    "mix_grpo": dict(method="mix_grpo", train__updates=2, train__inner_epochs=2),
    "flow_grpo": dict(method="flow_grpo", parts__selection={"type": "Beyond", "quantile": 0.4}),
    "b2_diffurl": dict(method="b2_diffurl", train__group=16, train__micro_batch=16),
    "tempflow_grpo": dict(method="tempflow_grpo"),  # several explorations of a prompt, weights of the epoch's steps
    "mix_grpo+sol_rl": dict(method="mix_grpo+sol_rl", parts__preview={"pool": 6, "steps": 2}),
    "lopsided": dict(method="flow_grpo", parts__selection={"type": "DropZeroVariance"}, train__updates=2),
    "redrawn lopsided": dict(method="flow_grpo+dynamic_sampling"),
    # Finals noised at more times than the rollout has steps, whose groups are cut and so looked at before.
    "noised": dict(method="diffusion_nft", train__updates=2),
    "noised lopsided": dict(method="dgpo", parts__selection={"type": "DropZeroVariance"}, train__micro_batch=2,
                            parts__times={"type": "Stratified", "count": 7, "shared": True}),
}
# With weights that are shared out, whoever has less to replay goes with the other.
CASES |= {f"sharded {case}": CASES[case] | {"memory__shard": True}
          for case in ("mix_grpo", "lopsided", "noised lopsided")}
CASES["sharded mix_grpo"] |= {"train__checkpointing": True}
EPOCHS = 2
REWARD = '''
import os
import signal
from pathlib import Path

calls = 0

def red(images, prompts):
    """Ask the second process to stop in the second epoch; the first call measures the base, two come per epoch."""
    global calls
    calls += 1
    plan = Path(__file__).with_name("stop")
    if calls == 4 and plan.exists() and os.environ.get("RANK") == "1":
        plan.unlink()
        os.kill(os.getpid(), signal.SIGTERM)
    return images[:, 0].mean((1, 2))

def short(images, prompts):
    return [0.5]

def same(images, prompts):
    return [0.5] * len(prompts)
'''


# --- in both processes -----------------------------------------------------------------------------------------------
def half_flat():
    """A reward that says nothing of the second half of the first epoch's prompts, which are the second process's."""
    batch = sets.draw([Prompt(text) for text in tiny.PROMPTS], 4, 0, 0)
    flat = {prompt.text for prompt in batch[2:]}
    return lambda images, prompts: [0.5 if prompt in flat else value
                                    for prompt, value in zip(prompts, tiny.red(images, prompts).tolist())]


def green(images, prompts):
    return images[:, 1].mean((1, 2))


def trained(case: str):
    """A trainer after some epochs, and their metrics."""
    lopsided = case.endswith("lopsided")
    rewards = {"red": half_flat()} if lopsided else {"red": tiny.red, "green": green}
    trainer = tiny.trainer(rewards=rewards, reward={name: 1.0 for name in rewards}, **SMALL | CASES[case])
    metrics = []
    trial.require(trainer, {"watched": green})  # of weights that are shared out too
    for trainer.epoch in range(1 if lopsided else EPOCHS):
        metrics.append(trainer.run_epoch())
    counters = {key: value for key, value in state.counters(trainer).items() if "seconds" not in key}
    return trainer, {"metrics": metrics, "counters": counters}


def held(policy) -> int:
    """How many numbers of the denoiser's weights lie on this process."""
    return sum(getattr(parameter, "_local_tensor", parameter).numel()
               for parameter in policy.denoisers["transformer"].parameters())


def arguments(folder: Path, output: str) -> list[str]:
    """A run of the folder's recipe."""
    return ["train", "--trust", str(folder / "recipe.yaml"), f"--output={folder / output}"]


def join_anew(port: str) -> None:
    """Leave the process group, as every run does at its end, so that the next run can join one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["MASTER_PORT"] = port


def one_of_two(folder: Path) -> None:
    """All that one process does: every case, a run that is asked to stop, and the same run resumed."""
    processes = Processes(Accelerator(cpu=True))
    own, found = folder / f"process{processes.rank}", {}
    own.mkdir()
    for case in CASES:
        trainer, found[case] = trained(case)
        save_file(trainer.policy.weights.snapshot(), own / f"{case}.safetensors")
        if case.startswith("sharded") and processes.first:
            trainer.policy.weights.save(folder / case)
        found[case]["held"] = held(trainer.policy)
        if case == "sharded lopsided":
            found["after saving"] = trainer.run_epoch()
    join_anew(os.environ["SECOND_PORT"])
    found["stopped"] = main(arguments(folder, "two"))
    if processes.first:
        shutil.copytree(folder / "two", folder / "stopped")
    join_anew(os.environ["THIRD_PORT"])
    found["resumed"] = main([*arguments(folder, "two"), "--resume"])
    join_anew(os.environ["FOURTH_PORT"])
    found["refused"] = main([*arguments(folder, "refused"), f"--reward={folder}/reward.py:short"])
    join_anew(os.environ["FIFTH_PORT"])
    found["untrained"] = main([*arguments(folder, "untrained"), f"--reward={folder}/reward.py:same",
                               "--train.epochs=1", "--train.warmup=0", "--eval.every=0", "--tracker=none"])
    (own / "found.json").write_text(json.dumps(found))


# --- what the tests look at ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """What two processes have left behind, beside the recipe that they ran, with a moving average and a warm-up."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "stop").touch()
    command(model, folder, REWARD, tracker="tensorboard", train__epochs=3, train__updates=2, train__ema=0.9,
            train__warmup=3, train__steps=4, parts__plan__size=2, eval__every=3, eval__samples=2, eval__weights="ema",
            **SMALL)
    ports = dict(zip(("MASTER_PORT", "SECOND_PORT", "THIRD_PORT", "FOURTH_PORT", "FIFTH_PORT"), free_ports(5)))
    (folder / "said.json").write_text(json.dumps(together(one_of_two, 2, folder, timeout=900, **ports)))
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """What each of the two found."""
    return [json.loads((folder / f"process{rank}" / "found.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(case, folder, found):
    both = [load_file(folder / f"process{rank}" / f"{case}.safetensors") for rank in (0, 1)]
    assert_same_as_alone(case, both, [each[case] for each in found])


def assert_same_as_alone(case: str, both: list[dict[str, torch.Tensor]], found: list[dict]) -> None:
    """Compare the weights and what was found on two processes with a run on one."""
    trainer, alone = trained(case)
    start = tiny.trainer(**SMALL | CASES[case]).policy.weights.snapshot()
    weights = trainer.policy.weights.snapshot()
    assert max((weights[key] - start[key]).abs().max() for key in weights) > 1e-4
    assert_same_weights(*both)
    torch.testing.assert_close(both[0], weights, rtol=0, atol=1e-6)
    told = [{key: each[key] for key in alone} for each in found]
    assert told[0] == told[1]
    expected = numbers(json.loads(json.dumps(alone)))
    assert numbers(told[0]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_two_processes_hold_half_of_what_is_shared_out_and_save_the_same_file(folder, found, tmp_path):
    trainer, _ = trained("sharded mix_grpo")
    lora = sum(parameter.numel() for parameter in trainer.policy.weights.parameters())
    frozen = held(trainer.policy) - lora
    shares = [each["sharded mix_grpo"]["held"] - lora for each in found]
    assert sum(shares) == frozen and max(shares) < 0.55 * frozen
    assert found[0]["mix_grpo"]["held"] == frozen + lora
    assert found[0]["after saving"] == found[1]["after saving"]  # what the first did alone has not parted them
    trainer.policy.weights.save(tmp_path)
    files = (tmp_path / LORA_FILE, folder / "sharded mix_grpo" / LORA_FILE)
    with safe_open(files[0], "pt") as alone, safe_open(files[1], "pt") as two:
        assert told(alone) == told(two) and alone.keys() == two.keys()
        for key in alone.keys():
            torch.testing.assert_close(two.get_tensor(key), alone.get_tensor(key), rtol=0, atol=1e-6)


def told(file) -> dict:
    """A LoRA file's metadata; its targets are a set."""
    [written] = [json.loads(value) for key, value in file.metadata().items() if key != "format"]
    return {key: sorted(value) if isinstance(value, list) else value for key, value in written.items()}


def numbers(record, path: str = "") -> dict[str, float]:
    """All values of a nested record, each under its path."""
    inner = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    found = {} if isinstance(record, (dict, list)) else {path: record}
    for key, value in inner:
        found |= numbers(value, f"{path}/{key}")
    return found


def test_a_process_may_have_nothing_to_train(found):
    """Of the groups of the first epoch only those of the first process differ."""
    assert found[0]["lopsided"]["metrics"][0]["reward/red/zero_variance_groups"] == 0.5
    assert found[1]["lopsided"]["counters"]["update"] == 2


def lines(run: Path) -> list[dict]:
    """The metrics without times and memory, under the reward's bare name."""
    text = re.sub(r'/[^"]*/reward.py:', "", (run / "metrics.jsonl").read_text())
    return [{key: value for key, value in json.loads(line).items() if "second" not in key and key != "memory/host"}
            for line in text.splitlines()]


def test_a_stop_of_one_is_a_stop_of_both(folder, found):
    assert [each["stopped"] for each in found] == [130, 130] and not (folder / "stop").exists()
    done = [line["epoch"] for line in lines(folder / "stopped" / "run")]
    assert done in ([1], [1, 2])
    assert [path.name for path in (folder / "stopped" / "run" / "checkpoints").iterdir()] == [f"epoch-0000{done[-1]}"]
    assert [each["resumed"] for each in found] == [0, 0]


def test_a_broken_reward_ends_both_with_one_line(folder, found):
    assert [each["refused"] for each in found] == [2, 130] and not (folder / "refused").exists()
    (_, first), (_, second) = json.loads((folder / "said.json").read_text())
    assert first.count("flowgrpo: error:") == 1 and "flowgrpo: error:" not in second
    assert "reward.py:short' returned 1 value: expected 2 numbers, one per sample" in first


def test_a_run_that_trained_nothing_ends_both_with_the_same_code(folder, found):
    assert [each["untrained"] for each in found] == [UNTRAINED, UNTRAINED]
    (_, first), (_, second) = json.loads((folder / "said.json").read_text())
    assert "flowgrpo: Nothing was trained in 1 epoch" in first and "Nothing was trained" not in second


def test_only_the_first_process_speaks_and_writes(folder):
    (_, first), (told, second) = json.loads((folder / "said.json").read_text())
    assert "epoch 1 of 3" in first and told == "" and "epoch 1" not in second and "held-out" not in second
    run = folder / "two" / "run"
    assert len(list(run.rglob("events.out.tfevents*"))) == 2  # one of each attempt
    assert max(path.name for path in (run / "checkpoints").iterdir()) == "epoch-00003"


@pytest.mark.parametrize("resumed", [False, True])
def test_one_process_makes_the_same_run_and_goes_on_with_that_of_two(resumed, folder):
    name = "resumed" if resumed else "one"
    if resumed:
        shutil.copytree(folder / "stopped", folder / name)
    assert main([*arguments(folder, name), *(["--resume"] if resumed else [])]) == 0
    one, two = (folder / each / "run" for each in (name, "two"))
    weights = [load_file(run / LORA_FILE) for run in (one, two)]
    states = [load_file(run / "checkpoints" / "epoch-00003" / "state.safetensors") for run in (one, two)]
    for pair in (weights, states):
        torch.testing.assert_close(*pair, rtol=0, atol=1e-6)
    for ours, theirs in zip(lines(one), lines(two), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (one, two)]
    for key in ("denoiser_evaluations", "samples", "updates", "epochs", "rollout_evaluations_per_sample",
                "rollout_evaluations_saved_by_sharing", "evaluation"):
        assert summaries[0][key] == summaries[1][key], key
    for when in ("before", "after"):
        assert [*summaries[0][when].values()] == pytest.approx([*summaries[1][when].values()], abs=1e-5)


# --- alone -----------------------------------------------------------------------------------------------------------
def test_one_process_hears_itself():
    alone, values = Processes(), torch.arange(3)
    assert alone.first and alone.gather(values) is values and alone.total([2, 3]) == [2, 3]
    assert alone.own([1, 2, 3]) == [1, 2, 3] and alone.any(True) and not alone.any(False)
    with pytest.raises(ZeroDivisionError), alone.collective():
        1 / 0


def test_a_part_goes_to_the_step_of_its_place_among_all():
    everywhere, shares = list(range(11)), [slice(0, 4), slice(4, 4), slice(4, 5), slice(5, 11)]
    steps = [chunks(everywhere[at], 3, range(11)[at], 11) for at in shares]
    assert [sum(each, []) for each in zip(*steps, strict=True)] == chunks(everywhere, 3)
    assert chunks([], 3, [], 2) == [[], []] and chunks([7], 3, [1], 2) == [[], [7]]


# --- failures of one -------------------------------------------------------------------------------------------------
def out_of_memory_on_the_second(folder: Path, place: str) -> None:
    """Train in two processes, of which the second has no memory left in its second update: in the sum of gradients, or
    in the optimizer's step."""
    processes = Processes(Accelerator(cpu=True))
    trainer = tiny.trainer(**SMALL | CASES["mix_grpo"])
    def step(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    def full(parameter: torch.Tensor) -> None:
        if trainer.optimization.update == 1:
            parameter.grad = parameter.grad.as_subclass(Full)
    if processes.rank == 1 and place == "step":
        trained = trainer.optimization
        trained.optimizer.register_step_pre_hook(lambda *_: step() if trained.update == 1 else None)
    if processes.rank == 1 and place == "sum":
        for parameter in trainer.policy.weights.parameters():
            parameter.register_post_accumulate_grad_hook(full)
    message = "none"
    try:
        trainer.train(folder, {})
    except (UserError, Stopped) as error:
        message = f"{type(error).__name__}: {error}"
    (folder / f"{place}{processes.rank}").write_text(message)


def no_room_on_the_second(folder: Path, place: str) -> None:
    """Train in two processes, of which the second has no room for more than two rows in its rollouts or updates."""
    processes = Processes(Accelerator(cpu=True))
    trainer = tiny.trainer(**SMALL | CASES["mix_grpo"])
    def refuse(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        if len(kwargs["hidden_states"]) > 2 and torch.is_grad_enabled() == (place == "update"):
            raise torch.OutOfMemoryError("CUDA out of memory.")
    if processes.rank == 1:
        trainer.policy.pipe.transformer.register_forward_pre_hook(refuse, with_kwargs=True)
    said = []
    trainer.log = said.append
    trainer.run_epoch()
    save_file(trainer.policy.weights.snapshot(), folder / f"{place}{processes.rank}.safetensors")
    (folder / f"{place}{processes.rank}.json").write_text(json.dumps([said, trainer.geometry.micro_batch]))


@pytest.mark.parametrize("place", ["rollout", "update"])
def test_when_one_has_no_room_both_take_smaller_micro_batches(place, tmp_path):
    together(no_room_on_the_second, 2, tmp_path, place, timeout=120)
    told = [json.loads((tmp_path / f"{place}{rank}.json").read_text()) for rank in (0, 1)]
    assert told == [[["out of memory on another process: train.micro_batch 4 -> 2 from here on"], 2], [[], 2]]
    alone = tiny.trainer(**SMALL | CASES["mix_grpo"] | {"train__micro_batch": 2})
    alone.run_epoch()
    for rank in (0, 1):
        assert_same_weights(load_file(tmp_path / f"{place}{rank}.safetensors"), alone, atol=1e-6)


class Full(torch.Tensor):
    """A gradient that does not fit a second time."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.flatten:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("place", ["step", "sum"])
def test_when_one_has_no_memory_left_all_end(place, tmp_path):
    together(out_of_memory_on_the_second, 2, tmp_path, place, timeout=120)
    first, second = ((tmp_path / f"{place}{rank}").read_text() for rank in (0, 1))
    assert first == "Stopped: out of memory on another process"
    assert second.startswith("UserError: out of memory (CUDA out of memory.")

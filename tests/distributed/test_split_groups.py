"""Groups whose samples lie on several processes train as those of one process."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from flowgrpo.config import load
from flowgrpo.distributed.processes import Processes
from flowgrpo.rewards.reward import Reward
from flowgrpo.training import reward_demands
from tests.helpers import loop, tiny
from tests.helpers.processes import together
from tests.helpers.refusals import refused

# Micro-batches of as many rows as a slice, so that one process and several evaluate the very same batches.
SMALL = dict(train__prompts=2, train__group=4, train__micro_batch=2, train__lr=1e-3, train__steps=4)
CASES = {
    "flow_grpo": dict(method="flow_grpo", train__updates=2),
    "mix_grpo": dict(method="mix_grpo", parts__plan__size=2, train__inner_epochs=2),  # a shared noise and prefix
    "one sample each": dict(method="mix_grpo", parts__plan__size=2, train__prompts=1, train__micro_batch=1),
    "diffusion_dpo": dict(method="diffusion_dpo", parts__selection=None, train__updates=2, train__inner_epochs=2),
    "best and worst": dict(method="diffusion_dpo"),  # batches of two, or of one on each of two processes
    "dgpo": dict(method="dgpo", parts__times={"type": "Stratified", "count": 3, "shared": True}),
    "alignprop": dict(method="alignprop"),
    "straddling": dict(method="flow_grpo", train__prompts=3, train__updates=2, train__micro_batch=8),
    "own samples": dict(method="flow_grpo", parts__data={"type": "FlowMatching", "source": {
        "right": 0.0, "mastered": True}}),
    "sharded": dict(method="mix_grpo", parts__plan__size=2, memory__shard=True),
}
LAUNCHES = {4: [case for case in CASES if case != "straddling"], 2: ["straddling"]}


def green(images, prompts):
    return images[:, 1].mean((1, 2))


def trained(case: str):
    """A trainer after two epochs, and the number of samples that it has scored."""
    trainer = tiny.trainer(rewards={"red": tiny.red, "green": green}, reward={"red": 1.0, "green": 1.0},
                           **SMALL | CASES[case])
    for trainer.epoch in range(2):
        trainer.run_epoch()
    return trainer


def one_of_several(folder: Path, cases: list[str]) -> None:
    """Train every case; each process leaves its weights."""
    processes = Processes(Accelerator(cpu=True))
    for case in cases:
        trainer = trained(case)
        assert trainer.geometry.slices == (4 if case == "one sample each" else 2)
        assert trainer.progress.sampled == 2 * trainer.config.train.prompts * 4
        save_file(trainer.policy.weights.snapshot(), folder / f"{case}{processes.rank}.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The weights that two and four processes have left behind."""
    folder = tmp_path_factory.mktemp("split")
    for count, cases in LAUNCHES.items():
        together(one_of_several, count, folder, cases)
    return folder


# AdamW divides a gradient by its size: where it is nearly zero, the order of a sum shows.
NEAR = {"best and worst": 1e-4, "dgpo": 1e-5}


@pytest.mark.parametrize("case", CASES)
def test_a_split_group_trains_as_a_whole_one(case, folder):
    trainer = trained(case)
    start = tiny.trainer(**SMALL | CASES[case]).policy.weights.snapshot()
    weights = trainer.policy.weights.snapshot()
    assert max((weights[key] - start[key]).abs().max() for key in weights) > 1e-4
    for file in folder.glob(f"{case}[0-9].safetensors"):
        torch.testing.assert_close(load_file(file), weights, rtol=0, atol=NEAR.get(case, 1e-6))


@pytest.mark.parametrize("options, processes, told", [
    ({"method": "branch_grpo", "train.group": 16, "train.steps": 20}, 16, "the plan Branches grows trees of samples"),
    ({"method": "tempflow_grpo"}, 16, "the plan EachStep grows trees"),
    ({"method": "tree_rpo", "train.steps": 8, "train.group": 16}, 16, "grows trees of samples"),
    ({"method": "flow_grpo", "parts.roots": 2}, 16, "parts.roots: 2 shares initial noises among some of a group"),
    ({"method": "flow_grpo+sol_rl"}, 16, "parts.preview chooses the initial noises of a whole group"),
    ({"method": "flow_grpo+dynamic_sampling"}, 16, "parts.redraw replaces whole groups"),
    ({"method": "expo"}, 16, "latent edits stand beside their bases"),
    ({"method": "flow_grpo", "memory.shard": True}, 12, "memory.shard takes processes that sample alike"),
    ({"method": "flow_grpo", "parts.target": {"type": "RecordedSteps", "tuning": {"type": "LayerTuning",
                                                                                 "weight": 0.1}}}, 16,
     "parts.tuning pulls towards the best sample")])
def test_a_method_that_needs_whole_groups_is_refused_in_one_line(options, processes, told):
    config = load(None, {"train.prompts": 8, "train.group": 12, "train.micro_batch": 4} | options)
    reward_demands.check_whole_groups(loop.setup(config, processes=4))
    refused(told, reward_demands.check_whole_groups, loop.setup(config, processes=processes))


class Compares(Reward):
    unit = "group"


def test_a_reward_that_compares_a_group_is_refused_in_one_line():
    config = load(None, {"method": "pref_grpo", "train.prompts": 8, "train.group": 8})
    reward_demands.check_whole_groups(loop.setup(config, processes=16, rewards={"score": len}))
    refused("16 processes would split the groups of 8 prompts, but the reward 'judge' compares the samples of a group: "
            "use train.prompts: 16, or 8 processes", reward_demands.check_whole_groups,
            loop.setup(config, processes=16, rewards={"score": len, "judge": Compares()}))

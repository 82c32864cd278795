"""Trainers of every kind of model and every method on tiny models: of a flow, of a variance-preserving process, of a
causal and of a masked language model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from flowgrpo.config import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.policies import build
from flowgrpo.rewards import differentiable
from flowgrpo.run import run
from flowgrpo.storage import checkpoint
from flowgrpo.text.rewards.embeddings import letters
from flowgrpo.train import Trainer
from flowgrpo.training import state
from tests.helpers import tiny, tiny_masked, tiny_text

KINDS = ("flow", "vp", "tokens", "masks")
TEXTS = ("tokens", "masks")
HINTED = {"redraw": {"text": "{prompt}{hint}", "after": 0.0}}  # in characters that the tiny tokenizer has
# What methods need beside 2 prompts x 4 samples, 6 steps: room for their splits, or few samples to choose from.
PARTS = {"mix_grpo": {"plan": {"size": 2}}, "branch_grpo": {"plan": {"splits": [0, 2]}},
         "tree_rpo": {"plan": {"window": {"type": "Sliding", "size": 2}}},
         "b2_diffurl": {"plan": {"branch": 2}, "advantage": {"least": 4}},
         "ddpo": {"advantage": {"least": 4}}, "rlcm": {"advantage": {"least": 4}},
         "expo": {"edit": {"width": 8, "depth": 1}, "value": {"steps": 2, "batch": 4}},
         "alignprop": {"backprop": {"checkpointing": False}},
         "reinflow": {"kernel": {"width": 8}},
         "sol_rl": {"preview": {"pool": 6, "steps": 2}},
         "chord": {"data": {"balance": {"warmup": 0}}},  # mu is not 0 at first
         "llds": {"surrogate": {"weight": 1e-3}},  # what it adds jumps where a ratio is 1, as all are at first
         "scaf_grpo": HINTED, "ghpo": HINTED} | tiny_text.PARTS
PROMPTS = {True: ["1+2=", "33+4=", "5;66=", "7+8="], False: ["red", "blue", "green", "a cat"]}
# The prompts whose samples all score the same.
FLAT = {"1+2=", "red"}


def parts_of(method: str) -> dict[str, Any]:
    """The settings of the presets of a chain."""
    found: dict[str, Any] = {}
    for name in method.split("+"):
        found |= PARTS.get(name, {})
    return found


@differentiable
def score(outputs, prompts):
    """The red of an image, or how many digits a text has, sevens twice, within 0 to 1; 0 for all samples of FLAT."""
    if isinstance(outputs, torch.Tensor):
        values = tiny.red(outputs, prompts)
    else:
        values = letters(outputs, "01234567897").sum((1, 2)) / 12
    return values * torch.tensor([prompt not in FLAT for prompt in prompts], device=values.device)


def config(kind: str, method: str, parts: dict[str, Any] | None = None, **options: Any) -> Config:
    """A run of a method with its settings, and further `parts` over them."""
    own, made = parts_of(method) | (parts or {}), tiny_text if kind in TEXTS else tiny
    usual = dict(model="tiny", method=method, parts=own, reward="score", train__lr=1e-3, train__micro_batch=8,
                 train__epochs=3)
    return made.config(**usual | ({"image__call": {}} if kind == "vp" else {}) | options)


def loaded(kind: str):
    """The model of a kind."""
    return {"flow": tiny.sd3, "vp": lambda: tiny.sd15(tiny.pndm()), "tokens": tiny_text.model,
            "masks": tiny_masked.model}[kind]()


def trainer(kind: str, settings: Config) -> Trainer:
    """A trainer whose weights are off their start; a masked language model computes in float64, where no machine draws
    other tokens."""
    torch.manual_seed(settings.seed)
    policy = tiny.stir(build.make_policy(settings, torch.device("cpu"), loaded(kind)), 0.02)
    if kind == "masks":
        policy.model.double()
    metadata = {"answer": "7", "hints": ["1", "2"], "solution": "1+2",
                "questions": [{"question": "Is it red?", "answer": "yes"}]}
    prompts = [Prompt(each, metadata=metadata) for each in PROMPTS[kind in TEXTS]]
    return Trainer(settings, Accelerator(cpu=True), policy, {"score": score}, (prompts, []))


def frozen(made: Trainer) -> dict[str, torch.Tensor]:
    """Copies of all weights of the model or pipeline but those of a LoRA."""
    policy = made.policy
    modules = policy.pipe.components if hasattr(policy, "pipe") else {"model": policy.model}
    return {f"{name}.{key}": held.clone() for name, module in modules.items() if isinstance(module, torch.nn.Module)
            for key, held in module.state_dict().items() if "lora_" not in key}


def epochs(made: Trainer, count: int = 2) -> list[dict[str, Any]]:
    """The metrics of so many epochs."""
    found = []
    for made.epoch in range(count):
        found.append(made.run_epoch())
    return found


def next_epochs(made, count: int) -> list[dict]:
    """The metrics of the next epochs, as `Trainer.train` counts them."""
    lines = []
    for _ in range(count):
        lines.append(made.run_epoch())
        made.epoch += 1
        made.progress.saved_counters = state.counters(made)
    return lines


def resume(made, other, folder: Path) -> None:
    """Save a run in this folder, and go on with another one from there."""
    state.save(made, folder)
    state.restore(other, checkpoint.latest(folder / "checkpoints"))


def whole(settings: Config, functions: dict[str, Any] | None = None, resume: bool = False, pipe: Any = None
          ) -> dict[str, Any]:
    """The summary of a run on the tiny SD3, or another pipeline, by `red`, or other rewards, with the six prompts."""
    return run(settings, resume, pipe=pipe or tiny.sd3(), functions=functions or {"red": tiny.red},
               prompts=[Prompt(text) for text in tiny.PROMPTS])


def command(model: Path, folder: Path, reward: str, **options: Any) -> list[str]:
    """The command line of a run of a recipe, which it writes beside prompts and the file of a reward `red`."""
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(reward)
    (folder / "prompts.txt").write_text("\n".join(tiny.PROMPTS))
    settings = tiny.config(folder, model=str(model), reward=f"{folder}/reward.py:red",
                           prompts=str(folder / "prompts.txt"), **options)
    (folder / "recipe.yaml").write_text(settings.yaml())
    return ["train", "--trust", str(folder / "recipe.yaml")]


def whole_and_resumed(arguments: Callable[..., Any], folder: Path, **options: Any) -> tuple[Path, Path]:
    """The folders of a run of three epochs, and of one that lost its third, which it ran again when it was resumed.
    arguments: of `run`, anew for each call: settings of a folder and of options, and a dictionary."""
    whole, given = arguments(folder / "whole", train__epochs=3, **options)
    run(whole, **given)
    part, given = arguments(folder / "parts", train__epochs=3, train__save_every=2, train__keep=3, **options)
    run(part, **given)
    for name in ("after.json", "last.json"):
        (part.folder / "report" / name).unlink()
    shutil.rmtree(part.folder / "checkpoints" / "epoch-00003")
    _, given = arguments(folder / "parts")
    run(part, resume=True, **given)
    return whole.folder, part.folder


def lines(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run's epochs, as its folder has them."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def copies(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in values.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return bool(one) and one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def assert_resumes(make: Callable[[], Any], folder: Path, done: int, more: int) -> tuple[Any, Any, list[dict]]:
    """Require that a run which goes on from a checkpoint of `done` epochs has the metrics and weights of one without a
    break `more` epochs later. Return this one, the resumed one, and the metrics of these epochs."""
    made, other = make(), make()
    next_epochs(made, done)
    resume(made, other, folder)
    lines = next_epochs(made, more)
    assert next_epochs(other, more) == lines
    assert_same_weights(other, made)
    return made, other, lines


def assert_same_weights(made, other, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Require that two runs, or snapshots of weights, have the same trained weights."""
    one, two = (each if isinstance(each, dict) else each.policy.weights.snapshot() for each in (made, other))
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(tensor, two[key], rtol=rtol, atol=atol)


@torch.no_grad()
def require_slope(live: dict[str, torch.nn.Parameter], value: Callable[[], float], step: float = 1e-2) -> None:
    """Require that the largest entry of the gradients is the finite difference of a value of the weights."""
    parameter = max(live.values(), key=lambda each: each.grad.abs().max())
    place = int(parameter.grad.abs().argmax())
    slope, found = parameter.grad.flatten()[place].item(), []
    for change in (step, -step):
        parameter.view(-1)[place] += change
        found.append(value())
        parameter.view(-1)[place] -= change
    difference = (found[0] - found[1]) / (2 * step)
    assert abs(difference - slope) < 0.02 * abs(slope) + 1e-7, (difference, slope)

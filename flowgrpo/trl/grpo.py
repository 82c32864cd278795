"""`FlowGRPOTrainer`: a trainer with the arguments of TRL's GRPOTrainer, over `align`."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.parts import Above, AtLeast, Range
from flowgrpo.run import align
from flowgrpo.trl.arguments import NamedArguments, check, processes, with_options, wrong_numbers

RANGES: dict[str, Range | int] = {
    "num_generations": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "num_iterations": 1,
    "max_steps": 1, "save_steps": 1, "seed": 0, "num_inference_steps": 2, "learning_rate": Above(0),
    "max_grad_norm": AtLeast(0), "beta": AtLeast(0), "epsilon": AtLeast(0, to=1), "guidance_scale": AtLeast(0)}


@dataclass
class FlowGRPOConfig(NamedArguments):
    """Settings of `FlowGRPOTrainer` by TRL's names; a field that is None leaves the method's value.

    The run's folder is output_dir/run_name. max_steps and save_steps are in optimizer steps.
    method: presets joined by +; None: mix_grpo, of a language model grpo.
    per_device_train_batch_size: rows that go through the model at once.
    options: any further keys of flowgrpo's configuration, such as {"eval": {"prompts": 8}}.
    """

    output_dir: str = "runs"
    run_name: str = "trl"
    method: str | None = None
    seed: int = 0
    max_steps: int = 100
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_generations: int = 8
    num_iterations: int = 1
    learning_rate: float = 3e-4
    max_grad_norm: float = 1.0
    beta: float | None = None
    epsilon: float | None = None
    bf16: bool = False
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    reward_weights: list[float] | None = None
    save_steps: int = 50
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys()

    def keys(self) -> dict[str, Any]:
        """flowgrpo's configuration. Raises UserError for values out of range, and samples that are no whole groups."""
        if wrong := [*wrong_numbers(self, RANGES)]:
            raise UserError("; ".join(wrong))
        samples = self.per_device_train_batch_size * self.gradient_accumulation_steps * processes()
        if samples % self.num_generations:
            raise UserError(f"a step has {samples} samples (per_device_train_batch_size x gradient_accumulation_steps "
                            f"x processes), expected a multiple of num_generations, {self.num_generations}")
        # A round samples once, and takes num_iterations optimizer steps on these samples.
        train = {"epochs": math.ceil(self.max_steps / self.num_iterations), "inner_epochs": self.num_iterations,
                 "save_every": math.ceil(self.save_steps / self.num_iterations),
                 "prompts": samples // self.num_generations, "group": self.num_generations,
                 "micro_batch": self.per_device_train_batch_size, "lr": self.learning_rate,
                 "clip_grad": self.max_grad_norm or math.inf, "steps": self.num_inference_steps,
                 "guidance": self.guidance_scale}
        parts = {"kl": {"weight": self.beta}} if self.beta is not None else {}
        if self.epsilon is not None:
            parts["surrogate"] = {"low": self.epsilon, "high": self.epsilon}
        made = {"name": self.run_name, "output": self.output_dir, "seed": self.seed, "tracker": "none",
                "method": self.method, "precision": "bf16" if self.bf16 else "fp32", "parts": parts,
                "train": {key: value for key, value in train.items() if value is not None}}
        return with_options({key: value for key, value in made.items() if value is not None}, self.options)


class FlowGRPOTrainer(NamedArguments):
    """Trainer with the arguments of TRL's GRPOTrainer; `train()` gives the summary of `align`.

    reward_funcs: a name or a function, or several. A function takes flowgrpo's (images, prompts[, metadata]), or, if it
        has a parameter `completions`, by name prompts, completions and the columns of the prompts. Completions are
        images [B, 3, H, W] in [0, 1], or the strings of a language model.
    args: a `FlowGRPOConfig`, or a dictionary of its fields.
    train_dataset: a datasets.Dataset, or a list of prompts or records; a prompt file or set by name.
    """

    def __init__(self, model: Any, reward_funcs: Any, args: FlowGRPOConfig | dict[str, Any] | None = None,
                 train_dataset: Any = None) -> None:
        if not isinstance(args, (FlowGRPOConfig, dict, NoneType)):
            raise UserError(f"args: got {type(args).__name__}, expected a FlowGRPOConfig or a dictionary")
        self.model, self.args = model, args if isinstance(args, FlowGRPOConfig) else FlowGRPOConfig(**args or {})
        functions = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        weights = self.args.reward_weights or [1.0] * len(functions)
        if len(weights) != len(functions):
            raise UserError(f"reward_weights: got {len(weights)} for {len(functions)} reward_funcs: give one for each")
        self.rewards = {_by_name(function): weight for function, weight in zip(functions, weights)}
        rows = hasattr(train_dataset, "__len__") and not isinstance(train_dataset, (str, dict))
        self.prompts = [*train_dataset] if rows else train_dataset  # a datasets.Dataset too
        check(self.model, self.rewards, self.prompts, self.args.keys())

    def train(self, resume_from_checkpoint: bool = False) -> dict[str, Any]:
        """Train; the result is the content of summary.json."""
        return align(self.model, self.rewards, self.prompts, resume=bool(resume_from_checkpoint), **self.args.keys())


def _by_name(function: Any) -> Any:
    """A reward as `align` takes it, which calls one with a parameter `completions` as TRL does."""
    takes = inspect.signature(function).parameters if inspect.isroutine(function) else {}
    if "completions" not in takes:
        return function
    every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())

    def of_trl(outputs: Any, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Any:
        named = {key: [entry.get(key) for entry in metadata] for entry in metadata for key in entry}
        named |= {"prompts": list(prompts), "completions": outputs}
        return function(**{key: value for key, value in named.items() if every or key in takes})

    of_trl.__name__ = function.__name__
    return of_trl

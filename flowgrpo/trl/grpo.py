"""`GRPOTrainer`, `RLOOTrainer` and `FlowGRPOTrainer`: the arguments of TRL's GRPOTrainer, thin over `align`."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowgrpo.data import sets
from flowgrpo.errors import UserError
from flowgrpo.run import align
from flowgrpo.starter import FOLDERS
from flowgrpo.storage import atomic
from flowgrpo.trl.arguments import NamedArguments, check
from flowgrpo.trl.config import FlowGRPOConfig, GRPOConfig, RLOOConfig, over
from flowgrpo.trl.epochs import Epochs, Log, copy_weights

CONVERSATION = "conversation"  # metadata key of a prompt's messages
# Arguments of TRL's trainer that are not supported, and what does it instead.
REFUSED = {"tools": "completions call no tools", "rollout_func": "options={'text': {...}} has the engines",
           "environment_factory": "completions meet no environment",
           "optimizers": "the optimizer is AdamW: set learning_rate, adam_beta1, adam_beta2 and weight_decay",
           "quantization_config": "weights are in precision: set bf16, and peft_config for a LoRA",
           "reward_processing_classes": "a reward model by name loads its own tokenizer"}
OF_PEFT = {"bias": ("none", False), "modules_to_save": (None, []), "target_parameters": (None, []),
           "layers_to_transform": (None, []), "rank_pattern": (None, {}), "alpha_pattern": (None, {}),
           "init_lora_weights": (True,)}  # fields of a LoraConfig that have one value here


class FlowGRPOTrainer(NamedArguments):
    """Trainer with the arguments of TRL's GRPOTrainer; `train()` returns the summary of `align`.

    model: as of `align`, or a loaded language model.
    reward_funcs: a name or a function, or several. A function takes flowgrpo's (images, prompts[, metadata]), or by
        name TRL's prompts, completions, completion_ids and the columns of the prompts; it may be an `async def`.
        Completions are images [B, 3, H, W] in [0, 1], or those of a language model. OWNER/NAME is a reward model.
    args: a `FlowGRPOConfig`.
    train_dataset: a datasets.Dataset, or prompts, or records with a `prompt`, a string or messages, whose other columns
        are metadata; a prompt file or set by name.
    eval_dataset: the held-out prompts, in one of these forms.
    processing_class: tokenizer of a loaded language model.
    callbacks: of transformers; on_train_begin, on_log, on_step_end and on_train_end are called, and what they ask for
        is not read.
    peft_config: a LoraConfig of peft; its dropout is 0 here.
    """

    configuration: type[GRPOConfig] = FlowGRPOConfig
    method: str | None = None  # of the class
    by_name = False  # True if all functions take TRL's names

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, train_dataset: Any = None,
                 eval_dataset: Any = None, processing_class: Any = None, reward_processing_classes: Any = None,
                 callbacks: Sequence[Any] | None = None, optimizers: Any = (None, None),
                 quantization_config: Any = None, peft_config: Any = None, tools: Any = None, rollout_func: Any = None,
                 environment_factory: Any = None) -> None:
        name = type(self).__name__
        given = {"reward_processing_classes": reward_processing_classes, "tools": tools,
                 "optimizers": None if optimizers == (None, None) else optimizers,
                 "quantization_config": quantization_config, "rollout_func": rollout_func,
                 "environment_factory": environment_factory}
        if wrong := [argument for argument, value in given.items() if value is not None]:
            raise UserError("; ".join(f"{argument}: not supported here: {REFUSED[argument]}" for argument in wrong))
        if train_dataset is None:
            raise UserError(f"{name}: got no train_dataset, expected strings or records with a prompt")
        if reward_funcs is None:
            raise UserError(f"{name}: got no reward_funcs, expected a function or a name")
        if args is not None and not isinstance(args, GRPOConfig):
            raise UserError(f"args: got a {type(args).__name__}, expected a {self.configuration.__name__}")
        self.args: Any = args or self.configuration()
        self._tokenizer = processing_class
        self.model = _model(model, processing_class)
        self.options: dict[str, Any] = {}
        if self.method is not None and "method" not in self.args.options:
            self.options["method"] = self.method
        self.prompts = self._prompts("train_dataset", train_dataset)
        if eval_dataset is not None:
            self.options["held_out"] = eval_dataset if isinstance(eval_dataset, str) else self._file(eval_dataset)
        self.epochs = Epochs(callbacks or [], self.args)
        functions = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        weights = self.args.reward_weights or [1.0] * len(functions)
        if len(weights) != len(functions):
            raise UserError(f"reward_weights: got {len(weights)} for {len(functions)} reward_funcs: give one for each")
        self.rewards: dict[Any, Any] = {}
        for function, weight in zip(functions, weights):
            if isinstance(function, str) and _is_model(function):
                self.rewards[function.rpartition("/")[2]] = {"use": "reward_model", "args": {"model": function},
                                                             "weight": weight}
            else:
                self.rewards[self._function(function)] = weight
        if peft_config is not None:
            self.options["adapter"] = _adapter(peft_config)
        elif self.by_name:
            self.options["adapter"] = {"rank": 0}
        self._count = len(sets.resolve_prompts(self.prompts) if isinstance(self.prompts, str) else self.prompts)
        check(self.model, self.rewards, self.prompts, self._keys(), self.args.require_kind)

    def _keys(self) -> dict[str, Any]:
        """Return flowgrpo's configuration of the trainer."""
        return over(self.args.keys(self._count), self.options)

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(*self.args.folder)

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the language model."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            revision = self.args.init_kwargs().get("revision") or "main"
            self._tokenizer = AutoTokenizer.from_pretrained(FOLDERS.get(self.model, self.model), revision=revision)
        return self._tokenizer

    def train(self, resume_from_checkpoint: bool | str | None = None) -> dict[str, Any]:
        """Train, and return the content of summary.json."""
        resume = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        keys = self._keys()
        if line := self.args.unread():
            print(line)
        with self.epochs.of(self.folder):
            return align(self.model, self.epochs.watching(self.rewards), self.prompts, resume=bool(resume), **keys)

    def save_model(self, output_dir: str | None = None) -> None:
        """Copy the trained weights of the run into a folder; None: output_dir."""
        copy_weights(self.folder, output_dir or self.args.folder[0])

    def push_to_hub(self, *_: Any, **__: Any) -> None:
        """Upload the run to hub_model_id; without one, print the command that does it."""
        if self.args.hub_model_id is None:
            print(f"push_to_hub: nothing was sent, hub_model_id is not set: flowgrpo push {self.folder} OWNER/NAME")
            return
        from flowgrpo.export import push

        print(push.push(self.folder, self.args.hub_model_id, bool(self.args.hub_private_repo), self.args.hub_revision))

    # --- prompts ---

    def _prompts(self, what: str, dataset: Any) -> Any:
        """Return prompts as `align` takes them; messages become the text that the model reads."""
        if isinstance(dataset, str):
            return dataset
        if isinstance(dataset, Mapping) and not isinstance(dataset, Sequence):
            raise UserError(f"{what}: got a {type(dataset).__name__} of {', '.join(map(str, dataset))}, expected one "
                            "of its splits")
        rows = [_record(what, row) for row in self._as_list(what, dataset)]
        talks = [row["prompt"] for row in rows if not isinstance(row["prompt"], str)]
        if not talks:
            return rows
        systems = {talk[0]["content"] if talk[0]["role"] == "system" else None for talk in talks}
        plain = len(systems) == 1 and all([turn["role"] for turn in talk if turn["role"] != "system"] == ["user"]
                                          for talk in talks)
        set_before = self.options.get("text", {"system": next(iter(systems))})
        if plain and not self.args.template_kwargs() and set_before.get("system") == next(iter(systems)):
            self.options["text"] = {"system": next(iter(systems))}
            shown: Callable[[Any], str] = lambda talk: talk[-1]["content"]  # noqa: E731
        elif what == "eval_dataset" and "template" not in self.options.get("text", {}):
            raise UserError("eval_dataset: its system messages differ from those of train_dataset, expected the same")
        else:
            self.options["text"] = {"template": False}
            shown = self._render_messages
        return [row if isinstance(row["prompt"], str) else
                row | {"prompt": shown(row["prompt"]),
                       "metadata": row.get("metadata", {}) | {CONVERSATION: row["prompt"]}} for row in rows]

    def _as_list(self, what: str, dataset: Any) -> list[Any]:
        if hasattr(dataset, "__len__"):
            return list(dataset)
        if self.args.max_steps < 1:
            raise UserError(f"{what}: got a stream of unknown length, expected max_steps in the configuration")
        return list(itertools.islice(dataset, self.args.max_steps * self.args.samples))

    def _render_messages(self, messages: list[dict[str, Any]]) -> str:
        """Return messages in the tokenizer's chat template, without the token that the tokenizer puts before it."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError("prompts are messages of several turns or with chat_template_kwargs, which need a chat "
                            "template, and the tokenizer has none: give prompts as strings")
        ends = {"continue_final_message": True} if messages[-1]["role"] == "assistant" else \
            {"add_generation_prompt": True}
        text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, **ends, **self.args.template_kwargs()))
        first = self.tokenizer.bos_token or ""
        added = first and self.tokenizer("a")["input_ids"][:1] == [self.tokenizer.bos_token_id]
        return text.removeprefix(first) if added else text

    def _file(self, dataset: Any) -> str:
        """Write held-out prompts to a file beside the run, and return its path."""
        lines = [json.dumps(row, ensure_ascii=False) for row in self._prompts("eval_dataset", dataset)]
        path = self.folder.parent / f"{self.folder.name}_eval.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, "\n".join(lines) + "\n")
        return str(path)

    # --- rewards ---

    def _function(self, function: Any) -> Any:
        """Return a reward as `align` takes it: one that names TRL's arguments is called as TRL does."""
        if not callable(function):
            return function
        try:
            takes = inspect.signature(function).parameters
        except (TypeError, ValueError):
            return function
        if not (self.by_name or {"completions", "completion_ids"} & takes.keys()):
            if not inspect.iscoroutinefunction(function):
                return function

            def call(*given: Any) -> Any:
                return _run_coroutine(function(*given[:len(takes)]))

            call.__name__ = function.__name__
            return call
        every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())

        def of_trl(outputs: Any, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Any:
            talks = [entry.get(CONVERSATION) for entry in metadata]
            texts = isinstance(outputs, (list, tuple)) and all(isinstance(output, str) for output in outputs)
            completions = outputs if not texts else [
                str(output) if talk is None else [{"role": "assistant", "content": str(output)}]
                for output, talk in zip(outputs, talks)]
            columns = {key: [entry.get(key) for entry in metadata]
                       for key in {key for entry in metadata for key in entry} - {CONVERSATION}}
            named = columns | {"prompts": [text if talk is None else talk for text, talk in zip(prompts, talks)],
                               "completions": completions}
            if texts and (every or "completion_ids" in takes):
                named["completion_ids"] = [self._ids(output) for output in outputs]
            if every or takes.keys() & {"log_metric", "log_extra", "trainer_state"}:
                named |= self._hook_arguments()
            return _run_coroutine(function(**{key: value for key, value in named.items() if every or key in takes}))

        of_trl.__name__ = getattr(function, "__name__", type(function).__name__)
        return of_trl

    def _ids(self, output: Any) -> list[int]:
        """Return the tokens of a completion: those that were sampled, or of a text that was read from a file its own.
        """
        ids = getattr(output, "ids", ())
        return list(ids) if ids else list(self.tokenizer(str(output), add_special_tokens=False)["input_ids"])

    def _hook_arguments(self) -> dict[str, Any]:
        from transformers import TrainerState

        log = Log(self.folder / "hook")
        return {"trainer_state": TrainerState(global_step=max(self.epochs.epoch, 0)),
                "log_metric": lambda name, value: log.log({name: value}, max(self.epochs.epoch, 0)),
                "log_extra": lambda name, values: log.log({name: list(values)}, max(self.epochs.epoch, 0))}


class GRPOTrainer(FlowGRPOTrainer):
    """TRL's GRPOTrainer of language models: the method `grpo` with the parts that a `GRPOConfig` names.

    Without peft_config all weights are trained. Arguments as of `FlowGRPOTrainer`; functions take TRL's names.
    """

    configuration, method, by_name = GRPOConfig, "grpo", True


class RLOOTrainer(FlowGRPOTrainer):
    """TRL's RLOOTrainer of language models: the method `rloo` with the settings of an `RLOOConfig`."""

    configuration, method, by_name = RLOOConfig, "rloo", True


def _model(model: Any, processing_class: Any) -> Any:
    """Return a model as `align` takes it: of a loaded language model with its tokenizer."""
    if isinstance(model, (str, Path)) or hasattr(model, "components") or isinstance(model, tuple):
        return model
    if processing_class is None:
        from transformers import AutoTokenizer

        name = getattr(getattr(model, "config", None), "_name_or_path", "")
        if not name:
            raise UserError(f"model: got a loaded {type(model).__name__}, expected its tokenizer as processing_class")
        processing_class = AutoTokenizer.from_pretrained(name)
    return model, processing_class


def _is_model(name: str) -> bool:
    """True for the folder or hub id of a reward model."""
    return ".py:" not in name and ("/" in name or (Path(name) / "config.json").is_file())


def _adapter(peft: Any) -> dict[str, Any]:
    """Return the section `adapter` of a LoraConfig."""
    if missing := [key for key in ("r", "lora_alpha") if not hasattr(peft, key)]:
        raise UserError(f"peft_config: got a {type(peft).__name__} without {' and '.join(missing)}, expected a "
                        "LoraConfig of peft")
    if wrong := [f"{name} is {value!r}, which is not supported, expected {known[0]!r}"
                 for name, known in OF_PEFT.items() if (value := getattr(peft, name, known[0])) not in known]:
        raise UserError(f"peft_config: {'; '.join(wrong)}")
    adapter = {"rank": peft.r, "alpha": peft.lora_alpha, "rslora": bool(getattr(peft, "use_rslora", False)),
               "dora": bool(getattr(peft, "use_dora", False))}
    targets = getattr(peft, "target_modules", None)
    if targets and targets != "all-linear":
        adapter["targets"] = [targets] if isinstance(targets, str) else sorted(targets)
    if getattr(peft, "lora_dropout", 0):
        print(f"peft_config: lora_dropout {peft.lora_dropout:g} is 0 here: a replay repeats its rollout")
    return adapter


def _record(what: str, row: Any) -> dict[str, Any]:
    """Return a record of a dataset as a line of a prompt file: other columns than the prompt are metadata."""
    if isinstance(row, str):
        return {"prompt": row}
    prompt = row.get("prompt") if isinstance(row, Mapping) else None
    if isinstance(prompt, (list, tuple)):
        prompt = [_turn(what, turn) for turn in prompt]
    if not prompt or not isinstance(prompt, (str, list)):
        raise UserError(f"{what}: got {' '.join(repr(row).split())[:80]}, expected strings or records with a prompt "
                        "that is a string or messages")
    own = {key: row[key] for key in ("image", "metadata") if key in row} | {"prompt": prompt}
    further = {key: value for key, value in row.items() if key not in own}
    return own | ({"metadata": further | dict(own.get("metadata", {}))} if further else {})


def _turn(what: str, turn: Any) -> dict[str, str]:
    """Return a message with the text of its content."""
    content = turn.get("content") if isinstance(turn, Mapping) else None
    if isinstance(content, (list, tuple)) and all(isinstance(part, Mapping) for part in content):
        content = "".join(part.get("text") or "" for part in content)
    if not isinstance(content, str) or not isinstance(turn.get("role"), str):
        raise UserError(f"{what}: got the message {' '.join(repr(turn).split())[:80]}, expected a role and a content")
    return {"role": turn["role"], "content": content}


def _run_coroutine(answer: Any) -> Any:
    """Return an answer, of a coroutine what it returns."""
    if not inspect.iscoroutine(answer):
        return answer
    found: list[Any] = []
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            found.append(asyncio.run(answer))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=wait)  # this one may have a loop of its own, as in a notebook
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]

"""A tiny random language model, built in code: a real Qwen3 with a few thousand weights, and its tokenizer."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from flowgrpo.config import Config, load
from flowgrpo.config.sections import Adapter, Text
from flowgrpo.data.prompts import Prompt
from flowgrpo.starter.arithmetic import build_tokenizer
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.train import Trainer
from flowgrpo.types import Scored
from tests.helpers.tiny import stir  # noqa: F401 the tests read it here

PROMPTS = ["1+2=", "33+4=", "5;66=", "7+8=", "90;1=", "2+2="]
ASKED = ["1+2=", "90;1=", "5;66=", "1+2="]

PAIRS = str(Path(__file__).with_name("pairs_of_sums.jsonl"))
# What a preset needs beside its defaults: texts that the tokenizer knows and that leave room for an answer.
PARTS = {"s_grpo": {"draws": {"exit": "=", "close": "="}},
         "spo_tree": {"draws": {"tokens": 1}, "spread": {"every": 1}},
         "hypo": {"data": {"source": {"path": PAIRS}}}}


def model(layers: int = 2, seed: int = 0, **options: Any):
    """(model, tokenizer); embeddings far enough apart for distributions that are not flat."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    settings = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
                    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
                    initializer_range=0.15, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
                    bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    return Qwen3ForCausalLM(Qwen3Config(**settings | options)), tokenizer


def policy(loaded=None, rank: int = 2, checkpointing: bool = False, **text: Any) -> CausalLM:
    loaded = loaded or model()
    return CausalLM(*loaded, Adapter(rank=rank), Text(**{"max_tokens": 6} | text), checkpointing=checkpointing)


def short(completions, prompts):
    """1 for a completion of at most two characters."""
    return [float(len(text) < 3) for text in completions]


def many(completions, prompts):
    """Of several values, so that groups differ."""
    return [len(text) + text.count("7") / 2 for text in completions]


def sampled(own: CausalLM, prompts=ASKED, seeds=(1, 2, 3, 4), decoding=None, greedy: int = 0, images=()):
    """(the prompts' tokens, what is drawn of each from its seed); greedy: number of rows of most likely tokens."""
    asked, first = own.encode(list(prompts), images=images), torch.arange(len(prompts)) < greedy
    return asked, own.sample(asked, decoding or own.plain, own.generators(seeds[:len(prompts)]), first)


def replayed(own: CausalLM, asked, found, decoding=Decoding(), prompts=None, **more: Any) -> Scored:
    prompts = torch.arange(len(found.ids)) if prompts is None else prompts
    return own.log_probs(asked, prompts, found.ids, found.mask, decoding, **more)


def config(output: Path | str = "nowhere", **options: Any) -> Config:
    """A run of a second: 2 prompts x 4 samples of 6 tokens. An option train__lr is the configuration's train.lr."""
    small = dict(output=str(output), name="run", device="cpu", precision="fp32", tracker="none", reward="short",
                 held_out=0.3, method="grpo", text__max_tokens=6, adapter__rank=2, train__epochs=2,
                 train__prompts=2, train__group=4, train__micro_batch=4, train__lr=1e-2, eval__prompts=2)
    return load(None, {key.replace("__", "."): value for key, value in (small | options).items()})


def save(folder: Path, loaded) -> Path:
    """Save a model and what comes with it; the folder."""
    for part in loaded:
        part.save_pretrained(folder)
    return folder


def files_of_a_run(folder: Path, loaded, prompts: str | None = None, **options: Any) -> Config:
    """The configuration of a run that reads all from a folder: the model and what comes with it, prompts, one a line,
    or those of a file, and a reward for short texts."""
    save(folder / "lm", loaded)
    if prompts is None:
        (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    (folder / "short.py").write_text("def short(texts, prompts):\n    return [-len(text) for text in texts]\n")
    return config(folder, model=str(folder / "lm"), prompts=prompts or str(folder / "prompts.txt"),
                  reward=f"{folder / 'short.py'}:short", **options)


def trainer(own: CausalLM | None = None, rewards=None, **options: Any) -> Trainer:
    """A Trainer as `run` makes it, on the tiny model."""
    settings = config(**options)
    torch.manual_seed(settings.seed)
    own = own or CausalLM(*model(), settings.adapter, settings.text)
    return Trainer(settings, Accelerator(cpu=True), own, rewards or {"short": short},
                   ([Prompt(text) for text in PROMPTS], []))

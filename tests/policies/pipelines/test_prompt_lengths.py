"""Prompts that are longer than an encoder reads are counted, by encoder."""

from __future__ import annotations

from flowgrpo.policies.pipelines import padding
from flowgrpo.policies.pipelines.load import load_pipeline


def test_prompts_that_are_cut_are_counted_once():
    pipe = load_pipeline("starter")
    fits, long = "a red star", "a red star and a green star and a blue star and a red circle"
    assert padding.cut(pipe, {}, [fits, "a circle"]) is None
    assert padding.cut(pipe, {}, [fits, long, long, 9 * long]) == (
        "2 of 3 prompts are longer than an encoder reads: cut are 2 by the tokenizer (16 tokens), "
        "2 by the tokenizer_2 (16 tokens)")


def test_limits_are_of_the_call_but_for_clip():
    class Tokenizer:
        model_max_length = 512
    class CLIPTokenizer(Tokenizer):
        model_max_length = 77
    class Pipe:
        components = {"tokenizer": CLIPTokenizer(), "tokenizer_2": Tokenizer(), "scheduler": None}

        def __call__(self, prompt, max_sequence_length=256):
            """A call."""
    lengths = {name: most for name, (_, most) in padding.limits(Pipe(), {}).items()}
    assert lengths == {"tokenizer": 77, "tokenizer_2": 256}
    lengths = {name: most for name, (_, most) in padding.limits(Pipe(), {"max_sequence_length": 32}).items()}
    assert lengths == {"tokenizer": 77, "tokenizer_2": 32}

"""World of the text starter: addition and subtraction of numbers below 100, and a careless pupil.

A problem is `23+48=`, its answer `71`. Held-out problems are never shown with any answer, to the model or to its
alignment. A hash selects them, so no file is needed.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LIMIT = 100  # operands are 0 to 99
SIGNS = ("+", "-")
CHARACTERS = "0123456789+-="


@dataclass(frozen=True, order=True)
class Problem:
    """`a sign b =`, with a and b from 0 to 99."""

    a: int
    sign: str
    b: int

    @property
    def prompt(self) -> str:
        return f"{self.a}{self.sign}{self.b}="

    @property
    def answer(self) -> int:
        return self.a + self.b if self.sign == "+" else self.a - self.b

    @property
    def task(self) -> str:
        """Kind of the problem, by what there is to forget."""
        name = "addition" if self.sign == "+" else "subtraction" if self.answer >= 0 else "below zero"
        return f"{name}, carry" if self.carries else name

    @property
    def carries(self) -> bool:
        """Return True if the units carry over: their sum is above 9, or the larger number's unit is the smaller one."""
        if self.sign == "+":
            return self.a % 10 + self.b % 10 > 9
        return self._ordered[0] % 10 < self._ordered[1] % 10

    @property
    def careless(self) -> int:
        """Careless answer: digit by digit, without the carry and without the minus before the result.

        It is the right answer if there is nothing to forget.
        """
        high, low = self._ordered
        tens = high // 10 + low // 10 if self.sign == "+" else high // 10 - low // 10
        units = (high + low if self.sign == "+" else high - low) % 10
        return 10 * tens + units

    @property
    def _ordered(self) -> tuple[int, int]:
        return max(self.a, self.b), min(self.a, self.b)

    @property
    def held_out(self) -> bool:
        """Return True for one problem in ten."""
        return zlib.crc32(self.prompt.encode()) % 10 == 0


def problems(held_out: bool) -> list[Problem]:
    """Return all problems of one side of the split, in order."""
    every = (Problem(a, sign, b) for sign in SIGNS for a in range(LIMIT) for b in range(LIMIT))
    return [problem for problem in every if problem.held_out == held_out]


def chosen(held_out: bool, count: int, seed: int) -> list[Problem]:
    """`count` problems of one side, drawn without replacement, in order."""
    return sorted(random.Random(seed).sample(problems(held_out), count))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; a problem follows the start token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
                                      padding_side="left", model_max_length=64)
    wrapped.chat_template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return wrapped

"""Temperatures that change within a completion: parts of a method's `decoding`.

Temperatures multiply the field `temperature`. A token's depends on the tokens before it alone, so a replay computes
those of the rollout.
"""

from typing import Annotated

import torch
from torch import Tensor

from flowgrpo.parts import Above, part
from flowgrpo.samplers.kernels import anneal
from flowgrpo.text.samplers.decoding import Decoding


@part("decoding", causal=True)
class AnnealedDecoding(Decoding):
    """`Decoding` whose temperature falls along a completion: max(1 + highest - e^(t/slow), lowest) at token t (EAD, Let
    it Calm). t counts from 0; a completion that goes on from a prefix goes on counting."""

    highest: float = 1.2
    lowest: float = 0.1
    slow: float = 400.0

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= self.highest or not self.slow > 0:
            raise ValueError(f"AnnealedDecoding: highest is {self.highest}, lowest {self.lowest} and slow {self.slow}, "
                             "expected 0 < lowest <= highest, and slow above 0")

    def temperatures(self, ids: Tensor) -> Tensor:
        row = [anneal(t, self.highest, self.lowest, self.slow) for t in range(ids.shape[1])]
        return torch.tensor(row, device=ids.device).expand(ids.shape)


@part("decoding", target="texts", causal=True)
class SpanDecoding(Decoding):
    """`Decoding` with another temperature inside spans, such as those of code (Thyme's GRPO-ATS: 1 for text, 0 for
    code).

    A span begins behind a token of `opens` and ends with one of `closes`, which is drawn inside. inside: factor on the
    temperature there, above 0: a temperature of 0 has no density.
    """

    opens: tuple[int, ...] = ()
    closes: tuple[int, ...] = ()
    inside: Annotated[float, Above(0, words="above 0 (0.1 is nearly greedy)")] = 0.1

    def temperatures(self, ids: Tensor) -> Tensor:
        places = torch.arange(1, ids.shape[1] + 1, device=ids.device).expand(ids.shape)
        opened, closed = (torch.where(torch.isin(ids, torch.tensor(of, dtype=ids.dtype, device=ids.device)), places, 0)
                          .cummax(1)[0] for of in (self.opens, self.closes))
        within = torch.nn.functional.pad((opened > closed)[:, :-1], (1, 0))
        return torch.where(within, self.inside, 1.0)

"""Group samplers of completions: `draw(policy, tokenized, decoding, generators, greedy, group, micro_batch)`.

tokenized: the prompts of B rows, whole groups of `group`.
generators: one per row.
greedy: bool [B], rows that take the most likely token.

The result is a list of SampledCompletions, B rows together in their order.
`causal`: tokens are drawn one after the other.
`leaves`: the size of a group must be a multiple of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flowgrpo.errors import UserError

if TYPE_CHECKING:
    from flowgrpo.text.samplers.decoding import Decoding
    from flowgrpo.text.samplers.language_model import CausalModel, LanguageModel
    from flowgrpo.text.samplers.records import SampledCompletions, TokenizedPrompts


@dataclass(frozen=True)
class Independent:
    """Independent completions."""

    causal, leaves = False, 1

    def __call__(self, policy: LanguageModel, tokenized: TokenizedPrompts, decoding: Decoding,
                 generators: Sequence[torch.Generator], greedy: Tensor, group: int, micro_batch: int
                 ) -> list[SampledCompletions]:
        return [policy.sample(tokenized.rows(at), decoding, [generators[i] for i in at], greedy[at])
                for at in torch.arange(len(generators)).split(micro_batch)]


@dataclass(frozen=True)
class EarlyExits:
    """One full completion, and the answers forced at earlier exits (S-GRPO, 2505.07686).

    The last sample of a group is drawn as a whole. The others, ordered by exit, repeat its first tokens up to a place
    drawn uniformly from its thought. They continue with the text `exit`, which is neither sampled nor trained, and
    answer. The thought ends where the text `close` begins, or with the completion.
    """

    exit: str = "Time is limited, stop thinking and start answering.\n</think>\n\n"
    close: str = "</think>"
    causal, leaves = True, 1

    def __call__(self, policy: CausalModel, tokenized: TokenizedPrompts, decoding: Decoding,
                 generators: Sequence[torch.Generator], greedy: Tensor, group: int, micro_batch: int
                 ) -> list[SampledCompletions]:
        exit, most = inserted(policy, "exit", self.exit), policy.text.max_tokens
        whole = torch.arange(group - 1, len(generators), group)
        leaders = joined([policy.sample(tokenized.rows(at), decoding, [generators[i] for i in at], greedy[at])
                          for at in whole.split(micro_batch)])
        places = torch.cat([self.places(thought(policy, ids[mask], self.close), group - 1, most - len(exit) - 1,
                                        generators[row])
                            for ids, mask, row in zip(leaders.ids, leaders.mask, whole.tolist())])
        of = torch.arange(len(whole)).repeat_interleave(group - 1)
        rows = whole[of] - (group - 1) + torch.arange(group - 1).repeat(len(whole))
        exits = joined([left(policy, tokenized.rows(rows[at]), decoding, [generators[i] for i in rows[at]],
                             leaders.ids[of[at]], leaders.logp[of[at]], places[at], exit)
                        for at in torch.arange(len(rows)).split(micro_batch)])
        return [ordered(joined([exits, leaders]), torch.cat([rows, whole]).argsort())]

    def places(self, length: int, count: int, most: int, generator: torch.Generator) -> Tensor:
        """Return the exits of a thought of `length` tokens, int64 [count], ascending, at most `most`."""
        return torch.randint(1, max(min(length, most), 1) + 1, (count,), generator=generator).sort()[0]


@dataclass(frozen=True)
class SecondAttempt:
    """Two attempts in every completion: the policy reads its first answer and tries again (SCoRe, 2409.12917).

    The first attempt, without its end, is followed by the text `again`, which is neither sampled nor trained, and by
    the second attempt. With the spread `StepScores` whose `ends` is the same text, each attempt has a score of its own.
    share: of the tokens of `text.max_tokens` beside `again`, those that the first attempt may have; a longer one is
    cut.
    """

    again: str = "\n\nThere may be an error in this answer. I check it, and answer again.\n\n"
    share: float = 0.5
    causal, leaves = True, 1

    def __post_init__(self) -> None:
        if not 0 < self.share < 1 or not self.again:
            raise ValueError(f"SecondAttempt: share is {self.share} and again {self.again!r}, expected between 0 and "
                             "1, and a text")

    def __call__(self, policy: CausalModel, tokenized: TokenizedPrompts, decoding: Decoding,
                 generators: Sequence[torch.Generator], greedy: Tensor, group: int, micro_batch: int
                 ) -> list[SampledCompletions]:
        again = inserted(policy, "again", self.again)
        room = max(1, int(self.share * (policy.text.max_tokens - len(again))))
        pieces = []
        for at in torch.arange(len(generators)).split(micro_batch):
            rows, drawing = tokenized.rows(at), [generators[i] for i in at]
            first = policy.sample(rows, decoding, drawing, greedy[at])
            places = torch.tensor([min(room, thought(policy, ids[mask], "")) for ids, mask in zip(first.ids,
                                                                                                  first.mask)])
            pieces.append(left(policy, rows, decoding, drawing, first.ids, first.logp, places, again))
        return pieces


def inserted(policy: CausalModel, field: str, text: str) -> Tensor:
    """Return the tokens of a text that `parts.draws` inserts under the name `field`.

    Raises UserError if they leave no room for an answer.
    """
    ids = torch.tensor(policy.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
    if len(ids) + 2 > policy.text.max_tokens:
        raise UserError(f"text.max_tokens is {policy.text.max_tokens}, but the {field} {text!r} itself has {len(ids)} "
                        f"tokens: raise it, or set parts.draws.{field} to a shorter text")
    return ids


def left(policy: CausalModel, tokenized: TokenizedPrompts, decoding: Decoding, generators: Sequence[torch.Generator],
         ids: Tensor, logp: Tensor, places: Tensor, text: Tensor) -> SampledCompletions:
    """Return completions that repeat ids [b,L], with their logp [b,L], up to `places` [b], go on with the tokens `text`
    [n], which are not trained, and are drawn from there."""
    from flowgrpo.text.samplers.continuations import continued

    prefixes = [torch.cat([row[:place], text]) for row, place in zip(ids, places)]
    answers = continued(policy, tokenized, prefixes, decoding, generators)
    at = torch.arange(ids.shape[1])
    before, behind = at < places[:, None], at >= places[:, None] + len(text)
    return replace(answers, logp=torch.where(before, logp, answers.logp), mask=answers.mask & (before | behind))


def thought(policy: CausalModel, ids: Tensor, close: str) -> int:
    """Return the number of a completion's tokens [n] in its thought: those before the text `close`, or before its
    end."""
    ends = torch.isin(ids, torch.tensor(policy.ends)).nonzero().flatten().tolist()
    length = ends[0] if ends else len(ids)
    mark = policy.tokenizer(close, add_special_tokens=False)["input_ids"]
    tokens = ids.tolist()
    return next((at for at in range(length) if tokens[at:at + len(mark)] == mark), length) if mark else length


def joined(pieces: Sequence[SampledCompletions]) -> SampledCompletions:
    """Concatenate samples."""
    ids, logp, mask, cut = (torch.cat([getattr(piece, name) for piece in pieces]) for name in ("ids", "logp", "mask",
                                                                                              "cut"))
    return type(pieces[0])(ids, logp, mask, cut, [text for piece in pieces for text in piece.texts])


def ordered(samples: SampledCompletions, order: Tensor) -> SampledCompletions:
    """Return the samples at the indices `order`, int64 [n], which may repeat or omit some."""
    return type(samples)(samples.ids[order], samples.logp[order], samples.mask[order], samples.cut[order],
                         [samples.texts[i] for i in order.tolist()])

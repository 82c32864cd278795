"""Group samplers of completions: `draw(policy, tokenized, decoding, generators, greedy, group, micro_batch)`.

tokenized: the prompts of B rows, whole groups of `group`.
generators: one per row.
greedy: bool [B], rows that take the most likely token.

The result is a list of SampledCompletions, B rows together in their order.
`causal`: tokens are drawn one after the other.
`leaves`: the size of a group must be a multiple of it.

Groups are drawn independently, as trees with shared prefixes, or pruned; continuations give Monte-Carlo values.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.samplers.rollout import Seed
from flowgrpo.text.samplers.decoding import Decoding, Generators, apply_temperature, completion_masks
from flowgrpo.text.samplers.importance import Begun, begin, complete_groups, continue_groups
from flowgrpo.text.samplers.language_model import CausalModel, SampledCompletions, TokenizedPrompts
from flowgrpo.types import Completions, Segmented, wide


@part("draws")
class Independent:
    """Independent completions."""

    causal = False
    leaves = 1

    def __call__(self, policy: CausalModel, tokenized: TokenizedPrompts, decoding: Decoding, generators: Generators,
                 greedy: Tensor, group: int, micro_batch: int) -> list[SampledCompletions]:
        return sample_rows(policy, tokenized, decoding, generators, greedy, torch.arange(len(generators)), micro_batch)


def sample_rows(policy: CausalModel, tokenized: TokenizedPrompts, decoding: Decoding, generators: Generators,
                greedy: Tensor, rows: Tensor, micro_batch: int) -> list[SampledCompletions]:
    """Completions of these rows [n] of the prompts, `micro_batch` at a time."""
    return [policy.sample(tokenized.rows(at), decoding, [generators[i] for i in at], greedy[at])
            for at in rows.split(micro_batch)]


@part("draws", causal=True, leaves=1)
class EarlyExits:
    """One full completion, and the answers forced at earlier exits (S-GRPO, 2505.07686).

    The last sample of a group is drawn as a whole. The others, ordered by exit, repeat its first tokens up to a place
    drawn uniformly from its thought. They continue with the text `exit`, which is neither sampled nor trained, and
    answer. The thought ends where the text `close` begins, or with the completion.
    """

    exit: str = "Time is limited, stop thinking and start answering.\n</think>\n\n"
    close: str = "</think>"

    def __call__(self, policy: CausalModel, tokenized: TokenizedPrompts, decoding: Decoding, generators: Generators,
                 greedy: Tensor, group: int, micro_batch: int) -> list[SampledCompletions]:
        exit, most = tokens_to_insert(policy, "exit", self.exit), policy.text.max_tokens
        whole = torch.arange(group - 1, len(generators), group)
        leaders = concatenate(sample_rows(policy, tokenized, decoding, generators, greedy, whole, micro_batch))
        places = torch.cat([self.places(count_thought_tokens(policy, ids[mask], self.close), group - 1,
                                        most - len(exit) - 1, generators[row])
                            for ids, mask, row in zip(leaders.ids, leaders.mask, whole.tolist())])
        of = torch.arange(len(whole)).repeat_interleave(group - 1)
        rows = whole[of] - (group - 1) + torch.arange(group - 1).repeat(len(whole))
        exits = concatenate([resample_from(policy, tokenized.rows(rows[at]), decoding,
                                           [generators[i] for i in rows[at]],
                                           leaders.ids[of[at]], leaders.logp[of[at]], places[at], exit)
                             for at in torch.arange(len(rows)).split(micro_batch)])
        return [reorder(concatenate([exits, leaders]), torch.cat([rows, whole]).argsort())]

    def places(self, length: int, count: int, most: int, generator: torch.Generator) -> Tensor:
        """The exits of a thought of `length` tokens, int64 [count], ascending, at most `most`."""
        return torch.randint(1, max(min(length, most), 1) + 1, (count,), generator=generator).sort()[0]


@part("draws", causal=True, leaves=1)
class SecondAttempt:
    """Two attempts in every completion: the policy reads its first answer and tries again (SCoRe, 2409.12917).

    The first attempt, without its end, is followed by the text `again`, which is neither sampled nor trained, and by
    the second attempt. With the spread `StepScores` whose `ends` is the same text, each attempt has a score of its own.
    share: of the tokens of `text.max_tokens` beside `again`, those that the first attempt may have; a longer one is
    cut.
    """

    again: str = "\n\nThere may be an error in this answer. I check it, and answer again.\n\n"
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.share < 1 or not self.again:
            raise ValueError(f"SecondAttempt: share is {self.share} and again {self.again!r}, expected between 0 and "
                             "1, and a text")

    def __call__(self, policy: CausalModel, tokenized: TokenizedPrompts, decoding: Decoding, generators: Generators,
                 greedy: Tensor, group: int, micro_batch: int) -> list[SampledCompletions]:
        again = tokens_to_insert(policy, "again", self.again)
        room = max(1, int(self.share * (policy.text.max_tokens - len(again))))
        pieces = []
        for at in torch.arange(len(generators)).split(micro_batch):
            rows, drawing = tokenized.rows(at), [generators[i] for i in at]
            first = policy.sample(rows, decoding, drawing, greedy[at])
            places = torch.tensor([min(room, count_thought_tokens(policy, ids[mask], ""))
                                   for ids, mask in zip(first.ids, first.mask)])
            pieces.append(resample_from(policy, rows, decoding, drawing, first.ids, first.logp, places, again))
        return pieces


def tokens_to_insert(policy: CausalModel, field: str, text: str) -> Tensor:
    """The tokens of a text that `parts.draws` inserts under the name `field`.
    Raises UserError if they leave no room for an answer."""
    ids = torch.tensor(policy.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
    if len(ids) + 2 > policy.text.max_tokens:
        raise UserError(f"text.max_tokens is {policy.text.max_tokens}, but the {field} {text!r} itself has {len(ids)} "
                        f"tokens: raise it, or set parts.draws.{field} to a shorter text")
    return ids


def resample_from(policy: CausalModel, tokenized: TokenizedPrompts, decoding: Decoding, generators: Generators,
                  ids: Tensor, logp: Tensor, places: Tensor, text: Tensor) -> SampledCompletions:
    """Completions that repeat ids [b,L], with their logp [b,L], up to `places` [b], go on with the tokens `text` [n],
    which are not trained, and are drawn from there."""
    prefixes = [torch.cat([row[:place], text]) for row, place in zip(ids, places)]
    answers = continue_prefixes(policy, tokenized, prefixes, decoding, generators)
    at = torch.arange(ids.shape[1])
    before, behind = at < places[:, None], at >= places[:, None] + len(text)
    return replace(answers, logp=torch.where(before, logp, answers.logp), mask=answers.mask & (before | behind))


def count_thought_tokens(policy: CausalModel, ids: Tensor, close: str) -> int:
    """The number of a completion's tokens [n] in its thought: those before the text `close`, or before its end."""
    ends = torch.isin(ids, torch.tensor(policy.ends)).nonzero().flatten().tolist()
    length = ends[0] if ends else len(ids)
    mark = policy.tokenizer(close, add_special_tokens=False)["input_ids"]
    tokens = ids.tolist()
    return next((at for at in range(length) if tokens[at:at + len(mark)] == mark), length) if mark else length


def concatenate(pieces: Sequence[SampledCompletions]) -> SampledCompletions:
    def joined(values: list[Any]) -> Any:
        return torch.cat(values) if torch.is_tensor(values[0]) else values[0] and [*chain(*values)]

    return replace(pieces[0], **{name: joined([vars(piece)[name] for piece in pieces]) for name in vars(pieces[0])})


def reorder(samples: SampledCompletions, order: Tensor) -> SampledCompletions:
    """The samples at the indices `order`, int64 [n], which may repeat or omit some."""
    def ordered(values: Any) -> Any:
        return values[order] if torch.is_tensor(values) else values and [values[i] for i in order.tolist()]

    return replace(samples, **{name: ordered(values) for name, values in vars(samples).items()})


def split(pieces: Sequence[SampledCompletions], sizes: Sequence[int]) -> Iterator[SampledCompletions]:
    """The samples in pieces of other sizes."""
    whole = concatenate(pieces)
    return iter([reorder(whole, at) for at in torch.arange(len(whole.ids)).split([*sizes])])


@part("draws", causal=True, leaves=1, trains_head=True,
      jointly={"begun tokens": "2 or more, and 1 or more", "lr passes": "above 0, and 1 or more"})
class PrunedDraws:
    """Group of begun completions expected to be half right (ARRoL); the others are stopped.

    After `tokens` tokens the run's quality head, a linear one on the policy's last hidden state, predicts the chance of
    success of each. A group goes on: the likeliest and the least likely to succeed, as many of each as bring the
    expected number of successes nearest to half. The others are neither scored, compared nor trained. The head learns
    from the trained samples after every epoch; in the first one it knows nothing, and any go on. The choice, and the
    new samples of the pool in the place of those that are stopped, are a reconstruction.

    begun: completions that are begun per sample of a group.
    right: total reward from which a completion is a success.
    lr, passes: of AdamW; the number of steps over all of an epoch's completions, by cross-entropy.
    """

    begun: Annotated[int, AtLeast(2)] = 2
    tokens: Annotated[int, AtLeast(1)] = 128
    right: float = 0.5
    lr: Annotated[float, Above(0)] = 1e-3
    passes: Annotated[int, AtLeast(1)] = 4

    def __call__(self, policy: CausalModel, tokenized: TokenizedPrompts, decoding: Decoding, generators: Generators,
                 greedy: Tensor, group: int, micro_batch: int) -> list[SampledCompletions]:
        most = policy.text.max_tokens
        if type(tokenized) is not TokenizedPrompts:
            raise UserError("parts.draws PrunedDraws continues completions from the middle, for which prompts with "
                            "images are not made: use another")
        if self.tokens >= most:
            raise UserError(f"text.max_tokens is {most}, and parts.draws.tokens is {self.tokens}, after which samples "
                            "are stopped: set it below")
        firsts = range(0, len(generators), group)
        prompts = tokenized.rows(torch.tensor(firsts))
        seeds = [torch.randint(2**62, (self.begun,), generator=generator).tolist() for generator in generators]
        groups = [begin(sum(seeds[first:first + group], []), most) for first in firsts]
        groups = continue_groups(policy, prompts, groups, decoding, self.tokens, micro_batch, 0)
        chosen = [self.choose(chances, group) for chances in self.chances(policy, prompts, groups, micro_batch)]
        groups = [Begun(*(column[at] for column in vars(of).values())) for of, at in zip(groups, chosen)]
        whole = continue_groups(policy, prompts, groups, decoding, most - self.tokens, micro_batch, 0)
        return [complete_groups(policy, prompts.prompts, whole)]

    def choose(self, chances: Tensor, group: int) -> Tensor:
        """The samples that go on, int64 [group], ascending, of the chances of success [pool]."""
        order = chances.argsort(descending=True, stable=True)
        ends = [torch.cat([order[:best], order[len(order) - group + best:]]) for best in range(group + 1)]
        expected = torch.stack([chances[of].sum() for of in ends])
        return ends[int((expected - group / 2).abs().argmin())].sort()[0]

    @torch.no_grad()
    def chances(self, policy: CausalModel, prompts: TokenizedPrompts, groups: Sequence[Begun], micro_batch: int
                ) -> Tensor:
        """The predicted chances of success of groups that are begun, [P, pool]; 0.5 without a quality head."""
        pool = len(groups[0].ids)
        if policy.quality is None:
            return torch.full((len(groups), pool), 0.5)
        of = torch.arange(len(groups)).repeat_interleave(pool)
        ids, lengths, ended = (torch.cat([getattr(one, name) for one in groups]) for name in ("ids", "lengths",
                                                                                              "ended"))
        states = states_at(policy, prompts, of, ids, lengths - ended.long(), micro_batch)
        return policy.quality(states).sigmoid().cpu().view(len(groups), pool)


@torch.no_grad()
def states_at(policy: CausalModel, tokenized: TokenizedPrompts, prompts: Tensor, ids: Tensor, places: Tensor,
              micro_batch: int) -> Tensor:
    """The states [n,H], float32 or wider, before the tokens at `places` [n] of completions ids [n,L] of the prompts
    [n]."""
    found = []
    for at in torch.arange(len(ids)).split(micro_batch):
        begun = ids[at, :int(places[at].max()) + 1].to(policy.device)
        states = policy.states_before(tokenized.rows(prompts[at]), begun)
        found.append(states[torch.arange(len(at)), places[at].to(states.device)])
    return wide(torch.cat(found))[0]


def continue_prefixes(policy: CausalModel, tokenized: TokenizedPrompts, prefixes: Sequence[Tensor], decoding: Decoding,
                      generators: Generators) -> SampledCompletions:
    """One completion per row that begins with its prefix: B whole completions of at most `text.max_tokens` tokens.
    A prefix is int64, shorter than `text.max_tokens`, without an end. At its tokens logp is 0 and mask is true.
    Raises UserError for prompts with images."""
    if type(tokenized) is not TokenizedPrompts:
        raise UserError("the method continues completions from the middle, for which prompts with images are not "
                        "made: use another method")
    begun = [torch.cat(both) for both in zip(tokenized.ids, prefixes)]
    sampled = torch.zeros(len(begun), dtype=torch.bool)
    rests = policy.sample(replace(tokenized, ids=begun, begun=list(prefixes)), decoding, generators, sampled)
    most, nothing = policy.text.max_tokens, [torch.zeros(len(prefix)) for prefix in prefixes]
    ids, logp = (torch.stack([torch.cat(both)[:most] for both in zip(first, rest)])
                 for first, rest in ((prefixes, rests.ids), (nothing, rests.logp)))
    mask, cut = completion_masks(ids, policy.ends)
    texts = policy.detokenize(ids, mask, tokenized.prompts)
    return SampledCompletions(ids, logp.masked_fill(~mask, 0.0), mask, cut, texts)


def rows_of_log_probs(policy: CausalModel, tokenized: TokenizedPrompts, ids: Tensor, mask: Tensor, decoding: Decoding,
                      cure: str) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the rows of completions [B,L], the places of each that count, bool [L], and there the log-probabilities
    [n,V] of all tokens. Raises UserError, which ends with `cure`, for a model whose logits are not those of its head
    alone."""
    if not policy.head_alone(tokenized):
        raise UserError(f"{type(policy.model).__name__} does more to its logits than its head: {cure}")
    states, head, heat = policy.states_before(tokenized, ids.to(policy.device)), policy.head, decoding.temperatures(ids)
    for row, counted in enumerate(mask):  # row by row: the vocabulary may be large
        logits = head(states[row, :ids.shape[1]][counted.to(states.device)])
        yield row, counted, decoding(apply_temperature(logits, None if heat is None else heat[row, counted]))


@torch.no_grad()
def alternatives(policy: CausalModel, tokenized: TokenizedPrompts, ids: Tensor, mask: Tensor, decoding: Decoding
                 ) -> tuple[Tensor, Tensor, Tensor]:
    """The most likely other token at each place of completions [B,L], its log-probability, and the largest one.
    All are [B,L]. The largest log-probability may be that of the other token. Values are -inf where mask is false or
    nothing else could be drawn.
    Raises UserError for a model whose logits are not those of its head alone."""
    tokens, logp, likeliest = torch.zeros_like(ids), *(torch.full(ids.shape, -torch.inf) for _ in range(2))
    for row, counted, log_probs in rows_of_log_probs(policy, tokenized, ids, mask, decoding,
                                                     "use a method that does not look for other tokens"):
        log_probs = log_probs.cpu()
        likeliest[row, counted] = log_probs.amax(1)
        best = log_probs.scatter(1, ids[row, counted][:, None], -torch.inf).max(1)
        logp[row, counted], tokens[row, counted] = best.values, best.indices
    return tokens, logp, likeliest


def with_segment_values(policy: CausalModel, tokenized: TokenizedPrompts, taken: Completions, segments: Tensor,
                        starts: Sequence[tuple[int, int, int]], samples: int, decoding: Decoding, seed: Seed,
                        group: int, micro_batch: int, judge: Callable[[list[str], int, Tensor], Tensor]) -> Segmented:
    """The completions, whole groups, with the values of the states before their segments.

    A value is the mean reward of `samples` continuations from each of `starts`, (row, segment, place). It is NaN for a
    row's first segment, and where no continuation has a reward.
    seed: seed(prompt, sample); every continuation has a separate one, independent of the other samples.
    judge: judge(texts, n, prompts) returns the total rewards [., n] of texts of the prompts, n for each state.
    """
    values = torch.full((len(taken.ids), int(segments.max()) + 1), torch.nan)
    length = taken.ids.shape[1]
    rows = [(row, place, number) for row, _, place in starts for number in range(samples)]
    texts: list[str] = []
    for at in range(0, len(rows), micro_batch):
        batch = rows[at:at + micro_batch]
        prompts = taken.prompts[[row for row, _, _ in batch]]
        generators = policy.generators(seed(int(p), group + ((row % group) * length + place) * samples + number)
                                       for p, (row, place, number) in zip(prompts, batch))
        prefixes = [taken.ids[row, :place] for row, place, _ in batch]
        texts += continue_prefixes(policy, tokenized.rows(prompts), prefixes, decoding, generators).texts
    if starts:
        row, segment, _ = torch.tensor(list(starts)).unbind(1)
        totals = judge(texts, samples, taken.prompts[row].repeat_interleave(samples))
        values[row, segment] = totals.nanmean(1).to(values)
    return Segmented(**vars(taken), segments=segments, values=values)


@part("draws", causal=True)
class Tree:
    """Tree of completions: each continues in `children` ways after every `tokens` tokens (SPO-tree, 2505.23564).

    children: of the first split, the second and so on. A group has as many samples as the tree has leaves, or a
    multiple of them from separate roots. One of the ways is the present completion; the others are drawn anew from its
    prefix. A completion that ends before a split is repeated in the group.
    """

    children: tuple[int, ...] = (2, 2)
    tokens: int = 32

    def __post_init__(self) -> None:
        if not self.children or min(self.children) < 1 or self.tokens < 1:
            raise ValueError(f"Tree: children are {list(self.children)} and tokens {self.tokens}, expected 1 or more, "
                             "and one split at least")

    @property
    def leaves(self) -> int:
        return math.prod(self.children)

    def __call__(self, policy: CausalModel, tokenized: TokenizedPrompts, decoding: Decoding, generators: Generators,
                 greedy: Tensor, group: int, micro_batch: int) -> list[SampledCompletions]:
        rows = torch.arange(0, len(generators), self.leaves)
        completions = concatenate(sample_rows(policy, tokenized, decoding, generators, greedy, rows, micro_batch))
        for depth, count in enumerate(self.children):
            width = math.prod(self.children[depth + 1:])
            parents = torch.arange(len(rows)).repeat_interleave(count - 1)
            new = rows[parents] + width * (torch.arange(count - 1) + 1).repeat(len(rows))
            grown = [regrown(policy, tokenized.rows(new[at]), decoding, [generators[i] for i in new[at]],
                             reorder(completions, parents[at]), torch.full((len(at),), (depth + 1) * self.tokens))
                     for at in torch.arange(len(new)).split(micro_batch)]
            completions, rows = concatenate([completions, *grown]), torch.cat([rows, new])
        return [reorder(completions, rows.argsort())]


def regrown(policy: CausalModel, tokenized: TokenizedPrompts, decoding: Decoding, generators: Generators,
            completions: SampledCompletions, places: Tensor) -> SampledCompletions:
    """The completions, each kept up to its place and drawn anew from there.
    places: int64 [b], in tokens. A completion that ends before its place stays unchanged."""
    open_ = (completions.mask.sum(1) > places).nonzero().flatten()
    if not len(open_):
        return completions
    anew = resample_from(policy, tokenized.rows(open_), decoding, [generators[i] for i in open_],
                         completions.ids[open_], completions.logp[open_], places[open_], places.new_zeros(0))
    closed = (completions.mask.sum(1) <= places).nonzero().flatten()
    return reorder(concatenate([anew, reorder(completions, closed)]), torch.cat([open_, closed]).argsort())

"""Tokens as decisions: sampling from a model's logits, and log-probabilities of sampled tokens.

`Decoding` is to a language model what `kernels` are to a denoiser: the distribution of one step. Densities are those of
the distribution that was sampled, after temperature and cuts, in float32.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.types import wide

Generators = Sequence[torch.Generator]  # one per row


@part("decoding", jointly={"top_p min_p": "above 0 to 1 and 0 to 1"})
class Decoding:
    """softmax(logits / temperature), cut to its most likely tokens, one cut after the other in this order.

    top_k: number of tokens kept (0: all).
    top_p: keep the fewest that together have this probability (1: all; 1904.09751).
    min_p: keep those with at least this share of the largest probability (0: all; 2407.01082).
    greedy: number of a group's first samples that take the most likely token at every step (ReMax's baseline,
        2310.10505).
    expert: number of a group's last samples that are the prompt's own answer, if it has one (ViSurf, 2510.10606).

    New weights cut other tokens. A sampled token is never cut when it is scored, so its probability is never 0; the
    other kept tokens are those of the new weights.
    """

    temperature: Annotated[float, Above(0, words="above 0 (greedy samples have `greedy`)")] = 1.0
    top_p: Annotated[float, Above(0, to=1)] = 1.0
    top_k: Annotated[int, AtLeast(0)] = 0
    min_p: Annotated[float, AtLeast(0, to=1)] = 0.0
    greedy: Annotated[int, AtLeast(0)] = 0
    expert: Annotated[int, AtLeast(0)] = 0
    causal: ClassVar[bool] = False  # it needs tokens that are drawn one after the other

    def __call__(self, logits: Tensor, taken: Tensor | None = None) -> Tensor:
        """Log-probabilities [n,V], float32 or wider, of logits [n,V]; -inf where cut.
        taken: int64 [n], tokens that are never cut."""
        (logits,) = wide(logits)
        logits = logits / self.temperature
        cut = self._cut(logits.detach())
        if cut is None:
            return logits.log_softmax(-1)
        if taken is not None:
            cut = cut.scatter(1, taken[:, None], False)
        return logits.masked_fill(cut, -torch.inf).log_softmax(-1)

    def temperatures(self, ids: Tensor) -> Tensor | None:
        """The further temperature [B,L] of each place of completions ids [B,L], from the tokens before it; None if all
        are 1. Logits are divided by it first."""
        return None

    def _cut(self, logits: Tensor) -> Tensor | None:
        """The mask of cut tokens, bool [n,V]; None if nothing is cut."""
        left = logits
        if 0 < self.top_k < logits.shape[1]:
            left = left.masked_fill(left < left.topk(self.top_k)[0][:, -1:], -torch.inf)
        if self.top_p < 1:
            ordered, place = left.sort(descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            left = left.masked_fill((before >= self.top_p).scatter(1, place, before >= self.top_p), -torch.inf)
        if self.min_p > 0:
            probabilities = left.softmax(-1)
            left = left.masked_fill(probabilities < self.min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
        return None if left is logits else left == -torch.inf


@part("decoding")
class WithAnswers(Decoding):
    """`Decoding` whose groups end with the prompt's own answer, written like the model's own (ViSurf, 2510.10606).

    form: the answer as the group sees it, with {answer}, such as "<answer>{answer}</answer>".
    """

    expert: int = 1
    form: str = "{answer}"

    def __post_init__(self) -> None:
        if "{answer}" not in self.form:
            raise ValueError(f"WithAnswers: form is {self.form!r}, expected a text with {{answer}}")


@part("decoding")
class Unmasking(Decoding):
    """`Decoding` of a masked language model: an answer of masks, `per_step` of which become tokens at every step
    (LLaDA, 2502.09992).

    The places are chosen first, from the present tokens alone. `order` "confidence" takes those with the largest
    probability of a token at temperature 1, "random" draws lots. Their tokens are then drawn independently. So the
    probability of a trace is the product of its tokens' (TraceRL, 2509.06949), and a random order adds a constant.
    block: number of places filled before the next ones, from left to right (0: the whole answer at once).
    shrink: number of neighbouring steps of a block that are scored together, as one.
    """

    per_step: Annotated[int, AtLeast(1)] = 1
    block: Annotated[int, AtLeast(0)] = 0
    order: Literal["confidence", "random"] = "confidence"
    shrink: Annotated[int, AtLeast(1)] = 1

    def schedule(self, length: int) -> list[tuple[int, int, int]]:
        """(first, end, count) of every step of an answer: of the places first to end, `count` become tokens."""
        size = self.block or length
        steps: list[tuple[int, int, int]] = []
        for first in range(0, length, size):
            end = min(first + size, length)
            steps += [(first, end, min(self.per_step, left)) for left in range(end - first, 0, -self.per_step)]
        return steps

    def choose(self, logits: Tensor, masked: Tensor, lots: Tensor, count: int) -> Tensor:
        """The places [n,count] that become tokens; ties go to the first.
        logits: [n,L,V]; masked: bool [n,L]; lots: [n,L], numbers that decide a random order."""
        rank = lots if self.order == "random" else torch.stack(
            # row by row: V may be large
            [row.amax(-1) - row.logsumexp(-1) for answer in logits for row in wide(answer)])
        return rank.masked_fill(~masked, -torch.inf).argsort(dim=1, descending=True, stable=True)[:, :count]

    def scorings(self, steps: Tensor, length: int) -> Tensor:
        """The index, int64, of the replay evaluation that scores the tokens of `steps`, for answers of `length`."""
        in_block = -(-min(self.block or length, length) // self.per_step)
        return steps // in_block * -(-in_block // self.shrink) + steps % in_block // self.shrink


def sample_inverse_cdf(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """The tokens [n] at which the distribution function of log_probs [n,V] passes uniform [n], in [0, 1).
    One number decides a token, so a row's draws do not depend on other rows, on V or on the device."""
    mass = log_probs.exp().cumsum(-1, dtype=torch.float64)
    passed = torch.searchsorted(mass, (uniform.double() * mass[:, -1])[:, None], right=True)[:, 0]
    return passed.clamp(max=log_probs.shape[1] - 1)  # V where the mass is NaN


class Draw:
    """Logits processor that samples within `generate(do_sample=False)`: only the drawn token keeps a finite logit.

    uniforms: [B,L], numbers in [0, 1), one per row and step.
    greedy: bool [B], rows that take the most likely token.
    begun: the tokens with which the completion of each row begins, if it does not begin here.

    log_probs() returns those of the drawn tokens, [B, steps so far].
    """

    def __init__(self, decoding: Decoding, uniforms: Tensor, greedy: Tensor, begun: Sequence[Tensor] = ()):
        self.decoding, self.uniforms, self.greedy = decoding, uniforms, greedy
        self.begun = begun or [torch.empty(0, dtype=torch.int64)] * len(uniforms)
        self.found: list[Tensor] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        step = len(self.found)
        log_probs = self.decoding(apply_temperature(scores, self._temperature(ids[:, ids.shape[1] - step:])))
        drawn = sample_inverse_cdf(log_probs, self.uniforms[:, step])
        taken = torch.where(self.greedy, scores.argmax(-1), drawn)[:, None]
        self.found.append(log_probs.gather(1, taken))
        return torch.full_like(scores, -torch.inf).scatter(1, taken, 0.0)

    def _temperature(self, drawn: Tensor) -> Tensor | None:
        """The temperature [B] of the place behind the tokens drawn so far, [B,t]; None if all are 1."""
        last, found = drawn.new_zeros(1), []
        for begun, row in zip(self.begun, drawn):
            heat = self.decoding.temperatures(torch.cat([begun.to(drawn), row, last])[None])
            if heat is None:  # as of every row
                return None
            found.append(heat[0, -1])
        return torch.stack(found)

    def log_probs(self) -> Tensor:
        return torch.cat(self.found, 1)


def apply_temperature(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Logits [n,V] over the temperature [n] of each row, float32 or wider; None: unchanged."""
    return logits if temperature is None else wide(logits)[0] / temperature.to(logits.device)[:, None]


def uniforms(generators: Generators, count: int) -> Tensor:
    return torch.stack([torch.rand(count, generator=generator) for generator in generators])


def completion_masks(ids: Tensor, ends: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The mask of drawn tokens and the mask of truncated rows of ids [B,L].
    Tokens up to and including the first of `ends` were drawn (bool [B,L]). A row without an end was truncated (bool
    [B])."""
    end = torch.isin(ids, torch.tensor(list(ends), device=ids.device))
    return end.long().cumsum(1) - end.long() == 0, ~end.any(1)


def score(hidden: Tensor, head: Callable[[Tensor], Tensor], ids: Tensor, decoding: Decoding,
          chunk: int = 1024, entropy: bool | str = False, heat: Tensor | None = None) -> Tensor:
    """log p of the tokens ids [n] under states hidden [n,H], float32 [n], `chunk` tokens at a time.
    With `entropy`, [n,2]: the second column is the entropy of each distribution; with "uniform" the mean
    log-probability of all tokens. head: maps states to logits. Logits of a chunk are recomputed in the backward pass:
    no [n,V] is ever held. heat: [n], further temperatures; None: all 1."""
    def part(hidden: Tensor, ids: Tensor, heat: Tensor | None) -> Tensor:
        log_probs = decoding(apply_temperature(head(hidden), heat), ids)
        taken = log_probs.gather(1, ids[:, None])
        if not entropy:
            return taken[:, 0]
        second = log_probs.masked_fill(log_probs == -torch.inf, 0.0).mean(-1) if entropy == "uniform" \
            else entropy_of(log_probs)
        return torch.cat([taken, second[:, None]], 1)

    pieces = zip(hidden.split(chunk), ids.split(chunk), itertools.repeat(None) if heat is None else heat.split(chunk))
    if not torch.is_grad_enabled() or len(ids) <= chunk:
        return torch.cat([part(*piece) for piece in pieces])
    return torch.cat([checkpoint(part, *piece, use_reentrant=False) for piece in pieces])


def entropy_of(log_probs: Tensor) -> Tensor:
    """-sum p log p of distributions log_probs [n,V], in nats: [n]. A cut token adds 0, to the gradient too."""
    return -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0.0)).sum(-1)

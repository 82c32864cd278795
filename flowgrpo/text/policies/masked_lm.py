"""Masked language model as a policy: answers are unmasked step by step, with every token's score.

An answer begins as masks behind its prompt, and every step turns some into tokens (`decoding.Unmasking`). A token's
log-probability is that in the state of its own step. So a replay evaluates the states of the recorded trace.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import one_hot
from torch.utils.checkpoint import checkpoint

from flowgrpo.config.sections import Adapter, Text
from flowgrpo.errors import UserError
from flowgrpo.text.policies.causal_lm import TARGETS, CausalLM
from flowgrpo.text.samplers.decoding import Decoding, Unmasking, completion_masks, sample_inverse_cdf, score, uniforms
from flowgrpo.text.samplers.gumbel_softmax import GumbelSoftmax, walk
from flowgrpo.text.samplers.language_model import SampledCompletions, TokenizedPrompts
from flowgrpo.types import Completions, Scored, Traces, wide

SHIFTED = ("dream",)  # families derived from causal models: logits at a place are those of the next one


class MaskedLM(CausalLM):
    """Masked language model with trainable weights: `CausalLM` with other samples and replays.

    Its forward takes token ids alone, without padding, since families read attention masks differently. Prompts of one
    length go through it together. unmasking: decoding of evaluation, at `text.eval_temperature`.
    """

    process, classes = "masks", ("AutoModelForMaskedLM", "AutoTokenizer")
    # Names in the Llama family and Dream, LLaDA (its `ff_out` is its head too), BERT and ModernBERT.
    targets = [*TARGETS, "attn_out", "ff_proj", "query", "key", "value", "dense", "Wqkv", "Wo", "Wi"]

    def __init__(self, model: Any, tokenizer: Any, adapter: Adapter | None, text: Text,
                 unmasking: Unmasking = Unmasking(), **options: Any):
        super().__init__(model, tokenizer, adapter, text, **options)
        token = getattr(model.config, "mask_token_id", None)
        self.mask = tokenizer.mask_token_id if token is None else token
        if self.mask is None:
            raise UserError("neither the model's config nor its tokenizer says which token is a mask: set the "
                            "tokenizer's mask_token")
        self.plain = Unmasking(per_step=unmasking.per_step, block=unmasking.block, order=unmasking.order)
        self.shift = int(model.config.model_type.lower() in SHIFTED)

    def _count(self, _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing: `_logits` counts, since a model with its own code may call its body without the hooks."""

    # --- samples -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(self, tokenized: TokenizedPrompts, unmasking: Decoding, generators: Sequence[torch.Generator],
               greedy: Tensor) -> SampledCompletions:
        """Sample an answer to each row from its own generator; greedy: bool [B], rows of most likely tokens."""
        assert isinstance(unmasking, Unmasking), type(unmasking)
        count, most = len(tokenized.ids), self.text.max_tokens
        draws, lots = uniforms(generators, 2 * most).to(self.device).split(most, 1)
        ids, greedy = torch.full((count, most), self.mask, device=self.device), greedy.to(self.device)
        steps, logp = torch.zeros_like(ids), self._zeros(ids)
        for rows in self._by_length(tokenized, torch.arange(count)):
            prompts, at = self._together(tokenized, rows), rows.to(self.device)
            ids[at], steps[at], logp[at] = self._unmask(prompts, unmasking, draws[at], lots[at], greedy[at])
        mask, cut = completion_masks(ids, self.ends)
        texts = self.detokenize(ids, mask, tokenized.prompts)
        if unmasking.shrink > 1:
            logp = self.log_probs(tokenized, torch.arange(count), ids, mask, unmasking, steps, count).logp
        logp = self._sound(logp.masked_fill(~mask, 0.0), tokenized)
        return SampledCompletions(ids.cpu(), logp.cpu(), mask.cpu(), cut.cpu(), texts, steps=steps.cpu())

    def _unmask(self, prompts: Tensor, unmasking: Unmasking, draws: Tensor, lots: Tensor, greedy: Tensor
                ) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, steps and log-probabilities [n,L] of answers to prompts [n,S]."""
        ids = torch.full(draws.shape, self.mask, device=self.device)
        steps, logp = torch.zeros_like(ids), self._zeros(ids)
        for step, (first, end, count) in enumerate(unmasking.schedule(ids.shape[1])):
            with self._arithmetic():
                logits = self.permitted(self._logits(prompts, ids)[:, first:end])
            at = unmasking.choose(logits, ids[:, first:end] == self.mask, lots[:, first:end], count)
            chosen = logits.gather(1, at[..., None].expand(-1, -1, logits.shape[2])).flatten(0, 1)
            log_probs, at = unmasking(chosen), at + first
            taken = torch.where(greedy.repeat_interleave(count), chosen.argmax(-1),
                                sample_inverse_cdf(log_probs, draws.gather(1, at).flatten()))
            ids.scatter_(1, at, taken.view_as(at))
            steps.scatter_(1, at, step)
            logp.scatter_(1, at, log_probs.gather(1, taken[:, None]).view(at.shape))
        return ids, steps, logp

    def _zeros(self, ids: Tensor) -> Tensor:
        return torch.zeros(ids.shape, dtype=torch.promote_types(self.model.dtype, torch.float32), device=self.device)

    # --- replay ------------------------------------------------------------------------------------------------------

    def log_probs(self, tokenized: TokenizedPrompts, prompts: Tensor, ids: Tensor,  # type: ignore[override]
                  mask: Tensor, unmasking: Unmasking, steps: Tensor, together: int,
                  entropy: bool | str = False) -> Scored:
        """The score [b,L] of traces (ids, steps [b,L]) of the prompts [b] (indices in `tokenized`), 0 where mask is
        false.

        It has gradients where they are enabled, and with `entropy` the entropies. A state has the tokens of earlier
        evaluations and masks for the others. Only states with a counted token are evaluated, `together` at once. Beyond
        that number, earlier states are recomputed in the backward pass, so no more activations are held.
        """
        tokens = self._in_states(partial(self._score, entropy=entropy), tokenized, prompts, ids, mask, unmasking, steps,
                                 together)
        mask = mask.to(self.device)
        logp, *rest = (tokens.new_zeros(mask.shape).masked_scatter(mask, values)
                       for values in (tokens.unbind(1) if entropy else [tokens]))
        return Scored(logp, mask, entropy=rest[0] if rest else None)

    @torch.no_grad()
    def last_hidden_states(self, tokenized: TokenizedPrompts, taken: Completions, unmasking: Decoding,
                           together: int) -> tuple[Tensor, Tensor]:
        """`CausalLM.last_hidden_states`, each token's in its own state."""
        assert isinstance(taken, Traces) and isinstance(unmasking, Unmasking), (type(taken), type(unmasking))
        states = self._in_states(self._last_hidden_states, tokenized, taken.prompts, taken.ids, taken.old.mask,
                                 unmasking, taken.steps, together)
        return states, unmasking.scorings(taken.steps, taken.ids.shape[1])

    def _in_states(self, evaluate: Callable[..., Tensor], tokenized: TokenizedPrompts, prompts: Tensor, ids: Tensor,
                   mask: Tensor, unmasking: Unmasking, steps: Tensor, together: int) -> Tensor:
        """`evaluate`, called as `_score`, of the k tokens where mask is true, each in its own state, in order."""
        ids, mask = ids.to(self.device), mask.to(self.device)
        turns, where = unmasking.scorings(steps.to(self.device), ids.shape[1]), mask.nonzero()
        states, of = torch.stack([where[:, 0], turns[mask]], 1).unique(dim=0, return_inverse=True)
        row, turn = states[:, 0], states[:, 1:]
        answers, of_states = ids[row].where(turns[row] < turn, self.mask), prompts[row.cpu()]
        pieces = [piece for same in self._by_length(tokenized, of_states) for piece in same.split(together)]
        again, results, places = torch.is_grad_enabled() and len(pieces) > 1, [], []
        for piece in pieces:
            here = piece.to(self.device)
            at = torch.isin(of, here).nonzero()[:, 0]
            given = (self._together(tokenized, of_states[piece]), answers[here], torch.searchsorted(here, of[at]),
                     where[at, 1], ids[mask][at], unmasking)
            results.append(checkpoint(evaluate, *given, use_reentrant=False) if again else evaluate(*given))
            places.append(at)
        return torch.cat(results)[torch.cat(places).argsort()]

    def _score(self, prompts: Tensor, answers: Tensor, row: Tensor, place: Tensor, ids: Tensor, unmasking: Unmasking,
               entropy: bool | str) -> Tensor:
        """`score` of the tokens ids [k] at the places [k] of the rows [k] of answers [n,L] to prompts [n,S]."""
        with self._arithmetic():
            return score(self._logits(prompts, answers)[row, place], self.permitted, ids, unmasking,
                         entropy=entropy)

    def _last_hidden_states(self, prompts: Tensor, answers: Tensor, row: Tensor, place: Tensor, *_: Any) -> Tensor:
        """The last hidden states [k,H], float32 or wider, that are the inputs of `_score`'s logits."""
        inputs = torch.cat([prompts, answers], 1)
        self.evaluations += inputs.numel()
        with self._arithmetic():
            (states,) = wide(self.model(input_ids=inputs, output_hidden_states=True).hidden_states[-1])
        return states[:, prompts.shape[1] - self.shift:][row, place]

    # --- a reward's gradient -----------------------------------------------------------------------------------------

    def sample_relaxed(self, tokenized: TokenizedPrompts, prompts: Tensor, generators: Sequence[torch.Generator],
                       unmasking: Unmasking, part: GumbelSoftmax, base: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Answers [b,L,V], one-hot, of the prompts [b] (indices in `tokenized`), and the KL [b] of their process to
        that of the weights `base`, by name as in `weights.named`.
        Both have gradients where they are enabled. generators: of each row's noise."""
        shape, results = (self.text.max_tokens, self._table()[1].shape[0]), []
        groups = self._by_length(tokenized, prompts)
        lots = uniforms(generators, shape[0]).to(self.device, torch.promote_types(self.model.dtype, torch.float32))
        gumbels = torch.stack([-torch.empty(shape).exponential_(generator=generator).log() for generator in generators])
        blank = one_hot(torch.full(shape[:1], self.mask, device=self.device), shape[1]).to(lots)
        for rows in groups:
            read, at = self._together(tokenized, prompts[rows]), rows.to(self.device)
            results.append(walk(partial(self._of_weights, read, None), partial(self._of_weights, read, base),
                                blank.expand(len(rows), -1, -1), unmasking, part, lots[at],
                                gumbels[rows].to(self.device)))
        back = torch.cat(groups).argsort().to(self.device)
        answers, kl = (torch.cat(values)[back] for values in zip(*results))
        return answers, kl

    def _of_weights(self, prompts: Tensor, base: dict[str, Tensor] | None, x: Tensor) -> Tensor:
        """The logits [n,L,V] behind prompts [n,S] of answers as weights of tokens x [n,L,V].
        They are those of the present weights, or of `base`."""
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(self._soft_logits, prompts, base, x, use_reentrant=False)
        return self._soft_logits(prompts, base, x)

    def _soft_logits(self, prompts: Tensor, base: dict[str, Tensor] | None, x: Tensor) -> Tensor:
        name, table = self._table()
        held = {key.removeprefix("model."): value for key, value in (base or {}).items()}
        table = held.get(name, table)
        inputs = torch.cat([table[prompts], x.to(table.dtype) @ table], 1)
        self.evaluations += inputs.shape[0] * inputs.shape[1]
        with self._arithmetic():
            logits = functional_call(self.model, held, (), {"inputs_embeds": inputs}).logits
        assert logits.shape[2] == x.shape[2], (logits.shape, x.shape)
        return self.permitted(logits[:, prompts.shape[1] - self.shift:inputs.shape[1] - self.shift])

    def _table(self) -> tuple[str, Tensor]:
        table = self.model.get_input_embeddings().weight
        return next(key for key, parameter in self.model.named_parameters() if parameter is table), table

    def vocabulary(self) -> list[str]:
        """The text of every token of the model's vocabulary; "" if the tokenizer has none."""
        known = {i: text for text, i in self.tokenizer.get_vocab().items()}
        return [known.get(i, "") for i in range(self._table()[1].shape[0])]

    # --- the model ---------------------------------------------------------------------------------------------------

    def _logits(self, prompts: Tensor, answers: Tensor) -> Tensor:
        inputs = torch.cat([prompts, answers], 1)
        self.evaluations += inputs.numel()
        return self.model(input_ids=inputs).logits[:, prompts.shape[1] - self.shift:inputs.shape[1] - self.shift]

    def permitted(self, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([self.mask], device=logits.device), -torch.inf)

    def _together(self, tokenized: TokenizedPrompts, rows: Tensor) -> Tensor:
        return torch.stack([tokenized.ids[i] for i in rows.tolist()]).to(self.device)

    @staticmethod
    def _by_length(tokenized: TokenizedPrompts, prompts: Tensor) -> list[Tensor]:
        lengths = torch.tensor([len(tokenized.ids[i]) for i in prompts.tolist()])
        return [(lengths == length).nonzero()[:, 0] for length in lengths.unique().tolist()]

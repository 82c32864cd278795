"""Causal language model as a policy: prompts to completions, with the log-probability of every token.

Sampling is transformers' `GenerationMixin.generate`, batched, with its cache; our logits processor draws. A replay runs
the model's body once, and its head only for drawn tokens.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from flowgrpo.config.sections import Adapter, Text
from flowgrpo.device import DTYPES, without_cudnn_attention
from flowgrpo.errors import NotFinite, UserError
from flowgrpo.policies.weights.adapters import culprit
from flowgrpo.policies.weights.checkpointing import recompute
from flowgrpo.policies.weights.forwards import folded, fuse_text_norms, without_casts
from flowgrpo.samplers.rollout import generators
from flowgrpo.text.policies import text_weights
from flowgrpo.text.samplers.decoding import Decoding, Draw, completion_masks, score, uniforms
from flowgrpo.text.samplers.language_model import SampledCompletions, TokenizedPrompts
from flowgrpo.types import Completion, Completions, Scored, opening_tag, wide

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXACT = 1e-4  # |log ratio|; measured: 2e-5 with 30 layers and 49,152 tokens, 5e-7 with 4 layers
CLOSE = 1e-3  # largest difference between two computations of the same log-probabilities, in a trial
# In a trial in half precision, relative to the logits' spread; measured: at most 0.035 with 30 layers, and 0.5 to 1.2
# for completions that do not see their prompt.
CLOSE_IN_HALF = 0.1
RECOMPUTED = "gradient checkpointing recomputes whole rows"


class CausalLM:
    """Causal language model of transformers with trainable weights: `encode`, `sample`, `log_probs`, `generate`.

    model and tokenizer: loaded; adapter: None trains nothing; precision: of frozen weights and arithmetic;
    log-probabilities are float32.
    exact: largest difference of replay and rollout in fp32, where `generate` sums in another order.
    """

    process, modality, unit, turns = "tokens", "text", "tokens", None
    classes = "AutoModelForCausalLM", "AutoTokenizer"  # of transformers
    limited = True  # as an engine
    rows_drawn = 1  # through the model, for each row that is drawn
    images_refused = "takes no image, but a prompt brings one: leave it out"
    writes = "completion up to", "lower text.max_tokens, or shorten the prompt"
    fps: float | None = None
    generators, plain, targets = staticmethod(generators), Decoding(), TARGETS
    quality: Callable[[Tensor], Tensor] | None = None  # as of a `CausalModel`

    def __init__(self, model: Any, tokenizer: Any, adapter: Adapter | None, text: Text, *,
                 device: str | torch.device = "cpu", precision: str = "fp32", checkpointing: float = 0.0):
        self.model, self.tokenizer, self.text = model, tokenizer, text
        self._cache = text_weights.cache_name(self.body)
        self.device, self.dtype = torch.device(device), DTYPES[precision]
        self.states, self.exact = torch.device("cpu"), EXACT if precision == "fp32" else None
        self.evaluations = 0  # tokens that went through the model, padding included
        self.generating: dict[str, Any] = {}  # further arguments of `generate`
        self.ends, self.padding = text_weights.special_tokens(model, tokenizer, text.template)
        if model.dtype != self.dtype:
            raise UserError(f"the model is in {model.dtype}, but precision is {precision!r}, which expects "
                            f"{self.dtype}: load it with that dtype, or set precision")
        text_weights.plain_generation(model, self.ends, self.padding)
        model.to(self.device).eval().requires_grad_(False)
        fuse_text_norms(model, self.device)
        if adapter and adapter.targets == Adapter().targets:
            adapter = adapter.model_copy(update={"targets": text_weights.present(model, self.targets)})
        self.weights: Any = text_weights.TextWeights(tokenizer, {"model": model}, adapter) if adapter else None
        if self.weights and self.dtype == torch.float32:  # in half precision autocast casts
            without_casts(self.weights.layers().values())
        if checkpointing:
            recompute(model, checkpointing)
        self.checkpointing = float(checkpointing)
        self.body.register_forward_pre_hook(self._count, with_kwargs=True)
        # Determined by a trial: logits are the head's, prefixes shareable.
        self._head_alone: bool | None = None
        self._apart: str | None = None  # why prefixes are not shared; "" if they are
        self.precision, self._teachers = precision, dict[str, dict[str, Any]]()  # fields of this one with each teacher

    def checkpoint(self, share: float) -> None:
        """Recompute this share of the layers in the backward pass, from here on."""
        recompute(self.model, share)
        self.checkpointing = share

    def _count(self, _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs.get("input_ids")
        self.evaluations += (kwargs["inputs_embeds"][..., 0] if ids is None else ids).numel()

    # --- parts of the model ------------------------------------------------------------------------------------------

    def body_of(self, model: Any) -> Any:
        """The part of a model that makes states [B,S,H] of its inputs."""
        return model.base_model

    @property
    def body(self) -> Any:
        return self.body_of(self.model)

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """The function from states [n,H] before tokens to their logits [n,V]."""
        return self.model.get_output_embeddings()

    def read(self, ids: Tensor) -> dict[str, Tensor]:
        return {"input_ids": ids}

    def columns(self, ids: Tensor) -> Tensor:
        return ids

    def permitted(self, logits: Tensor) -> Tensor:
        """The logits [...,V], -inf for tokens that no completion holds."""
        return logits

    def probe(self, tokenized: TokenizedPrompts) -> Tensor:
        """A few tokens [n] that a completion of the first prompt may have, for trials."""
        return tokenized.ids[0][:3]

    # --- prompts and samples -----------------------------------------------------------------------------------------

    def encode(self, prompts: list[str], negatives: Sequence[str] = (), images: Sequence[Any] = ()) -> TokenizedPrompts:
        """Tokenize the prompts, in the chat template if configured. Raises UserError for a reference image."""
        if any(image is not None for image in images):
            raise UserError(f"{type(self.model).__name__} {self.images_refused}")
        return TokenizedPrompts(list(prompts), [self._tokens(prompt) for prompt in prompts])

    @property
    def templated(self) -> bool:
        """True if prompts are written in the chat template."""
        has = bool(getattr(self.tokenizer, "chat_template", None))
        if self.text.template and not has:
            raise UserError("text.template is true, but the tokenizer has no chat template: set it to false")
        return has and self.text.template is not False

    def written(self, prompt: str) -> str:
        """A prompt as the model reads it, in the chat template if configured."""
        system = self.text.system
        if not self.templated:
            return f"{system}\n{prompt}" if system else prompt
        said = [{"role": "system", "content": system}] if system else []
        try:
            return str(self.tokenizer.apply_chat_template([*said, {"role": "user", "content": prompt}],
                                                          tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template can raise anything, such as for a system prompt
            raise UserError(f"the chat template of {type(self.tokenizer).__name__} fails on the prompt {prompt!r} "
                            f"({' '.join(str(error).split())[:200]}): set text.template: false, or leave out "
                            "what it refuses, such as text.system") from error

    def _tokens(self, prompt: str) -> Tensor:
        ids = self.tokenizer(self.written(prompt), add_special_tokens=not self.templated)["input_ids"]
        if not ids:
            raise UserError(f"the prompt {prompt!r} has no token: expected a text that the tokenizer knows")
        return torch.tensor(ids)

    def answer(self, text: str) -> Tensor:
        """The tokens [n] of a text that is given as a completion, an end included."""
        return torch.tensor([*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.ends[0]])

    def pad_answers(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Rows of tokens as ids [B,L], padded at their ends, and mask, bool [B,L]."""
        ids = pad_sequence([*rows], batch_first=True, padding_value=self.padding)
        return ids, torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]

    def require_context(self, prompts: Sequence[str]) -> None:
        """Raise UserError for a prompt without tokens or, with its completion, longer than the model's context; of many
        prompts only the longest and the shortest are checked."""
        by_length = sorted(dict.fromkeys(prompts), key=len)
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        for prompt in by_length[:1] + by_length[-4:]:
            length = len(self.encode([prompt]).ids[0])
            if most and length + self.text.max_tokens > most:
                made, cure = self.writes
                raise UserError(f"the prompt {prompt[:60]!r} has {length} tokens and its {made} "
                                f"{self.text.max_tokens}, but the model's context is {most} tokens: {cure}")

    @torch.no_grad()
    def sample(self, tokenized: TokenizedPrompts, decoding: Decoding, generators: Sequence[torch.Generator],
               greedy: Tensor) -> SampledCompletions:
        """Sample a completion of each row from its own generator; greedy: bool [B], rows of most likely tokens.
        The tokens of a row depend on its generator alone, not on other rows."""
        from transformers import GenerationMixin, LogitsProcessorList

        most = self.text.max_tokens
        draw = Draw(decoding, uniforms(generators, most).to(self.device), greedy.to(self.device), tokenized.begun)
        # A folded LoRA is a copy of the weights, for which a GPU may lack memory.
        layers = self.weights.layers().values() if self.weights and self.device.type == "cpu" else ()
        with self._arithmetic(), folded(layer for layer in layers if hasattr(layer, "folded")):
            inputs = self._inputs_of_samples(tokenized)
            # That of all models: a model's own, as of Janus, may pass no logits processors on.
            tokens = GenerationMixin.generate(
                self.model, max_new_tokens=most, do_sample=False, logits_processor=LogitsProcessorList([draw]),
                **inputs, **self.generating)[:, inputs["input_ids"].shape[1]:]
        mask, cut = completion_masks(tokens, self.ends)
        texts = self.detokenize(tokens, mask, tokenized.prompts)
        short = 0, most - tokens.shape[1]
        logp = self._sound(draw.log_probs().masked_fill(~mask, 0.0), tokenized)
        ids, logp, mask = (pad(values, short).cpu() for values in (tokens, logp, mask))
        return SampledCompletions(ids, logp, mask, cut.cpu(), texts)

    def _inputs_of_samples(self, tokenized: TokenizedPrompts) -> dict[str, Any]:
        """Arguments of `generate`: the prompts, or, where rows share theirs, last tokens behind a cache of the rest."""
        ids, mask = self._pad_left(tokenized)
        length = ids.shape[1]
        inputs = {"input_ids": ids, "attention_mask": mask}
        if type(tokenized) is not TokenizedPrompts or not self.text.shared_prefix or length == 1:
            return inputs | self._beside(tokenized, length, before=True)
        unique, of = torch.cat([ids, mask], 1).unique(dim=0, return_inverse=True)
        if len(unique) == len(of) or self._reason_apart(tokenized):
            return inputs
        first, seen = unique[:, :length - 1], unique[:, length:-1]
        positions, _ = self._positions(tokenized, first, seen)
        cache = getattr(self.body(**self.read(first), attention_mask=seen, position_ids=positions, use_cache=True),
                        self._cache)
        cache.batch_select_indices(of)
        return {"input_ids": ids[:, -1:], "attention_mask": mask, self._cache: cache}

    def _sound(self, logp: Tensor, tokenized: TokenizedPrompts) -> Tensor:
        """Raises NotFinite if a log-probability is NaN, with the weight that is."""
        if logp.isnan().any():
            prompt = tokenized.prompts[int(logp.isnan().any(1).long().argmax())]
            raise NotFinite(f"the completion of the prompt {prompt[:60]!r} has probabilities of NaN", culprit(
                {"model": self.model}) or "look at the precision (--precision=bf16, or fp32), and at train.lr")
        return logp

    def detokenize(self, ids: Tensor, mask: Tensor, prompts: Sequence[str]) -> list[Completion]:
        """The texts of ids [B,L] where mask is true, written for the prompts [B]."""
        tokens, ends = [row[at] for row, at in zip(ids, mask)], torch.tensor(self.ends, device=ids.device)
        # An end of the generation config need not be a special token of the tokenizer.
        texts = self.tokenizer.batch_decode([row[~torch.isin(row, ends)] for row in tokens], skip_special_tokens=True)
        return [Completion(text, len(row), tuple(row.tolist()), tag)
                for text, row, tag in zip(texts, tokens, self.opened(prompts), strict=True)]

    def opened(self, prompts: Sequence[str]) -> list[str]:
        """The tag that each prompt ends with as the model reads it, such as <think>; "" for none."""
        tags = {prompt: opening_tag(self.written(prompt)) for prompt in set(prompts)}
        return [tags[prompt] for prompt in prompts]

    def generate(self, tokenized: TokenizedPrompts, generators: Sequence[torch.Generator], *_: Any) -> list[Completion]:
        """Completions for evaluation: at `text.eval_temperature`, without cuts."""
        warm = self.text.eval_temperature
        greedy = torch.full((len(tokenized.ids),), not warm)
        return self.sample(tokenized, replace(self.plain, temperature=warm or 1.0), generators, greedy).texts

    def _pad_left(self, tokenized: TokenizedPrompts) -> tuple[Tensor, Tensor]:
        """Padded on the left, since a completion follows the prompt: ids and mask, int64 [B,S] both."""
        ids = pad_sequence(tokenized.ids, True, self.padding, "left")
        mask = pad_sequence([torch.ones_like(row) for row in tokenized.ids], True, 0, "left")
        return ids.to(self.device), mask.to(self.device)

    def _beside(self, tokenized: TokenizedPrompts, length: int, before: bool = False) -> dict[str, Tensor]:
        """The model's inputs besides tokens [B,length], padded before or behind the prompts; none for texts."""
        return {}

    # --- replay ------------------------------------------------------------------------------------------------------

    def log_probs(self, tokenized: TokenizedPrompts, prompts: Tensor, ids: Tensor, mask: Tensor,
                  decoding: Decoding, entropy: bool | str = False) -> Scored:
        """The score [B,L] of completions ids [B,L] of the prompts [B] (indices in `tokenized`), 0 where mask is false,
        with gradients where they are enabled; with `entropy`, the entropies too."""
        most = ids.shape[1]
        length = int((mask * torch.arange(1, most + 1, device=mask.device)).max().clamp(min=1))  # to the last one
        ids, kept = ids[:, :length].to(self.device), mask[:, :length].to(self.device)
        unique, of = prompts.unique(return_inverse=True)
        temperatures = decoding.temperatures(ids)
        heat = None if temperatures is None else temperatures[kept]
        with self._arithmetic():
            if self.text.shared_prefix and len(unique) < len(of) and not self.reason_not_shared(tokenized):
                hidden = self._behind_prefixes(tokenized.rows(unique), of.to(self.device), ids)
            else:
                hidden = self.states_before(tokenized.rows(prompts), ids)
            states, head, taken = hidden[kept], self.head, self.columns(ids[kept])
            if not self.head_alone(tokenized):
                # The model does more than its head: from its own logits, all held in memory.
                own = tokenized.rows(prompts)
                inputs, places = self._concatenate(own, ids)
                logits = self.model(input_ids=inputs, use_cache=False, **self._beside(own, inputs.shape[1])).logits
                rows = torch.arange(len(ids), device=self.device)[:, None].expand_as(places)
                states, head, taken = logits[rows[kept], places[kept]], torch.nn.Identity(), ids[kept]
            scores = score(states, lambda states: self.permitted(head(states)), taken, decoding, entropy=entropy,
                           heat=heat)
        logp, *rest = (pad(torch.zeros(kept.shape, device=self.device).masked_scatter(kept, values), (0, most - length))
                       for values in (scores.unbind(1) if entropy else [scores]))
        return Scored(logp, mask.to(self.device), entropy=rest[0] if rest else None)

    def states_before(self, tokenized: TokenizedPrompts, ids: Tensor) -> Tensor:
        """The states [B,L,H] before each token of the completions ids [B,L], the inputs of its distribution; every row
        is read from its start."""
        inputs, places = self._concatenate(tokenized, ids)
        with self._arithmetic():
            states = self.body(**self.read(inputs), use_cache=False,
                               **self._beside(tokenized, inputs.shape[1])).last_hidden_state
        return states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))

    @torch.no_grad()
    def last_hidden_states(self, tokenized: TokenizedPrompts, taken: Completions, decoding: Decoding,
                           together: int) -> tuple[Tensor, Tensor]:
        """The last hidden states [k,H], float32 or wider, of the k counted tokens, row by row, and the steps of all
        tokens, int64 [m,L]: every place is one."""
        hidden = []
        for rows in torch.arange(len(taken.ids)).split(together):
            (states,) = wide(self.states_before(tokenized.rows(taken.prompts[rows]), taken.ids[rows].to(self.device)))
            hidden.append(states[taken.old.mask[rows].to(self.device)])
        return torch.cat(hidden), torch.arange(taken.ids.shape[1]).expand(taken.ids.shape)

    @property
    def width(self) -> int:
        """H, the size of a hidden state."""
        return self.model.get_input_embeddings().weight.shape[1]

    @property
    def choices(self) -> int:
        """V, the number of tokens that the head knows."""
        return self.model.get_output_embeddings().weight.shape[0]

    def _concatenate(self, tokenized: TokenizedPrompts, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Prompts and completions [B,S], padded on the right, where it has no effect, and the indices [B,L] of the
        states that predict the completions' tokens."""
        lengths = torch.tensor([len(prompt) for prompt in tokenized.ids], device=self.device)
        rows = [torch.cat([prompt.to(self.device), completion[:-1]]) for prompt, completion in zip(tokenized.ids, ids)]
        inputs = pad_sequence(rows, batch_first=True, padding_value=self.padding)
        return inputs, lengths[:, None] - 1 + torch.arange(ids.shape[1], device=self.device)

    def _behind_prefixes(self, tokenized: TokenizedPrompts, of: Tensor, ids: Tensor) -> Tensor:
        """`states_before` of completions [B,L] of the prompts `of` [B], each read once: a group's shared prefix is
        computed once, and its gradient is the sum of theirs (Prefix Grouper, 2506.05433)."""
        inputs, mask = self._pad_left(tokenized)
        positions, next_position = self._positions(tokenized, inputs, mask)
        read = self.body(**self.read(inputs), attention_mask=mask, position_ids=positions, use_cache=True,
                         **self._beside(tokenized, inputs.shape[1], before=True))
        first = read.last_hidden_state[:, -1:][of]
        if ids.shape[1] == 1:
            return first
        cache = getattr(read, self._cache)
        cache.batch_select_indices(of)
        visible = torch.cat([mask[of], torch.ones_like(ids[:, :-1])], 1)
        behind = next_position[of] + torch.arange(ids.shape[1] - 1, device=self.device)
        states = self.body(**self.read(ids[:, :-1]), attention_mask=visible, position_ids=behind, use_cache=True,
                           **{self._cache: cache}).last_hidden_state
        return torch.cat([first, states], 1)

    def _positions(self, tokenized: TokenizedPrompts, inputs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return positions, positions[:, -1:] + 1

    @torch.no_grad()
    def head_alone(self, tokenized: TokenizedPrompts) -> bool:
        """True if the model's logits are its head applied to its states: determined by a trial, once."""
        if self._head_alone is None:
            before, ids = self.evaluations, tokenized.ids[0][None].to(self.device)
            beside = self._beside(tokenized.rows(torch.tensor([0])), ids.shape[1])
            states = self.body(**self.read(ids), use_cache=False, **beside).last_hidden_state
            logits = self.model(input_ids=ids, use_cache=False, **beside).logits
            self._head_alone = torch.allclose(self.head(states), logits, CLOSE, CLOSE)
            self.evaluations = before
        return self._head_alone

    def reason_not_shared(self, tokenized: TokenizedPrompts) -> str:
        """The reason why a replay reads a prompt once for each of its completions; empty if they share its cache."""
        return RECOMPUTED if self.checkpointing else self._reason_apart(tokenized)

    @torch.no_grad()
    def _reason_apart(self, tokenized: TokenizedPrompts) -> str:
        """The reason why a prompt's cache cannot be shared, determined by a trial, once; empty if it can."""
        if self._apart is None:
            self._apart = self._try_prefixes(tokenized.rows(torch.tensor([0])), self.probe(tokenized))
        return self._apart

    def _try_prefixes(self, tokenized: TokenizedPrompts, text: Tensor) -> str:
        """Try one prompt, and twice the tokens `text` behind it; return the reason of a failure."""
        before, ids = self.evaluations, text.repeat(2, 1).to(self.device)
        with self._arithmetic():
            whole = self.head(self.states_before(tokenized.rows(torch.tensor([0, 0])), ids))
            try:
                shared = self.head(self._behind_prefixes(tokenized, torch.tensor([0, 0], device=self.device), ids))
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:  # another kind of cache
                return f"its cache cannot be shared ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
            finally:
                self.evaluations = before
        apart, most = relative_error(shared, whole), CLOSE if self.dtype == torch.float32 else CLOSE_IN_HALF
        return "" if apart <= most else (f"logits behind a shared prompt differ by {apart:.1e} of their spread, "
                                         f"expected at most {most:g}")

    # --- state in a checkpoint ---------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {"apart": self._apart}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over the result of a trial; older runs with gradient checkpointing made none."""
        if values.get("apart") != RECOMPUTED:
            self._apart = values.get("apart")

    # --- what every policy has ---------------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    @contextlib.contextmanager
    def reference(self, held: Sequence[dict[str, Tensor]] = ()) -> Iterator[None]:
        """Context manager: use the base model, or the average of the snapshots `held` of its trainable weights."""
        with self.weights.reference(held), torch.no_grad():
            yield

    def sync(self, policy: "CausalLM") -> None:
        """Take over the weights of a policy, of which this one is a copy as an engine."""
        self.weights.load({key: parameter.detach() for key, parameter in policy.weights.named.items()})

    @contextlib.contextmanager
    def teacher(self, name: str) -> Iterator[None]:
        """Context manager: the model is that of a teacher, a directory or a hub id, which is loaded at its first use.
        Raises UserError if it does not load or has another tokenizer."""
        fields = vars(self)
        own = {key: fields[key] for key in ("model", "_head_alone", "_apart")}
        if name not in self._teachers:
            model, tokenizer = self.another(name)
            if tokenizer.get_vocab() != self.tokenizer.get_vocab():
                raise UserError(f"the teacher {name!r} has another tokenizer than the model: expected the same tokens")
            self.body_of(model).register_forward_pre_hook(self._count, with_kwargs=True)
            model.to(self.device).eval().requires_grad_(False)
            self._teachers[name] = {"model": model, "_head_alone": None, "_apart": None}
        fields.update(self._teachers[name])
        try:
            with torch.no_grad():
                yield
        finally:
            self._teachers[name] = {key: fields[key] for key in own}
            fields.update(own)

    def another(self, model: str) -> tuple[Any, Any]:
        """Load another model of this kind, and its tokenizer."""
        body, reader = text_weights.load_causal_lm(model, self.precision, classes=self.classes)
        return body, reader.tokenizer if hasattr(self, "processor") else reader

    @contextlib.contextmanager
    def _arithmetic(self) -> Iterator[None]:
        half = self.dtype != torch.float32
        lower = torch.autocast(self.device.type, self.dtype) if half else contextlib.nullcontext()
        with without_cudnn_attention(self.device), lower:
            yield


def relative_error(one: Tensor, other: Tensor) -> float:
    """The distance of logits [...,V] from `other`, over the spread of these; without each row's constant, which changes
    no probability."""
    apart, size = (values.float() - values.float().mean(-1, keepdim=True) for values in (one - other, other))
    return (apart.norm() / size.norm().clamp(min=torch.finfo(torch.float32).tiny)).item()

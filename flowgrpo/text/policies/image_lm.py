"""Language model that draws images token by token, as a policy: `causal_lm` with an image at the end of a completion.

A completion is a grid of image tokens in raster order. Its ids stand behind those of texts: V + code, V the number of
text tokens, so that one row can hold both. Sampling with guidance is the model's own `generate`; guidance is combined
in float32 from the logits of two rows, with and without the prompt, in the rollout and in the replay alike. Without
guidance, which that `generate` does not have, one row is read for each image.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo.config.sections import Adapter, Text
from flowgrpo.errors import UserError
from flowgrpo.text.policies.causal_lm import EXACT, CausalLM
from flowgrpo.text.policies.vision_lm import VisionLM, language_layers, template_inputs
from flowgrpo.text.samplers.decoding import Decoding, Draw, Generators, uniforms
from flowgrpo.text.samplers.language_model import SampledCompletions, TokenizedPrompts
from flowgrpo.types import unwrap, wide

HEAD = "generation_head"  # of the model, from states to logits of image tokens
UNREAD = ("vision_model", "aligner", "lm_head")  # parts of the model that no image token goes through
DECODED = 8  # images that are decoded at once
KEPT = 2**28  # bytes of decoded images that are kept


class Guided(Draw):
    """`Draw` for the two halves of a batch, with and without prompts: guides, and draws.

    The logits of `generate` are [2B,V]; those that it gets back are the drawn tokens' [B,V].
    shift: what a token's id is above its column. conditional: log-probabilities are those without guidance.
    """

    def __init__(self, *drawn: Any, guidance: float, shift: int, conditional: bool):
        super().__init__(*drawn)
        self.guidance, self.shift, self.conditional = guidance, shift, conditional
        self.ids: Tensor | None = None  # drawn so far

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        own, other = logits.chunk(2)
        before = ids[:, :0] if self.ids is None else self.ids
        chosen = super().__call__(before, guide_logits(own, other, self.guidance))
        taken = chosen.argmax(-1, keepdim=True)
        self.ids = torch.cat([before, taken + self.shift], 1)
        if self.conditional:
            self.found[-1] = self.decoding(own, taken[:, 0]).gather(1, taken)
        return chosen


def guide_logits(own: Tensor, other: Tensor, scale: float) -> Tensor:
    """other + scale (own - other), float32 or wider: logits of a prompt's row and of the row without it."""
    own, other = wide(own, other)
    return own if scale == 1 else other + scale * (own - other)


class ImageLM(CausalLM):
    """Janus of transformers with trainable weights, from prompts to images; its arguments are those of `VisionLM`.

    guidance: of the rollout and its replay; shown: of `generate`, for evaluations. 1 is none.
    conditional: score tokens without guidance, though they are drawn with it, as several published codes do.
    answers: weights that only answers go through are trained as well.
    Unless `adapter.targets` names others, a LoRA trains the language model's layers and the image head. The autoencoder
    stays frozen.
    Raises UserError for a model without an image head, and for a generation configuration that lacks what it needs.
    """

    process, modality, classes = "image tokens", "image", VisionLM.classes
    images_refused = ("generates images from a text only, but a prompt brings an image: leave it out, or train its "
                      "answers (text.generates: text)")
    writes = "image", "shorten the prompt"

    def __init__(self, model: Any, processor: Any, adapter: Adapter | None, text: Text, *, guidance: float = 1.0,
                 shown: float = 1.0, conditional: bool = False, answers: bool = False, **options: Any):
        self.grid, self.begin, blank = grid_of(model)
        for name, scale in (("train.guidance", guidance), ("eval.guidance", shown)):
            if not 1 <= scale < math.inf:
                raise UserError(f"{name} is {scale:g}, but image tokens are generated with 1, which is none, or "
                                "more")
        if adapter and adapter.targets == Adapter().targets:
            layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
                      and f".{HEAD}." in f".{name}"]
            adapter = adapter.model_copy(update={"targets": [*language_layers(model), *layers]})
        super().__init__(model, processor.tokenizer, adapter, text.model_copy(update={"max_tokens": self.grid}),
                         **options)
        self.padding = model.generation_config.pad_token_id = blank
        self.processor = processor
        if self.weights:
            self.weights.pipe = processor
            if adapter and not adapter.rank:
                for name, part in self.model.named_modules():  # neither the autoencoder, nor what is not read
                    if name.rpartition(".")[2] in ("vqmodel", *(() if answers else UNREAD)):
                        part.requires_grad_(False)
                self.weights.hold()
        self.guidance, self.shown, self.conditional = float(guidance), float(shown), conditional
        self.rows_drawn = 1 if guidance == 1 else 2  # with the prompt and without
        self.exact = self.exact and EXACT * (2 * self.guidance - 1)  # rounding of both halves adds up
        self._head_alone = True
        self.painted: dict[bytes, Tensor] = {}  # images by their tokens, the newest last

    # --- parts of the model ------------------------------------------------------------------------------------------

    @property
    def first(self) -> int:
        """V, the id of the first image token."""
        return self.model.get_input_embeddings().weight.shape[0]

    def body_of(self, model: Any) -> Any:
        return model.model.language_model

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """The function from states [n,H] of prompts, or [n,2H] of both halves, to logits [n,K] of image tokens."""
        head = getattr(self.model.model, HEAD)
        if self.halves == 1:
            return head

        def guided(states: Tensor) -> Tensor:
            own, other = states.chunk(2, -1)
            return guide_logits(head(own), head(other), self.guidance)

        return guided

    @property
    def halves(self) -> int:
        """Number of rows through the model for a row of a replay: 2 with guidance."""
        return 1 if self.guidance == 1 or self.conditional else 2

    @property
    def width(self) -> int:
        return self.halves * super().width

    @property
    def choices(self) -> int:
        return self.model.config.vq_config.num_embeddings

    def read(self, ids: Tensor) -> dict[str, Tensor]:
        drawn = ids >= self.first
        texts = self.model.get_input_embeddings()(ids.masked_fill(drawn, self.padding))
        if not drawn.any():
            return {"inputs_embeds": texts}
        images = self.model.prepare_embeddings_for_image_generation(self.columns(ids[drawn]))
        return {"inputs_embeds": texts.masked_scatter(drawn[..., None], images.to(texts.dtype))}

    def columns(self, ids: Tensor) -> Tensor:
        return ids - self.first

    def probe(self, tokenized: TokenizedPrompts) -> Tensor:
        return self.first + torch.arange(min(3, self.choices))

    # --- prompts and samples -----------------------------------------------------------------------------------------

    def _tokens(self, prompt: str) -> Tensor:
        if self.text.template is False or not self.processor.chat_template:
            return torch.cat([super()._tokens(prompt), torch.tensor([self.begin])])
        return template_inputs(self.processor, self.text, prompt, generation_mode="image")["input_ids"][0]

    def without(self, ids: Tensor) -> Tensor:
        """A prompt's tokens without its text, of the same length: what guidance leads away from."""
        kept = (ids == self.begin) | (ids == self.model.generation_config.bos_token_id)
        return ids.masked_fill(~kept, self.padding)

    def generate(self, tokenized: TokenizedPrompts, generators: Generators, *drawn: Any) -> Any:
        """Images [B,3,H,W] for evaluation, at `text.eval_temperature`.
        drawn: the number of steps, of denoisers, and the guidance; without them it is `eval.guidance`."""
        _, guidance = drawn or (0, self.shown)
        warm = 1.0 if self.text.eval_temperature is None else self.text.eval_temperature
        greedy = torch.full((len(tokenized.ids),), not warm)
        return self.sample(tokenized, Decoding(warm or 1.0), generators, greedy, guidance).images

    def of_noise(self, tokenized: TokenizedPrompts, generators: Generators, output_type: str = "pt") -> Tensor:
        """Images of random tokens [B,3,H,W], without a call of the language model."""
        return self.decode(self.first + torch.stack([torch.randint(self.choices, (self.grid,), generator=each)
                                                     for each in generators]))

    @torch.no_grad()
    def sample(self, tokenized: TokenizedPrompts, decoding: Decoding, generators: Generators,
               greedy: Tensor, guidance: float | None = None) -> SampledCompletions:
        """Sample an image for each row from its own generator; greedy: bool [B], rows of most likely tokens.
        guidance: None: that of the rollout."""
        from transformers import LogitsProcessorList, StaticCache

        guidance = self.guidance if guidance is None else guidance
        drawn = decoding, uniforms(generators, self.grid).to(self.device), greedy.to(self.device)
        ids, mask = self._pad_left(tokenized)
        with self._arithmetic():
            if guidance == 1:
                draw = Draw(*drawn)
                ids = self._sample_without_guidance(ids, mask, draw).cpu()
            else:
                draw = Guided(*drawn, guidance=guidance, shift=self.first, conditional=self.conditional)
                # The model's own is as long as the longest before, by which a resumed run would round otherwise.
                cache = StaticCache(self.model.config.get_text_config(), max_cache_len=ids.shape[1] + self.grid)
                # guidance_scale 1: the model's own would be combined in its dtype, behind our processor.
                codes = self.model.generate(input_ids=ids, attention_mask=mask, generation_mode="image",
                                            do_sample=False, guidance_scale=1.0, max_length=ids.shape[1] + self.grid,
                                            logits_processor=LogitsProcessorList([draw]), **{self._cache: cache})
                ids = (codes + self.first).cpu()
        mask = torch.ones_like(ids, dtype=torch.bool)
        logp = self._sound(draw.log_probs().cpu(), tokenized)
        return SampledCompletions(ids, logp, mask, ~mask.any(1), [], images=self.decode(ids))

    def _sample_without_guidance(self, ids: Tensor, mask: Tensor, draw: Draw) -> Tensor:
        """Image tokens [B,L] behind the left-padded prompts ids [B,S], by the loop of the model's `generate` with one
        row for each image."""
        given, tokens, positions = ids, ids[:, :0], (mask.cumsum(1) - 1).clamp(min=0)
        cache: dict[str, Any] = {}
        for _ in range(self.grid):
            read = self.body(**self.read(given), attention_mask=mask, position_ids=positions, use_cache=True, **cache)
            cache = {self._cache: getattr(read, self._cache)}
            given = draw(tokens, getattr(self.model.model, HEAD)(read.last_hidden_state[:, -1])).argmax(-1, True)
            given = given + self.first
            tokens, mask = torch.cat([tokens, given], 1), torch.cat([mask, torch.ones_like(given)], 1)
            positions = positions[:, -1:] + 1
        return tokens

    @torch.no_grad()
    def decode(self, ids: Tensor) -> Tensor:
        """The images [B,3,H,W] in [0, 1] of their tokens ids [B,L], float32 on the CPU, as the processor's
        `postprocess` makes them, before its rounding."""
        with self._arithmetic():
            drawn = [self.model.decode_image_tokens(self.columns(some).to(self.device)).float().cpu()
                     for some in ids.split(DECODED)]
        mean, std = (torch.tensor(value) for value in (self.processor.image_processor.image_mean,
                                                       self.processor.image_processor.image_std))
        images = (torch.cat(drawn) * std + mean).clamp(0, 1).permute(0, 3, 1, 2).contiguous()
        for row, each in zip(ids.cpu(), images):
            self.painted.pop(row.numpy().tobytes(), None)  # an image that is decoded again becomes the newest
            self.painted[row.numpy().tobytes()] = each
        while len(self.painted) * images[0].nbytes > KEPT:
            del self.painted[next(iter(self.painted))]
        return images

    def decode_cached(self, ids: Tensor) -> Tensor:
        """The images of tokens as `decode` does; those that were decoded last are not decoded again."""
        shown = [self.painted.get(row.numpy().tobytes()) for row in ids.cpu()]
        new = [at for at, image in enumerate(shown) if image is None]
        for at, image in zip(new, self.decode(ids[new]) if new else ()):  # which may drop others of these
            shown[at] = image
        return torch.stack([unwrap(image) for image in shown])

    def detokenize(self, ids: Tensor, mask: Tensor, prompts: Sequence[str]) -> Any:
        raise NotImplementedError("image tokens are no text")

    # --- replay ------------------------------------------------------------------------------------------------------

    def states_before(self, tokenized: TokenizedPrompts, ids: Tensor) -> Tensor:
        """The states [B,L,H] before each image token, with guidance [B,L,2H]: of the prompts and without."""
        if self.halves == 1:
            return super().states_before(tokenized, ids)
        both = super().states_before(self._both(tokenized), torch.cat([ids, ids]))
        return torch.cat(both.chunk(2), -1)

    def _behind_prefixes(self, tokenized: TokenizedPrompts, of: Tensor, ids: Tensor) -> Tensor:
        if self.halves == 1:
            return super()._behind_prefixes(tokenized, of, ids)
        places = torch.cat([of, of + len(tokenized.ids)])
        return torch.cat(super()._behind_prefixes(self._both(tokenized), places, torch.cat([ids, ids])).chunk(2), -1)

    def _both(self, tokenized: TokenizedPrompts) -> TokenizedPrompts:
        return TokenizedPrompts(tokenized.prompts * 2, [*tokenized.ids, *map(self.without, tokenized.ids)])

    # --- what every policy has ---------------------------------------------------------------------------------------

    def answering(self, text: Text) -> VisionLM:
        """A policy of answers about images by the same weights; text: of its completions."""
        kept = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        own = self.model.generation_config
        reader = VisionLM(self.model, self.processor, None, text, device=self.device, precision=self.precision)
        reader.weights, reader.checkpointing = self.weights, self.checkpointing
        self.model.generation_config = own
        for parameter in kept:
            parameter.requires_grad_(True)
        return reader


def grid_of(model: Any) -> tuple[int, int, int]:
    """The number of an image's tokens, and those that begin an image and that stand for a left out text.
    Raises UserError if one is unknown, and for a grid that is not the autoencoder's."""
    grid, side = model.config.vision_config.num_image_tokens, model.config.vq_config.num_patches
    if grid != side ** 2:
        raise UserError(f"{type(model).__name__} generates {grid} image tokens (vision_config.num_image_tokens), but "
                        f"its autoencoder decodes {side} x {side}: expected one grid, of the model's config.json")
    config = model.generation_config
    known = {"generation_kwargs.boi_token_id": (getattr(config, "generation_kwargs", None) or {}).get("boi_token_id"),
             "pad_token_id": config.pad_token_id, "bos_token_id": config.bos_token_id}
    for name in (name for name, token in known.items() if token is None):
        raise UserError(f"the model's generation_config.json has no {name}, which {type(model).__name__} generates "
                        "images by: add it")
    begin, blank, _ = known.values()
    return grid, begin, blank

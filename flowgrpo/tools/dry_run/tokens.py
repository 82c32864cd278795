"""Dry run of an epoch of a model of image tokens: its policy on a pretended GPU.

One image token, one decoding, one replay of a micro-batch and one of its questions are run, and counted as often as an
epoch has them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from flowgrpo.config.geometry import geometry
from flowgrpo.config.schema import Config
from flowgrpo.device import DTYPES
from flowgrpo.errors import UserError
from flowgrpo.gpus import GIB, GPU, GROWTH, LOADING
from flowgrpo.log import quiet
from flowgrpo.methods import validate
from flowgrpo.methods.supervised import SelfAnswers
from flowgrpo.policies import build
from flowgrpo.published import LANGUAGE
from flowgrpo.text.policies.image_lm import DECODED, HEAD, ImageLM
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.text.samplers.language_model import TokenizedPrompts
from flowgrpo.tools.dry_run import from_configs
from flowgrpo.tools.dry_run.estimate import ANSWERS, LOG, ORDER, PROMPT, START, Estimate, with_precision
from flowgrpo.tools.dry_run.meta_gpu import META, MetaGPU, Phase
from flowgrpo.tools.dry_run.weights import reward_bytes

BEGIN = 3  # the token that begins an image, of the stand-in tokenizer


def dry_run(config: Config, gpu: GPU, processes: int = 1) -> Estimate:
    """Counts of an epoch on one of so many processes. With `parts.data` of `SelfAnswers` all images are asked about, as
    if all were right; the epoch has fewer questions where some are wrong. Raises UserError for what is not covered."""
    LOG.info(START)
    wrong = {"adapter.dora": config.adapter.dora, "memory.shard": bool(config.memory.shard)}
    config = with_precision(config, wrong, " of image tokens")
    method = validate.resolve(config, build.process(build.IMAGE_TOKENS))
    shape, meta = geometry(config.train, processes), MetaGPU(gpu)
    with torch.random.fork_rng(devices=[]):
        with MetaGPU(gpu).running():  # which is not counted
            policy = _policy(config)
        run = _Epoch(config, policy, meta, shape.micro_batch)
        parts = -(-shape.samples // (shape.micro_batch * processes))
        with meta.running():
            run.begin()
            run.count_rollout(min(shape.generation_batch, shape.samples), shape.samples)
            if config.precision != "fp32":
                run.count_replay("rescore", parts, backward=False)
            if method.loss.kl.weight:
                run.count_replay("base", parts, backward=False)
            run.count_replay("update", parts * config.train.inner_epochs, backward=True)
            if isinstance(data := method.loss.data, SelfAnswers):
                run.count_questions(data, parts)
            with run.counting("update", config.train.inner_epochs * config.train.updates):
                run.optimizer.step()
    phases = {name: meta.phases[name] for name in (*ORDER, ANSWERS) if name in meta.phases}
    estimate = Estimate(phases, reward_bytes(config))
    return replace(estimate, first=LOADING + GROWTH * (estimate.peak / GIB))


def _policy(config: Config) -> ImageLM:
    import transformers

    folder = Path(from_configs.FOLDERS.get(config.model, config.model))
    if folder.is_dir():
        described = transformers.AutoConfig.from_pretrained(folder)
    elif known := LANGUAGE.get(config.model):
        described = transformers.JanusConfig(**known)
    else:
        raise UserError(f"the sizes of {config.model!r} are not known: give a folder that has its config.json, or one "
                        f"of {', '.join(LANGUAGE)}")
    tokens = from_configs.tokenizer(described.get_text_config().max_position_embeddings)
    with quiet(), META:
        model = transformers.JanusForConditionalGeneration._from_config(described, dtype=DTYPES[config.precision])
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokens.bos_token_id, eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id,
        generation_kwargs={"boi_token_id": BEGIN})
    images = SimpleNamespace(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    processor = SimpleNamespace(tokenizer=tokens, chat_template=None, image_processor=images)
    policy: Any = build.make_policy(config, META, (model, processor))
    return policy


@dataclass
class _Epoch:
    """Phases of an epoch of a policy on a pretended GPU. rows: of a micro-batch."""

    config: Config
    policy: ImageLM
    meta: MetaGPU
    rows: int

    def __post_init__(self) -> None:
        [self.prompt] = self.policy.encode([PROMPT]).ids
        self.optimizer = torch.optim.AdamW(self.policy.weights.parameters())

    def begin(self) -> None:
        """Hold the weights, their gradients and the optimizer's moments, as a later epoch does."""
        model = self.policy.model
        self.meta.hold([*model.parameters(), *model.buffers()])
        for parameter in self.policy.weights.parameters():
            parameter.grad = torch.empty_like(parameter)
        self.optimizer.step()
        self.meta.phases["setup"] = self.meta.phase = Phase()

    @contextmanager
    def counting(self, name: str, times: int) -> Iterator[None]:
        """Context manager: what is inside counts so many times for the phase `name`."""
        LOG.info(name)
        with self.meta.during(name):
            with self.meta.measure() as work:
                yield
            for _ in range(times - 1):
                self.meta.repeat(work)

    def read(self, name: str, rows: int, length: int, head: Callable[[torch.Tensor], torch.Tensor], tokens: int,
             times: int) -> None:
        """Count prompts [rows,length] that are read into a cache, and so many tokens that are drawn behind them."""
        policy = self.policy
        with torch.no_grad(), policy._arithmetic():
            with self.counting(name, times):
                made = policy.body(inputs_embeds=self.embed(rows, length), use_cache=True)
            cache = getattr(made, policy._cache)
            for layer in cache.layers:  # as long as it becomes
                grown = list(layer.keys.shape)
                grown[2] += tokens - 1
                layer.keys, layer.values = (torch.empty(grown, dtype=layer.keys.dtype, device=META) for _ in range(2))
            with self.counting(name, times * tokens):
                states = policy.body(inputs_embeds=self.embed(rows, 1), use_cache=True,
                                     **{policy._cache: cache}).last_hidden_state
                head(states[:, -1]).float().log_softmax(-1)

    def embed(self, rows: int, length: int) -> torch.Tensor:
        table = self.policy.model.get_input_embeddings()
        return table(torch.zeros(rows, length, dtype=torch.int64, device=META))

    def count_rollout(self, rows: int, samples: int) -> None:
        """Count the rollout of so many samples, `rows` at once, and their decoding. As a run that is out of memory, it
        draws half as many while their cache does not fit."""
        policy, text = self.policy, self.policy.model.config.get_text_config()
        width = text.num_key_value_heads * (text.hidden_size // text.num_attention_heads)
        cache = 2 * text.num_hidden_layers * width * (len(self.prompt) + policy.grid) * policy.dtype.itemsize
        while rows > self.rows and rows * policy.rows_drawn * cache > self.meta.gpu.room - self.meta.memory.in_use:
            rows //= 2
        self.read("rollout", rows * policy.rows_drawn, len(self.prompt), getattr(policy.model.model, HEAD), policy.grid,
                  -(-samples // rows))
        some = min(rows, DECODED)
        with self.counting("decode", -(-samples // some)):
            policy.decode(torch.full((some, policy.grid), policy.first))

    def count_replay(self, name: str, times: int, backward: bool) -> None:
        """Count so many replays of a micro-batch."""
        policy = self.policy
        ids = torch.full((self.rows, policy.grid), policy.first)
        prompts = TokenizedPrompts([PROMPT], [self.prompt])
        with torch.set_grad_enabled(backward), self.counting(name, times):
            scored = policy.log_probs(prompts, torch.zeros(self.rows, dtype=torch.int64), ids,
                                      torch.ones_like(ids, dtype=torch.bool), Decoding())
            if backward:
                policy.backward(scored.logp.sum())

    def count_questions(self, data: SelfAnswers, parts: int) -> None:
        """Count the questions about so many micro-batches of images: drawn answers, and their replay with a backward.
        """
        policy, model, each = self.policy, self.policy.model, max(data.samples, 1)
        rows = min(self.rows, data.batch) * data.questions * each
        length, times = len(self.prompt) + policy.grid, parts * -(-self.rows // min(self.rows, data.batch))
        side = model.config.vision_config.image_size
        pixels = torch.empty(rows, 3, side, side, dtype=policy.dtype, device=META)
        with self.counting(ANSWERS, times), policy._arithmetic():
            model.model.get_image_features(pixels)
        if data.samples:
            self.read(ANSWERS, rows, length, model.lm_head, data.length, times)
        with self.counting(ANSWERS, times):
            with policy._arithmetic():
                states = policy.body(inputs_embeds=self.embed(rows, length + data.length), use_cache=False)
                logits = model.lm_head(states.last_hidden_state[:, -data.length:])
                policy.backward(logits.float().log_softmax(-1).sum())

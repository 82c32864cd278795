"""Engines: samplers of completions in place of the trained model.

An engine has
`sync(policy)`: take over its present weights;
`sample(asked, decoding, generators, greedy)`: that of `CausalLM`, tokens and the engine's own log-probabilities;
`limited`: a call takes the rows that `train.generation_batch` says, and not all;
`evaluations`: the number of processed tokens.
"""

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from flowgrpo.config.schema import Config
from flowgrpo.config.sections import Load
from flowgrpo.device import DTYPES, drawing
from flowgrpo.errors import UserError
from flowgrpo.packages import import_optional
from flowgrpo.policies import checkpoints
from flowgrpo.policies.policy import resolve_precision
from flowgrpo.policies.weights import adapters
from flowgrpo.policies.weights.lora_files import read
from flowgrpo.starter import FOLDERS, TOKEN_GUIDANCE
from flowgrpo.storage.places import unfinished
from flowgrpo.text.policies import kinds
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.policies.text_weights import attach
from flowgrpo.text.samplers.decoding import Decoding, completion_masks
from flowgrpo.text.samplers.language_model import SampledCompletions, TokenizedPrompts
from flowgrpo.types import unwrap

GUIDANCE = 5.0  # of images by Janus' own `generate`
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # supported by vLLM


def uses_engine(config: Config) -> bool:
    return config.text.engine == "vllm" or config.text.engine_precision not in (None, config.precision)


def make(config: Config, policy: CausalLM, processes: int = 1) -> "CausalLM | VLLM":
    """Create the engine of a configuration: vLLM, or a copy of the policy in another precision.
    Raises UserError if it cannot sample for this policy, or if vLLM is missing."""
    if policy.process == "masks":
        raise UserError("text.engine and text.engine_precision: are for models that write one token after the other; "
                        "leave them out for a masked language model")
    if config.text.engine == "transformers":
        own = copy.deepcopy(policy)
        own.dtype, own.evaluations = DTYPES[unwrap(config.text.engine_precision)], 0
        own.model.to(own.dtype).requires_grad_(False)
        return own
    return VLLM(config, policy, processes)


class VLLM:
    """vLLM (0.10.2 or later) in this process, on the device of the training, asleep during training.

    It reads the LoRA from a folder per epoch. Its log-probabilities are those of the distribution that it draws from,
    after temperature and cuts. Written after its documentation: it has not been run with this program.
    Raises UserError for unsupported settings: images, all weights, a DoRA, several processes.
    """

    limited = False

    def __init__(self, config: Config, policy: CausalLM, processes: int):
        _require(config, policy, processes)
        self.vllm = import_optional("vllm", "vllm", "text.engine: vllm")
        self.policy, self.evaluations, self.number, self.request = policy, 0, 0, None
        self.folder = TemporaryDirectory(prefix="flowgrpo-lora-")
        precision = config.text.engine_precision or config.precision
        self.llm = self.vllm.LLM(
            model=str(FOLDERS.get(config.model, config.model)), dtype=str(DTYPES[precision]).removeprefix("torch."),
            enable_lora=True, max_lora_rank=next(rank for rank in RANKS if rank >= config.adapter.rank), max_loras=1,
            revision=config.load.revision, logprobs_mode="processed_logprobs", generation_config="vllm",
            enable_sleep_mode=True, seed=config.seed, gpu_memory_utilization=config.text.engine_memory,
            trust_remote_code=config.trust_remote_code)
        self.llm.sleep(level=1)

    def sync(self, policy: CausalLM) -> None:
        """Write the LoRA and use it in every later request, under a new number, since vLLM caches by number."""
        from vllm.lora.request import LoRARequest

        self.number += 1
        folder = Path(self.folder.name) / str(self.number)
        adapters.save(policy.model, folder, wrapped=True)
        shutil.rmtree(folder.parent / str(self.number - 1), ignore_errors=True)
        self.request = LoRARequest(lora_name=f"epoch-{self.number}", lora_int_id=self.number, lora_path=str(folder))

    def sample(self, tokenized: TokenizedPrompts, decoding: Decoding, generators: Sequence[torch.Generator],
               greedy: Tensor) -> SampledCompletions:
        """As in `CausalLM`, with vLLM's tokens and log-probabilities; a row is drawn from its generator's seed."""
        prompts = [{"prompt_token_ids": ids.tolist()} for ids in tokenized.ids]
        settings = [self._settings(decoding, generator.initial_seed(), bool(first))
                    for generator, first in zip(generators, greedy)]
        self.llm.wake_up()
        try:
            requests = self.llm.generate(prompts, settings, lora_request=self.request, use_tqdm=False)
        finally:
            self.llm.sleep(level=1)
        outputs = [output for request in requests for output in request.outputs]  # one each
        self.evaluations += sum(len(ids) for ids in (*tokenized.ids, *(output.token_ids for output in outputs)))
        return pack_completions(self.policy, tokenized.prompts, outputs)

    def _settings(self, decoding: Decoding, seed: int, greedy: bool) -> Any:
        return self.vllm.SamplingParams(
            temperature=0.0 if greedy else decoding.temperature, top_p=decoding.top_p, top_k=decoding.top_k or -1,
            min_p=decoding.min_p, seed=seed % 2**63, max_tokens=self.policy.text.max_tokens, logprobs=0,
            stop_token_ids=self.policy.ends, detokenize=False)


def _require(config: Config, policy: CausalLM, processes: int) -> None:
    rank, variant = config.adapter.rank, config.load.variant
    for what, wrong, cure in (
            ("models that read images", hasattr(policy, "processor"), "leave text.engine out"),
            (f"adapter.rank {rank}", not 0 < rank <= RANKS[-1], f"expected a LoRA of rank 1 to {RANKS[-1]}"),
            ("a DoRA", config.adapter.dora, "set adapter.dora to false"),
            (f"load.variant {variant!r}", variant is not None, "leave it out"),
            (f"{processes} processes", processes > 1, "launch one")):
        if wrong:
            raise UserError(f"text.engine is vllm, which does not sample for {what} here: {cure}")


def pack_completions(policy: CausalLM, prompts: Sequence[str], outputs: Sequence[Any]) -> SampledCompletions:
    """vLLM's output for each prompt as the policy's `SampledCompletions`. Tokens behind an end are dropped."""
    most = policy.text.max_tokens
    ids, logp = torch.full((len(outputs), most), -1), torch.zeros(len(outputs), most)
    for row, output in enumerate(outputs):
        tokens = output.token_ids[:most]
        values = [step[token].logprob for step, token in zip(output.logprobs, tokens)]
        ids[row, :len(tokens)], logp[row, :len(tokens)] = torch.tensor(tokens), torch.tensor(values)
    mask, cut = completion_masks(ids, policy.ends)
    mask &= ids >= 0
    ids, logp = ids.masked_fill(~mask, policy.padding), logp.masked_fill(~mask, 0.0)
    return SampledCompletions(ids, logp, mask, cut, policy.detokenize(ids, mask, prompts))


def settings(model: str, run: Config | None, text: dict[str, Any], device: str | torch.device = "cpu",
             precision: str | None = None) -> Config:
    """The configuration of a language model's sampling: that of the run that trained it, with `text` on top.
    precision: as in `drawing`."""
    known = Config(method="grpo") if run is None else run
    files, shown, text = known.load if known.model == model else Load(), known.eval, dict(text)
    if "guidance" in text:  # of images
        shown = shown.model_copy(update={"guidance": text.pop("guidance")})
    return known.model_copy(update={"model": model, "load": files, "text": known.text.model_copy(update=text),
                                    "eval": shown, "precision": drawing(known.precision, device, precision)})


def sampling_settings(run: Config | None, count: int, temperature: float | None, max_tokens: int | None = None,
                      generates: str | None = None, guidance: float | None = None, model: str = "") -> dict[str, Any]:
    """The `text` settings that completions depend on, of a run or the defaults, for `count` completions per prompt. The
    default temperature of several is 1, and that of images.
    generates: what completions are, None as the run has it. guidance: of images, None as the run evaluates; without a
    run as the card of the starter `model` says, or the model's own default."""
    known = Config() if run is None else run
    text = known.text
    if (generates or text.generates) == "image":
        warm = text.eval_temperature if temperature is None else temperature
        shown = known.eval.guidance if run is not None else TOKEN_GUIDANCE.get(model, GUIDANCE)
        return {"generates": "image", "eval_temperature": 1.0 if warm is None else warm, "system": text.system,
                "template": text.template, "guidance": shown if guidance is None else guidance}
    warm = (text.eval_temperature or float(count > 1)) if temperature is None else temperature
    return ({"generates": "text"} if text.generates != "text" else {}) | {
        "eval_temperature": warm, "max_tokens": max_tokens or text.max_tokens, "system": text.system,
        "template": text.template}


def sampler(model: str, run: Config | None, text: dict[str, Any], lora: Path | None,
            device: str | torch.device = "cpu", precision: str | None = None) -> CausalLM:
    """Load the policy for sampling with the `settings` of a run and its weights."""
    return load(settings(model, run, text, device, precision), lora, device)


def load(config: Config, lora: Path | None, device: str | torch.device = "cpu") -> CausalLM:
    """Load the policy for sampling, with nothing trained. Raises UserError if something does not load."""
    config, _ = resolve_precision(config, device)
    if lora is not None and (lora / "model" / "config.json").is_file():  # a run without a LoRA
        config, lora = config.model_copy(update={"model": str(lora / "model"), "load": Load()}), None
    if lora is not None and checkpoints.is_checkpoint(lora):
        return checkpoints.language_policy(config, lora, device)
    if lora is not None and not (lora / adapters.CONFIG).is_file():
        hint = unfinished(lora) if (lora / "config.yaml").is_file() else \
            "expected a finished run, or a folder with an adapter"
        raise UserError(f"no weights at {lora} ({adapters.CONFIG} is missing): {hint}")
    if lora is not None:
        read(lora / adapters.WEIGHTS)
    loaded, reader = kinds.load(config)
    if lora is not None:
        attach(loaded, lora)
    return kinds.make_policy(config, (loaded, reader), None, device)

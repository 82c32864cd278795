"""Rewards that read a causal language model, the policy or another one: likelihood of a reference answer (DRO), depth
of reasoning (GRPO-R), and reward models with a scalar head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.local_model import LocalModel, load_parts, require_arguments
from flowgrpo.rewards.vlm_judge.judge import fill_template
from flowgrpo.text.rewards.answer_keys import LICENCE, Metadata, Texts, keys, several, strip_thoughts
from flowgrpo.text.rewards.embeddings import pad_rows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

class PolicyModel(LocalModel):
    """Reward by a causal language model; a subclass has the argument `model`.

    model: "policy", the one that is trained, as it is when it is scored; or a folder or name on the hub.
    Raises UserError for a policy that is no causal language model, and for "policy" outside a training run.
    """

    model: str

    def __post_init__(self) -> None:
        if self.reads_policy:
            require_arguments(self.reward, self.dtype, self.device, self.batch_size)
        else:
            super().__post_init__()

    @property
    def reads_policy(self) -> bool:
        return self.model == "policy" and self.parts is None

    @property
    def models(self) -> tuple[Any, ...]:
        """The model and its tokenizer; nothing of a policy, which is not the reward's to place."""
        return () if self.reads_policy else super().models

    def _load(self) -> tuple[Any, ...]:
        return load_parts(self, "AutoModelForCausalLM", "AutoTokenizer", dtype=self.float_type, use_safetensors=True)

    def _prompt(self, prompt: str, policy: Any) -> tuple[Any, Any, list[int]]:
        """The network, the tokenizer, and a prompt's tokens. policy: the one that is trained, or None."""
        if not self.reads_policy:
            network, tokenizer = self.models
            return network, tokenizer, tokenizer(prompt)["input_ids"]
        if policy is None:
            raise UserError(f"reward {self.reward!r} reads the policy that is trained, and there is none here: "
                            "set args: {model: FOLDER}")
        if getattr(policy, "process", None) != "tokens" or hasattr(policy, "processor"):
            raise UserError(f"reward {self.reward!r} with model: policy got {type(policy).__name__}, expected a "
                            "causal language model without images: name a model in args")
        return policy.model, policy.tokenizer, policy.encode([prompt]).ids[0].tolist()


@built_in("reward_model", "human preference rlhf helpful harmless", eq=False)
class RewardModel(LocalModel):
    """Score that a sequence classification model of transformers gives a prompt with its completion.

    model: its folder or name on the hub, with safetensors and one label. revision: of the hub.
    system: a message before the prompt.
    template: a text with {prompt} and {completion}, in place of the tokenizer's chat template.
    thoughts: show the <think> part.
    longest: tokens; a longer text loses its beginning, since the score is read at its end.
    parts: model and tokenizer, ready-made. dtype (fp32), device and batch_size (8): as in `LocalModel`.
    Code from a hub is never run.
    Raises UserError for any other model, and for a tokenizer without a chat template.
    """

    model: str = ""
    revision: str | None = None
    system: str | None = None
    template: str | None = None
    thoughts: bool = False
    longest: int = 4096
    batch_size: int = field(default=8, kw_only=True)
    about = About(modality="text", range=(None, None), needs="", licence=f"{LICENCE}, the model's")

    def __post_init__(self) -> None:
        if self.longest < 1 or not (self.model or self.parts):
            raise UserError(f"reward 'reward_model': got model {self.model!r}, longest {self.longest}, expected args: "
                            "{model: FOLDER}, and longest from 1")
        super().__post_init__()

    def _require(self, parts: tuple[Any, ...]) -> None:
        network, tokenizer = parts
        if network.config.num_labels != 1:
            raise UserError(f"reward 'reward_model': {self.model} has {network.config.num_labels} labels, expected 1, "
                            "the reward")
        if self.template is None and getattr(tokenizer, "chat_template", None) is None:
            raise UserError(f"reward 'reward_model': the tokenizer of {self.model} has no chat template: set template, "
                            "such as \"{prompt}\\n{completion}\"")

    def _load(self) -> tuple[Any, ...]:
        return load_parts(self, "AutoModelForSequenceClassification", "AutoTokenizer", dtype=self.float_type,
                          use_safetensors=True)

    @torch.no_grad()
    def __call__(self, completions: Texts, prompts: Texts) -> list[float | None]:
        """B scores; None for a text without any token, which a template may produce."""
        rows = [self._tokens(prompt, completion) for prompt, completion in zip(prompts, completions)]
        order = sorted((row for row in range(len(rows)) if rows[row]), key=lambda row: len(rows[row]))
        scores: dict[int, float] = {}
        for start in range(0, len(order), self.batch_size):  # sorted by length: little padding
            some = order[start:start + self.batch_size]
            scores |= zip(some, self._scores([rows[row] for row in some]).tolist())
        return [scores.get(row) for row in range(len(rows))]

    def _tokens(self, prompt: str, completion: str) -> list[int]:
        """A prompt with its completion as tokens, the last `longest` of them."""
        _, tokenizer = self.models
        completion = completion if self.thoughts else strip_thoughts(completion)
        if self.template is not None:
            text = fill_template(self.template, prompt=prompt, completion=completion)
            return tokenizer(text)["input_ids"][-self.longest:]
        turns = [{"role": "system", "content": self.system}] if self.system else []
        turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)  # includes the special tokens already
        return tokenizer(text, add_special_tokens=False)["input_ids"][-self.longest:]

    def _scores(self, rows: Sequence[list[int]]) -> Tensor:
        """Score token rows, padded at their ends -> [B] float32."""
        network, _ = self.models
        config = network.config.get_text_config()
        padding, before = padding_token(rows, config), config.pad_token_id
        ids, mask = pad_rows(rows, self.device, padding)
        config.pad_token_id = padding
        try:
            return network(input_ids=ids, attention_mask=mask).logits[:, 0].float().cpu()
        finally:
            config.pad_token_id = before


def padding_token(rows: Sequence[list[int]], config: PretrainedConfig) -> int:
    """A padding token: the model's own, or, if one of the rows holds that, the lowest that none holds.
    Models read the score at the last token that differs from the padding token. In many chat models that is also the
    token that ends a turn, so the score would be read at the one before it."""
    held = {token for row in rows for token in row}
    preferred = [config.pad_token_id] if config.pad_token_id is not None else []
    return next(token for token in (*preferred, *range(config.vocab_size)) if token not in held)


def reflective(logp: Tensor) -> Tensor:
    """DRO's reward of a group: the mean log-probability of the reference's tokens, weighted by their deviation over the
    group. [G, L] -> [G].
    A token that is as likely behind every reasoning has weight 0. Without any variance all tokens count alike."""
    spread = logp.std(0, correction=0)
    spread = spread if spread.max() > 1e-6 else torch.ones_like(spread)
    return logp @ (spread / spread.sum())


@built_in("reference_likelihood", eq=False)
class ReferenceLikelihood(PolicyModel):
    """Log-probability of the reference answer behind a completion's reasoning, its tokens weighted as in `reflective`.

    The reasoning is the completion up to the last `before`, or all of it without one; `before` and the reference
    follow it.
    model: "policy", the one that is trained, as it is when it is scored; or a causal language model's folder or name on
    the hub. weighted: false takes the mean over the tokens.
    key: of the metadata, the reference, of several the first; None for a prompt without it.
    parts: model and tokenizer, ready-made. dtype, device, batch_size (8) of such a model: as in `LocalModel`.
    """

    model: str = "policy"
    key: str = "answer"
    before: str = "<answer>"
    weighted: bool = True
    batch_size: int = field(default=8, kw_only=True)
    about = About(modality="text", range=(None, 0), needs="", licence=f"{LICENCE}, the model's")
    group = True
    keyed = True  # nothing is scored without the key

    def __call__(self, completions: Texts, prompts: Texts, metadata: Metadata,
                 group: int, policy: Any = None) -> list[float | None]:
        references = keys(self.reward, metadata, self.key, prompts, several)
        values: list[float | None] = []
        for start in range(0, len(completions), group):
            accepted, texts = references[start], completions[start:start + group]
            if accepted is None:
                values += [None] * group
                continue
            logp = self.log_probs(prompts[start], texts, accepted[0], policy)
            values += (reflective(logp) if self.weighted else logp.mean(1)).tolist()
        return values

    @torch.no_grad()
    def log_probs(self, prompt: str, texts: Sequence[str], reference: str, policy: Any = None) -> Tensor:
        """The log-probability of each token of the reference behind each of G texts, float32 [G, L]."""
        network, tokenizer, begun = self._prompt(prompt, policy)
        device = next(network.parameters()).device
        wanted = tokenizer(reference, add_special_tokens=False)["input_ids"]
        rows = [begun + tokenizer(self.reasoning(text), add_special_tokens=False)["input_ids"] + wanted
                for text in texts]
        values = []
        for at in range(0, len(rows), self.batch_size):
            ids, mask = pad_rows(rows[at:at + self.batch_size], device)
            logits = network(input_ids=ids, attention_mask=mask).logits
            places = mask.sum(1, keepdim=True) - len(wanted) - 1 + torch.arange(len(wanted), device=device)
            logp = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[2])).float().log_softmax(-1)
            values.append(logp.gather(2, ids.gather(1, places + 1)[..., None])[..., 0].cpu())
        return torch.cat(values)

    def reasoning(self, text: str) -> str:
        """A completion up to its last `before`, or all of it without one, with `before` behind it."""
        return (text.rpartition(self.before)[0] if self.before and self.before in text else text) + self.before


NORMS = ("norm", "final_layernorm", "ln_f", "final_layer_norm")  # names of the norm before the head


def divergence(one: Tensor, other: Tensor) -> Tensor:
    """The Jensen-Shannon divergence, in nats, of distributions with these log-probabilities: [..., V] -> [...]."""
    mean = torch.logaddexp(one, other) - torch.log(torch.tensor(2.0))
    to_one, to_other = ((logp.exp() * (logp - mean)).nan_to_num(0).sum(-1) for logp in (one, other))
    return (to_one + to_other) / 2


@built_in("reasoning_depth", eq=False)
class ReasoningDepth(PolicyModel):
    """Mean divergence between the next-token distributions of the last layer and of the `layers` layers before it, read
    by the model's own head, over the tokens of a completion's last step: low where the model recalls a pattern.

    For `parts.spread: {type: StepScores, kind: potential, rewards: [reasoning_depth]}`, which credits each step by its
    change (GRPO-R); as a reward of whole completions its weight is 0 there.
    model: "policy", the one that is trained, or a causal language model's folder or name on the hub.
    ends: a step ends with it. parts, dtype, device and batch_size (8): as in `LocalModel`.
    """

    model: str = "policy"
    layers: int = 4
    ends: str = "\n"
    batch_size: int = field(default=8, kw_only=True)
    about = About(modality="text", range=(0, 0.7), needs="", licence=f"{LICENCE}, the model's")

    def __post_init__(self) -> None:
        if self.layers < 1 or not self.ends:
            raise UserError(f"reward 'reasoning_depth': layers is {self.layers} and ends {self.ends!r}, expected 1 or "
                            "more, and a text")
        super().__post_init__()

    @torch.no_grad()
    def __call__(self, completions: Texts, prompts: Texts, policy: Any = None) -> list[float | None]:
        return [self._one(prompt, completion, policy) for prompt, completion in zip(prompts, completions)]

    def _one(self, prompt: str, completion: str, policy: Any) -> float | None:
        """The depth of a completion's last step; None for one without a token."""
        network, tokenizer, begun = self._prompt(prompt, policy)
        body = completion[:-len(self.ends)] if completion.endswith(self.ends) else completion
        before = body.rpartition(self.ends)[0]
        ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
        start = len(tokenizer(before + self.ends, add_special_tokens=False)["input_ids"]) if before else 0
        if start >= len(ids):
            return None
        device = next(network.parameters()).device
        states = network(input_ids=torch.tensor([begun + ids], device=device), output_hidden_states=True).hidden_states
        places = slice(len(begun) + start - 1, len(begun) + len(ids) - 1)  # of the states that predict the step
        return depths(network, [state[0, places] for state in states[-self.layers - 1:]]).mean().item()


def depths(network: Any, states: Sequence[Tensor]) -> Tensor:
    """The mean divergence of each token's distribution after the last of its states to those after the others.
    states: of some last layers in turn, [n, H] each; the last one has the model's norm behind it.
    Raises UserError for a model whose last norm is unknown."""
    body, head = network.base_model, network.get_output_embeddings()
    norm = next((getattr(body, name) for name in NORMS if hasattr(body, name)), None)
    if norm is None:
        raise UserError(f"reward 'reasoning_depth': {type(body).__name__} has no norm called {', '.join(NORMS)}")
    last = head(states[-1]).float().log_softmax(-1)
    return torch.stack([divergence(last, head(norm(state)).float().log_softmax(-1)) for state in states[:-1]]).mean(0)

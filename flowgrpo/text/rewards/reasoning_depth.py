"""Depth of reasoning: how much the late layers of a language model still change its next token (GRPO-R)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.text.rewards.answer_keys import LICENCE
from flowgrpo.text.rewards.policy_model import PolicyModel

NORMS = ("norm", "final_layernorm", "ln_f", "final_layer_norm")  # names of the norm before the head


def divergence(one: Tensor, other: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence, in nats, of distributions with these log-probabilities: [..., V] -> [...].
    """
    mean = torch.logaddexp(one, other) - torch.log(torch.tensor(2.0))
    to_one, to_other = ((logp.exp() * (logp - mean)).nan_to_num(0).sum(-1) for logp in (one, other))
    return (to_one + to_other) / 2


@dataclass(frozen=True, eq=False)
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
    reward = "reasoning_depth"
    about = About(modality="text", range=(0, 0.7), needs="", licence=f"{LICENCE}, the model's")

    def __post_init__(self) -> None:
        if self.layers < 1 or not self.ends:
            raise UserError(f"reward 'reasoning_depth': layers is {self.layers} and ends {self.ends!r}, expected 1 or "
                            "more, and a text")
        super().__post_init__()

    @torch.no_grad()
    def __call__(self, completions: Sequence[str], prompts: Sequence[str], policy: Any = None) -> list[float | None]:
        return [self._one(prompt, completion, policy) for prompt, completion in zip(prompts, completions)]

    def _one(self, prompt: str, completion: str, policy: Any) -> float | None:
        """Return the depth of a completion's last step; None for one without a token."""
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
    """Return the mean divergence of each token's distribution after the last of its states to those after the others.

    states: of some last layers in turn, [n, H] each; the last one has the model's norm behind it.
    Raises UserError for a model whose last norm is unknown.
    """
    body, head = network.base_model, network.get_output_embeddings()
    norm = next((getattr(body, name) for name in NORMS if hasattr(body, name)), None)
    if norm is None:
        raise UserError(f"reward 'reasoning_depth': {type(body).__name__} has no norm called {', '.join(NORMS)}")
    last = head(states[-1]).float().log_softmax(-1)
    return torch.stack([divergence(last, head(norm(state)).float().log_softmax(-1)) for state in states[:-1]]).mean(0)

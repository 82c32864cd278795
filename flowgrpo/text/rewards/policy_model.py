"""Rewards that read a causal language model: the policy that is trained, or another one."""

from __future__ import annotations

from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.rewards.local_model import LocalModel, pretrained, require_arguments


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
        """True if it scores with the policy that is trained."""
        return self.model == "policy" and self.parts is None

    @property
    def models(self) -> tuple[Any, ...]:
        """Return the model and its tokenizer; nothing of a policy, which is not the reward's to place."""
        return () if self.reads_policy else super().models

    def _loaded(self) -> tuple[Any, Any]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        network = pretrained(self.reward, AutoModelForCausalLM, self.model, None, "model", dtype=self.float_type,
                             use_safetensors=True)
        return network, pretrained(self.reward, AutoTokenizer, self.model, None, "model")

    def _prompt(self, prompt: str, policy: Any) -> tuple[Any, Any, list[int]]:
        """Return the network, the tokenizer, and a prompt's tokens. policy: the one that is trained, or None."""
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

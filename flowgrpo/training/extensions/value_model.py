"""Value model of a method, or the quality head of its draws (`text.critic`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flowgrpo.advantages.gae import Recall
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics
from flowgrpo.training.replay_buffer import Recalling
from flowgrpo.training.run import Run


class ValueModel(Extension):
    """Gives parts the advantages of their tokens, and learns from an epoch's returns behind its updates."""

    name = "critic"
    changes = True

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        self.critic: Any = _critic(trainer)

    def on_credited(self, epoch: Epoch) -> None:
        self.critic.geometry = self.trainer.geometry
        epoch.parts = self.critic(epoch.parts, epoch.conditioning)

    def on_trained(self, epoch: Epoch) -> Metrics:
        with self.trainer.clock("update"):
            return self.critic.fit()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self.critic.state()

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self.critic.load_state(tensors, values)


def _critic(trainer: Run) -> Any:
    """Return the value model of edits, or of a language model, or the quality head of its draws."""
    part = trainer.method.credit.value
    policy: Any = trainer.policy  # of edits, or of texts
    if isinstance(part, Recall):
        return Recalling(part, policy.editor, trainer.processes)
    from flowgrpo.text.critic import make_critic

    return make_critic(trainer.method, policy, trainer.geometry, trainer.processes)

"""Shapings of rewards by a memory and by a reference: novelty and nearness, and answers that follow from reasoning."""

from typing import Annotated

import torch
from torch import Tensor

from flowgrpo.advantages.group import epochs_before, rows_of, weighted_sum
from flowgrpo.advantages.shaping import Shaping
from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.types import Completions, Context, unwrap


@part("shaping", target="texts", reads_reference=True, teaches=True)
class LikelihoodConsistency(Shaping):
    """`bonus` for right samples whose answer the reference finds likely: at least as much as the right ones of the
    group in the mean (GRPO-CARE, 2506.16141). It is added to the first reward.

    Right is a sample whose first reward reaches `right`. The likelihood is the mean log-probability of the tokens
    behind the last occurrence of the token ids `behind`, such as those of <answer>; all tokens without any.
    `reference: {type: EMA}` is the paper's; its bonus takes the place of a KL (weight 0). A group with one right sample
    has no bonus (ours). Groups that are all right learn by it.
    """

    bonus: Annotated[float, Above(0)] = 0.5
    right: float = 1.0
    behind: tuple[int, ...] = ()

    def __call__(self, rewards: Tensor, context: Context | None = None) -> Tensor:
        likelihood = unwrap(unwrap(context).samples.likelihood).to(rewards.device)
        right = rewards[..., 0] >= self.right
        count = right.sum(1, keepdim=True)
        mean = (likelihood * right).sum(1, keepdim=True) / count.clamp(min=1)
        earned = self.bonus * (right & (likelihood >= mean) & (count > 1))
        return torch.cat([rewards[..., :1] + earned[..., None], rewards[..., 1:]], dim=2)

    def likelihood(self, taken: Completions, logp: Tensor) -> Tensor:
        """Mean of the reference's log-probabilities logp [m, L] over each completion's answer: [m]."""
        mask = taken.old.mask.to(logp.device)
        answer = mask & self.answers(taken.ids.to(logp.device))
        answer = answer.where(answer.any(1, keepdim=True), mask)  # a completion without the marker is all answer
        return (logp * answer).sum(1) / answer.sum(1).clamp(min=1)

    def answers(self, ids: Tensor) -> Tensor:
        """Tokens behind the last marker, bool [m, L]; none in rows without one, all without a marker."""
        size, places = len(self.behind), torch.arange(ids.shape[1], device=ids.device)
        if not size:
            return torch.ones_like(ids, dtype=torch.bool)
        if ids.shape[1] < size:
            return torch.zeros_like(ids, dtype=torch.bool)
        marker = torch.tensor(self.behind, device=ids.device)
        begins = (ids.unfold(1, size, 1) == marker).all(2)
        last = torch.where(begins, places[:begins.shape[1]], -1).amax(1, keepdim=True)
        return (last >= 0) & (places >= last + size)


@part("shaping", teaches=True)
class Episodic(Shaping):
    """Total reward plus `explore` times the novelty and `exploit` times the nearness of a sample (Memory-R1+, Reasoning
    Under 1 Billion).

    A sample is described by the scores of the rewards `rewards`, which may have the weight 0; they stand for the
    paper's embedding, for images and texts alike. Novelty is the mean Euclidean distance to the `nearest` samples of
    the prompt's earlier epochs. Nearness is 1 / (1 + the distance to the nearest success), whose total reward reached
    `right`. Both are 0 without such a sample. Groups that agree learn by them.

    memory["Episodic"] holds the last `size` samples of every prompt. As in `group.running`, every call of an epoch
    starts from the epochs before, and the first one's samples are stored.
    """

    rewards: tuple[str, ...] = ()
    explore: Annotated[float, AtLeast(0)] = 0.1
    exploit: Annotated[float, AtLeast(0)] = 0.1
    nearest: Annotated[int, AtLeast(1)] = 3
    right: float = 0.5
    size: Annotated[int, AtLeast(1)] = 64
    merges = True

    def __call__(self, rewards: Tensor, context: Context | None = None) -> Tensor:
        assert context is not None, "Episodic compares with earlier epochs: it needs a context"
        run, names = context.run, context.rewards.names
        columns = [number for number, name in enumerate(names) if not self.rewards or name in self.rewards]
        described, total = rewards[..., columns].float(), weighted_sum(rewards, list(context.rewards.weights))
        memory, bonus = run.memory.setdefault("Episodic", {}), torch.zeros_like(total)
        for prompt, rows in rows_of(context.groups.prompts).items():
            known = ~(described[rows].isnan().any(2) | total[rows].isnan())
            now, won = described[rows][known], total[rows][known] >= self.right
            present = torch.cat([now, won[:, None].to(now)], 1).tolist()
            past = torch.tensor(epochs_before(memory, prompt, run.epoch, present, self.size)).view(-1, len(columns) + 1)
            bonus[rows] = torch.zeros_like(bonus[rows]).masked_scatter(known, self.bonuses(now, past).to(bonus))
        return (total + bonus)[..., None]

    def bonuses(self, samples: Tensor, past: Tensor) -> Tensor:
        """Bonuses [n] of samples [n, D]. past: [m, D + 1], earlier ones, the last column 1 for a success."""
        bonus = samples.new_zeros(len(samples))
        if len(past):
            apart = torch.cdist(samples, past[:, :-1].to(samples), compute_mode="donot_use_mm_for_euclid_dist")
            bonus = self.explore * apart.topk(min(self.nearest, len(past)), dim=1, largest=False)[0].mean(1)
            if len(wins := apart[:, past[:, -1] > 0].T):
                bonus = bonus + self.exploit / (1 + wins.amin(0))
        return bonus

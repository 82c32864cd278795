"""Oversampling: selections that keep a part of each group by its rewards, before these are compared.

Such a part has `before(rewards [P, G, R], weights [R], context) -> keep`, bool [P, G]. The other samples have no
reward: advantages are those of the kept ones alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowgrpo.advantages.group import weighted_sum
from flowgrpo.advantages.token_credit import select_weights
from flowgrpo.parts import part
from flowgrpo.types import Context


@part()
class _Downsampled:
    """Keep `n` samples of a group, of right and of wrong ones, by further rewards.

    n: kept of `train.group` samples.
    rewards: names of the rewards that measure quality, higher is better; give them the weight 0, so that they do not
        enter advantages.
    right: total reward from which a sample is right.
    """

    n: int
    rewards: tuple[str, ...]
    right: float = 0.5

    def __post_init__(self) -> None:
        if self.n < 2 or not self.rewards:
            raise ValueError(f"{type(self).__name__}: n is {self.n} and rewards {list(self.rewards)}, expected 2 or "
                             "more, and names of rewards")

    def __call__(self, scores: Tensor, context: Context | None = None) -> Tensor:
        if self.n > scores.shape[1]:
            raise ValueError(f"{type(self).__name__}: n is {self.n}, expected at most the {scores.shape[1]} samples of "
                             "a group")
        return torch.ones_like(scores, dtype=torch.bool)

    def before(self, rewards: Tensor, weights: Sequence[float], context: Context) -> Tensor:
        """Samples that are kept, bool [P, G]; one without a reward is not."""
        named = select_weights(dict(zip(context.rewards.names, weights)), self.rewards)
        columns = [number for number, name in enumerate(context.rewards.names) if name in named]
        of = [named[context.rewards.names[number]] for number in columns]
        quality = weighted_sum(rewards[..., columns], of).nan_to_num(-torch.inf)
        total = weighted_sum(rewards, weights)
        lots = torch.rand(total.shape, generator=torch.Generator().manual_seed(context.run.epoch))
        keep = torch.zeros_like(total, dtype=torch.bool)
        for row, kept in enumerate(keep):
            wins, losses = total[row] >= self.right, total[row] < self.right
            many = self.counts(int(wins.sum()), int(losses.sum()))
            for among, rank, count in zip((wins, losses), self.ranks(quality[row], lots[row]), many):
                order = torch.stack([rank, lots[row].to(rank)], 1)[among].tolist()
                places = among.nonzero().flatten().tolist()
                kept[[place for _, place in sorted(zip(order, places), reverse=True)[:count]]] = True
        return keep

    def counts(self, right: int, wrong: int) -> tuple[int, int]:
        """Numbers of right and of wrong samples that are kept, of a group that has `right` and `wrong`."""
        raise NotImplementedError

    def ranks(self, quality: Tensor, lots: Tensor) -> tuple[Tensor, Tensor]:
        """By what right and wrong samples of a group are ranked, [G] each; the largest are kept."""
        raise NotImplementedError


@part("selection")
class ResampleCorrect(_Downsampled):
    """Keep n samples in the group's ratio of right to wrong: wrong ones by lot, so that failures stay diverse, right
    ones of the best quality (GRPO-RoC, rStar2-Agent; 2 n to n there).

    The paper draws right samples with probabilities that fall with their penalty; here the best are taken, ties by lot.
    """

    def counts(self, right: int, wrong: int) -> tuple[int, int]:
        kept = min(round(self.n * right / max(right + wrong, 1)), right)
        if right and wrong:  # neither kind is lost
            kept = min(max(kept, 1, self.n - wrong), right, self.n - 1)
        return kept, min(self.n - kept, wrong)

    def ranks(self, quality: Tensor, lots: Tensor) -> tuple[Tensor, Tensor]:
        return quality, torch.zeros_like(quality)


@part("selection")
class Consistent(_Downsampled):
    """Keep at most n samples, as many right as wrong, up to one: the right ones with the highest process score, the
    wrong ones with the lowest (PROF).

    Right samples with a poor process, and wrong ones with a good one, go first. A group that is all right or all wrong
    keeps n.
    """

    def counts(self, right: int, wrong: int) -> tuple[int, int]:
        if not right or not wrong:
            return min(self.n, right), min(self.n, wrong)
        few = min(right, wrong, self.n // 2)
        odd = int(2 * few < self.n)
        return (few + odd, few) if right > wrong else (few, few + odd) if wrong > right else (few, few)

    def ranks(self, quality: Tensor, lots: Tensor) -> tuple[Tensor, Tensor]:
        return quality, -quality

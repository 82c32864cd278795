"""Best of N draws by a reward, at inference: `--best-of N --by REWARD` of `flowgrpo sample` and `flowgrpo eval`.

Gen-Drive (2410.05582) proposes N futures and keeps the one that its learned scorer prefers. Any reward can be the
scorer, such as one that `flowgrpo reward train` made. Draw j of the k-th kept sample has the seed of sample k N + j.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from flowgrpo import rewards
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import require_generators
from flowgrpo.distributed.signals import promptly
from flowgrpo.errors import UserError
from flowgrpo.evaluation import run_rewards
from flowgrpo.rewards import Failed
from flowgrpo.rewards.score import columns


@dataclass(frozen=True, eq=False)
class BestOf:
    """Choice of one of `count` draws: the one that the reward of that name scores highest."""

    count: int
    name: str
    reward: Any

    def pick(self, drawn: Sequence[Any], prompts: Sequence[Prompt], fps: float | None = None
             ) -> list[tuple[int, float]]:
        """Return (place of the best among its draws, its score) of each of the prompts.

        drawn: `count` consecutive samples per prompt. A draw without a score is never the best. Raises UserError for a
        prompt of which no draw has one.
        """
        best = []
        for at, prompt in enumerate(prompts):
            some = list(drawn[at * self.count:(at + 1) * self.count])
            [column] = promptly(partial(columns, {self.name: self.reward}, some, [prompt.text] * self.count,
                                        [prompt.metadata] * self.count, group=self.count, fps=fps))
            scores = [-math.inf if isinstance(score, Failed) or math.isnan(score) else float(score)
                      for score in column]
            if max(scores) == -math.inf:
                raise UserError(f"--by {self.name}: none of the {self.count} samples of {prompt.text[:60]!r} has a "
                                "score, expected a reward that applies to every prompt")
            best.append((scores.index(max(scores)), max(scores)))
        return best

    def as_json(self) -> dict[str, Any]:
        return {"best_of": self.count, "by": self.name}


def make(count: int, by: str | dict[str, Any], config: Config | None) -> BestOf | None:
    """Choice that --best-of and --by ask for; None for one draw.

    by: name of a reward, where a run's rewards keep their rules, or its rule by name. config: of the run.
    Raises UserError for one of the two options alone, and for several rewards.
    """
    if count == 1 and not by:
        return None
    if count < 2 or not by:
        raise UserError("--best-of goes with --by REWARD, and takes 2 samples or more: got "
                        f"{'--by without --best-of' if by else f'--best-of {count} without --by'}")
    require_generators(count, "candidates of one sample (--best-of)")
    rules = by if isinstance(by, dict) else {by: run_rewards.rule(config, by)}
    if len(rules) != 1:
        raise UserError(f"--by: got {', '.join(rules)}, expected one reward")
    [(name, reward)] = rewards.compose(rules, config.cache if config else None).items()
    return BestOf(count, name, reward)

"""Rewards: find them by name, call and compose them, and check their scores.

A reward is a plain function or object called as `reward(images, prompts, metadata) -> B floats` (`videos` or
`completions` likewise; its signature may omit `metadata`). `None` in place of a float: the reward does not apply to
that sample. A name is one of

- a name registered by `@flowgrpo.reward("name")`,
- a built-in reward,
- `path/to/file.py:function`,
- a folder that `flowgrpo reward train` wrote, or `folder:aspect` (contrib/learned_rewards/preference.py),
- `http://host:port/NAME`, of a server (serving/client.py, server.py),
- an entry point in the group `flowgrpo.rewards`.

A class is instantiated once, when the reward is found, with the `args` of its rule; the instance is the reward.

reward.py has the type that all of these become, with its facts and its one argument, a batch; compose.py puts one under
its rule of a recipe (config/reward_rules.py), with cached_scores.py; combine.py has rewards made of rewards;
pairwise.py judges of pairs. What every model in this process shares is in local_model.py and preprocessing.py, the
place of weights in placement.py. Published models stand by what they are: clip.py (CLIPScore, aesthetic, PickScore,
HPSv2), qwen2_vl.py (HPSv3, VideoReward), vlm_judge/ (UnifiedReward, DeQA), geneval/, or a file of their name. The toy
worlds of the starters are judged in flowgrpo/rewards/starter; rewards that no recipe names are in contrib (find.py
lists all).
"""

from flowgrpo.rewards.about import MODALITIES, About, differentiable, lazily
from flowgrpo.rewards.compose import (
    Composed,
    compose,
    for_trial,
    limits_of,
    reads_sampler,
    remembers,
    require_memory,
    require_routes,
    require_values,
    slow,
    transform_scores,
    transforms_of,
)
from flowgrpo.rewards.failures import Failed, Tally
from flowgrpo.rewards.find import BUILT_IN, code_hashes, edited_rewards, find, locate, names, reward, source
from flowgrpo.rewards.gradient import require_gradient, value, with_gradient
from flowgrpo.rewards.placement import leave, load
from flowgrpo.rewards.reward import (
    Batch,
    about,
    inside,
    reads_on,
    require_for_tokens,
    require_modality,
    require_signature,
    scores_latents,
    sees_base,
)
from flowgrpo.rewards.score import require_clips, score

__all__ = ["BUILT_IN", "MODALITIES", "About", "Batch", "Composed", "Failed", "Tally", "about",
           "code_hashes", "compose", "differentiable", "edited_rewards", "find", "for_trial", "inside",
           "lazily", "leave", "limits_of", "load", "locate", "names", "reads_on", "reads_sampler",
           "remembers", "require_clips", "require_for_tokens", "require_gradient", "require_memory", "require_modality",
           "require_routes", "require_signature", "require_values", "reward", "score",
           "scores_latents", "sees_base", "slow", "source", "transform_scores", "transforms_of", "value",
           "with_gradient"]

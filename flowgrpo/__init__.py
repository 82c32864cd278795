"""flowgrpo: align diffusers generators and language models to a reward by group-relative RL.

    flowgrpo.align("starter", rewards="scene_graded")     # the same run as `flowgrpo train`

    @flowgrpo.reward("bright")                            # a reward in ten lines
    def bright(images, prompts, metadata): ...

Importing the package does not import torch; the names below are loaded at their first use.
"""

import importlib
import sys
import warnings
from typing import TYPE_CHECKING

from flowgrpo.version import __version__

if TYPE_CHECKING:
    from flowgrpo.errors import UserError
    from flowgrpo.rewards.find import reward
    from flowgrpo.rewards.pairwise import judge
    from flowgrpo.run import align
    from flowgrpo.trl import FlowGRPOConfig, FlowGRPOTrainer

if "ipykernel" in sys.modules:  # tqdm's warning, at the import of any library that shows bars: a red box in a cell
    warnings.filterwarnings("ignore", "IProgress not found")

__all__ = ["FlowGRPOConfig", "FlowGRPOTrainer", "UserError", "__version__", "align", "judge", "reward"]

_HOMES = {"align": "flowgrpo.run", "judge": "flowgrpo.rewards.pairwise",
          "FlowGRPOConfig": "flowgrpo.trl", "FlowGRPOTrainer": "flowgrpo.trl",
          "reward": "flowgrpo.rewards.find", "UserError": "flowgrpo.errors"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'flowgrpo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__

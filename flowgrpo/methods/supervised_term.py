"""Check of a method's supervised term: its options, and its file of examples."""

from __future__ import annotations

from flowgrpo.data.pairs import load_demonstrations, load_pairs
from flowgrpo.errors import UserError
from flowgrpo.methods.data_sources import Explained, PassRate
from flowgrpo.methods.setup import Setup
from flowgrpo.methods.supervised import PicturePairs, PreferencePairs


def check(setup: Setup) -> None:
    """Raise UserError for a supervised term that does not go with an option, has no examples, or whose file of
    demonstrations has a mistake."""
    config, method = setup.config, setup.method
    part = method.loss.data
    if part is None:
        return
    wrong = {"memory.shard, whose processes would meet in other steps: use false": config.memory.shard,
             "memory.context_parallel: use 1": config.memory.context_parallel > 1,
             "picture.sizes, where the examples of a batch differ in size: leave it out": bool(config.picture.sizes)}
    for option in (option for option, applies in wrong.items() if applies):
        raise UserError(f"parts.data, a supervised term, does not go with {option}")
    if isinstance(part.source, Explained) and not method.for_tokens:
        raise UserError("parts.data.source is Explained, whose examples a language model writes: use PassRate here")
    if isinstance(part, (PreferencePairs, PicturePairs)):
        if not part.source.path:
            raise UserError(f"parts.data is {type(part).__name__}, but names no pairs: set parts.data.source.path to a "
                            ".jsonl file of pairs")
        load_pairs(part.source.path, text=isinstance(part, PreferencePairs))
    elif part.source.path:
        load_demonstrations(part.source.path)
    elif not method.for_tokens and not (isinstance(part.source, PassRate) and part.source.collects_own):
        raise UserError(f"parts.data.source is {type(part.source).__name__}, which takes recorded images, but it has "
                        "no path: set it to a .jsonl file of demonstrations")

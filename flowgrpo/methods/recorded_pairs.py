"""Methods on recorded pairs, in place of samples that a run draws."""

from __future__ import annotations

from flowgrpo.advantages.shaping import BradleyTerry
from flowgrpo.config.schema import Config
from flowgrpo.errors import UserError
from flowgrpo.methods.method import Method
from flowgrpo.methods.setup import Setup
from flowgrpo.methods.targets import NoisedFinals, RecordedPairs


def of(method: Method) -> Method:
    """Return a method of noised finals or of completions on recorded pairs; another one as it is."""
    if isinstance(method.target, NoisedFinals):
        return method.having(target=RecordedPairs(method.target.times))
    if not method.for_tokens:
        return method
    from flowgrpo.text.targets import Completions, RecordedCompletions

    return method.having(target=RecordedCompletions()) if type(method.target) is Completions else method


def check(setup: Setup) -> None:
    """Raise UserError if the method or configuration does not fit recorded pairs, or needs them and has none."""
    config, method = setup.config, setup.method
    if config.preferences is None:
        if config.labels != "file":
            raise UserError(f"labels is {config.labels!r}, but preferences is not set: set it to a file of pairs")
        if getattr(method.loss.surrogate, "similarity", False):
            raise UserError(f"method {config.method} pulls to the first image of recorded pairs, but preferences is "
                            "not set: set it to a file of pairs, or parts.surrogate.similarity: 0")
        return
    _require_recorded(config, method)
    _require_measured(config)
    if config.labels == "file" and isinstance(method.credit.shaping, BradleyTerry):
        raise UserError(f"labels is 'file', but method {config.method} samples labels from rewards, and would swap "
                        "some of the file's: set labels: rewards, or parts.shaping: null")
    if config.labels == "rewards" and getattr(method.loss.surrogate, "similarity", False) \
            and not isinstance(method.credit.shaping, BradleyTerry):
        raise UserError(f"method {config.method} with parts.surrogate.similarity pulls to what the file calls chosen, "
                        "but labels is 'rewards', which may prefer the other image: set labels: file, or similarity: "
                        "0")
    if method.rollout.preview:
        raise UserError(f"preferences is set, so no image is sampled, but method {config.method} chooses among "
                        "previews of sampled ones: leave sol_rl out")
    if config.train.group != 2:
        raise UserError(f"train.group is {config.train.group}, but preferences brings pairs: set train.group: 2")


def _require_measured(config: Config) -> None:
    """Raise UserError for a training key of a reward that is only measured beside labels from the file."""
    for name, rule in config.watched.items() if config.labels == "file" else ():
        for key in (key for key in ("limit", "transform") if getattr(rule, key, None)):
            raise UserError(f"reward.{name}.{key} is set, but labels is 'file', so that rewards are only measured: "
                            "leave it out, or set labels: rewards")


def _require_recorded(config: Config, method: Method) -> None:
    """Raise UserError for a method that does not train recorded pairs."""
    if isinstance(method.target, RecordedPairs):
        return
    if not method.for_tokens:
        raise UserError(f"preferences is set, so no image is sampled, but method {config.method} trains steps of "
                        "sampling one, or edits of sampled ones: use a method of noised finals, such as diffusion_dpo")
    from flowgrpo.text.targets import RecordedCompletions

    if not isinstance(method.target, RecordedCompletions):
        raise UserError(f"preferences is set, but method {config.method} on this model trains {method.target.trains}, "
                        "which recorded completions have none of: expected a causal language model and a method such "
                        "as dpo")
    decoding = method.generation.decoding
    if decoding.greedy or decoding.expert:
        raise UserError(f"preferences is set, so no completion is sampled, but method {config.method} keeps "
                        f"{decoding.greedy} greedy samples and {decoding.expert} answers per group: set "
                        "parts.decoding: {greedy: 0, expert: 0}, or use a method such as dpo")
    if config.text.engine != "transformers" or config.text.engine_precision is not None:
        raise UserError("preferences is set, so no completion is sampled, but text.engine or text.engine_precision is "
                        "set too: leave them out")

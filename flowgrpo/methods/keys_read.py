"""Keys of a configuration that a run reads: by the kind of its model, and by its other keys and its method.

Each key says so itself (`config.base.Key`). A changed key that the run would not read is an error.
"""

from collections.abc import Iterator
from operator import attrgetter

from flowgrpo.config.base import Key, facts
from flowgrpo.config.schema import Config, fields
from flowgrpo.errors import UserError
from flowgrpo.methods.setup import Setup


def kinds(key: str) -> tuple[str, ...]:
    """The kinds of models (`policies.build`) that read a key; empty: all."""
    section = key.rpartition(".")[0]
    owner = Config.model_fields[section].annotation if section else Config
    return facts(fields()[key]).kinds or getattr(owner, "kinds")


def require_kind(config: Config, kind: str, where: str = "") -> None:
    """Raise UserError for a changed key that a model of this kind (`policies.build`) does not read. where: before it.
    """
    for key, _ in _non_default_keys(config):
        if not (of := kinds(key)) or kind in of:
            continue
        about = {"pipeline": "language models", "image_tokens": "texts"}.get(kind, "causal language models")
        what = "denoisers" + " and causal language models" * ("causal_lm" in of) if "pipeline" in of else about
        model = {"pipeline": "pipeline", "masked_lm": "masked language model",
                 "image_tokens": "model that draws images by tokens"}.get(kind, "language model")
        raise UserError(f"{where}{key} is set, which is about {what}: leave it out for a {model} (got "
                        f"{attrgetter(key)(config)!r}, expected the default, {fields()[key].default!r})")


def check(setup: Setup) -> None:
    """Raise UserError for a changed key that a run of this kind of model and method does not read."""
    config, method, where = setup.config, setup.method, setup.where
    require_kind(config, setup.kind, where)
    for key, about in _non_default_keys(config):
        for condition in (condition for condition in about.when if not condition.reads(config, method)):
            why = condition.why.format(config, method)
            raise UserError(f"{where}{key} is {attrgetter(key)(config)!r}, but {why}, so that the run does not read "
                            f"it: {condition.cure}, or leave {key} out (expected the default, "
                            f"{fields()[key].default!r})")


def require_process(config: Config, process: str) -> None:
    """Raise UserError for a changed key that a pipeline of a process, "flow" or "vp", does not read."""
    key = "train.shift"
    if process == "vp" and key in dict(_non_default_keys(config)):
        raise UserError(f"{key} is {config.train.shift!r}, but this model is variance-preserving (it predicts noise or "
                        f"v) and has its scheduler's grid: leave it out (expected the default, "
                        f"{fields()[key].default!r})")


def _non_default_keys(config: Config) -> Iterator[tuple[str, Key]]:
    return ((key, facts(field)) for key, field in fields().items() if attrgetter(key)(config) != field.default)

"""Parts of a method that its target reads. A part that the user set and that the run would not read is an error."""

import dataclasses
from collections.abc import Callable
from typing import cast

from flowgrpo.errors import UserError
from flowgrpo.methods import registry, targets
from flowgrpo.methods.method import Method
from flowgrpo.objectives import surrogates
from flowgrpo.objectives.kl import is_active

# Of a part that is read, what leaves it without effect: a test of the method, and its cure.
_IDLE: dict[str, tuple[Callable[[Method], bool], str]] = {
    "kernel": (lambda m: m.denoising.noisy == "none", "its plan draws no noise"),
    **dict.fromkeys(("solver", "tail"), (
        lambda m: m.denoising.noisy == "every", "its plan leaves no two deterministic steps in a row")),
    "reference": (lambda m: not is_active(m.loss.kl) and not m.compares_with_reference,
                  "it is read by a KL alone, whose weight is 0: set parts.kl.weight"),
    "advantage": (lambda m: (isinstance(m.target, targets.RewardGradient) or isinstance(
                      m.loss.surrogate, surrogates.ActorCritic) and not m.loss.surrogate.ratio) and
                  m.credit.selection is None,
                  "its surrogate follows the reward itself or a critic of it, and its selection keeps all samples"),
    "shaping": (lambda m: isinstance(m.target, targets.RewardGradient) and m.credit.selection is None,
                "its surrogate follows the reward itself, and its selection keeps all samples")}


def names(method: Method) -> list[str]:
    """The names of the parts that the method's target reads, in the order of the groups."""
    return [name for name in method.parts() if name not in method.target.unread]


def places(method: Method) -> list[str]:
    """The names of the parts that are read and have an effect, in the order of the groups."""
    return [name for name in names(method) if not (name in _IDLE and _IDLE[name][0](method))]


def require_set(host: Method, requested: Method, method: Method, overlays: dict[str, tuple[Method, Method]]) -> None:
    """Raise UserError for a part that the user set and that the method does not read.
    host: what the presets make, over which `parts` made the one that is asked for; method: what a run makes of it.
    overlays: the method before and after each preset that changes another, of which something has to be read."""
    read = places(method)
    for name, (before, after) in overlays.items():
        changed = _differing_parts(before, after)
        if changed and not set(changed) & set(read):
            raise UserError(refusal(method, changed[0], f"the preset {name}"))
    for name in _differing_parts(host, requested):
        if name not in read:
            why = f" ({_IDLE[name][1]})" if name in _IDLE and name in names(method) else ""
            part = requested.parts()[name]
            shown = type(part).__name__ if dataclasses.is_dataclass(part) else repr(part)
            raise UserError(refusal(method, name, f"parts.{name} {shown}{why}"))


def refusal(method: Method, name: str, got: str) -> str:
    return (f"a method that trains {method.target.trains} reads no {name}: got {got}, leave it out; it has: "
            f"{', '.join(places(method))}")


def require_types(method: Method) -> None:
    """Raise UserError for a part that the target cannot read, though another one in its place can be read."""
    parts = method.parts()
    for name in places(method):
        part = parts[name]
        if part is not None and not _reads(type(part), name, method.target):
            fitting = [other for other in registry.of_place(name) if _reads(registry.TYPES[other], name, method.target)]
            of = getattr(part, "reads_target", "")
            # What is trained by the targets that offer this, and by those made of them.
            kinds = [cast("type[targets.Target]", registry.TYPES[kind]) for kind in registry.of_place("target")]
            trained = {target.trains for kind in kinds for target in (kind, *kind.__subclasses__())
                       if of in target.offers}
            by = f", which reads {' or '.join(sorted(trained))}" if of else ""
            raise UserError(f"parts.{name}: got {type(part).__name__}{by}, but the method trains "
                            f"{method.target.trains}: expected one of {', '.join(fitting)}")


def _reads(part: type, name: str, target: targets.Target) -> bool:
    of = getattr(part, "reads_target", "")  # what it needs of `Target.offers`; empty: it goes with any target
    return (not of or of in target.offers) and issubclass(part, target.takes.get(name, object))


def _differing_parts(before: Method, after: Method) -> list[str]:
    old = before.parts()
    return [name for name, part in after.parts().items() if name not in old or old[name] != part]

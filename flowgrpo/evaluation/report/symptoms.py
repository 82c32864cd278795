"""Symptoms of a run that does not learn, from its metrics: the training loop alerts to them, and the report names those
of the last epochs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from flowgrpo.config.schema import Config
from flowgrpo.evaluation.statistics import decimals, format_value

Scale: TypeAlias = Sequence[float | None]  # lowest and highest score of a reward, None for no bound
# Epochs after which a flat reward, a clip fraction, equal rewards and a collapse are symptoms.
FLAT, CLIPPED, EQUAL, COLLAPSED = 20, 10, 5, 3
START = FLAT // 2  # first epochs of a run: a reward that rose since then and stays there is not flat
# Of a collapse, at most: the diversity within a group, the gradient norm, and its share of the largest norm before.
SAME, STILL, FADED = 1e-3, 1e-4, 1e-3
MOST = 0.9  # share of zero-variance groups from which on it is a symptom
CERTAIN = 2.0  # standard errors of a rise
CENTRED = 1e-5  # mean of a reward over its deviation, which is rounding
GROWN = 3.0  # change of the weights, as `policies.weights.change`, that is more than the base's own size
CEILING = 0.95  # share of a reward's range from which on its prompts are as good as solved
SMALL = 0.1  # largest |log ratio| over the clip range, below which the clip never acts


def solved(direction: float, means: Sequence[float | None], known: Scale | None, share: float = CEILING) -> bool:
    """True if a reward's means are all at its best score, as far as its range is known.

    direction: below 0 if it is to fall. known: its lowest and highest score. share: of the range, if both are known.
    """
    low, high = known or (None, None)
    best, worst = (high, low) if direction > 0 else (low, high)
    if best is None or not means:
        return False
    apart = 1e-6 * abs(best) if worst is None else (1 - share) * abs(best - worst) + 1e-6 * abs(best)
    return all(mean is not None and abs(best - mean) <= apart for mean in means)


def of_run(config: Config, lines: Sequence[dict[str, Any]], clip: float | None,
           ranges: Mapping[str, Scale | None] = {}) -> dict[str, str]:
    """Symptoms by name, each with a line on the numbers and what to look at, after the last of a run's lines of
    metrics, of which the first START and the last FLAT are read. Of a run whose trained rewards are at their ceiling a
    reward or a gradient that stays is no symptom.

    clip: the narrower side of the clip range; None without a clip, or if it is unknown.
    ranges: lowest and highest score of each reward.
    """
    weighted = [name for name, weight in config.rewards.items() if weight]
    done = bool(weighted) and all(solved(config.trained[name].direction, [
        line.get(f"reward/{name}/mean") for line in lines[-EQUAL:]], ranges.get(name)) for name in weighted)
    skipped, change = lines[-1].get("skipped_updates") if lines else None, _column(lines[-1:], "weights/change", 1)
    scale = "; with fp16 the first few only set the loss scale" if config.precision == "fp16" else ""
    texts = {"flat reward": None if done else _flat(config, lines[-FLAT:], lines[:START]),
             "equal rewards": _equal(config, lines[-EQUAL:], done),
             "clip fraction": None if done else _clip_symptom(config, lines[-CLIPPED:], clip),
             "skipped updates": skipped and (
                 f"{skipped:g} of the updates so far {'were' if skipped > 1 else 'was'} skipped, because the gradient "
                 f"was not finite: look at train.lr, the precision and the rewards' scale{scale}"),
             "collapse": None if done else _collapse_symptom(lines[-FLAT:]),
             "large weights": None if change is None or change[0] < GROWN else (
                 f"the weights have changed by {change[0]:.3g} times the size of a usual layer: samples of such "
                 "weights are hardly the model's; go back to an earlier checkpoint with a smaller train.lr (now "
                 f"{config.train.rate})"),
             "small gradient": None if done else _tiny(config, lines[-1:])}
    return {name: text for name, text in texts.items() if text}


def _column(lines: Sequence[dict[str, Any]], key: str, count: int) -> np.ndarray | None:
    values = [line.get(key) for line in lines]
    known = [float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    return np.array(known) if len(known) == count else None


def _flat(config: Config, lines: Sequence[dict[str, Any]], start: Sequence[dict[str, Any]]) -> str | None:
    """Describe trained rewards of which none rose: the second half of `lines` over the first one and over `start`."""
    if config.preferences is not None and config.labels == "file":
        return None  # its reward is 1/2 throughout
    moves = []
    for name, rule in config.trained.items():
        values = _column(lines, f"reward/{name}/mean", FLAT)
        if values is None:
            continue
        spreads = _column(lines, f"reward/{name}/std", FLAT)
        if spreads is not None and np.abs(values).max() <= CENTRED * spreads.max():
            continue  # in every group its mean is 0, whatever the samples are
        first, second = np.split(values, 2)
        begun = _column(start, f"reward/{name}/mean", START)
        for earlier in (first, begun):  # better by more than CERTAIN standard errors of means of as many epochs
            if earlier is None:
                continue
            error = math.sqrt((earlier.var(ddof=1) + second.var(ddof=1)) / len(earlier))
            if math.copysign(1, rule.direction) * (second.mean() - earlier.mean()) > CERTAIN * error:
                return None
        digits = decimals([first.mean(), second.mean()])
        moves.append(f"{name} {format_value(first.mean(), digits)} to {format_value(second.mean(), digits)}")
    if not moves:
        return None
    return (f"no trained reward clearly rose in the last {FLAT} epochs ({', '.join(moves)}): look at train.lr, the KL "
            "weight, the clip fraction and the zero-variance groups; a reward at its ceiling is done")


def _equal(config: Config, lines: Sequence[dict[str, Any]], done: bool) -> str | None:
    """Describe groups in which all samples earn the same of every reward. done: the best score, as a rule."""
    shares = [_column(lines, f"reward/{name}/zero_variance_groups", EQUAL) for name in config.rewards]
    if config.train.group < 2 or not shares or any(share is None for share in shares):
        return None
    share = np.min(np.stack([values for values in shares if values is not None]), 0).mean()
    if share < MOST:
        return None
    return (f"{100 * share:.0f} % of the groups of {EQUAL} epochs have equal rewards and teach nothing: "
            + ("nearly all samples have the best score, so take harder prompts" if done else
               "look at the prompts' difficulty, a reward with values in between, and train.group"))


def _clip_symptom(config: Config, lines: Sequence[dict[str, Any]], clip: float | None) -> str | None:
    """Describe a clip that never acts although the policy may leave the old one, or that cuts every decision."""
    fractions, ratios = (_column(lines, key, CLIPPED) for key in ("clip_fraction", "log_ratio_max"))
    if clip is None or fractions is None:
        return None
    if fractions.min() >= 0.99:
        return (f"the clip fraction is 1 in {CLIPPED} epochs, so that hardly any decision has a gradient: look at "
                f"train.lr, train.inner_epochs and the clip range ({clip:.1e})")
    moves = config.train.updates * config.train.inner_epochs > 1  # else every ratio is 1
    if moves and ratios is not None and fractions.max() == 0 and ratios.max() < SMALL * clip:
        return (f"the clip fraction is 0 in {CLIPPED} epochs, and the largest |log ratio| {ratios.max():.1e} of a "
                f"range of {clip:.1e}, so that the policy hardly moves: look at train.lr and the gradient norm")
    return None


def _tiny(config: Config, lines: Sequence[dict[str, Any]]) -> str | None:
    """Describe a gradient that is not far above AdamW's eps, which then makes its steps smaller than the rate."""
    share = _column(lines, "adam_eps_share", 1)
    if share is None:
        return None
    eps = config.train.eps
    typical = eps * (1 / share[0] - 1)
    return (f"a value of the gradient is about {typical:.1e}, and AdamW's eps {eps:g}, so that a step is "
            f"{1 - share[0]:.2g} of train.lr: set train.eps to {typical / 100:.0e}")


def _collapse_symptom(lines: Sequence[dict[str, Any]]) -> str | None:
    """Describe a gradient that has vanished, or samples that are all the same, as after updates that are too large."""
    last = lines[-COLLAPSED:]
    apart, norms = (_column(last, key, COLLAPSED) for key in ("diversity", "grad_norm"))
    if norms is None or norms.max() >= STILL:
        return None
    highest = max((line["grad_norm"] for line in lines if line.get("grad_norm") is not None), default=0.0)
    if not (norms.max() < FADED * highest or (apart is not None and apart.max() < SAME)):
        return None
    kl = _column(last[-1:], "kl", 1)
    diversity, distance = ("not measured" if values is None else f"{values[-1]:.1e}" for values in (apart, kl))
    return (f"gradient norm {norms[-1]:.1e} after {highest:.1e}, diversity within a group {diversity}, KL to the "
            f"reference {distance}: the policy no longer learns; unless the reward is at its ceiling, go back to an "
            "earlier checkpoint with a smaller train.lr")

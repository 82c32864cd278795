"""Runs whose updates can read the graphs of their rollouts."""

from __future__ import annotations

from flowgrpo.config.schema import Config
from flowgrpo.errors import UserError
from flowgrpo.methods import targets
from flowgrpo.methods.method import Method


def reasons(config: Config, method: Method, slices: int = 1) -> list[str]:
    """Return what keeps a run from `train.one_pass`, in words. slices: of every group over processes."""
    train, memory = config.train, config.memory
    if type(method.target) is not targets.RecordedSteps:
        return [f"a method that trains {method.target.trains}"]
    denoising = method.denoising
    wrong = {
        f"train.inner_epochs {train.inner_epochs}, which trains a sample again": train.inner_epochs > 1,
        f"train.updates {train.updates}, which trains samples by other weights than drew them": train.updates > 1,
        "train.staleness, whose samples older weights drew": train.staleness > 0,
        "parts.lag, whose old policy draws": denoising.lag.most > 0,
        "train.pack, which is about replays": train.pack,
        "parts.pruning, which stops samples on their way": denoising.pruning is not None,
        "parts.redraw, which drops groups": method.redraw is not None,
        "parts.expansion, whose samples are drawn under other prompts": method.expansion is not None,
        "parts.replay, which trains samples of earlier epochs": method.replay is not None,
        "parts.rehearsal, which replays samples of the base model": method.loss.rehearsal is not None,
        f"the kernel {type(denoising.kernel).__name__}, which learns": hasattr(denoising.kernel, "network"),
        "text encoders that are trained": denoising.adapted.encoders,
        "adapter.rank: 0, whose base model takes the place of the weights": not config.adapter.rank,
        "memory.shard, whose processes share every call": bool(memory.shard),
        "memory.context_parallel, whose processes share every call": memory.context_parallel > 1,
        "memory.offload or memory.denoiser, whose weights come and go": memory.offload != "none"
            or memory.denoiser != "keep",
        "groups that are split over processes and compared by the loss": slices > 1
            and method.loss.surrogate.reads_groups}
    return [reason for reason, applies in wrong.items() if applies]


def require(config: Config, method: Method, slices: int = 1) -> None:
    """Raise UserError for `train.one_pass: true` in a run that cannot have it; `auto` is false there."""
    if config.train.one_pass is True:
        for reason in reasons(config, method, slices):
            raise UserError(f"train.one_pass is true, which does not go with {reason}: leave one of them out")

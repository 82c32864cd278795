"""Wrong keys, each of which `make lint` finds: mypy reports a line below that has no error for its `type: ignore`."""

import flowgrpo
from flowgrpo.config.schema import Config
from flowgrpo.contrib.features import OnePassKeys


def read(config: Config) -> list[object]:
    """Attributes that no section and no feature has; a feature's key is read from the feature."""
    return [config.train.lrr,  # type: ignore[attr-defined]
            config.eval.no_such_key,  # type: ignore[attr-defined]
            config.tain.lr,  # type: ignore[attr-defined]
            config.train.one_pass,  # type: ignore[attr-defined]
            OnePassKeys.read(config).one_pas]  # type: ignore[attr-defined]


def run() -> None:
    """Options of `align`: a wrong key, section, type and word, and a wrong key of a feature; then right ones."""
    flowgrpo.align("starter", train={"lrr": 1e-4})  # type: ignore[typeddict-unknown-key]
    flowgrpo.align("starter", tain={"lr": 1e-4})  # type: ignore[call-arg]
    flowgrpo.align("starter", train={"epochs": "ten"})  # type: ignore[typeddict-item]
    flowgrpo.align("starter", precision="half")  # type: ignore[arg-type]
    flowgrpo.align("starter", train={"one_pas": True})  # type: ignore[typeddict-unknown-key]
    flowgrpo.align("starter", train={"lr": "auto", "one_pass": True, "betas": [0.9, 0.99]}, image={"sizes": [[64, 64]]},
                   eval={"rewards": ["scene_style"], "stop": {"reward": "scene"}}, guard={"window": 4})

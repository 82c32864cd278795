"""Session of `flowgrpo taste`: its configuration, the run between the clicks, and what it leaves.

The run is that of `flowgrpo train`, with the votes as its reward. When it is stopped, a second run resumes it with as
many epochs as were trained, so that it only measures, by the head that was learned, and writes LoRA and report.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flowgrpo.config import parse
from flowgrpo.config.schema import Config
from flowgrpo.contrib.learned_rewards import preference
from flowgrpo.contrib.learned_rewards.denoiser_head import DENOISER, LOOKS, DenoiserHead
from flowgrpo.contrib.taste.head import CHANCE, Belief
from flowgrpo.contrib.taste.loop import CHECKS, FEATURES, ROUNDS, VOTES, Taste, read_belief, seen_by
from flowgrpo.contrib.taste.votes import VoteLog
from flowgrpo.data import provenance, sets
from flowgrpo.data.pairs import OVERALL
from flowgrpo.distributed.signals import Stopped
from flowgrpo.errors import UserError
from flowgrpo.evaluation.looks import ALIKE, WIDE, twins
from flowgrpo.nouns import quantity
from flowgrpo.policies import build, loading
from flowgrpo.run import run
from flowgrpo.storage import paths
from flowgrpo.storage.json_files import read_lines
from flowgrpo.storage.places import CONFIG, checkpoints

REWARD = "taste"  # name of the run's reward, and of the folder of the learned one
PAIRS = "pairs.jsonl"
MEASURED = 24  # held-out prompts of the report, and of the limits after each batch
# A batch of clicks is ROUNDS epochs of one update each; a KL to the few-step base holds the trajectory. GRPO-Guard
# weighs its steps alike: the plain ratio of a step from s to s' has a gradient of (1 - s') s / s', so that the last
# steps, which change colours, would drown the first ones, which decide the layout.
DEFAULTS: dict[str, Any] = {
    "method": "rlcm+grpo_guard", "reward": REWARD, "tracker": "none",
    "parts": {"surrogate": {"low": 0.01, "high": 0.01}, "kl": {"weight": 0.02}},
    "train.prompts": 20, "train.group": 4, "train.micro_batch": "auto", "train.inner_epochs": 1, "train.updates": 1,
    "train.epochs": 500 * ROUNDS, "train.steps": 4, "train.guidance": 1.0, "train.grid": "stock",
    "train.schedule": "constant", "train.lr": "auto", "train.save_every": ROUNDS, "train.keep": 2,
    "eval.steps": 4, "eval.guidance": 1.0, "eval.prompts": MEASURED, "eval.grid": 8, "eval.every": ROUNDS,
    "guard.edge_width": WIDE, "guard.diversity": ALIKE}
ROWS = (1, 2, 4, 8, 20, 40)  # micro-batches that fit DEFAULTS
# Of models that ship with the package: what their own recipe sets.
OWN: dict[str, dict[str, Any]] = {
    "starter_consistency": {"adapter.rank": 16, "train.micro_batch": 40, "train.lr": 1e-3, "adapter.targets": [
        "to_q", "to_k", "add_k_proj", "linear_1", "linear_2"]}}


def session_config(model: str, prompts: str, lora: str | None, output: Path, options: Mapping[str, Any], resume: bool
                   ) -> Config:
    """The configuration of a session in the folder `output`. options: further keys, dotted, as texts.

    Raises UserError for a folder that holds something else, prompts that are missing, a LoRA that is none, and a model
    that writes completions.
    """
    paths.require_folder(output)
    there = (output / VOTES).is_file() or (output / CONFIG).is_file()
    if there and not resume:
        raise UserError(f"--output {output} holds a session already: --resume goes on with it, or name another")
    if resume and not there:
        raise UserError(f"--resume: no session in {output}: leave --resume out, or name its folder with --output")
    if not there and output.is_dir() and any(output.iterdir()):
        raise UserError(f"--output {output} exists and is no session: name another")
    provenance.require_no_slip(model)
    if build.writes(model):
        raise UserError(f"{model} writes completions: expected a model of images, such as starter_consistency")
    place = {"model": model, "prompts": prompts, "name": output.resolve().name, "output": str(output.parent)}
    start = {} if lora is None else {"adapter.init": lora}
    config = parse.load(None, DEFAULTS | OWN.get(model, {}) | place | start | dict(options))
    sets.resolve(config)
    if lora is not None:
        loading.require_weights(Path(lora))
    return config


def of_recipe(recipe: Config) -> Config:
    """The configuration of a session on a recipe's model, size, memory and adapter, for a dry run."""
    rows = max(size for size in ROWS if size <= recipe.train.rows)
    kept = {name: getattr(recipe, name).model_dump(exclude_unset=True)
            for name in ("load", "image", "adapter", "memory")}
    steps, guidance = recipe.train.steps, recipe.train.guidance
    return parse.load(None, kept | DEFAULTS | {
        "model": recipe.model, "precision": recipe.precision, "reward": "sharpness", "train.lr": 1e-4,
        "train.micro_batch": rows, "train.checkpointing": recipe.train.checkpointing, "train.steps": steps,
        "train.guidance": guidance, "eval.steps": steps, "eval.guidance": guidance,
        "eval.every": 0, "guard.edge_width": None, "guard.diversity": None})  # there are no values to hold


def seconds_per_click(taken: Callable[[str], float], steps: int) -> float:
    """The seconds of a batch per click: to draw, to learn from fresh samples, to check, to hold within limits.

    taken: seconds of a phase of `of_recipe`'s epoch. The head looks at a sample in LOOKS steps.
    """
    clicks, drawn = DEFAULTS["train.prompts"], DEFAULTS["train.prompts"] * DEFAULTS["train.group"]
    shown = 2 * CHECKS + MEASURED + twins(MEASURED, 1)
    draw, look = taken("rollout") + taken("decode"), LOOKS * taken("rollout") / steps
    learn = ROUNDS * (taken("encode") + taken("rollout") + look + taken("update"))
    return float((taken("encode") + draw * (1 + shown / drawn) + look + learn) / clicks)


def train(config: Config, taste: Taste, resume: bool) -> int:
    """Run a session until the user, the time or a signal ends it; return the number of epochs."""
    try:
        run(config, "auto" if resume else False, functions={REWARD: taste})
    except Stopped:
        pass
    return max(checkpoints(config.folder / "checkpoints"), default=0)


def belief_of(folder: Path, log: VoteLog) -> Belief | None:
    """The belief after all votes of a session, those of a batch that is not whole too; None before the first
    images."""
    batches = [int(file.stem) for file in (folder / FEATURES).glob("*.safetensors")]
    return read_belief(folder, log, max(batches) + 1) if batches else None


def trained_epochs(folder: Path) -> int:
    """The number of epochs of a session that made an update."""
    return sum(bool(line.get("trained_updates")) for line in read_lines(folder / "metrics.jsonl", "epoch"))


def finish(config: Config, log: VoteLog, epochs: int) -> dict[str, Any]:
    """Write the pairs of a session, the head once there is evidence of a taste, and LoRA and report once the weights
    have learned from it; return the run's summary, empty if they have not."""
    folder = config.folder
    log.write_pairs(folder / PAIRS)
    belief, trained = belief_of(folder, log), trained_epochs(folder)
    if belief is None or not (trained or belief.convinced):
        return {}
    # The head as a folder that `--reward` takes.
    head, width = belief.head(), len(belief.scale)
    network = DenoiserHead(None, width)
    network.scale.copy_(head.scale)
    network.weight.copy_(head.weight)
    about = {"kind": DENOISER, "model": config.model, "call": config.call, "width": width, "evidence": True,
             "sees": seen_by(folder)}
    preference.save(folder / REWARD, network, preference.Description(
        {OVERALL: preference.Aspect()}, about, {"votes": belief.votes, "evidence": belief.evidence}))
    if not trained:
        return {}
    (folder / "before.json").unlink(missing_ok=True)  # the base is measured again, by the head
    return run(config.having({"train.epochs": epochs}), True,
               functions={REWARD: preference.reward_factory(folder / REWARD, None)()})


def sentences(folder: Path, log: VoteLog, against: Mapping[str, Any] | None, summary: Mapping[str, Any]) -> list[str]:
    """Text of the command at the end of a session. against: result of the ballot. summary: of `finish`."""
    asked = [vote.choice for name, vote in log.votes.items() if ".q" in name]
    chosen, belief = sum(isinstance(choice, int) for choice in asked), belief_of(folder, log)
    said = [f"{quantity(len(asked), 'click')}, {chosen} of them for an image: votes in {folder / PAIRS}"]
    if summary and against:
        said.append(f"of {quantity(against['of'], 'blind pair')} with the base, from other noises, you preferred the "
                    f"trained model in {against['wins']:g}, a tie as one half: {against['share']}")
    if not summary:
        why = "no image was chosen" if not chosen else "no batch of clicks is complete"
        if belief is not None and belief.convinced:
            why = "the clicks tell a taste, and the session ended before the model learned it"
        elif belief is not None and chosen and read_lines(folder / "metrics.jsonl", "epoch"):
            why = (f"the clicks could be chance: their evidence of a taste is {belief.evidence:.2g} of "
                   f"{1 / CHANCE:g}")
        said.append(f"nothing is trained, and no LoRA is written, since {why}: --output {folder} --resume goes on")
    else:
        trained = summary["trained"]["said"][:1]
        said += trained or [f"the model learned in {quantity(trained_epochs(folder), 'epoch')}"]
    if belief is not None and belief.convinced:
        said.append(f"your taste as a reward: --reward {folder / REWARD}")
    return said

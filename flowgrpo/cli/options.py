"""Options shared by several commands."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flowgrpo import hub, trust
from flowgrpo.config import parse, schema
from flowgrpo.errors import UserError
from flowgrpo.storage import places

Precision = Literal["auto", "fp32", "bf16", "fp16"]
PRECISION = "Precision of weights and arithmetic; auto: what suits the device. Without: the run's, or auto."
EPOCH = "Of a run: the checkpoint of this epoch, in place of its result."
HUB_NAME = "OWNER/NAME of the hub, with @REVISION behind it for a branch, a tag or a commit."
RUN = f"A finished run's folder, its checkpoint (RUN/checkpoints/epoch-00050, or RUN --epoch 50), or hub:{HUB_NAME}"
LORA = f"A finished run's folder or checkpoint; a LoRA's folder or .safetensors file; or {HUB_NAME}"
TRUST = "Execute code that the run's recipe names: FILE.py:NAME of rewards, methods and parts, trust_remote_code, " \
        "and rewards with an address. Without: only what this command line names."
Trusted = Annotated[bool, typer.Option(trust.RECIPE_FLAG, help="Let the recipe do all that it says: send keys to its "
                                       "addresses and, if it is not yours, execute code and write elsewhere.")]
RLG = "Sample with base + W * (tuned - base): 0 the base, 1 the tuned model, above 1 beyond it (RLG). Other weights " \
      "run the denoiser twice as often."
GENERATES = ("What a language model makes: text, or image by an image head, as of Janus. Without: what the run "
             "trained, or text.")
BEST_OF = "Generate N for each kept sample, and keep the one that --by scores highest."
ENHANCER = "A language model, or a run that trained one, that rewrites the prompts of a pipeline."
BY = "The reward of --best-of: a name that `flowgrpo list rewards` lists, the run's, or a file of one with its args."


def best_by(text: str) -> str | dict[str, Any]:
    """Parse --by: a reward's name, or a YAML file with its rule."""
    given = parse_rewards(text)
    if isinstance(given, list) and len(given) > 1:
        raise UserError(f"--by: got {text!r}, expected one reward")
    return given if isinstance(given, dict) else "".join(given)


def opening(context: typer.Context, trusted: bool, *named: object) -> None:
    """Execute nothing that an opened run names until the command ends, unless trusted. named: values of the command
    line, whose code is executed."""
    if not trusted:
        context.with_resource(trust.opening(*named))


def local_source(given: str) -> str:
    """Model or run as it is given, or the folder of a run that was downloaded from the hub."""
    return str(hub.download(given)) if hub.is_named(given) else given


def local_lora(given: str | None) -> str | None:
    """Place of a LoRA here, or download that of `OWNER/NAME[@REVISION]`."""
    return str(hub.download(given)) if given is not None and hub.is_lora(given) else given


def page_of(given: Path, run: Path, name: str) -> Path:
    """Default path of a file made from a run: in its folder, of a checkpoint with its epoch; here for a run of the hub.
    Example: kohya.safetensors, kohya-epoch-00010.safetensors."""
    if hub.is_named(str(given)):
        return Path(name)
    if not places.is_checkpoint(run):
        return run / name
    return places.run_of(run) / Path(name).with_stem(f"{Path(name).stem}-{run.name}")


def one_weight(text: str | None) -> float | None:
    weights = weights_of(text)
    if len(weights) > 1:
        raise UserError(f"--rlg: got {text!r}, expected one number from 0 up")
    return weights[0] if weights else None


def weights_of(text: str | None, option: str = "--rlg") -> list[float]:
    """Parse the weights of an option. Raises UserError for anything but finite numbers from 0 up."""
    try:
        weights = [] if text is None else [float(value) for value in text.split(",")]
    except ValueError:
        weights = [-1.0]
    if not all(0 <= weight < float("inf") for weight in weights):
        raise UserError(f"{option}: got {text!r}, expected numbers {'from 0 up' if option == '--rlg' else 'above 0'}")
    return weights


def parse_rewards(text: str) -> list[str] | dict[str, Any]:
    """Parse --rewards: names as `A,B`, or a YAML file of rules by name, as under `eval.rewards`."""
    if not text.endswith((".yaml", ".yml")):
        return [name.strip() for name in text.split(",") if name.strip()]
    rules = parse.read_yaml(Path(text))
    if not rules:
        raise UserError(f"{text}: expected rewards with their rules, such as geneval: {{args: {{score: graded}}}}")
    parse.require_own(text, {"eval": {"rewards": rules}}, flag=None)
    return parse.validate({"eval": {"rewards": rules}}, where=text).eval.rewards


def parse_reward_arguments(reward: str, args: str) -> dict[str, Any]:
    """Parse the arguments of a reward from YAML."""
    return parse.validate({"reward": {reward: {"args": parse.parse_value("args", args)}}}).trained[reward].args


def require_new_file(output: Path) -> None:
    """Raise UserError for an --output that is there already, or no .jsonl file."""
    if output.exists() or output.suffix != ".jsonl":
        raise UserError(f"--output: got {output}, expected a .jsonl file that does not exist yet")


def recipe_argument(meaning: str) -> Any:
    """Declaration of the argument `RECIPE|--KEY=VALUE`. meaning: its help."""
    return typer.Argument(metavar="RECIPE|--KEY=VALUE", show_default=False, help=meaning)


def recipe_and_options(arguments: list[str], noun: str = "recipe",
                       others: tuple[str, ...] = ("resume", "select-best", "trust")
                       ) -> tuple[str | None, dict[str, str]]:
    """Split arguments into the recipe's path and the options given as `--key=value` or `--key value`.

    noun: of what stands in the recipe's place. others: the command's options that are no keys, for hints.
    Raises UserError for an unknown key, and for two recipes.
    """
    named: list[str] = []
    options: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            named.append(argument)
            continue
        key, equals, value = argument.lstrip("-").partition("=")
        key = key.replace("-", "_")  # the key held_out is the option --held-out too
        option = argument.partition("=")[0]
        if not option.startswith("--") or not schema.owner(key):
            hint = parse.nearest_key(key, [*schema.keys(), *others, "help"])
            raise UserError(f"unknown option {option}" + hint.replace("'", "'--", 1))
        if not equals:
            value = next(rest, "--")
            if value.startswith("--"):
                raise UserError(f"option {argument} needs a value: {argument}=VALUE")
        if options.setdefault(key, value) != value:
            raise UserError(f"{option} is given twice, {options[key]} and {value}: expected once")
    if len(named) > 1:
        raise UserError(f"expected one {noun}, got {' and '.join(named)} (values follow their option: --KEY=VALUE)")
    return next(iter(named), None), options

"""`flowgrpo train`."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from flowgrpo.cli import prepare
from flowgrpo.cli.options import Trusted, recipe_and_options, recipe_argument
from flowgrpo.cli.root import TRAIN, app
from flowgrpo.config import parse, recipes
from flowgrpo.distributed import launchers
from flowgrpo.errors import UserError
from flowgrpo.escaped import line

UNTRAINED = 3  # exit code of a run that went through its epochs and trained nothing
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"  # its settings; every torch reads the first name


Resume = Annotated[bool, typer.Option("--resume", help="Resume from the run's last checkpoint (=auto: begin if there "
                                      "is none).")]
ResumeAuto = Annotated[bool, typer.Option("--resume-auto", hidden=True)]


class Resuming(TyperCommand):
    """Command whose flag --resume also takes a value, =auto. A flag of click takes none, and an option that may take
    one would take the recipe behind it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, --resume=auto as the flag --resume-auto."""
        for argument in args:
            if argument.startswith("--resume=") and argument != "--resume=auto":
                raise UserError(f"got {argument}, expected --resume or --resume=auto")
        return super().parse_args(ctx, ["--resume-auto" if word == "--resume=auto" else word for word in args])


@app.command(cls=Resuming, rich_help_panel=TRAIN,
             short_help="Train a model on a reward, from a recipe and --KEY=VALUE.",
             context_settings={"ignore_unknown_options": True}, no_args_is_help=False)
def train(
    arguments: Annotated[list[str] | None, recipe_argument(
        "A YAML recipe, or the name of a packaged one, such as sdxl_24gb (without: the defaults), and any key of the "
        "configuration, such as --train.lr=1e-4 or --eval.every=20.")] = None,
    select_best: Annotated[str | None, typer.Option(metavar="REWARD", help="Keep the weights that are best by this "
                                                    "held-out reward: eval.best.")] = None,
    method: Annotated[str | None, typer.Option(help="Presets joined by +, such as mix_grpo+grpo_guard, or "
                                              "path/to/file.py:function.")] = None,
    reward: Annotated[str | None, typer.Option(help="A reward's name, or path/to/file.py:function.")] = None,
    prompts: Annotated[str | None, typer.Option(metavar="FILE|SET", help="A set of `flowgrpo list prompts`, or "
                                               "a .txt, .jsonl, .csv or .parquet file.")] = None,
    model: Annotated[str | None, typer.Option(help="starter, a local directory, or a hub id.")] = None,
    output: Annotated[str | None, typer.Option(help="The folder that holds the runs.")] = None,
    seed: Annotated[str | None, typer.Option(metavar="INTEGER", help="Seed of the run.")] = None,
    resume: Resume = False,
    resume_auto: ResumeAuto = False,
    trusted: Trusted = False,
) -> int:
    """Train a model on a reward. Settings come from a YAML recipe and --KEY=VALUE."""
    recipe, options = recipe_and_options(arguments or [])
    named = dict(method=method, reward=reward, prompts=prompts, model=model, output=output, seed=seed,
                 **{"eval.best": select_best})
    given = options | {key: value for key, value in named.items() if value is not None}
    asked = [*(arguments or []), *(f"--{key}={value}" for key, value in named.items() if value is not None)]
    return _run(parse.load(recipe, given, trusted), "auto" if resume_auto else resume, shlex.join(asked))


@app.command(cls=Resuming, rich_help_panel=TRAIN,
             short_help="Train the starter: minutes on a laptop, no GPU, no download.",
             context_settings={"ignore_unknown_options": True}, no_args_is_help=False)
def demo(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="--KEY=VALUE", show_default=False, help="Any key of "
                         "the configuration, such as --output=FOLDER.")] = None,
    resume: Resume = False,
    resume_auto: ResumeAuto = False,
) -> int:
    """Train the starter, a small packaged model: minutes on a laptop, without a GPU or a download."""
    recipe, options = recipe_and_options(arguments or [], others=("resume",))
    if recipe is not None:
        raise UserError(f"flowgrpo demo trains the recipe starter, got {recipe}: use `flowgrpo train {recipe}`")
    return _run(parse.load(recipes.FOLDER / "starter.yaml", options), "auto" if resume_auto else resume)


def _run(settings: Any, resume: bool | Literal["auto"], asked: str = "") -> int:
    """Validate a configuration's inputs, announce the run and run it. Returns 0, or UNTRAINED if it trained nothing.
    asked: the words of the command line, for the command that downloads what is missing."""
    check_inputs(settings)
    if asked and os.environ.get("RANK", "0") == "0":
        from flowgrpo.tools.check import needs

        if lacking := needs.missing(settings, prepare.size):
            prepare.show(lacking)
            if away := needs.out_of_reach(lacking):
                raise UserError(f"{', '.join(away)}: missing, and the hub does not answer: where there is a network, "
                                f"`flowgrpo prepare {asked}`"
                                + "; of a local copy of the model, --model=FOLDER" * (settings.model in away))
            typer.echo(f"to install and download all of it: flowgrpo prepare {asked}")
    # Phases of a run need blocks of different sizes, so that segments of CUDA's allocator have to grow. The user's own
    # settings stay. vLLM, which sleeps during training, refuses such segments.
    if sys.platform == "linux" and settings.text.engine != "vllm" and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"
    from flowgrpo.training.announcement import announce

    settings = announce(settings)
    from flowgrpo.run import run

    trained = run(settings, resume=resume)["trained"]
    if not trained["nothing"]:
        return 0
    launchers.let_the_first_speak()
    for sentence in trained["said"][:1]:  # of the first process
        print(f"flowgrpo: {line(sentence)}", file=sys.stderr)
    return UNTRAINED


def settings_for(output: Path, arguments: list[str] | None, others: tuple[str, ...],
                 defaults: dict[str, str] | None = None, trusted: bool = False) -> Any:
    """Validated configuration of a command that writes `output`. Raises UserError if that exists. others: as of
    `recipe_and_options`. defaults: keys that the command line may override. trusted: as of `parse.load`."""
    recipe, options = recipe_and_options(arguments or [], others=(*others, "trust"))
    settings = parse.load(recipe, (defaults or {}) | options, trusted)
    if output.exists():
        raise UserError(f"--output: {output} exists already: give another name")
    check_inputs(settings)
    return settings


def check_inputs(settings: Any) -> None:
    """Validate prompts and rewards before torch or a model is loaded."""
    from flowgrpo import rewards
    from flowgrpo.data import pairs, provenance, sets

    provenance.require_no_slip(settings.model)
    sets.require_suited(settings)
    pairs.in_place(settings, sets.resolve(settings), text=True)  # `checks.check` opens the images
    for label, rule in (settings.trained | settings.extra_rewards).items():
        rewards.require_signature(label, rewards.locate(rule.use or label))

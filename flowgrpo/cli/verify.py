"""`flowgrpo verify`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flowgrpo.cli.options import recipe_and_options
from flowgrpo.cli.root import app
from flowgrpo.config import parse
from flowgrpo.errors import UserError

PROMPTS = ("a red apple on a wooden table", "a blue car in the rain")
RANDOM = "random"


@app.command(hidden=True, short_help="Compare an engine's samples with the pipeline's.",
             context_settings={"ignore_unknown_options": True})
def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="The address of an SGLang-Diffusion server, such as "
                                       "http://127.0.0.1:30000.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The pipeline that it serves: a local directory or a "
                                         "hub id.")],
    arguments: Annotated[list[str] | None, typer.Argument(
        metavar="--KEY=VALUE", show_default=False, help="Keys of the configuration: "
        "--train.steps=10, --train.guidance=4.5, --device=cuda, --memory.vae=sliced.")] = None,
    precision: Annotated[str, typer.Option(help="Precisions of the pipeline, joined by commas: bf16,fp32.")] = "bf16",
    lora: Annotated[str | None, typer.Option(help="A LoRA, compared too: a run's folder or a file that the engine can "
                                             f"read; {RANDOM}: one of rank 4.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(show_default=False, help="Prompt to sample; may be given several "
                                                     "times. Without: two.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Samples of each prompt.")] = 2,
    kernel: Annotated[Literal["sde", "cps"], typer.Option(help="Noise of the steps: FlowSDE or CPS.")] = "sde",
    level: Annotated[float, typer.Option(min=0, help="Level of the noise.")] = 0.7,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds for one request.")] = 600.0,
    folder: Annotated[str | None, typer.Option(help="A folder that both can read, for the LoRA. Without: a temporary "
                                               "one, for an engine on this machine.")] = None,
) -> None:
    """Replay an engine's samples with the pipeline: print the first log-ratio by step, precision, batch and LoRA, the
    smallest clip range that it allows, and each fault that is found. Exit code 2 where there is one."""
    own = ("precision", "lora", "prompt", "count", "kernel", "level", "seed", "timeout", "folder")
    rest, options = recipe_and_options(arguments or [], "model", own)
    if rest is not None:
        raise UserError(f"flowgrpo verify takes URL and MODEL, got {rest} too")
    from flowgrpo.contrib.engine.client import Engine, EngineError
    from flowgrpo.contrib.engine.lora import LoraSender
    from flowgrpo.contrib.engine.verify import Asked, rows, table

    configs = {each: _config(model, options, each, lora) for each in dict.fromkeys(precision.split(","))}
    engine = Engine(url, timeout)
    first = next(iter(configs.values()))
    asked = Asked(tuple(prompt or PROMPTS), first.negative_prompt, count, first.train.steps, kernel, level, seed)
    sender = LoraSender(engine, folder) if lora is not None else None
    try:
        served = engine.info()
        typer.echo(f"{engine.url}: {served.get('model_path', 'an unnamed model')}, version "
                   f"{served.get('version', 'unknown')}")
        found = rows(engine, lambda each: _policy(configs[each], lora, seed), list(configs), asked, sender)
    except EngineError as error:
        raise UserError(f"fault: {error.fault}: {error}") from None
    finally:
        if sender is not None:
            sender.close()
    for line in table(found):
        typer.echo(line)
    if any(row.found for row in found):
        raise typer.Exit(2)


def _config(model: str, options: dict[str, str], precision: str, lora: str | None) -> Any:
    from flowgrpo.contrib.engine.verify import adapter_of

    given: dict[str, Any] = {"rank": 4} if lora in (None, RANDOM) else adapter_of(Path(lora or ""))
    adapter = {f"adapter.{key}": value for key, value in given.items()}
    return parse.load(None, {"train.guidance": 1.0} | options | {"model": model, "precision": precision} | adapter)


def _policy(config: Any, lora: str | None, seed: int) -> Any:
    from flowgrpo.contrib.engine.verify import randomise_lora
    from flowgrpo.device import pick_device
    from flowgrpo.policies import build
    from flowgrpo.policies.pipelines.pipeline import PipelinePolicy

    if build.kind(config) != build.PIPELINE:
        raise UserError(f"flowgrpo verify: got the language model {config.model}, expected a diffusers pipeline")
    policy = PipelinePolicy(build.load(config), None if lora is None else config.adapter, precision=config.precision,
                            device=pick_device(config.device), guidance=config.train.guidance, call=config.call,
                            memory=config.memory, fps=config.fps)
    if lora == RANDOM:
        randomise_lora(policy, seed)
    return policy

"""`flowgrpo contrib lessons`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from flowgrpo.cli.options import Trusted
from flowgrpo.cli.root import contrib_app
from flowgrpo.cli.train import recipe_argument, settings_for
from flowgrpo.errors import UserError
from flowgrpo.storage import atomic


@contrib_app.command("lessons", short_help="Learn lessons for the prompt in place of weights.",
                     context_settings={"ignore_unknown_options": True})
def learn_experience(
    output: Annotated[Path, typer.Option(help="The file of lessons to write: text.system of later commands.")],
    arguments: Annotated[list[str] | None, recipe_argument(
        "As for `train`: each epoch takes train.prompts, train.group samples of each.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs over the prompts.")] = 3,
    edits: Annotated[int, typer.Option(min=1, help="Edits of the lessons by one group, at most.")] = 2,
    lessons: Annotated[int, typer.Option(min=1, help="Lessons that are kept, at most.")] = 32,
    url: Annotated[str, typer.Option(help="The OpenAI-compatible endpoint of the language model that compares the "
                                          "samples.")] = "http://127.0.0.1:8000/v1",
    served: Annotated[str | None, typer.Option(help="Its model, where several are served.")] = None,
    key_env: Annotated[str | None, typer.Option(help="The environment variable with its key.")] = None,
    trusted: Trusted = False,
) -> None:
    """Learn lessons for the prompt in place of weights: a language model compares scored samples."""
    config = settings_for(output, arguments, ("epochs", "edits", "lessons", "url", "served", "key-env"),
                          {"method": "grpo"}, trusted)
    from flowgrpo.contrib import experience
    from flowgrpo.rewards.vlm_judge.client import Endpoint, user

    endpoint = Endpoint(url=url, model=served, key_env=key_env, temperature=0.0, max_tokens=2048)
    batches, sample = _sampling(config)
    library = experience.Library(longest=lessons)

    def ask(question: str) -> str:
        return endpoint.ask(lambda _: user([{"type": "text", "text": question}]), 1)[0].text

    experience.learn(library, batches, sample, ask, experience.Settings(epochs, edits), typer.echo)
    atomic.write_text(output, library.text() + "\n")
    typer.echo(f"{output}: {len(library.entries)} lessons")


def _sampling(config: Any) -> tuple[Any, Any]:
    """Return the functions of a configuration that give an epoch's prompts, and their groups with rewards."""
    import torch

    from flowgrpo import rewards
    from flowgrpo.data import splits
    from flowgrpo.device import pick_device
    from flowgrpo.distributed.signals import promptly
    from flowgrpo.evaluation.plan import Arm
    from flowgrpo.evaluation.samplers import Texts
    from flowgrpo.policies import build
    from flowgrpo.samplers.rollout import seeder

    if build.kind(config) == build.PIPELINE:
        raise UserError(f"learn-experience: got the pipeline {config.model}, expected a language model")
    device, group = pick_device(config.device), config.train.group
    sampler, base = Texts(config.model, config, None, torch.device(device)), Arm(None, {"eval_temperature": 1.0})
    functions, prompts = rewards.compose(config.trained, config.cache), splits.resolve(config)[0]
    rewards.require_modality(functions, "text")
    weights = torch.tensor([config.trained[name].weight for name in functions])

    def drawn(epoch: int) -> list[Any]:
        return splits.draw(prompts, config.train.prompts, epoch, config.seed)

    def sample(shown: list[str], epoch: int) -> tuple[list[list[str]], list[list[float]]]:
        of, seed = drawn(epoch), seeder(config.seed, epoch)
        groups, totals = [], []
        for place, prompt in enumerate(of):
            written = sampler.draw(base, [replace(prompt, text=shown[place])] * group,
                                   [seed(place, number) for number in range(group)])
            scores = promptly(partial(rewards.score, functions, written, [prompt.text] * group,
                                      [prompt.metadata] * group, group, policy=sampler.policy))
            groups.append([str(text) for text in written])
            totals.append((scores @ weights.to(scores)).tolist())
        return groups, totals

    return lambda epoch: [prompt.text for prompt in drawn(epoch)], sample

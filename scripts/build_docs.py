"""Write docs/configuration.md from the fields of the configuration, docs/methods/index.md from presets and parts,
the table of docs/reward_catalogue.md from what the built-in rewards say of themselves, docs/reference/cli.md from the
commands.

    python scripts/build_docs.py            # tests/test_docs.py tells when a file is not current
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

import bench_results
from pydantic.fields import FieldInfo

from flowgrpo import config, methods
from flowgrpo.cli.about import GROUPS
from flowgrpo.config import schema
from flowgrpo.config.base import Section
from flowgrpo.config.reward_rules import RewardRule
from flowgrpo.methods import registry

ROOT = Path(__file__).parent.parent
CONFIGURATION, METHODS = ROOT / "docs" / "configuration.md", ROOT / "docs" / "methods"
BENCH = ROOT / "docs" / "bench_results.json"
HEAD = """# Configuration

A recipe is a YAML file that states differences from these defaults, sections as nested keys:

```yaml
method: mix_grpo
train: {lr: 1e-4, group: 16}
```

On the command line a key is dotted, `--train.lr=1e-4`; `--KEY=VALUE` overrides the recipe. Paths (of prompts, rewards,
models, `output`) are relative to the working directory, not to the recipe. An unknown key, a wrong type and a number
out of range are errors that name the key. Every run writes its resolved configuration to `config.yaml`, which is a
recipe itself. `parts` changes fields of the method's parts, such as `parts: {plan: {size: 2}}`: see
[methods/index.md](methods/index.md).

A recipe can extend another one: a packaged one by its name, or a file relative to its own.

```yaml
extends: flux_dev_24gb            # a packaged recipe, or a file such as base.yaml
memory: {weights: full}
train: {micro_batch: 4}
```

It inherits each key that it does not set: sections such as `train` key by key, `parts` part by part, `reward` and all
other values as a whole. A recipe with a `method` of its own inherits no parts. `name` is not inherited. A base can
extend another recipe. A run's `config.yaml` holds the resulting keys, without `extends`.
"""


def kind(annotation: Any) -> str:
    """Type as a reader of YAML names it."""
    if annotation is type(None):
        return "null"
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin is typing.Annotated:
        return kind(inner[0]) + limits(inner[1])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(kind, inner)))
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "keys"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "values"}
    if origin is dict:
        return f"names to {kind(inner[1])}"
    if origin in (list, tuple):
        return f"list of {' and '.join(dict.fromkeys(map(kind, inner)))}"
    return names[annotation]


def limits(field: Any) -> str:
    """Range of a number, such as ", >= 1"."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found = [f"{sign} {getattr(rule, name)}" for rule in getattr(field, "metadata", ()) for name, sign in signs.items()
             if getattr(rule, name, None) is not None]
    return "".join(f", {text}" for text in found)


def row(key: str, field: FieldInfo) -> str:
    default = json.dumps(field.default, ensure_ascii=False)
    return f"| `{key}` | {kind(field.annotation)}{limits(field)} | `{default}` | {field.description or ''} |"


def section(title: str, about: str, fields: dict[str, FieldInfo]) -> str:
    table = ["| key | type | default | description |", "|---|---|---|---|", *(row(*item) for item in fields.items())]
    return "\n".join([f"## {title}", "", about, "", *table, ""])


def configuration() -> str:
    """Text of docs/configuration.md."""
    fields, inner = schema.fields(), schema.sections()
    parts = [HEAD, section("At the top", _about(config.Config),
                           {key: field for key, field in fields.items() if "." not in key})]
    parts += [section(name, _about(config.Config.model_fields[name].annotation),
                      {key: field for key, field in fields.items() if key.startswith(name + ".")}) for name in inner]
    rule = {f"reward.NAME.{key}": field for key, field in RewardRule.model_fields.items()}
    return "\n".join([*parts, section("reward.NAME", f"{_about(RewardRule)} See [rewards.md](rewards.md).", rule)])


def _about(model: type) -> str:
    return " ".join(model.__doc__.split())


METHODS_HEAD = """# Methods

A method consists of five stages: rollout, target, advantage, loss and prompt order. A preset (`--method=mix_grpo`)
fills them in, and `mix_grpo+grpo_guard` applies presets from left to right. A preset sets the algorithm only: batch
size, steps and guidance come from the recipe. `parts` changes single settings, or replaces a component with a `type`:

```yaml
method: mix_grpo
parts: {plan: {size: 2, order: random}, kernel: {type: CPS, level: 0.8}}
```

| you have | start with |
|---|---|
| a flow model, any reward | [`mix_grpo`](windows.md#mix_grpo), with [`grpo_guard`](modifiers.md#grpo_guard) |
| a flow model, few steps | [`diffusion_nft`](clean_latents.md#diffusion_nft) or [`awm`](clean_latents.md#awm) |
| SD 1.5 or SDXL, which predict noise | [`ddpo`](sde_steps.md#ddpo) |
| a differentiable reward and little time | [`draft`](reward_gradients.md#draft) |
| recorded pairs of images | [`diffusion_dpo`](clean_latents.md#diffusion_dpo) |
| a language model | [`grpo`](text_policy_gradients.md#grpo); if long [`dapo`](text_policy_gradients.md#dapo) |

**Notation.** The noise level sigma runs from 1 (noise) to 0 (data) on a grid of T steps. A step goes from sigma to
sigma', and D = sigma - sigma'. The model's output is v; it predicts the data x0 = x - sigma v and the noise
x1 = x + (1 - sigma) v. An SDE step samples one Gaussian N(mean, s^2), where s is the std of the whole step and z the
noise. A group is the G samples of one prompt, and A is a sample's advantage. NFE counts evaluations of the denoiser.

**Shared by all.** Ratio r = exp(log p_new - log p_old), loss max(-A r, -A clip(r, 1 - e, 1 + e)) with e = 1e-4 and A
within +-5, summed over trained decisions and divided by their number. A recorded latent is rounded to the pipeline's
dtype *before* it is scored, so that the first ratio is 1. The last step adds no noise and is never trained: its noise
would remain in the image, and its std can vanish; as an Euler step to sigma' = 0 it gives x0. The network receives
1000 sigma as it is (DanceGRPO and MixGRPO round it down to an integer). A group without variance has advantage 0.

**Clip ranges** are in the unit of a *mean* log-density: log p is the mean over the latent's values of the full normal
log-density, as in every released trainer. The joint log-ratio is as many times larger as there are values. The
released CPS drops 1/(2 s^2) from it, ours is the true density: a released clip range e on it corresponds to e/(2 s^2)
here. With `log_ratio: {type: SquaredErrorRatio}`, which is the released one, it is taken as it is.

**Models that predict noise or v** (SD 1.5, SDXL, CogVideoX) take all methods for images except `reinflow`,
`diffusion_nft`, `awm`, `dgpo` and `crd`, which are not supported there. The run
replaces components for flow matching only, and prints it. The SDE step becomes `FlowDDIM` with eta 1, which is DDIM
here, the solver `Euler`, the step weight `Uniform`, `tail` 1.0 and `strides` [1].

**At inference** `--rlg W` guides a tuned model by its base: [`rlg`](modifiers.md#rlg). `--best-of N --by REWARD` of
`sample` and `eval` generates N samples and keeps the one with the highest reward, such as one that
`flowgrpo reward train` learned (Gen-Drive, 2410.05582); an image records N, the reward and its score.
"""

METHODS_TAIL = """## How to add a method

A method of your own needs no change here: see [Methods of your own](../extending.md). To add one to the package:

1. Is it a change of one thing? Find the place above whose parts are called as it would be.
2. If no part does it, write one beside them: a frozen dataclass whose fields are its configuration, with `__call__`.
   A part that no preset of images names goes into a folder of `flowgrpo/contrib/`, with its name in `LATER` of
   `flowgrpo/methods/registry.py`.
   It extends the base class of its place where there is one; `flowgrpo/methods/parts.py` has the others.
3. Its docstring says what, with shapes and source: `(Name, 2501.01234)` names its paper.
4. Refuse impossible fields in `__post_init__`, in one line: what was got, what was expected.
5. Test it on values worked by hand, in the test file of its module.
6. Write the preset in a module of `flowgrpo/methods/presets/`, a `method.having(...)` of what defines it. One of
   language models goes into `flowgrpo/text/presets/`, its name into `TEXT` of `flowgrpo/methods/presets/__init__.py`.
7. Its first line is what `flowgrpo list methods` shows: `Name: what it does (2501.01234).`
8. Test its defining property in `tests/methods/test_presets.py` and its defaults in `tests/methods/test_methods.py`.
9. Write a section `## <preset>` in the page of its family in `docs/methods/`, as the others: idea and paper, formula as
   implemented, parameters, when to use it, differences from the paper, recipe.
10. Run `python scripts/build_docs.py` and `make lint`.
"""

PLACES = {"target": "what the loss scores",
          "kernel": "the Gaussian transition of a step that draws noise",
          "decoding": "what the tokens of a language model are drawn from",
          "plan": "which steps draw noise, split and are trained",
          "solver": "the steps that draw no noise",
          "tail": "how many steps are left behind the last one that draws noise; or a share of them, a number",
          "shaping": "what rewards become before they are compared",
          "advantage": "how the rewards of a group are compared",
          "selection": "which samples are trained",
          "log_ratio": "how far the policy has moved on a decision",
          "surrogate": "the loss of a decision",
          "step_weight": "weight of a step of the sigma grid",
          "reduction": "what the loss is a mean over",
          "kl": "the regulariser, a distance to the reference",
          "kl.schedule": "what becomes of the regulariser's weight from epoch to epoch",
          "reference": "the policy that the regulariser holds to",
          "rehearsal": "a divergence from the base model on its own recorded samples",
          "tuning": "a supervised term towards the best sample",
          "data": "a supervised term beside the loss",
          "data.source": "where the examples of a supervised term come from",
          "data.balance": "the weights of the loss's gradient and of a supervised term's",
          "data.token_weight": "how much a token of a supervised answer counts",
          "preview": "how initial noises are chosen",
          "times": "when finals are noised and trained in place of recorded steps",
          "lag": "how slowly the old policy follows",
          "backprop": "how the last steps become data whose reward's gradient is followed",
          "relaxation": "what stands for drawn tokens where a reward's gradient is followed through an unmasking",
          "adapted": "which modules are trained",
          "draws": "how the texts of a group are drawn",
          "spread": "how the advantage of a sample is spread over its tokens or steps",
          "curriculum": "which prompts an epoch begins with",
          "expansion": "input under which prompts are sampled, where the loss reads another",
          "redraw": "which groups are replaced by other prompts, or added",
          "replay": "which recorded groups are trained again",
          "pruning": "which of many begun samples are finished, by their clean predictions",
          "progress": "credit of every step, by the reward of the clean prediction before it",
          "value": "a language model's value model, whose advantages are per token, or how the critic of edits learns",
          "edit": "how a small policy edits the final latents of a model that stays as it is"}
PAPER = re.compile(r"\b\d{4}\.\d{5}\b")


NULLS = ("By their key in `parts`; a field without a value has to be given. `null` takes an optional part away: "
         "preview, shaping, selection, spread, value, data, expansion, redraw, replay, and the schedule of a KL or of "
         "a temperature.")


def methods_index() -> str:
    """Text of docs/methods/index.md."""
    parts = [listing(key, about) for key, about in PLACES.items()]
    return "\n".join([
        METHODS_HEAD, "## Presets", "", *presets(),
        "## Parts", "", NULLS, "", *parts, METHODS_TAIL])


BENCHED = """`bench` is the accuracy on [the benchmark](../benchmark.md), of the first of these models that a preset
trained. Their bases have: {bases}. Presets without a number were
not compared, or only on top of others."""


def presets() -> list[str]:
    """Table of the presets of every kind, under its heading."""
    results = bench_results.load(BENCH)
    bases = ", ".join(f"`{model['model']}` {model['base']:.3f}" for model in results)
    found = {method["label"]: f"{method['accuracy']:.3f}" for model in reversed(results) for method in model["methods"]}
    lines = [BENCHED.format(bases=bases), ""]
    for title, modules in GROUPS.items():
        rows = [f"| [`{name}`]({page_of(name)}) | {first(preset)} | {found.get(name, '')} |"
                for module in modules for name, preset in methods.PRESETS.items()
                if preset.__module__ == f"flowgrpo.{module}"]
        lines += [f"### {title}", "", *table("preset | what it does | bench", rows)]
    return lines


def table(heads: str, rows: list[str]) -> list[str]:
    return [f"| {heads} |", "|---" * (heads.count("|") + 1) + "|", *rows, ""]


def listing(key: str, about: str) -> str:
    """Parts that go to one place of a method."""
    rows = [f"| `{name}` | {values(part)} | {first(part)} |"
            for name, part in registry.TYPES.items() if registry.PLACES[name] == key]
    base = registry.BASES.get(key)
    extends = [f"A part of your own extends `{base.__module__}.{base.__name__}`.", ""] if base else []
    return "\n".join([f"### `{key}`: {about}", "", *extends, *table("part | fields | what it is", rows)])


def values(part: Any) -> str:
    """Fields of a part with their defaults, such as `size: 4`."""
    fields = {field.name: field.default for field in dataclasses.fields(part)}
    return ", ".join(f"`{name}`" if default is dataclasses.MISSING else f"`{name}: {shown(default)}`"
                     for name, default in fields.items()) or "none"


def shown(value: Any) -> str:
    """Default as a recipe writes it."""
    if not dataclasses.is_dataclass(value):
        return json.dumps(value)
    other = [f"{field.name}: {shown(getattr(value, field.name))}" for field in dataclasses.fields(value)]
    return "{" + ", ".join([f"type: {type(value).__name__}", *other]) + "}"


def first(thing: Any) -> str:
    """First sentence of a docstring."""
    return re.split(r"(?<!eq)\.(?: |$)", " ".join(thing.__doc__.split()))[0].replace("|", "\\|")


def page_of(name: str) -> str:
    """Return the page and the heading of a preset, such as windows.md#mix_grpo."""
    for page in sorted(METHODS.glob("*.md")):
        if f"\n## {name}\n" in page.read_text(encoding="utf-8"):
            return f"{page.name}#{name}"
    raise SystemExit(f"the preset {name} has no section: write `## {name}` with its formula and a recipe in a page of "
                     f"{METHODS.relative_to(ROOT)}/")


COMMANDS_HEAD = """# Commands

`RUN` is a run's folder, one of its checkpoints (`RUN/checkpoints/epoch-00050`, or `RUN --epoch 50`), or
`hub:OWNER/NAME`. `MODEL` is `starter`, a folder, a file, a hub id or a run. A mistake is one line and exit code 2,
before a model is loaded. An option without a default changes nothing when it is left out, or its meaning says what it
takes then. `train` takes such values from the recipe, then from the [defaults](../configuration.md).

"""


def commands() -> str:
    """Text of docs/reference/cli.md."""
    import typer

    from flowgrpo.cli import app

    parts, every = [], dict[str, Any]()
    root = typer.main.get_command(app)
    for name in root.list_commands(None):
        inner = getattr(root.commands[name], "commands", {name: root.commands[name]})
        every |= {name if each is root.commands[name] else f"{name} {of}": each for of, each in inner.items()}
    for name, command in every.items():
        about = " ".join((command.help or "").split())
        usage = " ".join([f"flowgrpo {name}", *(_usage(parameter) for parameter in command.params), "[OPTIONS]"])
        shown = [parameter for parameter in command.params if parameter.name != "help"]
        rows = [f"| {_spelling(parameter)} | {' '.join((parameter.help or '').split())} | {_default(parameter)} |"
                .replace("\\[", "[") for parameter in shown]
        listed = ["", *table("argument or option | meaning | default", rows)] if rows else [""]
        parts.append("\n".join([f"## {name}", "", about, "", f"`{' '.join(usage.split())}`", *listed]))
    return COMMANDS_HEAD + "\n".join(parts).rstrip() + "\n"


def _usage(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        return ""
    word = (parameter.metavar or parameter.name.upper()) + ("..." if parameter.nargs == -1 else "")
    return word if parameter.required else f"[{word}]"


def _spelling(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        return "`" + "`, `".join([*parameter.opts, *parameter.secondary_opts]) + "`"
    word = parameter.metavar or parameter.name.upper()
    return f"<code>{word.replace('|', '&#124;')}</code>" if "|" in word else f"`{word}`"


def _default(parameter: Any) -> str:
    """Return the default of an argument or option; empty if its help says what happens without it."""
    if parameter.required:
        return "required"
    if parameter.param_type_name == "option" and parameter.is_flag:
        return "off"
    return "" if parameter.default in (None, "") else f"`{parameter.default}`"


CATALOGUE = ROOT / "docs" / "reward_catalogue.md"
ALL_REWARDS = """## All rewards

Generated by `scripts/build_docs.py` from what the rewards say of themselves: edit their docstrings. Nothing is imported
or downloaded before a recipe names a reward. `needs`: an extra of flowgrpo (`pip install 'flowgrpo[clip]'`), or a
package.
"""


def reward_catalogue() -> str:
    """Text of docs/reward_catalogue.md: what is written there, and the table of all rewards."""
    from flowgrpo.rewards import BUILT_IN, locate
    from flowgrpo.rewards.table import cells, listed

    rows = []
    for reward in (reward for reward in listed() if reward["name"] in BUILT_IN):
        _, modality, low_high, needs, licence, _ = cells(reward)
        module = BUILT_IN[reward["name"]].partition(":")[0]
        thing = locate(reward["name"])
        papers = dict.fromkeys(PAPER.findall(f"{sys.modules[module].__doc__} {thing.__doc__}"))
        source = ", ".join([f"`{module.replace('.', '/')}.py`",
                            *(f"[{number}](https://arxiv.org/abs/{number})" for number in papers)])
        facts = [f"`{reward['name']}`", first(thing), modality, low_high, needs, licence, source]
        rows.append(f"| {' | '.join(facts)} |")
    heads = "name | what it scores | modality | range | needs | licence | source"
    written = CATALOGUE.read_text(encoding="utf-8").partition(ALL_REWARDS.partition("\n")[0])[0]
    return written + "\n".join([ALL_REWARDS, *table(heads, rows)])


def reward_facts() -> str:
    """Return the facts of the built-in rewards as JSON, for a listing that imports none of them."""
    from flowgrpo.rewards import BUILT_IN
    from flowgrpo.rewards.table import stated

    facts = {name: vars(about) | {"does": does} for name in sorted(BUILT_IN) for about, does, _ in [stated(name)]}
    return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"


PAGES = {ROOT / "flowgrpo" / "rewards" / "built_in.json": reward_facts,  # first: pages are made of it
         CONFIGURATION: configuration, METHODS / "index.md": methods_index,
         CATALOGUE: reward_catalogue, ROOT / "docs" / "reference" / "cli.md": commands}

if __name__ == "__main__":
    for target, text in PAGES.items():
        target.write_text(text(), encoding="utf-8")
        print(f"{target} written")

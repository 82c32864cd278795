"""Write docs/configuration.md from the fields of the configuration, docs/methods/index.md from presets,
docs/reference/parts.md and flowgrpo/methods/names.json from parts, flowgrpo/config/options.py from sections,
flowgrpo/rewards/built_in.json and the table of docs/reward_catalogue.md from the built-in rewards,
docs/reference/cli.md from the commands.

    python scripts/docs/build_docs.py            # tests/test_docs.py tells when a file is not current
"""

import ast
import dataclasses
import json
import os
import re
import sys
import textwrap
import types
import typing
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from flowgrpo import config, methods
from flowgrpo.cli.about import GROUPS
from flowgrpo.config import schema
from flowgrpo.config.base import Section
from flowgrpo.config.reward_rules import RewardRule
from flowgrpo.methods import registry
from flowgrpo.parts import settings

ROOT = Path(__file__).parents[2]
CONFIGURATION, METHODS = ROOT / "docs" / "configuration.md", ROOT / "docs" / "methods"
HEAD = """# Configuration

A recipe is a YAML file that states differences from these defaults:

```yaml
method: mix_grpo
train: {lr: 1e-4, group: 16}
```

On the command line a key is dotted, `--train.lr=1e-4`, and overrides the recipe. Paths are relative to the working
directory. In brackets are the default and, where it does not show it, the type. Every run writes its resolved
configuration to `config.yaml`, which is a recipe itself.

A recipe can extend another one: a packaged one by its name, or a file relative to its own.

```yaml
extends: flux_dev_24gb            # a packaged recipe, or a file such as base.yaml
memory: {weights: full}
train: {micro_batch: 4}
```

It inherits each key that it does not set: sections such as `train` key by key, `parts` part by part, `reward` and all
other values as a whole. A recipe that sets `method` inherits no parts. `name` is not inherited.
"""


PLAIN = ("text", "integer", "number", "true or false")  # types that a default shows


def kind(annotation: Any) -> str:
    """Type as a reader of YAML names it."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is typing.Annotated:
        return kind(inner[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(kind(each) for each in inner if each is not type(None)))
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "keys"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "values"}
    if origin is dict:
        return f"names to {kind(inner[1])}"
    if origin in (list, tuple):
        return f"list of {' and '.join(dict.fromkeys(map(kind, inner)))}"
    return names[annotation]


def item(key: str, field: FieldInfo) -> str:
    default = json.dumps(field.default, ensure_ascii=False)
    described = re.sub(r"; see docs/[\w/]+\.md$", "", field.description or "")
    about = f": {described}" if described else ""
    name = kind(field.annotation)
    shown_by_default = name in PLAIN and field.default not in (None, {}, [])
    return f"- `{key}` (`{default}`{'' if shown_by_default else f'; {name}'}){about}"


def section(title: str, about: str, fields: dict[str, FieldInfo]) -> str:
    return "\n".join([f"## {title}", "", about, "", *(item(*field) for field in fields.items()), ""])


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


METHODS_HEAD = r"""# Methods

A preset (`--method=mix_grpo`) sets the algorithm only: batch size, steps and guidance come from the recipe.
`mix_grpo+grpo_guard` applies presets from left to right. `parts` changes single settings, or replaces a component with
a `type` ([all parts](../reference/parts.md)). Save a section's recipe under the name in its first line, which is the
command that runs it. Most extend a starter and download nothing.

```yaml
method: mix_grpo
parts: {plan: {size: 2, order: random}, kernel: {type: CPS, level: 0.8}}
```

| you have | start with |
|---|---|
| a flow model, any reward | [`mix_grpo`](windows.md#mix_grpo), with [`grpo_guard`](modifiers.md#grpo_guard) |
| a flow model of many steps | [`diffusion_nft`](clean_latents.md#diffusion_nft) or [`awm`](clean_latents.md#awm) |
| LCM, TCD | [`rlcm`](other_policies.md#rlcm), the default of such a model |
| schnell, Z-Image-Turbo, a flow's Lightning LoRA | [`flow_grpo`](sde_steps.md#flow_grpo) with kernel CPS, the default |
| SDXL-Turbo, SDXL-Lightning | [`ddpo`](sde_steps.md#ddpo), the default |
| SD 1.5 or SDXL (noise) | [`mix_grpo`](windows.md#mix_grpo), as in the recipes; [`ddpo`](sde_steps.md#ddpo) |
| a differentiable reward and little time | [`draft`](reward_gradients.md#draft) |
| recorded pairs of images | [`diffusion_dpo`](clean_latents.md#diffusion_dpo) |
| a language model | [`grpo`](text_policy_gradients.md#grpo); if long [`dapo`](text_policy_gradients.md#dapo) |

## Notation

| symbol | meaning |
|---|---|
| $\sigma$, $\sigma'$, $D$ | the noise level, 1 (noise) to 0 (data) in T steps; the next one; $D = \sigma - \sigma'$ |
| $v$, $x_0$, $x_1$ | the model's output; the data that it predicts, $x - \sigma v$; the noise, $x + (1-\sigma)v$ |
| $\mu$, $s$, $z$ | an SDE step samples $\mathcal{N}(\mu, s^2)$; s is the std of the whole step, z its noise |
| $G$, $R$, $A$ | samples of one prompt (a group); a sample's reward; its advantage |
| $r$ | $\exp(\log p_\text{new} - \log p_\text{old})$ |
| $\overline{y}$ | the mean over a latent's values, or over a group |
| NFE | evaluations of the denoiser |

## Shared by all methods for images

$$
\mathcal{L} = \max\bigl(-A r,\; -A\operatorname{clip}(r, 1-\epsilon, 1+\epsilon)\bigr), \qquad \epsilon = 10^{-4}
$$

- It is the mean over trained decisions. A is within +-5; a group without variance has A = 0.
- A recorded latent is rounded to the pipeline's dtype *before* it is scored, so that the first ratio is 1.
- The last step adds no noise and is never trained.
- Clip ranges are in the unit of a *mean* log-density: log p is the mean over the latent's values. The released CPS
  drops $1/(2s^2)$ from it, as does `log_ratio: {type: SquaredErrorRatio}`.
- Models that predict noise or v (SD 1.5, SDXL, CogVideoX) take all methods but `reinflow`, `diffusion_nft`, `awm`,
  `dgpo` and `crd`, with DDIM as the SDE step.
- At inference `--rlg W` guides a tuned model by its base ([`rlg`](modifiers.md#rlg)). `--best-of N --by REWARD` of
  `sample` and `eval` keeps the best of N samples (Gen-Drive, 2410.05582).
"""

PARTS_HEAD = """# Parts of a method

```
flowgrpo list parts kernel                 # with the range of each field
```

`parts: {plan: {size: 2}}` changes one field of a part, `parts: {kernel: {type: CPS}}` replaces the part, and `null`
removes an optional one. In brackets are the fields with their defaults; a field without a default is required.
[Methods](../methods/index.md) explains the parts of each
preset, and [contracts](../extending.md#contracts) the class that your own part extends.
"""

PLACES = {"target": "what the loss scores",
          "kernel": "the SDE step: the Gaussian of a step that adds noise",
          "decoding": "the distribution that tokens of a language model are sampled from",
          "plan": "which steps add noise, split and are trained",
          "solver": "the steps that add no noise",
          "tail": "how many steps are left after the last one that adds noise, or a share of them",
          "shaping": "what rewards become before they are compared",
          "advantage": "how the rewards of a group are compared",
          "selection": "which samples are trained",
          "log_ratio": "how far the policy has moved on a decision",
          "surrogate": "the loss of a decision",
          "step_weight": "weight of a step of the sigma grid",
          "reduction": "what the loss is a mean over",
          "kl": "the regulariser, a distance to the reference",
          "kl.schedule": "the regulariser's weight over the epochs",
          "reference": "the policy that the regulariser holds to",
          "rehearsal": "a divergence from the base on its own samples",
          "distil": "how a student of few steps is held to its base's distribution",
          "tuning": "a supervised term towards the best sample",
          "data": "a supervised term beside the loss",
          "data.source": "where the examples of a supervised term come from",
          "data.balance": "weights of the loss and of a supervised term",
          "data.token_weight": "how much a token of a supervised answer counts",
          "preview": "how initial noises are chosen",
          "times": "the times at which finals are noised and trained",
          "lag": "how slowly the old policy follows",
          "backprop": "which steps a reward's gradient follows",
          "relaxation": "what replaces sampled tokens for a reward's gradient",
          "adapted": "which modules are trained",
          "draws": "how the completions of a group are sampled",
          "spread": "how the advantage of a sample is spread over its tokens or steps",
          "curriculum": "which prompts an epoch begins with",
          "expansion": "another input under which prompts are sampled",
          "redraw": "which groups are replaced by other prompts, or added",
          "replay": "which recorded groups are trained again",
          "pruning": "which begun samples are finished",
          "progress": "credit of every step, by the reward of its clean prediction",
          "value": "a value model, whose advantages are per token, or how the critic of edits learns",
          "edit": "how a small policy edits final latents"}
PART_NAMES = ROOT / "flowgrpo" / "methods" / "names.json"
CLAUSE = re.compile(r"(?<!eq)\.(?: |$)|: |; | \((?=[A-Za-z][\w-]*[ ,']|[A-Z]|\d{4}\.)|, \[")
PAPER = re.compile(r"\b\d{4}\.\d{5}\b")


def methods_index() -> str:
    """Text of docs/methods/index.md."""
    return "\n".join([METHODS_HEAD, "## Presets", "", *presets()])


def parts() -> str:
    """Text of docs/reference/parts.md."""
    return "\n".join([PARTS_HEAD, *(listing(key, about) for key, about in PLACES.items())])


def presets() -> list[str]:
    """Lists of the presets of every kind, under its heading."""
    lines = []
    for title, modules in GROUPS.items():
        items = [f"- [`{name}`]({page_of(name)}): {line(preset)}" for module in modules
                 for name, preset in methods.PRESETS.items() if preset.__module__ == f"flowgrpo.{module}"]
        lines += [f"### {title}", "", *items, ""]
    return lines


def line(preset: Any) -> str:
    """First sentence of a preset's docstring, without the paper and the base methods, which its page has."""
    said = re.sub(r" over (?:a|any) base method(?: of (?:causal )?language models)?(?:, \w+ without one)?| \([^()]*\)$",
                  "", first(preset))
    title, _, does = said.partition(": ")
    if re.sub(r"\W", "", title).lower() == preset.__name__.replace("_", ""):  # the name says it already
        said = does
    return shortened(said, ", ", 12)


def listing(key: str, about: str) -> str:
    """Parts that go to one place of a method."""
    names = [name for name in registry.TYPES if registry.PLACES[name] == key]
    shared = common([registry.TYPES[name] for name in names])
    items = [f"- `{name}`{values(registry.TYPES[name], shared)}: {brief(registry.TYPES[name], 10)}" for name in names]
    fields = f" All have `{', '.join(shared.values())}`." if shared else ""
    return "\n".join([f"## `{key}`", "", f"{about[0].upper()}{about[1:]}.{fields}", "", *items, ""])


def part_names() -> str:
    """Text of flowgrpo/methods/names.json: the classes with the decorator `part` by place and module, those of the core
    first, and the presets of language models by module."""
    found: dict[str, dict[str, list[str]]] = {place: {} for place in PLACES}
    package, rooms = ROOT / "flowgrpo", ("contrib", "text")
    files = {".".join(file.relative_to(package).with_suffix("").parts): file for file in sorted(package.rglob("*.py"))}
    for module, file in sorted(files.items(), key=lambda item: [item[0].startswith(room) for room in rooms]):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "part" and call.args:
                    found[ast.literal_eval(call.args[0])].setdefault(module, []).append(node.name)
    presets = {module: [node.name for node in ast.parse(file.read_text(encoding="utf-8")).body
                        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
               for module, file in files.items() if module.startswith("text.presets.")}
    return json.dumps({"parts": found, "presets": presets}, indent=1) + "\n"


REWARD_FACTS = ROOT / "flowgrpo" / "rewards" / "built_in.json"


def reward_facts() -> str:
    """Text of flowgrpo/rewards/built_in.json: places and facts of the objects with the decorator `built_in`, by name,
    for a listing that imports none of them."""
    from flowgrpo.cli.reward_table import described
    from flowgrpo.packages import load

    found: dict[str, str] = {}
    for file in sorted((ROOT / "flowgrpo").rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "built_in":
                    name = ast.literal_eval(call.args[0])
                    assert name not in found, f"two rewards are called {name}"
                    found[name] = f"{module}:{node.name}"
    facts = {name: {"place": found[name]} | vars(about) | {"does": does, "found_by": reward.found_by}
             for name in sorted(found) for reward in [load(found[name])] for about, does in [described(reward)]}
    return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"


def common(parts: list[Any]) -> dict[str, str]:
    """Return the fields that several parts share with equal defaults, by their names."""
    if len(parts) < 3:
        return {}
    first, *others = map(fields, parts)
    return {name: text for name, text in first.items() if all(other.get(name) == text for other in others)}


def fields(part: Any) -> dict[str, str]:
    """Return the fields of a part with their defaults and choices, without the ranges of numbers."""
    return {name: re.sub(r" \((?!\w+\|)[^()]*\)$", "", text) for name, text in settings(part).items()}


def values(part: Any, shared: dict[str, str]) -> str:
    """Fields of a part with their defaults in brackets, such as `size=4`; of one that extends another, its own."""
    base = next((base for base in part.__mro__[1:] if base in registry.TYPES.values()), None)
    known = {field.name: field.default for field in dataclasses.fields(base)} if base else {}
    own = ", ".join(fields(part)[field.name] for field in dataclasses.fields(part)
                    if (field.name not in known or field.default != known[field.name]) and field.name not in shared)
    listed = [f"those of `{base.__name__}`"] if base and known else []
    listed += [f"`{own}`"] if own else []
    return f" ({', '.join(listed)})" if listed else ""


def brief(thing: Any, most: int = 100) -> str:
    """First clause of a docstring, with about `most` words, and the first paper that it names."""
    text = " ".join(thing.__doc__.split())
    clause = shortened(CLAUSE.split(text)[0], ", ", most).replace("|", "\\|")
    found = PAPER.search(text)
    return clause + (f" ([{found[0]}](https://arxiv.org/abs/{found[0]}))" if found else "")


def shortened(text: str, end: str, most: int) -> str:
    """Return a text up to the first `end` after which it would have more than `most` words, outside of brackets.

    What is left has at least half of that many words.
    """
    pieces = text.split(end)
    for count in range(1, len(pieces)):
        kept, longer = end.join(pieces[:count]), end.join(pieces[:count + 1])
        whole = all(kept.count(a) == kept.count(b) for a, b in ("()", "[]", "{}"))
        if whole and len(longer.split()) > most and 2 * len(kept.split()) >= most:
            return kept
    return text


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

```sh
flowgrpo --help
```

`flowgrpo COMMAND --help` prints every option in full. Defaults are in brackets; an option without one is off, or of
`train` the recipe's.

| argument | value |
|---|---|
| `RECIPE` | a YAML file, or the name of a packaged recipe, such as `sdxl_24gb` |
| `--KEY=VALUE` | any key of the [configuration](../configuration.md), such as `--train.lr=1e-4` |
| `MODEL` | `starter`, a folder, a file, a hub id or a run |
| `RUN` | a run's folder, one of its checkpoints (`RUN --epoch 50`), or `hub:OWNER/NAME[@REVISION]` |
| `WORD...` | print only the lines that have all of these words |

A mistake is one line and exit code 2. A run that trained nothing has exit code 3; an interrupt 130.

"""
# Options with one meaning in all commands, and arguments that the head explains.
SHARED = {f"--{name}" for name in (
    "args", "batch", "best-of", "by", "device", "enhancer", "epoch", "generates", "guidance", "json", "lora", "port",
    "precision", "resume", "rlg", "seed", "steps", "temperature", "trust", "trust-run")}
EXPLAINED = {"RECIPE|--KEY=VALUE", "MODEL|--KEY=VALUE", "--KEY=VALUE", "RUN", "MODEL_OR_RUN", "WORD"}


def commands() -> str:
    """Text of docs/reference/cli.md."""
    import typer

    from flowgrpo.cli import app

    every, lines = dict[str, Any](), dict[str, Counter[str]]()
    root = typer.main.get_command(app)
    for name in root.list_commands(None):
        inner = getattr(root.commands[name], "commands", {name: root.commands[name]})
        every |= {name if each is root.commands[name] else f"{name} {of}": each for of, each in inner.items()}
    for command in every.values():
        for parameter in command.params:
            if (spelled := parameter.opts[0]) in SHARED:
                lines.setdefault(spelled, Counter())[_item(parameter)] += 1
    shared = sorted(count.most_common(1)[0][0] for count in lines.values())
    sections = ["\n".join(["## Shared options", "", "Options of several commands:", "", *shared, ""])]
    for name, command in every.items():
        about = re.split(r"(?<=\w)\. (?=[A-Z])", " ".join((command.help or "").split()))[0].rstrip(".")
        about = shortened(shortened(about, "; ", 14), ": ", 14) + "."
        usage = " ".join([f"flowgrpo {name}", *(_usage(parameter) for parameter in command.params)])
        shown = [parameter for parameter in command.params
                 if parameter.name != "help" and not getattr(parameter, "hidden", False)
                 and not (parameter.param_type_name == "argument"
                          and (parameter.metavar or parameter.name.upper()).strip("[]") in EXPLAINED)]
        own = [_item(parameter) for parameter in shown if parameter.opts[0] not in SHARED]
        also = ", ".join(_spelling(parameter) for parameter in shown if parameter.opts[0] in SHARED)
        own += [f"- [Shared](#shared-options): {also}"] if also else []
        sections.append("\n".join([f"## {name}", "", about, "", f"`{' '.join(usage.split())}`", "", *own, ""]))
    return COMMANDS_HEAD + re.sub("\n{3,}", "\n\n", "\n".join(sections)).rstrip() + "\n"


def _item(parameter: Any) -> str:
    """Return the line of an argument or option, with the first clause of its help."""
    about = re.split(r"(?<=[\w)])\. ", " ".join((parameter.help or "").split()))[0].rstrip(".")
    for end, most in (("; ", 8), (": ", 9), (", or ", 9), (", ", 11)):
        about = shortened(about, end, most)
    default = "" if parameter.opts[0] in SHARED else _default(parameter)
    return f"- {_spelling(parameter)}{default}{f': {about}' if about else ''}".replace("\\[", "[")


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
    """Return the default of an argument or option in brackets; empty for a flag and without one."""
    if parameter.required:
        return " (required)" if parameter.param_type_name == "option" else ""
    flag = parameter.param_type_name == "option" and parameter.is_flag
    return "" if flag or parameter.default in (None, "") else f" (`{parameter.default}`)"


CATALOGUE = ROOT / "docs" / "reward_catalogue.md"
ALL_REWARDS = """## All rewards

In brackets are the range where it is bounded, what it needs (an extra of flowgrpo, `pip install 'flowgrpo[clip]'`, or a
package), and the licence unless it is Apache-2.0. [Rewards for language models](text_rewards.md#the-rewards) describes
those without a description.
"""


def reward_catalogue() -> str:
    """Text of docs/reward_catalogue.md: what is written there, and the lists of all rewards."""
    from flowgrpo.cli.reward_table import list_rewards, range_of
    from flowgrpo.rewards import BUILT_IN, locate

    kinds: dict[str, list[str]] = {}
    alike: dict[str, dict[str, list[str]]] = {}
    tables = (ROOT / "docs" / "text_rewards.md").read_text(encoding="utf-8")
    described = {name for row in re.findall(r"^- (`[\w, `]+`)", tables, re.M) for name in row.split(", ")}
    for reward in (reward for reward in list_rewards() if reward["name"] in BUILT_IN):
        modality, low_high, needs, licence = reward["modality"], range_of(reward), reward["needs"], reward["licence"]
        facts = [low_high] * ("inf" not in low_high) + [f"needs {needs}"] * (needs != "")
        facts += [licence.removeprefix("Apache-2.0, ")] * (licence != "Apache-2.0")
        brackets = f" ({'; '.join(facts)})" if facts else ""
        if f"`{reward['name']}`" in described:  # rewards with the same facts share a line
            alike.setdefault(modality, {}).setdefault(brackets, []).append(f"`{reward['name']}`")
        else:
            about = brief(locate(reward["name"]), 12)
            kinds.setdefault(modality, []).append(f"- `{reward['name']}`{brackets}: {about}")
    for modality, groups in alike.items():
        kinds.setdefault(modality, []).extend(f"- {', '.join(names)}{brackets}" for brackets, names in groups.items())
    written = CATALOGUE.read_text(encoding="utf-8").partition(ALL_REWARDS.partition("\n")[0])[0]
    lists = [line for kind in sorted(kinds) for line in (f"### {kind.replace('/', ', ')}", "", *kinds[kind], "")]
    return written + "\n".join([ALL_REWARDS, *lists])


OPTIONS = ROOT / "flowgrpo" / "config" / "options.py"
OPTIONS_HEAD = '''"""Types of the options of `flowgrpo.align`: the keys of the configuration, sections as dictionaries.

Written by scripts/docs/build_docs.py from the sections and the features. A type checker finds a wrong key or type.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

'''
OWN_ARGUMENTS = {"model", "method", "prompts", "reward"}  # of `align`, by name


def option_types() -> str:
    """Text of flowgrpo/config/options.py: a TypedDict for every section, and for what their values hold."""
    classes: dict[str, str] = {}

    def written(annotation: Any) -> str:
        origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is typing.Literal:
            return f"Literal[{', '.join(json.dumps(value) for value in inner)}]"
        if origin is typing.Annotated:
            return written(inner[0])
        if origin in (typing.Union, types.UnionType):
            return " | ".join(dict.fromkeys(map(written, inner)))
        if origin in (list, tuple):
            return f"Sequence[{' | '.join(dict.fromkeys(map(written, inner)))}]"
        if origin is dict:
            return f"dict[{', '.join(map(written, inner))}]"
        if isinstance(annotation, type) and issubclass(annotation, Section):
            return add(f"{annotation.__name__}Options", annotation)
        return "None" if annotation is type(None) else "Any" if annotation is Any else annotation.__name__

    def add(name: str, section: type[Section], *left_out: str) -> str:
        keys = [f"    {key}: {written(field.annotation)}" for key, field in section.model_fields.items()
                if key not in left_out]
        lines = [line for key in keys for line in textwrap.wrap(
            key, 120, subsequent_indent=" " * (key.index("[") + 1 if "[" in key else 8), break_long_words=False)]
        classes[name] = "\n".join([f"class {name}(TypedDict, total=False):", *lines])
        return name

    add("Options", config.Config, *OWN_ARGUMENTS)
    return OPTIONS_HEAD + "\n\n\n".join(["", *classes.values()]).lstrip("\n").join(["\n", "\n"])


NAMES = {PART_NAMES: part_names, REWARD_FACTS: reward_facts}  # first: they are what the others know
PAGES = {**NAMES,
         OPTIONS: option_types, CONFIGURATION: configuration, METHODS / "index.md": methods_index,
         ROOT / "docs" / "reference" / "parts.md": parts,
         CATALOGUE: reward_catalogue, ROOT / "docs" / "reference" / "cli.md": commands}

if __name__ == "__main__":
    if stale := {target: text() for target, text in NAMES.items() if target.read_text(encoding="utf-8") != text()}:
        for target, text in stale.items():
            target.write_text(text, encoding="utf-8")
        os.execv(sys.executable, [sys.executable, *sys.argv])  # with the new names
    for target, text in PAGES.items():
        target.write_text(text(), encoding="utf-8")
        print(f"{target} written")

"""Checks of a method against a configuration: parts that do not go together are a UserError.

The last ones are of recorded pairs, in place of samples that a run draws, and of a supervised term.
"""

import torch

from flowgrpo.advantages.shaping import BradleyTerry
from flowgrpo.config.schema import Config
from flowgrpo.data.pairs import load_demonstrations, load_pairs
from flowgrpo.errors import UserError, nearest
from flowgrpo.gaussian import log_prob
from flowgrpo.methods import reads, registry
from flowgrpo.methods.method import OF_TEXT, Method
from flowgrpo.methods.overlay import overlays, preset, with_parts
from flowgrpo.methods.parts import ConfigChecked
from flowgrpo.methods.setup import Setup
from flowgrpo.methods.supervised import Explained, PassRate, PicturePairs, PreferencePairs
from flowgrpo.methods.targets import RecordedPairs
from flowgrpo.objectives.kl import is_active
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.preview import require_choice
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.types import Context, PromptGroups


def resolve(config: Config, process: str = "flow") -> Method:
    """The method a configuration asks for, its parts tried on the configuration's number of steps and samples.
    Raises UserError where they do not go together, and for a part that the user set and the method does not read."""
    base = preset(config.method)
    train = config.train
    base.require_modality(process)  # before parts that the recipe has for another method
    requested = with_parts(base, config.parts)
    method = requested.on(process, given=config.parts)
    if config.preferences is not None:
        method = method.having(target=method.target.of_pairs())
    reads.require_set(base, requested, method, overlays(config.method))
    reads.require_types(method)
    _require_limits(config, method)
    for place, part in method.parts().items():
        for name in (name for name in getattr(part, "rewards", ()) if name not in config.rewards):
            raise UserError(f"parts.{place}.rewards: unknown reward {name!r}{nearest(name, list(config.rewards))}")
    try:
        _require_credit(method, train.group)
        method.credit.advantage.require(list(config.rewards.values()) * len(method.rollout.strides))
        explorations = [] if process in OF_TEXT else _explorations(method, config, process)
        if method.credit.selection is not None:
            splits = explorations[0].split_widths if explorations else ()
            method.credit.selection(torch.zeros(1, train.group), Context(groups=PromptGroups(splits=splits)))
        method.target.validate(method.rollout, method.credit, method.loss, explorations, train.group)
        _require_loss(method)
    except (TypeError, ValueError) as error:
        steps = "" if process in OF_TEXT else f"train.steps {train.steps}, "
        keys = "".join(f", parts.{key}" for key in config.parts)
        raise UserError(f"method {config.method} with {steps}train.group {train.group}{keys}: {error}") from None
    for part in method.parts().values():
        if isinstance(part, ConfigChecked):
            part.require_config(config, method.for_tokens)
    return method


def _require_credit(method: Method, group: int) -> None:
    """ValueError for a group of one whose samples are compared, or for a measurement that the target does not have."""
    advantage, target, redraw = method.credit.advantage, method.target, method.redraw
    if group < 2 and not advantage.single:
        raise ValueError(f"{type(advantage).__name__} compares the samples of a group: set train.group to 2 or more, "
                         f"or parts.advantage to one of {_advantages('single', True)}")
    if getattr(redraw, "reads_prior", False) and not advantage.keeps_prior:
        keeping = _advantages("keeps_prior", True)
        raise ValueError(f"{type(redraw).__name__} reads the prior values of {keeping}: set parts.advantage: {{type: "
                         f"{keeping}}}")
    measures = sorted(method.needs & {"entropy", "lengths"})
    if measures and not method.for_tokens:
        raise ValueError(f"the credit reads {' and '.join(measures)} of completions: the steps of a denoiser all have "
                         "the same")
    if "reference" in method.needs and not target.has_logp:
        raise ValueError(f"the credit reads log-probabilities under the reference, and {target.trains} have none")


def _advantages(capability: str, value: bool) -> str:
    return ", ".join(name for name in registry.of_place("advantage")
                     if getattr(registry.TYPES[name], capability, None) is value)


def _require_limits(config: Config, method: Method) -> None:
    """Raise UserError for constraints without a reward to raise, or with a part that weighs rewards itself."""
    limited = {name: rule.limit for name, rule in config.trained.items() if rule.limit is not None}
    if limited and len(limited) == len(config.trained):
        raise UserError(f"reward: {', '.join(limited)} has a limit, but nothing else is trained on: add a reward "
                        "with a weight")
    if limited and method.credit.advantage.adapts_weights:
        raise UserError(f"reward.{next(iter(limited))}.limit and parts.advantage "
                        f"{type(method.credit.advantage).__name__} both set the weights of rewards: leave one out")


def _require_loss(method: Method) -> None:
    """Raise ValueError for parts of the loss that do not go with the method's others."""
    loss = method.loss
    if loss.rehearsal is not None and method.rollout.lag.most:
        raise ValueError("the samples of parts.rehearsal are generated by the base model, and this method's by an old "
                         "policy that lags: set parts.lag: {most: 0}, or parts.rehearsal: null")
    if not loss.surrogate.trains and not is_active(loss.kl):
        raise ValueError(f"the surrogate {type(loss.surrogate).__name__} trains nothing beside a KL of weight 0: set "
                         "parts.kl.weight")
    if loss.surrogate.reads_uniform and "entropy" in method.needs:
        raise ValueError(f"the surrogate {type(loss.surrogate).__name__} measures mean log-probabilities in place "
                         "of the entropy that the credit reads: leave one of them out")
    if loss.surrogate.reads_labels and method.credit.advantage.compares:
        raise ValueError(f"the surrogate {type(loss.surrogate).__name__} reads rewards as labels, and "
                         f"{type(method.credit.advantage).__name__} compares them: set parts.advantage: "
                         f"{{type: {_advantages('compares', False)}}}")
    # Samples may be answers of prompts, or be drawn under another input than is learned.
    answered = method.for_tokens and method.generation.decoding.expert > 0
    if loss.surrogate.reads_guided and not answered and all(
            getattr(part, "learned", True) for part in (method.expansion, method.redraw)):
        answers = ", or parts.decoding.expert: 1" if method.for_tokens else ""
        raise ValueError(f"the surrogate {type(loss.surrogate).__name__} is about samples of another policy, "
                         f"and none are: set learned: false of parts.redraw or parts.expansion{answers}")
    if getattr(method.redraw, "puts_answers", False) and not method.generation.decoding.expert:
        raise ValueError(f"{type(method.redraw).__name__} puts answers into groups that fail: set "
                         "parts.decoding.expert to their number")


def describe_substitutes(config: Config, method: Method) -> str | None:
    """A line on the parts that a variance-preserving process has in place of the requested ones, or None."""
    if method.for_tokens or method.of_flows_alone():  # it stayed as it was
        return None
    requested = with_parts(preset(config.method), config.parts)
    before, after = requested.parts(), method.parts()
    changes = [f"{name} {before[name]} -> {after[name]}" for name in requested.of_flows_alone()]
    return f"the model is variance-preserving: {', '.join(changes)}" if changes else None


def _explorations(method: Method, config: Config, process: str) -> list[RolloutSpec]:
    """An epoch's explorations on the configuration's steps and samples. Raises ValueError where they, or the
    transitions of their trained steps, cannot be."""
    train, rollout = config.train, method.denoising
    grid = shift_grid(train.steps, train.shift)
    x = torch.zeros(1, 1)
    if process == "vp":
        grid = torch.linspace(0.01, 0.99, train.steps + 1)  # alpha-bars, as good as any for a trial
    if train.pack and not method.target.packs:
        raise ValueError("train.pack puts recorded steps into one call, and these have none of their own: set it to "
                         "false")
    if method.target.trains_steps and rollout.noisy == "none":
        raise ValueError(f"the plan {type(rollout.plan).__name__} records no step to be trained: set parts.target: "
                         "{type: NoisedFinals}, or another plan")
    method.noising_spec(grid, train.group, 0, config.seed)
    explorations = method.explorations(grid, train.group, train.shift, 0, config.seed)
    if rollout.preview:
        require_choice(explorations, rollout.preview.pool)
    if rollout.pruning is not None:
        rollout.pruning.require(explorations, train.group)
    if method.credit.advantage.reads_baseline and max(rollout.strides) > 1:
        raise ValueError(f"the advantage {type(method.credit.advantage).__name__} compares samples finished on one "
                         "grid: set parts.strides: [1]")
    if method.redraw is not None and len(explorations) > 1:
        raise ValueError(f"redraw is {type(method.redraw).__name__}, which goes with methods that sample a group per "
                         "prompt and compare its rewards: set parts.redraw: null")
    _require_noise(method, explorations)
    for exploration in () if method.target.follows_reward else explorations:
        for step in exploration.schedule.trained:
            log_prob(exploration.transition(x, x, exploration.grid, step), x)
    return explorations


def _require_noise(method: Method, explorations: list[RolloutSpec]) -> None:
    """ValueError where a method whose deviations differ from value to value has parts that read one per step."""
    denoising, weight = method.denoising, method.loss.step_weight
    if not denoising.learned_noise:
        return
    wrong = {"a part that reads means or deviations (kl GaussianKL, Guard, SquaredErrorRatio, DivergenceMask, tuning) "
             "with a KL of samples, PlainRatio or none": method.reads_means,
             f"step_weight {type(weight).__name__} with Uniform": getattr(weight, "reads_deviations", False),
             "a plan whose noise grows with one whose noise does not":
                 any(spec.schedule.noise for spec in explorations)}
    for part in (part for part, applies in wrong.items() if applies):
        raise ValueError(f"the kernel {type(denoising.kernel).__name__} has a std for every latent value: "
                         f"replace {part}")


def check_recorded_pairs(setup: Setup) -> None:
    """Raise UserError if the method or configuration does not fit recorded pairs, or needs them and has none."""
    config, method = setup.config, setup.method
    if config.preferences is None:
        if config.labels != "file":
            raise UserError(f"labels is {config.labels!r}, but preferences is not set: set it to a file of pairs")
        if getattr(method.loss.surrogate, "similarity", False):
            raise UserError(f"method {config.method} pulls to the first image of recorded pairs, but preferences is "
                            "not set: set it to a file of pairs, or parts.surrogate.similarity: 0")
        return
    _require_recorded(config, method)
    for name, rule in config.extra_rewards.items() if config.labels == "file" else ():
        for key in (key for key in ("limit", "transform") if getattr(rule, key, None)):
            raise UserError(f"reward.{name}.{key} is set, but labels is 'file', so that rewards are only measured: "
                            "leave it out, or set labels: rewards")
    if config.labels == "file" and isinstance(method.credit.shaping, BradleyTerry):
        raise UserError(f"labels is 'file', but method {config.method} samples labels from rewards, and would swap "
                        "some of the file's: set labels: rewards, or parts.shaping: null")
    if config.labels == "rewards" and getattr(method.loss.surrogate, "similarity", False) \
            and not isinstance(method.credit.shaping, BradleyTerry):
        raise UserError(f"method {config.method} with parts.surrogate.similarity pulls to what the file calls chosen, "
                        "but labels is 'rewards', which may prefer the other image: set labels: file, or similarity: "
                        "0")
    if method.rollout.preview:
        raise UserError(f"preferences is set, so no image is sampled, but method {config.method} chooses among "
                        "previews of sampled ones: leave sol_rl out")
    if config.train.group != 2:
        raise UserError(f"train.group is {config.train.group}, but preferences brings pairs: set train.group: 2")


def _require_recorded(config: Config, method: Method) -> None:
    """Raise UserError for a method that does not train recorded pairs."""
    if isinstance(method.target, RecordedPairs):
        return
    if not method.for_tokens:
        raise UserError(f"preferences is set, so no image is sampled, but method {config.method} trains steps of "
                        "sampling one, or edits of sampled ones: use a method of noised finals, such as diffusion_dpo")
    if not method.target.recorded:
        raise UserError(f"preferences is set, but method {config.method} on this model trains {method.target.trains}, "
                        "which recorded completions have none of: expected a causal language model and a method such "
                        "as dpo")
    decoding = method.generation.decoding
    if decoding.greedy or decoding.expert:
        raise UserError(f"preferences is set, so no completion is sampled, but method {config.method} keeps "
                        f"{decoding.greedy} greedy samples and {decoding.expert} answers per group: set "
                        "parts.decoding: {greedy: 0, expert: 0}, or use a method such as dpo")
    if config.text.engine != "transformers" or config.text.engine_precision is not None:
        raise UserError("preferences is set, so no completion is sampled, but text.engine or text.engine_precision is "
                        "set too: leave them out")


def check_supervised(setup: Setup) -> None:
    """Raise UserError for a supervised term that does not go with an option, has no examples, or whose file of
    demonstrations has a mistake."""
    config, method = setup.config, setup.method
    part = method.loss.data
    if part is None:
        return
    wrong = {"memory.shard, whose processes would meet in other steps: use false": config.memory.shard,
             "memory.context_parallel: use 1": config.memory.context_parallel > 1,
             "image.sizes, where the examples of a batch differ in size: leave it out": bool(config.image.sizes)}
    for option in (option for option, applies in wrong.items() if applies):
        raise UserError(f"parts.data, a supervised term, does not go with {option}")
    if isinstance(part.source, Explained) and not method.for_tokens:
        raise UserError("parts.data.source is Explained, whose examples a language model writes: use PassRate here")
    if isinstance(part, (PreferencePairs, PicturePairs)):
        if not part.source.path:
            raise UserError(f"parts.data is {type(part).__name__}, but names no pairs: set parts.data.source.path to a "
                            ".jsonl file of pairs")
        load_pairs(part.source.path, text=isinstance(part, PreferencePairs))
    elif part.source.path:
        load_demonstrations(part.source.path)
    elif not method.for_tokens and not (isinstance(part.source, PassRate) and part.source.collects_own):
        raise UserError(f"parts.data.source is {type(part.source).__name__}, which takes recorded images, but it has "
                        "no path: set it to a .jsonl file of demonstrations")

"""Checks of a method against a configuration: parts that do not go together are a UserError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flowgrpo import objectives
from flowgrpo.advantages import token_credit
from flowgrpo.advantages.baselines import Paired
from flowgrpo.advantages.gae import Recall
from flowgrpo.advantages.shaping import BradleyTerry
from flowgrpo.advantages.token_credit import Evenly
from flowgrpo.config.schema import Config
from flowgrpo.curriculum import resampling
from flowgrpo.errors import UserError
from flowgrpo.gaussian import log_prob
from flowgrpo.methods import reads
from flowgrpo.methods.method import OF_TEXT, Method
from flowgrpo.methods.overlay import overlays, preset, with_parts
from flowgrpo.objectives import Uniform, forward_process, token_losses
from flowgrpo.objectives.actor_critic import ActorCritic
from flowgrpo.samplers import plans
from flowgrpo.samplers.grids import shifted
from flowgrpo.samplers.learned_noise import LearnedNoise
from flowgrpo.samplers.noised_finals import Recorded
from flowgrpo.samplers.preview import require_choice
from flowgrpo.samplers.rollout import Exploration
from flowgrpo.samplers.text.decoding import Unmasking


def resolve(config: Config, process: str = "flow") -> Method:
    """The method a configuration asks for, its parts tried on the configuration's number of steps and samples.
    UserError where they do not go together, and for one that the user set and the method does not read."""
    host = preset(config.method)
    asked = with_parts(host, config.parts)
    method, pairs = asked.on(process), config.preferences is not None
    (_require_tokens if process in OF_TEXT else _require_steps)(method, config, process)
    reads.require_set(host, asked, overlays(config.method), reads.target(method, process, pairs))
    reads.require_types(method, reads.target(method, process, pairs))
    return method


def _require_steps(method: Method, config: Config, process: str) -> None:
    """Raise UserError for conflicting parts of a denoiser's method, tried on the configuration's steps and samples."""
    train = config.train
    grid, x = shifted(train.steps, train.shift), torch.zeros(1, 1)
    if process == "vp":
        grid = torch.linspace(0.01, 0.99, train.steps + 1)  # alpha-bars, as good as any for a trial
    try:
        _require_decisions(method, method.noised(grid, train.group, 0, config.seed))
        require_actor_critic(method, train.group)
        if train.pack and (method.backprop or method.chain or method.edit):
            raise ValueError("train.pack puts recorded steps into one call, and these have none of their own: set it "
                             "to false")
        method.selection(torch.zeros(1, train.group))
        require_critic(method)
        if method.backprop:
            require_backprop(method)
        elif isinstance(method.surrogate, objectives.Ascent):
            raise ValueError("the surrogate Ascent follows a reward's gradient: set parts.backprop: {type: Unroll}")
        explorations = method.explorations(grid, train.group, train.shift, 0, config.seed)
        if method.backprop:
            require_one_step(explorations)
        if method.preview:
            require_choice(explorations, method.preview.pool)
        if not isinstance(method.redraw, resampling.Never) and (method.backprop or len(explorations) > 1):
            raise ValueError(f"redraw is {type(method.redraw).__name__}, which goes with methods that sample a group "
                             "per prompt and compare its rewards: set parts.redraw: {type: Never}")
        require_noise_net(method, [each.schedule for each in explorations])
        if method.chain:
            require_chain(method, explorations)
        for exploration in () if method.backprop else explorations:
            for step in exploration.schedule.trained:
                log_prob(exploration.transition(x, x, exploration.grid, step), x)
    except (TypeError, ValueError) as error:
        raise UserError(f"method {config.method} with train.steps {train.steps}, train.group {train.group} and "
                        f"parts {config.parts}: {error}") from None


def _require_tokens(method: Method, config: Config, process: str) -> None:
    """Raise UserError for parts of a language model's method that conflict, or do not fit the configuration's samples.
    """
    try:
        if method.reads_means or method.tuning.weight:
            raise ValueError("a part reads means of transitions, which tokens have none of: use SampledKL and Clip")
        if method.adapted.encoders:
            raise ValueError("adapted.encoders trains a pipeline's text encoders, which a language model has none of")
        if method.kernel.greedy + method.kernel.expert >= config.train.group:
            given = {"greedy samples": method.kernel.greedy, "answers": method.kernel.expert}
            told = " and ".join(f"{count} {what}" for what, count in given.items() if count)
            raise ValueError(f"{told} leave none of the group to train")
        if config.train.group % method.draws.leaves:
            raise ValueError(f"draws is {type(method.draws).__name__} with {method.draws.leaves} leaves: expected a "
                             "train.group that is a multiple of them")
        require_critic(method)
        if method.backprop:
            require_relaxation(method)
        elif isinstance(method.surrogate, objectives.Ascent):
            raise ValueError("the surrogate Ascent follows a reward's gradient: use Clip, or the method drakes")
        if isinstance(method.surrogate, token_losses.ExpertMixture) and not method.kernel.expert:
            raise ValueError("the surrogate ExpertMixture is about answers that join their group: set "
                             "parts.kernel.expert: 1")
        if getattr(method.surrogate, "of_advantages", False) and type(method.spread) is not token_credit.Evenly:
            raise ValueError(f"the surrogate {type(method.surrogate).__name__} reads one advantage per completion, but "
                             f"{type(method.spread).__name__} spreads it: set parts.spread: {{type: Evenly}}")
        method.selection(torch.zeros(1, config.train.group))
    except ValueError as error:
        raise UserError(f"method {config.method} with train.group {config.train.group} and parts {config.parts}: "
                        f"{error}") from None


def _require_decisions(method: Method, noised: Exploration | None) -> None:
    """ValueError where what is trained and what the loss reads do not go together."""
    if noised is None and method.edit is None and isinstance(method.plan, plans.NoSteps):
        raise ValueError("the plan NoSteps records no step to be trained: set parts.times, or another plan")
    if noised is None and isinstance(method.surrogate, forward_process.OfNoised):
        raise ValueError(f"the surrogate {type(method.surrogate).__name__} reads noised finals, but times is Recorded: "
                         "set parts.times, such as {type: GridTimes}")
    if noised is not None and (method.strides != (1,) or method.tuning.weight):
        raise ValueError(f"strides are {list(method.strides)} and tuning.weight {method.tuning.weight}, but noised "
                         "finals have neither granularities nor a best path: expected [1] and 0")
    of_steps = [cure for cure, found in {
        "log_ratio: {type: Matching}": isinstance(method.log_ratio, objectives.Guard),
        "step_weight: {type: Uniform}": isinstance(method.step_weight, objectives.InverseDelta)}.items() if found]
    if noised is not None and of_steps:
        raise ValueError("Guard and InverseDelta (the preset grpo_guard) go by the noise and length of recorded steps, "
                         f"but times is {type(method.times).__name__}: leave grpo_guard out, or set parts: "
                         f"{{{', '.join(of_steps)}}}")


def require_actor_critic(method: Any, group: int) -> None:
    """ValueError where a method with an edit has parts that leave no place for one, or lacks those that go with it."""
    reads = isinstance(method.surrogate, ActorCritic)
    if method.edit is None:
        if reads:
            raise ValueError("the surrogate ActorCritic reads edits and their rewards: set parts.edit: {type: Edit}")
        return
    if not reads:
        raise ValueError(f"the surrogate {type(method.surrogate).__name__} trains no critic, which chooses between a "
                         "base and its edit: use ActorCritic")
    if method.surrogate.ratio and not isinstance(method.advantage, Paired):
        raise ValueError(f"the advantage {type(method.advantage).__name__} gives bases some, which no policy drew: set "
                         "parts.advantage: {type: Paired}, or surrogate: {ratio: 0, through: 1}")
    if not method.surrogate.critic and method.value is None:
        raise ValueError("surrogate.critic is 0 and there is no value part: the critic would learn nothing, set "
                         "parts.value: {type: Recall}")
    if group % 2:
        raise ValueError(f"train.group is {group}: half of the samples are bases, the others their edits: use an even "
                         "number")
    if method.adapted.encoders:
        raise ValueError("adapted.encoders is true, but a method with an edit trains nothing of the pipeline: leave "
                         "texforce out, or set parts: {adapted: {encoders: false, denoisers: true}}")
    if method.backprop or method.preview or method.strides != (1,) or method.tuning.weight or method.lag.most \
            or method.noised(torch.linspace(1, 0, 9), group, 0, 0):
        raise ValueError("a method with an edit trains that alone, on plain rollouts: expected no backprop, preview or "
                         "lag, strides [1], tuning.weight 0, and times Recorded")


def require_adapted(config: Config, method: Any) -> None:
    """Raise UserError for options that conflict with the training of text encoders."""
    if not method.adapted.encoders:
        return
    wrong = {"adapter.rank: 0, which trains all of a denoiser: set a rank": not config.adapter.rank,
             "adapter.dora, which is for denoisers: use false": config.adapter.dora,
             "memory.encoders: cpu, where they would be moved out of the graph: use keep":
                 config.memory.encoders != "keep",
             "memory.shard, whose processes meet in the denoiser alone: use false": config.memory.shard}
    for told in (told for told, found in wrong.items() if found):
        raise UserError(f"text encoders are trained (parts.adapted.encoders), which does not go with {told}")


def require_critic(method: Any) -> None:
    """ValueError where a method with a value model has no tokens for it, or no edits."""
    if isinstance(method.value, Recall):
        if method.edit is None:
            raise ValueError("value is Recall, which trains the critic of edits: leave it out, or use expo")
        return
    if method.value is not None and (not method.for_tokens or method.backprop):
        raise ValueError(f"value is {type(method.value).__name__}, which reads a language model's tokens and their "
                         "log-probabilities: leave it out, or use ppo or trace_rl_value")
    if method.value is not None and type(method.spread) is not Evenly:
        raise ValueError(f"value and spread ({type(method.spread).__name__}) both make advantages of tokens: set "
                         "parts.spread: {type: Evenly}, or leave the value model out")


def require_recorded_pairs(config: Config, method: Any) -> None:
    """Raise UserError if the method or configuration does not fit recorded pairs, or needs them and has none."""
    if config.preferences is None:
        if config.labels != "file":
            raise UserError(f"labels is {config.labels!r}, but no pairs are there: set preferences to a file of pairs")
        if getattr(method.surrogate, "similarity", 0):
            raise UserError(f"method {config.method} pulls to the first picture of recorded pairs, and none are there: "
                            "set preferences to a file of pairs, or parts.surrogate.similarity: 0")
        return
    if method.for_tokens or method.backprop is not None or method.edit is not None or method.records_steps:
        raise UserError(f"preferences is set, so that no picture is drawn, but method {config.method} trains steps of "
                        "drawing one, or edits of drawn ones: use a method of noised finals, such as diffusion_dpo")
    if config.labels == "file" and isinstance(method.shaping, BradleyTerry):
        raise UserError(f"labels is 'file', but method {config.method} draws labels from rewards, and would turn some "
                        "of the file's round: set labels: rewards, or parts.shaping: {type: AsIs}")
    if config.labels == "rewards" and getattr(method.surrogate, "similarity", 0) \
            and not isinstance(method.shaping, BradleyTerry):
        raise UserError(f"method {config.method} with parts.surrogate.similarity pulls to what the file calls chosen, "
                        "but labels is 'rewards', which may prefer the other picture: set labels: file, or similarity: "
                        "0")
    if method.preview:
        raise UserError(f"preferences is set, so that no picture is drawn, but method {config.method} chooses among "
                        "previews of drawn ones: leave sol_rl out")
    if config.train.group != 2:
        raise UserError(f"train.group is {config.train.group}, but preferences brings pairs: set train.group: 2")


def require_backprop(method: Any) -> None:
    """ValueError where a method with an ending has parts that a reward's gradient leaves no place for."""
    if getattr(method.backprop, "of_tokens", False):
        raise ValueError(f"backprop is {type(method.backprop).__name__}, which unmasks tokens: use Unroll or OneStep")
    if not isinstance(method.surrogate, objectives.Ascent):
        raise ValueError(f"the surrogate {type(method.surrogate).__name__} reads log-probabilities, of which a method "
                         "with `backprop` has none: use Ascent")
    fits = {"log_ratio: {type: PlainRatio}": isinstance(method.log_ratio, objectives.PlainRatio),
            "step_weight: {type: Uniform}": isinstance(method.step_weight, objectives.Uniform),
            "kl: {weight: 0}": not objectives.regularises(method.kl),
            "tuning: {weight: 0}": not method.tuning.weight,
            "tail: 1.0": method.tail == 1, "strides: [1]": tuple(method.strides) == (1,),
            "times: {type: Recorded}": isinstance(method.times, Recorded)}
    if wrong := [cure for cure, fit in fits.items() if not fit]:
        raise ValueError(f"a method with `backprop` follows its reward's gradient alone, on one whole grid: set parts: "
                         f"{{{', '.join(wrong)}}}")


def require_one_step(explorations: Sequence[Exploration]) -> None:
    """ValueError where the samples of a prompt share something, or their graphs begin at several steps."""
    if len(explorations) > 1 or len(explorations[0].schedule.trained) > 1 or explorations[0].splits:
        raise ValueError("a method with `backprop` takes a plan with one trained step, where its graph begins, and "
                         "samples that share no noise: set parts: {plan: {type: LastSteps}, roots: null}")


def require_chain(method: Any, explorations: list[Exploration]) -> None:
    """ValueError where a method has parts that a joint density leaves no place for."""
    wrong = {"samples that share no state: set parts: {roots: null} and a plan without splits":
             any(each.splits for each in explorations),
             "recorded steps: set parts: {times: {type: Recorded}} and no backprop":
             method.backprop is not None or not isinstance(method.times, Recorded),
             "step_weight {type: Uniform}: a chain has no step of its own": not isinstance(method.step_weight, Uniform),
             "a KL of samples or none, {kl: {type: SampledKL}}: a chain has no mean": method.reads_means}
    for told in (told for told, found in wrong.items() if found):
        raise ValueError(f"the chain Joint takes {told}")


def require_noise_net(method: Any, schedules: list[Any]) -> None:
    """ValueError where a method whose deviations differ from value to value has parts that read one per step."""
    if not isinstance(method.kernel, LearnedNoise):
        return
    wrong = {"a part that compares means (kl GaussianKL, Guard, DivergenceMask, tuning) with a KL of samples or none":
             method.reads_means,
             "step_weight NoiseLevel with Uniform": isinstance(method.step_weight, objectives.NoiseLevel),
             "a plan whose noise grows with one whose noise does not": any(each.noise for each in schedules)}
    for told in (told for told, found in wrong.items() if found):
        raise ValueError(f"the kernel LearnedNoise has a deviation for every latent value: replace {told}")


def require_relaxation(method: Any) -> None:
    """ValueError where a language model's method with `backprop` has parts that a reward's gradient leaves no place
    for, or whose KL would not be that of its process."""
    if not getattr(method.backprop, "of_tokens", False):
        raise ValueError(f"backprop is {type(method.backprop).__name__}, which follows a denoiser: set parts.backprop: "
                         "{type: GumbelSoftmax}")
    if not isinstance(method.surrogate, objectives.Ascent):
        raise ValueError(f"the surrogate {type(method.surrogate).__name__} reads log-probabilities, of which a method "
                         "with `backprop` has none: use Ascent")
    kernel = method.kernel
    if not isinstance(kernel, Unmasking):
        raise ValueError("GumbelSoftmax relaxes masks that become tokens: set parts.kernel: {type: Unmasking, order: "
                         "random}")
    fits = {"order: random": kernel.order == "random", "shrink: 1": kernel.shrink == 1, "greedy: 0": not kernel.greedy,
            "top_p: 1, top_k: 0, min_p: 0": (kernel.top_p, kernel.top_k, kernel.min_p) == (1, 0, 0)}
    if wrong := [cure for cure, fit in fits.items() if not fit]:
        raise ValueError("a process whose KL is known chooses places by lot and cuts no token: set parts.kernel: "
                         f"{{{', '.join(wrong)}}}")
    if objectives.regularises(method.kl) or not isinstance(method.log_ratio, objectives.PlainRatio):
        raise ValueError("a method with `backprop` holds to its base by parts.backprop.kl alone: set parts: {kl: "
                         "{weight: 0}, log_ratio: {type: PlainRatio}}")

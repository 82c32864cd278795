"""Features of the package that few runs have: the record of each, with its keys.

Every command imports this module, so that it imports nothing of what it names.
"""

from typing import Any, Literal

from pydantic import Field

from flowgrpo.config.base import DENOISERS, FeatureKeys, Section, Share, When, key
from flowgrpo.config.features import Feature, add


class Phase(Section):
    """Stage of a run, which holds until the next one begins; what it does not name is the recipe's."""

    at: float = Field(ge=0, description="epochs before it; below 1 a share of all epochs")
    reach: float | None = Field(None, description="mean weighted reward of an epoch with which it begins earlier")
    when: dict[str, Any] = Field({}, description="metadata of the prompts that are sampled: {task: counting}, or a "
                                                 "list of values")
    carry: Share = Field(0.0, description="share of the prompts that come from earlier phases, rather hard ones")
    weights: dict[str, float] = Field({}, description="of rewards, by name, in place of the recipe's")
    set: dict[str, Any] = Field({}, description="keys with values, such as {train.steps: 20, text.max_tokens: 512}")


class PhaseKeys(FeatureKeys):
    phases: list[Phase] = key([], after="trust_remote_code", description="stages of the run, such as {at: 0.5, when: "
                              "{task: count}, set: {train.group: 16}}; see docs/credit.md")


phases = Feature(name="phases", wanted=lambda config, method: PhaseKeys.read(config).phases, keys=(PhaseKeys,),
                 extension="flowgrpo.contrib.phases:Phases", page="docs/credit.md")

BY_ENGINE = When(lambda c, m: c.rollout.engine is not None, "the pipeline itself draws", "set rollout.engine")


class EngineKeys(FeatureKeys):
    section = "rollout"
    engine: str | None = Field(None, min_length=1, description="address of an SGLang-Diffusion server, such as "
                               "http://127.0.0.1:30000; None: the pipeline itself")
    timeout: float = key(600.0, BY_ENGINE, gt=0, description="seconds for one request")
    retries: int = key(2, BY_ENGINE, ge=0, description="further attempts where a connection fails or the server "
                                                       "answers 5xx")
    folder: str | None = key(None, BY_ENGINE, writes=True, min_length=1, description="folder for each update's LoRA, "
                             "which the engine reads too; None: a temporary one of this machine")
    release: bool = key(False, BY_ENGINE, description="the engine leaves the GPU's memory between rollouts")


engine = Feature(name="engine", wanted=lambda config, method: EngineKeys.read(config).engine, keys=(EngineKeys,),
                 extension="flowgrpo.contrib.engine.sampler:EngineRollouts", page="docs/performance.md")


class CacheKeys(FeatureKeys):
    section = "rollout"
    cache: Literal["first_block", "taylorseer", "mag"] | None = key(
        None, When(lambda c, m: c.preferences is None, "preferences is set, so that no image is sampled",
                   "leave preferences out"),
        description="diffusers' feature cache in the rollouts of methods that read only final samples")
    cache_threshold: float | None = key(
        None, When(lambda c, m: c.rollout.cache in ("first_block", "mag"), "rollout.cache is {0.rollout.cache!r}",
                   "set rollout.cache: first_block or mag"),
        gt=0, description="threshold of `first_block` and `mag`: a higher one skips more blocks; None: diffusers' own")
    cache_interval: int | None = key(
        None, When(lambda c, m: c.rollout.cache == "taylorseer", "rollout.cache is {0.rollout.cache!r}",
                   "set rollout.cache: taylorseer"),
        ge=1, description="steps from one computed step of `taylorseer` to the next; None: diffusers' own")


feature_cache = Feature(name="feature_cache", wanted=lambda config, method: CacheKeys.read(config).cache,
                        keys=(CacheKeys,), extension="flowgrpo.contrib.feature_cache:RolloutCache",
                        page="docs/performance.md")


class StalenessKeys(FeatureKeys):
    section = "train"
    staleness: int = key(0, after="ema", ge=0, description="epochs sampled ahead of their update, while a thread "
                         "computes rewards; 0: none; see docs/performance.md")
    staleness_cap: float = key(
        5.0, When(lambda c, m: c.train.staleness > 0 or c.text.over_provision > 0,
                  "train.staleness and text.over_provision are 0", "set train.staleness or text.over_provision"),
        ge=1, description="largest importance weight of a decision of older weights; larger ones become 0")
    rollout_ranks: int = key(
        0, When(lambda c, m: c.train.staleness > 0, "train.staleness is 0", "set train.staleness"),
        ge=0, description="of several processes, how many only sample and score, while the others train; 0: all do all")


class PartialRolloutKeys(FeatureKeys):
    section = "text"
    over_provision: float = key(0.0, of=("causal_lm",), after="penalty", ge=0, description="groups begun beyond those "
                                "of an epoch, as a share of `train.prompts`; unfinished ones continue in the next; 0: "
                                "none; see docs/performance.md")
    chunk: int = key(64, When(lambda c, m: c.text.over_provision > 0, "text.over_provision is 0",
                              "set text.over_provision"),
                     of=("causal_lm",), ge=1, description="with `over_provision`: tokens between two checks for ended "
                                                          "completions")


staleness = Feature(
    name="staleness", keys=(StalenessKeys, PartialRolloutKeys),
    wanted=lambda config, method: StalenessKeys.read(config).staleness
    or PartialRolloutKeys.read(config).over_provision,
    extension="flowgrpo.contrib.staleness.extension:Staleness", memory="flowgrpo.contrib.staleness.extension:add",
    dry_run="flowgrpo.contrib.staleness.extension:StaleDryRun",
    rollout_ranks="flowgrpo.contrib.staleness.rollout_ranks:rollout_ranks", page="docs/performance.md")


class OnePassKeys(FeatureKeys):
    section = "train"
    one_pass: bool | Literal["auto"] = key(False, of=DENOISERS, after="inner_epochs", description="no replay: the "
                                           "update uses the graphs of the rollout's own steps, where every sample is "
                                           "trained once; `auto`: where they fit; see docs/performance.md")


one_pass = Feature(
    name="one_pass", wanted=lambda config, method: OnePassKeys.read(config).one_pass, keys=(OnePassKeys,),
    extension="flowgrpo.contrib.one_pass:OnePass", memory="flowgrpo.contrib.one_pass:add",
    dry_run="flowgrpo.contrib.one_pass:OnePassDryRun", page="docs/performance.md")

held_out_answers = Feature(
    name="held_out_answers",
    wanted=lambda config, method: method.asks_about_images or "self_answers" in config.trained,
    extension="flowgrpo.contrib.questions.answer_losses:HeldOutAnswers", page="docs/credit.md")

variants = Feature(name="variants", wanted=lambda config, method: method.writes_prompts,
                   extension="flowgrpo.contrib.variants:Variants", page="docs/prompts.md")

rehearsal = Feature(name="rehearsal", wanted=lambda config, method: method.loss.rehearsal,
                    extension="flowgrpo.contrib.rehearsal:RehearsedSamples", page="docs/credit.md")

distillation = Feature(
    name="distillation", wanted=lambda config, method: method.loss.distil and not method.loss.distil.consistent,
    extension="flowgrpo.contrib.distillation:MatchedStudent", memory="flowgrpo.contrib.distillation:add",
    dry_run="flowgrpo.contrib.few_steps:FewStepDryRun",
    page="docs/methods/other_policies.md", charts={
        "distil/gap": ("Distance of the student to its teacher", "mean size of the direction between both scores")})

consistency = Feature(
    name="consistency", wanted=lambda config, method: method.loss.distil and method.loss.distil.consistent,
    extension="flowgrpo.contrib.consistency:ConsistentStudent", memory="flowgrpo.contrib.consistency:add",
    dry_run="flowgrpo.contrib.few_steps:FewStepDryRun", page="docs/few_steps.md")

group_replay = Feature(name="group_replay", wanted=lambda config, method: method.replay,
                       extension="flowgrpo.contrib.group_replay:ReplayedGroups", page="docs/credit.md")

step_size = Feature(
    name="step_size", wanted=lambda config, method: config.train.calibration,
    extension="flowgrpo.contrib.step_size.extension:StepSize", page="docs/learning_rate.md",
    charts={"step_size/rate": ("Learning rate", "found by train.lr: auto"),
            "step_size/moved": ("Change of the samples by an update", "over the rest of the schedule"),
            "step_size/floor": ("Change of the samples by rounding", "over the rest of the schedule")})

frontier = Feature(
    name="frontier", wanted=lambda config, method:
        config.eval.best == "frontier" not in config.trained | config.extra_rewards and config.eval.every,
    extension="flowgrpo.contrib.frontier:KeepFrontier", page="docs/reward_hacking.md",
    charts={"frontier/epoch": ("Epoch of the kept weights", "before reward hacking: see docs/reward_hacking.md")})


class ExtrapolationKeys(FeatureKeys):
    section = "train"
    extrapolate: int = key(0, after="rollout_ranks", ge=0, description="epochs by which a LoRA jumps ahead along its "
                           "low-rank path; taken back if the next reward is lower; 0: none; see docs/performance.md")
    extrapolate_every: int = key(8, When(lambda c, m: c.train.extrapolate > 0, "train.extrapolate is 0",
                                         "set train.extrapolate"),
                                 ge=2, description="epochs between two jumps, whose weights are the path")


extrapolation = Feature(name="extrapolation", wanted=lambda config, method: ExtrapolationKeys.read(config).extrapolate,
                        keys=(ExtrapolationKeys,), extension="flowgrpo.contrib.extrapolation:Extrapolation",
                        page="docs/performance.md")

GUARDS = When(lambda c, m: c.guard.window > 0, "guard.window is 0", "set guard.window")
MEASURES = When(lambda c, m: c.eval.every > 0, "eval.every is 0, so that nothing is measured in between",
                "set eval.every")


class GuardKeys(FeatureKeys):
    section = "guard"

    window: int = key(0, after="", ge=0, description="epochs that make the run's band, such as 4; outside of it the "
                      "run returns to its last good weights; 0: off")
    false_alarms: float = key(0.01, GUARDS, gt=0, lt=1, description="probability of a return without a cause, from "
                                                                    "which all bounds follow")
    edge_width: float | None = key(None, MEASURES, of=DENOISERS, gt=1, description="largest edge width of held-out "
                                   "images, of the base's, such as 1.1; above it the run returns to its last good "
                                   "weights; None: no limit")
    diversity: float | None = key(None, MEASURES, of=DENOISERS, gt=0, lt=1, description="smallest distance of held-out "
                                  "images of a prompt, of the base's, such as 0.9, likewise")
    reward: str | None = key(None, GUARDS, MEASURES, min_length=1, description="held-out reward whose fall counts, "
                             "with `eval.every`; None: `eval.best`, or the trained one of the largest weight")
    lr: float = key(0.5, When(lambda c, m: c.guard.window or c.guard.edge_width or c.guard.diversity,
                              "guard.window is 0", "set guard.window, guard.edge_width or guard.diversity"),
                    gt=0, le=1, description="factor of the learning rate at each return")
    best: bool = key(True, GUARDS, MEASURES, after="unscored", description="ends with the best held-out weights, as "
                                                                           "by `eval.best`; false: with the last ones")


guard = Feature(
    name="guard", keys=(GuardKeys,),
    wanted=lambda config, method: (keys := GuardKeys.read(config)).window or keys.edge_width or keys.diversity,
    extension="flowgrpo.contrib.guard:Guard", page="docs/reward_hacking.md",
    charts={"guard/returns": ("Returns to good weights", "so far: see docs/reward_hacking.md")})


class On(Section):
    """Distilled sibling of the trained model, on which the LoRA is measured; see docs/few_steps.md."""

    model: str | None = Field(None, min_length=1, description="folder, hub id or packaged model; None: the trained "
                                                              "one, with `lora`")
    lora: str | None = Field(None, min_length=1, description="a LoRA that distils, fused into it first")
    lora_scale: float = Field(1.0, gt=0, description="of `lora`: 0.125 for Hyper-FLUX")
    scheduler: dict[str, Any] = Field({}, description="keys that change its scheduler, as `load.scheduler`")
    steps: int | None = Field(None, ge=1, description="denoising steps; None: its card's")
    guidance: float | None = Field(None, ge=0, description="guidance scale; None: its card's")
    weight: float = Field(1.0, gt=0, description="of the run's LoRA")


class OnKeys(FeatureKeys):
    section = "eval"
    on: On | None = key(None, When(lambda c, m: c.eval.prompts > 0, "eval.prompts is 0", "set eval.prompts"),
                        of=DENOISERS, after="best", description="{model: ..., steps: 4}: a distilled sibling on which "
                        "the LoRA is measured too; `best: on` keeps the weights that are best there")


ON = When(lambda c, m: c.eval.on is not None, "eval.on is not set", "set eval.on")


class ForSiblingKeys(FeatureKeys):
    section = "train"
    sibling: Literal["orthogonal", "replay"] | None = key(
        None, ON, of=DENOISERS, after="extrapolate_every", description="what keeps the gain on the model of `eval.on`: "
        "`replay` trains some epochs on it, at its steps; `orthogonal` leaves the LoRA nothing in the directions of "
        "its difference")
    sibling_share: float = key(0.5, When(lambda c, m: c.train.sibling == "replay", "train.sibling is "
                                         "{0.train.sibling!r}", "set train.sibling: replay"),
                               gt=0, lt=1, description="share of the epochs that are trained on it")
    sibling_rank: int = key(16, When(lambda c, m: c.train.sibling == "orthogonal", "train.sibling is "
                                     "{0.train.sibling!r}", "set train.sibling: orthogonal"),
                            ge=1, description="directions of each layer's difference that are left out")


sibling = Feature(
    name="sibling", keys=(OnKeys, ForSiblingKeys), wanted=lambda config, method: OnKeys.read(config).on,
    extension="flowgrpo.contrib.sibling:OnSibling", memory="flowgrpo.contrib.sibling:add", page="docs/few_steps.md",
    charts={"on/gain": ("Gain on the sibling", "of eval.on: change of the weighted trained rewards, held out"),
            "on/edge_width": ("Edge width on the sibling", "of the sibling's own"),
            "on/diversity": ("Diversity on the sibling", "of the sibling's own")})

add(phases, engine, feature_cache, staleness, one_pass, held_out_answers, variants, rehearsal, distillation,
    consistency, group_replay, step_size, frontier, extrapolation, guard, sibling)

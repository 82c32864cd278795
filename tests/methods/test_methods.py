"""Methods as compositions: presets stack, parts can be changed, and every method's loss is its own."""

import math

import pytest
import torch

from flowgrpo.advantages.baselines import Correctness, First, NoBaseline, Signed, Unrewarded
from flowgrpo.advantages.gae import ValueHead
from flowgrpo.advantages.group import Advantage
from flowgrpo.advantages.selection import BestWorst, ButFirst, DropZeroVariance, Extremes
from flowgrpo.advantages.shaping import Overlong, WinRate
from flowgrpo.advantages.token_credit import SegmentChain, SegmentTree, StepGroups
from flowgrpo.advantages.trackers import SmoothStandardised
from flowgrpo.config import load
from flowgrpo.errors import UserError
from flowgrpo.methods import preset, registry
from flowgrpo.methods.distillation import DistributionMatching, RewardedMatching
from flowgrpo.methods.method import Method
from flowgrpo.methods.overlay import with_parts
from flowgrpo.methods.presets import presets_for
from flowgrpo.methods.presets.denoising import mix_grpo
from flowgrpo.methods.presets.overlays import grpo_guard
from flowgrpo.methods.supervised import NextToken, PassRate, PreferencePairs
from flowgrpo.methods.validate import resolve
from flowgrpo.objectives import (
    AdaptiveClip,
    Clip,
    DynamicClip,
    Guard,
    InverseDelta,
    KLOnly,
    NoiseLevel,
    PlainRatio,
    Reinforce,
    SampledKL,
    SequenceRatio,
    TruncatedIS,
    Uniform,
)
from flowgrpo.objectives.kl import Linear
from flowgrpo.objectives.ratios import CompletionRatio
from flowgrpo.objectives.reductions import SequenceMean, SequenceSum, TokenMean
from flowgrpo.objectives.references import SelfTeacher, Teacher
from flowgrpo.objectives.sequence_losses import (
    Discriminative,
    NegativeAwareText,
    PairLoss,
    PairwisePreference,
    Regressed,
    TaperedReinforce,
)
from flowgrpo.objectives.supervised import LayerTuning, Uncertain, WarmupCosine
from flowgrpo.objectives.surrogates import SoftGate
from flowgrpo.samplers.grids import TailPoints
from flowgrpo.samplers.kernels import CPS, VPCPS, DanceSDE, DPMSolver2M, Euler, FlowDDIM, FlowSDE
from flowgrpo.samplers.plans import AllSteps, Branches, EachStep, GrowingTail, RandomSubset, Single, Sliding, TreeWindow
from flowgrpo.text.credit import ExitDecay, ExpertReward, LengthSwitch
from flowgrpo.text.losses import (
    ConflictTokens,
    EntropyBonus,
    ExpertMixture,
    HighEntropy,
    LikelihoodFloor,
    RandomPolicyValue,
    RewardLabels,
)
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.text.samplers.groups import EarlyExits, Tree
from flowgrpo.text.samplers.lookahead import BranchingLookahead
from flowgrpo.training import sampling
from flowgrpo.training.metrics import UpdateStats
from flowgrpo.training.optimizer import decisions
from tests.helpers import loop, tiny

# kernel, plan, solver, tail, shared noise, advantage's scale and order, clip range, KL
PUBLISHED = {
    "flow_grpo": (FlowSDE(0.7), AllSteps(), Euler(), 1.0, False, "batch", "rewards", 1e-4, 0.004),
    "flow_grpo_fast": (FlowSDE(0.7), Sliding(size=2, order="random", stop=0.5), Euler(), 1.0, False, "batch", "rewards",
                       1e-4, 0.0),
    "dance_grpo": (DanceSDE(0.3), RandomSubset(0.6), Euler(), 1.0, True, "group", "advantages", 1e-4, 0.0),
    "mix_grpo": (FlowSDE(0.7), Sliding(size=4, stride=1, every=25, order="progressive"), Euler(), 1.0, True, "group",
                 "advantages", 1e-4, 0.0),
    "mix_grpo_flash": (FlowSDE(0.7), Sliding(size=4, stride=1, every=25, order="progressive"), DPMSolver2M(), 0.4, True,
                       "group", "advantages", 1e-4, 0.0),
    "ddpo": (FlowDDIM(1.0), AllSteps(), Euler(), 1.0, False, "running", "rewards", 1e-4, 0.0),
    "tempflow_grpo": (FlowSDE(0.7), EachStep(), Euler(), 1.0, True, "group", "rewards", 1e-4, 0.004),
    "granular_grpo": (FlowSDE(0.7), EachStep(stop=0.5), Euler(), 1.0, True, "group", "advantages", 1e-4, 0.0),
    "branch_grpo": (DanceSDE(0.3), Branches((0, 3, 6, 9)), Euler(), 1.0, False, "group", "advantages", 1e-3, 0.0),
    "tree_rpo": (FlowSDE(0.7), TreeWindow(Sliding(size=4), 2, 0.5), Euler(), 1.0, False, "group", "advantages", 1e-4,
                 0.0),
    "pref_grpo": (FlowSDE(0.7), RandomSubset(0.6), Euler(), 1.0, True, "group", "advantages", 1e-4, 0.0),
    "b2_diffurl": (FlowDDIM(1.0), GrowingTail(4, 0.7, 1.0, 100), Euler(), 1.0, False, "running", "rewards", 0.1, 0.0),
    "rlcm": (CPS(1.0), AllSteps(), Euler(), 1.0, False, "running", "rewards", 1e-4, 0.0)}
# Students of few steps, whose own loss is beside that of their match: advantage, and what holds them to the base.
DISTILLED = {"dmd2": (Unrewarded(), DistributionMatching()),
             "dmdr": (Advantage("group", "rewards"), DistributionMatching(blend=0.25)),
             "tdm_r1": (Advantage("group", "rewards"), RewardedMatching())}
CLAMPS = {"rlcm": 10.0}  # of the advantage
# What a preset has beside these.
OTHER = {"tempflow_grpo": {"step_weight": NoiseLevel()}, "granular_grpo": {"strides": (1, 2, 3)},
         "tree_rpo": {"surrogate": AdaptiveClip(1e-4, 2e-4, 1.0), "tuning": LayerTuning(1e-4, by="progress")},
         "pref_grpo": {"shaping": WinRate()}, "b2_diffurl": {"selection": Extremes(-0.5, 0.5)}}
OVERLAYS = {"grpo_guard", "flow_dppo", "sol_rl", "texforce", "dynamic_sampling", "mopps", "scaf_grpo", "ghpo",
            "knapsack_rl", "diffusion_opd"}
# Of language models: ratio, surrogate, reduction, advantage's scale and order, KL.
OF_TOKENS = {
    "grpo": (PlainRatio(), Clip(0.2, 0.2), SequenceMean(), "group", "rewards", SampledKL(0.04, "k3")),
    "dr_grpo": (PlainRatio(), Clip(0.2, 0.2), SequenceSum(budgeted=True), "none", "rewards", SampledKL()),
    "dapo": (PlainRatio(), Clip(0.2, 0.28), TokenMean(), "group", "rewards", SampledKL()),
    "dcpo": (PlainRatio(), DynamicClip(0.16, 0.2), SequenceMean(), None, None, SampledKL()),
    "gspo": (SequenceRatio(), Clip(3e-4, 4e-4), SequenceMean(), "group", "rewards", SampledKL()),
    "sapo": (PlainRatio(), SoftGate(1.0, 1.05), SequenceMean(), "group", "rewards", SampledKL()),
    "cispo": (PlainRatio(), TruncatedIS(1.0, 4.0), TokenMean(), "group", "rewards", SampledKL()),
    "rloo": (PlainRatio(), Reinforce(), SequenceSum(), "leave_one_out", "rewards", SampledKL()),
    "reinforce_pp": (PlainRatio(), Clip(0.2, 0.2), TokenMean(), "none", "gdpo", SampledKL(1e-3, "k2")),
    "remax": (PlainRatio(), Reinforce(), SequenceSum(), None, None, SampledKL()),
    "grpo_lambda": (PlainRatio(), Clip(0.2, 0.2), SequenceMean(), "group", "rewards", SampledKL()),
    "spo_chain": (PlainRatio(), Clip(0.2, 0.2), TokenMean(), "group", "rewards", SampledKL(1e-4, "k3")),
    "spo_tree": (PlainRatio(), Clip(0.2, 0.2), TokenMean(), "group", "rewards", SampledKL(1e-4, "k3")),
    "gigpo": (PlainRatio(), Clip(0.2, 0.2), SequenceMean(), "group", "rewards", SampledKL(0.01, "k3")),
    "latr": (PlainRatio(), Clip(0.2, 0.2), SequenceMean(), "group", "rewards", SampledKL()),
    "s_grpo": (PlainRatio(), Clip(0.2, 0.2), SequenceMean(), "group", "rewards", SampledKL()),
    "ppo": (PlainRatio(), Clip(0.2, 0.2), TokenMean(), None, None, SampledKL()),
    "topr": (CompletionRatio(), TaperedReinforce(1.0), SequenceSum(), "none", "rewards", SampledKL()),
    "nft": (PlainRatio(), NegativeAwareText("linear", 1.0), TokenMean(), None, None, SampledKL()),
    "disco": (PlainRatio(), Discriminative("log", 10.0, 1000.0, 1e-4), SequenceMean(), None, None, SampledKL()),
    "reg_grpo": (CompletionRatio(), Regressed(0.1), SequenceSum(), "group", "rewards", SampledKL()),
    "trpa": (PlainRatio(), PairwisePreference(0.1, 2.5, 1e-3), SequenceMean(), "none", "rewards", SampledKL()),
    "dpo": (PlainRatio(), PairLoss(0.1), SequenceMean(), "none", "rewards", SampledKL()),
    "simpo": (PlainRatio(), PairLoss(2.0, mean=True, reference=False, margin=1.0), SequenceMean(), "none", "rewards",
              SampledKL()),
    "hypo": (PlainRatio(), KLOnly(), SequenceSum(), "group", "rewards", SampledKL(0.01, "k2")),
    "real": (PlainRatio(), RewardLabels("anchor", 10.0), SequenceMean(), None, None, SampledKL()),
    "pacs": (CompletionRatio(), RewardLabels("leave_one_out", 1.0, True), SequenceSum(), None, None, SampledKL()),
    "rover": (PlainRatio(), RandomPolicyValue(1.0), TokenMean(), "none", "rewards", SampledKL()),
    "sdpo": (PlainRatio(), KLOnly(), TokenMean(), "group", "rewards", SampledKL(1.0, "k2")),
    "w_reinforce": (PlainRatio(), Clip(0.2, 0.2), TokenMean(), None, None, SampledKL()),
    "entropy_bonus": (PlainRatio(), EntropyBonus(Clip(0.2, 0.2), 0.01), SequenceMean(), "group", "rewards",
                      SampledKL(0.04, "k3")),
    "high_entropy": (PlainRatio(), HighEntropy(Clip(0.2, 0.28), 0.2), TokenMean(), "group", "rewards", SampledKL()),
    "gtpo": (PlainRatio(), ConflictTokens(Reinforce(), 2.0, math.log(2)), SequenceMean(), "group", "rewards",
             SampledKL()),
    "kdrl": (PlainRatio(), Clip(0.2, 0.2), SequenceMean(), "group", "rewards", SampledKL(5e-3, "k2", Linear(1e-3))),
    "visurf": (PlainRatio(), Clip(0.2, 0.2), SequenceMean(), "group", "rewards", SampledKL(0.04, "k3")),
    "rl_plus": (PlainRatio(), ExpertMixture(Clip(0.2, 0.2), 0.5, None), SequenceMean(), "group", "rewards",
                SampledKL(0.04, "k3")),
    **dict.fromkeys(("chord", "relift"), (PlainRatio(), Clip(0.2, 0.2), SequenceMean(), "group", "rewards",
                                          SampledKL(0.04, "k3"))),
    "llds": (PlainRatio(), LikelihoodFloor(Clip(0.2, 0.2), 0.1), SequenceMean(), "group", "rewards",
             SampledKL(0.04, "k3"))}
OTHER_OF_TOKENS = {"dapo": {"shaping": Overlong(0.2), "selection": DropZeroVariance()},
                   "grpo_lambda": {"shaping": LengthSwitch(0.2, 0.0, 0.2, 1.0)},
                   "spo_chain": {"spread": SegmentChain(0.9, 5, 9, True)},
                   "latr": {"draws": BranchingLookahead(0.25, 0.15, 20, 0.4, 1.0)},
                   "s_grpo": {"draws": EarlyExits(), "shaping": ExitDecay(1.0)},
                   "spo_tree": {"spread": SegmentTree(32, 0.9), "draws": Tree((2, 2), 32)},
                   "gigpo": {"spread": StepGroups(8, (), 0.95, 1.0, True)},
                   "remax": {"decoding": Decoding(greedy=1), "advantage": First(), "selection": ButFirst()},
                   "dcpo": {"advantage": SmoothStandardised()},
                   "ppo": {"advantage": NoBaseline(), "value": ValueHead(decay=0.95)},
                   **dict.fromkeys(("dpo", "simpo"), {"selection": BestWorst(2)}),
                   "hypo": {"data": PreferencePairs(loss=PairLoss(0.1))},
                   "real": {"advantage": NoBaseline()}, "pacs": {"advantage": NoBaseline()},
                   "nft": {"advantage": Correctness(), "selection": DropZeroVariance()},
                   "high_entropy": {"shaping": Overlong(0.2), "selection": DropZeroVariance()},
                   "visurf": {"decoding": Decoding(expert=1), "shaping": ExpertReward()},
                   "kdrl": {"reference": Teacher()}, "sdpo": {"reference": SelfTeacher()},
                   "rl_plus": {"decoding": Decoding(expert=1)},
                   "chord": {"data": NextToken(balance=WarmupCosine(0.5, 0.02, 20, 200), token_weight=Uncertain())},
                   "relift": {"data": NextToken(source=PassRate(solved=False), apart=True)},
                   "disco": {"advantage": Correctness()}, "w_reinforce": {"advantage": Signed(0.1, 1.0)}}


@pytest.mark.parametrize("name", OF_TOKENS)
def test_published_defaults_of_language_models(name):
    ratio, surrogate, reduction, scale, order, kl = OF_TOKENS[name]
    expected = {"log_ratio": ratio, "surrogate": surrogate, "reduction": reduction, "kl": kl, "decoding": Decoding(),
                "shaping": None, "selection": None, "step_weight": Uniform(),
                "advantage": Advantage(scale, order, clamp=math.inf) if scale else None}
    expected |= OTHER_OF_TOKENS.get(name, {})
    assert {key: preset(name).parts()[key] for key in expected} == expected
# see tests/samplers/test_noised_finals.py, test_rpo.py
NOISED = {"diffusion_nft", "awm", "dgpo", "crd", "diffusion_dpo", "rpo"}
LEARNED = {"reinflow"}  # noise: see tests/samplers/test_reinflow.py
GRADIENT = {"refl", "draft", "alignprop"}  # of a reward: see tests/samplers/test_reward_gradient.py
EDITS = {"expo"}  # tests/samplers/test_latent_edits.py


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_defaults(name):
    kernel, plan, solver, tail, shared, scale, order, clip, kl = PUBLISHED[name]
    method = preset(name)
    rollout, advantage = method.rollout, Advantage(scale, order, clamp=CLAMPS.get(name, 5.0))
    assert (rollout.kernel, rollout.plan, rollout.solver, rollout.tail) == (kernel, plan, solver, tail)
    assert (rollout.roots == 1) is shared and method.credit.advantage == advantage
    assert method.loss.kl.weight == kl
    usual = {"log_ratio": PlainRatio(), "step_weight": Uniform(), "selection": None, "shaping": None,
             "strides": (1,), "preview": None, "surrogate": Clip(clip, clip), "tuning": LayerTuning()}
    assert {key: method.parts()[key] for key in usual} == usual | OTHER.get(name, {})


def test_every_preset_has_its_defaults_published_here():
    assert set(presets_for("flow")) == {*PUBLISHED, *DISTILLED, *OVERLAYS, *NOISED, *GRADIENT, *LEARNED, *EDITS}
    assert set(presets_for("tokens")) == set(OF_TOKENS)


@pytest.mark.parametrize("name", DISTILLED)
def test_distilled_defaults(name):
    parts = preset(name).parts()
    assert (parts["kernel"], parts["plan"], parts["roots"], parts["kl"].weight) == (CPS(1.0), AllSteps(), None, 0)
    assert (parts["advantage"], parts["distil"]) == DISTILLED[name]
    assert preset(name).on("vp").parts()["kernel"] == VPCPS(1.0)


def test_guard_changes_the_objective_of_any_host_and_nothing_else():
    for name in PUBLISHED:
        host, guarded = preset(name), preset(name, "grpo_guard")
        changes = dict(log_ratio=Guard(), surrogate=Clip(2e-6, 2e-6), step_weight=InverseDelta())
        assert guarded == host.having(**changes)


def test_presets_stack_from_left_to_right():
    assert preset("mix_grpo+grpo_guard") == preset("mix_grpo", "grpo_guard") == grpo_guard(mix_grpo())
    assert preset(" mix_grpo + grpo_guard ") == preset("mix_grpo", "grpo_guard")
    assert preset() == Method()
    assert preset("grpo_guard", "mix_grpo").parts()["log_ratio"] == Guard()
    for names in (["diffusion_nft+ddpo"], ["draft", "mix_grpo"], ["tree_rpo", "grpo_guard+tree_rpo"]):
        with pytest.raises(UserError, match=r"got the base methods .* and .*, expected one: keep one of them"):
            preset(*names)


def test_means_are_read_by_a_kl_by_guard_and_by_layer_tuning_only():
    squared = with_parts(preset("mix_grpo"), {"log_ratio": {"type": "SquaredErrorRatio"}})
    assert squared.reads_means and not squared.reads_old_means  # it reads the deviation of a replay
    assert preset("flow_grpo").reads_means and preset("mix_grpo+grpo_guard").reads_means
    assert preset("tree_rpo").reads_means and not with_parts(preset("tree_rpo"), {"tuning": {"weight": 0}}).reads_means
    assert not preset("mix_grpo").reads_means and not preset("dance_grpo").reads_means


def test_means_of_the_old_policy_are_read_by_all_of_these_but_a_kl():
    reads = {"flow_grpo": False, "mix_grpo": False, "mix_grpo+grpo_guard": True, "tree_rpo": True,
             "diffusion_nft": True}
    assert {name: preset(name).reads_old_means for name in reads} == reads


@pytest.mark.parametrize("name, told", [
    ("mixgrpo", "unknown method 'mixgrpo': did you mean 'mix_grpo'?"),
    ("mix_grpo+guard", "unknown method 'guard': did you mean 'grpo_guard'?"),
    ("", "unknown method ''"),
    ("mix_grpo++grpo_guard", "unknown method ''")])
def test_an_unknown_method_is_told_with_the_nearest(name, told):
    with pytest.raises(UserError) as caught:
        preset(name)
    assert told in str(caught.value)


def laid(name: str, **parts):
    """The part of a preset after a recipe's value has been laid over it."""
    [place] = parts
    return with_parts(preset(name), parts).parts()[place]


def test_parts_are_laid_over_a_method():
    method = with_parts(preset("mix_grpo"), {"plan": {"size": 2}, "kernel": {"type": "CPS"}, "tail": 0.5})
    assert method == preset("mix_grpo").having(plan=Sliding(size=2), kernel=CPS(), tail=0.5)
    assert laid("mix_grpo", kernel={"type": "FlowSDE", "level": 0.9}) == FlowSDE(0.9)
    assert laid("mix_grpo_flash", tail={"type": "TailPoints", "share": 0.2}) == TailPoints(0.2)
    assert laid("mix_grpo", plan={"type": "Single", "step": 3}) == Single(3)
    assert laid("mix_grpo", plan={"type": "Sliding", "size": 2}) == Sliding(size=2)
    assert laid("dance_grpo", selection={"type": "BestWorst", "n": 8}) == BestWorst(8)
    assert laid("flow_grpo", kl={"weight": 0.04}).weight == 0.04
    assert with_parts(preset("mix_grpo"), {}) == preset("mix_grpo")


@pytest.mark.parametrize("parts, told", [
    ({"plann": {"size": 2}}, "unknown key parts.plann: did you mean 'plan'?"),
    ({"plan": {"sizes": 2}}, "unknown key parts.plan.sizes: did you mean 'size'?"),
    ({"kernel": {"type": "FlowSED"}}, "parts.kernel.type: unknown part 'FlowSED': did you mean 'FlowSDE'?"),
    ({"kernel": {"type": "Sliding"}}, "parts.kernel.type: got Sliding, expected one of AnnealedNoise, "),
    ({"kernel": {"type": "CPS", "eta": 1}}, "unknown key parts.kernel.eta"),
    ({"kernel": {"level": -1}}, "parts.kernel: FlowSDE: level is -1, expected 0 or more"),
    ({"kernel": {"level": "high"}}, "parts.kernel: "),
    ({"kernel": 0.7}, "parts.kernel: got 0.7, expected keys with values, such as {type: FlowSDE}"),
    ({"plan": "Single"}, "parts.plan: got 'Single', expected keys with values, such as {type: Sliding}"),
    ({"plan": {"type": "Single"}}, "parts.plan: "),
    ({"tail": 0}, "parts: tail is 0, expected above 0 and at most 1"),
    ({"surrogate": {"low": 2}}, "parts.surrogate: Clip: low is 2"),
    ({"selection": {"type": "BestWorst", "n": 3}}, "parts.selection: BestWorst: n is 3")])
def test_mistakes_in_parts_are_told_with_their_path(parts, told):
    with pytest.raises(UserError) as caught:
        with_parts(preset("mix_grpo"), parts)
    assert str(caught.value).startswith(told) and "\n" not in str(caught.value)


def test_parts_of_another_method_are_told_with_what_leaves_them_out():
    with pytest.raises(UserError) as caught:
        resolve(load("configs/starter.yaml", {"method": "diffusion_nft"}))
    assert str(caught.value).startswith("unknown key parts.plan.size; there are: none (parts.plan is NoSteps; ")
    assert "--parts={} drops them" in str(caught.value) and "\n" not in str(caught.value)
    assert resolve(load("configs/starter.yaml", {"method": "diffusion_nft", "parts": "{}"})) == preset("diffusion_nft")


# Presets with parts that flow_grpo has no place for.
HAVING = {"times": "diffusion_nft", "backprop": "draft", "relaxation": "drakes", "edit": "expo", "draws": "grpo",
          "decoding": "grpo"}


def test_null_takes_an_optional_part_away_and_no_other():
    method = with_parts(preset("dapo", "dynamic_sampling"),
                        {"shaping": None, "selection": None, "redraw": None, "spread": None})
    assert (method.credit.shaping, method.credit.selection, method.redraw) == (None, None, None)
    assert with_parts(preset("grpo"), {"kl": {"weight": 0.1, "schedule": {"type": "Linear", "last": 0.0}}}
                      ).loss.kl.schedule == Linear(0.0)
    for name in ("advantage", "surrogate", "kl"):
        with pytest.raises(UserError, match=f"parts.{name}: got None, expected keys with values, such as"):
            with_parts(preset("dapo"), {name: None})
    with pytest.raises(UserError, match="parts.selection: got .*expected a type with it, such as {type: BestWorst}"):
        with_parts(preset("grpo"), {"selection": {"n": 4}})


@pytest.mark.parametrize("place", [field for field in registry.MODULES if "." not in field])
def test_no_part_is_taken_in_the_place_of_another(place):
    other = [name for name in registry.TYPES if registry.PLACES[name] != place]
    assert len(other) > 80
    for name in other:
        with pytest.raises(UserError, match=rf"^parts.{place}.type: got {name}, expected one of \w+"):
            with_parts(preset(HAVING.get(place, "flow_grpo")), {place: {"type": name}})


def test_a_place_without_parts_takes_none():
    for path, parts in (("parts.roots", {"roots": {"type": "Clip"}}),
                        ("parts.surrogate.margin",
                         {"surrogate": {"type": "RewardAscent", "margin": {"type": "Clip"}}})):
        told = f"^{path}.type: got Clip, expected a value, not a part"
        with pytest.raises(UserError, match=told):
            with_parts(preset("flow_grpo"), parts)
    with pytest.raises(UserError, match="^unknown key parts.type"):
        with_parts(preset("flow_grpo"), {"type": "Clip"})


# --- the loss of every method, on one model, one batch and one pair of rewards ---------------------------------------
GROWN = ("branch_grpo", "tree_rpo", "b2_diffurl")  # they need room for their splits, and a group that these make


def green(images, prompts):
    return images[:, 1].mean((1, 2))


def loss(name: str) -> float:
    """The loss of the first epoch's rollout once the weights have moved, through the trainer's own pieces."""
    options = {"train__steps": 12, "train__group": 16, "train__micro_batch": 32} if name.startswith(GROWN) else {}
    trainer = tiny.trainer(method=name, reward={"red": 1.0, "green": 0.5}, rewards={"red": tiny.red, "green": green},
                           **options)
    tiny.stir(trainer.policy)
    parts, conditioning, grouped = sampling.sample(trainer, trainer.prompts[:2])
    parts = [part for part in loop.credit(trainer, parts, grouped, conditioning.prompts) if part]
    assert parts, f"{name} trains nothing"
    tiny.stir(trainer.policy, 0.02)
    stats = UpdateStats()
    for part in parts:
        loop.backward(trainer, part, conditioning, tiny.step_weights(trainer, parts), decisions(parts), stats)
    stats.norms.append(trainer.optimization.step())
    return stats.summary()["loss"]


@pytest.fixture(scope="module")
def losses():
    names = (*PUBLISHED, "mix_grpo+sol_rl", "flow_grpo+flow_dppo", *NOISED,
             *(f"{name}+grpo_guard" for name in PUBLISHED))
    return {name: loss(name) for name in names}


@pytest.mark.parametrize("child, parent", [
    ("flow_grpo_fast", "flow_grpo"), ("dance_grpo", "flow_grpo"), ("mix_grpo", "flow_grpo"),
    ("mix_grpo_flash", "mix_grpo"), ("ddpo", "flow_grpo"), ("tempflow_grpo", "flow_grpo"),
    ("granular_grpo", "mix_grpo"),
    ("pref_grpo", "flow_grpo"), ("tree_rpo", "branch_grpo"), ("b2_diffurl", "ddpo"), ("mix_grpo+sol_rl", "mix_grpo"),
    ("flow_grpo+flow_dppo", "flow_grpo"),
    ("awm", "flow_grpo"), *((name, "awm") for name in sorted(NOISED - {"awm"})),
    *((f"{name}+grpo_guard", name) for name in PUBLISHED),
])
def test_every_presets_loss_differs_from_its_parents(losses, child, parent):
    assert abs(losses[child] - losses[parent]) > 1e-6
    assert all(torch.tensor(value).isfinite() for value in losses.values())


def test_a_loss_is_reproducible(losses):
    assert loss("mix_grpo") == losses["mix_grpo"]

"""Methods as compositions: presets stack, parts can be changed, and every method's loss is its own."""

import math
from types import SimpleNamespace

import pytest
import torch

from flowgrpo.config import load
from flowgrpo.errors import UserError
from flowgrpo.methods import preset, registry
from flowgrpo.methods.method import Method
from flowgrpo.methods.overlay import with_parts
from flowgrpo.methods.presets import presets_for
from flowgrpo.methods.presets.denoising import mix_grpo
from flowgrpo.methods.presets.overlays import grpo_guard
from flowgrpo.methods.validate import resolve
from flowgrpo.training import sampling
from flowgrpo.training.metrics import UpdateStats
from flowgrpo.training.optimizer import decisions
from tests.helpers import loop, tiny
from tests.helpers.refusals import message, refused

P = SimpleNamespace(**registry.TYPES)


def compared(scale: str, order: str = "rewards", clamp: float = math.inf):
    return P.Advantage(scale, order, clamp=clamp)


def clip(bound: float):
    return P.Clip(bound, bound)


# Published defaults: what most methods have, and where each differs. Of recorded steps:
STEPS = {"kernel": P.FlowSDE(0.7), "plan": P.AllSteps(), "solver": P.Euler(), "tail": 1.0, "roots": None,
         "advantage": compared("group", "advantages", 5.0), "surrogate": clip(1e-4), "kl": P.GaussianKL(0.0),
         "log_ratio": P.PlainRatio(), "step_weight": P.Uniform(), "selection": None, "shaping": None, "strides": (1,),
         "preview": None, "tuning": P.LayerTuning()}
BATCH, RUNNING = compared("batch", clamp=5.0), compared("running", clamp=5.0)
PROGRESSIVE = P.Sliding(size=4, stride=1, every=25, order="progressive")
PUBLISHED = {
    "flow_grpo": {"advantage": BATCH, "kl": P.GaussianKL(0.004)},
    "flow_grpo_fast": {"advantage": BATCH, "plan": P.Sliding(size=2, order="random", stop=0.5)},
    "dance_grpo": {"kernel": P.DanceSDE(0.3), "plan": P.RandomSubset(0.6), "roots": 1},
    "mix_grpo": {"plan": PROGRESSIVE, "roots": 1},
    "mix_grpo_flash": {"plan": PROGRESSIVE, "roots": 1, "solver": P.DPMSolver2M(), "tail": 0.4},
    "ddpo": {"kernel": P.FlowDDIM(1.0), "advantage": RUNNING},
    "tempflow_grpo": {"plan": P.EachStep(), "roots": 1, "advantage": compared("group", clamp=5.0),
                      "kl": P.GaussianKL(0.004), "step_weight": P.NoiseLevel()},
    "granular_grpo": {"plan": P.EachStep(stop=0.5), "roots": 1, "strides": (1, 2, 3)},
    "branch_grpo": {"kernel": P.DanceSDE(0.3), "plan": P.Branches((0, 3, 6, 9)), "surrogate": clip(1e-3)},
    "tree_rpo": {"plan": P.TreeWindow(P.Sliding(size=4), 2, 0.5), "surrogate": P.AdaptiveClip(1e-4, 2e-4, 1.0),
                 "tuning": P.LayerTuning(1e-4, by="progress")},
    "pref_grpo": {"plan": P.RandomSubset(0.6), "roots": 1, "shaping": P.WinRate()},
    "b2_diffurl": {"kernel": P.FlowDDIM(1.0), "plan": P.GrowingTail(4, 0.7, 1.0, 100), "advantage": RUNNING,
                   "surrogate": clip(0.1), "selection": P.Extremes(-0.5, 0.5)},
    "rlcm": {"kernel": P.CPS(1.0), "advantage": compared("running", clamp=10.0)}}
# Of students of few steps, whose own loss is beside that of their match.
STUDENTS = {"kernel": P.CPS(1.0), "plan": P.AllSteps(), "roots": None, "kl": P.GaussianKL(0.0)}
DISTILLED = {
    "dmd2": {"advantage": P.Unrewarded(), "distil": P.DistributionMatching()},
    "dmdr": {"advantage": P.Advantage("group", "rewards"), "distil": P.DistributionMatching(blend=0.25)},
    "tdm_r1": {"advantage": P.Advantage("group", "rewards"), "distil": P.RewardedMatching()}}
# Of noised finals: the old policy lags, and nothing on the way is noisy.
FINALS = {"plan": P.NoSteps(), "roots": None, "advantage": BATCH, "log_ratio": P.Matching(), "lag": P.Lag(),
          "step_weight": P.Uniform(), "selection": None, "shaping": None}
NOISED = {
    "diffusion_nft": {"surrogate": P.NegativeAware(1.0, 5.0), "times": P.RandomGridTimes(0.99),
                      "lag": P.Lag(slope=0.001, most=0.5), "kl": P.OutputError(1e-4)},
    "awm": {"surrogate": clip(1.0), "log_ratio": P.Matching(0.25), "times": P.GridTimes(2, 1, 0.9),
            "kl": P.OutputError(0.005), "step_weight": P.Sigma()},
    "dgpo": {"surrogate": P.GroupPreference(100.0, 0.05, 0.05), "times": P.GridTimes(2, 0, 0.7, shared=True),
             "lag": P.Lag(slope=0.001, most=0.3, draws=False), "kl": P.OutputError(0.001)},
    "crd": {"surrogate": P.CentredReward(1.0, 5.0), "times": P.GridTimes(share=0.99),
            "lag": P.Lag(start=0.25, slope=0.005, most=0.999), "kl": P.OutputError(0.05)},
    "diffusion_dpo": {"surrogate": P.Preference(100.0), "times": P.Stratified(4), "kl": P.OutputError(0.0),
                      "selection": P.BestWorst(2)},
    "rpo": {"surrogate": P.Preference(2.0, similarity=1.0), "shaping": P.BradleyTerry(1.0),
            "times": P.Stratified(4, shared=True), "kl": P.OutputError(0.0), "selection": P.BestWorst(2)}}
# Of a reward's gradient, of edits and of learned noise:
GRADIENT = {
    "refl": {"plan": P.LateStep(0.75), "backprop": P.OneStep(), "surrogate": P.RewardAscent(2.0),
             "kernel": P.FlowDDIM(0.0)},
    "draft": {"plan": P.LastSteps(1), "backprop": P.Unroll(), "surrogate": P.RewardAscent(),
              "kernel": P.FlowDDIM(0.0)},
    "alignprop": {"plan": P.RandomLast(0.16, 0.1), "backprop": P.Unroll(checkpointing=True),
                  "surrogate": P.RewardAscent(), "kernel": P.FlowDDIM(1.0)}}
OTHERS = {
    "expo": {"edit": P.Edit(acting="argmax"), "value": P.Recall(), "kl": P.GaussianKL(0.01),
             "surrogate": P.ActorCritic(1e-3, 1e-3, 0.5, through=1.0, ratio=0.0)},
    "reinflow": {"kernel": P.LearnedNoise(0.2, 0.48, 0.35, 0.7), "surrogate": clip(1e-3), "plan": P.AllSteps(),
                 "roots": None, "advantage": BATCH}}
OVERLAYS = {"grpo_guard", "flow_dppo", "sol_rl", "texforce", "dynamic_sampling", "mopps", "scaf_grpo", "ghpo",
            "knapsack_rl", "diffusion_opd"}
# Of language models:
TOKENS = {"log_ratio": P.PlainRatio(), "surrogate": clip(0.2), "reduction": P.SequenceMean(), "kl": P.SampledKL(),
          "advantage": compared("group"), "decoding": P.Decoding(), "shaping": None, "selection": None,
          "step_weight": P.Uniform()}
RAW, SUM, TOKEN_MEAN, BY_COMPLETION = compared("none"), P.SequenceSum(), P.TokenMean(), P.CompletionRatio()
HELD, LIGHTLY = {"kl": P.SampledKL(0.04, "k3")}, {"kl": P.SampledKL(1e-4, "k3")}
DAPO = {"reduction": TOKEN_MEAN, "shaping": P.Overlong(0.2), "selection": P.DropZeroVariance()}
OF_TOKENS = {
    "grpo": HELD, "dr_grpo": {"reduction": P.SequenceSum(budgeted=True), "advantage": RAW},
    "dapo": DAPO | {"surrogate": P.Clip(0.2, 0.28)},
    "dcpo": {"surrogate": P.DynamicClip(0.16, 0.2), "advantage": P.SmoothStandardised()},
    "gspo": {"log_ratio": P.SequenceRatio(), "surrogate": P.Clip(3e-4, 4e-4)},
    "sapo": {"surrogate": P.SoftGate(1.0, 1.05)},
    "cispo": {"surrogate": P.TruncatedIS(1.0, 4.0), "reduction": TOKEN_MEAN},
    "rloo": {"surrogate": P.Reinforce(), "reduction": SUM, "advantage": compared("leave_one_out")},
    "reinforce_pp": {"reduction": TOKEN_MEAN, "advantage": compared("none", "gdpo"), "kl": P.SampledKL(1e-3, "k2")},
    "remax": {"surrogate": P.Reinforce(), "reduction": SUM, "decoding": P.Decoding(greedy=1), "advantage": P.First(),
              "selection": P.ButFirst()},
    "grpo_lambda": {"shaping": P.LengthSwitch(0.2, 0.0, 0.2, 1.0)},
    "spo_chain": LIGHTLY | {"reduction": TOKEN_MEAN, "spread": P.SegmentChain(0.9, 5, 9, True)},
    "spo_tree": LIGHTLY | {"reduction": TOKEN_MEAN, "spread": P.SegmentTree(32, 0.9), "draws": P.Tree((2, 2), 32)},
    "gigpo": {"kl": P.SampledKL(0.01, "k3"), "spread": P.StepGroups(8, (), 0.95, 1.0, True)},
    "latr": {"draws": P.BranchingLookahead(0.25, 0.15, 20, 0.4, 1.0)},
    "s_grpo": {"draws": P.EarlyExits(), "shaping": P.ExitDecay(1.0)},
    "ppo": {"reduction": TOKEN_MEAN, "advantage": P.NoBaseline(), "value": P.ValueHead(decay=0.95)},
    "topr": {"log_ratio": BY_COMPLETION, "surrogate": P.TaperedReinforce(1.0), "reduction": SUM, "advantage": RAW},
    "nft": {"surrogate": P.NegativeAwareText("linear", 1.0), "reduction": TOKEN_MEAN, "advantage": P.Correctness(),
            "selection": P.DropZeroVariance()},
    "disco": {"surrogate": P.Discriminative("log", 10.0, 1000.0, 1e-4), "advantage": P.Correctness()},
    "reg_grpo": {"log_ratio": BY_COMPLETION, "surrogate": P.Regressed(0.1), "reduction": SUM},
    "trpa": {"surrogate": P.PairwisePreference(0.1, 2.5, 1e-3), "advantage": RAW},
    "dpo": {"surrogate": P.PairLoss(0.1), "advantage": RAW, "selection": P.BestWorst(2)},
    "simpo": {"surrogate": P.PairLoss(2.0, mean=True, reference=False, margin=1.0), "advantage": RAW,
              "selection": P.BestWorst(2)},
    "hypo": {"surrogate": P.KLOnly(), "reduction": SUM, "kl": P.SampledKL(0.01, "k2"),
             "data": P.PreferencePairs(loss=P.PairLoss(0.1))},
    "real": {"surrogate": P.RewardLabels("anchor", 10.0), "advantage": P.NoBaseline()},
    "pacs": {"log_ratio": BY_COMPLETION, "surrogate": P.RewardLabels("leave_one_out", 1.0, True), "reduction": SUM,
             "advantage": P.NoBaseline()},
    "rover": {"surrogate": P.RandomPolicyValue(1.0), "reduction": TOKEN_MEAN, "advantage": RAW},
    "sdpo": {"surrogate": P.KLOnly(), "reduction": TOKEN_MEAN, "kl": P.SampledKL(1.0, "k2"),
             "reference": P.SelfTeacher()},
    "w_reinforce": {"reduction": TOKEN_MEAN, "advantage": P.Signed(0.1, 1.0)},
    "entropy_bonus": HELD | {"surrogate": P.EntropyBonus(clip(0.2), 0.01)},
    "high_entropy": DAPO | {"surrogate": P.HighEntropy(P.Clip(0.2, 0.28), 0.2)},
    "gtpo": {"surrogate": P.ConflictTokens(P.Reinforce(), 2.0, math.log(2))},
    "kdrl": {"kl": P.SampledKL(5e-3, "k2", P.Linear(1e-3)), "reference": P.Teacher()},
    "visurf": HELD | {"decoding": P.Decoding(expert=1), "shaping": P.ExpertReward()},
    "rl_plus": HELD | {"surrogate": P.ExpertMixture(clip(0.2), 0.5, None), "decoding": P.Decoding(expert=1)},
    "chord": HELD | {"data": P.NextToken(balance=P.WarmupCosine(0.5, 0.02, 20, 200), token_weight=P.Uncertain())},
    "relift": HELD | {"data": P.NextToken(source=P.PassRate(solved=False), apart=True)},
    "llds": HELD | {"surrogate": P.LikelihoodFloor(clip(0.2), 0.1)}}


@pytest.mark.parametrize("usual, rows", [(STEPS, PUBLISHED), (STUDENTS, DISTILLED), (FINALS, NOISED), ({}, GRADIENT),
                                         ({}, OTHERS), (TOKENS, OF_TOKENS)])
def test_published_defaults(usual, rows):
    for name, own in rows.items():
        expected = usual | own
        assert {key: preset(name).parts()[key] for key in expected} == expected, name
    assert [preset(name).on("vp").parts()["kernel"] for name in DISTILLED] == [P.VPCPS(1.0)] * 3


def test_every_preset_has_its_defaults_published_here():
    assert set(presets_for("flow")) == {*PUBLISHED, *DISTILLED, *OVERLAYS, *NOISED, *GRADIENT, *OTHERS}
    assert set(presets_for("tokens")) == set(OF_TOKENS)


def test_guard_changes_the_objective_of_any_host_and_nothing_else():
    for name in PUBLISHED:
        changes = dict(log_ratio=P.Guard(), surrogate=clip(2e-6), step_weight=P.InverseDelta())
        assert preset(name, "grpo_guard") == preset(name).having(**changes)


def test_presets_stack_from_left_to_right():
    assert preset("mix_grpo+grpo_guard") == preset("mix_grpo", "grpo_guard") == grpo_guard(mix_grpo())
    assert preset(" mix_grpo + grpo_guard ") == preset("mix_grpo", "grpo_guard")
    assert preset() == Method()
    assert preset("grpo_guard", "mix_grpo").parts()["log_ratio"] == P.Guard()
    for names in (["diffusion_nft+ddpo"], ["draft", "mix_grpo"], ["tree_rpo", "grpo_guard+tree_rpo"]):
        refused(r"got the base methods .* and .*, expected one: keep one of them", preset, *names)


def test_means_are_read_by_a_kl_by_guard_and_by_layer_tuning_only():
    squared = with_parts(preset("mix_grpo"), {"log_ratio": {"type": "SquaredErrorRatio"}})
    assert squared.reads_means and not squared.reads_old_means  # it reads the deviation of a replay
    assert preset("flow_grpo").reads_means and preset("mix_grpo+grpo_guard").reads_means
    assert preset("tree_rpo").reads_means and not with_parts(preset("tree_rpo"), {"tuning": {"weight": 0}}).reads_means
    assert not preset("mix_grpo").reads_means and not preset("dance_grpo").reads_means
    # Those of the old policy by all of these but a KL.
    reads = {"flow_grpo": False, "mix_grpo": False, "mix_grpo+grpo_guard": True, "tree_rpo": True,
             "diffusion_nft": True}
    assert {name: preset(name).reads_old_means for name in reads} == reads


@pytest.mark.parametrize("name, told", [
    ("mixgrpo", "unknown method 'mixgrpo': did you mean 'mix_grpo'?"),
    ("mix_grpo+guard", "unknown method 'guard': did you mean 'grpo_guard'?"),
    ("", "unknown method ''"),
    ("mix_grpo++grpo_guard", "unknown method ''")])
def test_an_unknown_method_is_told_with_the_nearest(name, told):
    assert told in message(preset, name)


def laid(name: str, **parts):
    """The part of a preset after a recipe's value has been laid over it."""
    [place] = parts
    return with_parts(preset(name), parts).parts()[place]


def test_parts_are_laid_over_a_method():
    method = with_parts(preset("mix_grpo"), {"plan": {"size": 2}, "kernel": {"type": "CPS"}, "tail": 0.5})
    assert method == preset("mix_grpo").having(plan=P.Sliding(size=2), kernel=P.CPS(), tail=0.5)
    assert laid("mix_grpo", kernel={"type": "FlowSDE", "level": 0.9}) == P.FlowSDE(0.9)
    assert laid("mix_grpo_flash", tail={"type": "TailPoints", "share": 0.2}) == P.TailPoints(0.2)
    assert laid("mix_grpo", plan={"type": "Single", "step": 3}) == P.Single(3)
    assert laid("mix_grpo", plan={"type": "Sliding", "size": 2}) == P.Sliding(size=2)
    assert laid("dance_grpo", selection={"type": "BestWorst", "n": 8}) == P.BestWorst(8)
    assert laid("flow_grpo", kl={"weight": 0.04}).weight == 0.04
    assert with_parts(preset("mix_grpo"), {}) == preset("mix_grpo")


@pytest.mark.parametrize("parts, told", [
    ({"plann": {"size": 2}}, "unknown key parts.plann: did you mean 'plan'?"),
    ({"plan": {"sizes": 2}}, "unknown key parts.plan.sizes: did you mean 'size'?"),
    ({"kernel": {"type": "FlowSED"}}, "parts.kernel.type: unknown part 'FlowSED': did you mean 'FlowSDE'?"),
    ({"plan": {"type": "Foo"}}, "parts.plan.type: unknown part 'Foo'; there are: AllSteps, "),
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
    assert message(with_parts, preset("mix_grpo"), parts).startswith(told)


def test_parts_of_another_method_are_told_with_what_leaves_them_out():
    told = message(resolve, load("configs/starter.yaml", {"method": "diffusion_nft"}))
    assert told.startswith("unknown key parts.plan.size; there are: none (parts.plan is NoSteps; ")
    assert "--parts={} drops them" in told
    assert resolve(load("configs/starter.yaml", {"method": "diffusion_nft", "parts": "{}"})) == preset("diffusion_nft")


# Presets with parts that flow_grpo has no place for.
HAVING = {"times": "diffusion_nft", "backprop": "draft", "relaxation": "drakes", "edit": "expo", "draws": "grpo",
          "decoding": "grpo"}


def test_null_takes_an_optional_part_away_and_no_other():
    method = with_parts(preset("dapo", "dynamic_sampling"),
                        {"shaping": None, "selection": None, "redraw": None, "spread": None})
    assert (method.credit.shaping, method.credit.selection, method.redraw) == (None, None, None)
    assert with_parts(preset("grpo"), {"kl": {"weight": 0.1, "schedule": {"type": "Linear", "last": 0.0}}}
                      ).loss.kl.schedule == P.Linear(0.0)
    for name in ("advantage", "surrogate", "kl"):
        refused(f"parts.{name}: got None, expected keys with values, such as", with_parts, preset("dapo"), {name: None})
    with pytest.raises(UserError, match="parts.selection: got .*expected a type with it, such as {type: BestWorst}"):
        with_parts(preset("grpo"), {"selection": {"n": 4}})


@pytest.mark.parametrize("place", [field for field in registry.MODULES if "." not in field])
def test_no_part_is_taken_in_the_place_of_another(place):
    other = [name for name in registry.TYPES if registry.PLACES[name] != place]
    assert len(other) > 80
    for name in other:
        told = message(with_parts, preset(HAVING.get(place, "flow_grpo")), {place: {"type": name}})
        assert told.startswith(f"parts.{place}.type: got {name}, expected one of ")


def test_a_place_without_parts_takes_none():
    margin = {"type": "RewardAscent", "margin": {"type": "Clip"}}
    for parts, told in (({"roots": {"type": "Clip"}}, "parts.roots.type: got Clip, expected a value, not a part"),
                        ({"surrogate": margin}, "parts.surrogate.margin.type: got Clip, expected a value, not a part"),
                        ({"type": "Clip"}, "unknown key parts.type")):
        assert message(with_parts, preset("flow_grpo"), parts).startswith(told)


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
    ("awm", "flow_grpo"), *((name, "awm") for name in NOISED if name != "awm"),
    *((f"{name}+grpo_guard", name) for name in PUBLISHED),
])
def test_every_presets_loss_differs_from_its_parents(losses, child, parent):
    assert abs(losses[child] - losses[parent]) > 1e-6
    assert all(torch.tensor(value).isfinite() for value in losses.values())


def test_a_loss_is_reproducible(losses):
    assert loss("mix_grpo") == losses["mix_grpo"]

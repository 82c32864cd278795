"""Parts and settings that do not go together: one line before a run, which says what was given and what fits."""

from typing import Any

import pytest

from flowgrpo.methods.validate import resolve
from tests.helpers import tiny, tiny_runs, tiny_text
from tests.helpers.refusals import message

PAIRS = {"edit": {"acting": "pairs"}}
LABELS = {"surrogate": {"type": "RewardLabels"}}
LOUD = {"expansion": {"type": "Expansion", "scale": 3.0}}
PACKED = "train.pack puts recorded steps into one call"
SHAPED = {"surrogate": {"type": "PolicyShaping"}}
TOKENS = ("completions or image tokens or recorded pairs of completions or traces of an unmasking, but the method "
          "trains recorded steps: expected one of Guard, PlainRatio, SquaredErrorRatio")
VP = "variance-preserving"
# Options of a recipe, what is said, and the kind of model where it is no flow.
REFUSED: list[tuple[Any, ...]] = [
    # parts that another target reads, or nothing
    (dict(parts={"log_ratio": {"type": "SequenceRatio"}}), f"parts.log_ratio: got SequenceRatio, which reads {TOKENS}"),
    (dict(parts={"log_ratio": {"type": "Matching"}}), "got Matching, which reads noised finals or recorded pairs"),
    (dict(parts={"surrogate": {"type": "RewardAscent"}}),
     "RewardAscent, which reads a relaxed unmasking or a reward's gradient"),
    (dict(parts={"surrogate": {"type": "NegativeAware"}}),
     "NegativeAware, which reads noised finals or recorded pairs"),
    (dict(parts={"surrogate": {"type": "Discriminative"}}), "got Discriminative, which reads completions or"),
    (dict(parts={"surrogate": {"type": "ActorCritic"}}),
     "ActorCritic, which reads latent edits, but the method trains recorded steps"),
    (dict(parts={"advantage": {"type": "Paired"}}), "Paired, which reads latent edits"),
    (dict(method="flow_grpo", parts={"kl": {"type": "SpanKL", "weight": 0.1}}), "got SpanKL, which reads completions"),
    (dict(method="flow_grpo", parts={"value": {"type": "Recall"}}), "reads no value: got parts.value Recall"),
    (dict(parts={"surrogate": {"type": "Preference"}}), "Preference, which reads noised finals", "tokens"),
    (dict(method="grpo+sol_rl"), "method grpo+sol_rl: a method that trains completions reads no preview", "tokens"),
    (dict(method="grpo+texforce"), "method grpo+texforce: a method that trains completions reads no adapted", "tokens"),
    # a run that is too small, or has too little noise
    (dict(train__steps=4), "a window of 4 from step 0 does not fit below step 3 of 4 steps"),
    (dict(parts={"plan": {"type": "Single", "step": 5}}), "Single: step is 5, expected 0 to 4"),
    (dict(parts={"plan": {"size": 2.5}}), "train.steps 6"),
    (dict(parts={"plan": {"type": "NoSteps"}}), "the plan NoSteps records no step to be trained"),
    (dict(parts={"selection": {"type": "BestWorst", "n": 8}}), "n is 8, expected at most the 4 samples of a group"),
    (dict(parts={"kernel": {"level": 0}}), "expected 0.02 or more: use more noise"),
    (dict(parts={"kernel": {"type": "CPS", "level": 0}}), "expected 0.02 or more: use more noise"),
    (dict(method="dance_grpo", parts={"kernel": {"level": 0.01}}), "have a std of at most 0.0047 under DanceSDE"),
    (dict(method="ddpo", parts={"kernel": {"eta": 0.0}}), "expected 0.02 or more: use more noise", "vp"),
    (dict(train__group=1), "Advantage compares the samples of a group: set train.group to 2 or more, or "
     "parts.advantage to one of NoBaseline, RiskAverse, Signed, Unrewarded, ValueTracker"),
    # previews that choose noises, and noise that grows
    *((dict(method=method, train__steps=12, train__group=16),
       "previews choose an initial noise for each of the 16 samples of a group, but")
      for method in ("branch_grpo+sol_rl", "tempflow_grpo+sol_rl", "sol_rl+mix_grpo")),
    *((dict(method="mix_grpo+sol_rl", train__group=group, parts={"preview": {"pool": pool, "steps": 2}}),
       f"a group of {group} cannot be the best and the worst of a pool of {pool}")
      for group, pool in ((5, 12), (4, 2))),
    (dict(method="tree_rpo", train__group=16, parts={"kernel": {"type": "FlowDDIM", "eta": 0.9}}),
     "FlowDDIM: eta is 1.0125, expected 0 to 1: it is the kernel's times 1.125, the plan's factor on the noise of a "
     "step; lower the plan's growth or the kernel's"),
    (dict(method="tree_rpo", train__group=16, parts={"kernel": {"type": "CPS", "level": 0.8}}),
     "CPS: level is 1.1, expected 0 to 1: it is the kernel's times 1.375"),
    # latent edits
    (dict(method="expo", train__group=3, parts=PAIRS), "train.group is 3"),
    (dict(method="expo", parts={"surrogate": {"ratio": 1.0}}), "are chosen by the critic: set parts.edit.acting"),
    (dict(method="expo", parts={"advantage": {"type": "Paired"}}), "reads no advantage: got parts.advantage Paired"),
    (dict(method="expo", parts={"edit": {"acting": "best"}}), "Edit: acting is 'best', expected argmax or pairs"),
    (dict(method="expo+grpo_guard"), "got Clip, but the method trains latent edits: expected one of ActorCritic"),
    (dict(method="expo", parts={"surrogate": {"ratio": 1.0}} | PAIRS),
     "the advantage Advantage gives bases some, which no policy sampled: set parts.advantage: {type: Paired}, or"),
    (dict(method="expo+texforce"), "reads no adapted: got the preset texforce"),
    (dict(method="expo", parts={"preview": {"type": "Preview"}}), "reads no preview: got parts.preview Preview"),
    (dict(method="expo", parts={"times": {"type": "GridTimes"}}), "reads no times: got parts.times GridTimes"),
    (dict(method="expo", parts={}, train__pack=True), PACKED),
    # noised finals
    (dict(method="awm", parts={"strides": [1, 2]}), "reads no strides: got parts.strides (1, 2)"),
    (dict(method="awm", parts={"tuning": {"weight": 0.1}}), "reads no tuning"),
    (dict(method="diffusion_nft+grpo_guard"),
     "Guard, which reads latent edits or recorded steps, but the method trains noised finals"),
    (dict(method="diffusion_dpo", parts={"step_weight": {"type": "InverseDelta"}}),
     "InverseDelta, which reads recorded steps"),
    (dict(method="awm", parts={"log_ratio": {"type": "Guard"}}), "expected one of Matching, PlainRatio"),
    (dict(method="awm", parts={"times": {"start": 5}}), "leave none of 6 steps"),
    (dict(method="diffusion_nft", parts={"times": {"share": 0.1}}), "share 0.1 leaves none of 6 steps"),
    (dict(method="awm", parts={"reference": {"type": "PreviousPolicy"}, "kl": {"weight": 0.0}}),
     "got parts.reference PreviousPolicy (it is read by a KL"),
    *((options, VP, "vp") for options in (
        dict(method="diffusion_nft"), dict(method="dgpo"), dict(method="awm"),
        dict(method="diffusion_dpo", parts={"times": {"type": "GridTimes"}}),
        dict(method="diffusion_dpo", parts={"step_weight": {"type": "Sigma"}}))),
    (dict(method="diffusion_nft"), "GridTimes", "vp"), (dict(method="diffusion_nft"), "ddpo", "vp"),
    # learned noise
    (dict(method="reinflow", parts={"kl": {"weight": 0.1}}), "std for every latent value"),
    (dict(method="reinflow", parts={"roots": 1}), "samples that share no state"),
    (dict(method="reinflow", parts={"step_weight": {"type": "InverseDelta"}}), "reads no step_weight"),
    (dict(method="reinflow", parts={"plan": {"type": "NoSteps"}}), "NoSteps records no step to be trained"),
    (dict(method="reinflow", parts={"times": {"type": "GridTimes"}}), "reads no times"),
    (dict(method="reinflow", parts={}, train__pack=True), PACKED),
    (dict(method="reinflow"), "kernel LearnedNoise", "vp"),
    (dict(parts={"kernel": {"type": "FlowSDE"}}), "kernel FlowSDE(level=0.7) is for flow matching", "vp"),
    # a reward's gradient
    (dict(method="draft+grpo_guard"), "got Guard, which reads latent edits or recorded steps"),
    (dict(method="draft", parts={"kl": {"weight": 0.1}}), "reads no kl: got parts.kl GaussianKL"),
    (dict(method="draft", parts={"plan": {"type": "AllSteps"}}), "plan: {type: LastSteps}"),
    (dict(method="refl", parts={"roots": 1}), "roots: null"),
    (dict(method="refl", parts={"log_ratio": {"type": "Guard"}, "tail": 0.5}), "reads no tail: got parts.tail 0.5"),
    (dict(method="draft", parts={"plan": {"count": 7}}), "at most the 6 steps"),
    (dict(method="draft", parts={"times": {"type": "GridTimes"}}), "reads no times: got parts.times GridTimes"),
    (dict(method="draft", parts={}, train__pack=True), PACKED),
    *((options, told, "masks") for options, told in (
        (dict(parts={"decoding": {"order": "confidence"}}, method="drakes"), "order: random"),
        (dict(parts={"decoding": {"top_k": 4, "greedy": 1}}, method="drakes"), "greedy: 0, top_p: 1, top_k: 0"),
        (dict(parts={"kl": {"weight": 0.1}}, method="drakes"), "reads no kl: got parts.kl SampledKL"),
        (dict(method="drakes+trace_rl"),
         "drakes trains a relaxed unmasking, the other presets traces of an unmasking"),
        (dict(method="refl+trace_rl"), "refl trains a reward's gradient, the other presets traces of an unmasking"),
        (dict(method="trace_rl", parts={"surrogate": {"type": "RewardAscent"}}),
         "RewardAscent, which reads a relaxed unmasking or a reward's gradient"))),
    # samples that are pruned, and progress
    (dict(method="flow_grpo", parts={"pruning": {"type": "Pruning", "pool": 3}, "roots": None}),
     "expected at least the group of 4"),
    (dict(method="flow_grpo", parts={"pruning": {"type": "Pruning", "step": 6}, "roots": None}),
     "step is 6, expected at most 5 of 6 steps"),
    (dict(method="flow_grpo", parts={"pruning": {"type": "Pruning"}, "roots": 1}),
     "pruning begins samples that share no state"),
    (dict(parts={"progress": {"type": "Progress", "rewards": ["rde"]}}),
     "parts.progress.rewards: unknown reward 'rde'"),
    # references, KL and losses of whole completions
    (dict(parts={"reference": {"type": "EMA"}}),
     "got parts.reference EMA (it is read by a KL alone, whose weight is 0: set parts.kl"),
    (dict(parts={"reference": {"type": "SelfTeacher"}, "kl": {"weight": 1.0}}),
     "feedback is sibling, completions of the group, and images have none"),
    (dict(method="gspo", parts={"surrogate": {"type": "KLOnly"}}),
     "KLOnly trains nothing beside a KL of weight 0", "tokens"),
    (dict(method="flow_grpo", parts=LABELS), "reads rewards as labels, and Advantage compares them"),
    (dict(method="real", parts={"value": {"type": "ValueHead"}}),
     "per completion, but ValueHead spreads it: set parts.value: null", "tokens"),
    *((dict(method=method), "reads one advantage per completion, ", "tokens") for method in (
        "spo_chain+disco", "gigpo+reg_grpo", "gigpo+gtpo")),
    *((dict(method=method), "a method of causal language models", "masks") for method in (
        "spo_chain", "spo_tree", "gigpo")),
    # groups that are drawn again
    (dict(method="tempflow_grpo+dynamic_sampling"), "redraw is DynamicSampling"),
    (dict(method="refl+dynamic_sampling"), "reads no redraw: got the preset dynamic_sampling"),
    (dict(parts={"redraw": {"type": "AdditionalGroups"}}),
     "AdditionalGroups reads the prior values of PriorBlend: set parts.advantage"),
    # guidance that the loss does not read
    (dict(parts=LOUD), "parts.expansion.scale is 3.0, the guidance of pipelines", "tokens"),
    (dict(parts={"expansion": {"type": "Expansion"}}), "parts.expansion changes nothing: set its text, key or scale"),
    (dict(parts=SHAPED),
     "set learned: false of parts.redraw or parts.expansion, or parts.decoding.expert: 1", "tokens"),
    (dict(parts=SHAPED), "set learned: false of parts.redraw or parts.expansion"),
    (dict(method="expo", parts={"data": {"type": "FlowMatching"}}), "reads no data"),
    (dict(method="grpo", parts={"data": {"type": "NextToken"}}), "a method of causal language models", "masks")]


@pytest.mark.parametrize("row", REFUSED)
def test_what_does_not_go_together_is_refused_in_one_line(row):
    options, told, kind = (*row, "flow")[:3]
    made = tiny_text if kind in tiny_runs.TEXTS else tiny
    assert told in message(resolve, made.config(**options), kind)

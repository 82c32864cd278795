"""Targets: which rollouts have them, which parts they leave unread, and how a recipe names them."""

from __future__ import annotations

import pytest

from flowgrpo.errors import UserError
from flowgrpo.methods import preset, registry
from flowgrpo.methods.groups import Denoising
from flowgrpo.methods.method import Method
from flowgrpo.methods.overlay import with_parts
from flowgrpo.methods.targets import (
    JointDensity,
    LatentEdits,
    NoisedFinals,
    RecordedPairs,
    RecordedSteps,
    RewardGradient,
)
from flowgrpo.methods.validate import resolve
from flowgrpo.rollouts.targets import TARGETS
from flowgrpo.samplers.noised_finals import GridTimes, Stratified
from flowgrpo.text.targets import Completions, ImageTokens, RecordedCompletions, RelaxedTraces, TextGeneration, Traces
from tests.helpers import tiny

OF_PIPELINES = RecordedSteps(), JointDensity(), NoisedFinals(), RecordedPairs(), RewardGradient(), LatentEdits()
OF_TEXTS = Completions(), ImageTokens(), Traces(), RelaxedTraces(), RecordedCompletions()


def test_a_target_belongs_to_one_kind_of_rollout():
    for own, other, targets in ((Denoising(), TextGeneration(), OF_PIPELINES), (TextGeneration(), Denoising(),
                                                                               OF_TEXTS)):
        for target in targets:
            assert Method(own, target).target == target
            with pytest.raises(ValueError, match=f"{type(target).__name__} is no target of {type(other).__name__}"):
                Method(other, target)


def test_every_target_of_a_pipeline_has_its_rollouts():
    assert {type(target) for target in OF_PIPELINES} <= {*TARGETS}


def test_fields_of_groups_have_different_names():
    for name in ("mix_grpo", "diffusion_nft", "draft", "expo", "grpo", "drakes"):
        method = preset(name)
        groups = (method.rollout, method.target, method.credit, method.loss)
        assert len(method.parts()) == sum(len(vars(group)) for group in groups) + 4


def test_a_part_is_replaced_wherever_it_stands_and_whole_groups_come_first():
    method = Method().having(times=Stratified(2), target=NoisedFinals(), roots=1)
    assert (method.target, method.rollout.roots) == (NoisedFinals(Stratified(2)), 1)
    with pytest.raises(ValueError, match="a method that trains recorded steps reads no times"):
        Method().having(times=GridTimes())


def test_a_recipe_names_the_target_and_its_parts():
    parts = {"times": {"share": 0.6}, "target": {"type": "NoisedFinals"}}
    assert with_parts(preset("mix_grpo"), parts).target == NoisedFinals(GridTimes(share=0.6))
    with pytest.raises(UserError, match="Completions is no target of Denoising"):
        with_parts(preset("mix_grpo"), {"target": {"type": "Completions"}})


def test_recorded_pairs_replace_noised_finals():
    config = tiny.config(method="diffusion_dpo", preferences="pairs.jsonl", train__group=2)
    assert resolve(config).target == RecordedPairs(Stratified(4))
    assert resolve(tiny.config(method="diffusion_dpo", train__group=2)).target == NoisedFinals(Stratified(4))


@pytest.mark.parametrize("target", [*OF_PIPELINES, *OF_TEXTS])
def test_what_is_left_unread_is_the_name_of_a_part(target):
    method = Method(TextGeneration() if isinstance(target, OF_TEXTS_TYPES) else Denoising(), target)
    assert target.unread <= {*method.parts()} and {*target.takes} <= {*method.parts()} - target.unread


OF_TEXTS_TYPES = tuple(type(target) for target in OF_TEXTS)


def test_every_part_is_for_what_some_target_offers_and_every_offer_has_a_part():
    offered = {word for target in (*OF_PIPELINES, *OF_TEXTS) for word in target.offers}
    read = {getattr(registry.TYPES[name], "reads_target", "") for name in registry.TYPES}
    assert read - {""} == offered


@pytest.mark.parametrize("place, parts, told", [
    ("log_ratio", {"type": "SequenceRatio"}, "got SequenceRatio, which reads completions or image tokens or recorded "
     "pairs of completions or traces of an unmasking, but the method trains recorded steps: expected one of "),
    ("surrogate", {"type": "RewardAscent"}, "got RewardAscent, which reads a relaxed unmasking or a reward's gradient"),
    ("log_ratio", {"type": "Matching"}, "got Matching, which reads noised finals or recorded pairs")])
def test_a_part_for_another_target_is_refused_with_what_it_reads(place, parts, told):
    with pytest.raises(UserError) as error:
        resolve(tiny.config(method="flow_grpo", parts={place: parts}))
    assert f"parts.{place}: {told}" in str(error.value)


def test_a_part_of_a_users_own_says_what_it_is_for(tmp_path):
    (tmp_path / "own.py").write_text("""from dataclasses import dataclass
from flowgrpo.objectives import PlainRatio

@dataclass(frozen=True)
class Mine(PlainRatio):
    reads_target = "noised finals"
""")
    mine = {"log_ratio": {"type": f"{tmp_path / 'own.py'}:Mine"}}
    assert type(resolve(tiny.config(method="diffusion_nft", parts=mine)).loss.log_ratio).__name__ == "Mine"
    with pytest.raises(UserError, match="got Mine, which reads noised finals or recorded pairs, but the method trains"):
        resolve(tiny.config(method="flow_grpo", parts=mine))


def test_a_plan_says_truly_which_steps_draw_noise():
    for name in registry.of_place("plan"):
        plan = registry.TYPES[name](**{"Single": {"step": 1}}.get(name, {}))
        planned = plan(20, 0, 0)
        for schedule in planned if isinstance(planned, tuple) else (planned,):
            noisy = {20: "every", 19: "every", 0: "none"}.get(len(schedule.stochastic), "some")
            assert Denoising(plan=plan).noisy == noisy, name

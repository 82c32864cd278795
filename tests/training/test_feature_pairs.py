"""Rare features of the loop, alone and in pairs: each run trains, or is refused in one line.

CRASHES are the pairs that do neither, and REFUSED those that are refused. Both lists may only shrink.
"""

import functools

import pytest

from flowgrpo.errors import UserError
from tests.helpers import features


def epochs(*names: str) -> int:
    """Return 2 epochs: phases begin at the second. Weights are extrapolated after the third."""
    return 3 if "extrapolate" in names else 2


RUNS, IS_REFUSED = "runs", "is refused"
CRASHES: dict[str, dict[str, str]] = {"image": {}, "text": {}}
# Those of a cost and a part that counts success rates are refused when a reward is below 0, the others before a run.
REFUSED: dict[str, dict[str, str]] = {
    "image": {
        "phases_of_prompts": "staleness group_replay learned_noise guard",
        "phases_of_sizes": "staleness group_replay learned_noise supervised supervised_apart guard",
        "two_sizes": "staleness distillation consistency group_replay supervised supervised_apart edits learned_noise "
                     "previews",
        "staleness": "extrapolate dynamic_sampling hints expansion self_teacher distillation consistency group_replay "
                     "edits learned_noise one_pass guard",
        "dynamic_sampling": "one_pass",
        "hints": "one_pass",
        "expansion": "distillation consistency one_pass",
        "self_teacher": "edits learned_noise",
        "rehearsal": "edits learned_noise one_pass",
        "distillation": "group_replay edits learned_noise progress",
        "consistency": "group_replay edits learned_noise progress",
        "group_replay": "edits learned_noise one_pass guard",
        "supervised": "edits",
        "supervised_apart": "edits",
        "edits": "learned_noise progress previews reference_credit one_pass step_size",
        "learned_noise": "progress reference_credit one_pass step_size",
        "base_pictures": "progress",
        "inner_epochs_ema": "one_pass",
        "extrapolate": "guard", "limit": "guard", "categories": "guard"},
    "text": {
        "phases_of_prompts": "staleness over_provision group_replay limited_cost guard",
        "phases_of_lengths": "staleness over_provision group_replay guard",
        "staleness": "extrapolate dynamic_sampling hints expansion self_teacher group_replay guard",
        "over_provision": "extrapolate dynamic_sampling hints expansion self_teacher group_replay quality_head guard",
        "expansion": "step_size",
        "critic": "quality_head entropy_credit",
        "outcome_critic": "quality_head entropy_credit",
        "limited_cost": "drift_credit norms guard",
        "extrapolate": "guard", "group_replay": "guard", "limit": "guard", "variants": "guard", "norms": "guard"}}

ROWS = [(kind, name) for kind in features.KINDS for name in features.TABLES[kind]]


def listed(table: dict[str, str]) -> set[tuple[str, str]]:
    """Pairs of a table, which has the second features of each first one."""
    return {(first, second) for first, others in table.items() for second in others.split()}


@functools.cache
def plain(kind: str, count: int) -> features.Result:
    return features.run(kind, epochs=count)


def outcome(kind: str, *names: str) -> str:
    """RUNS, IS_REFUSED, or an error that no user can read."""
    try:
        features.run(kind, *names, epochs=epochs(*names))
    except UserError as error:
        return f"{IS_REFUSED}: {error}" if "\n" not in str(error) else f"is refused in several lines: {error}"
    except Exception as error:  # of any kind: that is what is asked
        return f"crashes: {type(error).__name__}: {error}"
    return RUNS


def complaints(found: dict[tuple[str, str], str], crashes: set[tuple[str, str]], refused: set[tuple[str, str]]
               ) -> list[str]:
    """Lines about the pairs whose outcome is not the listed one."""
    expected = {**dict.fromkeys(refused, IS_REFUSED), **dict.fromkeys(crashes, "crashes")}
    lines = []
    for pair, result in found.items():
        now, before = result.partition(":")[0], expected.get(pair, RUNS)
        if now != before:
            cure = "" if before == RUNS or now not in (RUNS, IS_REFUSED) else ": take it off the list"
            lines.append(f"{' + '.join(pair)} {result}, and the list says it {before}{cure}")
    return lines


@pytest.mark.parametrize("kind, first", ROWS)
def test_a_feature_runs_alone_and_each_pair_runs_or_is_refused_in_a_line(kind, first):
    alone = features.run(kind, first, epochs=epochs(first))
    assert alone != plain(kind, epochs(first)), "the feature changes neither weights nor metrics"
    found = {pair: outcome(kind, *pair) for pair in features.pairs(kind) if pair[0] == first}
    wrong = complaints(found, listed(CRASHES[kind]), listed(REFUSED[kind]))
    assert not wrong, "\n".join(wrong)


def test_a_list_names_pairs_that_are_run_and_no_pair_twice():
    for kind in features.KINDS:
        crashes, refused = listed(CRASHES[kind]), listed(REFUSED[kind])
        assert crashes | refused <= {*features.pairs(kind)} and not crashes & refused


def test_an_outcome_other_than_the_listed_one_is_a_complaint():
    found = {("a", "b"): RUNS, ("a", "c"): "crashes: KeyError: 'x'", ("a", "d"): IS_REFUSED}
    assert complaints(found, {("a", "c")}, {("a", "d")}) == []
    assert complaints(found, set(), set()) == [
        "a + c crashes: KeyError: 'x', and the list says it runs", "a + d is refused, and the list says it runs"]
    assert complaints(found, {("a", "b"), ("a", "d")}, {("a", "c")}) == [
        "a + b runs, and the list says it crashes: take it off the list",
        "a + c crashes: KeyError: 'x', and the list says it is refused",
        "a + d is refused, and the list says it crashes: take it off the list"]
    assert complaints({("a", "b"): RUNS}, set(), {("a", "b")}) == [
        "a + b runs, and the list says it is refused: take it off the list"]


@pytest.mark.parametrize("kind, names", [
    ("image", ["staleness", "supervised"]), ("image", ["edits"]), ("text", ["staleness", "pairs"]),
    ("text", ["over_provision", "critic"])])
def test_a_run_is_the_same_twice(kind, names):
    assert features.run(kind, *names, epochs=2) == features.run(kind, *names, epochs=2)


def test_features_are_merged_or_exclude_each_other():
    both = features.options("image", "edits", "limit")
    assert both["method"] == "expo" and "plan" not in both["parts"] and both["parts"]["edit"]["width"] == 8
    assert set(both["reward"]) == {"score", "further"}
    assert features.options("image", "edits", "learned_noise")["method"] == "expo+reinflow"
    assert features.options("image", "expansion")["parts"]["plan"] == {"size": 2}
    assert ("dynamic_sampling", "hints") in features.exclusive("text")
    with pytest.raises(ValueError, match="dynamic_sampling and hints both set parts.redraw"):
        features.options("text", "dynamic_sampling", "hints")

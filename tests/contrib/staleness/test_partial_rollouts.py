"""Partial rollouts: what is drawn in pieces, by which weights, and what a resumed run goes on with."""

from collections import Counter

import pytest
import torch

from flowgrpo.contrib.staleness.extension import Staleness
from flowgrpo.errors import UserError
from flowgrpo.text.samplers import importance
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.training import sampling, state
from flowgrpo.training.extensions import require
from tests.helpers import loop, tiny_text
from tests.helpers.tiny_runs import next_epochs


def first_digit(completions, prompts):
    """1 for a completion that begins with a digit above 4."""
    return [float(text[:1] in ("5", "6", "7", "8", "9")) for text in completions]


def trainer(**options):
    """A trainer of 4 epochs of 2 groups of 4, one more of which is begun; one of 12 tokens at a time. Completions end
    with any digit below 4 too, so that groups become whole at different times."""
    usual = dict(text__over_provision=0.5, text__chunk=1, text__max_tokens=12, train__epochs=4, train__lr=2e-2)
    made = tiny_text.trainer(rewards={"short": first_digit}, **usual | options)
    made.policy.ends = made.policy.ends + [made.policy.tokenizer(digit)["input_ids"][-1] for digit in "0123"]
    return made


def seen_by(made) -> list[tuple[str, str]]:
    """(prompt, completion) of everything that the rewards score."""
    seen, judge = [], made.scoring.functions["short"]
    made.scoring.functions["short"] = lambda completions, prompts: (
        seen.extend(zip(prompts, map(str, completions))), judge(completions, prompts))[1]
    return seen


def test_a_completion_in_pieces_is_the_one_that_is_drawn_at_once():
    policy = tiny_text.stir(tiny_text.policy(max_tokens=12))
    prompts = policy.encode(["1+2=", "33+4="])
    whole = policy.sample(prompts.rows(torch.tensor([0, 0, 1, 1])), Decoding(), policy.generators([3, 4, 5, 6]),
                          torch.zeros(4, dtype=torch.bool))
    groups = [importance.begin([3, 4], 12), importance.begin([5, 6], 12)]
    for version in range(6):
        groups = importance.go_on(policy, prompts, groups, Decoding(), 2, 3, version)
    pieces = importance.completed(policy, groups)
    assert torch.equal(pieces.ids[pieces.mask], whole.ids[whole.mask]) and torch.equal(pieces.mask, whole.mask)
    assert torch.equal(pieces.cut, whole.cut) and pieces.texts == whole.texts
    torch.testing.assert_close(pieces.logp, whole.logp, rtol=0, atol=1e-5)
    assert policy.text.max_tokens == 12
    for group in groups:
        places = torch.arange(12)
        assert torch.equal(group.versions[group.drawn], (places // 2).expand(2, 12)[group.drawn])


def test_every_token_keeps_the_log_probability_of_the_weights_that_drew_it():
    policy = tiny_text.policy(max_tokens=6)
    prompts, groups = policy.encode(["1+2="]), [importance.begin([7, 8, 9], 6)]
    scores = {}
    for version in range(2):
        groups = importance.go_on(policy, prompts, groups, Decoding(), 3, 8, version)
        [group] = groups
        scores[version] = policy.log_probs(prompts, torch.zeros(3, dtype=torch.int64), group.ids, group.drawn,
                                           Decoding()).logp.detach()
        tiny_text.stir(policy, 0.3)
    for version in range(2):
        at = group.drawn & (group.versions == version)
        assert at.any()
        torch.testing.assert_close(group.logp[at], scores[version][at], rtol=0, atol=1e-4)
    first = group.drawn & (group.versions == 0)
    assert (group.logp - scores[1])[first].abs().max() > 1e-3  # the later weights would say something else


def test_the_ratio_of_a_continued_completion_uses_the_stored_log_probabilities():
    made = trainer(train__lr=0.1)
    made.run_epoch()
    made.epoch, taken = 1, []
    staleness = loop.extension(made, "Staleness")
    draw = staleness.pool.draw
    staleness.pool.draw = lambda epoch: taken.extend(draw(epoch)) or taken
    drawn = staleness.draw_epoch()
    parts, conditioning = drawn.parts, drawn.conditioning
    stored = torch.cat([of.group.logp for of in taken])
    versions = torch.cat([of.group.versions for of in taken])
    at = 0
    for part in parts:
        [completions] = part.transitions
        [(_, _, new)] = made.rollouts.replay(part, conditioning)
        rows, mask = slice(at, at + len(completions.ids)), completions.old.mask
        torch.testing.assert_close(completions.old.logp[mask], new.logp.detach()[mask], rtol=0, atol=1e-5)
        expected = (new.logp.detach() - stored[rows]).exp()
        expected = expected.masked_fill(expected > 5, 0.0)
        torch.testing.assert_close(completions.importance[mask], expected[mask], rtol=1e-4, atol=1e-4)
        older = mask & (versions[rows] < made.optimization.update)
        assert (completions.importance[mask & ~older] - 1).abs().max() < 1e-3
        at += len(completions.ids)
    assert (torch.cat([part.transitions[0].importance for part in parts]) - 1).abs().max() > 1e-3
    assert 0 < staleness.on_trained(drawn)["partial/older"] < 1


@pytest.mark.parametrize("staleness", [0, 1])
def test_no_completion_is_lost_and_each_is_trained_once(staleness):
    """With weights that stay, a run has the completions of one without over-provision, in another order."""
    frozen = dict(train__lr=1e-12)
    plain, made = trainer(text__over_provision=0, **frozen), trainer(train__staleness=staleness, **frozen)
    expected, seen = seen_by(plain), seen_by(made)
    next_epochs(plain, 4)
    lines = next_epochs(made, 4)
    assert Counter(seen) == Counter(expected) and len(seen) == 32
    assert [line["partial/groups"] for line in lines][-1] == 0 and lines[0]["partial/groups"] == (staleness == 0 or 1)


def test_an_epoch_ends_when_enough_groups_are_whole():
    """One completion of 12 tokens does not keep two short groups: of three groups these are trained."""
    made = trainer(train__group=2, text__chunk=2)
    ended, rounds = made.policy.ends[0], []
    sample = made.policy.sample
    def drawn(tokenized, decoding, generators, greedy):
        """The first prompt never ends, the others end with their second token."""
        found = sample(tokenized, decoding, generators, greedy)
        rounds.append(len(found.ids))
        long = torch.tensor([prompt == first for prompt in tokenized.prompts])
        ids = torch.where(long[:, None], torch.tensor([[7, 7]]), torch.tensor([[7, ended]]))
        return type(found)(ids, torch.full((len(ids), 2), -1.0), torch.ones(len(ids), 2, dtype=torch.bool), long,
                           found.texts)
    first = sampling.choose_prompts(made, 0)[0].text
    made.policy.sample = drawn
    whole = loop.extension(made, "Staleness").pool.draw(0)
    assert first not in [of.prompt.text for of in whole] and len(whole) == 2 and sum(rounds) == 6
    [left] = loop.extension(made, "Staleness").pool.groups
    assert left.prompt.text == first and left.group.lengths.tolist() == [2, 2] and not left.group.ended.any()


def test_a_resumed_run_goes_on_with_unfinished_completions(tmp_path):
    made, other = trainer(), trainer()
    next_epochs(made, 2)
    state.save(made, tmp_path)
    state.restore(other, tmp_path / "checkpoints" / "epoch-00002")
    [waiting] = loop.extension(other, "Staleness").pool.groups
    assert not waiting.group.whole and 0 < waiting.group.lengths.min()
    assert next_epochs(made, 2) == next_epochs(other, 2)
    assert made.progress.saved_counters == other.progress.saved_counters
    for key, tensor in made.policy.weights.snapshot().items():
        assert torch.equal(tensor, other.policy.weights.snapshot()[key])


def test_a_checkpoint_amid_an_epoch_has_the_completions_of_the_one_before(tmp_path):
    made, other, whole = trainer(), trainer(), trainer()
    next_epochs(made, 1)
    loop.extension(made, "Staleness").draw_epoch()  # of an epoch that is stopped
    state.save(made, tmp_path)
    state.restore(other, tmp_path / "checkpoints" / "epoch-00001")
    assert next_epochs(other, 3) == next_epochs(whole, 4)[1:]


@pytest.mark.parametrize("options, named", [
    (dict(method="latr"), "parts.draws"), (dict(parts={"decoding": {"greedy": 1}}), "greedy samples"),
    (dict(text__engine_precision="bf16"), "text.engine"), (dict(method="grpo+dynamic_sampling"), "parts.redraw")])
def test_what_cannot_go_on_is_refused(options, named):
    settings = tiny_text.config(text__over_provision=0.5, **options)
    with pytest.raises(UserError, match=f"text.over_provision is 0.5, which does not go with .*{named}"):
        require(Staleness, loop.setup(settings, "causal_lm"))

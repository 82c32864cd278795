"""Completions that are stopped: pruned by a quality head, or cut at the bound of tokens."""


import pytest
import torch

from flowgrpo.data.prompts import Prompt
from flowgrpo.methods.validate import resolve
from flowgrpo.storage import checkpoint
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.text.samplers.groups import PrunedDraws, states_at
from flowgrpo.training import sampling
from tests.helpers import loop, tiny_runs, tiny_text
from tests.helpers.refusals import message


def drawn(quality=None, micro_batch: int = 5, prompts: int = 2, **options):
    own = tiny_text.policy(max_tokens=6, shared_prefix=False)
    own.quality = quality
    asked = own.encode(["1+2=", "33+4="][:prompts]).rows(torch.arange(prompts).repeat_interleave(4))
    greedy = torch.zeros(4 * prompts, dtype=torch.bool)
    before = own.evaluations
    [made] = PrunedDraws(**{"begun": 3, "tokens": 2} | options)(
        own, asked, Decoding(), own.generators(range(4 * prompts)), greedy, 4, micro_batch)
    return own, asked, made, own.evaluations - before


def pool(own, asked, prompts: int = 2):
    """All that could go on: 12 whole completions of each prompt, from the seeds of its rows."""
    seeds = [seed for generator in own.generators(range(4 * prompts))
             for seed in torch.randint(2**62, (3,), generator=generator).tolist()]
    rows = torch.arange(4 * prompts).repeat_interleave(3)
    return own.sample(asked.rows(rows), Decoding(), own.generators(seeds), torch.zeros(len(rows), dtype=torch.bool))


@pytest.mark.parametrize("chances, kept", [
    ([0.99, 0.95, 0.9, 0.9, 0.85, 0.6, 0.4, 0.3], [4, 5, 6, 7]),
    ([0.1, 0.7, 0.05, 0.6, 0.3, 0.2, 0.0, 0.4], [1, 3, 4, 7]),
    ([0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0], [1, 3, 5, 6]), ([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0], [4, 5, 6, 7])])
def test_the_expected_successes_of_those_that_go_on_are_nearest_to_half(chances, kept):
    assert PrunedDraws().choose(torch.tensor(chances), 4).tolist() == kept


def test_survivors_are_nearer_to_half_than_those_kept_by_lot():
    """Of chances of which nine in ten come true."""
    generator = torch.Generator().manual_seed(0)
    chances = torch.rand(200, 32, generator=generator) ** 0.11
    right = (torch.rand(200, 32, generator=generator) < chances).float()
    kept = torch.stack([PrunedDraws().choose(row, 8) for row in chances])
    assert right.mean() > 0.85
    assert (right.gather(1, kept).mean() - 0.5).abs() < 0.7 * (right[:, :8].mean() - 0.5).abs()


def test_what_goes_on_is_what_was_begun():
    """The completions are those of whole draws, which cost more where each reads its prompt. Where all are as likely,
    the last ones go on."""
    own, asked, made, spent = drawn()
    whole = pool(own, asked)
    before = own.evaluations
    pool(own, asked)
    assert spent < own.evaluations - before
    for prompt in range(2):
        begun = [row.tolist() for row in (whole.ids * whole.mask)[12 * prompt:12 * prompt + 12]]
        places = [begun.index(row.tolist()) for row in (made.ids * made.mask)[4 * prompt:4 * prompt + 4]]
        assert places == [8, 9, 10, 11]
        rows = 12 * prompt + torch.tensor(places)
        torch.testing.assert_close(made.logp[4 * prompt:4 * prompt + 4], whole.logp[rows], atol=1e-5, rtol=0)
        assert made.texts[4 * prompt:4 * prompt + 4] == [whole.texts[i] for i in rows.tolist()]


def test_the_head_reads_the_state_behind_the_last_token_and_decides():
    own, asked, *_ = drawn()
    whole = pool(own, asked)
    lengths = whole.mask.sum(1)
    states = states_at(own, asked, torch.arange(8).repeat_interleave(3), whole.ids, (lengths - 1).clamp(max=2), 7)
    scores = states[:, 0].view(2, 12)
    seen = []
    _, _, made, _ = drawn(quality=lambda states: seen.append(states) or states[:, 0])
    torch.testing.assert_close(seen[0], states, rtol=1e-4, atol=1e-4)
    for prompt in range(2):
        rows = 12 * prompt + PrunedDraws().choose(scores[prompt].sigmoid(), 4)
        assert made.texts[4 * prompt:4 * prompt + 4] == [whole.texts[i] for i in rows.tolist()]


def test_the_draws_do_not_depend_on_what_goes_through_the_model_together():
    one, other, alone = (drawn(lambda states: states[:, 0], size, count)[2]
                         for size, count in ((1, 2), (24, 2), (5, 1)))
    assert one.texts == other.texts and one.texts[:4] == alone.texts


def begins(texts, prompts):
    """1 for most first tokens."""
    return [float(text[:1] not in ("1", "2", "3")) for text in texts]


def test_the_head_of_a_run_learns_what_succeeds():
    """From its own samples, whose groups become balanced; the policy hardly moves. A checkpoint holds the head."""
    parts = {"draws": {"type": "PrunedDraws", "begun": 3, "tokens": 1, "lr": 0.03, "passes": 20}}
    earned: list[float] = []
    reward = lambda texts, prompts: [earned.append(score) or score for score in begins(texts, prompts)]  # noqa: E731
    trainer = tiny_text.trainer(rewards={"begins": reward}, reward="begins", train__prompts=4, train__group=8,
                                train__lr=1e-9, text__max_tokens=3, train__micro_batch=96, parts=parts)
    for trainer.epoch in range(8):
        trainer.run_epoch()
    off = (torch.tensor(earned).view(8, 4, 8).mean(2) - 0.5).abs()  # of every group
    assert off[-3:].mean() < 0.75 * off[:2].mean() and trainer.first_ratio.max_log_ratio <= 1e-5
    own, rows = trainer.policy, torch.arange(6).repeat_interleave(24)
    asked = own.encode(tiny_text.PROMPTS)
    made = own.sample(asked.rows(rows), Decoding(), own.generators(range(144)), torch.zeros(144, dtype=torch.bool))
    chances = own.quality(states_at(own, asked, rows, made.ids, (made.mask.sum(1) - 1).clamp(max=1), 48)).sigmoid()
    right = torch.tensor(begins(made.texts, [])) > 0
    assert (chances[right][:, None] > chances[~right]).float().mean() > 0.7  # the area under its curve
    assert torch.equal(loop.critic(trainer).state()[0]["weight"], loop.critic(trainer).head.weight)


def test_a_resumed_run_stops_the_same_completions(tmp_path):
    parts = {"draws": {"type": "PrunedDraws", "tokens": 1, "lr": 0.03, "passes": 20}}
    def arguments(folder, **options):
        return tiny_text.config(folder, reward="begins", parts=parts, **options), dict(
            pipe=tiny_text.model(), functions={"begins": begins}, prompts=[Prompt(text) for text in tiny_text.PROMPTS])
    whole, part = tiny_runs.whole_and_resumed(arguments, tmp_path)
    one, two = (checkpoint.load(folder / "checkpoints" / "epoch-00003")[0] for folder in (whole, part))
    assert one["critic/weight"].abs().max() > 0
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def test_completions_that_are_cut_or_refused():
    def made(**options):
        return resolve(tiny_text.config(parts={"draws": {"type": "PrunedDraws", "tokens": 2}}, **options), "tokens")
    for method in ("remax", "ppo"):
        assert "draws is PrunedDraws" in message(made, method=method)
    assert "text.max_tokens is 6, and parts.draws.tokens is 6" in message(drawn, tokens=6)
    plain, scores, cut = advantages("keep")
    found, penalised, _ = advantages("penalise", text__penalty=0.5)
    assert 0 < cut.sum() < cut.numel() and torch.equal(scores, penalised)  # what is reported is what was scored
    differ = scores[..., 0].amax(1, keepdim=True) > scores[..., 0].amin(1, keepdim=True)
    less = scores[..., 0] - 0.5 * cut * differ  # a group of equal rewards teaches nothing
    assert torch.allclose(plain, scores[..., 0] - scores[..., 0].mean(1, keepdim=True))
    assert torch.allclose(found, less - less.mean(1, keepdim=True)) and not torch.allclose(found, plain)


def advantages(truncated: str, **options):
    """(advantages [P,G], scores [P,G,R], which completions were cut [P,G]) of an epoch's first two prompts."""
    trainer = tiny_text.trainer(tiny_text.policy(truncated=truncated), method="dr_grpo", text__truncated=truncated,
                                **options)
    batch = trainer.prompts[:2]
    parts, _, scores = sampling.sample(trainer, batch)
    ends = torch.cat([(part.transitions[0].ids == 2).any(1) for part in parts]).view(-1, 4)
    credited = loop.credit(trainer, parts, scores, [prompt.key for prompt in batch])
    return torch.cat([part.advantages[0] for part in credited]).view(-1, 4), scores, ~ends

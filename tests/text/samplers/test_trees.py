"""Groups of completions that share their beginnings."""

import pytest
import torch

from flowgrpo.errors import UserError
from flowgrpo.methods import validate
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.text.samplers.groups import Tree
from tests.helpers import tiny_text


def drawn(part, micro_batch: int = 8, prompts: int = 2, group: int = 8, kernel=Decoding()):
    own = tiny_text.policy(max_tokens=9)
    asked = own.encode(["1+2=", "33+4="][:prompts]).rows(torch.arange(prompts).repeat_interleave(group))
    greedy = torch.zeros(prompts * group, dtype=torch.bool)
    return own, asked, part(own, asked, kernel, own.generators(range(prompts * group)), greedy, group, micro_batch)


def test_a_group_is_a_tree():
    _, _, [made] = drawn(Tree((2, 2), 2))
    kept = made.ids * made.mask
    for first in range(0, 16, 4):
        own = kept[first:first + 4]
        assert (own[:, :2] == own[0, :2]).all()  # a root
        assert torch.equal(own[0, :4], own[1, :4]) and torch.equal(own[2, :4], own[3, :4])
        assert torch.equal(made.logp[first, :2], made.logp[first + 3, :2])
    assert len({tuple(row.tolist()) for row in kept[:8]}) > 3 and not torch.equal(kept[0, :2], kept[4, :2])


def test_a_tree_is_what_a_replay_finds_and_needs_no_neighbour():
    own, asked, [made] = drawn(Tree((2, 2), 1), 16)
    found = own.log_probs(asked, torch.arange(16), made.ids, made.mask, Decoding())
    assert (found.logp - made.logp)[made.mask].abs().max() <= 1e-5
    [small] = drawn(Tree((2, 2), 1), 3)[2]
    assert torch.equal(small.ids * small.mask, made.ids * made.mask) and small.texts == made.texts
    [alone] = drawn(Tree((2, 2), 1), 16, prompts=1)[2]
    assert torch.equal(alone.ids * alone.mask, (made.ids * made.mask)[:8])


def test_what_has_ended_does_not_split():
    _, _, [made] = drawn(Tree((4,), 9), group=4)
    assert all(len({tuple(row.tolist()) for row in (made.ids * made.mask)[at:at + 4]}) == 1 for at in (0, 4))


def test_a_group_that_is_no_tree_is_told_in_a_line():
    with pytest.raises(UserError, match="draws is Tree with 4 leaves"):
        validate.resolve(tiny_text.config(method="spo_tree", train__group=6), "tokens")
    with pytest.raises(UserError, match="Tree: children are"):
        validate.resolve(tiny_text.config(method="spo_tree", parts={"draws": {"children": []}}), "tokens")

"""Groups that grow by branches: where they are tried, which stay, and what a replay finds."""

import pytest
import torch

from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.text.samplers.groups import alternatives
from flowgrpo.text.samplers.lookahead import BranchingLookahead, edit_distance
from tests.helpers import tiny_text

WAVERING = BranchingLookahead(likely=0.05, gap=0.5, ahead=4, apart=0.5)


def drawn(part, micro_batch: int = 8, prompts: int = 2, group: int = 4, kernel=Decoding()):
    own = tiny_text.policy(max_tokens=8)
    asked = own.encode(["1+2=", "33+4="][:prompts]).rows(torch.arange(prompts).repeat_interleave(group))
    greedy = torch.zeros(prompts * group, dtype=torch.bool)
    return own, asked, part(own, asked, kernel, own.generators(range(prompts * group)), greedy, group, micro_batch)[0]


def rows(made) -> list[list[int]]:
    return [ids[mask].tolist() for ids, mask in zip(made.ids, made.mask)]


@pytest.mark.parametrize("one, other, distance", [
    ([], [], 0), ([1, 2], [1, 2], 0), ([1, 2, 3], [], 3), ([1, 2, 3], [2, 3], 1), ([1, 2, 3], [1, 9, 3], 1),
    ([11, 9, 20, 20, 5, 14], [19, 9, 20, 20, 9, 14, 7], 3),
])
def test_edit_distances_by_hand(one, other, distance):
    assert edit_distance(one, other) == edit_distance(other, one) == distance


def test_the_likeliest_other_token():
    own, asked, made = drawn(BranchingLookahead(share=0.0))
    tokens, logp, likeliest = alternatives(own, asked, made.ids, made.mask, Decoding(0.7))
    inputs = torch.cat([asked.ids[1], made.ids[1]])
    with torch.no_grad():
        whole = (own.model(inputs[None]).logits[0] / 0.7).log_softmax(-1)[len(asked.ids[1]) - 1:]
    for place in made.mask[1].nonzero().flatten().tolist():
        best = whole[place].clone()
        assert likeliest[1, place].item() == pytest.approx(best.max().item(), abs=1e-5)
        best[made.ids[1, place]] = -torch.inf
        assert tokens[1, place] == best.argmax() and logp[1, place].item() == pytest.approx(best.max().item(), abs=1e-5)
    assert (logp[~made.mask] == -torch.inf).all() and (tokens != made.ids)[made.mask].all()


def test_what_stays_goes_apart():
    _, _, made = drawn(WAVERING)
    for first in (0, 4):
        group = rows(made)[first:first + 4]
        for number, own in enumerate(group[1:], 1):
            shared = [next((at for at, (a, b) in enumerate(zip(own, other)) if a != b), min(len(own), len(other)))
                      for other in group[:number]]
            place = max(shared)  # where it left the one that it is nearest to
            one, other = own[place:place + 4], group[shared.index(place)][place:place + 4]
            assert edit_distance(one, other) >= 0.5 * max(len(one), len(other))


def test_a_sure_model_never_branches():
    _, _, made = drawn(WAVERING, kernel=Decoding(1e-4))
    assert all(len(set(map(tuple, rows(made)[first:first + 4]))) == 1 for first in (0, 4))
    _, _, alone = drawn(BranchingLookahead(likely=1.0))
    own, asked, none = drawn(BranchingLookahead(share=0.0))
    plain = own.sample(asked, Decoding(), own.generators(range(8)), torch.zeros(8, dtype=torch.bool))
    assert rows(alone) == rows(none) == rows(plain)


def test_a_branch_is_what_a_replay_finds_and_needs_no_neighbour():
    own, asked, made = drawn(WAVERING)
    found = own.log_probs(asked, torch.arange(8), made.ids, made.mask, Decoding())
    assert (found.logp - made.logp)[made.mask].abs().max() <= 1e-5
    assert rows(drawn(WAVERING, 1)[2]) == rows(made) and rows(drawn(WAVERING, 8, prompts=1)[2]) == rows(made)[:4]
    plain = own.sample(asked, Decoding(), own.generators(range(8)), torch.zeros(8, dtype=torch.bool))
    assert rows(made) != rows(plain) and rows(made)[0] == rows(plain)[0]


def test_impossible_branches():
    with pytest.raises(ValueError, match="BranchingLookahead: likely is 2"):
        BranchingLookahead(likely=2.0)

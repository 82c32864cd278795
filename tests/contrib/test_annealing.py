"""Temperatures that change within a completion, and completions drawn anew from uncertain tokens."""

import math

import pytest
import torch

from flowgrpo.contrib.annealing import AnnealedDecoding, SpanDecoding
from flowgrpo.contrib.branching import CriticalTokens, SemanticBranches, semantic_entropy
from flowgrpo.errors import UserError
from flowgrpo.methods import validate
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.text.samplers.groups import EarlyExits, Independent, Tree
from flowgrpo.text.samplers.lookahead import BranchingLookahead
from tests.helpers import tiny_runs, tiny_text

ANNEALED, SPANS = AnnealedDecoding(highest=1.5, lowest=0.3, slow=4.0), SpanDecoding(opens=(5, 6, 7), closes=(8,))
DRAWS = [Independent(), EarlyExits("=", "="), Tree((2, 2), 2), BranchingLookahead(0.0, 1.0, 1, 0.0),
         CriticalTokens(), CriticalTokens(0.75, 3, 0.3), SemanticBranches()]


def drawn(part, decoding=Decoding(), micro_batch: int = 8, group: int = 8, prompts: int = 2):
    own = tiny_text.policy(max_tokens=9)
    rows = own.encode(["1+2=", "33+4="][:prompts]).rows(torch.arange(prompts).repeat_interleave(group))
    greedy = torch.zeros(prompts * group, dtype=torch.bool)
    made = part(own, rows, decoding, own.generators(range(prompts * group)), greedy, group, micro_batch)
    ids, logp, mask = (torch.cat([getattr(batch, name) for batch in made]) for name in ("ids", "logp", "mask"))
    return own, rows, ids, logp, mask


def test_temperatures_of_spans_and_samples_inside():
    heat = AnnealedDecoding(highest=1.2, lowest=0.1, slow=400.0).temperatures(torch.zeros(2, 1001, dtype=torch.int64))
    assert heat[1, [0, 50, 100, 200, 1000]].tolist() == pytest.approx([1.2, 1.0669, 0.9160, 0.5513, 0.1], abs=1e-4)
    found, same = drawn(Independent()), drawn(Independent(), AnnealedDecoding(highest=1.0, lowest=1.0))
    assert torch.equal(found[2], same[2])
    ids = torch.tensor([[1, 5, 2, 2, 8, 1, 1], [8, 1, 6, 5, 8, 5, 1]])
    inside = SpanDecoding(opens=(5, 6), closes=(8,), inside=0.25).temperatures(ids) == 0.25
    assert inside.long().tolist() == [[0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0, 1]]
    assert not (SpanDecoding().temperatures(ids) != 1).any()
    nearly = SpanDecoding(opens=tuple(range(5, 30)), closes=(), inside=1e-4)
    own, rows, ids, logp, mask = drawn(Independent(), nearly)
    inside = (nearly.temperatures(ids) < 1) & mask
    assert inside.sum() > 20 and logp[inside].abs().max() < 1e-2


@pytest.mark.parametrize("decoding", [Decoding(), ANNEALED, SPANS, AnnealedDecoding(top_k=5, slow=2.0)])
@pytest.mark.parametrize("part", DRAWS, ids=lambda part: type(part).__name__)
def test_log_probabilities_are_those_of_what_was_sampled(part, decoding):
    own, rows, ids, logp, mask = drawn(part, decoding)
    heat = decoding.temperatures(ids)
    tolerance = 1e-5 / (1.0 if heat is None else heat.min().item())  # logits and their rounding are divided by it
    again = own.log_probs(rows, torch.arange(16), ids, mask, decoding)
    assert (again.logp - logp)[mask].abs().max() <= tolerance < 1e-3
    plain = own.log_probs(rows, torch.arange(16), ids, mask, Decoding())
    assert (type(decoding) is Decoding) == bool((plain.logp - logp)[mask].abs().max() <= tolerance)


# --- drawn anew from uncertain tokens --------------------------------------------------------------------------------
@pytest.mark.parametrize("part", [CriticalTokens(), SemanticBranches()])
def test_what_is_regrown_leaves_at_the_most_uncertain_token(part):
    own, rows, ids, logp, mask = drawn(part)
    first = [at for at in range(16) if at % 8 < 4]
    entropy = own.log_probs(rows, torch.arange(16), ids, mask, Decoding(), entropy=True).entropy
    apart = 0
    for row in first:
        branch = row + 4
        length = int(mask[row].sum())
        place = int((ids[row] != ids[branch]).nonzero().min()) if not torch.equal(ids[row], ids[branch]) else length
        if type(part) is CriticalTokens:  # the regrown token itself may be drawn again
            assert place >= int(entropy[row].masked_fill(~mask[row], -1).argmax())
        torch.testing.assert_close(logp[branch, :place], logp[row, :place], rtol=0, atol=1e-5)
        apart += place < length
    assert apart >= 4


def test_restarts_are_independent_at_places_by_hand():
    plain, fresh = drawn(Independent()), drawn(CriticalTokens(fresh=1.0))
    assert torch.equal(plain[2][:4], fresh[2][:4])  # the originals
    assert len({tuple(row.tolist()) for row in fresh[2][:8]}) > 5
    whole, alone = drawn(CriticalTokens(0.5, 2, 0.3)), drawn(CriticalTokens(0.5, 2, 0.3), micro_batch=3, prompts=1)
    assert torch.equal(whole[2][:8] * whole[4][:8], alone[2] * alone[4])
    uncertain = torch.tensor([[0.1, 0.9, 0.5, 2.0], [0.3, 0.2, 0.1, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)
    generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
    assert CriticalTokens().places(uncertain, mask, generators).tolist() == [1, 0]
    found = {CriticalTokens(top=2).places(uncertain, mask, generators)[0].item() for _ in range(20)}
    assert found == {1, 2}


def test_semantic_entropy_by_hand():
    """Its pairs one by one, as ROSE's cosine-entropy has them: opposite meanings count most, likely ones of one meaning
    least."""
    embeddings = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [-1.0, 0.0]])
    shares = [[0.4, 0.4, 0.1, 0.1], [0.25] * 4, [0.45, 0.05, 0.05, 0.45], [0.45, 0.45, 0.05, 0.05]]
    def entropy(probabilities: list[float], kept: tuple[int, ...]) -> float:
        pairs = [(i, j) for i in kept for j in kept if i != j]
        alike = sum(probabilities[i] * probabilities[j]
                    * torch.cosine_similarity(embeddings[i], embeddings[j], dim=0).item() for i, j in pairs)
        return alike * sum(share * math.log(share) for share in probabilities)
    found = semantic_entropy(torch.tensor(shares).log(), embeddings, 20).tolist()
    assert found == pytest.approx([entropy(each, (0, 1, 2, 3)) for each in shares], abs=1e-5)
    assert found[2] > found[1] > found[3]
    assert semantic_entropy(torch.tensor(shares[:1]).log(), embeddings, 2).item() == pytest.approx(
        entropy(shares[0], (0, 1)), abs=1e-5)
    certain = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).log()
    assert semantic_entropy(certain, embeddings, 20).item() == 0


@pytest.mark.parametrize("part", [{"draws": {"type": "CriticalTokens"}}, {"decoding": {"type": "AnnealedDecoding"}}])
def test_masks_are_not_drawn_one_after_the_other(part):
    with pytest.raises(UserError, match="got a method of causal language models"):
        validate.resolve(tiny_runs.config("masks", "grpo", part), "masks")

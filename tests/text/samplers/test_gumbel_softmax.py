"""DRAKES: the process and its KL by enumeration, the relaxation's gradient, what is in the graph, runs, an optimum."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import one_hot

from flowgrpo import methods
from flowgrpo.methods import validate
from flowgrpo.objectives.kl import Linear
from flowgrpo.objectives.surrogates import RewardAscent
from flowgrpo.run import run
from flowgrpo.text.policies.masked_lm import MaskedLM
from flowgrpo.text.rewards.embeddings import SoftTexts, letters
from flowgrpo.text.samplers.decoding import Unmasking
from flowgrpo.text.samplers.gumbel_softmax import GumbelSoftmax, divergence, straight_through, walk
from flowgrpo.text.targets import RelaxedTraces
from flowgrpo.training import sampling
from tests.helpers import tiny_dna, updates
from tests.helpers import tiny_text as tiny
from tests.helpers.refusals import message
from tests.helpers.tables import close, draw
from tests.helpers.tiny_dna import try_drakes

F64 = torch.float64
SIZE, LENGTH = 3, 3  # tokens of the toy, the mask after them, and places
RANDOM = Unmasking(order="random")


def blank(rows: int, length: int = LENGTH, size: int = SIZE) -> torch.Tensor:
    return one_hot(torch.full((rows, length), size), size + 1).to(F64)


def toy(table: torch.Tensor):
    """Logits of answers x [n,L,V] from a table [S,L,n] of all states' logits; linear in every place of x."""
    length, size = table.shape[1:]
    def logits(x: torch.Tensor) -> torch.Tensor:
        of = x[:, 0]
        for place in range(1, length):
            of = (of[..., None] * x[:, place, None]).flatten(1)
        found = (of @ table.flatten(1)).unflatten(1, (length, size))
        return torch.cat([found, found.new_full((len(x), length, 1), -torch.inf)], -1)
    return logits


def noise(rows: int, length: int = LENGTH, size: int = SIZE, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(rows, length, generator=generator, dtype=F64),
            -torch.empty(rows, length, size + 1, dtype=F64).exponential_(generator=generator).log())


# --- the process -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("length, per_step", [(2, 1), (3, 1), (3, 2)])
def test_the_kl_of_a_process_is_that_of_its_paths(length, per_step):
    """Every order and every sequence, forced by the noise: the mean of the walk's KL is the sum of P log(P / Q)."""
    tables = draw(2, (SIZE + 1) ** length, length, SIZE)
    orders = torch.tensor(list(itertools.permutations(range(length))))
    every = tiny_dna.sequences(SIZE, length)
    order = orders.repeat_interleave(len(every), 0)  # order[0] is the place that is drawn first
    ids = every.repeat(len(orders), 1)
    lots = torch.zeros(order.shape, dtype=F64).scatter(1, order, torch.arange(length, 0, -1.0, dtype=F64)
                                                       .expand_as(order))
    p, q = (toy(table) for table in tables)
    found, kl = walk(p, q, blank(len(ids), length), Unmasking(order="random", per_step=per_step), GumbelSoftmax(kl=1.0),
                     lots, 1e6 * one_hot(ids, SIZE + 1))
    assert torch.equal(found, one_hot(ids, SIZE + 1).to(F64))
    def told(logits) -> torch.Tensor:
        total, states = torch.zeros(len(ids), dtype=F64), torch.full_like(ids, SIZE)
        for step in range(0, length, per_step):
            at = order[:, step:step + per_step]
            each = logits(one_hot(states, SIZE + 1).to(F64)).log_softmax(-1).gather(2, ids[..., None])[..., 0]
            total, states = total + each.gather(1, at).sum(1), states.scatter(1, at, ids.gather(1, at))
        return total
    path = told(p).exp() / len(orders)
    expected = (path * (told(p) - told(q))).sum()
    close(path.sum(), 1.0)
    close((path * kl).sum(), expected.item())
    if per_step == 1:
        own, other = (tiny_dna.Process(lambda _, table=table: table.softmax(-1), SIZE, length) for table in tables)
        close(own.divergence(other), expected.item())
        close(torch.zeros(len(every), dtype=F64).index_add(0, torch.arange(len(every)).repeat(len(orders)), path),
              own.finals.tolist())


def test_divergences_and_optima_of_known_chains():
    p, q = draw(2, 5, 4).softmax(-1)
    close(divergence(p.log(), q.log()), (-p + q + p * (p.log() - q.log())).sum(-1).tolist())
    one, other = torch.tensor([[0.0, -torch.inf], [math.log(0.25), -torch.inf]], dtype=F64).requires_grad_()
    found = divergence(one, other)
    found.backward()
    close(found, math.log(4))
    every = tiny_dna.sequences(4)
    law = try_drakes.START[every[:, 0]].double() * try_drakes.NEXT[every[:, :-1], every[:, 1:]].double().prod(1)
    rewards = try_drakes.weights(4).double().gather(1, every.T).sum(0)
    assert try_drakes.optimum(4, 0.5) == pytest.approx(tiny_dna.optimum(law, rewards, 0.5), abs=1e-10)


def test_tokens_have_the_models_law_and_the_soft_gradient():
    count, table = 4000, draw((SIZE + 1) ** 2, 2, SIZE)
    x, _ = walk(toy(table), toy(table), blank(count, 2), RANDOM, GumbelSoftmax(0.1, kl=0.0), *noise(count, 2))
    law = tiny_dna.Process(lambda _: table.softmax(-1), SIZE, 2).finals
    shares = torch.bincount(x.argmax(-1) @ torch.tensor([SIZE, 1]), minlength=SIZE**2) / count
    assert ((shares - law).abs() <= 4 * (law * (1 - law) / count).sqrt()).all()
    logits, weight = draw(6, 4, seed=1).requires_grad_(), draw(6, 4, seed=2)
    soft = (logits / 0.5).softmax(-1)
    hard = straight_through(soft)
    assert torch.equal(hard, one_hot(logits.argmax(-1), 4).to(F64))
    [found], [expected] = (torch.autograd.grad((x * weight).sum(), logits, retain_graph=True) for x in (hard, soft))
    close(found, expected.tolist())


# --- the gradient ----------------------------------------------------------------------------------------------------
def of_binary(temperature: float, logit: float) -> float:
    """The mean gradient of the chance of the first of two tokens by its logit, over all noise: the difference of two
    Gumbels is logistic, and its quantiles stand for it."""
    u = (torch.arange(20000, dtype=F64) + 0.5) / 20000
    gumbels = torch.zeros(len(u), 1, 3, dtype=F64)
    gumbels[:, 0, 0] = (u / (1 - u)).log()
    at = torch.tensor(logit, dtype=F64, requires_grad=True)
    def logits(x):
        zero = at.new_zeros(())
        return torch.stack([at, zero, zero - torch.inf]).expand(len(x), 1, 3)
    x, _ = walk(logits, logits, blank(len(u), 1, 2), RANDOM, GumbelSoftmax(temperature, kl=0.0),
                torch.zeros(len(u), 1), gumbels)
    close(x[:, 0, 0].mean(), torch.tensor(logit).sigmoid().item(), 1e-4)
    x[:, 0, 0].mean().backward()
    return at.grad.item()


def test_the_bias_of_the_gradient_vanishes_in_the_hard_limit():
    assert of_binary(1.0, 0.0) == pytest.approx(1 / 6, abs=1e-6)  # the mean of u (1 - u); the derivative is 1/4
    for logit in (0.0, 0.8):
        p = 1 / (1 + math.exp(-logit))
        error = [abs(of_binary(temperature, logit) - p * (1 - p)) for temperature in (0.4, 0.2, 0.1)]
        assert error[1] < error[0] / 2 and error[2] < error[1] / 2 and error[2] < 0.01 * p * (1 - p) + 0.004


def test_the_kls_gradient_is_that_of_finite_differences():
    """Through the states too, where tokens are mixtures and so smooth."""
    part, given = GumbelSoftmax(0.7, kl=1.0, relaxed=True), noise(5)
    base, table = toy(draw(64, 3, 3, seed=1)), draw(64, 3, 3, seed=2).requires_grad_()
    def total(table):
        return walk(toy(table), base, blank(5), RANDOM, part, *given)[1].sum()
    [found], moved = torch.autograd.grad(total(table), table), draw(64, 3, 3, seed=3)
    shift = 1e-6
    expected = (total(table.detach() + shift * moved) - total(table.detach() - shift * moved)) / (2 * shift)
    assert (found * moved).sum().item() == pytest.approx(expected.item(), rel=1e-6)
    free = walk(toy(table), base, blank(5), RANDOM, GumbelSoftmax(0.7, kl=1.0), *given)[1].sum()
    assert (torch.autograd.grad(free, table)[0] - found).abs().max() > 1e-3  # one-hot tokens: another way


@pytest.mark.parametrize("relaxed", [False, True])
@pytest.mark.parametrize("last", [1, 2, 3])
def test_nothing_before_the_truncation_has_a_gradient(last, relaxed):
    weight, reward = draw(3, 64, 3, 3).requires_grad_(), draw(3, 4)
    def gradient(of_kl: bool, truncate_kl: bool) -> torch.Tensor:
        turn = itertools.count()
        part = GumbelSoftmax(last=last, kl=1.0, truncate_kl=truncate_kl, relaxed=relaxed)
        x, kl = walk(lambda x: toy(weight[next(turn)])(x), toy(weight[0].detach() / 2), blank(6), RANDOM, part,
                     *noise(6))
        return torch.autograd.grad(kl.sum() if of_kl else (x * reward).sum(), weight)[0].abs().amax((1, 2, 3))
    for found in (gradient(False, False), gradient(True, True)):
        assert (found[:3 - last] == 0).all() and (found[3 - last:] > 1e-4).all()
    assert (gradient(True, False) > 1e-4).all()


def test_the_walk_is_the_same_and_its_defaults():
    table, base = draw(64, 3, 3).requires_grad_(), draw(64, 3, 3, seed=1)
    for part in (GumbelSoftmax(last=2), GumbelSoftmax(0.3, last=1, relaxed=True)):
        x, kl = walk(toy(table), toy(base), blank(8), RANDOM, part, *noise(8))
        with torch.no_grad():
            again = walk(toy(table), toy(base), blank(8), RANDOM, part, *noise(8))
        assert torch.equal(x, again[0]) and torch.equal(kl, again[1]) and not again[0].requires_grad
        assert set(x.unique().tolist()) == {0.0, 1.0} and (x.sum(-1) == 1).all() and (x[..., -1] == 0).all()
    found = methods.preset("drakes")
    assert (found.rollout.decoding, found.target, found.loss.surrogate) == (RANDOM, RelaxedTraces(), RewardAscent())
    assert found.target.relaxation == GumbelSoftmax(1.0, None, 50, 0.1, False, False)
    assert methods.preset("dapo", "drakes") == found
    cooling = GumbelSoftmax(1.0, Linear(0.2))
    assert [cooling.at_epoch(epoch, 5).temperature for epoch in range(5)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    assert "masked language models" in message(validate.resolve, tiny.config(method="drakes"), "tokens")


# --- the parts -------------------------------------------------------------------------------------------------------
def test_letters_of_both_kinds_of_texts():
    tokens = tuple(try_drakes.TOKENS)
    ids = torch.tensor([[3, 6, 1, 4], [5, 5, 3, 6]])
    counted = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    soft = SoftTexts(one_hot(ids, 8).float() * counted[..., None], tokens)
    assert torch.equal(letters(soft, "ACGT"), letters(["AT", "GGAT"], "ACGT"))
    assert letters(["AT", "GGAT"], "TA").sum((0, 1)).tolist() == [2, 2] and letters([], "AC").shape == (0, 0, 2)
    assert torch.equal(soft[[1]].weights, soft.weights[[1]]) and len(soft) == 2
    assert "'N' is none of the model's 8 tokens" in message(letters, soft, "ACGTN")


# --- runs ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def trained():
    """The weights of the tiny model, trained once."""
    return tiny_dna.model()[0].state_dict()


def loaded(trained):
    found = tiny_dna.model(steps=0)
    found[0].load_state_dict(trained)
    return found


def made(trained, rank: int = 0, prompts=("=", "=="), **options):
    own = MaskedLM(*loaded(trained), tiny.Adapter(rank=rank), tiny.Text(max_tokens=tiny_dna.LENGTH))
    trainer = tiny.trainer(own, {"motif": try_drakes.motif}, method="drakes", reward="motif", adapter__rank=rank,
                           text__max_tokens=tiny_dna.LENGTH, **options)
    trainer.prompts = [tiny.Prompt(text) for text in prompts]
    return trainer


@pytest.mark.parametrize("rank", [0, 2])
def test_two_epochs_move_the_weights_and_the_kl_is_to_the_base(trained, rank):
    trainer = made(trained, rank)
    policy, asked = trainer.policy, trainer.rollouts.conditioning(trainer.prompts)
    before = policy.weights.snapshot()
    for trainer.epoch in range(2):
        metrics = trainer.run_epoch()
        assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 1e-4
        if trainer.epoch == 0:
            assert metrics["loss"] == pytest.approx(-metrics["reward/motif/mean"], abs=1e-5)  # the KL is still 0
    assert trainer.first_ratio.max_log_ratio <= 1e-6
    assert (trainer.optimization.update, trainer.optimization.skipped) == (2, 0)
    assert any(not torch.equal(each, before[key]) for key, each in policy.weights.snapshot().items())
    tiny.stir(policy, 0.05)
    prompts, generators = torch.tensor([0, 1, 0, 1]), policy.generators(range(4))
    with torch.no_grad():
        answers, kl = policy.sample_relaxed(asked, prompts, generators, RANDOM, GumbelSoftmax(),
                                            trainer.rollouts.base_weights)
        with policy.reference():
            again = policy.sample_relaxed(asked, prompts, policy.generators(range(4)), RANDOM, GumbelSoftmax(),
                                          trainer.rollouts.base_weights)[1]
        for row, p in enumerate(prompts.tolist()):
            given = asked.ids[p][None]
            inputs = torch.cat([given, answers[row].argmax(-1)[None]], 1)
            plain = policy.model(input_ids=inputs).logits[:, given.shape[1]:, :-1]
            soft = policy._soft_logits(given, None, answers[row][None])[..., :-1]
            with policy.reference():
                base = policy.model(input_ids=inputs).logits[:, given.shape[1]:, :-1]
            held = policy._soft_logits(given, trainer.rollouts.base_weights, answers[row][None])[..., :-1]
            torch.testing.assert_close(soft, plain, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(held, base, rtol=1e-5, atol=1e-5)
            assert (held - soft).abs().max() > 1e-3
    assert (kl > 1e-4).all() and again.abs().max() < 1e-5


def test_neither_micro_batches_nor_checkpoints_change_the_gradient(trained):
    found = []
    for size, checkpointing in ((1, False), (3, False), (8, False), (8, True)):
        trainer = made(trained, train__micro_batch=size)
        trainer.policy.checkpointing = checkpointing
        tiny.stir(trainer.policy, 0.02)
        found.append(updates.gradient(trainer, *updates.credited(trainer)))
    updates.assert_one_gradient(found)


def test_rows_that_are_kept_keep_their_noise(trained):
    trainer = made(trained)
    parts, asked, _ = sampling.sample(trainer, trainer.prompts[:2])
    keep = torch.tensor([False, True, True, False])
    kept = parts[0].with_advantages([torch.arange(4.0)], [keep])
    [(_, _, new)] = trainer.rollouts.replay(kept, asked)
    torch.testing.assert_close(new.logp.detach(), parts[0].transitions[0].old.logp[keep], rtol=0, atol=1e-5)
    assert parts[0].with_advantages([torch.zeros(4)], [keep & False]) is None


def test_the_tuned_model_approaches_the_known_optimum(trained):
    """max E R - alpha KL is reached by p exp(R / alpha) / Z: its reward and its KL are known by enumeration. What is
    left is the bias of the relaxation, and the model's conditionals, which are of one joint law only nearly."""
    alpha, epochs = 0.5, 60
    trainer = made(trained, prompts=("=",), train__prompts=1, train__group=128, train__micro_batch=128,
                   train__epochs=epochs, train__lr=3e-3, train__schedule="linear",
                   parts={"relaxation": {"kl": alpha, "temperature": 0.5, "schedule": {"type": "Linear", "last": 0.2}}})
    base = tiny_dna.of_model(trainer.policy)
    ids = tiny_dna.sequences(tiny_dna.SIZE - 1)
    ended = (ids == 1).cumsum(1) > 0
    weights = one_hot(ids, tiny_dna.SIZE).to(F64) * ~ended[..., None]
    rewards = try_drakes.motif(SoftTexts(weights, tuple(try_drakes.TOKENS)), None)
    best, held = tiny_dna.optimum(base.finals, rewards, alpha)
    for trainer.epoch in range(epochs):
        trainer.run_epoch()
    tuned = tiny_dna.of_model(trainer.policy)
    start, reward, kl = (base.finals @ rewards).item(), (tuned.finals @ rewards).item(), tuned.divergence(base).item()
    reached = (reward - alpha * kl - start) / (best - alpha * held - start)
    assert 0.94 <= reached <= 1.0  # no process does better, whatever its conditionals
    assert reward == pytest.approx(best, abs=0.06 * (best - start)) and kl == pytest.approx(held, rel=0.1)


def test_a_run_from_the_configuration(trained, tmp_path):
    settings = tiny.config(tmp_path, method="drakes", reward="motif", text__max_tokens=4, adapter__rank=2,
                           train__epochs=1)
    prompts = [tiny.Prompt("=" * n) for n in (1, 1, 2, 2, 3, 3)]
    summary = run(settings, pipe=loaded(trained), functions={"motif": try_drakes.motif}, prompts=prompts)
    assert summary["max_first_log_ratio"] <= 1e-5 and math.isfinite(summary["after"]["motif"])
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    given = dict(pipe=loaded(trained), functions={"motif": tiny.short}, prompts=prompts)
    assert "reward 'motif' is not differentiable" in message(run, settings, **given)

"""References: which weights a KL holds the policy to, epoch by epoch, and that a resumed run holds to the same."""

import pytest
import torch
from peft.tuners.lora import LoraLayer

from flowgrpo.methods.validate import resolve
from flowgrpo.objectives.references import EMA, Base, PreviousPolicy, WeightAverage
from flowgrpo.storage import checkpoint
from flowgrpo.training import sampling, state
from flowgrpo.training.endings import save_whole
from tests.helpers import tiny, tiny_runs
from tests.helpers.refusals import message

PARTS = {"ema": {"type": "EMA", "decay": 0.75}, "old": {"type": "PreviousPolicy", "every": 2},
         "soup": {"type": "WeightAverage", "every": 1, "size": 2}}


def recipe(reference: dict, weight: float = 0.01, **kl) -> dict:
    return {"kl": {"weight": weight} | kl, "reference": reference}


def numbers(part, values: list[float]) -> list[list[float]]:
    """What a reference holds in each epoch, of one weight whose value at the start of epoch i is values[i]."""
    held, found = [], []
    for epoch, value in enumerate(values):
        held = part(held, lambda value=value: {"w": torch.tensor([value])}, epoch)
        found.append([each["w"].item() for each in held])
    return found


@pytest.mark.parametrize("part, expected", [
    (Base(), [[], [], [], [], []]),
    (PreviousPolicy(), [[8.0], [4.0], [2.0], [6.0], [0.0]]),
    (PreviousPolicy(every=2), [[8.0], [8.0], [2.0], [2.0], [0.0]]),
    (EMA(decay=0.5), [[8.0], [6.0], [4.0], [5.0], [2.5]]),
    (EMA(decay=1), [[8.0]] * 5),
    (EMA(decay=0), [[8.0], [4.0], [2.0], [6.0], [0.0]]),
    (WeightAverage(every=1, size=2), [[8.0], [8.0, 4.0], [4.0, 2.0], [2.0, 6.0], [6.0, 0.0]]),
    (WeightAverage(every=2, size=3), [[8.0], [8.0], [8.0, 2.0], [8.0, 2.0], [8.0, 2.0, 0.0]]),
    (WeightAverage(every=3, size=1), [[8.0], [8.0], [8.0], [6.0], [6.0]])])
def test_what_is_held_by_hand(part, expected):
    assert numbers(part, [8.0, 4.0, 2.0, 6.0, 0.0]) == expected


def test_weights_that_are_not_asked_for_are_not_copied():
    def refuse():
        raise AssertionError("copied")
    held = [{"w": torch.ones(1)}]
    assert Base()([], refuse, 0) == []
    assert PreviousPolicy(3)(held, refuse, 4) is held and WeightAverage(3)(held, refuse, 4) is held


# --- the weights in place --------------------------------------------------------------------------------------------
def output(policy, held=None) -> torch.Tensor:
    """The policy's velocity, with `held` that of the reference."""
    conditioning = policy.encode(tiny.PROMPTS[:2])
    x = torch.randn(2, *tiny.LATENTS, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        if held is None:
            return policy.replay(conditioning, x, torch.tensor([1.0, 0.5, 0.0]), 0)
        with policy.reference(held):
            return policy.replay(conditioning, x, torch.tensor([1.0, 0.5, 0.0]), 0)


@pytest.mark.parametrize("rank", [2, 0])
def test_a_snapshot_is_in_place_inside_and_the_policy_is_back_outside(rank):
    policy = tiny.policy(rank=rank)
    base = output(policy)
    first, then = tiny.stir(policy).weights.snapshot(), output(policy)
    tiny.stir(policy, 0.3)
    now, kept = output(policy), policy.weights.snapshot()
    assert (now - then).abs().max() > 1e-3 < (then - base).abs().max()
    assert torch.equal(output(policy, [first]), then) and torch.equal(output(policy, []), base)
    with pytest.raises(RuntimeError, match="broken"), policy.reference([first, kept]):
        raise RuntimeError("broken")
    assert torch.equal(output(policy), now)
    torch.testing.assert_close(output(policy, [kept] * 3), now, rtol=1e-5, atol=1e-5)  # a soup of one and the same
    assert all(torch.equal(kept[key], value) for key, value in policy.weights.snapshot().items())


def test_a_soup_of_adapters_is_the_average_of_the_merged_weights():
    policy = tiny.policy()
    snapshots, layers = [], [m for m in policy.pipe.transformer.modules() if isinstance(m, LoraLayer)]
    merged = [torch.zeros_like(layer.base_layer.weight) for layer in layers]
    for scale in (0.2, 0.4, 0.1):
        snapshots.append(tiny.stir(policy, scale).weights.snapshot())
        for delta, layer in zip(merged, layers):
            delta += layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight / 3
    found, base = output(policy, snapshots), output(policy, [])
    factors = {key: torch.stack([each[key] for each in snapshots]).mean(0) for key in snapshots[0]}
    with torch.no_grad():
        for delta, layer in zip(merged, layers):
            layer.base_layer.weight += delta
    torch.testing.assert_close(found, output(policy, []), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for delta, layer in zip(merged, layers):
            layer.base_layer.weight -= delta
    # Which is neither the base nor what averaged factors give.
    assert (found - base).abs().max() > 1e-2 < (found - output(policy, [factors])).abs().max()


def test_a_soup_of_all_weights_is_their_mean():
    policy = tiny.policy(rank=0)
    snapshots = [policy.weights.snapshot(), tiny.stir(policy).weights.snapshot()]
    policy.weights.load({key: (value + snapshots[1][key]) / 2 for key, value in snapshots[0].items()})
    mean = output(policy)
    tiny.stir(policy)
    torch.testing.assert_close(output(policy, snapshots), mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shares", [(), (0.25, 0.75)])
def test_a_soup_of_given_adapters_is_the_average_of_what_they_add(shares, tmp_path):
    others = [tiny.policy(rank=rank, alpha=alpha) for rank, alpha in ((2, 3.0), (4, 4.0))]
    policy, merged = tiny.policy(rank=3), {}
    for number, (other, share) in enumerate(zip(others, shares or (0.5, 0.5))):
        tiny.stir(other, 0.2 + number).weights.save(tmp_path / str(number))
        for key, layer in other.weights.layers().items():
            delta = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            merged[key] = merged.get(key, 0) + share * delta
    soup = policy.weights.soup([str(tmp_path / "0"), str(tmp_path / "1")], shares)
    for key, layer in policy.weights.layers().items():
        product = soup[f"{key}.lora_B.default.weight"] @ soup[f"{key}.lora_A.default.weight"]
        torch.testing.assert_close(layer.scaling["default"] * product, merged[key], rtol=1e-4, atol=1e-6)
    assert (output(policy, [soup]) - output(policy, [])).abs().max() > 1e-2


def test_a_soup_of_whole_models_is_their_weighted_mean(tmp_path):
    policy = tiny.policy(rank=0)
    first = policy.weights.snapshot()
    policy.weights.save(tmp_path / "0")
    second = tiny.stir(policy).weights.snapshot()
    policy.weights.save(tmp_path / "1")
    soup = policy.weights.soup([str(tmp_path / "0"), str(tmp_path / "1")], (0.25, 0.75))
    for key, value in soup.items():
        torch.testing.assert_close(value, 0.25 * first[key] + 0.75 * second[key])
    (tmp_path / "2").mkdir()
    assert "2: got no weight transformer" in message(policy.weights.soup, [str(tmp_path / "2")], ())


# --- in a run --------------------------------------------------------------------------------------------------------
def made(reference: dict, **options):
    parts = recipe(reference, **options.pop("kl", {})) | {"plan": {"size": 2}}
    trainer = tiny.trainer(parts=parts, train__steps=4, train__lr=1e-2, **options)
    tiny.stir(trainer.policy)
    trainer.kl_reference.snapshots = trainer.kl_reference.next([], 0)
    return trainer


def test_an_adapter_that_has_not_moved_is_at_any_reference():
    for reference in ({"type": "Base"}, *PARTS.values()):
        trainer = tiny.trainer(parts=recipe(reference))
        assert trainer.run_epoch()["kl"] == 0


@pytest.mark.fast
def test_old_is_the_policy_at_the_start_of_the_epoch():
    found = tiny_runs.epochs(made({"type": "PreviousPolicy"}, train__epochs=3), 3)
    assert [each["kl"] for each in found] == [0, 0, 0]  # one update per epoch, before which the two are the same
    assert made({"type": "PreviousPolicy"}, train__updates=2).run_epoch()["kl"] > 1e-9
    found = tiny_runs.epochs(made({"type": "PreviousPolicy", "every": 2}, train__epochs=3), 3)
    assert found[0]["kl"] == found[2]["kl"] == 0 and found[1]["kl"] > 1e-9


def test_the_average_follows_the_weights_at_the_end_of_every_epoch():
    trainer = made(PARTS["ema"], train__epochs=3)
    expected, own = trainer.policy.weights.snapshot(), trainer.policy.weights.named
    for trainer.epoch in range(3):
        trainer.run_epoch()
        expected = {key: 0.75 * value + 0.25 * own[key].detach() for key, value in expected.items()}
        [held] = trainer.kl_reference.snapshots
        assert held.keys() == own.keys()  # of all that the model holds, the trainable weights alone
        for key, value in expected.items():
            torch.testing.assert_close(held[key], value)


def test_a_run_stays_at_the_soup_of_two_runs(tmp_path):
    for number, scale in enumerate((0.2, -0.2)):
        tiny.stir(tiny.policy(), scale).weights.save(tmp_path / str(number))
    models = [str(tmp_path / "0"), str(tmp_path / "1")]
    trainer = made({"type": "Soup", "models": models}, train__epochs=2)
    first = trainer.kl_reference.snapshots
    assert all(each["kl"] > 0 for each in tiny_runs.epochs(trainer, 2))
    assert trainer.kl_reference.snapshots is first and len(first) == 1
    of_one = made({"type": "Soup", "models": models[:1]})  # a LoRA's soup of one is that LoRA
    torch.testing.assert_close(of_one.kl_reference.snapshots[0], tiny.stir(tiny.policy(), 0.2).weights.snapshot())


def test_every_reference_gives_a_loss_of_its_own():
    found = []
    for reference in ({"type": "Base"}, PARTS["ema"], {"type": "PreviousPolicy"}, PARTS["soup"]):
        found.append(tiny_runs.epochs(made(reference, kl={"weight": 1.0}, train__epochs=2), 2)[-1]["loss"])
    assert all(abs(a - b) > 1e-7 for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize("reference", PARTS)
def test_a_resumed_run_holds_to_the_same_to_the_last_bit(reference, tmp_path):
    options = dict(kl={"schedule": {"type": "Adaptive", "target": 1e-7}}, train__epochs=4, train__updates=2)
    trainer = made(PARTS[reference], **options)
    for trainer.epoch in range(4):
        if trainer.epoch == 2:
            sampling.sample(trainer, trainer.prompts[:2])  # an epoch that is interrupted before its first update
            trainer.progress.saved_counters = state.counters(trainer)
            save_whole(trainer, tmp_path)
        metrics = trainer.run_epoch()
    again = made(PARTS[reference], **options)
    state.restore(again, checkpoint.latest(tmp_path / "checkpoints"))
    assert again.epoch == 2 and len(again.kl_reference.snapshots) == (2 if reference == "soup" else 1)
    for again.epoch in (2, 3):
        repeated = again.run_epoch()
    assert {key: value for key, value in repeated.items() if "seconds" not in key} == metrics
    assert again.memory == trainer.memory
    for ours, theirs in zip([again.policy.weights.snapshot(), *again.kl_reference.snapshots],
                            [trainer.policy.weights.snapshot(), *trainer.kl_reference.snapshots], strict=True):
        tiny_runs.assert_same_weights(ours, theirs)


def test_a_run_that_goes_on_with_another_reference_begins_it_anew(tmp_path):
    trainer = made({"type": "Base"})
    trainer.run_epoch()
    state.save(trainer, tmp_path)
    for reference, kept in ((PARTS["ema"], 1), ({"type": "Base"}, 0)):
        again = made(reference)
        state.restore(again, checkpoint.latest(tmp_path / "checkpoints"))
        assert len(again.kl_reference.snapshots) == kept
        if kept:
            tiny_runs.assert_same_weights(again.kl_reference.snapshots[0], again)
            state.save(again, tmp_path)  # which the second one passes over


# --- recipes ---------------------------------------------------------------------------------------------------------
def test_a_reference_is_read_where_a_kl_rises():
    settings = tiny.config(parts=recipe({"type": "EMA"}, weight=0.0, schedule={"type": "Linear", "last": 0.1}))
    assert resolve(settings).loss.reference == EMA()

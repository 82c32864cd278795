"""Hot path of a run: the host reads no value of the device in a step of a rollout or a micro-batch of a replay."""

import pytest
import torch
from accelerate import Accelerator

from flowgrpo.data.prompts import Prompt
from flowgrpo.device import to_device
from flowgrpo.distributed.processes import Processes
from flowgrpo.gaussian import log_prob
from flowgrpo.policies.build import make_policy
from flowgrpo.train import Trainer
from flowgrpo.training import credit
from flowgrpo.training.metrics import UpdateStats
from flowgrpo.training.optimizer import shares
from flowgrpo.types import Gaussian
from tests.helpers import loop, tiny
from tests.helpers.syncs import META, HostSyncs

METHODS = {"flow_grpo": {"kl": {"weight": 0.04}}, "grpo_guard": {"kl": {"weight": 0.04}}, "flow_dppo": {},
           "diffusion_nft": {}}


def test_what_makes_the_host_wait_is_counted():
    x = torch.empty(4, 2, device=META)
    with HostSyncs() as host:
        assert x.sum().item() == 0 and torch.equal(x, x) and x[:, 0].cpu().tolist() == [0.0] * 4
        x[x > 0]
        torch.ones(1).to(META)
        assert sum(host.waits.values()) == 5, host.waits
        to_device(torch.ones(4), META)
        log_prob(Gaussian(x, torch.tensor(0.5)), x + 1)  # a deviation on the CPU
    assert sum(host.waits.values()) == 5, host.waits


@pytest.mark.parametrize("method", METHODS)
def test_no_step_of_a_rollout_and_no_replayed_micro_batch_waits(method):
    settings = tiny.config(method=method, parts=METHODS[method], train__micro_batch=2)
    host = HostSyncs()
    with torch.autograd.set_multithreading_enabled(False), host:
        policy = make_policy(settings, META, tiny.sd3())
        scores = iter(range(100))
        trainer = Trainer(settings, Accelerator(cpu=True), policy,
                          {"red": lambda images, prompts: [float(next(scores)) for _ in prompts]},
                          ([Prompt(text) for text in tiny.PROMPTS], []))
        trainer.first_ratio.max_log_ratio = 0.0  # there are no values to compare
        epoch = loop.draw(trainer)
        parts, conditioning = epoch.parts, epoch.conditioning
        epoch.parts = credit.compare(trainer, epoch)
        host.waits.clear()
        [exploration] = trainer.rollouts.explorations(0)[:1]
        generators = policy.generators(range(2))
        policy.run(exploration.task(0, exploration.steps, generators), conditioning.rows(torch.tensor([0, 1])), None,
                   generators)
        [(first, count)] = host.waits.items()
        assert "torch_utils.py" in first and count == 1, host.waits  # the copy of the initial noise
        host.waits.clear()
        trainer.kl_reference.start_epoch(epoch, trainer.rollouts, 0, 1)
        epoch.weights = trainer.rollouts.step_weights(parts, 0)
        steps = shares(epoch.parts, trainer.geometry, trainer.processes, trainer.method.loss.reduction)
        host.waits.clear()
        stats = UpdateStats()
        for share, count in steps:
            for part in share:
                trainer.backward(epoch, part, count, stats)
        assert len(stats.batches) > 2 and not host.waits, host.waits
        assert all(value.grad is not None for value in policy.weights.parameters())


def test_statistics_leave_out_the_decisions_that_do_not_count():
    stats, mask = UpdateStats(), torch.tensor([[True, False], [True, True]])
    values = torch.tensor([[0.1, 9.0], [0.2, 0.3]])
    stats.norms.append(torch.tensor(2.0))
    stats.add(3, mask, values, values > 0.15, values * 10)
    found = stats.summary()
    assert found["loss"] == pytest.approx(2.0) and found["log_ratio_max"] == pytest.approx(0.3)
    assert found["clip_fraction/step_3"] == pytest.approx(2 / 3) and "kl" not in found and found["grad_norm"] == 2


def test_statistics_of_two_processes_are_those_of_all_decisions_in_eight_numbers_a_step():
    """Two batches of grid step 1 and one of step 4, against the means of all their decisions; a KL in two of three."""
    generator = torch.Generator().manual_seed(0)
    batches = [(step, torch.rand(3, 5, generator=generator) > 0.3, *torch.randn(3, 3, 5, generator=generator))
               for step in (1, 4, 1)]
    sent = []

    class Two(Processes):
        """Another process that had the last batch."""

        def gather(self, rows):
            sent.append(rows.numel())
            return torch.cat([rows, others])

    def added(*rows):
        stats = UpdateStats()
        for number in rows:
            step, mask, ratio, loss, kl = batches[number]
            stats.add(step, mask, ratio, ratio > 0, loss, kl if number else None)
        return stats

    stats, alone = added(0, 1), added(2)
    others = torch.stack(alone.batches).double()
    found = stats.summary(Two())
    mask, ratio, loss, kl = (torch.stack([batch[place] for batch in batches]) for place in (1, 2, 3, 4))
    first = torch.tensor([True, False, True])[:, None, None] & mask
    assert sent == [16] and found.keys() == {
        "loss", "grad_norm", "trained_updates", "log_ratio_max", "clip_fraction", "kl", "ratio/step_1", "ratio/step_4",
        "clip_fraction/step_1", "clip_fraction/step_4"}
    for name, wanted in (("loss", loss[mask].mean()), ("log_ratio_max", ratio[mask].abs().max()),
                         ("clip_fraction", (ratio[mask] > 0).float().mean()), ("kl", kl[1:][mask[1:]].mean()),
                         ("ratio/step_1", ratio[first].exp().mean()),
                         ("clip_fraction/step_4", (ratio[1][mask[1]] > 0).float().mean())):
        assert found[name] == pytest.approx(wanted.item(), rel=1e-5), name

"""Hot path of a run: the host reads no value of the device in a step of a rollout or a micro-batch of a replay."""

import pytest
import torch
from accelerate import Accelerator

from flowgrpo.data.prompts import Prompt
from flowgrpo.device import to_device
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
        assert len(stats.decisions) > 2 and not host.waits, host.waits
        assert all(value.grad is not None for value in policy.weights.parameters())


def test_statistics_leave_out_the_decisions_that_do_not_count():
    stats, mask = UpdateStats(), torch.tensor([[True, False], [True, True]])
    values = torch.tensor([[0.1, 9.0], [0.2, 0.3]])
    stats.norms.append(torch.tensor(2.0))
    stats.add(3, mask, values, values > 0.15, values * 10)
    found = stats.summary()
    assert found["loss"] == pytest.approx(2.0) and found["log_ratio_max"] == pytest.approx(0.3)
    assert found["clip_fraction/step_3"] == pytest.approx(2 / 3) and "kl" not in found and found["grad_norm"] == 2

"""Several steps in one batch of a replay: which pipelines take it, what it saves, and that it changes nothing."""

import contextlib

import pytest
import torch
from diffusers import DDIMScheduler

from flowgrpo.config.sections import Memory
from flowgrpo.data.prompts import Prompt
from flowgrpo.policies.pipelines.probes import copies
from flowgrpo.samplers.grids import make_grid, shift_grid
from flowgrpo.samplers.growth import explore, replay, rescore
from flowgrpo.samplers.kernels import Euler, FlowSDE
from flowgrpo.samplers.rollout import RolloutSpec, seeder
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.tools.check.tiny import make
from flowgrpo.tools.check.tiny.unets import lcm
from flowgrpo.training import sampling
from flowgrpo.training.metrics import UpdateStats, merge_steps
from flowgrpo.training.optimizer import decisions
from tests.helpers import loop, tiny
from tests.helpers.refusals import message
from tests.samplers.test_rollout import BINARY, largest_log_ratio

DDIM_V = DDIMScheduler(prediction_type="v_prediction", clip_sample=False, **tiny.SD15_NOISE)
PIPELINES = {"sd3": tiny.sd3, "flux": tiny.flux, "sd15": tiny.sd15, "v_prediction": lambda: tiny.sd15(DDIM_V),
             "consistency": lambda: tiny.sd15(lcm())}


def grown(policy, micro_batch: int = 24, **options):
    """Three prompts' trees in one part, or the first of several, and their conditioning: 1, 2, 2, 4 and 4 states."""
    conditioning = policy.encode(["red", "blue", "green"])
    plan = RolloutSpec(shift_grid(6, 3.0), BINARY, FlowSDE(0.7), Euler(), 4, **options)
    return next(explore(policy, conditioning, [plan], micro_batch, seeder(0, 0))), conditioning


def policy_of(name: str, guidance: float = 1.0, **options):
    return tiny.stir(tiny.policy(PIPELINES[name](), guidance=guidance, **options))


@contextlib.contextmanager
def calls(policy):
    """Inside, the rows of every call of the denoisers are appended to the list."""
    found: list[int] = []
    with contextlib.ExitStack() as hooks:
        for module in policy.denoisers.values():
            hooks.enter_context(module.register_forward_hook(lambda _, args, out: found.append(len(out[0]))))
        yield found


@pytest.fixture(scope="module")
def policy():
    return policy_of("sd3")


@pytest.fixture(scope="module")
def tree(policy):
    return grown(policy, keep_means=True)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_rows_of_different_steps_give_what_each_gives_alone(name, guidance):
    policy = policy_of(name, guidance)
    conditioning = policy.encode(["red", "blue", "green"])
    before = policy.evaluations
    assert policy.vector(conditioning) and policy.evaluations == before
    grid, timesteps = make_grid("shifted", 6, 3.0, policy.stock)
    steps, rows = torch.tensor([4, 0, 4, 2, 1]), conditioning.rows(torch.tensor([0, 1, 2, 0, 1]))
    x, _ = policy.run(Segment(grid, range(0), timesteps=timesteps), rows, None, policy.generators(range(5)))
    found = policy.replay(rows, x, grid, steps, timesteps)
    each = [policy.replay(rows.rows(torch.tensor([i])), x[i:i + 1], grid, int(step), timesteps)
            for i, step in enumerate(steps)]
    assert found.abs().max() > 0.1 and found.requires_grad
    torch.testing.assert_close(found, torch.cat(each), rtol=0, atol=1e-5 * found.abs().max().item())
    moved = policy.replay(rows, x, grid, steps.roll(1), timesteps)
    assert (moved - found).abs().max() > 1e-2 * found.abs().max()  # the steps matter


def test_guidance_tells_how_often_the_rows_stand_in_a_batch():
    found = {}
    for name, guidance in (("sd3", 1.0), ("sd3", 4.0), ("flux", 4.0), ("sd15", 4.0)):
        policy = policy_of(name, guidance)
        policy.vector(policy.encode(["red"]))
        found[name, guidance] = policy._copies[guidance]
    assert found == {("sd3", 1.0): 1, ("sd3", 4.0): 2, ("flux", 4.0): 1, ("sd15", 4.0): 2}


def test_a_pipeline_that_chooses_an_expert_by_the_step_takes_one_and_a_run_that_asks_for_more_is_told():
    pipe, call = make("WanPipeline (2.2)")
    policy = tiny.policy(pipe, call=call)
    assert not policy.vector(policy.encode(["red"]))
    told = message(tiny.trainer(policy, train__pack=True).rollouts.conditioning, [Prompt("red")])
    assert "takes one timestep per call at guidance 1: set it to false" in told


def test_a_model_that_reads_one_step_for_all_rows_is_found_out():
    def output(task, read):
        at = torch.tensor([task.steps.start] * 2) if task.rows is None else read(task.rows)
        return torch.tensor([[1.0], [2.0]]) + at[:, None]
    assert copies(lambda task: output(task, lambda rows: rows), "flow", True) == 1
    assert copies(lambda task: output(task, lambda rows: rows[:1].expand(2)), "flow", True) == 0
    assert copies(lambda task: torch.ones(2, 1) if task.rows is None else torch.full((2, 1), 1.1), "flow", True) == 0


# 3 prompts: 3, 6, 6, 12 and 12 states, 39 in all.
@pytest.mark.parametrize("micro_batch, alone, packed", [
    (24, [3, 6, 6, 12, 12], [24, 15]),
    (40, [3, 6, 6, 12, 12], [39]),
    (10, [3, 6, 6, 10, 2, 10, 2], [10, 10, 10, 9]),
    (3, [3, 3, 3, 3, 3] + [3] * 8, [3, 3, 3, 3, 3] + [3] * 8),  # nothing to save
])
def test_calls_of_the_denoiser_by_hand(policy, tree, micro_batch, alone, packed):
    part, conditioning = tree
    policy.vector(conditioning)
    for pack, expected in ((False, alone), (True, packed)):
        with torch.no_grad(), calls(policy) as found:
            list(replay(policy, conditioning, part, micro_batch, pack))
        assert found == expected and sum(found) == 39


@pytest.mark.parametrize("options", [{"checkpointing": True}, {"memory": Memory(states="cpu")}])
def test_gradients_go_with_the_options_that_save_memory(options):
    found = []
    for pack, own in ((False, {}), (True, options)):
        policy = policy_of("sd3", **own)
        part, conditioning = grown(policy)
        assert policy.vector(conditioning)
        for k, rows, new in replay(policy, conditioning, part, 10, pack):
            (new.logp.sum() * (k + 1) / 39).backward()
        found.append(torch.cat([p.grad.flatten() for p in policy.weights.parameters()]))
    assert found[0].abs().max() > 1e-3
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("micro_batch", [24, 10, 5, 40])
def test_scores_are_those_of_a_replay_step_by_step(policy, tree, micro_batch):
    part, conditioning = tree
    with torch.no_grad():
        alone, packed = (rescore(part, replay(policy, conditioning, part, micro_batch, pack)) for pack in (False, True))
    for taken, one, other in zip(part.transitions, alone.transitions, packed.transitions, strict=True):
        torch.testing.assert_close(other.old.logp, one.old.logp, rtol=0, atol=1e-6)
        torch.testing.assert_close(other.old.mean, one.old.mean, rtol=0, atol=1e-5)
        torch.testing.assert_close(other.old.logp, taken.old.logp, rtol=0, atol=1e-6)


def trained(pack: bool, name: str, guidance: float, method: str, **options):
    """A trainer with what it sampled before its first update: parts with advantages, and the conditioning."""
    policy = policy_of(name, guidance)
    trainer = tiny.trainer(policy, method=method, train__pack=pack, train__guidance=guidance, **options)
    parts, conditioning, grouped = sampling.sample(trainer, trainer.prompts[:trainer.geometry.prompts])
    return trainer, list(loop.credit(trainer, parts, grouped, conditioning.prompts)), conditioning


def learned(trainer, parts, conditioning):
    """Of the parts' loss: the gradient, flat; its statistics by grid step; and the denoiser's calls."""
    stats, weights = UpdateStats(), tiny.step_weights(trainer, parts)
    with calls(trainer.policy) as found:
        for part in parts:
            loop.backward(trainer, part, conditioning, weights, decisions(parts), stats)
    gradient = torch.cat([p.grad.flatten() for p in trainer.policy.weights.parameters() if p.grad is not None])
    return gradient, merge_steps(torch.stack(stats.batches).double()), len(found)


# 2 prompts x 4 samples in one part. flow_grpo: 8 rows at each of 5 steps, by the policy and by the reference of its KL;
# in batches of 20, 40 rows are 2 calls. mix_grpo: 2 rows that share their prefix, and 8 at each of 3 steps: 26.
# ddpo: 5 steps. tree_rpo: 16 leaves, one prompt in a part, and the pull of layer tuning.
@pytest.mark.parametrize("name, guidance, method, alone, packed", [
    ("sd3", 1.0, "flow_grpo", 10, 4), ("sd3", 4.0, "flow_grpo", 10, 4), ("sd3", 1.0, "mix_grpo", 4, 2),
    ("flux", 3.5, "mix_grpo", 4, 2), ("sd15", 1.0, "ddpo", 5, 2), ("sd15", 4.0, "ddpo", 5, 2)])
def test_losses_and_gradients_are_those_of_a_replay_step_by_step(name, guidance, method, alone, packed):
    found = []
    for pack in (False, True):
        trainer, parts, conditioning = trained(pack, name, guidance, method, train__micro_batch=20)
        parts = trainer.first_ratio(parts, conditioning, print)
        assert trainer.first_ratio.max_log_ratio <= 1e-6
        found.append(learned(trainer, parts, conditioning))
    (gradient, scores, before), (other, others, after) = found
    assert (before, after) == (alone, packed)
    assert gradient.abs().max() > 1e-3
    torch.testing.assert_close(other, gradient, rtol=0, atol=1e-6)
    torch.testing.assert_close(others, scores, rtol=1e-5, atol=1e-5)  # sums of 8 decisions, each to 1e-6


def test_the_pull_of_layer_tuning_too():
    found = []
    for pack in (False, True):
        trainer, parts, conditioning = trained(pack, "sd3", 1.0, "tree_rpo", train__group=16, train__micro_batch=24)
        tiny.stir(trainer.policy, 0.05)  # away from where the samples were drawn: nothing pulls there
        assert any(taken.regression_target is not None for part in parts for taken in part.transitions)
        found.append(learned(trainer, parts, conditioning))
    (gradient, scores, before), (other, others, after) = found
    assert after < before and gradient.abs().max() > 1e-3
    torch.testing.assert_close(other, gradient, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(others, scores, rtol=1e-5, atol=1e-6)


def test_scores_that_are_not_followed_leave_no_gradient(policy, tree):
    part, conditioning = tree
    policy.weights.parameters()[0].grad = None
    for _, _, new in replay(policy, conditioning, part, 24, pack=True):
        assert new.logp.requires_grad
    assert all(p.grad is None for p in policy.weights.parameters())


def test_in_half_precision_scores_are_the_same_once_they_are_computed_in_the_same_batches():
    policy = tiny.stir(tiny.policy(tiny.sd3().to(torch.bfloat16), precision="bf16"))
    part, conditioning = grown(policy, 4)  # 1 state at its first step, in a batch alone
    assert policy.vector(conditioning)
    again = rescore(part, replay(policy, conditioning, part, 10, pack=True))
    assert largest_log_ratio(policy, conditioning, [part], 10, pack=True) < 1e-2
    assert largest_log_ratio(policy, conditioning, [again], 10, pack=True) == 0

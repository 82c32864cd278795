"""EXPO: bounded edits of final latents, their density, the critic, best of base and edited at equal scorer calls."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

from flowgrpo.advantages.baselines import Paired
from flowgrpo.cli import main
from flowgrpo.errors import UserError
from flowgrpo.evaluation.plan import Ledger, Place
from flowgrpo.evaluation.statistics import STUDENT, interval
from flowgrpo.export.export import card, lora, write_merged
from flowgrpo.files import tensors_of
from flowgrpo.methods import preset
from flowgrpo.objectives import surrogates
from flowgrpo.objectives.kl import GaussianKL
from flowgrpo.objectives.surrogates import ActorCritic
from flowgrpo.policies.loading import load_branches, load_tuned
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.edits import (
    Editor,
    EditPolicy,
    EditWeights,
    edit_policy_of,
    load_editor,
    tokens,
    untokens,
)
from flowgrpo.rollouts import loss_inputs
from flowgrpo.samplers import latent_edits
from flowgrpo.samplers.growth import replay
from flowgrpo.samplers.kernels import Euler
from flowgrpo.samplers.latent_edits import Edit
from flowgrpo.samplers.rollout import Part, fork_seed, seeder
from flowgrpo.training import state
from flowgrpo.training.credit import credit
from flowgrpo.types import Context, PromptGroups
from tests.evaluation.test_images import pixels
from tests.helpers import tiny, tiny_runs
from tests.helpers.refusals import message, refused
from tests.test_train import align

BY_RATIO = {"surrogate": ActorCritic(0.2, 0.2, 0.5, through=0.0, ratio=1.0), "advantage": Paired()}
CENTRE = torch.tensor([2.0, -1.0])  # where the toy's reward is highest


def asked(prompts: int) -> Conditioning:
    """Prompts whose encoding is one number each."""
    return Conditioning(["p"] * prompts, [""] * prompts, ((torch.ones(prompts, 1, 1),),), ((True,),))


def stirred(editor: Editor, scale: float = 0.3) -> Editor:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in editor.networks.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator).to(parameter)
    return editor


def sampled(editor: Editor, method, prompts: int, group: int, seed: int = 0) -> Part:
    """The toy's part: bases from N(0, I) in two dimensions, with their edits."""
    of = torch.arange(prompts).repeat_interleave(method.target.edit.bases(group))
    x0 = torch.randn(len(of), 2, generator=torch.Generator().manual_seed(seed)).to(editor.networks.edit.leave.weight)
    bases = Part(range(prompts), of, None, (), (x0,))
    explored = method.target.edit.exploration(group, Euler(), method.reads_means, method.reads_old_means)
    return latent_edits.apply_edits(editor, asked(prompts), bases, explored, 64, seeder(seed, 0))


def reward(x: torch.Tensor) -> torch.Tensor:
    return -(x - CENTRE).square().sum(-1)


def credited(method, part: Part, prompts: int, group: int) -> Part:
    scores, context = reward(part.finals[0]).view(prompts, group, 1), Context(groups=PromptGroups(["p"] * prompts))
    [part] = credit(method, [part], scores, [1.0], context, lambda rows: rows)
    return part


def trained(editor: Editor, method, epochs: int, prompts: int = 16, group: int = 16, lr: float = 3e-3) -> None:
    """What the loop does of an epoch, on the toy."""
    optimizer = torch.optim.Adam(editor.networks.parameters(), lr)
    for epoch in range(epochs):
        part = credited(method, sampled(editor, method, prompts, group, 1000 + epoch), prompts, group)
        beside = loss_inputs.EditInputs(editor, asked(prompts), part, method.loss.surrogate.through > 0)
        for batch, (k, rows, new) in enumerate(replay(editor, asked(prompts), part, 512)):
            old = part.transitions[k].old.rows(rows)
            read = beside(batch, k, rows, new, old)
            loss = method.loss.surrogate(method.loss.log_ratio(new, old), part.advantages[k][rows, None], read)
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()


# --- one edit --------------------------------------------------------------------------------------------------------
def test_an_edit_is_bounded_and_none_is_the_base_itself():
    edit, x = Edit(bound=0.25), torch.randn(4, 3, 5, 5, dtype=torch.bfloat16)
    assert torch.equal(edit.apply(x, torch.zeros(4, 3, 5, 5)), x) and edit.apply(x, x.float()).dtype == x.dtype
    far = edit(torch.tensor([[-1e9, -2.0, 0.0, 0.1, 1e9]], dtype=torch.float64))
    expected = [-0.25, 0.25 * math.tanh(-2), 0, 0.25 * math.tanh(0.1), 0.25]
    torch.testing.assert_close(far[0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15)


@pytest.mark.parametrize("shape", [(2, 3), (2, 7, 3), (2, 3, 4, 5), (2, 3, 2, 4, 5)])
def test_latents_of_any_shape_are_tokens_and_come_back(shape):
    x = torch.randn(shape)
    assert tokens(x).shape[::2] == (2, 3) and torch.equal(untokens(tokens(x), x), x)
    editor = stirred(Editor(Edit(width=8, depth=1), 3, 1))
    assert editor.replay(asked(2), x).shape == shape and editor.value(asked(2), x).shape == (2,)


def test_the_density_is_exact_and_its_ratio_that_of_the_squashed_edit():
    """In float64 against torch.distributions, the edit itself as a transformed normal."""
    method = preset("expo").having(edit=Edit(bound=0.4, std=0.7, width=8, depth=1, acting="pairs"))
    editor = Editor(method.target.edit, 2, 1)
    editor.networks.double()
    part = sampled(stirred(editor), method, 3, 4)
    [taken] = part.transitions
    before = editor.replay(asked(3).rows(taken.prompts), taken.x).detach()[taken.parent]
    stirred(editor)
    after = editor.replay(asked(3).rows(taken.prompts), taken.x).detach()[taken.parent]
    new = torch.cat([new.logp for _, _, new in replay(editor, asked(3), part, 5)]).detach()
    std = torch.tensor(0.7, dtype=torch.float64)
    for mean, found in ((before, taken.old.logp), (after, new)):
        torch.testing.assert_close(found[:, 0], Normal(mean, std).log_prob(taken.x_next).mean(1), rtol=0, atol=1e-10)
    squash, edit = [TanhTransform(), AffineTransform(0.0, 0.4)], method.target.edit
    one, two = (TransformedDistribution(Independent(Normal(mean, std), 1), squash).log_prob(edit(taken.x_next))
                for mean in (after, before))
    torch.testing.assert_close(2 * (new - taken.old.logp)[:, 0], one - two, rtol=0, atol=1e-10)


def test_a_base_stands_before_each_edit_of_it():
    method = preset("expo").having(edit=Edit(bound=0.4, width=8, depth=1, acting="pairs"))
    part = sampled(stirred(Editor(method.target.edit, 2, 1)), method, 3, 4)
    [taken] = part.transitions
    assert part.prompts.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert taken.parent.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    bases, edited = part.finals[0][::2], part.finals[0][1::2]
    assert torch.equal(bases, taken.x) and (taken.x_next[::2] == 0).all()
    torch.testing.assert_close(edited - bases, 0.4 * taken.x_next[1::2].tanh(), rtol=0, atol=1e-6)
    assert 0 < (edited - bases).abs().max() <= 0.4 and len(taken.x_next[1::2].unique()) == 12
    assert torch.equal(taken.proposed, taken.x_next[1::2].repeat_interleave(2, 0))


def test_a_sample_is_the_critics_choice_of_its_bases_and_their_edits():
    """Of three bases and three edits each, by a critic that is known; a chosen base is the decision 0."""
    torch.manual_seed(0)
    method = preset("expo").having(edit=Edit(bound=0.4, width=8, depth=1, candidates=3))
    editor = stirred(Editor(method.target.edit, 2, 1), 0.05)
    editor.networks["critic"] = Quadratic()
    part = sampled(editor, method, 2, 4)
    [taken] = part.transitions
    x0 = torch.randn(24, 2, generator=torch.Generator().manual_seed(0))
    forks = [fork_seed(seeder(0, 0)(leaf // 12, leaf % 12), 2) for leaf in range(24)]
    noise = torch.cat([torch.randn(1, 2, generator=torch.Generator().manual_seed(each)) for each in forks])
    drawn = editor.replay(asked(2).rows(torch.arange(2).repeat_interleave(12)), x0).detach() + 0.3 * noise
    edits, kept = x0 + 0.4 * drawn.tanh(), 0
    for sample in range(8):
        some = slice(3 * sample, 3 * sample + 3)
        best = reward(torch.cat([x0[some], edits[some]])).argmax().item()
        kept += best < 3
        torch.testing.assert_close(part.finals[0][sample], torch.cat([x0[some], edits[some]])[best])
        assert torch.equal(taken.x[sample], x0[some][best % 3])
        torch.testing.assert_close(taken.proposed[sample], drawn[some][best % 3])
        torch.testing.assert_close(taken.x_next[sample], drawn[some][best % 3] * (best >= 3))
    assert part.prompts.tolist() == [0] * 4 + [1] * 4 and taken.parent.tolist() == [*range(8)] and 0 < kept < 8


def test_a_critic_of_equal_values_leaves_the_first_base():
    method = preset("expo").having(edit=Edit(width=8, depth=1, candidates=2))
    part = sampled(Editor(method.target.edit, 2, 1), method, 3, 2)
    assert torch.equal(part.finals[0], torch.randn(12, 2, generator=torch.Generator().manual_seed(0))[::2])
    assert (part.transitions[0].x_next == 0).all() and (part.transitions[0].proposed != 0).all()


def test_the_kl_is_the_distance_to_no_edit():
    """Of means m: mean(m^2) / (2 std^2), which is also what the entropy of a fixed std leaves of the regulariser."""
    method = preset("expo").having(edit=Edit(std=0.5, width=8, depth=1))
    editor = Editor(method.target.edit, 2, 1)
    weights = EditWeights(editor)
    part = sampled(stirred(editor), method, 2, 4)
    [(_, _, new)] = replay(editor, asked(2), part, 8)
    with weights.reference(), torch.no_grad():
        [(_, _, base)] = replay(editor, asked(2), part, 8)
    assert (base.mean == 0).all() and (new.mean != 0).all()
    torch.testing.assert_close(GaussianKL(2.0)(new, base), 2 * new.mean.square().mean(2) / (2 * 0.25))


# --- advantage and loss ----------------------------------------------------------------------------------------------
def test_the_advantage_is_against_the_own_base_by_hand():
    """Gains 1, 3, -1, 1 of mean 1 and deviation sqrt(2)."""
    rewards = torch.tensor([[[0.0], [1.0], [10.0], [13.0]], [[5.0], [4.0], [-2.0], [-1.0]]])
    one = 2 / (math.sqrt(2) + 1e-4)
    torch.testing.assert_close(Paired()(rewards, [1.0]), torch.tensor([[0, 0, 0, one], [0, -one, 0, 0]]))
    rewards[0, 2] = math.nan
    assert (Paired()(rewards, [1.0])[0, 2:] == 0).all() and (Paired()(torch.ones(2, 4, 1), [1.0]) == 0).all()
    assert "a group of 3" in message(Paired(), torch.ones(1, 3, 1), [1.0], error=ValueError)


def test_the_loss_by_hand():
    seen = surrogates.Seen(torch.tensor([[0.5], [2.0]], dtype=torch.float64), torch.tensor([[1.0], [0.0]]).double())
    ratio, advantage = torch.tensor([[1.5], [1.05]]).double().log(), torch.tensor([[2.0], [-1.0]]).double()
    loss = ActorCritic(0.1, 0.1, 0.5, through=0.0, ratio=1.0)
    torch.testing.assert_close(loss(ratio, advantage, seen), torch.tensor([[-2.2 + 0.125], [1.05 + 2.0]]).double(),
                               rtol=0, atol=1e-7)
    assert loss.clip_mask(ratio, advantage).tolist() == [[True], [False]]


def test_the_loss_through_the_critic_by_hand():
    """0.5 (Q - R)^2 - 2 Q(edited), with the clipped loss and without."""
    seen = surrogates.Seen(*torch.tensor([[[0.5], [2.0]], [[1.0], [0.0]], [[0.25], [-1.0]]], dtype=torch.float64))
    ratio, advantage = torch.tensor([[1.5], [1.05]]).double().log(), torch.tensor([[2.0], [-1.0]]).double()
    alone, both = ActorCritic(0.1, 0.1, through=2.0, ratio=0.0), ActorCritic(0.1, 0.1, through=2.0, ratio=3.0)
    own = torch.tensor([[0.125 - 0.5], [2.0 + 2.0]]).double()
    torch.testing.assert_close(alone(ratio, advantage, seen), own, rtol=0, atol=1e-10)
    torch.testing.assert_close(both(ratio, advantage, seen), own + 3 * torch.tensor([[-2.2], [1.05]]).double(),
                               rtol=0, atol=1e-6)
    assert not alone.clip_mask(ratio, advantage).any()
    assert both.clip_mask(ratio, advantage).tolist() == [[True], [False]]


class Quadratic(torch.nn.Module):
    """Q = -w |x - c|^2, whose derivative by x is -2 w (x - c)."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x, prompts):
        return -self.weight * (x - CENTRE.to(x)).square().sum(-1)


def test_the_gradient_through_a_quadratic_critic_is_the_closed_form_and_reaches_the_edit_alone():
    """By the mean m of the decision u = m + std z: -2 w (x + b tanh(u) - c) b (1 - tanh(u)^2), z as it was drawn."""
    method = preset("expo").having(edit=Edit(bound=0.4, width=8, depth=1, acting="pairs"))
    editor = Editor(method.target.edit, 2, 1)
    editor.networks.double()
    stirred(editor).networks["critic"] = Quadratic()
    part = credited(method, sampled(editor, method, 2, 4), 2, 4)
    [taken] = part.transitions
    keep = torch.tensor([True, True, False, True, True, True, True, True])  # a pair may be without its base
    part = part.with_advantages(part.advantages, [keep], part.rewards)
    [(k, rows, new)] = replay(editor, asked(2), part, 8)
    seen = loss_inputs.EditInputs(editor, asked(2), part, True)(0, k, rows, new, part.transitions[0].old)
    x, tanh = taken.x[taken.parent][keep], taken.proposed[keep].tanh()
    moved = x + 0.4 * tanh - CENTRE
    torch.testing.assert_close(seen.edited[:, 0], -0.7 * moved.square().sum(1), rtol=0, atol=1e-10)
    [found] = torch.autograd.grad(seen.edited.sum(), new.mean, retain_graph=True)
    # The pair's two rows read one mean: the first of them takes the gradient of both.
    first = torch.tensor([True, False, True, True, False, True, False])
    both = torch.tensor([2.0, 0, 1, 2, 0, 2, 0]).double()[:, None]
    assert (found[~first] == 0).all()
    torch.testing.assert_close(found[:, 0], both * -1.4 * moved * 0.4 * (1 - tanh**2), rtol=0, atol=1e-10)
    seen.edited.sum().backward()
    assert editor.networks["critic"].weight.grad is None
    assert all(parameter.grad is not None for key, parameter in editor.networks["edit"].named_parameters())


def test_no_gradient_of_the_critic_reaches_the_edit_and_the_other_way_round():
    method = preset("expo").having(edit=Edit(width=8, depth=1, acting="pairs"), **BY_RATIO)
    editor = stirred(Editor(method.target.edit, 2, 1))
    part = credited(method, sampled(editor, method, 2, 4), 2, 4)
    [(k, rows, new)] = replay(editor, asked(2), part, 8)
    seen = loss_inputs.EditInputs(editor, asked(2), part)(0, k, rows, new, part.transitions[0].old)
    torch.testing.assert_close(seen.reward[:, 0], reward(part.finals[0]))
    for loss, name in (((seen.value - seen.reward).square().sum(), "critic"), (new.logp.sum(), "edit")):
        editor.networks.zero_grad()
        loss.backward(retain_graph=True)
        assert all((parameter.grad is not None and parameter.grad.abs().max() > 0) == key.startswith(name)
                   for key, parameter in editor.networks.named_parameters() if "in_proj_bias" not in key)


# --- the toy: N(0, I) in two dimensions, reward -|x - c|^2 -----------------------------------------------------------
def test_the_edit_alone_moves_to_the_optimum_of_a_known_critic():
    """Q = -w |x - c|^2 is given and stays; the best edit within the bound is c - x, cut at -1 and 1."""
    torch.manual_seed(0)
    method = preset("expo").having(edit=Edit(bound=1.0, std=0.3, width=32, depth=1), surrogate=ActorCritic(critic=0.0))
    editor = Editor(method.target.edit, 2, 1)
    editor.networks["critic"] = Quadratic()
    trained(editor, method, 120)
    x = torch.randn(500, 2, generator=torch.Generator().manual_seed(7))
    made, best = editor.edit(editor.replay(asked(500), x).detach()), (CENTRE - x).clamp(-1, 1)
    assert (made - best).abs().mean() < 0.2 < best.abs().mean() and editor.networks["critic"].weight == 0.7
    part = sampled(editor, method, 8, 8, 99)
    assert (part.transitions[0].x_next != 0).any(1).float().mean() > 0.9  # and the acting policy takes the edits


@pytest.fixture(scope="module", params=["pairs", "argmax"], ids=["by its ratio", "through the critic"])
def toy(request) -> Editor:
    torch.manual_seed(0)
    method = preset("expo").having(edit=Edit(bound=1.0, std=0.5, width=32, depth=1, acting=request.param),
                                   **BY_RATIO if request.param == "pairs" else {})
    editor = Editor(method.target.edit, 2, 1)
    trained(editor, method, 250)
    return editor


def test_the_edit_comes_to_its_optimum(toy):
    """The best edit within the bound is c - x, cut at -1 and 1 in either dimension."""
    x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(7))
    made, best = toy.edit(toy.replay(asked(2000), x).detach()), (CENTRE - x).clamp(-1, 1)
    assert made.abs().max() <= 1 and (made - best).abs().mean() < 0.25 < best.abs().mean()
    gain, most = reward(x + made) - reward(x), reward(x + best) - reward(x)
    assert gain.mean() > 0.85 * most.mean()


def test_the_critic_learns_the_rewards(toy):
    x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(8))
    for states in (x, toy.edit.apply(x, toy.replay(asked(2000), x).detach())):
        value, known = toy.value(asked(2000), states).detach(), reward(states)
        least = 0.95 if toy.edit.acting == "pairs" else 0.85  # the acting policy shows it what it values most alone
        assert torch.corrcoef(torch.stack([value, known]))[0, 1] > least


def test_best_of_base_and_edited_is_not_worse_than_best_of_as_many_bases(toy):
    """2N scorer calls each, N = 4, on 400 prompts: the lower end of the paired difference's interval is above 0, chosen
    by the critic, which needs no scorer call, and by the scorer."""
    x = torch.randn(400, 8, 2, generator=torch.Generator().manual_seed(9))
    chosen, values = latent_edits.on_the_fly(toy, asked(400), x[:, :4])
    edited = toy.edit.apply(x[:, :4], toy.replay(asked(1600), x[:, :4].flatten(0, 1)).view(400, 4, 2).detach())
    both = torch.cat([x[:, :4], edited], 1)
    torch.testing.assert_close(chosen, both[torch.arange(400), values.argmax(1)])
    bases = toy.value(asked(3200), x.flatten(0, 1)).view(400, 8).argmax(1)
    by_critic = reward(chosen) - reward(x[torch.arange(400), bases])
    by_scorer = reward(both).max(1).values - reward(x).max(1).values
    for gain in (by_critic, by_scorer):
        assert interval(gain.detach().numpy()[:, None].astype(np.float64), STUDENT).low > 0


# --- pipelines -------------------------------------------------------------------------------------------------------
def policy(pipe=None, edit: Edit = Edit(width=8, depth=1), **options) -> EditPolicy:
    pipe = pipe or tiny.sd3()
    torch.manual_seed(0)
    return EditPolicy(pipe, edit, **{"call": tiny.call_of(pipe)} | options)


def drawn(policy) -> torch.Tensor:
    return policy.generate(policy.encode(["red", "a cat"]), policy.generators([1, 2]), 3, 2.0)


def test_without_training_images_are_the_stock_ones():
    stock, own = tiny.policy(), policy()
    want, have = drawn(stock), drawn(own)
    assert torch.equal(want, have) and own.evaluations > 0


def test_the_critic_chooses_between_a_image_and_its_edit():
    """Of two critics with opposite values one takes the base of a prompt and the other its edit."""
    base, own = drawn(tiny.policy()), policy()
    leave = stirred(own.editor).networks.critic.leave
    changed = []
    for _ in range(2):
        changed.append((drawn(own) != base).flatten(1).any(1))
        with torch.no_grad():
            leave.weight.neg_()
            leave.bias.neg_()
    assert (changed[0] ^ changed[1]).all()


def test_more_candidates_are_bases_of_their_own():
    own = policy(edit=Edit(width=8, depth=1, candidates=3))
    first, *others = own._candidates(own.generators([4, 5]))
    seeds = [each.initial_seed() for row in (first, *others) for each in row]
    assert len(set(seeds)) == 6 and seeds[:2] == [4, 5] and len(others) == 2
    want = tiny.policy().generate(own.encode(["red"]), own.generators([4]), 2, 1.0)
    assert torch.equal(own.generate(own.encode(["red"]), own.generators([4]), 2, 1.0), want)


def test_a_run_saves_what_draws_its_images_and_resumes(tmp_path):
    config = tiny.config(tmp_path, method="expo", train__lr=1e-2, parts__edit__width=8, parts__edit__depth=1)
    summary = align(config)
    folder = config.folder
    assert math.isfinite(summary["after"]["red"]) and load_editor(folder).edit == Edit(width=8, depth=1)
    again = policy(edit=folder)
    trainer = tiny.trainer(policy=policy(), method="expo", parts__edit__width=8, parts__edit__depth=1)
    state.restore(trainer, sorted((folder / "checkpoints").glob("epoch-*"))[-1])
    tiny_runs.assert_same_weights(trainer, again.weights.snapshot())
    pipe = tiny.sd3()
    load_tuned(pipe, sorted((folder / "checkpoints").glob("epoch-*"))[-1])
    tiny_runs.assert_same_weights(edit_policy_of(pipe).weights.snapshot(), again.weights.snapshot())
    told = message(load_branches, tiny.sd3(), folder)
    assert told.startswith("--rlg: ") and "holds an edit policy, which leaves the denoiser as it is" in told
    assert "holds an edit policy, which merges into no pipeline" in message(write_merged, folder, tmp_path / "merged")
    with pytest.raises(UserError, match="no LoRA in .*: it holds an edit policy, which no stock pipeline loads"):
        lora(folder, tmp_path / "out.safetensors")
    assert "lora" not in card(folder).read_text().partition("tags:")[2].partition("\n")[0]
    assert "no edit policy at" in message(load_editor, tmp_path)


def finished(folder, scale: float = 0.3):
    """A run's folder with a saved tiny model, whose edits and critic are off their start."""
    tiny.save(tiny.sd3(), folder / "model")
    made = policy(edit=Edit(width=8, depth=1, candidates=2))
    stirred(made.editor, scale)
    (folder / "run").mkdir()
    made.weights.save(folder / "run")
    config = tiny.config(folder, name="run", method="expo", model=str(folder / "model"),
                         eval__steps=2, eval__guidance=1.5)
    (folder / "run" / "config.yaml").write_text(config.yaml())
    return made


def test_sample_and_eval_draw_by_the_critics_choice_from_a_runs_folder(tmp_path, capsys):
    """They are the images of the policy itself, not all of them the base's."""
    made, by = finished(tmp_path), str(tmp_path / "bright.py")
    (tmp_path / "bright.py").write_text("def bright(images, prompts):\n    return images.flatten(1).mean(1).tolist()\n")
    (tmp_path / "suite.jsonl").write_text('{"prompt": "a dog"}\n{"prompt": "a hat"}\n')
    options = ["--steps", "2", "--guidance", "1.5", "--precision", "fp32"]
    assert main(["sample", str(tmp_path / "run"), "--prompt", "a dog", "--prompt", "a hat", "--output",
                 str(tmp_path / "drawn"), *options]) == 0
    assert main(["eval", str(tmp_path / "run"), "--suite", str(tmp_path / "suite.jsonl"), "--rewards", f"{by}:bright",
                 "--base", "--output", str(tmp_path / "eval"), "--batch", "2", *options]) == 0
    made.guidance = 1.5
    seeds = [seeder(0, 0)(row, 0) for row in range(2)]
    want = made.generate(made.encode(["a dog", "a hat"]), made.generators(seeds), 2, 1.5)
    ledger, changed = Ledger(tmp_path / "eval"), []
    for row, file in enumerate(sorted((tmp_path / "drawn").iterdir())):
        assert (torch.from_numpy(pixels(file)).permute(2, 0, 1) - 255 * want[row]).abs().max() <= 1
        assert "edit.safetensors" not in Image.open(file).text and "run: " in Image.open(file).text["parameters"]
        tuned, base = (ledger.load(Place(arm, row, 0)) for arm in ("tuned", "base"))
        assert (tuned - want[row]).abs().max() <= 1 / 255
        changed.append(not torch.equal(tuned, base))
    assert any(changed)


@pytest.mark.parametrize("edit, sizes", [
    ({"width": 2**40}, {}), ({"depth": 10**9}, {}), ({}, {"channels": 2**40}), ({}, {"prompt": 2**62})])
def test_sizes_that_a_file_names_are_not_allocated(edit, sizes, tmp_path):
    """Networks of these sizes would take more memory than there is."""
    EditWeights(Editor(Edit(width=8, depth=1), 4, 6)).save(tmp_path)
    tensors, kept = tensors_of(tmp_path / "edit.safetensors")
    named = {key: json.dumps(json.loads(kept[key]) | given) for key, given in (("edit", edit), ("sizes", sizes))}
    save_file(tensors, tmp_path / "edit.safetensors", named)
    refused("no edit policy at .*: expected the folder of a finished run that trained", load_editor, tmp_path)


def test_networks_are_saved_with_the_same_bytes(tmp_path):
    weights, saved = EditWeights(Editor(Edit(width=8, depth=1), 2, 1)), set()
    for number in range(8):
        weights.save(tmp_path / str(number))
        [file] = (tmp_path / str(number)).iterdir()
        saved.add(file.read_bytes())
    assert len(saved) == 1

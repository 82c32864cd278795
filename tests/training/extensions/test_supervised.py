"""Supervised terms of runs: their gradients against plain losses, what is collected, and runs of two epochs."""

import copy
import json
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy, smooth_l1_loss

from flowgrpo.data.pairs import Demonstration, load_demonstrations
from flowgrpo.data.prompts import Prompt
from flowgrpo.rollouts.data_losses import Example, seed_of
from flowgrpo.samplers.noised_finals import add_noise
from flowgrpo.samplers.scheduler import noise_like
from flowgrpo.training.optimizer import rate
from tests.helpers import loop, tiny, tiny_runs, tiny_text
from tests.helpers.refusals import message, refused
from tests.policies.pipelines.test_image_latents import saved

HOST = {"tokens": "grpo", "flow": "mix_grpo", "vp": "ddpo"}
OWN = {"right": 0.1, "mastered": True}


def trainer(kind: str, data, **options):
    return tiny_runs.trainer(kind, tiny_runs.config(kind, HOST[kind], {"data": data}, **options))


def gradients(made) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in made.policy.weights.parameters()]


def of_term(made, examples, update: int = 0) -> list[torch.Tensor]:
    """The gradient of a run's supervised term on examples."""
    loop.term(made)._backward(examples, update)
    return gradients(made)


def of_loss(made, loss: torch.Tensor) -> list[torch.Tensor]:
    made.optimization.optimizer.zero_grad()
    loss.backward()
    return gradients(made)


def same(one, two, tolerance: float = 1e-5) -> bool:
    """True for gradients that agree, of which one at least is not zero."""
    return any(gradient.abs().max() > 1e-6 for gradient in two) and all(
        torch.allclose(first, second, rtol=1e-3, atol=tolerance) for first, second in zip(one, two, strict=True))


def latents(count: int) -> list[Example]:
    generator = torch.Generator().manual_seed(3)
    return [Example(Prompt(text), torch.randn(tiny.LATENTS, generator=generator))
            for text in tiny.PROMPTS[:count]]


def noised(made, examples):
    """(conditioning, x_t, target, times) of a term on examples, with the noise that it draws."""
    x0 = torch.stack([example.content for example in examples])
    noise = noise_like(x0, made.policy.generators([seed_of(made.config.seed, 0, i) for i in range(len(x0))]))
    times, vp = loop.term(made).loss.times(0), made.policy.process == "vp"
    x, target = add_noise(x0, noise, times.grid[0].item(), made.policy.device, vp)
    t = times.grid[0].item()
    expected = noise if vp else noise - x0
    torch.testing.assert_close(target, expected)
    torch.testing.assert_close(x, t**0.5 * x0 + (1 - t)**0.5 * noise if vp else (1 - t) * x0 + t * noise)
    return made.rollouts.conditioning([example.prompt for example in examples]), x, target, times


# --- images --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["flow", "vp"])
def test_flow_matching_has_the_gradient_of_the_plain_loss(kind):
    made, examples = trainer(kind, {"type": "FlowMatching"}, train__micro_batch=2, train__guidance=3.0), latents(3)
    conditioning, x, target, times = noised(made, examples)
    made.policy.guidance = 1.0
    output = made.policy.replay(conditioning, x, times.grid, 0, times.timesteps)
    plain = of_loss(made, (output - target).square().mean())
    made.policy.guidance = 3.0
    assert same(of_term(made, examples), plain)  # in micro-batches of 2 and 1
    assert made.policy.guidance == 3.0


def test_gen_drives_term_is_a_smooth_l1_to_the_data():
    settings = {"type": "FlowMatching", "distance": "smooth_l1", "space": "data"}
    for kind in ("flow", "vp"):
        made, examples = trainer(kind, settings), latents(2)
        conditioning, x, _, times = noised(made, examples)
        x0, t = torch.stack([example.content for example in examples]), times.grid[0].item()
        output = made.policy.replay(conditioning, x, times.grid, 0, times.timesteps)
        predicted = (x - (1 - t)**0.5 * output) / t**0.5 if kind == "vp" else x - t * output
        assert same(of_term(made, examples), of_loss(made, smooth_l1_loss(predicted, x0)), 1e-4)


def test_an_examples_reward_weighs_its_error():
    made, examples = trainer("flow", {"type": "FlowMatching", "beta": 0.5}), latents(2)
    conditioning, x, target, times = noised(made, examples)
    output = made.policy.replay(conditioning, x, times.grid, 0, times.timesteps)
    errors = (output - target).square().flatten(1).mean(1)
    weighed = of_loss(made, (errors[0] + errors[1] * torch.e**-1.8) / 2)
    examples[1] = Example(examples[1].prompt, examples[1].content, reward=0.1)
    assert same(of_term(made, examples), weighed)


def test_distilled_guidance_is_the_bases_guided_prediction():
    """Guidance is linear, v(s) = v(0) + s (v(1) - v(0)): at the base's weights the loss is (s-1)^2 |v(2) - v(1)|^2."""
    made, examples = trainer("flow", {"type": "GuidanceDistillation", "scale": 4.0}), latents(2)
    with torch.no_grad():
        for parameter in made.policy.weights.parameters():
            parameter.zero_()
    conditioning, x, _, times = noised(made, examples)
    of = {}
    for made.policy.guidance in (1.0, 2.0):
        with torch.no_grad():
            of[made.policy.guidance] = made.policy.replay(conditioning, x, times.grid, 0)
    made.policy.guidance = 1.0
    [loss] = loop.term(made).loss(examples, range(2), 0)
    expected = 9 * (of[2.0] - of[1.0]).square().flatten(1).mean(1).sum()
    assert expected > 1e-4
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-3, atol=1e-7)


class Linear:
    """Denoiser v = w x with guidance: w is free + scale * (bound - free), the trained weights bound and free."""

    process, device, guidance, modality = "flow", torch.device("cpu"), 1.0, "image"

    def __init__(self):
        self.base = torch.tensor([2.0, 0.5], dtype=torch.float64)
        self.trained = self.base.clone().requires_grad_()
        self.now = self.trained

    def replay(self, conditioning, x, grid, step, timesteps=None):
        bound, free = self.now
        return (free + self.guidance * (bound - free)) * x

    def reference(self):
        policy = self
        class Base(torch.no_grad):
            def __enter__(self):
                super().__enter__()
                policy.now = policy.base

            def __exit__(self, *error):
                policy.now = policy.trained
                super().__exit__(*error)
        return Base()


def test_a_linear_denoiser_learns_its_guidance_in_closed_form():
    """bound 2 and free 1/2 at scale 3 make 1/2 + 3 * 3/2 = 5; without guidance v = bound x, so that bound becomes 5."""
    made = trainer("flow", {"type": "GuidanceDistillation", "scale": 3.0})
    policy = loop.term(made).loss.policy = Linear()
    x = torch.randn(4, 5, dtype=torch.float64)
    target = loop.term(made).loss.teacher(None, x, loop.term(made).loss.times(0), 0)
    torch.testing.assert_close(target, 5 * x)
    error = loop.term(made).loss.errors(policy.replay(None, x, None, 0), target, 0.5)
    torch.testing.assert_close(error, 9 * x.square().mean(1))
    [gradient] = torch.autograd.grad(error.mean(), policy.trained)
    torch.testing.assert_close(gradient, torch.tensor([-6.0, 0.0], dtype=torch.float64) * x.square().mean())
    with torch.no_grad():
        policy.trained[0] = 5.0  # the optimum
    assert loop.term(made).loss.errors(policy.replay(None, x, None, 0), target, 0.5).abs().max() == 0


def test_images_of_a_file_are_learned(tmp_path):
    for seed, name in enumerate("ab"):
        saved(tmp_path / f"{name}.png", seed=seed)
    lines = [{"prompt": "red", "image": "a.png"}, {"prompt": "a pond", "picture": "b.png", "reward": 0.5}]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made = trainer("flow", {"type": "FlowMatching", "balance": {"rl": 0.0, "data": 1.0}, "source": {
        "type": "Recorded", "path": str(tmp_path / "own.jsonl")}}, train__lr=3e-3)
    found = tiny_runs.epochs(made, 2)
    assert all(epoch["data/examples"] == 2 and epoch["data/loss"] > 0 for epoch in found)
    examples = loop.term(made).examples.pool
    assert [example.reward for example in examples] == [1.0, 0.5]
    def loss() -> float:
        with torch.no_grad():
            return sum(float(each) for update in range(8) for each in loop.term(made).loss(examples, range(2), update))
    before = loss()
    for _ in range(8):
        made.optimization.optimizer.zero_grad()
        loop.term(made).on_gradients(made.optimization.update)
        made.optimization.optimizer.step()
        made.optimization.update += 1
    assert loss() < before


# --- texts -----------------------------------------------------------------------------------------------------------
def test_the_term_of_answers_is_plain_cross_entropy():
    made = trainer("tokens", {"type": "NextToken"}, train__micro_batch=2)
    examples = [Example(Prompt("1+2="), "3"), Example(Prompt("33+4="), "37"), Example(Prompt("5;66="), ";61")]
    policy, losses, count = made.policy, [], 0
    for example in examples:
        prompt, answer = policy.encode([example.prompt.text]).ids[0], loop.term(made).loss.tokens(example)
        assert answer[-1] == policy.ends[0]
        logits = policy.model(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1:-1]
        losses.append(cross_entropy(logits, answer, reduction="sum"))
        count += len(answer)
    assert count == 2 + 3 + 4
    assert same(of_term(made, examples), of_loss(made, sum(losses) / count))


def test_expert_tokens_are_weighed_in_the_term():
    made = trainer("tokens", {"type": "NextToken", "token_weight": {"type": "Uncertain"}})
    example = Example(Prompt("1+2="), "3")
    tokens = loop.term(made).loss.tokens(example)[None]
    scored = made.policy.log_probs(made.policy.encode(["1+2="]), torch.tensor([0]), tokens,
                                   torch.ones(1, 2, dtype=torch.bool), made.method.generation.decoding)
    p = scored.logp.detach().exp()
    assert same(of_term(made, [example]), of_loss(made, -(p * (1 - p) * scored.logp).sum() / 2))


def test_a_source_is_a_condition_of_the_prompt():
    made = trainer("tokens", {"type": "NextToken", "condition": "{source}{prompt}"})
    plain = trainer("tokens", {"type": "NextToken"})
    conditioned = of_term(made, [Example(Prompt("1+2="), "3", source="9-")])
    assert same(conditioned, of_term(plain, [Example(Prompt("9-1+2="), "3")]), 1e-6)


# --- in the loop -----------------------------------------------------------------------------------------------------
def trained(data, epochs: int = 1, **options):
    made = trainer("tokens", data, **options)
    metrics = tiny_runs.epochs(made, epochs)
    return made, metrics


def test_mu_of_0_is_the_host_alone_bit_for_bit():
    host = tiny_runs.trainer("tokens", tiny_runs.config("tokens", "grpo"))
    tiny_runs.epochs(host, 1)
    balanced, [metrics] = trained({"type": "NextToken", "balance": {"type": "WarmupCosine"}})
    assert balanced.optimization.update == 1 and "data/loss" not in metrics
    tiny_runs.assert_same_weights(host, balanced)
    other, [metrics] = trained({"type": "NextToken", "balance": {"type": "WarmupCosine", "warmup": 0}})
    assert metrics["data/weight"] == 0.5
    assert not tiny_runs.same(other.policy.weights.named, balanced.policy.weights.named)


@pytest.mark.parametrize("drawn, rl, data", [(False, 1.0, 0.0), (True, 0.0, 1.0)])
def test_the_steps_gradient_is_the_balance_of_both(drawn, rl, data):
    balance = {"type": "GradientNorms", "gamma": 1e-9 if drawn else 1e9}
    made = trainer("tokens", {"type": "NextToken", "balance": balance})
    parameters = made.policy.weights.parameters()
    supervised = of_term(made, loop.term(made).examples.sample(8, 0))
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    loop.term(made).on_gradients(0)
    for parameter, gradient in zip(parameters, supervised, strict=True):
        torch.testing.assert_close(parameter.grad, 2.0 * rl + data * gradient)


def test_the_data_gradient_gets_the_norm_of_the_reinforcement_gradient():
    made = trainer("tokens", {"type": "NextToken", "balance": {"type": "EqualNorms"}})
    parameters = made.policy.weights.parameters()
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    loop.term(made).on_gradients(0)
    count = sum(parameter.numel() for parameter in parameters)
    added = torch.cat([(parameter.grad - 2.0).flatten() for parameter in parameters])
    assert added.norm().item() == pytest.approx(2.0 * count**0.5, rel=1e-5)


def collect(made, epoch, totals: torch.Tensor) -> None:
    """Show the term an epoch whose samples have these rewards [P,G]."""
    keys = [prompt.key for prompt in epoch.groups.prompts]
    loop.term(made).on_drawn(loop.scored(made, epoch.parts, totals[..., None], keys))


def test_pass_rates_route_prompts_to_recorded_answers_and_own_samples():
    made = trainer("tokens", {"type": "NextToken", "source": {"type": "PassRate"}}, train__prompts=4)
    epoch = loop.draw(made)
    parts, totals = epoch.parts, torch.tensor([[0.0] * 4, [1.0, 0.0, 1.0, 0.0], [1.0] * 4, [torch.nan] * 4])
    collect(made, epoch, totals)
    failed, half = epoch.groups.prompts[:2]
    recorded, *own = loop.term(made).examples.collected
    assert (recorded.prompt, recorded.content) == (failed, "1+2")  # its solution
    assert [example.prompt for example in own] == [half, half]
    [taken] = parts[0].transitions if len(parts[0].groups) > 1 else parts[1].transitions
    rows = [4, 6] if len(parts[0].groups) > 1 else [0, 2]
    for example, row in zip(own, rows, strict=True):
        assert example.content.tolist() == taken.ids[row][taken.old.mask[row]].tolist()
    collect(made, epoch, torch.ones(4, 4))  # all are solved now
    assert loop.term(made).examples.collected == [] and loop.term(made).reward == 1.0


def test_answers_are_drawn_to_their_own_annotation():
    made = tiny_text.trainer(parts={"data": {"type": "AlignedChains", "contrast": 0.5, "temperature": 0.2}})
    losses, policy = loop.term(made).loss, tiny_text.stir(made.policy)
    prompts = [Prompt("1+2=", metadata={"answer": "3"}), Prompt("7+8=", metadata={"answer": "15"}), Prompt("9=")]
    examples = [Example(prompts[0], "3+0"), Example(prompts[1], "15"), Example(prompts[2], "9")]
    def shown(example):
        ids = losses.tokens(example)
        prompt = policy.encode([example.prompt.text]).ids[0]
        made = policy.model(input_ids=torch.cat([prompt, ids])[None], output_hidden_states=True).hidden_states[-1][0]
        mean = made[len(prompt) - 1:-1].mean(0)
        return mean / mean.norm()
    anchors = torch.stack([shown(Example(prompts[0], "3")), shown(Example(prompts[1], "15"))])
    odds = torch.stack([shown(example) for example in examples[:2]]) @ anchors.T / 0.2
    counts = [len(losses.tokens(example)) for example in examples[:2]]
    expected = 0.5 * sum(cross_entropy(odds[i:i + 1], torch.tensor([i])) * counts[i] for i in range(2))
    plain, contrast = losses(examples, range(3), 0)
    torch.testing.assert_close(contrast, expected, rtol=1e-4, atol=1e-5)
    contrast.backward()
    assert any(parameter.grad.abs().max() > 0 for parameter in policy.weights.parameters())
    assert len(list(losses([examples[0], examples[2]], range(2), 0))) == 1  # nothing to tell it from


def constant(value, texts, prompts):
    return [value] * len(texts)


def test_only_verified_explanations_are_learned_from_the_plain_prompt():
    for verdict, count in ((1.0, 1), (0.0, 0)):
        made = tiny_text.trainer(rewards={"short": partial(constant, verdict)}, train__prompts=4, parts={"data": {
            "type": "NextToken", "source": {"type": "Explained", "template": "{prompt}{right}{wrong}"}}})
        epoch = loop.draw(made)
        collect(made, epoch, torch.tensor([[0.0] * 4, [1.0, 0.0, 1.0, 0.0], [1.0] * 4, [torch.nan] * 4]))
        found = loop.term(made).examples.collected  # of the prompt alone that has right and wrong samples
        assert [example.prompt for example in found] == [epoch.groups.prompts[1]] * count
        assert all(example.content.ndim == 1 and len(example.content) for example in found)


def test_the_hardest_prompts_get_a_step_of_their_own_once_a_batch_waits():
    made, metrics = trained({"type": "NextToken", "batch": 3, "apart": True, "source": {
        "type": "PassRate", "right": 2.0, "solved": False}}, 2)  # no sample is right
    # 2 prompts an epoch: 2 wait after the first; after the second there are at least 3, or the same 2.
    assert made.optimization.update in (2, 3) and "data/loss" not in metrics[0] and metrics[0]["data/examples"] == 2
    loop.term(made).examples.collected = [Example(prompt, "1+2") for prompt in made.prompts[:4]]
    before = made.optimization.update
    made.epoch = 2
    metrics = made.run_epoch()
    assert made.optimization.update - before >= 2 and metrics["data/weight"] == 1.0
    assert metrics["data/examples"] < 3


def test_a_batch_of_its_own_mixes_the_prompts_of_an_epoch():
    """Samples of a group look alike: a batch of the oldest ones would be those of one prompt."""
    examples = loop.term(trainer("tokens", {"type": "NextToken", "batch": 4, "apart": True, "source": {
        "type": "PassRate", "right": 0.0, "mastered": True}})).examples
    waiting = [Example(Prompt(text), str(place)) for text in ("1+2=", "3+4=") for place in range(4)]
    examples.collected = list(waiting)
    batches = [examples.pop(4, update) for update in range(3)]
    assert [len({example.prompt.text for example in batch}) for batch in batches] == [2, 2, 0]
    assert sorted(map(waiting.index, batches[0] + batches[1])) == list(range(8))
    examples.collected = list(waiting)
    assert examples.pop(4, 0) == batches[0]  # as a resumed run does


def test_steps_of_data_alone_leave_the_schedule_where_it_is():
    made, _ = trained({"type": "NextToken", "batch": 1, "apart": True, "source": {
        "type": "PassRate", "right": 2.0, "solved": False}}, 2, train__schedule="linear", train__epochs=4)
    alone = made.memory["data_updates"]
    assert alone and made.optimization.unscheduled == alone and made.optimization.update == 2 + alone
    [group] = made.optimization.optimizer.param_groups
    train = made.config.train
    assert group["lr"] == pytest.approx(train.lr * rate(2, made.optimization.total_updates, train))  # 2 of them count


def test_collected_examples_are_kept_in_a_checkpoint():
    made, _ = trained({"type": "NextToken", "source": {"type": "PassRate", "right": 0.0, "mastered": True}})
    term = loop.term(made)
    term.examples.collected.append(Example(Prompt("1+2="), "3", 0.5, "me"))
    assert len(term.state()[1]["collected"]) == len(term.examples.collected) - 1  # of whole epochs
    term.on_trained(loop.epoch(made))
    tensors, values = term.state()
    other = trainer("tokens", {"type": "NextToken", "source": {"type": "PassRate"}})
    loop.term(other).load_state(copy.deepcopy(tensors), json.loads(json.dumps(values)))
    pairs = list(zip(loop.term(made).examples.collected, loop.term(other).examples.collected, strict=True))
    assert len(pairs) > 4
    for one, two in pairs:
        assert (one.prompt, one.reward, one.source) == (two.prompt, two.reward, two.source)
        assert torch.equal(one.content, two.content) if torch.is_tensor(one.content) else one.content == two.content


@pytest.mark.parametrize("kind, data", [
    ("tokens", {"type": "NextToken", "balance": {"type": "Convergence", "window": 1}}),
    ("tokens", {"type": "NextToken", "token_weight": {"type": "OneToken", "samples": 8, "wrong": -0.1}}),
    ("tokens", {"type": "NextToken", "token_weight": {"type": "EntropyAware"},
                "source": {"type": "PassRate", "right": 0.1}}),
    ("flow", {"type": "FlowMatching", "source": OWN}), ("vp", {"type": "FlowMatching", "source": OWN}),
    ("flow", {"type": "GuidanceDistillation", "base": False, "source": OWN}),
    ("vp", {"type": "GuidanceDistillation", "times": {"count": 2}, "source": OWN})])
def test_runs_of_two_epochs(kind, data):
    made = trainer(kind, data)
    frozen = tiny_runs.frozen(made)
    metrics = tiny_runs.epochs(made, 2)
    assert all(abs(epoch["data/loss"]) < 100 and epoch["data/examples"] > 0 for epoch in metrics)
    assert made.memory["data"]["data"] == [epoch["data/loss"] for epoch in metrics]
    after = tiny_runs.frozen(made)
    assert all(torch.equal(after[key], frozen[key]) for key in frozen)


# --- what is refused -------------------------------------------------------------------------------------------------
def test_a_file_of_demonstrations(tmp_path):
    saved(tmp_path / "a.png")
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": " red ", "image": "a.png", "source": "me"}\n\n'
                    '{"prompt": "1+2=", "text": "3", "reward": 0.1}\n')
    assert load_demonstrations(file) == [Demonstration("red", tmp_path / "a.png", source="me"),
                                         Demonstration("1+2=", text="3", reward=0.1)]
    for line, told in (('{"prompt": "red"}', "line 1: expected either 'image' or 'text'"),
                       ('{"prompt": "red", "text": "a", "image": "a.png"}', "expected either"),
                       ('{"prompt": "red", "image": "c.png"}', "no image at"),
                       ('{"prompt": "", "text": "a"}', "expected a text under 'prompt', got ''"),
                       ('{"prompt": "a", "text": "a", "reward": "high"}', "expected a number under 'reward'"),
                       ('{"prompt": "a", "txt": "a"}', "unknown key 'txt': did you mean 'text'"),
                       ("{", "not valid JSON"), ("[1]", "expected an object"), ("", "holds no demonstration")):
        file.write_text(line)
        assert told in message(load_demonstrations, file)


def test_answers_have_to_be_there_and_of_the_models_kind(tmp_path):
    refused("nothing is recorded for a training prompt", tiny_text.trainer, parts={"data": {"type": "NextToken"}})
    source = {"path": str(tmp_path / "own.jsonl")}
    (tmp_path / "own.jsonl").write_text('{"prompt": "1+2=", "text": "123456"}')
    refused("answer of the prompt '1\\+2=' has 7 tokens, .* text.max_tokens is 6: raise", tiny_text.trainer,
            parts={"data": {"type": "NextToken", "source": source}})
    (tmp_path / "own.jsonl").write_text('{"prompt": "red", "text": "3"}')
    refused("has a text, expected an image for this model", trainer, "flow", {"type": "FlowMatching", "source": source})

"""Rewards that compare with the base model's image: the same prompt, the same initial noise, no LoRA, no further
noise; drawn once for samples that share it, and counted."""

import json
import math
import re

import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import to_tensor
from torchvision.utils import save_image

from flowgrpo import rewards
from flowgrpo.config.reward_rules import RewardRule
from flowgrpo.contrib import verdicts
from flowgrpo.evaluation.evaluate import evaluate
from flowgrpo.rewards import combine, guards
from flowgrpo.samplers.rollout import seeder
from flowgrpo.training import sampling
from tests.helpers import tiny
from tests.helpers.refusals import message
from tests.test_train import align

FAR = '''
def far(images, prompts, base=None):
    """How far a picture is from the base's."""
    return [None] * len(prompts) if base is None else (images - base).abs().flatten(1).mean(1)

far.base = True
'''


class Far:
    """Minus the distance to the base's image; what it was called with is kept."""

    base = True

    def __init__(self):
        self.seen: list[tuple[torch.Tensor, list[str], torch.Tensor]] = []

    def __call__(self, images, prompts, metadata, base):
        self.seen.append((images, prompts, base))
        if base is None:
            return images.flatten(1).mean(1)
        return -(images - base).abs().flatten(1).mean(1)


def sampled(method: str, **options):
    """A trainer whose LoRA is not the base, and what its reward was called with in one epoch."""
    reward = Far()
    trainer = tiny.trainer(rewards={"far": reward}, reward="far", method=method, train__grid="stock",
                           train__guidance=1.5, **options)
    tiny.stir(trainer.policy)
    before = trainer.policy.evaluations
    parts, _, _ = sampling.sample(trainer, trainer.prompts[:2])
    return trainer, parts, reward.seen, trainer.policy.evaluations - before


def stock(prompt: str, seed: int) -> torch.Tensor:
    """What a user of diffusers gets from that noise with the base."""
    with torch.no_grad():
        return tiny.sd3()(prompt, generator=torch.Generator().manual_seed(seed), num_inference_steps=6,
                          guidance_scale=1.5, output_type="pt", **tiny.CALL).images[0]


@pytest.mark.parametrize("method, samples", [
    ("flow_grpo", [0, 1, 2, 3]),  # every sample has a noise of its own
    ("dance_grpo", [-1, -1, -1, -1]),  # all share one
])
def test_the_base_is_the_stock_pipeline_from_the_same_noise(method, samples):
    trainer, parts, seen, _ = sampled(method)
    seed = seeder(trainer.config.seed, 0)
    assert [part.seeds.tolist() for part in parts] == [[seed(p, k) for k in samples] for p in (0, 1)]
    for p, (images, prompts, base) in enumerate(seen):
        assert prompts == [tiny.PROMPTS[p]] * 4 and images.shape == base.shape
        for k in (0, 3):
            torch.testing.assert_close(base[k], stock(prompts[k], seed(p, samples[k])), atol=2e-5, rtol=0)
        assert (images - base).abs().flatten(1).mean(1).min() > 1e-4  # the LoRA, and the rollout's noise


def test_what_the_base_costs_is_counted_and_told_apart_from_sharing():
    for method, own in (("flow_grpo", 4), ("dance_grpo", 1)):
        trainer, _, _, spent = sampled(method)
        plain = tiny.trainer(method=method, train__grid="stock", train__guidance=1.5)
        tiny.stir(plain.policy)
        start = plain.policy.evaluations
        sampling.sample(plain, plain.prompts[:2])
        rows = 2 * own * 6 * 2  # prompts, noises, steps, guidance
        assert spent - (plain.policy.evaluations - start) == rows
        assert trainer.rollouts.rollout_evaluations - plain.rollouts.rollout_evaluations == rows
        assert trainer.rollouts.saved_evaluations == plain.rollouts.saved_evaluations
        assert plain.clock.seconds["base"] == 0 < trainer.clock.seconds["base"]


def test_explorations_of_one_noise_draw_it_once():
    """G2RPO samples a prompt several times from the noise that all its groups share."""
    trainer, parts, seen, _ = sampled("granular_grpo")
    assert len(parts) > 2 and {len(set(part.seeds.tolist())) for part in parts} == {1}
    of = {prompt: [base for _, prompts, base in seen if prompts[0] == prompt] for prompt in tiny.PROMPTS[:2]}
    assert all(torch.equal(base, first) for first, *rest in of.values() for base in rest)
    before = trainer.policy.evaluations
    conditioning = trainer.rollouts.conditioning(trainer.prompts[:2])
    trainer.rollouts.base(parts[-1], conditioning)  # the last one's are kept
    assert trainer.policy.evaluations == before


def test_noises_that_a_preview_chose_are_the_bases_too():
    trainer, parts, seen, _ = sampled("flow_grpo+sol_rl", parts__preview__pool=6, parts__preview__steps=2)
    seed = seeder(trainer.config.seed, 0)
    base = seen[-1][2]
    assert seen[0][2] is None and base is not None  # previews are scored without it
    assert set(parts[-1].seeds.tolist()) < {seed(1, k) for k in range(6)}
    torch.testing.assert_close(base[2], stock(tiny.PROMPTS[1], parts[-1].seeds[2].item()), atol=2e-5, rtol=0)


def test_a_run_starts_as_its_base_and_is_measured_beside_it(tmp_path):
    far = Far()
    settings = tiny.config(tmp_path, reward="far", eval__rewards="[base_similarity]", train__lr=0.05,
                           method="flow_grpo")
    summary = align(settings, {"far": far})
    assert summary["before"] == {"far": 0, "base_similarity": 1}
    assert summary["after"]["far"] < 0 and summary["after"]["base_similarity"] < 1
    # Afterwards it is compared with what was drawn before.
    (before, prompts, base), (after, again, compared) = far.seen[1], far.seen[-1]  # the first is the trial
    assert prompts == again and torch.equal(before, base) and not torch.equal(after, compared)
    torch.testing.assert_close(compared, before, atol=1e-6, rtol=0)
    lines = [json.loads(line) for line in (settings.folder / "metrics.jsonl").read_text().splitlines()]
    assert all(line["reward/far/mean"] < 0 and line["seconds/base"] > 0 for line in lines)


def ask(reward, base, metadata=({}, {}), **rule) -> list[float]:
    images = torch.tensor([0.2, 0.7])[:, None, None, None].expand(-1, 3, 16, 16)
    made = rewards.compose({"it": RewardRule(**rule)}, given={"it": reward})
    return rewards.score(made, images, ["", ""], list(metadata), base=base)[:, 0].tolist()


BASE = torch.tensor([0.3, 0.3])[:, None, None, None].expand(-1, 3, 16, 16)


def test_base_similarity_takes_what_the_run_draws():
    assert ask(guards.BaseSimilarity(), BASE) == pytest.approx([0.9, 0.6])
    assert all(map(math.isnan, ask(guards.BaseSimilarity(), None)))
    routed = ask(guards.BaseSimilarity(), BASE, ({"task": "a"}, {"task": "b"}), when={"task": ["b"]})
    assert math.isnan(routed[0]) and routed[1] == pytest.approx(0.6)  # the rows of both are cut alike


def test_a_image_of_the_metadata_goes_first(tmp_path):
    save_image(torch.full((3, 16, 16), 0.8), tmp_path / "base.png")  # 204 of 255
    found = ask(guards.BaseSimilarity(), BASE, ({"base_image": f"{tmp_path}/base.png"}, {}))
    assert found == pytest.approx([0.4, 0.6], abs=1e-5)


def test_rewards_of_rewards_hand_it_on():
    both = combine.Tiered([guards.BaseSimilarity(), lambda images, prompts: [1.0, 1.0]], [0.7])
    assert both.reads == {"base"} and ask(both, BASE) == pytest.approx([1.9, 0.6])
    assert not verdicts.Corrected([lambda images, prompts: [1.0, 1.0]]).reads


def test_groups_see_it_too():
    class Both:
        base = group = True

        def __call__(self, images, prompts, metadata, group, base):
            return ((images - base).flatten(1).mean(1).view(-1, group).mean(1, keepdim=True).expand(-1, group).flatten()
                    + group)
    images = torch.tensor([0.2, 0.7])[:, None, None, None].expand(-1, 3, 4, 4)
    found = rewards.score({"it": Both()}, images, ["", ""], [{}, {}], 2, base=torch.full((2, 3, 4, 4), 0.3))
    assert found[:, 0].tolist() == pytest.approx([2.15, 2.15])


def test_kept_scores_are_of_one_base(tmp_path):
    calls = []
    class Counted(guards.BaseSimilarity):
        def __call__(self, images, *rest, **named):
            calls.append(len(images))
            return super().__call__(images, *rest, **named)
    made = rewards.compose({"it": RewardRule(cache=True)}, str(tmp_path), {"it": Counted()})
    images = torch.tensor([0.2, 0.7])[:, None, None, None].expand(-1, 3, 16, 16)
    each = [rewards.score(made, images, ["", ""], [{}, {}], base=base)[:, 0].tolist()
            for base in (BASE, BASE, BASE + 0.1, None)]
    assert each[0] == each[1] == pytest.approx([0.9, 0.6]) and each[2] == pytest.approx([0.8, 0.7])
    assert all(map(math.isnan, each[3])) and calls == [2, 2, 2]


def test_a_gradient_is_not_followed_beside_the_base_and_texts_have_no_noise_to_share():
    told = message(rewards.require_gradient, {"far": rewards.differentiable(Far())})
    assert re.search("compares with the base's image .*take `base` away", told)
    rewards.require_for_tokens({"near": len})
    told = message(rewards.require_for_tokens, {"far": Far()})
    assert "reward 'far' compares with the base's image from the same noise" in told


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run on a tiny model, and a reward beside it."""
    from tests.evaluation.test_images import make_run
    folder = tmp_path_factory.mktemp("finished")
    run = make_run(folder / "run", tiny.save(tiny.sd3(), folder / "tiny"), 0.3)
    (folder / "far.py").write_text(FAR)
    return run, f"{folder}/far.py:far"


def test_an_evaluation_with_its_base_compares_with_it(finished, tmp_path):
    run, far = finished
    (tmp_path / "suite.txt").write_text("a dog\na cat\n")
    alone = evaluate(str(run), str(tmp_path / "suite.txt"), [far], tmp_path / "out")
    assert alone["arms"]["tuned"][far]["all prompts"]["prompts"] == 0  # there is nothing to compare with
    found = evaluate(str(run), str(tmp_path / "suite.txt"), [far], tmp_path / "out", base=True)
    folder = tmp_path / "out" / "pictures"
    pictures = {arm: torch.stack([to_tensor(Image.open(file)) for file in sorted((folder / arm).iterdir())])
                for arm in ("base", "tuned")}
    apart = (pictures["tuned"] - pictures["base"]).abs().mean().item()
    arms = found["arms"]
    assert arms["base"][far]["all prompts"]["mean"] == 0 and apart > 0.001
    assert arms["tuned"][far]["all prompts"]["mean"] == pytest.approx(apart, abs=1e-5)

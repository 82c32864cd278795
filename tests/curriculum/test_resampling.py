"""Groups that are replaced or get hints: by hand, and in whole epochs of texts and of images."""

import pytest
import torch

from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.curriculum.resampling import AdditionalGroups, DynamicSampling, Hints, fresh
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from flowgrpo.training import credit
from tests.helpers import loop, tiny, tiny_runs, tiny_text

POOL = [Prompt(text) for text in "abcdef"]
MIXED, AGREED = [0.0, 1.0, 0.0], [1.0, 1.0, 1.0]


def drawn(*turns: list[tuple[str, list[float]]]) -> EpochBatch:
    """An epoch of these turns, each of (prompt, the rewards of its group)."""
    found = EpochBatch(POOL, 3, 10, 7, Processes())
    for turn in turns:
        totals = torch.tensor([rewards for _, rewards in turn], dtype=torch.float64)
        found.add([Prompt(text) for text, _ in turn], totals[..., None], totals)
    return found


def test_replacements_are_fresh_and_disagree():
    found = drawn([("a", MIXED), ("b", AGREED), ("c", [0.0, 0.0, 0.0])])
    pairs = DynamicSampling()(found)
    assert [place for place, _ in pairs] == [1, 2] and {prompt.text for _, prompt in pairs} < {"d", "e", "f"}
    assert DynamicSampling()(found) == pairs  # of the seed, the epoch and the turn alone
    assert [prompt.text for prompt in found.replace(pairs)] == [prompt.text for _, prompt in pairs]
    assert found.standing() == [0]
    taken = [POOL[0], POOL[1], POOL[1], POOL[2], POOL[3], POOL[4], POOL[5]]
    found = [prompt.text for prompt in fresh(POOL, 6, taken, [0, 1, 2])]
    assert sorted(found[:5]) == list("acdef") and found[5] == "b"
    assert [prompt.text for prompt in fresh(POOL[:2], 5, [], [1])].count("a") in (2, 3)
    heavy = [Prompt("x", weight=1e9), Prompt("y"), Prompt("z")]
    assert all(fresh(heavy, 1, [], [seed])[0].text == "x" for seed in range(20))


def test_a_replacement_that_agrees_is_replaced_in_its_turn_until_the_cap():
    found = drawn([("a", MIXED), ("b", AGREED)])
    found.replace([(1, POOL[2])])
    found.add([POOL[2]], torch.zeros(1, 3, 1), torch.zeros(1, 3))
    assert [place for place, _ in DynamicSampling(turns=3)(found)] == [2] and DynamicSampling(turns=2)(found) == []
    found.replace([(2, POOL[3])])
    found.add([POOL[3]], torch.tensor([MIXED])[..., None], torch.tensor([MIXED]))
    assert DynamicSampling()(found) == []
    batch, scores = found.prompts_and_scores()
    assert [prompt.text for prompt in batch] == ["a", "b", "c", "d"]
    assert scores.isnan().all(2).all(1).tolist() == [False, True, True, False]
    assert torch.equal(found.first, torch.tensor([MIXED, AGREED], dtype=torch.float64)[..., None])


def test_processes_draw_equally_many_and_keep_their_own():
    processes = Processes()
    processes.count = 2
    found = EpochBatch(POOL, 0, 1, 0, processes)
    found.add(POOL[:4], torch.zeros(4, 3, 1), torch.zeros(4, 3))
    pairs = [(0, POOL[4]), (1, POOL[5]), (2, POOL[0])]
    assert found.replace(pairs) == [POOL[4], POOL[5]] and found.replaced == {0, 1}
    found.add([POOL[4], POOL[5]], torch.zeros(2, 3, 1), torch.zeros(2, 3))
    for processes.rank, own in ((0, "abe"), (1, "cdf")):
        assert "".join(prompt.text for prompt in found.own()) == own


def test_prompts_that_contradict_their_prior_get_one_more_group():
    found = drawn([("a", [1.0] * 4), ("b", [1.0, 1.0, 1.0, 0.0]), ("c", [0.0] * 4), ("d", [1.0] * 4)])
    # Priors 1/2 of four samples: the noise is 1/4, a mean of 1 is two deviations away, 3/4 one.
    found.memory |= {"PriorBlend": {name: {"epoch": 2, "after": [4, 2]} for name in "abc"}}
    assert [prompt.text for _, prompt in AdditionalGroups(1.9)(found)] == ["a", "c"]
    assert AdditionalGroups(2.0)(found) == []
    assert [prompt.text for _, prompt in AdditionalGroups(0.9)(found)] == [*"abc"]
    [pair, _] = AdditionalGroups(1.9)(found)
    assert found.replace([pair]) == [pair[1]] and found.replaced == set() and found.standing() == [0, 1, 2, 3]
    found.add([pair[1]], torch.zeros(1, 4, 1), torch.zeros(1, 4))
    batch, scores = found.prompts_and_scores()
    assert [prompt.text for prompt in batch] == [*"abcda"] and not scores.isnan().any()
    assert AdditionalGroups(0.1)(found) == [] and found.metrics() == {"extra_groups": 1}


def test_a_run_samples_more_of_what_contradicts_its_prior():
    parts = {"advantage": {"type": "PriorBlend"}, "redraw": {"type": "AdditionalGroups"}}
    trainer = tiny_text.trainer(rewards={"short": lambda texts, prompts: [1.0] * len(texts)}, parts=parts)
    trainer.prompts = trainer.prompts[:2]
    trainer.run_epoch()
    assert trainer.progress.sampled == 8
    trainer.epoch = 1  # of evidence 2, at a rate of 1/2, and four successes 4.4 of 5.4: no conflict at .81
    trainer.memory["PriorBlend"][trainer.prompts[0].key]["after"] = [8.0, 1.0]
    trainer.run_epoch()
    assert trainer.progress.sampled == 16 + 4
    assert trainer.memory["PriorBlend"][trainer.prompts[0].key]["after"] == pytest.approx([0.7 * 8 + 8, 0.7 + 8])


def counted(calls: list[str]):
    """A reward by which half of the prompts agree, whatever is answered."""
    def reward(texts, prompts):
        calls.extend(prompts[::4])
        return [len(text) + text.count("7") / 2 if "+" in prompt else 1.0 for text, prompt in zip(texts, prompts)]
    return reward


def test_an_epoch_of_texts_is_filled_up_with_groups_that_differ():
    calls: list[str] = []
    trainer = tiny_text.trainer(rewards={"short": counted(calls)}, method="dapo+dynamic_sampling", train__prompts=3)
    kept = [prompt for prompt in tiny_text.PROMPTS if "+" in prompt]
    epoch = loop.draw(trainer)
    drawn, parts, asked = epoch.groups, epoch.parts, epoch.conditioning
    assert sorted(set(calls)) == sorted(calls) and len(calls) > 3  # no prompt twice
    batch, _ = drawn.prompts_and_scores()
    credited = credit.compare(trainer, epoch)
    trained = [asked.prompts[i] for part in credited for i in part.prompts[::4].tolist() if part.transitions]
    assert len(batch) == len(calls) and [asked.prompts[i] for part in parts for i in part.prompts[::4]] == calls
    assert set(trained) <= set(calls) and sum(prompt in kept for prompt in trained) >= 3
    assert trainer.run_epoch()["grad_norm"] > 0 and trainer.first_ratio.max_log_ratio <= 1e-5


def test_turns_have_noise_of_their_own():
    trainer = tiny_text.trainer(rewards={"short": lambda texts, prompts: [1.0] * len(texts)},
                                parts={"redraw": {"type": "DynamicSampling", "turns": 3}}, train__prompts=2)
    trainer.prompts = trainer.prompts[:2]
    epoch = loop.draw(trainer)
    drawn, parts, asked = epoch.groups, epoch.parts, epoch.conditioning
    assert drawn.turn == 3 and len(asked.prompts) == 6 and sorted(drawn.replaced) == [0, 1, 2, 3]
    ids = {asked.prompts[int(part.prompts[0])]: [] for part in parts}
    for part in parts:
        [taken] = part.transitions
        for at in part.prompts.unique():
            ids[asked.prompts[int(at)]].append(taken.ids[taken.prompts == at])
    for first, second, third in ids.values():
        assert not torch.equal(first, second) and not torch.equal(second, third)


def test_a_resumed_run_draws_and_redraws_the_same(tmp_path):
    def arguments(folder, **options):
        settings = tiny_text.config(folder, method="dapo+mopps+dynamic_sampling",
                                    parts={"curriculum": {"candidates": 2}}, **options)
        return settings, dict(pipe=tiny_text.model(), functions={"short": tiny_text.short},
                              prompts=[Prompt(text) for text in tiny_text.PROMPTS])
    whole, part = tiny_runs.whole_and_resumed(arguments, tmp_path)
    one, two = (folder / "adapter_model.safetensors" for folder in (whole, part))
    assert one.read_bytes() == two.read_bytes()
    assert sum(line.get("redrawn_groups", 0) for line in tiny_runs.lines(whole)) > 0


def test_images_are_redrawn_too():
    seen = []
    def reward(images, prompts):
        seen.append(prompts[0])
        flat = prompts[0] == seen[0]
        return [1.0] * len(images) if flat else images[:, 1].mean((1, 2))
    trainer = tiny.trainer(method="mix_grpo+dynamic_sampling", rewards={"green": reward}, reward="green",
                           train__lr=1e-3, train__micro_batch=4)
    tiny.stir(trainer.policy)
    metrics = trainer.run_epoch()
    assert len(seen) == trainer.config.train.prompts + 1 and metrics["grad_norm"] > 0
    assert metrics["log_ratio_max"] <= 1e-6


LED = Prompt("2+2=", metadata={"answer": 4, "hints": ["count", "it is 4"]})
PLAIN = Prompt("1+2=", metadata={"answer": 3})
SOLVED = Prompt("5-66=", metadata={"solution": "take five away from sixty six"})


def with_hints(prompts: list[Prompt], totals: list[list[float]], epoch: int = 5) -> EpochBatch:
    found = EpochBatch([LED, PLAIN, SOLVED], epoch, 10, 0, Processes())
    found.add(prompts, torch.tensor(totals)[..., None], torch.tensor(totals))
    return found


def test_a_group_that_fails_gets_one_hint_more_each_time():
    part = Hints()
    found = with_hints([LED, PLAIN, LED], [[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    [(place, once)] = part(found)  # one has no hints, one is solved
    assert place == 0 and once.shown == "2+2=\n\nHint: count" and once.key == once.shown
    assert once.text == "2+2=" and once.metadata == LED.metadata and once.learned == once and once.unguided == LED
    found.add(found.replace([(place, once)]), torch.zeros(1, 2, 1), torch.zeros(1, 2))
    [(place, twice)] = part(found)
    assert place == 3 and twice.shown == "2+2=\n\nHint: count\nit is 4"
    found.add(found.replace([(place, twice)]), torch.zeros(1, 2, 1), torch.zeros(1, 2))
    assert part(found) == [] and found.standing() == [1, 2, 4]  # none is left: the last one stays
    assert LED.metadata == {"answer": 4, "hints": ["count", "it is 4"]} and part.add_hint(LED) == once


def test_beginnings_of_a_solution_for_those_below_the_mark():
    part = Hints(shares=(0.25, 0.5, 1.0), text="{prompt} ({hint})")
    texts, prompt = [], SOLVED
    while (prompt := part.add_hint(prompt)) is not None:
        texts.append(prompt.shown)
    assert texts == ["5-66= (take five)", "5-66= (take five away)", "5-66= (take five away from sixty six)"]
    assert part.add_hint(LED) is None
    failing = [[0.0, 0.0]]
    assert Hints(after=0.5)(with_hints([LED], failing, epoch=4)) == []
    assert len(Hints(after=0.5)(with_hints([LED], failing, epoch=5))) == 1
    assert len(Hints(fail=0.25)(with_hints([LED], [[0.25, 0.0]]))) == 1
    assert Hints()(with_hints([LED], [[0.25, 0.0]])) == []
    assert len(Hints()(with_hints([LED], [[float("nan"), 0.0]]))) == 1


def led(**options):
    """(trainer, what its reward has seen, what its policy has read); the group with the last hint can earn a reward."""
    seen: list[tuple[str, dict]] = []
    read: list[str] = []
    def reward(texts, prompts, metadata):
        seen.extend((prompt, {key: entry[key] for key in entry if key != "completion_tokens"})
                    for prompt, entry in zip(prompts[::4], metadata[::4]))
        turns = {prompt: sum(earlier == prompt for earlier, _ in seen) for prompt in prompts}
        return [float(text.count("7") + len(text)) if turns[prompt] == len(entry["hints"]) + 1 else 0.0
                for text, prompt, entry in zip(texts, prompts, metadata)]
    trainer = tiny_text.trainer(rewards={"short": reward}, **{"method": "grpo+scaf_grpo"} | options, train__prompts=2,
                                parts={"redraw": {"after": 0.0, "text": "{prompt}{hint}"}})
    trainer.prompts = [Prompt("2+2=", metadata={"answer": 4, "hints": ["5", "8"]}),
                       Prompt("7+7=", metadata={"answer": 14, "hints": ["8"]})]
    encode = trainer.rollouts.encode
    trainer.rollouts.encode = lambda texts, **given: read.append(texts) or encode(texts, **given)
    return trainer, seen, read


def test_an_epoch_trains_on_the_prompt_with_its_hint():
    """And rewards and the report see the prompt without it."""
    trainer, seen, read = led()
    metrics = trainer.run_epoch()
    assert metrics["reward/short/mean"] == 0 and metrics["grad_norm"] > 0 and trainer.first_ratio.max_log_ratio <= 1e-5
    assert [*map(sorted, read[:3])] == [["2+2=", "7+7="], ["2+2=5", "7+7=8"], ["2+2=5\n8"]]
    assert sorted(read[3]) == ["2+2=", "2+2=5", "2+2=5\n8", "7+7=", "7+7=8"]  # what is learned
    four, fourteen = (prompt.metadata for prompt in trainer.prompts)
    assert sorted(seen, key=str) == [("2+2=", four)] * 3 + [("7+7=", fourteen)] * 2
    shown = [prompt.text for _, prompt, *_ in (*trainer.scoring.extremes.best, *trainer.scoring.extremes.worst)]
    assert shown and {*shown} <= {"2+2=", "7+7="}

"""Encoded prompts: rows, padding, memory and disk, and prompts that are longer than an encoder reads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from flowgrpo.config.sections import Adapter
from flowgrpo.policies.pipelines import padding
from flowgrpo.policies.pipelines.conditioning import Conditioning, PromptCache, _write, digest, fingerprint, join
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.tools.check import tiny as pipelines
from tests.helpers.tiny import CALL, sd3


def policy(pipe=None, call=CALL):
    return PipelinePolicy(pipe or sd3(), Adapter(rank=2), call=call, guidance=3.0)


def tensors(conditioning):
    return [value for call in conditioning.calls for value in call if torch.is_tensor(value)]


def test_rows_are_those_of_the_pipeline_and_do_not_depend_on_their_company():
    encoder, prompts = PromptCache(policy()), ["a red dot", "a dog", "nothing"]
    together = encoder(prompts, ["", "", "blur"])
    direct = policy().encode(prompts, ["", "", "blur"])
    torch.testing.assert_close(tensors(together), tensors(direct), rtol=1e-5, atol=1e-5)
    same(encoder(["a dog"], [""]), together.rows(torch.tensor([1])), atol=0)


class Ragged(StableDiffusion3Pipeline):
    """Pads prompts to the longest of the batch, as Qwen-Image does, and not to a fixed length."""

    def encode_prompt(self, prompt, *args, **kwargs):
        found = super().encode_prompt(prompt, *args, **kwargs)
        return tuple(value[:, : max(map(len, prompt))] if value.ndim == 3 else value for value in found)


def qwen():
    """A policy of Qwen-Image, which pads to the longest prompt of a batch with zeros and a mask."""
    return policy(*pipelines.make("QwenImagePipeline"))


def same(one, two, atol=1e-6):
    """Compares all values of two conditionings."""
    torch.testing.assert_close(one.calls, two.calls, rtol=0, atol=atol)


def test_rows_of_one_prompt_are_the_pipelines_own_call_whatever_the_batch():
    live = qwen()
    encoded = PromptCache(live)(["ab", "a dog", "three small green frogs"], ["", "", "blur"])
    for place, (prompt, negative) in enumerate([("ab", ""), ("a dog", ""), ("three small green frogs", "blur")]):
        rows, own = encoded.rows(torch.tensor([place] * 2)), live.encode([prompt] * 2, [negative] * 2)
        same(rows, own)
        assert [call[1] for call in rows.calls] == [None, None]  # no mask


def test_rows_of_prompts_that_differ_in_length_are_padded_as_the_pipeline_pads_them():
    live, prompts = qwen(), ["ab", "three small green frogs", "a dog"]
    encoded = PromptCache(live)(prompts, ["", "", ""])
    rows, own = encoded.rows(torch.tensor([0, 2])), live.encode(["ab", "a dog"], ["", ""])
    same(rows, own, atol=1e-5)
    assert rows.calls[0][1].sum(1).tolist() == [encoded.rows(torch.tensor([i])).calls[0][0].shape[1] for i in (0, 2)]
    same(encoded.rows(torch.arange(3)), live.encode(prompts), atol=1e-5)


def test_prompts_of_different_lengths_that_cannot_be_padded_have_calls_of_their_own():
    live = policy(Ragged(**sd3().components))
    encoder, task = PromptCache(live), Segment(shift_grid(3, 3.0), range(3))
    together = encoder(["ab", "ab", "a dog"], [""] * 3)
    found, _ = live.run(task, together, None, live.generators([1, 2, 3]))
    for i, prompt in enumerate(["ab", "ab", "a dog"]):
        own, _ = live.run(task, live.encode([prompt], [""]), None, live.generators([i + 1]))
        torch.testing.assert_close(found[i:i + 1], own, rtol=0, atol=1e-5)
    assert [list(run) for run in together.runs] == [[0, 1], [2]]
    assert encoder(["a dog"], [""]).calls[0][0].shape[:2] == (1, 5)


@pytest.mark.parametrize("together", [
    (torch.tensor([[[1.0], [0.0]], [[2.0], [3.0]]]), torch.tensor([[0, 1], [1, 1]])),  # masked on the left
    (torch.tensor([[[1.0], [9.0]], [[2.0], [3.0]]]), torch.tensor([[1, 0], [1, 1]])),  # not padded with zeros
    (torch.tensor([[[1.0], [0.0]], [[2.0], [3.0]]]),),  # of another number of values
])
def test_other_paddings_are_recognised(together):
    values = (torch.tensor([[[1.0]]]), None), (torch.tensor([[[2.0], [3.0]]]), None)
    alone = dict(zip(padding.TEXTS, values))
    as_expected = (torch.tensor([[[1.0], [0.0]], [[2.0], [3.0]]]), torch.tensor([[1, 0], [1, 1]]))
    masks = padding.learn(lambda texts: (alone[texts[0]] if len(texts) == 1 else as_expected,))
    assert masks == ((None, torch.int64),) == padding.read(padding.to_json(masks))
    assert padding.learn(lambda texts: (alone[texts[0]] if len(texts) == 1 else together,)) is None


def test_with_all_prompts_on_disk_no_encoder_runs(tmp_path):
    for run in range(2):
        live = qwen()
        counted = encoder_rows(live)
        encoded = PromptCache(live, tmp_path)(["ab", "three small green frogs"], ["", ""])
        assert encoded.masks and encoded.rows(torch.arange(2)).calls[0][1].shape[0] == 2 and bool(counted) == (run == 0)


def encoder_rows(live):
    """Counts the rows that go through the first text encoder from now on."""
    counted = []
    live.pipe.text_encoder.register_forward_hook(
        lambda _module, given, options, _output: counted.append(len(given[0] if given else options["input_ids"])),
        with_kwargs=True)
    return counted


@pytest.mark.parametrize("make, prompts", [
    (policy, ["a", "b", "a"]), (qwen, ["a", "three small green frogs", "a"])])  # of one length, and of others
def test_each_prompt_is_encoded_once(make, prompts):
    live = make()
    encoder = PromptCache(live)
    encoder(["warm", "a longer one"], ["", ""])  # finds out which values have a row per prompt, and how they are padded
    counted = encoder_rows(live)
    for _ in range(2):
        encoder(prompts, ["", "", ""])
    assert counted == [1, 1] * 2  # two prompts, each with its negative


def test_the_memory_of_prompts_drops_the_one_that_was_read_longest_ago():
    live = policy()
    live.encode(["warm"], [""])
    size = sum(value.nbytes for value in {digest(each): each for each in tensors(live.encode(["a"], [""]))}.values())
    shared = sum(value.nbytes for value in tensors(live.encode(["a"], [""]))[1::2])  # the negative prompt's
    encoder, counted = PromptCache(live, limit=shared + 2 * (size - shared)), encoder_rows(live)
    encoder(["a"], [""]), encoder(["b"], [""]), encoder(["a"], [""])
    assert len(counted) == 4
    encoder(["c"], [""])  # in place of b
    encoder(["a"], [""])
    assert len(counted) == 6
    encoder(["b"], [""])
    assert len(counted) == 8 and sum(value.nbytes for value in encoder._values.values()) <= encoder.limit


def test_prompts_are_prepared_until_the_memory_is_full():
    live = policy()
    live.encode(["warm"], [""])
    encoder, counted = PromptCache(live, limit=1), encoder_rows(live)
    encoder.prepare(["a", "b", "c"], [""] * 3, [None] * 3)
    assert len(counted) == 4  # a, and b in its place
    encoder = PromptCache(live)
    encoder.prepare(["a", "b", "a"], [""] * 3, [None] * 3)
    encoder(["b", "a"], ["", ""])
    assert len(counted) == 8


def test_a_second_run_reads_the_first_ones_from_disk_bit_for_bit(tmp_path):
    first = PromptCache(policy(), tmp_path)(["a red dot", "a dog"], ["", ""])
    live = policy()
    counted = encoder_rows(live)
    second = PromptCache(live, tmp_path)(["a red dot", "a dog"], ["", ""])
    assert counted == []
    assert second.per_prompt == first.per_prompt and second.prompts == first.prompts
    same(first, second, atol=0)


def test_a_pipeline_whose_prompts_are_all_on_disk_is_still_tried(tmp_path):
    """The pipeline sets the first frame of its state itself, so that a state has to be put in place."""
    for _ in range(2):
        live = policy(*pipelines.make("HunyuanVideoImageToVideoPipeline (token_replace)"))
        PromptCache(live, tmp_path)(["red"], [""])
        assert live.driver.loads


def test_other_encoders_do_not_share_the_folder():
    assert fingerprint(policy()) == fingerprint(policy()) != fingerprint(policy(sd3(1)))


def test_join_keeps_order_and_strings():
    live = policy()
    joined = join([live.encode(["x"], ["n"]), live.encode(["y", "z"], ["", "m"])])
    assert joined.prompts == ["x", "y", "z"] and joined.negatives == ["n", "", "m"]


def test_runs_that_share_a_folder_may_write_the_same_prompt_at_once(tmp_path):
    calls = ((torch.ones(1, 64, 1024),),)
    kept, path = Conditioning(["a dog"], [""], calls, per_prompt=((True,),)), tmp_path / "a.safetensors"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: _write(path, kept), range(200)))  # raises what a writer raised
    assert [each.name for each in tmp_path.iterdir()] == ["a.safetensors"]


def test_prompts_that_are_cut_are_counted_once():
    pipe = load_pipeline("starter")
    fits, long = "a red star", "a red star and a green star and a blue star and a red circle"
    assert padding.cut(pipe, {}, [fits, "a circle"]) is None
    assert padding.cut(pipe, {}, [fits, long, long, 9 * long]) == (
        "2 of 3 prompts are longer than an encoder reads: cut are 2 by the tokenizer (16 tokens), "
        "2 by the tokenizer_2 (16 tokens)")


def test_limits_are_of_the_call_but_for_clip():
    class Tokenizer:
        model_max_length = 512
    class CLIPTokenizer(Tokenizer):
        model_max_length = 77
    class Pipe:
        components = {"tokenizer": CLIPTokenizer(), "tokenizer_2": Tokenizer(), "scheduler": None}

        def __call__(self, prompt, max_sequence_length=256):
            """A call."""
    for call, most in (({}, 256), ({"max_sequence_length": 32}, 32)):
        lengths = {name: length for name, (_, length) in padding.limits(Pipe(), call).items()}
        assert lengths == {"tokenizer": 77, "tokenizer_2": most}

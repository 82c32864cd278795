from concurrent.futures import ThreadPoolExecutor

import torch
from diffusers import StableDiffusion3Pipeline

from flowgrpo.check import tiny as pipelines
from flowgrpo.config.sections import Adapter
from flowgrpo.policies.pipelines.conditioning import Conditioning, PromptCache, _write, fingerprint, join
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from tests.helpers.tiny import CALL, sd3


def policy(seed=0):
    return PipelinePolicy(sd3(seed), Adapter(rank=2), call=CALL, guidance=3.0)


def tensors(conditioning):
    return [value for call in conditioning.calls for value in call if torch.is_tensor(value)]


def test_rows_are_those_of_the_pipeline_and_do_not_depend_on_their_company():
    encoder, prompts = PromptCache(policy()), ["a red dot", "a dog", "nothing"]
    together = encoder(prompts, ["", "", "blur"])
    direct = policy().encode(prompts, ["", "", "blur"])
    for ours, theirs in zip(tensors(together), tensors(direct), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    alone = encoder(["a dog"], [""])
    for ours, theirs in zip(tensors(alone), tensors(together.rows(torch.tensor([1]))), strict=True):
        assert torch.equal(ours, theirs)


class Ragged(StableDiffusion3Pipeline):
    """Pads prompts to the longest of the batch, as Qwen-Image does, and not to a fixed length."""

    def encode_prompt(self, prompt, *args, **kwargs):
        found = super().encode_prompt(prompt, *args, **kwargs)
        return tuple(value[:, : max(map(len, prompt))] if value.ndim == 3 else value for value in found)


def test_prompts_that_are_padded_to_each_other_are_encoded_together():
    live = PipelinePolicy(Ragged(**sd3().components), Adapter(rank=2), call=CALL, guidance=3.0)
    encoder = PromptCache(live)
    together, direct = (call(["ab", "a dog"], ["", ""]) for call in (encoder, live.encode))
    assert together.calls[0][0].shape[:2] == (2, 5) and encoder(["ab"], [""]).calls[0][0].shape[:2] == (1, 2)
    assert all(torch.equal(a, b) for a, b in zip(tensors(together), tensors(direct), strict=True))


def encoder_rows(live):
    """Counts the rows that go through the first text encoder from now on."""
    counted = []
    live.pipe.text_encoder.register_forward_hook(lambda _module, _inputs, output: counted.append(len(output[0])))
    return counted


def test_each_prompt_is_encoded_once():
    live = policy()
    live.encode(["warm"], [""])  # finds out which values have a row per prompt
    encoder, counted = PromptCache(live), encoder_rows(live)
    encoder(["a", "b", "a"], ["", "", ""])
    encoder(["b"], [""])
    assert counted == [1, 1] * 2  # two prompts, each with its negative


def test_a_second_run_reads_the_first_ones_from_disk_bit_for_bit(tmp_path):
    first = PromptCache(policy(), tmp_path)(["a red dot", "a dog"], ["", ""])
    live = policy()
    counted = encoder_rows(live)
    second = PromptCache(live, tmp_path)(["a red dot", "a dog"], ["", ""])
    assert counted == []
    assert second.per_prompt == first.per_prompt and second.prompts == first.prompts
    assert all(torch.equal(a, b) for a, b in zip(tensors(first), tensors(second), strict=True))


def test_a_pipeline_whose_prompts_are_all_on_disk_is_still_tried(tmp_path):
    """The pipeline sets the first frame of its state itself, so that a state has to be put in place."""
    for _ in range(2):
        pipe, call = pipelines.make("HunyuanVideoImageToVideoPipeline (token_replace)")
        live = PipelinePolicy(pipe, Adapter(rank=2), call=call)
        PromptCache(live, tmp_path)(["red"], [""])
        assert live.driver.loads


def test_other_encoders_do_not_share_the_folder():
    assert fingerprint(policy(0)) == fingerprint(policy(0)) != fingerprint(policy(1))


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

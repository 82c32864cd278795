"""Janus as a policy of image tokens: its log-probabilities, gradients, images, files and refusals."""

import re
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors.torch import load_file, save_file

from flowgrpo.config import Config
from flowgrpo.config.sections import Text
from flowgrpo.data.prompts import Prompt
from flowgrpo.methods import validate
from flowgrpo.policies import build, options
from flowgrpo.run import run
from flowgrpo.text.policies import image_lm, kinds
from flowgrpo.text.policies.image_lm import ImageLM
from flowgrpo.text.policies.text_weights import load_causal_lm
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.train import Trainer
from flowgrpo.training.checks import check
from tests.helpers import tiny_runs, tiny_text
from tests.helpers import tiny_vision as tiny
from tests.helpers.processes import launch
from tests.helpers.refusals import message, refused
from tests.helpers.tiny_text import ASKED as PROMPTS
from tests.helpers.tiny_text import replayed, sampled

LOOK = tiny.SPECIAL.index("<look>")
GUIDANCE = pytest.mark.parametrize("guidance", [1.0, 3.0])


def by_hand(own: ImageLM, prompt: str, codes: torch.Tensor, guidance: float, both: bool = True) -> torch.Tensor:
    """Logits [L,K] of a row's image tokens: no batch, no cache, a forward per token and half, from the model's parts.

    both: with a gradient through the half without the prompt.
    """
    model, halves = own.model, []
    ids = torch.tensor([[1, *own.tokenizer(prompt)["input_ids"], LOOK]])
    for half in (ids, torch.where((ids == 1) | (ids == LOOK), ids, 0)):
        logits = []
        for t in range(len(codes)):
            before = [model.get_input_embeddings()(half)]
            if t:
                before.append(model.model.generation_aligner(model.model.generation_embeddings(codes[None, :t])))
            states = model.model.language_model(inputs_embeds=torch.cat(before, 1), use_cache=False)
            logits.append(model.model.generation_head(states.last_hidden_state[0, -1]))
        halves.append(torch.stack(logits))
    own_half, other = halves[0], halves[1] if both else halves[1].detach()
    return other + guidance * (own_half - other)


def expected(own, prompts, found, guidance, temperature=1.0, both=True):
    codes = found.ids - own.first
    rows = [by_hand(own, prompt, row, guidance, both) for prompt, row in zip(prompts, codes)]
    return torch.stack([(row / temperature).log_softmax(-1).gather(1, of[:, None])[:, 0]
                        for row, of in zip(rows, codes)])


def padded(asked) -> torch.Tensor:
    """The prompts' tokens [B,S], padded on the left, where the mask is 0."""
    longest = max(map(len, asked.ids))
    return torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in asked.ids])


# --- samples and replays ---------------------------------------------------------------------------------------------
@GUIDANCE
@pytest.mark.parametrize("shared", [True, False])
@torch.no_grad()
def test_rollout_replay_and_the_models_own_parts_agree(guidance, shared):
    own, decoding = tiny_text.stir(tiny.drawing(guidance, shared_prefix=shared)), Decoding(0.7)
    asked, found = sampled(own, decoding=decoding)
    assert found.ids.shape == (4, 4) and found.mask.all() and not found.cut.any()
    again = replayed(own, asked, found, decoding)
    torch.testing.assert_close(again.logp, found.logp, rtol=0, atol=3e-5)
    torch.testing.assert_close(again.logp, expected(own, PROMPTS, found, guidance, 0.7), rtol=0, atol=3e-5)
    # The same prompt twice, which is read once where the cache may be shared.
    prompts, twice = torch.tensor([0, 0, 1, 1]), own.encode(PROMPTS[:2])
    of = [PROMPTS[i] for i in prompts]
    _, found = sampled(own, of)
    assert not own.reason_not_shared(twice)
    torch.testing.assert_close(replayed(own, twice, found, prompts=prompts).logp, expected(own, of, found, guidance),
                               rtol=0, atol=3e-5)


@torch.no_grad()
def test_cuts_and_the_entropy_are_those_of_the_guided_distribution():
    own, decoding = tiny_text.stir(tiny.drawing(2.0)), Decoding(0.8, top_k=3)
    asked, found = sampled(own, decoding=decoding)
    again = replayed(own, asked, found, decoding, entropy=True)
    torch.testing.assert_close(again.logp, found.logp, rtol=0, atol=3e-5)
    logits = by_hand(own, PROMPTS[0], found.ids[0] - own.first, 2.0) / 0.8
    kept = logits.masked_fill(logits < logits.topk(3)[0][:, -1:], -torch.inf)
    torch.testing.assert_close(again.entropy[0], torch.distributions.Categorical(logits=kept).entropy(), rtol=0,
                               atol=3e-5)


@pytest.mark.parametrize("checkpointing", [0.0, 1.0])
def test_gradients_are_those_through_both_halves(checkpointing):
    own = tiny_text.stir(tiny.drawing(3.0, checkpointing=checkpointing))
    asked, found = sampled(own)
    weights, gradients = own.weights.parameters(), []
    for logp in (replayed(own, asked, found).logp, expected(own, PROMPTS, found, 3.0),
                 expected(own, PROMPTS, found, 3.0, both=False)):
        gradients.append(torch.cat([each.flatten() for each in torch.autograd.grad(
            (logp * torch.arange(1, 5)).sum(), weights)]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-3)
    assert (gradients[0] - gradients[2]).norm() > 0.1 * gradients[0].norm()  # the half without prompts counts


@torch.no_grad()
def test_tokens_drawn_with_guidance_can_count_without():
    """As in T2I-R1: the tokens of the guided distribution, the log-probabilities of the prompt's half alone."""
    plain, own = (tiny_text.stir(tiny.drawing(3.0, conditional=conditional)) for conditional in (False, True))
    (_, before), (asked, found) = sampled(plain), sampled(own)
    assert torch.equal(before.ids, found.ids)
    torch.testing.assert_close(found.logp, expected(own, PROMPTS, found, 1.0), rtol=0, atol=3e-5)
    torch.testing.assert_close(replayed(own, asked, found).logp, found.logp, rtol=0, atol=3e-5)
    assert (found.logp - before.logp).abs().mean() > 0.1


@torch.no_grad()
def test_tokens_are_those_of_the_stock_models_generation():
    own = tiny_text.stir(tiny.drawing(3.0))
    asked, found = sampled(own, greedy=4)
    ids = padded(asked)
    stock = own.model.generate(input_ids=ids, attention_mask=(ids != 0).long(), generation_mode="image",
                               do_sample=False, guidance_scale=3.0)
    assert torch.equal(found.ids - own.first, stock)
    # Stock code has no way without guidance: the largest logit, token by token.
    own = tiny_text.stir(tiny.drawing(1.0))
    _, found = sampled(own, greedy=4)
    codes = found.ids - own.first
    for prompt, row in zip(PROMPTS, codes):
        assert torch.equal(by_hand(own, prompt, row, 1.0).argmax(-1), row)


@torch.no_grad()
def test_prompts_are_the_processors():
    own = tiny.drawing()
    [ids] = own.encode(["1+2="]).ids
    text = own.processor.apply_chat_template([{"role": "user", "content": [{"type": "text", "text": "1+2="}]}],
                                             add_generation_prompt=True)
    stock = own.processor(text=text, generation_mode="image", return_tensors="pt", add_special_tokens=False)
    assert torch.equal(ids, stock["input_ids"][0])
    plain = tiny.drawing(template=False).encode(["1+2="]).ids[0]
    assert plain.tolist() == [*own.tokenizer("1+2=")["input_ids"], LOOK]


@torch.no_grad()
def test_an_image_depends_on_its_seed_alone_and_is_the_autoencoders():
    own = tiny_text.stir(tiny.drawing())
    _, many = sampled(own)
    _, one = sampled(own, PROMPTS[2:3], seeds=(3,))
    assert torch.equal(many.ids[2:3], one.ids)
    assert many.images.shape == (4, 3, 8, 8) and many.images.min() >= 0 and many.images.max() <= 1
    stock = own.processor.postprocess(list(own.model.decode_image_tokens(many.ids - own.first)), return_tensors="pt")
    pixels = stock["pixel_values"].permute(0, 3, 1, 2) if stock["pixel_values"].shape[-1] == 3 \
        else stock["pixel_values"]
    assert (many.images * 255 - pixels.float()).abs().max() <= 1
    assert not torch.equal(own.generate(own.encode(PROMPTS[:2]), own.generators([5, 5])),
                           own.generate(own.encode(PROMPTS[:2]), own.generators([5, 5]), 0, 1.0))


def test_images_are_shown_again_whatever_the_memory_still_holds(monkeypatch):
    own = tiny.drawing()
    ids = own.first + torch.arange(4 * own.grid).reshape(4, -1) % 7
    images = own.decode(ids)
    monkeypatch.setattr(image_lm, "KEPT", 2 * images[0].nbytes)
    own.decode(ids[:2])
    torch.testing.assert_close(own.decode_cached(ids), images)
    torch.testing.assert_close(own.decode_cached(ids[[3, 0, 3]]), images[[3, 0, 3]])
    own.decode(ids[3:])
    own.decode(ids[:1])
    assert [*own.painted] == [row.numpy().tobytes() for row in (ids[3], ids[0])]


# --- weights ---------------------------------------------------------------------------------------------------------
def test_a_lora_trains_the_language_model_and_the_image_head():
    own = tiny.drawing()
    places = {re.sub(r"\.layers\.\d.*|\.lora_.*", "", key) for key in own.weights.named}
    assert places == {"model.model.language_model", "model.model.generation_head.proj_out",
                      "model.model.generation_head.vision_head"}


@pytest.mark.parametrize("answers", [False, True])
def test_all_weights_are_those_that_image_tokens_go_through(answers):
    own = tiny.drawing(rank=0, answers=answers)
    asked, found = sampled(own)
    replayed(own, asked, found).logp.sum().backward()
    unread = {key for key, weight in own.weights.named.items() if weight.grad is None}
    assert not any("vqmodel" in key for key in own.weights.named)
    assert {key.split(".")[2 if ".model." in key else 1] for key in unread} == (
        {"vision_model", "aligner", "lm_head"} if answers else set())


@pytest.mark.parametrize("rank", [2, 0])
@torch.no_grad()
def test_saved_weights_draw_the_same_in_stock_transformers(rank, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText, AutoProcessor
    own = tiny_text.stir(tiny.drawing(rank=rank))
    asked, found = sampled(own, greedy=4)
    own.weights.save(tmp_path)
    if rank:
        stock = PeftModel.from_pretrained(tiny.janus()[0], tmp_path)
    else:
        stock = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
        assert AutoProcessor.from_pretrained(tmp_path / "model").image_start_token == "<look>"
    ids = padded(asked)
    codes = stock.generate(input_ids=ids, attention_mask=(ids != 0).long(), generation_mode="image", do_sample=False,
                           guidance_scale=3.0)
    assert torch.equal(codes, found.ids - own.first)


def test_the_same_weights_answer_about_images(tmp_path):
    own = tiny_text.stir(tiny.drawing(rank=0, answers=True))
    before = sampled(own)[1]
    reader = own.answering(Text(max_tokens=6))
    asked = reader.encode(["1+2=", "5="], images=[Image.new("RGB", (8, 8), "red"), None])
    answers = reader.sample(asked, Decoding(), reader.generators([1, 2]), torch.zeros(2, dtype=torch.bool))
    scored = reader.log_probs(asked, torch.arange(2), answers.ids, answers.mask, Decoding())
    torch.testing.assert_close(scored.logp.detach(), answers.logp, rtol=0, atol=1e-5)
    scored.logp.sum().backward()
    assert own.weights.named["model.model.language_model.layers.0.self_attn.q_proj.weight"].grad.norm() > 0
    assert torch.equal(sampled(own)[1].ids, before.ids) and reader.weights is own.weights


# --- what is refused -------------------------------------------------------------------------------------------------
def test_what_cannot_be_drawn_is_told_in_a_line(tmp_path):
    own = tiny.drawing()
    refused("JanusForConditionalGeneration generates images from a text only, but a ", own.encode, ["1+2="],
            images=[Image.new("RGB", (8, 8))])
    assert "its image 4, but the model's context is 128 tokens: shorten the prompt" in message(
        own.require_context, ["1" * 140])
    for name, scale in (("train.guidance", {"guidance": 0.5}), ("eval.guidance", {"shown": 0.0})):
        refused(f"{name} is .*, but image tokens are generated with 1, which is none", tiny.drawing, **scale)
    for key in ("bos_token_id", "pad_token_id", "generation_kwargs"):
        model, processor = tiny.janus()
        setattr(model.generation_config, key, None)
        refused(f"generation_config.json has no {key}.*, which JanusForConditionalGen", tiny.drawing,
                loaded=(model, processor))
    model, processor = tiny.janus()
    model.config.vision_config.num_image_tokens = 9
    refused("generates 9 image tokens .*, but its autoencoder decodes 2 x 2", tiny.drawing, loaded=(model, processor))
    model, processor = tiny.janus()
    model.config.vision_config.image_size = 12
    model.save_pretrained(tmp_path / "other")
    refused(r"position_embedding.weight is \[4, 16\] in its weights, but \[9, 16\] by its", load_causal_lm,
            str(tmp_path / "other"), classes=("AutoModelForImageTextToText", "AutoProcessor"))
    config = Config(method="grpo", model="tiny", text={"generates": "image"})
    for loaded, name in ((tiny.llava(), "LlavaForConditionalGeneration"), (tiny_text.model(), "Qwen3ForCausalLM")):
        assert f"text.generates is 'image', but {name} has no image head" in message(build.kind, config, loaded)
    (tmp_path / "config.json").write_text('{"model_type": "emu3", "architectures": ["Emu3ForConditionalGeneration"]}')
    refused("but Emu3ForConditionalGeneration draws images with tokens of its texts", build.kind,
            config.model_copy(update={"model": str(tmp_path)}))


# --- runs ------------------------------------------------------------------------------------------------------------
def red(images, prompts):
    """The mean of the first channel less the others'."""
    return (images[:, 0] - images[:, 1:].mean(1)).mean((1, 2)).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of the tiny Janus, which `flowgrpo train` loads."""
    return tiny_text.save(tmp_path_factory.mktemp("janus"), tiny.janus())


def settings(model, output, method="grpo", **options):
    usual = dict(model=str(model), text__generates="image", text__max_tokens=256, method=method, train__guidance=3.0,
                 eval__guidance=3.0, reward="red", train__micro_batch=8)
    return tiny_text.config(output, **usual | options)


ASKED = [Prompt(text) for text in tiny_text.PROMPTS]


def test_a_run_trains_and_its_result_is_drawn_scored_and_merged(model, tmp_path):
    config = settings(model, tmp_path, train__epochs=4, train__lr=4e-2, eval__samples=8, train__group=8,
                      train__guidance=1.5, eval__guidance=1.5, train__prompts=4, train__micro_batch=32)
    assert build.kind(config) == build.IMAGE_TOKENS
    summary = run(config, functions={"red": red}, prompts=ASKED)
    assert summary["max_first_log_ratio"] <= 3e-5 and summary["unit"] == "tokens"
    assert summary["after"]["red"] != summary["before"]["red"]  # by how much depends on the CPU and the seed
    assert summary["evaluation"]["of"].endswith("images (temperature 1, guidance 1.5)")


RUN = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "remax", "ppo", "disco", "gtpo", "entropy_bonus"]


def drawn(method="grpo", own=None, reward=red, **options) -> Trainer:
    """A trainer of two prompts x 4 images, on prompts that stay the same."""
    config = settings("tiny", "nowhere", method, **options)
    torch.manual_seed(config.seed)
    own = own or kinds.make_policy(config, tiny.janus(), config.adapter)
    return Trainer(config, Accelerator(cpu=True), own, {"red": reward}, (ASKED, []))


@pytest.mark.parametrize("method", RUN)
def test_methods_of_language_models_train_image_tokens_as_they_are(method):
    trainer = drawn(method, train__lr=1e-2)
    before = {key: value.clone() for key, value in trainer.policy.weights.snapshot().items()}
    trainer.run_epoch()
    assert trainer.first_ratio.max_log_ratio <= 3e-5 and trainer.method.target.trains == "image tokens"
    assert max((value - before[key]).abs().max() for key, value in trainer.policy.weights.snapshot().items()) > 0
    assert trainer.method.credit.shaping is None  # DAPO's compares lengths, of which there is one


@pytest.mark.parametrize("method, told", [
    ("grpo_lambda", "parts.shaping: got LengthSwitch, which reads completions"),
    ("spo_chain", "parts.spread: got SegmentChain, which reads completions"),
    ("s_grpo", "parts.draws: got EarlyExits"), ("latr", "parts.draws: got BranchingLookahead"),
    ("visurf", "parts.shaping: got ExpertReward, which reads completions"),
    ("sdpo", "parts.reference reads lengths or words"), ("chord", "parts.data: got NextToken")])
def test_methods_that_need_lengths_or_texts_are_refused(method, told):
    assert told in message(validate.resolve, settings("tiny", "nowhere", method), "image tokens")


def test_keys_and_parts_of_another_kind_are_refused():
    refused("^text.max_tokens is set, which is about texts: leave it out for a model that", check,
            settings("tiny", "nowhere", text__max_tokens=6), pipe=tiny.janus())
    refused("^image.height is set, which is about denoisers: leave it out for a model ", check,
            settings("tiny", "nowhere", image__height=16), pipe=tiny.janus())
    target = {"target": {"type": "ImageTokens", "scores": "conditional"}}
    assert "parts.target ImageTokens is of image tokens: set text.generates: image" in message(
        validate.resolve, tiny_text.config(parts=target), "tokens")
    own = drawn(parts=target).policy
    assert own.conditional and own.halves == 1
    refused("the prompt '1.2=' brings an image, but image tokens are generated from a te", build.require_inputs,
            settings("tiny", "nowhere"), [Prompt("1+2=", image="a.png")], tiny.janus())
    refused("reward 'exact_match' judges text, but what is generated here is image", check,
            settings("tiny", "nowhere", reward="exact_match"), pipe=tiny.janus(), prompts=ASKED)


@pytest.mark.parametrize("given, guidance", [({"train__guidance": 3.0}, 3.0), ({}, 1.0),
                                             ({"train__guidance": 3.0, "eval__guidance": 2.0}, 2.0)])
def test_an_evaluation_has_the_guidance_of_the_rollout_unless_given(given, guidance):
    config = tiny_text.config("nowhere", model="tiny", text__generates="image", **given)
    fitted, told = options.fitting(config, tiny.janus())
    assert fitted.eval.guidance == guidance and ("that of the rollout" in told) is ("eval__guidance" not in given)


def one_of_two(folder: Path) -> None:
    """Two epochs on this process's half of the prompts; its weights."""
    trainer = drawn(train__lr=1e-2, train__micro_batch=4)
    tiny_runs.epochs(trainer)
    save_file(trainer.policy.weights.snapshot(), folder / f"{trainer.processes.rank}.safetensors")


def test_two_processes_train_as_one(tmp_path):
    one = drawn(train__lr=1e-2, train__micro_batch=4)
    tiny_runs.epochs(one)
    assert [code for code, _ in launch(one_of_two, 2, tmp_path)] == [0, 0]
    first, second = (load_file(tmp_path / f"{rank}.safetensors") for rank in (0, 1))
    for key, value in one.policy.weights.snapshot().items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], value, rtol=0, atol=2e-4)


@GUIDANCE
def test_a_killed_run_goes_on_bit_for_bit(guidance, model, tmp_path):
    def arguments(folder, **options):
        return settings(model, folder, train__guidance=guidance, **options), dict(functions={"red": red}, prompts=ASKED)
    tiny_runs.assert_same_weights(*(load_file(folder / "adapter_model.safetensors")
                                    for folder in tiny_runs.whole_and_resumed(arguments, tmp_path)))

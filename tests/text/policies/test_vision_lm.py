"""Models that read images as policies: what their images do to samples, replays, gradients and files; and what goes for
language models alike."""

import json
import re

import pytest
import torch
from PIL import Image

from flowgrpo.config import Config
from flowgrpo.config.sections import Text
from flowgrpo.policies import build
from flowgrpo.text.policies import kinds
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.policies.vision_lm import VisionLM
from flowgrpo.text.samplers.decoding import Decoding
from tests.helpers import tiny_text
from tests.helpers import tiny_vision as tiny
from tests.helpers.refusals import message, refused
from tests.helpers.tiny_text import ASKED as PROMPTS
from tests.helpers.tiny_text import replayed, sampled

FAMILIES = pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
OF_TEXT_TOO = pytest.mark.parametrize("family", [*sorted(tiny.FAMILIES), "text"])
SHARED = pytest.mark.parametrize("shared", [True, False])
BARRED = [tiny.SPECIAL.index(name) for name in ("<image>", "<video>")]


@pytest.fixture()
def images(tmp_path, family):
    """Of `PROMPTS`: three images, and none; of a language model none at all."""
    return [None] * 4 if family == "text" else [*tiny.files(tmp_path), None]


def made(family, **options):
    return tiny_text.policy(**options) if family == "text" else tiny.policy(family, **options)


def by_hand(own: VisionLM, family: str, images, found, prompts=PROMPTS, temperature=1.0) -> torch.Tensor:
    """Row by row, from the processor's inputs and the model's own logits, without those that stand for images."""
    rows = torch.zeros(found.ids.shape)
    for row, (prompt, image) in enumerate(zip(prompts, images)):
        text = f"<s>{'' if image is None else '<look><image><seen>'}{prompt}"
        read = dict(own.processor(text=[text], images=image and [[Image.open(image)]], return_tensors="pt",
                                  add_special_tokens=False))
        count, start = int(found.mask[row].sum()), read["input_ids"].shape[1]
        ids = found.ids[row, :count]
        read["input_ids"] = torch.cat([read["input_ids"], ids[None]], 1)
        read["attention_mask"] = torch.ones_like(read["input_ids"])
        if "mm_token_type_ids" in read:
            read["mm_token_type_ids"] = torch.nn.functional.pad(read["mm_token_type_ids"], (0, count))
        logits = own.model(**read).logits[0, start - 1:-1]
        logits[:, BARRED if family == "qwen" else BARRED[:1]] = -torch.inf
        rows[row, :count] = (logits / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    return rows


# --- samples and replays ---------------------------------------------------------------------------------------------
@FAMILIES
@SHARED
@torch.no_grad()
def test_replay_rollout_and_the_models_own_logits_agree(family, shared, images):
    own, decoding = tiny_text.stir(tiny.policy(family, shared_prefix=shared)), Decoding(0.7)
    asked, found = sampled(own, images=images, decoding=decoding)
    again = replayed(own, asked, found, decoding)
    torch.testing.assert_close(again.logp, found.logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(again.logp, by_hand(own, family, images, found, temperature=0.7), rtol=0, atol=1e-5)
    # The same prompt twice or more, so that its image is read once.
    prompts, twice = torch.tensor([0, 0, 1, 1]), own.encode(PROMPTS[:2], images=images[:2])
    of, seen = [PROMPTS[i] for i in prompts], [images[i] for i in prompts]
    _, found = sampled(own, of, images=seen)
    torch.testing.assert_close(replayed(own, twice, found, prompts=prompts).logp,
                               by_hand(own, family, seen, found, of), rtol=0, atol=1e-5)
    assert own.text.shared_prefix is shared and not own.reason_not_shared(asked)


@FAMILIES
@torch.no_grad()
def test_another_image_changes_what_a_prompt_is_answered(family, images):
    own = tiny.policy(family)
    asked, found = sampled(own, images=images)
    other = own.encode(PROMPTS, images=[*images[2::-1], None])
    change = (replayed(own, other, found).logp - found.logp).abs().amax(1)
    assert (change[[0, 2]] > 1e-3).all()
    assert (change[[1, 3]] < 1e-5).all()  # the image in the middle, and the row without one, are the same


@OF_TEXT_TOO
@torch.no_grad()
def test_a_completion_does_not_depend_on_its_batch(family, images):
    own = made(family)
    _, together = sampled(own, images=images)
    for row, (prompt, image) in enumerate(zip(PROMPTS, images)):
        asked, alone = sampled(own, [prompt], [row + 1], images=[image])
        assert alone.texts[0] == together.texts[row] and torch.equal(alone.mask[0], together.mask[row])
        torch.testing.assert_close(alone.logp[0], together.logp[row], rtol=0, atol=1e-5)
        assert family == "text" or bool(asked.images[0]) is (image is not None)


@FAMILIES
@torch.no_grad()
def test_no_completion_holds_what_stands_for_a_image(family, images):
    own, flat = tiny.policy(family, max_tokens=12), Decoding(100.0)
    asked, found = sampled(own, PROMPTS[:1] * 32, range(32), flat, images=images[:1] * 32)
    drawn = found.ids[found.mask]
    barred = BARRED if family == "qwen" else BARRED[:1]
    assert not torch.isin(drawn, torch.tensor(barred)).any()
    assert len(drawn.unique()) == tiny.TEXT["vocab_size"] - len(barred)  # and every other token comes
    torch.testing.assert_close(replayed(own, asked, found, flat).logp, found.logp, rtol=0, atol=1e-5)


# --- gradients -------------------------------------------------------------------------------------------------------
@OF_TEXT_TOO
def test_what_a_group_shares_is_read_once_and_gives_the_same_gradient(family, images):
    gradients, counts, prompts = [], [], torch.tensor([0, 0, 0, 1, 1, 1])
    for shared in (True, False):
        own = tiny_text.stir(made(family, shared_prefix=shared))
        with torch.no_grad():
            _, found = sampled(own, [PROMPTS[i] for i in prompts], range(6), images=[images[i] for i in prompts])
        asked = own.encode(PROMPTS[:2], images=images[:2])
        replayed(own, asked, found, prompts=prompts)  # the trials
        before = own.evaluations
        weights = torch.arange(1.0, 7.0)[:, None]  # of the rows, so that none could stand for another
        (replayed(own, asked, found, prompts=prompts).logp * weights).sum().backward()
        counts.append(own.evaluations - before)
        gradients.append([parameter.grad for parameter in own.weights.parameters()])
    for shared, whole in zip(*gradients):
        assert (shared - whole).norm() <= 1e-5 * whole.norm() and whole.norm() > 0
    longest, length = max(len(ids) for ids in asked.ids), int(found.mask.sum(1).max())
    assert family != "text" or longest == 6  # "90;1=" with its start
    assert counts == [2 * longest + 6 * (length - 1), 6 * (longest + length - 1)]


@FAMILIES
def test_whole_rows_and_only_the_language_model(family, images):
    own = tiny.policy(family)
    text, asked = own.encode(PROMPTS, images=[None] * 4), own.encode(PROMPTS, images=images)
    own._positions = lambda asked, inputs, mask: ((mask.cumsum(1) - 1).clamp(min=0), mask.sum(1, keepdim=True))
    # Positions of a text are right for texts, and for images that are counted so.
    assert not own.reason_not_shared(text)
    assert bool(own.reason_not_shared(asked)) is (family == "qwen")
    assert ("of their spread, expected at most 0.001" in own.reason_not_shared(asked)) is (family == "qwen")
    own = tiny.policy(family)
    trained = {name.split(".lora_")[0] for name in own.weights.named}
    assert len(trained) == 2 * 7 and all(".layers." in name for name in trained)
    assert not any(re.search("vision|visual", name) for name in trained)


@FAMILIES
def test_checkpointing_gives_the_same_gradient(family, images):
    gradients = []
    for checkpointing in (False, True):
        own = tiny_text.stir(tiny.policy(family, checkpointing=checkpointing))
        with torch.no_grad():
            _, found = sampled(own, PROMPTS[:1] * 3, range(3), images=images[:1] * 3)
        asked = own.encode(PROMPTS[:1], images=images[:1])
        replayed(own, asked, found, prompts=torch.zeros(3, dtype=torch.int64)).logp.sum().backward()
        gradients.append([parameter.grad for parameter in own.weights.parameters()])
    for one, other in zip(*gradients):
        assert (one - other).norm() <= 1e-5 * other.norm() and other.norm() > 0


# --- prompts and files -----------------------------------------------------------------------------------------------
@FAMILIES
def test_what_cannot_be_read_is_told_in_a_line(family, images, tmp_path):
    own = tiny.policy(family)
    (tmp_path / "text.png").write_text("no image")
    assert "text.png cannot be read" in message(lambda: own.encode(["1+2="], images=[tmp_path / "text.png"]))
    assert "Processor cannot read the prompt '<image>1" in message(own.encode, ["<image>1+2="], images=images[:1])
    plain = tiny.policy(family, template=False)
    assert "needs the processor's chat template" in message(lambda: plain.encode(["1+2="], images=images[:1]))
    own.processor.chat_template = "{{ bos_token }}{{ messages[0]['content'][-1]['text'] }}"  # leaves images out
    assert "Processor cannot read the prompt" in message(lambda: own.encode(["1+2="], images=images[:1]))


@FAMILIES
def test_a_run_on_prompts_with_images_and_what_it_leaves(family, tmp_path, images, capsys):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    from flowgrpo.run import run
    from flowgrpo.text.policies import engines as texts
    rows = [{"prompt": "1+2=", "image": name.rpartition("/")[2]} for name in images[:3]] + [{"prompt": "5;66="}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = tiny_text.files_of_a_run(tmp_path, tiny.FAMILIES[family](), str(tmp_path / "prompts.jsonl"),
                                        train__micro_batch=8)
    assert build.kind(settings) == build.VISION_LM and build.process(build.VISION_LM) == "tokens"
    summary = run(settings)
    assert summary["max_first_log_ratio"] <= 1e-5
    tuned = texts.load(settings, settings.folder)
    asked = tuned.encode(PROMPTS[:2], images=images[:2])
    read = {"input_ids": asked.ids[1][None], "attention_mask": torch.ones_like(asked.ids[1][None])} | \
        {name: value[None] for name, value in asked.by_token[1].items()} | asked.images[1]
    base = AutoModelForImageTextToText.from_pretrained(settings.model).eval()
    with torch.no_grad():
        ours, before = tuned.model(**read).logits, base(**read).logits
        stock = PeftModel.from_pretrained(base, settings.folder)(**read).logits
    torch.testing.assert_close(stock, ours, rtol=0, atol=1e-6)
    assert (before - ours).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["qwen", "text"])
@torch.no_grad()
def test_all_weights_are_saved_with_what_reads_prompts(family, tmp_path, images):
    from flowgrpo.text.policies import engines as texts
    own = tiny_text.stir(made(family, rank=0))
    own.weights.save(tmp_path)
    asked, found = sampled(own, images=images)
    again = texts.load(Config(model="of another name", precision="fp32", text=own.text), tmp_path)
    read = again.encode(PROMPTS, images=images)
    assert [ids.tolist() for ids in read.ids] == [ids.tolist() for ids in asked.ids]
    torch.testing.assert_close(replayed(again, read, found).logp, found.logp, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_model_that_also_draws_images_still_does():
    """Janus: the token that begins an image is in its generation configuration."""
    own = tiny.policy("janus")
    asked = own.encode(PROMPTS[:2])
    begin = torch.full((2, 1), tiny.SPECIAL.index("<look>"))
    ids = torch.cat([torch.stack([row[:5] for row in asked.ids]), begin], 1)
    drawn = own.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_mode="image",
                               do_sample=False)
    assert drawn.shape == (2, 4) and own.model.decode_image_tokens(drawn).shape == (2, 8, 8, 3)


def test_models_that_cannot_be_read_or_sampled():
    model, processor = tiny.llava()
    refused("LlavaModel cannot be sampled: it is no GenerationMixin of transformers", VisionLM, model.model, processor,
            None, Text(max_tokens=6))
    def read(architecture, **more):
        return kinds.reads_images({"architectures": [architecture]} | more)
    assert read("LlavaForConditionalGeneration") and read("Qwen3VLForConditionalGeneration")
    assert read("Gemma3ForConditionalGeneration", vision_config={})
    assert not read("Qwen3ForCausalLM") and not read("Gemma3ForCausalLM") and not kinds.reads_images({})
    assert kinds.reads_images({"model_type": "llava", "vision_config": {}})
    assert isinstance(build.make_policy(tiny_text.config(), "cpu", tiny.llava()), VisionLM)
    assert type(build.make_policy(tiny_text.config(), "cpu", tiny_text.model())) is CausalLM

"""T2I-CompBench: phrases and boxes by tables worked by hand; BLIP and OWLv2 on tiny random ones, one at a time."""

import copy
import sys
import types

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.contrib.questions import t2i_compbench as t2i
from flowgrpo.contrib.questions.phrases import count_objects, find_relation, singular
from flowgrpo.data import sets
from flowgrpo.errors import UserError
from flowgrpo.rewards.geneval.detectors import Detection
from flowgrpo.rewards.preprocessing import DEVIATION, MEAN
from tests.helpers.tiny_blip import TINY_TEXT, TINY_VISION, word_tokenizer

IMAGES = (torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(5)) * 255).round() / 255

# --- phrases ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prompt, phrases, expected", [
    ("a sofa on the left of a frog", None, ("on the left of", "sofa", "frog")),
    ("a washing machine next to an owl.", None, ("next to", "washing machine", "owl")),
    ("a red dog", None, None),
    ("The red hat was on top of the brown coat rack.", ["The red hat", "top", "the brown coat rack"],
     ("on top of", "hat", "rack")),
    ("A cat, near it.", ["A cat"], None)])
def test_the_relation_of_a_prompt(prompt, phrases, expected):
    assert find_relation(prompt, phrases) == expected


def test_counted_objects_and_dimensions():
    phrases = ["three clocks", "Two teddy bears", "a bus", "eight knives", "the room", "two fish", "one couch",
               "four cherries", "six boxes", "five churches"]
    assert count_objects(phrases) == [("clock", 3), ("teddy bear", 2), ("bus", 1), ("knife", 8), ("fish", 2),
                                      ("couch", 1), ("cherry", 4), ("box", 6), ("church", 5)]
    assert [singular(name) for name in ("pies", "tomatoes", "women", "coat racks")] == [
        "pie", "tomato", "woman", "coat rack"]
    reward = t2i.T2ICompBench(dimension="numeracy", detector=detector)
    assert reward(IMAGES[:1], ["two dogs"], [{"noun_phrases": ["two dogs"]}]) == [0.5]
    assert t2i.T2ICompBench(dimension="numeracy", detector=detector, threshold=0.05)(
        IMAGES[:1], ["two dogs"], [{"noun_phrases": ["two dogs"]}]) == [1.0]


# --- boxes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("other, words, credit", [
    # The first box is (100, 100, 200, 200), the image has sides of 480.
    ((250, 110, 350, 210), "on the left of", 1), ((250, 110, 350, 210), "on the right of", 0),
    ((110, 250, 210, 350), "on the top of", 1), ((110, 250, 210, 350), "on the bottom of", 0),
    ((110, 250, 210, 350), "on top of", 1), ((110, 250, 210, 350), "on the left of", 0),  # 10 to the right, 150 down
    ((0, 100, 90, 200), "on the right of", 1), ((100, 0, 200, 90), "on the bottom of", 1),
    ((150, 100, 250, 200), "on the left of", 0.1 * 3),  # a third of both is shared
    ((300, 300, 400, 400), "next to", 150 / 200), ((340, 110, 440, 210), "near", 1),  # 200 off; 10 off on one axis
])
def test_places(other, words, credit):
    assert t2i.relation_score((100, 100, 200, 200), other, words, 480) == pytest.approx(credit)


def box(label: str, score: float, left: int, top: int = 0) -> Detection:
    return Detection((left, top, left + 100, top + 100), label, score)


@pytest.mark.parametrize("seen, score", [
    ([box("dog", 0.8, 0), box("cat", 0.6, 200)], 0.2 + 0.15 + 0.5),
    ([box("cat", 0.6, 0), box("dog", 0.8, 200)], 0), ([box("dog", 0.9, 0)], 0), ([], 0),
    ([box("dog", 0.9, 300), box("dog", 0.8, 0), box("cat", 0.6, 200)], 0),  # the surest dog counts
])
def test_two_objects_in_place(seen, score):
    assert t2i.in_place(seen, ["dog", "cat"], "on the left of", 480) == pytest.approx(score)


@pytest.mark.parametrize("seen, score", [
    ([box("dog", 0.9, 0), box("dog", 0.8, 150), box("cat", 0.9, 300)], 1),
    ([box("dog", 0.9, 0), box("dog", 0.8, 3), box("cat", 0.9, 300)], 0.75),  # one dog, seen twice
    ([box("dog", 0.9, 0), box("dog", 0.8, 150)], 0.5), ([box("cat", 0.9, 0), box("cat", 0.9, 150)], 0.25), ([], 0)])
def test_numbers(seen, score):
    assert t2i.in_number(seen, [("dog", 2), ("cat", 1)]) == score


# --- models ----------------------------------------------------------------------------------------------------------
def stirred(model):
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model.eval()


@pytest.fixture(scope="module")
def blip():
    from transformers import BlipConfig, BlipForQuestionAnswering
    wide = TINY_VISION["hidden_size"]  # the decoder attends to the encoder's states, as wide as the images' in BLIP
    text = TINY_TEXT | {"hidden_size": wide, "encoder_hidden_size": wide, "is_decoder": True}
    model = stirred(BlipForQuestionAnswering(BlipConfig(text_config=text | {"bos_token_id": 38},
                                                        vision_config=TINY_VISION)))
    return model, word_tokenizer("[CLS] $A [SEP]", ["[PAD]", "[CLS]", "[SEP]", "?"],
                                 ["yes", "no", "a", "red", "dog?", "cat?", "the", "big", "blue"])


def by_hand(model, tokenizer, picture: torch.Tensor, question: str) -> float:
    """P(yes) of one image by BLIP's own forward pass, without padding."""
    ids = torch.tensor([[39, *(tokenizer.convert_tokens_to_ids(word) for word in question.split()), 2]])
    mean, deviation = (torch.tensor(values)[:, None, None] for values in (MEAN, DEVIATION))
    with torch.no_grad():
        seen = model.vision_model(pixel_values=((picture - mean) / deviation)[None]).last_hidden_state
        states = model.text_encoder(input_ids=ids, attention_mask=torch.ones_like(ids), encoder_hidden_states=seen)[0]
        logits = model.text_decoder(input_ids=torch.tensor([[38]]), encoder_hidden_states=states).logits[0, 0]
    yes, no = (logits[tokenizer.convert_tokens_to_ids(word)].exp().item() for word in ("yes", "no"))
    return yes / (yes + no)


def test_attributes_are_the_product_over_phrases(blip):
    reward = t2i.T2ICompBench(dimension="color", device="cpu", batch_size=2, vqa={"parts": blip, "size": 16})
    phrases = [["a red dog", "the big cat"], [], ["a blue cat", "a dog", "the dog"]]
    metadata = [{"noun_phrases": some} for some in phrases]
    found = rewards.score({"it": reward}, IMAGES, ["any"] * 3, metadata)[:, 0].tolist()
    expected = [1.0, 1.0, 1.0]
    for row, some in enumerate(phrases):
        for phrase in some:
            expected[row] *= by_hand(*blip, IMAGES[row], f"{phrase}?")
    assert found == pytest.approx(expected, rel=1e-3) and expected[0] != pytest.approx(expected[2], rel=1e-2)
    assert t2i.plain('The "Red" dog?') == "the red dog?"


def test_blip_takes_whole_images_and_common_arguments(blip):
    wide = torch.nn.functional.interpolate(IMAGES, (24, 32))
    assert t2i.BlipVqa(parts=blip, size=32, device="cpu")(wide, ["a dog?"] * 3).shape == (3,)
    with rewards.lazily():
        reward = t2i.T2ICompBench(dtype="bf16", device="cpu:0", batch_size=3, vqa={"dtype": "fp32"},
                                  clip={"batch_size": 4})
    assert {name: (model.dtype, model.device, model.batch_size) for name, model in reward._models.items()} == {
        "vqa": ("fp32", "cpu:0", 3), "detector": ("bf16", "cpu:0", 3), "clip": ("bf16", "cpu:0", 4)}
    assert set(t2i.T2ICompBench(dimension="spatial", detector=detector)._models) == {"detector"}


@pytest.fixture(scope="module")
def owl():
    from transformers import Owlv2Config, Owlv2ForObjectDetection, Owlv2ImageProcessor, Owlv2Processor
    words = ["[PAD]", "a", "photo", "of", "dog", "cat", "zebra"]
    tokenizer = word_tokenizer("$A", ["[PAD]"], [*words[1:], "?"])
    tokenizer.model_max_length = 16
    config = Owlv2Config(
        text_config={"vocab_size": 12, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
                     "num_attention_heads": 2, "max_position_embeddings": 16, "eos_token_id": 6},
        vision_config={"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 16, "patch_size": 8}, projection_dim=16)
    model = stirred(Owlv2ForObjectDetection(config))
    processor = Owlv2Processor(Owlv2ImageProcessor(size={"height": 16, "width": 16}), tokenizer)
    return model, processor


def test_owl_detects_the_names_of_each_image(owl):
    model, processor = owl
    both, one, none = t2i.Owl(parts=owl, least=0.0, device="cpu")(IMAGES, [["dog", "cat", "dog"], ["cat"], []])
    assert len(both) == len(one) == 4 and none == []  # 2 by 2 patches
    assert {each.label for each in both} <= {"dog", "cat"} and {each.label for each in one} == {"cat"}
    assert [each.score for each in both] == sorted((each.score for each in both), reverse=True)
    inputs = processor(text=[["a photo of a cat"]], images=(IMAGES[1] * 255).round().byte(), return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[0, :, 0]
    assert [each.score for each in one] == pytest.approx(sorted(logits.sigmoid().tolist(), reverse=True), abs=1e-5)


def test_owl_takes_images_with_equally_many_names_at_once(owl):
    names = [["dog"], ["cat", "dog"], ["zebra"]]
    at_once, single = (t2i.Owl(parts=owl, least=0.0, device="cpu", batch_size=size)(IMAGES, names) for size in (8, 1))
    for some, others in zip(at_once, single, strict=True):
        assert [one.label for one in some] == [one.label for one in others] and len(some) == 4
        assert [value for one in some for value in (*one.box, one.score)] == pytest.approx(
            [value for one in others for value in (*one.box, one.score)], abs=1e-4)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_models_in_half_precision_are_near_fp32(blip, owl, dtype):
    def scores(kind: str) -> tuple[list[float], list[float]]:
        models = [copy.deepcopy(parts) for parts in (blip, owl)]
        vqa = t2i.BlipVqa(parts=models[0], size=16, device="cpu", dtype=kind)
        seen = t2i.Owl(parts=models[1], least=0.0, device="cpu", dtype=kind)(IMAGES, [["dog"]] * 3)
        return vqa(IMAGES, ["a dog?"] * 3).tolist(), [one.score for some in seen for one in some]
    for half, full in zip(scores(dtype), scores("fp32")):
        assert half == pytest.approx(full, abs=0.05) and half != full


# --- the reward ------------------------------------------------------------------------------------------------------
def detector(images: torch.Tensor) -> list[list[Detection]]:
    return [[box("person", 0.8, 0), box("dog", 0.6, 200), box("dog", 0.1, 400)] for _ in images]


class OnlyClip(torch.nn.Module):
    """CLIP whose cosine is a tenth of the words."""

    visual = types.SimpleNamespace(image_size=8)

    def encode_image(self, pictures, normalize):
        return torch.tensor([[1.0, 0.0]]).expand(len(pictures), -1)

    def encode_text(self, counts, normalize):
        return torch.stack([counts, (1 - counts ** 2) ** 0.5], 1)


def counts(texts: list[str]) -> torch.Tensor:
    return torch.tensor([min(len(text.split()) / 10, 1) for text in texts])


def whole(blip, **further) -> t2i.T2ICompBench:
    return t2i.T2ICompBench(detector=detector, device="cpu", vqa={"parts": blip, "size": 16},
                        clip={"parts": (OnlyClip(), counts)}, **further)


def sentence(monkeypatch, adjectives: tuple[str, ...]) -> None:
    """A stand-in for spaCy, which is not among the tests' packages."""
    def read(text):
        return [types.SimpleNamespace(text=word, pos_="ADJ" if word in adjectives else "X") for word in text.split()]
    monkeypatch.setitem(sys.modules, "spacy", types.SimpleNamespace(load=lambda name: read))


def test_each_prompt_is_judged_in_its_dimension(monkeypatch, blip):
    sentence(monkeypatch, ("big",))
    reward = whole(blip)
    prompts = ["a woman on the left of a dog", "one man and one dog", "a man reads", "a dog in front of a man",
               "The big woman is near the big dog.", "The big woman is near the big dog.", "The big dog eats."]
    phrases = [None, ["one man", "one dog"], None, None, ["the big woman", "the big dog"],
               ["the big woman", "the big dog"], []]
    kinds = ["spatial", "numeracy", "non_spatial", "3d_spatial", "complex", "complex", "complex"]
    metadata = [{"category": kind} | ({} if some is None else {"noun_phrases": some})
                for kind, some in zip(kinds, phrases)]
    metadata[5]["action"] = True
    images = IMAGES[:1].expand(7, -1, -1, -1)
    found = rewards.score({"it": reward}, images, prompts, metadata)[:, 0].tolist()
    asked = by_hand(*blip, IMAGES[0], "the big dog?") * by_hand(*blip, IMAGES[0], "the big woman?")
    place = 0.25 * 0.8 + 0.25 * 0.6 + 0.5  # boxes of 100 pixels on an image of 16: far apart on one axis alone
    assert found[:3] == pytest.approx([place, 1.0, 0.3]) and found[3] != found[3]
    assert found[4:] == pytest.approx([(asked + place) / 2, (asked + place + 0.6) / 3, (1 + 0.3) / 2], rel=1e-3)


def test_packaged_prompts_need_no_spacy(monkeypatch, blip):
    monkeypatch.setitem(sys.modules, "spacy", None)
    reward = whole(blip)
    set_ = sets.SETS["t2i_compbench"]
    kinds: dict[str, list] = {}
    for prompt in [*sets.load(set_.held_out), *sets.load(set_.train)]:
        kinds.setdefault(prompt.metadata["category"], []).append(prompt)
    for kind, prompts in kinds.items():
        some = prompts[:2] + [prompt for prompt in prompts if prompt.metadata.get("action")][:1]
        images = IMAGES[:1].expand(len(some), -1, -1, -1)
        found = reward(images, [prompt.text for prompt in some], [prompt.metadata for prompt in some])
        assert all(score is None for score in found) if kind == "3d_spatial" else all(
            0 <= score <= 2 for score in found)
        if kind == "spatial":
            assert all(find_relation(prompt.text) for prompt in prompts)
        if kind in ("color", "shape", "texture", "numeracy", "complex"):
            assert all(prompt.metadata["noun_phrases"] for prompt in prompts)
        if kind == "numeracy":
            assert sum(not count_objects(prompt.metadata["noun_phrases"]) for prompt in prompts) < 5


def test_weights_leave_between_scorings(blip, owl, tmp_path):
    for name, parts in (("blip", blip), ("owl", owl)):
        for part in parts:
            part.save_pretrained(tmp_path / name)
    with rewards.lazily():
        reward = t2i.T2ICompBench(device="cpu:0", detector=f"owl:{tmp_path}/owl", threshold=0.1,
                              vqa={"model": str(tmp_path / "blip"), "size": 16},
                              clip={"parts": (OnlyClip(), counts)})
    functions, scores = rewards.compose({"it": WatchRule()}, None, {"it": reward}, True), []
    metadata = [{"category": kind, "noun_phrases": ["a dog", "a cat"]} for kind in ("color", "numeracy", "shape")]
    networks = {name: reward._models[name].models[0] for name in ("vqa", "detector")}
    weights = {name: next(network.parameters()) for name, network in networks.items()}
    for _ in range(2):
        scores.append(rewards.score(functions, IMAGES, ["a dog and a cat"] * 3, metadata)[:, 0].tolist())
        here = [next(network.parameters()) is weights[name] for name, network in networks.items()]
        assert here == [len(scores) == 1] * 2  # copies stand for them from the second scoring on
        rewards.leave(functions.values())
        assert all(next(network.parameters()) is weights[name] for name, network in networks.items())
    assert scores[0] == scores[1] and 0 < min(scores[0])


def test_what_is_missing_is_told(monkeypatch, blip):
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(UserError, match="no spaCy model en_core_web_sm .*: pip install spacy && python -m spacy "
                                        "download en_core_web_sm; or give each prompt the metadata noun_phrases: "):
        t2i.T2ICompBench(detector=detector, dimension="numeracy")(IMAGES[:1], ["two dogs"], [{}])
    with pytest.raises(UserError, match="has noun_phrases 'dogs': expected a list of strings"):
        whole(blip)(IMAGES[:1], ["two dogs"], [{"category": "color", "noun_phrases": "dogs"}])
    with pytest.raises(UserError, match="dimension is 'colour', expected color, shape, texture, spatial"):
        rewards.find("t2i_compbench", {"dimension": "colour"})
    with pytest.raises(UserError, match=r"detector owl: /no/folder cannot be loaded .*\{detector: 'owl:FOLDER'\}"):
        t2i.T2ICompBench(detector="owl:/no/folder", dimension="spatial")

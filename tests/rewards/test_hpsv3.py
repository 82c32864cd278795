"""HPSv3 on a tiny random Qwen2-VL, loaded from files under the release's names: against one image at a time."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from flowgrpo.errors import UserError
from flowgrpo.rewards import qwen2_vl
from flowgrpo.rewards.find import find
from flowgrpo.rewards.preprocessing import DEVIATION, MEAN
from flowgrpo.rewards.qwen2_vl import HpsV3, rename_tensors

PROMPTS = ["a red cube", "two dogs", "a cat on a mat"]
TEXT = "rate the picture of {text_prompt} now : <|Reward|> end"
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
         "<|video_pad|>"]
CHAT = ("{% for message in messages %}<|im_start|> {{ message.role }} {% for part in message.content %}"
        "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %} {{ part.text }}{% endif %}"
        "{% endfor %}<|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant{% endif %}")


def pictures(height: int, width: int) -> torch.Tensor:
    levels = torch.randint(0, 256, (3, 3, height, width), generator=torch.Generator().manual_seed(height))
    return levels.float() / 255


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """A folder with the base model's configuration and processor, a checkpoint, and an instruction; and the tensors."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )
    folder = tmp_path_factory.mktemp("hps3")
    words = [*MARKS, "?", *sorted({word for text in (*PROMPTS, TEXT, "user assistant") for word in text.split()
                                   if not word.startswith("<")})]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=MARKS[0], unk_token="?")
    tokenizer.add_tokens(MARKS, special_tokens=True)
    Qwen2VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(),
                     chat_template=CHAT).save_pretrained(folder)
    config = Qwen2VLConfig(
        text_config={"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                     "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]}},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
        image_token_id=5, video_token_id=6, vision_start_token_id=3, vision_end_token_id=4)
    torch.manual_seed(17)
    model = Qwen2VLForConditionalGeneration(config).eval()
    model.resize_token_embeddings(len(words) + 1)  # one for <|Reward|>
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim > 1:
                value.normal_(0, 0.2)
    config.text_config.vocab_size = 90  # the base model's, not the checkpoint's
    config.save_pretrained(folder)
    old = {key.replace("model.visual.", "visual.").replace("model.language_model.", "model."): value.contiguous()
           for key, value in model.state_dict().items()}
    for layer, out, into in ((0, 1024, 32), (3, 16, 1024), (5, 2, 16)):
        old[f"rm_head.{layer}.weight"] = torch.randn(out, into) * into ** -0.5
        old[f"rm_head.{layer}.bias"] = torch.randn(out) * 0.1
    save_file(old, folder / "HPSv3.safetensors")
    (folder / "instruction.txt").write_text(TEXT)
    arguments = {"checkpoint": str(folder / "HPSv3.safetensors"), "model": str(folder), "dtype": "fp32",
                 "device": "cpu", "instruction": str(folder / "instruction.txt")}
    return arguments, old, words, model


def patches(picture: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Two frames of one image as Qwen2-VL's patches: 14 by 14, in blocks of two by two."""
    pil = Image.fromarray((picture * 255).round().byte().permute(1, 2, 0).numpy())
    x = (np.asarray(pil.resize((width, height), Image.BICUBIC)) / 255 - MEAN) / DEVIATION
    rows = []
    for top in range(0, height, 28):
        for left in range(0, width, 28):
            for dy, dx in ((0, 0), (0, 14), (14, 0), (14, 14)):
                patch = x[top + dy:top + dy + 14, left + dx:left + dx + 14].transpose(2, 0, 1)
                rows.append(np.stack([patch, patch], 1).ravel())
    return torch.tensor(np.stack(rows), dtype=torch.float32)


def expected(release, picture: torch.Tensor, prompt: str, height: int, width: int) -> float:
    """The score of one image: its tokens put between the words', positions that count up, the head in numpy."""
    _, old, words, model = release
    ids = {word: i for i, word in enumerate([*words, "<|Reward|>"])}
    before = ["<|im_start|>", "user", "<|vision_start|>"]
    asked = TEXT.replace("{text_prompt}", prompt).split()
    after = ["<|vision_end|>", *asked, "<|im_end|>", "<|im_start|>", "assistant"]
    table, body = old["model.embed_tokens.weight"], model.model
    with torch.no_grad():
        grid = torch.tensor([[1, height // 14, width // 14]])
        shown = body.visual(patches(picture, height, width), grid_thw=grid).pooler_output
        whole = torch.cat([table[[ids[word] for word in before]], shown, table[[ids[word] for word in after]]])
        hidden = body.language_model(inputs_embeds=whole[None]).last_hidden_state[0].double().numpy()
    value = hidden[len(before) + len(shown) + after.index("<|Reward|>")]
    for layer in (0, 3, 5):
        weight, bias = (old[f"rm_head.{layer}.{kind}"].double().numpy() for kind in ("weight", "bias"))
        value = weight @ value + bias
        value = np.maximum(value, 0) if layer < 5 else value
    return float(value[0])


@pytest.mark.parametrize("height, width, sides", [(448, 448, (448, 448)), (60, 90, (392, 560))])
def test_hps_v3_is_the_head_on_the_mark(release, height, width, sides):
    assert qwen2_vl.sides(height, width) == sides
    images, reward = pictures(height, width), HpsV3(**release[0], batch_size=2)
    values = [expected(release, image, prompt, *sides) for image, prompt in zip(images, PROMPTS)]
    assert reward(images, PROMPTS).tolist() == pytest.approx(values, abs=2e-3 * np.std(values) + 1e-5)
    assert np.std(values) > 1e-3


def test_marks_and_names_of_hps_v3(release):
    reward, image = HpsV3(**release[0]), pictures(56, 56)[:1]
    plain = reward(image, ["two dogs"])
    assert reward(image, ["two <|Reward|>dogs<|image_pad|>"]).tolist() == plain.tolist()
    value = torch.zeros(1)
    old = {"visual.a": value, "model.layers.0.b": value, "lm_head.weight": value, "rm_head.0.bias": value}
    new = {"model.visual.a": value, "model.language_model.layers.0.b": value, "lm_head.weight": value,
           "rm_head.0.bias": value}
    wanted = {"visual.a", "language_model.layers.0.b", "rm_head.0.bias"}
    assert set(rename_tensors(old)) == wanted and set(rename_tensors(new)) == wanted


def test_the_instruction_is_read_from_the_package_and_nothing_is_run(tmp_path, monkeypatch):
    source = tmp_path / "hpsv3" / "dataset"
    source.mkdir(parents=True)
    (tmp_path / "hpsv3" / "__init__.py").write_text("raise RuntimeError('nobody may run this')\n")
    (source / "data_collator_qwen.py").write_text(
        'import gone\nINSTRUCTION = """one {text_prompt}\n"""\nprompt_with_special_token = "two <|Reward|>"\n'
        "gone.run()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert qwen2_vl.hpsv3_instruction(None) == "one {text_prompt}\ntwo <|Reward|>"


def test_the_package_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(UserError, match="pip install --no-deps hpsv3, or give it as args: {instruction: FILE}"):
        qwen2_vl.hpsv3_instruction(None)


@pytest.mark.parametrize("change, told", [
    ({"dtype": "int8"}, "dtype is 'int8', expected fp32, bf16, fp16"),
    ({"checkpoint": "/no/HPSv3.safetensors"}, "/no/HPSv3.safetensors cannot be loaded .*: fetch it and give its path"),
    ({"model": "/no/folder"}, "/no/folder cannot be loaded .*: fetch it and give its folder"),
    ({"instruction": "/no/file.txt"}, "/no/file.txt cannot be loaded .*: give a text file")])
def test_mistakes_are_told_in_one_line(release, change, told):
    with pytest.raises(UserError, match=told) as error:
        find("hpsv3", {**release[0], **change})
    assert "\n" not in str(error.value) and "hpsv3" in str(error.value)


@pytest.mark.parametrize("text, told", [("rate {text_prompt}", "0 times <.Reward.>"), ("<|Reward|>", "0 times {text")])
def test_an_instruction_without_its_marks_is_refused(tmp_path, text, told):
    (tmp_path / "short.txt").write_text(text)
    with pytest.raises(UserError, match=told):
        qwen2_vl.hpsv3_instruction(str(tmp_path / "short.txt"))


def test_an_incomplete_checkpoint_is_refused(release, tmp_path):
    arguments, old, *_ = release
    save_file({key: value for key, value in old.items() if key != "model.norm.weight"}, tmp_path / "part.safetensors")
    with pytest.raises(UserError, match="part.safetensors cannot be loaded .*language_model.norm.weight"):
        HpsV3(**{**arguments, "checkpoint": str(tmp_path / "part.safetensors")})

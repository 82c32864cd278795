"""HPSv3, VideoReward and released texts on a tiny random Qwen2-VL, against one image or clip at a time."""

import json
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torchvision.transforms.functional import InterpolationMode, resize

from flowgrpo.cli import main
from flowgrpo.rewards import qwen2_vl, released_text
from flowgrpo.rewards.find import find
from flowgrpo.rewards.preprocessing import DEVIATION, MEAN
from flowgrpo.rewards.qwen2_vl import MARKS, PROMPT, HpsV3, VideoReward, frame_indices, instruction, message
from flowgrpo.rewards.released_text import TEXTS, Released, fetch, strings, texts
from tests.helpers.chat_endpoint import QUICK, endpoint, parts, said, shades
from tests.helpers.pickles import Command
from tests.helpers.refusals import refused
from tests.helpers.servers import running
from tests.helpers.tiny_blip import word_tokenizer

PROMPTS = ["a red cube", "two dogs", "a cat on a mat"]
TEXT = "rate the picture of {text_prompt} now : <|Reward|> end"
ASPECTS = "how does it look : <|VQ_reward|> and move : <|MQ_reward|> and match {text_prompt} : <|TA_reward|> end"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]
CHAT = ("{% for message in messages %}<|im_start|> {{ message.role }} {% for part in message.content %}"
        "{% if part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %} {{ part.text }}{% endif %}"
        "{% endfor %}<|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant{% endif %}")
CLIPS = (torch.rand(3, 5, 3, 40, 50, generator=torch.Generator().manual_seed(8)) * 255).round() / 255
LORA = {"lora_r": 2, "lora_alpha": 8}


def pictures(height: int, width: int) -> torch.Tensor:
    levels = torch.randint(0, 256, (3, 3, height, width), generator=torch.Generator().manual_seed(height))
    return levels.float() / 255


def saved_base(folder, text: str, chat: str, tokens: int, seed: int):
    """Write the base model's configuration and processor; return the words, and a model with further tokens."""
    from transformers import (
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )
    words = [*SPECIAL, "?", *sorted({word for line in (*PROMPTS, text, "user assistant") for word in line.split()
                                     if not word.startswith("<")})]
    tokenizer = word_tokenizer("$A", words, [])
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    Qwen2VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(),
                     chat_template=chat).save_pretrained(folder)
    config = Qwen2VLConfig(
        text_config={"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                     "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]}},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
        image_token_id=5, video_token_id=6, vision_start_token_id=3, vision_end_token_id=4)
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration(config).eval()
    model.resize_token_embeddings(len(words) + tokens)
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim > 1:
                value.normal_(0, 0.2)
    config.text_config.vocab_size = 90  # the base model's, not the checkpoint's
    config.save_pretrained(folder)
    return words, model


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """A folder with the base model's configuration and processor, a checkpoint, and an instruction; and the tensors."""
    folder = tmp_path_factory.mktemp("hps3")
    words, model = saved_base(folder, TEXT, CHAT.replace("video", "image"), 1, 17)
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


def as_released(model, head: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors as PEFT saves them: every weight of the language model's layers without what its LoRA adds."""
    state, made = {"base_model.model.rm_head.weight": head}, torch.Generator().manual_seed(3)
    for key, value in model.state_dict().items():
        key = key.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
        if "_proj.weight" in key and "layers" in key:
            down, up = torch.randn(2, value.shape[1], generator=made), torch.randn(value.shape[0], 2, generator=made)
            part = "base_model.model." + key.removesuffix(".weight")
            state |= {f"{part}.base_layer.weight": value - 4 * up @ down, f"{part}.lora_A.default.weight": down,
                      f"{part}.lora_B.default.weight": up}
        elif "_proj.bias" in key and "layers" in key:
            state["base_model.model." + key.replace(".bias", ".base_layer.bias")] = value
        else:
            state[f"base_model.model.{key}"] = value
    return {key: value.clone().contiguous() for key, value in state.items()}


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videoalign")
    words, model = saved_base(folder / "base", ASPECTS.replace("{text_prompt}", ""), CHAT, 3, 18)
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    (folder / "checkpoint-12").mkdir()
    torch.save(as_released(model, head), folder / "checkpoint-12" / "model.pth")
    (folder / "model_config.json").write_text(json.dumps({
        "peft_lora_config": LORA, "inference_config": {"TA_mean": 0.5, "TA_std": 2.0}}))
    (folder / "prompt_template.py").write_text(
        f'import gone\nOTHER = "x"\nDETAILED_PROMPT_WITH_SPECIAL_TOKEN = """{ASPECTS}"""\ngone.run()\n')
    arguments = {"model": str(folder), "base": str(folder / "base"), "dtype": "fp32", "device": "cpu",
                 "instruction": str(folder / "prompt_template.py"), "fps": 2}
    return arguments, words, model, head


def rows_of(frames: list[np.ndarray]) -> torch.Tensor:
    """Pairs of frames [height, width, 3] as Qwen2-VL's patches: 14 by 14, in blocks of two by two."""
    height, width, _ = frames[0].shape
    rows = []
    for pair in zip(frames[::2], frames[1::2]):
        for top in range(0, height, 28):
            for left in range(0, width, 28):
                for dy, dx in ((0, 0), (0, 14), (14, 0), (14, 14)):
                    area = np.s_[top + dy:top + dy + 14, left + dx:left + dx + 14]
                    rows.append(np.stack([frame[area].transpose(2, 0, 1) for frame in pair], 1).ravel())
    return torch.tensor(np.stack(rows), dtype=torch.float32)


def patches(picture: torch.Tensor, height: int, width: int) -> torch.Tensor:
    pil = Image.fromarray((picture * 255).round().byte().permute(1, 2, 0).numpy())
    return rows_of([(np.asarray(pil.resize((width, height), Image.BICUBIC)) / 255 - MEAN) / DEVIATION] * 2)


def clip_patches(frames: list[torch.Tensor], height: int, width: int) -> torch.Tensor:
    scaled = [resize((frame * 255).round().byte(), [height, width], InterpolationMode.BICUBIC, antialias=True)
              for frame in frames]
    return rows_of([(each.permute(1, 2, 0).numpy() / 255 - MEAN) / DEVIATION for each in scaled])


def read_alone(model, table, words: list[str], asked: str, rows: torch.Tensor, *grid: int) -> dict[str, torch.Tensor]:
    """The last state of every word behind what is shown: tokens put between the words', positions that count up."""
    ids = {word: i for i, word in enumerate(words)}
    before = ["<|im_start|>", "user", "<|vision_start|>"]
    after = ["<|vision_end|>", *asked.split(), "<|im_end|>", "<|im_start|>", "assistant"]
    with torch.no_grad():
        shown = model.model.visual(rows, grid_thw=torch.tensor([grid])).pooler_output
        whole = torch.cat([table[[ids[word] for word in before]], shown, table[[ids[word] for word in after]]])
        hidden = model.model.language_model(inputs_embeds=whole[None]).last_hidden_state[0]
    return dict(zip(after, hidden[len(before) + len(shown):]))


def expected(release, picture: torch.Tensor, prompt: str, height: int, width: int) -> float:
    """The score of one image, the head in numpy."""
    _, old, words, model = release
    value = read_alone(model, old["model.embed_tokens.weight"], [*words, "<|Reward|>"],
                       TEXT.replace("{text_prompt}", prompt), patches(picture, height, width),
                       1, height // 14, width // 14)["<|Reward|>"].double().numpy()
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
    for names in (old, new):
        assert set(qwen2_vl.rename_tensors(names, qwen2_vl.NAMES)) == wanted


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
    refused("pip install --no-deps hpsv3, or give it as args: {instruction: FILE}", qwen2_vl.hpsv3_instruction, None)


def three_expected(videos, clip: torch.Tensor, prompt: str) -> list[float]:
    """The three scores of one clip."""
    _, words, model, head = videos
    states = read_alone(model, model.get_input_embeddings().weight, [*words, *MARKS],
                        ASPECTS.replace("{text_prompt}", prompt),
                        clip_patches([clip[i] for i in (0, 1, 3, 4)], 308, 364), 2, 308 // 14, 364 // 14)
    raw = [(states[mark] @ head[0]).item() for mark in MARKS]
    return [(raw[0] - 3.6757) / 2.2476, (raw[1] - 1.1646) / 1.3811, (raw[2] - 0.5) / 2.0]


@pytest.mark.fast
def test_scores_of_the_marks_in_either_precision(videos):
    assert frame_indices(5, 2) == [0, 1, 3, 4]
    values = torch.tensor([three_expected(videos, clip, prompt) for clip, prompt in zip(CLIPS, PROMPTS)])
    assert values.std(0).min() > 1e-3
    for axes, wanted in (({"VQ": 1.0}, values[:, 0]), ({"MQ": 2.0, "TA": 0.5}, 2 * values[:, 1] + values[:, 2] / 2)):
        reward = find("videoalign", {**videos[0], "axes": axes})
        assert reward(CLIPS, PROMPTS).tolist() == pytest.approx(wanted.tolist(), abs=2e-3)
    marked = find("videoalign", videos[0])(CLIPS[1:2], ["two <|VQ_reward|>dogs<|video_pad|>"])
    assert marked.tolist() == pytest.approx([values[1].sum().item()], abs=5e-3)
    half, full = (find("videoalign", {**videos[0], "dtype": dtype, "batch_size": 2}) for dtype in ("bf16", "fp32"))
    model, head, *_ = half.models
    assert model.dtype == torch.bfloat16 and head[0].weight.dtype == torch.float32
    assert {buffer.dtype for name, buffer in model.named_buffers() if "inv_freq" in name} == {torch.float32}
    assert half(CLIPS, PROMPTS).tolist() == pytest.approx(full(CLIPS, PROMPTS).tolist(), abs=0.5)
    reward = find("videoalign", videos[0])
    clip = CLIPS[:1].round()  # black and white: every edge overshoots
    shown = clip_patches([clip[0, i] for i in (0, 1, 3, 4)], 308, 364)
    torch.testing.assert_close(reward._patches(clip).pixel_values_videos, shown, atol=1e-5, rtol=0)


@pytest.mark.parametrize("count, fps, frames", [
    (81, 16, [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]),  # 10.1 frames at 2 a second
    (16, 16, [0, 5, 10, 15]), (3, 16, [0, 2]), (2, 30, [0, 1])])
def test_two_frames_a_second_are_seen_and_at_least_four(count, fps, frames):
    assert frame_indices(count, fps) == frames


def test_lora_is_added_to_the_weights():
    state = {"base_model.model.a.base_layer.weight": torch.zeros(2, 2),
             "base_model.model.a.base_layer.bias": torch.ones(2),
             "base_model.model.a.lora_A.default.weight": torch.tensor([[1.0, 2.0]]),
             "base_model.model.a.lora_B.default.weight": torch.tensor([[1.0], [3.0]]), "b.weight": torch.ones(1)}
    plain = qwen2_vl.merge_lora(state, {"lora_r": 1, "lora_alpha": 2})
    assert plain["a.weight"].tolist() == [[2, 4], [6, 12]] and set(plain) == {"a.weight", "a.bias", "b.weight"}
    rank_stable = qwen2_vl.merge_lora(state, {"lora_r": 4, "lora_alpha": 2, "use_rslora": True})
    assert rank_stable["a.weight"].tolist() == [[1, 2], [3, 6]]


def test_weights_run_nothing_and_safetensors_come_first(videos, tmp_path):
    arguments, _, model, head = videos
    for folder in ("checkpoint-1", "checkpoint-2"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model_config.json").write_text(json.dumps({"peft_lora_config": LORA}))
    torch.save({"a": Command(f"touch {tmp_path}/ran")}, tmp_path / "checkpoint-2" / "model.pth")
    refused("checkpoint-2/model.pth cannot be loaded", find, "videoalign", {**arguments, "model": str(tmp_path)})
    assert not (tmp_path / "ran").exists()
    save_file(as_released(model, head), tmp_path / "checkpoint-1" / "model.safetensors")
    assert find("videoalign", {**arguments, "model": str(tmp_path)}).parts[-1]["TA_mean"] == 2.8105


@pytest.mark.parametrize("name, change, told", [
    ("hpsv3", {"checkpoint": "/no/HPSv3.st"}, "/no/HPSv3.st cannot be loaded .*: fetch it and give its path"),
    ("hpsv3", {"model": "/no/folder"}, "/no/folder cannot be loaded .*: fetch it and give its folder"),
    ("hpsv3", {"instruction": "/no/file.txt"}, "/no/file.txt cannot be loaded .*: give a text file"),
    ("videoalign", {"axes": {"XQ": 1}}, "expected weights of VQ, MQ, TA"),
    ("videoalign", {"fps": 0}, "a number above 0"),
    ("videoalign", {"instruction": "/no/file.txt"}, "/no/file.txt cannot be loaded .*: give prompt_template.py"),
    ("videoalign", {"model": "/no/folder"}, "/no/folder cannot be loaded .*: give the folder of KwaiVGI/VideoReward"),
    ("videoalign", {"base": "/no/base"}, "/no/base cannot be loaded .*: fetch it and give .* as args: {base: FOLDER}")])
def test_mistakes_are_told_in_one_line(release, videos, name, change, told):
    refused(f"(?=.*{name}).*{told}", find, name, (release if name == "hpsv3" else videos)[0] | change)


@pytest.mark.parametrize("read, text, told", [
    (qwen2_vl.hpsv3_instruction, "rate {text_prompt}", "0 times <.Reward.>"),
    (qwen2_vl.hpsv3_instruction, "<|Reward|>", "0 times {text"),
    *((instruction, text, "has not {text_prompt} and <.VQ_reward.>, .* once each, in this order") for text in (
        "{text_prompt}", " ".join(MARKS), " ".join([*MARKS[::-1], "{text_prompt}"])))])
def test_an_instruction_without_its_marks_is_refused(tmp_path, read, text, told):
    (tmp_path / "short.txt").write_text(text)
    refused(told, read, str(tmp_path / "short.txt"))


def test_an_incomplete_checkpoint_is_refused(release, tmp_path):
    arguments, old, *_ = release
    save_file({key: value for key, value in old.items() if key != "model.norm.weight"}, tmp_path / "part.safetensors")
    refused("part.safetensors cannot be loaded .*language_model.norm.weight", HpsV3,
            **arguments | {"checkpoint": str(tmp_path / "part.safetensors")})


# Of the strings in the released files at the commits of TEXTS, computed once from clones of both repositories.
SHA256 = {
    ("videoalign", "video"): "fdb6309bac618dd0c8b1b589d3a0970a974f7856eecbb355a190b2dce54af700",
    ("unified_reward", "image"): "f56f919ce3bc6aab3c173a5f836defe195e17e9614753e8b4c3dc2405bd4975b",
    ("unified_reward", "video"): "514a6343388979f80886656c5cb7d05f2286f2c837f5d1e1435ae0daf00ece68",
    ("unified_reward_pairs", "image"): "0fd2f5c43a06516503fde3e64ffc98fff6f3a8815b5eac8dc5f0d81cee686614",
    ("unified_reward_pairs", "video"): "c76ba521846dcdd36e30046c8ceac18840cb6b0ad5f5a7bc731102b2267f2db9"}
# Stand-ins of the same form: line ends and blanks at both ends, an f-string with a caption, quotes and braces.
INSTRUCTION = f"\nRate it. \n\n**Quality:**  \nsay {MARKS[0]}\nsay {MARKS[1]}\n- {PROMPT}\nsay {MARKS[2]}\nEND\n"
QUESTION = "Is it 'good'?\n1. Fit\nEnd with 'Final Score:'.\nText Caption: [{prompt}]"
PAIR = "Which is better?\nSay 'Image 1 is better.'\nText Caption: [{prompt}]\n"


@pytest.fixture
def released(tmp_path, monkeypatch):
    """A clone of a repository with a source of each form, and TEXTS of it; an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "clone"
    folder.mkdir()
    (folder / "instruction.py").write_text(f'import gone\nOTHER = "x"\nTEXT = """{INSTRUCTION}"""\ngone.run()\n')
    (folder / "question.py").write_text(
        "prompt = ''\nraise SystemExit\nask([{'text': f'Is it \\'good\\'?\\n1. Fit\\nEnd with \\'Final Score:\\'.\\n"
        "Text Caption: [{prompt}]'}])\n")
    (folder / "pair.py").write_text('ask((f"Which is better?\\n"\n     "Say \'Image 1 is better.\'\\n"\n'
                                    '     f"Text Caption: [{prompt}]\\n"))\n')
    def of(name, text):
        return Released("owner/name", "0" * 40, f"{name}.py", sha256(text.encode()).hexdigest())
    monkeypatch.setattr(released_text, "TEXTS", {
        "videoalign": {"video": of("instruction", INSTRUCTION)},
        "unified_reward": {"image": of("question", QUESTION), "video": of("pair", PAIR)},
        "unified_reward_pairs": {"image": of("pair", PAIR), "video": of("question", QUESTION)}})
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_texts_are_those_of_the_released_sources():
    assert {(reward, kind): text.sha256 for reward, of in TEXTS.items() for kind, text in of.items()} == SHA256
    for of in TEXTS.values():
        for text in of.values():
            assert text.licence == "MIT" and len(text.commit) == 40
            assert text.url == f"https://raw.githubusercontent.com/{text.repository}/{text.commit}/{text.path}"
    assert list(strings("gone.run()\nx = 'a' 'b'\ny = f'{x} c {d.e}'")) == ["ab", "{x} c {d.e}", " c "]
    assert list(strings("no python (")) == []


@pytest.mark.parametrize("way", ["folder", "network"])
def test_a_text_is_fetched_word_for_word(released, monkeypatch, capsys, way):
    if way == "folder":
        assert main(["reward", "fetch", "unified_reward", "--source", str(released)]) == 0
        assert "owner/name/question.py at 0000000000 (MIT): " in capsys.readouterr().out
    else:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(released)))
        with running(server):
            address = f"http://127.0.0.1:{server.server_port}/"
            monkeypatch.setattr(Released, "url", property(lambda text: address + text.path))
            fetch("unified_reward")
    assert texts("unified_reward", "template") == {"image": QUESTION, "video": PAIR}


@pytest.mark.parametrize("reward, arguments, option", [
    ("unified_reward", {"url": "http://127.0.0.1:9/v1"}, "template"),
    ("unified_reward_pairs", {"url": "http://127.0.0.1:9/v1"}, "template"), ("videoalign", {}, "instruction")])
def test_a_reward_without_its_text_names_the_command(released, reward, arguments, option):
    refused(f"`flowgrpo reward fetch {reward}`.*{{{option}: FILE.txt}}", find, reward, arguments)


def test_another_text_is_refused(released):
    fetch("videoalign", released)
    [file] = [text.file for text in released_text.TEXTS["videoalign"].values()]
    file.write_text(INSTRUCTION.replace("Rate", "Judge"))
    refused("which are not on this machine", texts, "videoalign", "instruction")
    (released / "instruction.py").write_text(f'TEXT = """{INSTRUCTION} """\n')
    refused("has no string of SHA-256 .* at commit 0000000000: check that one out", fetch, "videoalign", released)
    (released / "instruction.py").unlink()
    refused("cannot be read .* give the folder by --source", fetch, "videoalign", released)
    refused("no text belongs to the reward 'videoalgn': did you mean 'videoalign'", fetch, "videoalgn", released)


def test_unified_reward_asks_the_released_question_alone(released):
    fetch("unified_reward", released)
    with endpoint([said("cat (object): 1\nhat (object): 0\nFinal Score: 3.5"), said("Final Score: 7"),
                   said("visual quality: 4\nfactual consistency: 2\nFinal Score: 7")]) as server:
        reward = find("unified_reward", {"url": server.url, "concurrency": 1, **QUICK})
        first, second = reward(shades(1, 2), ["a {cat}"] * 2)
        assert first == 3.5 and not isinstance(second, float)  # an image's marks end at 5
        assert reward(torch.zeros(1, 4, 3, 8, 8), ["a cat"]) == [7]
    image, _, video = [seen[2]["messages"] for seen in server.seen]
    assert [part["type"] for part in image[0]["content"]] == ["image_url", "text"]
    assert image[0]["content"][-1]["text"] == QUESTION.replace("{prompt}", "a {cat}")
    assert [part["type"] for part in video[0]["content"]] == [*["image_url"] * 4, "text"]
    assert video[0]["content"][-1]["text"] == PAIR.replace("{prompt}", "a cat")
    assert len(image) == len(video) == 1 and image[0]["role"] == "user"
    with endpoint([said("Final Score: 3.5")]) as server:  # divided, as Flow-GRPO does
        assert find("unified_reward", {"url": server.url, "scale": [0, 5], **QUICK})(shades(1), ["a cat"]) == [0.7]


def test_unified_reward_pairs_show_images_without_labels(released):
    fetch("unified_reward_pairs", released)
    with endpoint(lambda body, number: said("Image 2 is better.")) as server:
        reward = find("unified_reward_pairs", {"url": server.url, "concurrency": 1, **QUICK})
        assert reward(shades(1), shades(2), ["a cat"]) == [0]
        reward(torch.zeros(1, 2, 3, 8, 8), torch.ones(1, 2, 3, 8, 8), ["a dog"])
        own = find("unified_reward_pairs", {"url": server.url, "template": "Which fits {prompt}?", **QUICK})
        own(shades(1), shades(2), ["a cat"])
    image, video, labelled = [seen[2] for seen in server.seen]
    assert [part["type"] for part in image["messages"][0]["content"]] == ["image_url", "image_url", "text"]
    assert parts(image, "text") == [PAIR.replace("{prompt}", "a cat")]
    assert parts(video, "text") == ["Video 1:", "Video 2:", QUESTION.replace("{prompt}", "a dog")]
    assert parts(labelled, "text") == ["Image 1:", "Image 2:", "Which fits a cat?"]


def test_videoalign_reads_the_whole_instruction_in_the_chat_template(released):
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor
    fetch("videoalign", released)
    tokenizer = word_tokenizer("$A", ["?"], [])
    tokenizer.add_tokens([*SPECIAL, *MARKS], special_tokens=True)
    processor = Qwen2VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), chat_template=CHAT)
    reward = VideoReward(device="cpu", parts=(torch.nn.Identity(), torch.nn.Identity(), processor, {}))
    seen = message(processor, "video", reward.text, "a <|VQ_reward|>cat", 3)
    assert seen == ("<|im_start|> user <|vision_start|>" + "<|video_pad|>" * 3 + "<|vision_end|> "
                    + INSTRUCTION.replace(PROMPT, "a cat") + "<|im_end|> <|im_start|> assistant")
    assert json.dumps(seen).count("_reward|>") == 3

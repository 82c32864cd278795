"""Released texts: fetched by their SHA-256 from sources that are not run, and asked word for word."""

import json
import threading
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from flowgrpo.cli import main
from flowgrpo.errors import UserError
from flowgrpo.rewards import find, released_text
from flowgrpo.rewards.qwen2_vl import MARKS, PROMPT, VideoReward, message
from flowgrpo.rewards.released_text import TEXTS, Released, fetch, strings, texts
from tests.rewards.test_qwen2_vl import CHAT, SPECIAL
from tests.rewards.vlm_judge.test_judge import QUICK, endpoint, parts, said, shades

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


@contextmanager
def served(folder):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


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
        with served(released) as address:
            monkeypatch.setattr(Released, "url", property(lambda text: address + text.path))
            fetch("unified_reward")
    assert texts("unified_reward", "template") == {"image": QUESTION, "video": PAIR}


@pytest.mark.parametrize("reward, arguments, option", [
    ("unified_reward", {"url": "http://127.0.0.1:9/v1"}, "template"),
    ("unified_reward_pairs", {"url": "http://127.0.0.1:9/v1"}, "template"), ("videoalign", {}, "instruction")])
def test_a_reward_without_its_text_names_the_command(released, reward, arguments, option):
    with pytest.raises(UserError) as told:
        find(reward, arguments)
    assert f"`flowgrpo reward fetch {reward}`" in str(told.value) and "\n" not in str(told.value)
    assert f"{{{option}: FILE.txt}}" in str(told.value)


def test_another_text_is_refused(released):
    fetch("videoalign", released)
    [file] = [text.file for text in released_text.TEXTS["videoalign"].values()]
    file.write_text(INSTRUCTION.replace("Rate", "Judge"))
    with pytest.raises(UserError, match="which are not on this machine"):
        texts("videoalign", "instruction")
    (released / "instruction.py").write_text(f'TEXT = """{INSTRUCTION} """\n')
    with pytest.raises(UserError, match="has no string of SHA-256 .* at commit 0000000000: check that one out"):
        fetch("videoalign", released)
    (released / "instruction.py").unlink()
    with pytest.raises(UserError, match="cannot be read .* give the folder by --source"):
        fetch("videoalign", released)
    with pytest.raises(UserError, match="no text belongs to the reward 'videoalgn': did you mean 'videoalign'"):
        fetch("videoalgn", released)


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


def test_unified_reward_is_divided_as_flow_grpo_does(released):
    fetch("unified_reward", released)
    with endpoint([said("Final Score: 3.5")]) as server:
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
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor
    fetch("videoalign", released)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"?": 0}, unk_token="?")))
    tokenizer.add_tokens([*SPECIAL, *MARKS], special_tokens=True)
    processor = Qwen2VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), chat_template=CHAT)
    reward = VideoReward(device="cpu", parts=(torch.nn.Identity(), torch.nn.Identity(), processor, {}))
    seen = message(processor, "video", reward.text, "a <|VQ_reward|>cat", 3)
    assert seen == ("<|im_start|> user <|vision_start|>" + "<|video_pad|>" * 3 + "<|vision_end|> "
                    + INSTRUCTION.replace(PROMPT, "a cat") + "<|im_end|> <|im_start|> assistant")
    assert json.dumps(seen).count("_reward|>") == 3

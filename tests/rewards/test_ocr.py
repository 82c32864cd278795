"""Text in images: what is asked for, the three scores by hand, and PP-OCRv6 reading images that are drawn here."""

import random
from functools import lru_cache

import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from torchvision.transforms.functional import to_tensor

from flowgrpo import rewards
from flowgrpo.rewards import ocr
from flowgrpo.rewards.preprocessing import eight_bit
from tests.helpers.refusals import refused


def drawn(*lines: str, size: int = 256, height: int = 34) -> torch.Tensor:
    picture = Image.new("RGB", (size, size), "white")
    pen = ImageDraw.Draw(picture)
    for place, line in enumerate(lines):
        pen.text((16, 30 + 1.6 * height * place), line, fill="black", font=ImageFont.load_default(height))
    return to_tensor(picture)


# --- what is asked for -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prompt, metadata, text", [
    ('A sign that says "Open 24 Hours" at night', {}, ["Open 24 Hours"]),
    ('Two signs, "first" and "second"', {}, ["first"]),
    ('A sign that says "Open"', {"text": "Closed"}, ["Closed"]),
    ("Two signs", {"text": ["OPEN", "CLOSED", " ", 7]}, ["OPEN", "CLOSED", "7"]),
    ("A bus with a number", {"text": 42}, ["42"]),
    ("A sign that says nothing", {}, []),
    ('An empty "  " sign', {}, []),
    ("A sign", {"text": " "}, []),
    ('A sign, "Open"', {"text": []}, []),
    ("It's a dog's life, isn't it", {}, []),
    ("the dogs' bowl and the cats' bed", {}, []),
    ("rock 'n' roll in a '90s car, 'Tis the dogs' show", {}, []),
    ('A 12" pizza with "YUM" beside a 14" one', {}, ["YUM"]),
    ("'DON'T PANIC' on a book", {}, ["DON'T PANIC"]),
    ("the artist's sign says ‘Don’t’", {}, ["Don’t"]),
    ("the dog's sign “it's 'open'”", {}, ["it's 'open'"])])
def test_the_texts_that_are_asked_for(prompt, metadata, text):
    assert list(ocr.target_text(prompt, metadata)) == text


@pytest.mark.parametrize("prompt", [prompt for line in """
    a sign “OPEN” here; a sign ＂OPEN＂ here; a sign 'OPEN' here; a sign ‘OPEN’ here; a sign `OPEN` here
    ein Schild „OPEN“ am Tor; ein Schild ‚OPEN‘; ein Schild »OPEN«; une enseigne «OPEN» ici; une enseigne ‹OPEN›
    вывеска «OPEN»; знак „OPEN“; szyld „OPEN” w nocy; en skylt ”OPEN” här; en skylt ’OPEN’; et »OPEN« skilt
    写着“OPEN”的牌子; 写着'OPEN'的牌子; 写着‘OPEN’的牌子; 一本名为《OPEN》的书; שלט ״OPEN״ כאן; لافتة «OPEN» هنا
    「OPEN」と書かれた看板; 『OPEN』の看板; ｢OPEN｣の看板; 〝OPEN〟の看板; ﹁OPEN﹂
    〈OPEN〉라는 책; 간판에 'OPEN'이라고; 간판에 “OPEN”이라고
""".strip().splitlines() for prompt in line.split(";")])
def test_every_languages_quotation_marks_are_seen(prompt):
    assert ocr.target_text(prompt, {}) == ("OPEN",)


def test_a_text_that_is_none_is_told():
    for text in ({"a": 1}, True, [["OPEN"]], ["OPEN", None]):
        refused("^reward 'ocr': a prompt's text is .*, expected a text or a list of them$", ocr.target_text, "a sign",
                {"text": text})


@pytest.mark.parametrize("form, same", [
    ("ＯＰＥＮ　２４！", "open 24!"), ("ﾃｽﾄ", "テスト"), ("Straße", "STRASSE"),
    ("cafe\u0301", "CAFÉ"), ("ﬁne…", "FINE..."),
    ("“It’s” ‚ok‘", "\"it's\" 'ok'"), ("«oui» „ja“ 「はい」", '"oui""ja""はい"'),
    ("1990–95 — 5−3 a‑b", "1990-95-5-3a-b"), ("５〜６", "5～6"), ("a\u200bb\u00adc", "abc")])
def test_forms_of_a_character_do_not_count(form, same):
    assert ocr.plain(form) == ocr.plain(same) and ocr.edit(form, same) == ocr.exact(same, form) == 1


def test_marks_edits_and_other_scores():
    """Those of Unicode's property Quotation_Mark, and of the category Pd those that look like a dash."""
    marks = [0x22, 0x27, 0xab, 0xbb, *range(0x2018, 0x2020), 0x2039, 0x203a, 0x2e42, *range(0x300c, 0x3010),
             *range(0x301d, 0x3020), *range(0xfe41, 0xfe45), 0xff02, 0xff07, 0xff62, 0xff63]
    assert {ocr.plain(chr(mark)) for mark in marks} == {'"', "'"}
    dashes = [*range(0x2010, 0x2016), 0x2e3a, 0x2e3b, 0xfe31, 0xfe32, 0xfe58, 0xfe63, 0xff0d]
    assert {ocr.plain(chr(dash)) for dash in dashes} == {"-"}
    assert ocr.plain("ー") == "ー"  # a vowel's length, no dash
    rng = random.Random(0)
    for _ in range(200):
        found, wanted = ("".join(rng.choices("abc", k=rng.randint(0, 7))) for _ in range(2))
        assert ocr.edits(found, wanted) == ocr.edits(wanted, found) == by_definition(found, wanted)
        parts = {found[i:j] for i in range(len(found) + 1) for j in range(i, len(found) + 1)}
        assert ocr.edits(found, wanted, anywhere=True) == min(by_definition(part, wanted) for part in parts)


# --- the scores ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("found, wanted, edit, exact, partial", [
    ("Hello World", "hello world", 1, 1, 1),
    ("H e l l o", "Hello", 1, 1, 1),
    ("", "abcd", 0, 0, 0),
    ("abxd", "abcd", 0.75, 0, 0.75),  # one substitution
    ("abd", "abcd", 0.75, 0, 0.75),  # one letter is missing
    ("abccd", "abcd", 0.75, 0, 0.75),  # one too many: inside, so the nearest part has it too
    ("the abcd sign", "abcd", 1, 0, 1),  # contained
    ("the abxd sign", "abcd", 0, 0, 0.75),  # 8 edits to the whole, 1 to its part
    ("zzzzzzzzzz", "abcd", 0, 0, 0),  # never below 0
    ("open hours 24", "open 24 hours", 1 - 4 / 11, 0, 1 - 2 / 11),  # openhours24: 24 in and out again; only in
    # Of several texts.
    ("CLOSED open", ["Open", "Closed"], 1, 1, 1),  # in any order
    ("CLOSED and open", ["Open", "Closed"], 1, 0, 1),
    ("open", ["Open", "Closed"], 0.4, 0, 1 - 4 / 10),  # of ten letters six are missing; the nearest part, pe, has two
    ("CLOSED opem", ["Open", "Closed"], 0.9, 0, 0.9),
    ("open", ["Open", "open"], 0.5, 0, 1),  # once for two
    ("", ["Open", "Closed"], 0, 0, 0)])
def test_the_scores(found, wanted, edit, exact, partial):
    wanted = [wanted] if isinstance(wanted, str) else wanted
    assert ocr.edit(found, *wanted) == pytest.approx(edit, abs=1e-12)
    assert ocr.exact(found, *wanted) == exact
    assert ocr.partial(found, *wanted) == pytest.approx(partial, abs=1e-12)


def by_definition(found: str, wanted: str) -> int:
    """The edit distance as the recursion that defines it."""
    @lru_cache(maxsize=None)
    def distance(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1,
                   distance(i - 1, j - 1) + (found[i - 1] != wanted[j - 1]))
    return distance(len(found), len(wanted))


# --- reading ---------------------------------------------------------------------------------------------------------
def scores(score: str, images: list[torch.Tensor], prompts: list[str], *metadata: dict) -> list[float | None]:
    made = rewards.find("ocr", {"score": score})
    return rewards.score({"ocr": made}, torch.stack(images), prompts, metadata or [{}] * len(prompts))[:, 0].tolist()


def test_images_are_read():
    images = [drawn("HELLO WORLD"), drawn("Open 24", "Hours"), drawn("HELLO WORLD"), drawn(), drawn("HELLO WORLD")]
    prompts = ['a sign "Hello World"', 'a sign "Open 24 Hours"', 'a sign "Hello Work"', 'a sign "Hello"', "a sign"]
    edit = scores("edit", images, prompts)
    assert edit[:2] == [1, 1] and edit[3] == 0 and edit[4] != edit[4]
    # helloworld to hellowork: a substitution and a letter too many, of 9; and its part helloworl: one substitution.
    assert edit[2] == pytest.approx(1 - 2 / 9)
    assert scores("exact", images[:3], prompts[:3]) == [1, 1, 0]
    assert scores("partial", images[2:3], prompts[2:3]) == pytest.approx([1 - 1 / 9])
    assert scores("edit", images[1:2], ["signs"], {"text": ["ＨＯＵＲＳ", "Open 24"]}) == [1]


def test_several_engines_read_what_one_does_in_the_same_order(monkeypatch):
    """Each on one core. Without a share of the cores there is still one engine."""
    words = ["OPEN", "HELLO WORLD", "", "42", "Sale"]
    pictures = list(eight_bit(torch.stack([drawn(word) for word in words])))
    monkeypatch.setattr(ocr, "_IDLE", [])
    monkeypatch.setattr(ocr, "engines", lambda: 1)
    alone = ocr.read(pictures)
    assert len(ocr._IDLE) == 1 and [line.replace(" ", "") for line in alone] == [w.replace(" ", "") for w in words]
    monkeypatch.setattr(ocr, "engines", lambda: 3)
    assert ocr.read(pictures) == alone and ocr.read([]) == [] and len(ocr._IDLE) <= 3
    options = [engine.text_rec.session.session.get_session_options() for engine in ocr._IDLE
               if engine.text_rec]  # loaded at the first text
    assert {(each.intra_op_num_threads, each.inter_op_num_threads) for each in options} == {(1, 1)}


@pytest.mark.parametrize("cores, processes, expected", [(8, None, 8), (8, "2", 4), (8, "3", 2), (2, "4", 1),
                                                         (128, None, 16)])
def test_engines_share_the_cores_with_the_processes_of_the_machine(cores, processes, expected, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if processes:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert ocr.engines() == expected

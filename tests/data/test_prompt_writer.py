"""Prompts from templates, and from a language model's answer."""

import pytest

from flowgrpo.data.prompt_writer import load_templates, of_answer
from flowgrpo.errors import UserError

TEMPLATES = """
templates: ["{count} {animal}s", "a {colour} {animal}"]
slots:
  count: {two: 2, three: 3}
  animal: [owl, cat]
  colour: [red, blue, green]
metadata: {task: zoo}
"""


def write(folder, text: str = TEMPLATES):
    (folder / "templates.yaml").write_text(text)
    return load_templates(folder / "templates.yaml")


def test_all_combinations_come_once_with_their_facts(tmp_path):
    prompts = write(tmp_path).write(100, seed=0)
    assert len({prompt.text for prompt in prompts}) == len(prompts) == 2 * 2 + 3 * 2
    facts = {prompt.text: prompt.metadata for prompt in prompts}
    assert facts["two owls"] == {"task": "zoo", "count": 2, "animal": "owl"}
    assert facts["a green cat"] == {"task": "zoo", "colour": "green", "animal": "cat"}


def test_templates_take_turns_and_the_seed_chooses(tmp_path):
    templates = write(tmp_path)
    first = [prompt.text for prompt in templates.write(4, seed=0)]
    assert sum(text.startswith("a ") for text in first) == 2
    assert first == [prompt.text for prompt in templates.write(4, seed=0)]
    assert any(first != [prompt.text for prompt in templates.write(4, seed=seed)] for seed in range(1, 4))


@pytest.mark.parametrize("text, message", [
    ("slots: {}", "expected a list under 'templates'"),
    ("templates: ['{animl}']\nslots: {animal: [owl]}", "has the slot 'animl': did you mean 'animal'?"),
    ("templates: ['{animal']\nslots: {animal: [owl]}", "the template '{animal' is not one"),
    ("templates: ['{animal}']\nslots: {animal: []}", "slots.animal: got [], expected a list of words"),
    ("template: ['x']\ntemplates: ['x']", "unknown key 'template': did you mean 'templates'?"),
    ("templates: [", "is not valid YAML: expected the node content"),
])
def test_mistakes_name_the_key(tmp_path, text, message):
    with pytest.raises(UserError) as caught:
        write(tmp_path, text)
    assert message in str(caught.value)


def test_lines_of_an_answer_lose_numbers_and_quotes():
    answer = 'Here are two prompts:\n1. "a red hat"\n2) two owls\n\n- 3 cats'
    assert of_answer(answer) == ["a red hat", "two owls", "3 cats"]

"""Questions that test whether an image shows its prompt, each with its answer, made by templates or by a model.

Templates read GenEval's metadata and prompts of the starter's world: objects, counts, colours and positions. For other
prompts, a language model behind a judge's endpoint writes questions, once per prompt.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flowgrpo.contrib.criteria import CachedWriter
from flowgrpo.errors import UserError
from flowgrpo.escaped import one_line
from flowgrpo.rewards.geneval.colours import NAMES
from flowgrpo.starter.scenes import SHAPES, Claims, parse

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
PLACES = {"left of": "left", "right of": "right", "above": "above", "below": "below"}
PLURALS = {"person": "people", "knife": "knives", "mouse": "mice", "sheep": "sheep", "skis": "skis",
           "scissors": "scissors", "bus": "buses"}
LONGEST = 200  # characters of a question or an answer
WRITER = ("Write at most 8 short questions that tell whether a picture shows the prompt below, one for each thing that "
          "it says: what is there, how many, in which colour, of what kind, doing what, and where. Every question has "
          "one right answer of one or two words, and as choices this answer and the wrong ones that come nearest.\n"
          "Prompt: {prompt}\nAnswer with JSON alone: [{\"question\": \"How many dogs are there?\", \"answer\": "
          "\"two\", \"choices\": [\"one\", \"two\", \"three\"]}]")


@dataclass(frozen=True)
class Question:
    """Question with its right answer and the choices, which include the right answer.
    Raises UserError for others."""

    question: str
    answer: str
    choices: tuple[str, ...] = ("yes", "no")

    def __post_init__(self) -> None:
        texts = (self.question, self.answer, *self.choices)
        if not all(isinstance(text, str) and 0 < len(text.strip()) <= LONGEST for text in texts) or \
                self.answer not in self.choices or not 1 < len(set(self.choices)) == len(self.choices):
            raise UserError(f"a question is {one_line(repr(asdict(self)))[:300]}: expected question and answer, and "
                            "two or more different choices, the answer among them, of "
                            f"{LONGEST} characters at most")


def plural(noun: str) -> str:
    """Plural of an English noun, such as those of GenEval's classes."""
    if noun in PLURALS:
        return PLURALS[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2:-1] not in "aeiou" else noun + "s"


def of_prompt(prompt: str, metadata: dict[str, Any], key: str = "questions", present: bool = False
              ) -> list[Question] | None:
    """Questions of a prompt: those under `key` in its metadata, or of GenEval's metadata, or of a prompt of the
    starter's world. None for another prompt.

    present: ask of the starter's prompts also whether the named shapes are there. Otherwise the answer is always no.

    Raises UserError for questions of another form."""
    if key in metadata:
        return of_list(metadata[key])
    if "include" in metadata:
        return of_clauses(metadata)
    try:
        claims = parse(prompt)
    except ValueError:  # not a prompt of the starter's world
        return None
    named = dict.fromkeys(claim.shape for claim in claims.objects) if present else ()
    return [*of_claims(claims), *(_is_there(shape, "yes") for shape in named)]


def of_clauses(metadata: dict[str, Any]) -> list[Question]:
    """Questions of GenEval's clauses: {"include": [{"class", "count", "color", "position"}], "exclude": [...]}.

    For an included class, the question for its number covers its exclusion. If several clauses include a class, only
    its total number is asked for: "the star" could be any of a red and a blue one.
    """
    include, questions = metadata["include"], []
    clauses: dict[str, list[dict[str, Any]]] = {}
    for clause in include:
        clauses.setdefault(clause["class"], []).append(clause)
    for noun, members in clauses.items():
        questions += _of_clause(members[0], include, clauses) if len(members) == 1 else \
            [_how_many(noun, sum(member.get("count", 1) for member in members))]
    for clause in metadata.get("exclude", ()):
        if clause["class"] not in clauses:
            questions.append(_is_there(clause["class"], "no"))
    return questions


def _is_there(noun: str, answer: str) -> Question:
    return Question(f"Is there {'an' if noun[:1] in 'aeiou' else 'a'} {noun} in the picture?", answer)


def _how_many(noun: str, count: int) -> Question:
    return Question(f"How many {plural(noun)} are in the picture?", number(count), tuple(map(number, range(count + 3))))


def _of_clause(clause: dict[str, Any], include: Sequence[dict[str, Any]],
               clauses: dict[str, list[dict[str, Any]]]) -> list[Question]:
    noun, count = clause["class"], clause.get("count", 1)
    questions = [_is_there(noun, "yes") if count == 1 else _how_many(noun, count)]
    verb, named = ("is", noun) if count == 1 else ("are", plural(noun))
    if clause.get("color"):
        choices = tuple(dict.fromkeys((*NAMES, clause["color"])))
        questions.append(Question(f"What color {verb} the {named}?", clause["color"], choices))
    relation, target = clause.get("position") or (None, 0)
    other = include[target]["class"]
    if relation and len(clauses[other]) == 1:
        questions.append(Question(f"Where {verb} the {named}, seen from the {other}: left, right, above or below?",
                                  PLACES[relation], tuple(PLACES.values())))
    return questions


def of_claims(claims: Claims) -> list[Question]:
    """Questions of a prompt of the starter's world, where an image may show only what its prompt says. All things and
    every claimed shape are counted: "is there a ring" has one answer for one and for three."""
    include: list[dict[str, Any]] = [{"class": claim.shape, "count": claim.count, "color": claim.colour}
                                     for claim in claims.objects]
    if claims.relation:
        include[0]["position"] = [claims.relation, 1]
    counts = {claim.shape: sum(other.count for other in claims.objects if other.shape == claim.shape)
              for claim in claims.objects}
    others = [{"class": shape} for shape in SHAPES if shape not in counts]
    return [_how_many("thing", sum(counts.values())), *(_how_many(shape, count) for shape, count in counts.items()),
            *(question for question in of_clauses({"include": include, "exclude": others})
              if question.answer not in ("yes", *NUMBERS))]


def of_list(entries: object) -> list[Question]:
    """Questions from a list in metadata or a model's answer: {"question", "answer", "choices"}, the last yes and
    no if absent.
    Raises UserError for any other form."""
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"questions are {one_line(repr(entries))[:200]}: expected a list of objects with question, "
                        "answer and choices")
    choices = [entry.get("choices", ["yes", "no"]) for entry in entries]
    return [Question(entry.get("question"), entry.get("answer"),
                     tuple(options) if isinstance(options, list) else (options,))
            for entry, options in zip(entries, choices)]


def number(count: int) -> str:
    """Count for a sentence: a word if there is one, else digits."""
    return NUMBERS[count] if count < len(NUMBERS) else str(count)


def writer(endpoint: dict[str, Any], file: str | None = None) -> CachedWriter[Question]:
    return CachedWriter(endpoint, file, WRITER, "questions", of_list, asdict)

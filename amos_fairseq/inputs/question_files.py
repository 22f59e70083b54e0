"""Questions on paragraphs, in SQuAD's official layout or the flat one of ``datasets``, validated while they are read, and the
official scores.

Exact match and F1 are those of the official scripts (Rajpurkar et al., 2016, section 6.1, and 2018, section 5), and of MLQA's
for Chinese where contexts have no spaces.
"""

import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from amos_fairseq.errors import UserError
from amos_fairseq.inputs import UNSPACED
from amos_fairseq.inputs.files import FOLDER, PARQUET, UTF8_MARK, is_blank, kind_and_compression, kind_of, read_content
from amos_fairseq.inputs.tables import TableFile
from amos_fairseq.strangers import (
    LARGEST_COUNT,
    field,
    is_unicode,
    parse_json,
    plain_name,
    text_in,
    whole_number,
)

MANIFEST = "squad.json"  # of the prepared data
TOKEN_ARRAYS = ("question", "context", "context_start", "context_end")
HINT = "give a file in the layout of SQuAD"
LARGEST_FILE_BYTES = 256 << 20  # decompressed; the training set of SQuAD 2.0 has 40 MiB
NAMED = 5  # ids in a note


class Answer(NamedTuple):
    """``start``: first character in the context; ``tokens``: first and last token of the context, None before it is aligned or
    if it cannot be."""

    text: str
    start: int
    tokens: tuple[int, int] | None = None

    def is_in(self, context: str) -> bool:
        return self.start >= 0 and context[self.start : self.start + len(self.text)] == self.text


class Example(NamedTuple):
    """A question in the prepared data. ``context``: index of its paragraph; ``answers`` is empty if ``is_impossible``."""

    id: str
    context: int
    answers: tuple[Answer, ...]
    is_impossible: bool

    def to_json(self) -> str:
        answers = [answer._asdict() for answer in self.answers]
        return json.dumps(self._asdict() | {"answers": answers}, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> "Example":
        content = parse_json(line)
        answers = []
        for answer in field(content, "answers", list):
            tokens = None if answer["tokens"] is None else tuple(map(whole_number, answer["tokens"]))
            if tokens is not None and (len(tokens) != 2 or tokens[0] > tokens[1]):
                raise ValueError(f"the tokens {tokens} are no first and last token")
            answers.append(Answer(text_in(answer["text"]), whole_number(answer["start"], -LARGEST_COUNT), tokens))
        is_impossible = field(content, "is_impossible", bool)
        return cls(text_in(content["id"]), whole_number(content["context"]), tuple(answers), is_impossible)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last token of each answer that is aligned. The first one is the target of training."""
        return [answer.tokens for answer in self.answers if answer.tokens is not None]


class Question(NamedTuple):
    """``answers`` is empty if ``is_impossible``: the context does not answer the question (version 2.0)."""

    id: str
    text: str
    answers: tuple[Answer, ...]
    is_impossible: bool


class Paragraph(NamedTuple):
    title: str
    context: str
    questions: tuple[Question, ...]


class SquadFile(NamedTuple):
    """``version``: as spelled in the file; empty if the file has none. ``notes``: what was corrected."""

    path: Path
    version: str
    paragraphs: tuple[Paragraph, ...]
    notes: tuple[str, ...] = ()

    @property
    def questions(self) -> list[Question]:
        return [question for paragraph in self.paragraphs for question in paragraph.questions]

    def misplaced(self) -> list[tuple[str, str, Answer]]:
        """Return context, id and answer where an answer is not at its start."""
        return [
            (paragraph.context, question.id, answer)
            for paragraph in self.paragraphs
            for question in paragraph.questions
            for answer in question.answers
            if not answer.is_in(paragraph.context)
        ]


def read_squad(path: Path) -> SquadFile:
    """Read a data set in the official layout ``{"version", "data": [{"title", "paragraphs": [...]}]}``, or flat rows of
    ``datasets``, ``{"id", "title", "context", "question", "answers": {"text": [...], "answer_start": [...]}}``. Questions
    without an answer are impossible, also where ``is_impossible`` is missing, as in the official evaluation."""
    content = _read_content(path)
    paragraphs = tuple(_read_paragraphs(path, content))
    data = SquadFile(path, "" if isinstance(content, list) else _optional_text(content, "version"), paragraphs)
    ids = Counter(question.id for question in data.questions)
    if not ids:
        raise UserError(f"{path} holds no questions: {HINT}")
    ((most_common, count),) = ids.most_common(1)
    if count > 1:
        raise UserError(f"{path}: the id {most_common:.60} occurs {count:,} times: predictions need unique ids")
    notes = []
    if blank := [question.id for question in data.questions if is_blank(question.text)]:
        problem = f"{len(blank):,} of {len(ids):,} questions have no text ({named(blank)})"
        if 2 * len(blank) > len(ids):
            raise UserError(f"{path}: {problem}: write them into question")
        notes.append(problem)
    num_answers, wrong = sum(len(question.answers) for question in data.questions), data.misplaced()
    if not num_answers:
        raise UserError(f"{path}: no question has an answer: give a file with answers")
    if 2 * len(wrong) > num_answers:
        problem = f"{len(wrong)} of {num_answers} answers are not at their answer_start"
        context, _, answer = wrong[0]
        there = context[max(answer.start, 0) :][: len(answer.text)]
        raise UserError(
            f"{path}: {problem} ({named([name for _, name, _ in wrong])}); the first is {answer.text!r:.60}, and the context "
            f"has {there!r:.60} there: the starts must count characters of the context in the file (not bytes, nor UTF-16 "
            "units as in JavaScript; CR LF are two), and upper and lower case must agree"
        )
    data = data._replace(paragraphs=tuple(map(_with_starts, data.paragraphs)))
    still_wrong = Counter(name for _, name, _ in data.misplaced())
    if corrected := list((Counter(name for _, name, _ in wrong) - still_wrong).elements()):
        what = "were not at their answer_start and were moved to the only place in the context that has their text"
        notes.append(f"{len(corrected):,} answers {what} ({named(corrected)})")
    return data._replace(notes=tuple(notes))


def _read_paragraphs(path: Path, content: Any) -> list[Paragraph]:
    paragraphs: list[Paragraph] = []
    where = "the file"
    try:
        for number, article in enumerate(content if isinstance(content, list) else field(content, "data", list)):
            where = f"data[{number}]"
            if isinstance(article, dict) and not {"context", "paragraphs"} & article.keys():
                has = ", ".join(map(str, article))
                raise ValueError(f"there is no context (of a row) and no paragraphs (of an article), but {has:.200}")
            if not isinstance(article, dict) or "context" not in article:
                for place, node in enumerate(field(article, "paragraphs", list)):
                    where = f"data[{number}].paragraphs[{place}]"
                    paragraphs.append(_paragraph(article, node, field(node, "qas", list)))
                continue
            row = _paragraph(article, article, [article])
            if paragraphs and paragraphs[-1][:2] == row[:2]:  # another question on the same paragraph
                row = row._replace(questions=paragraphs.pop().questions + row.questions)
            paragraphs.append(row)
    except ValueError as error:
        raise UserError(f"{path} does not have SQuAD's layout: in {where} {error}") from error
    return paragraphs


def _read_content(path: Path) -> Any:
    """Return the content of a JSON file, or the rows of a table as a list."""
    if kind_of(path) in (PARQUET, FOLDER) or kind_and_compression(path)[0] in (".jsonl", ".ndjson"):
        rows = (row for _, row in TableFile(path).rows())
        return [{name: value for name, value in row.items() if value is not None} for row in rows]
    text = read_content(path, LARGEST_FILE_BYTES).removeprefix(UTF8_MARK)  # plain, or compressed as .gz, .xz, .zst
    try:
        content = parse_json(text, object)
    except ValueError as error:
        raise UserError(f"{path} {error}: {HINT}") from error
    is_row = isinstance(content, dict) and "data" not in content and "context" in content
    return [content] if is_row else content


def _paragraph(article: dict[str, Any], node: Any, questions: Sequence[Any]) -> Paragraph:
    return Paragraph(_optional_text(article, "title"), _text(node, "context"), tuple(map(_question, questions)))


def _question(node: Any) -> Question:
    name = node.get("id") if isinstance(node, dict) else None
    name = plain_name(str(name) if type(name) is int else field(node, "id", str))
    given = node.get("answers")
    if any(isinstance(each, str) for each in (given if isinstance(given, list) else [given])):
        raise ValueError(f"answers of the question {name:.60} are texts without answer_start: add it")
    if isinstance(given, dict):  # of datasets
        texts, starts = field(given, "text", list), field(given, "answer_start", list)
        if len(texts) != len(starts):
            raise ValueError(f"the question {name:.60} has {len(texts)} texts and {len(starts)} starts of answers")
        given = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    elif given is None:
        raise ValueError(f"the question {name:.60} has no answers, but {', '.join(map(str, node)):.200}")
    else:
        given = field(node, "answers", list)
    answers = tuple(Answer(_text(each, "text"), field(each, "answer_start", int)) for each in given)
    answers = tuple(answer for answer in answers if answer.text.strip())
    # The official evaluation checks whether there are answers; in both files of version 2.0 the flag agrees with that.
    if node.get("is_impossible") is not None and field(node, "is_impossible", bool) and answers:
        raise ValueError(f"the question {name:.60} has an answer, but is_impossible is true")
    return Question(name, _text(node, "question"), answers, not answers)


def _with_starts(paragraph: Paragraph) -> Paragraph:
    """Correct the start of each answer whose text is once in the context, but elsewhere."""

    def with_start(answer: Answer) -> Answer:
        if answer.is_in(paragraph.context):
            return answer
        start = paragraph.context.find(answer.text)
        is_once = start >= 0 and paragraph.context.find(answer.text, start + 1) < 0
        return answer._replace(start=start) if is_once else answer

    questions = (
        question._replace(answers=tuple(map(with_start, question.answers))) for question in paragraph.questions
    )
    return paragraph._replace(questions=tuple(questions))


def named(ids: Sequence[str]) -> str:
    return ", ".join([*(f"{name:.60}" for name in ids[:NAMED]), *(["..."] if len(ids) > NAMED else [])])


def _text(node: Any, name: str) -> str:
    return text_in(field(node, name, str))


def _optional_text(node: dict[str, Any], name: str) -> str:
    """Return a text that nothing depends on; an empty one if the file has another value."""
    text = node.get(name)
    return text if isinstance(text, str) and is_unicode(text) else ""


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def task_name(has_impossible: bool) -> str:
    """Return the name of a version in tables and folders: 2.0 has questions without an answer in its dev set."""
    return "SQuAD2.0" if has_impossible else "SQuAD1.1"


def words_of(text: str) -> list[str]:
    """Return the words between spaces, in lower case, without ASCII punctuation and articles: SQuAD's rule."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def characters_of(text: str) -> list[str]:
    """Return each character of a script without spaces, and the words between them, in lower case, without punctuation: the
    rule of MLQA's script for Chinese (Lewis et al., 2020, "mixed segmentation"), here for all such scripts."""
    text = text.lower().translate(_PUNCTUATION)
    kept = "".join(character for character in text if not unicodedata.category(character).startswith("P"))
    return UNSPACED.sub(r" \g<0> ", kept).split()


UNITS_OF = {"words": words_of, "characters": characters_of}
OF_CHARACTERS = "EM and F1 compare characters, as MLQA's script does for Chinese (--score-by words compares words)"


def fitting_units(contexts: Iterable[str]) -> str:
    """Return ``characters`` if most letters of the contexts are of a script without spaces, else ``words``."""
    letters = Counter(character for text in contexts for character in text if character.isalpha())
    unspaced = sum(count for character, count in letters.items() if UNSPACED.match(character))
    return "characters" if 2 * unspaced > letters.total() else "words"


def f1(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over the words or characters of both; 1 if both are empty."""
    if not gold or not predicted:
        return float(gold == predicted)
    common = sum((Counter(gold) & Counter(predicted)).values())
    return 2 * common / (len(gold) + len(predicted))


def evaluate(
    answers: Mapping[str, Sequence[str]],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float] | None = None,
    units: str = "words",
) -> dict[str, float]:
    """Score predictions as the official script of 2.0: questions without a prediction do not count.

    Args:
        answers: by question, the texts that are right; none where there is no answer.
        null_odds: for each question, how likely it has no answer, on any scale; enables the search for the best thresholds.
        units: a key of :data:`UNITS_OF`: what is compared.
    """
    predicted = [name for name in answers if name in predictions]
    if not predicted:
        raise ValueError("no question has a prediction")
    split = UNITS_OF[units]
    raw: dict[str, dict[str, float]] = {"exact": {}, "f1": {}}
    for name in predicted:
        # Answers with at least one word are right, or the empty text if there is none.
        golds, found = [gold for gold in map(split, answers[name]) if gold] or [[]], split(predictions[name])
        raw["exact"][name] = float(found in golds)
        raw["f1"][name] = max(f1(gold, found) for gold in golds)
    groups = {
        "": predicted,
        "HasAns_": [name for name in predicted if answers[name]],
        "NoAns_": [name for name in predicted if not answers[name]],
    }
    scores: dict[str, float] = {}
    for prefix, names in groups.items():
        if not names:
            continue
        for measure, by_name in raw.items():
            scores[f"{prefix}{measure}"] = 100.0 * sum(by_name[name] for name in names) / len(names)
        scores[f"{prefix}total"] = len(names)
    if null_odds is not None:
        for measure, by_name in raw.items():
            best, threshold = best_threshold(by_name, answers, predictions, null_odds)
            scores |= {f"best_{measure}": best, f"best_{measure}_thresh": threshold}
    return scores


def best_threshold(
    scores: Mapping[str, float],
    answers: Mapping[str, Sequence[str]],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float],
) -> tuple[float, float]:
    """Return the largest mean score in percent, and the threshold of the null odds that gives it. Questions are answered one
    after another, from the lowest odds on: each answer adds its score, or takes the point of a question without one."""
    current = best = float(sum(not answers[name] for name in scores))
    threshold = 0.0
    for name in sorted(null_odds, key=lambda name: null_odds[name]):
        if name not in scores:
            continue
        if answers[name]:
            current += scores[name]
        elif predictions[name]:
            current -= 1
        if current > best:
            best, threshold = current, null_odds[name]
    return 100.0 * best / len(scores), threshold

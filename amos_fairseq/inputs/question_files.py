"""Questions on paragraphs, in SQuAD's official layout or the flat rows of ``datasets``, and the official scores.

Exact match and F1 are those of the official scripts (Rajpurkar et al., 2016, section 6.1, and 2018, section 5), and of MLQA's
for Chinese where contexts have no spaces.
"""

import itertools
import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.files import (
    FOLDER,
    PARQUET,
    UTF8_MARK,
    kind_and_compression,
    kind_of,
    print_what_was_read,
    read_content,
)
from amos_fairseq.inputs.raw_words import UNSPACED
from amos_fairseq.inputs.tables import TableFile
from amos_fairseq.untrusted import LARGEST_COUNT, parse_json, plain_name, text_in, whole_number

MANIFEST = "squad.json"  # of the prepared data
TOKEN_ARRAYS = ("question", "context", "context_start", "context_end")
FORMS = (
    "questions are read from SQuAD's JSON, and from rows (id, context, question, answers: {text, answer_start}) in .jsonl, "
    ".parquet and folders of datasets: docs/converting.md has commands for other files"
)
LARGEST_FILE_BYTES = 256 << 20  # decompressed; the training set of SQuAD 2.0 has 40 MiB


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
        content = json.loads(line)
        answers = (
            Answer(answer["text"], answer["start"], answer["tokens"] and tuple(answer["tokens"]))
            for answer in content["answers"]
        )
        return cls(content["id"], content["context"], tuple(answers), content["is_impossible"])

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last token of each answer that is aligned, in the order of the file."""
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
    """``version``: as spelled in the file; empty if the file has none."""

    path: Path
    version: str
    paragraphs: tuple[Paragraph, ...]

    @property
    def questions(self) -> list[Question]:
        return [question for paragraph in self.paragraphs for question in paragraph.questions]


def read_squad(path: Path, labeled: bool = True) -> SquadFile:
    """Read a data set in the official layout ``{"version", "data": [{"title", "paragraphs": [...]}]}``, or rows as in
    ``FORMS``. Questions without an answer are impossible, also where ``is_impossible`` is missing, as in the official
    evaluation. Answers are ignored, and need not be there, unless ``labeled``."""
    version = ""
    try:
        if kind_of(path) in (PARQUET, FOLDER) or kind_and_compression(path)[0] in (".jsonl", ".ndjson"):
            kind, paragraphs = "rows", tuple(_paragraphs_of_rows((row for _, row in TableFile(path).rows()), labeled))
        else:
            content = parse_json(read_content(path, LARGEST_FILE_BYTES).removeprefix(UTF8_MARK))
            kind, version = "SQuAD's JSON", content.get("version", "")
            paragraphs = tuple(
                _paragraph(article, node, node["qas"], labeled)
                for article in content["data"]
                for node in article["paragraphs"]
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else error
        raise UserError(f"{path} does not have the layout ({problem!s:.200}): {FORMS}") from error
    data = SquadFile(path, version if isinstance(version, str) else "", paragraphs)
    ids = Counter(question.id for question in data.questions)
    if len(ids) < max(1, ids.total()):
        several = f" ({ids.most_common(1)[0][0]:.60} occurs more than once)" if ids else ""
        raise UserError(f"{path} holds {ids.total():,} questions with {len(ids):,} different ids{several}: {FORMS}")
    context, (question, *_) = next(paragraph[1:] for paragraph in data.paragraphs if paragraph.questions)
    answer = f" -> {question.answers[0].text if question.answers else 'no answer'}" if labeled else ""
    first, what = f"{question.text}{answer}; context: {context}", f"questions on {len(paragraphs):,} paragraphs"
    print_what_was_read(path, kind, [], len(data.questions), {}, first, "prepare" if labeled else "squad", what)
    return data


def _paragraphs_of_rows(rows: Iterable[dict[str, Any]], labeled: bool) -> Iterator[Paragraph]:
    """Yield the paragraphs of rows with a question each; questions on the same paragraph follow each other."""
    paragraphs = (_paragraph(row, row, [row], labeled) for row in rows)
    for (title, context), group in itertools.groupby(paragraphs, key=lambda paragraph: paragraph[:2]):
        yield Paragraph(title, context, tuple(question for paragraph in group for question in paragraph.questions))


def _paragraph(article: dict[str, Any], node: dict[str, Any], questions: Sequence[Any], labeled: bool) -> Paragraph:
    asked = tuple(_question(question, labeled) for question in questions)
    return Paragraph(text_in(article.get("title") or ""), text_in(node["context"]), asked)


def _question(node: dict[str, Any], labeled: bool) -> Question:
    name, answers = plain_name(str(node["id"])), node["answers"] if labeled else []
    if isinstance(answers, dict):  # of datasets
        pairs = list(zip(answers["text"], answers["answer_start"], strict=True))
    else:
        pairs = [(answer["text"], answer["answer_start"]) for answer in answers]
    pairs = [(text_in(text), whole_number(start, -LARGEST_COUNT)) for text, start in pairs if text.strip()]
    # Without the blanks at the ends, which people mark by mistake.
    answers = tuple(Answer(text.strip(), start + len(text) - len(text.lstrip())) for text, start in pairs)
    return Question(name, text_in(node["question"]), answers, not answers)


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


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
OF_CHARACTERS = "EM and F1 compare characters, as MLQA's script does for Chinese"


def fitting_units(contexts: Iterable[str]) -> str:
    """Return ``characters`` if most letters of the contexts are of a script without spaces, else ``words``."""
    letters = Counter(character for text in contexts for character in text if character.isalpha())
    unspaced = sum(count for character, count in letters.items() if UNSPACED.match(character))
    return "characters" if 2 * unspaced > letters.total() else "words"


def f1(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over the words or characters of both; 1 if both are empty."""
    if not gold or not predicted:
        return float(gold == predicted)
    return 2 * sum((Counter(gold) & Counter(predicted)).values()) / (len(gold) + len(predicted))


def evaluate(
    answers: Mapping[str, Sequence[str]],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float] | None = None,
    units: str = "words",
) -> dict[str, float]:
    """Score predictions as the official script of 2.0: questions without a prediction do not count.

    ``answers``: by question, the texts that are right, none where there is no answer. ``null_odds``: how likely a question has
    none, on any scale, for the search for the best thresholds. ``units``: a key of ``UNITS_OF``, what is compared.
    """
    predicted = [name for name in answers if name in predictions]
    assert predicted, "no question has a prediction"
    split = UNITS_OF[units]
    raw: dict[str, dict[str, float]] = {"exact": {}, "f1": {}}
    for name in predicted:
        # Answers with at least one word are right, or the empty text if there is none.
        golds, prediction = [gold for gold in map(split, answers[name]) if gold] or [[]], split(predictions[name])
        raw["exact"][name] = float(prediction in golds)
        raw["f1"][name] = max(f1(gold, prediction) for gold in golds)
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

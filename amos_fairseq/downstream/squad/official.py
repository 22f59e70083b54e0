"""SQuAD's official JSON files and scores.

Data sets and prediction files are validated while they are read. Exact match and F1 are those of the official scripts
(Rajpurkar et al., 2016, section 6.1, and 2018, section 5). They equal ``squad_evaluate`` of ``transformers``, which
removed it in version 5.19 or 5.20 (a test compares them).
"""

import argparse
import json
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.strangers import finite_number, is_unicode, parse_json
from amos_fairseq.text.text_files import InputFile

HINT = "give an official file of SQuAD"
LARGEST_FILE_BYTES = 256 << 20  # decompressed; the training set of SQuAD 2.0 has 40 MiB
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Answer:
    """``start``: index of the first character in the context, as given by the file."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """``answers`` is empty if ``is_impossible``: the context does not answer the question (version 2.0)."""

    id: str
    text: str
    answers: tuple[Answer, ...]
    is_impossible: bool


@dataclass(frozen=True)
class Paragraph:
    title: str
    context: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class SquadFile:
    """``version``: as spelled in the file; empty if the file has none."""

    path: Path
    version: str
    paragraphs: tuple[Paragraph, ...]

    def questions(self) -> Iterator[Question]:
        for paragraph in self.paragraphs:
            yield from paragraph.questions


def read_squad(path: Path) -> SquadFile:
    """Read a data set in the official layout ``{"version", "data": [{"title", "paragraphs": [...]}]}``.

    Fields that neither training nor evaluation uses (``plausible_answers``) are optional. A version 1.1 file has no
    ``is_impossible``, so all its questions have answers. The message of :class:`UserError` names a field that is wrong.
    """
    content = _Node(path, "", _read_json(path))
    paragraphs = []
    for article in content.items("data"):
        for node in article.items("paragraphs"):
            context = node.text("context")
            questions = tuple(_question(each) for each in node.items("qas"))
            paragraphs.append(Paragraph(article.optional_text("title"), context, questions))
    data = SquadFile(path, content.optional_text("version"), tuple(paragraphs))
    ids = Counter(question.id for question in data.questions())
    if not ids:
        raise UserError(f"{path} holds no questions: {HINT}")
    ((most_common, count),) = ids.most_common(1)
    if count > 1:
        raise UserError(f"{path}: the id {most_common} occurs twice: predictions need unique ids")
    return data


def task_name(has_impossible: bool) -> str:
    """Return the name of a version in tables and folders: 2.0 has questions without an answer in its dev set."""
    return "SQuAD2.0" if has_impossible else "SQuAD1.1"


def read_predictions(path: Path) -> dict[str, str]:
    hint = "it holds no predictions, expected one JSON object of question ids and answer texts"
    content = _read_json(path, hint)
    if not all(isinstance(text, str) for text in content.values()):
        raise UserError(f"{path} has values that are no texts: {hint}")
    return content


def read_null_odds(path: Path) -> dict[str, float]:
    hint = "it holds no null odds, expected one JSON object of question ids and numbers"
    try:
        return {name: finite_number(odds) for name, odds in _read_json(path, hint).items()}
    except ValueError as error:
        raise UserError(f"{path}: {error}: {hint}") from error


def _read_json(path: Path, hint: str = HINT) -> dict[str, Any]:
    """Read a JSON file of one object, plain or compressed as ``.gz``, ``.xz``, ``.zst``."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        content = InputFile(path).content(LARGEST_FILE_BYTES)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        return parse_json(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}): {hint}") from error
    except ValueError as error:
        raise UserError(f"{path} {error}: {hint}") from error


class _Node:
    """A value of the file, with its path in the file for error messages."""

    def __init__(self, path: Path, name: str, value: Any) -> None:
        self.path, self.name, self.value = path, name, value

    def field(self, name: str, kind: type, expected: str) -> Any:
        value = self.value.get(name) if isinstance(self.value, dict) else None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            where = f"{self.name}.{name}" if self.name else name
            shown = "missing" if value is None else json.dumps(value)[:60]
            raise UserError(f"{self.path} does not have SQuAD's layout: {where} must be {expected}, it is {shown}")
        return value

    def text(self, name: str) -> str:
        text = self.field(name, str, "a string")
        if not is_unicode(text):
            raise UserError(f"{self.path}: {self.name}.{name} has half of a surrogate pair: remove the character")
        return text

    def optional_text(self, name: str) -> str:
        """Return a text that nothing depends on; an empty one if the file has another value."""
        text = self.value.get(name)
        return text if isinstance(text, str) and is_unicode(text) else ""

    def items(self, name: str) -> list["_Node"]:
        prefix = f"{self.name}." if self.name else ""
        values = self.field(name, list, "a list")
        return [_Node(self.path, f"{prefix}{name}[{index}]", value) for index, value in enumerate(values)]


def _question(node: _Node) -> Question:
    answers = tuple(Answer(a.text("text"), a.field("answer_start", int, "an integer")) for a in node.items("answers"))
    is_impossible = node.value.get("is_impossible", False)
    if not isinstance(is_impossible, bool):
        raise UserError(f"{node.path} does not have SQuAD's layout: {node.name}.is_impossible must be true or false")
    # The official evaluation checks whether there are answers; in both files of version 2.0 the flag agrees with that.
    return Question(node.text("id"), node.text("question"), () if is_impossible else answers, is_impossible)


def normalize_answer(text: str) -> str:
    """Convert to lower case, remove ASCII punctuation and articles, and separate words by single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(gold: str, predicted: str) -> float:
    """Return 1.0 if both are equal after normalization, otherwise 0.0."""
    return float(normalize_answer(gold) == normalize_answer(predicted))


def f1(gold: str, predicted: str) -> float:
    """Return the harmonic mean of precision and recall over the words of both, with multiplicity.

    If one of them has no word, the score is 1.0 if neither has, otherwise 0.0.
    """
    gold_words, words = (normalize_answer(text).split() for text in (gold, predicted))
    if not gold_words or not words:
        return float(gold_words == words)
    common = sum((Counter(gold_words) & Counter(words)).values())
    return 2 * common / (len(gold_words) + len(words))


MEASURES: dict[str, Callable[[str, str], float]] = {"exact": exact_match, "f1": f1}


def evaluate(
    questions: Iterable[Question],
    predictions: dict[str, str],
    null_odds: dict[str, float] | None = None,
    null_threshold: float = float("inf"),
) -> tuple[dict[str, float], int]:
    """Score one prediction file.

    Args:
        null_odds: how likely each question has no answer, on any scale; enables the search for the best thresholds.
        null_threshold: a question with odds above it counts as not answered, whatever its prediction. The official
            script's default, 1.0, is meant for probabilities; this default uses all predictions as given.

    Returns:
        The scores: ``exact``, ``f1`` (percent) and ``total``; the same with ``HasAns_`` and ``NoAns_`` if there are such
        questions; with ``null_odds`` also ``best_exact``, ``best_exact_thresh``, ``best_f1``, ``best_f1_thresh``. And
        the number of questions without a prediction, which no score counts (as in the official script of 2.0).
    """
    questions = list(questions)
    answered = {question.id: gold_texts(question) for question in questions if question.id in predictions}
    has_answer = {question.id: bool(question.answers) for question in questions}
    if not answered:
        raise UserError("no question of the data set has a prediction: do both files belong together?")
    if null_odds is not None:
        without = next((id_ for id_ in answered if id_ not in null_odds), None)
        if without is not None:
            raise UserError(f"the question {without} has a prediction, but no null odds: give the file of the same run")
    # Measure -> question id -> score.
    raw = {
        name: {id_: max(measure(gold, predictions[id_]) for gold in golds) for id_, golds in answered.items()}
        for name, measure in MEASURES.items()
    }
    groups = {
        "": list(answered),
        "HasAns_": [id_ for id_ in answered if has_answer[id_]],
        "NoAns_": [id_ for id_ in answered if not has_answer[id_]],
    }
    scores: dict[str, float] = {}
    for prefix, ids in groups.items():
        if not ids:
            continue
        for name, by_id in raw.items():
            counted = (
                float(not has_answer[id_]) if null_odds is not None and null_odds[id_] > null_threshold else by_id[id_]
                for id_ in ids
            )
            scores[f"{prefix}{name}"] = 100.0 * sum(counted) / len(ids)
        scores[f"{prefix}total"] = len(ids)
    if null_odds is not None:
        for name, by_id in raw.items():
            best, threshold = best_threshold(by_id, has_answer, predictions, null_odds)
            scores[f"best_{name}"], scores[f"best_{name}_thresh"] = best, threshold
    return scores, len(questions) - len(answered)


def gold_texts(question: Question) -> list[str]:
    """Return the texts that count as correct: answers with at least one word, or the empty text if there is none."""
    return [answer.text for answer in question.answers if normalize_answer(answer.text)] or [""]


def best_threshold(
    scores: dict[str, float], has_answer: dict[str, bool], predictions: dict[str, str], null_odds: dict[str, float]
) -> tuple[float, float]:
    """Return the largest mean score in percent, and the threshold of the null odds that gives it.

    The search starts with no question answered and answers one question after another, from the lowest odds on. Each
    answer adds its score, or subtracts the point of a question that is correctly left without an answer.
    """
    current = best = float(sum(not has_answer[id_] for id_ in scores))
    threshold = 0.0
    for id_ in sorted(null_odds, key=lambda id_: null_odds[id_]):
        if id_ not in scores:
            continue
        if has_answer[id_]:
            current += scores[id_]
        elif predictions[id_]:
            current -= 1
        if current > best:
            best, threshold = current, null_odds[id_]
    return 100.0 * best / len(scores), threshold


def print_scores(arguments: argparse.Namespace) -> None:
    """Print the scores of ``amos squad --evaluate`` as JSON on stdout, in the format of the official script."""
    predictions, dataset = arguments.evaluate
    odds = None if arguments.null_odds is None else read_null_odds(arguments.null_odds)
    if odds is None and arguments.null_threshold is not None:
        raise UserError("--null-threshold needs --null-odds: without them there is nothing to compare")
    questions = list(read_squad(dataset).questions())
    threshold = float("inf") if arguments.null_threshold is None else arguments.null_threshold
    scores, missing = evaluate(questions, read_predictions(predictions), odds, threshold)
    if missing:
        notice = (
            f"{missing} of {len(questions)} questions have no prediction and are not part of any score (as in the official "
            "script of SQuAD 2.0; the script of 1.1 counts them as wrong)"
        )
        print(notice, file=sys.stderr)
    print(json.dumps(scores, indent=2))

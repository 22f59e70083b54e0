"""SQuAD's official JSON files, checked, and the prediction files of its evaluation scripts."""

import gzip
import json
import lzma
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import zstandard

from amos_fairseq.errors import UserError

_OPEN = {".gz": gzip.open, ".xz": lzma.open, ".zst": zstandard.open}
_DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


@dataclass(frozen=True)
class Answer:
    """``start``: its first character in the context, as the file says."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """``answers`` is empty where ``is_impossible``: the text then does not answer the question (version 2.0)."""

    id: str
    text: str
    answers: Tuple[Answer, ...]
    is_impossible: bool


@dataclass(frozen=True)
class Paragraph:
    title: str
    context: str
    questions: Tuple[Question, ...]


@dataclass(frozen=True)
class SquadFile:
    """``version`` as the file spells it; empty where it does not tell."""

    path: Path
    version: str
    paragraphs: Tuple[Paragraph, ...]

    def questions(self) -> Iterator[Question]:
        for paragraph in self.paragraphs:
            yield from paragraph.questions

    @property
    def has_impossible(self) -> bool:
        """Whether it asks questions without an answer, as version 2.0 does."""
        return any(question.is_impossible for question in self.questions())


def read_json(path: Path) -> Any:
    """The content of a JSON file, plain or as ``.gz``, ``.xz``, ``.zst``; :class:`UserError` where it is none."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        with _OPEN.get(path.suffix.lower(), open)(path, "rb") as stream:
            content = stream.read()
    except _DAMAGED as error:
        raise UserError(f"{path} is damaged ({error}): fetch or compress it again") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        return json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}): give an official file of SQuAD") from error


def read_squad(path: Path) -> SquadFile:
    """A data set in the official layout ``{"version", "data": [{"title", "paragraphs": [...]}]}``.

    Fields that evaluation and training have no use for (``plausible_answers``) may be there or not; a version 1.1 file
    has no ``is_impossible``, so its questions all have answers.

    Raises:
        UserError: not JSON, a field is missing or of another type (the line names its place), an id stands twice.
    """
    content = _Place(path, "", read_json(path))
    paragraphs = []
    for article in content.items("data"):
        title = str(article.value.get("title", "")) if isinstance(article.value, dict) else ""
        paragraphs += [_paragraph(place, title) for place in article.items("paragraphs")]
    version = content.value.get("version", "")
    data = SquadFile(path, version if isinstance(version, str) else "", tuple(paragraphs))
    _check_ids(data)
    return data


def read_predictions(path: Path) -> Dict[str, str]:
    """``{question id: answer}``, the official format of predictions; :class:`UserError` for anything else."""
    content = read_json(path)
    if not isinstance(content, dict) or not all(isinstance(text, str) for text in content.values()):
        raise UserError(f"{path} holds no predictions: expected one JSON object of question ids and answer texts")
    return content


def read_null_odds(path: Path) -> Dict[str, float]:
    """``{question id: number}``, the higher the likelier without an answer; :class:`UserError` for anything else."""
    content = read_json(path)
    if isinstance(content, dict) and all(
        isinstance(odds, (int, float)) and not isinstance(odds, bool) and math.isfinite(odds)
        for odds in content.values()
    ):
        return {name: float(odds) for name, odds in content.items()}
    raise UserError(f"{path} holds no null odds: expected one JSON object of question ids and numbers")


class _Place:
    """A value of the file and how to get there, for messages."""

    def __init__(self, path: Path, name: str, value: Any) -> None:
        self.path, self.name, self.value = path, name, value

    def field(self, name: str, kind: type, expected: str) -> Any:
        found = self.value.get(name) if isinstance(self.value, dict) else None
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is int):
            where = f"{self.name}.{name}" if self.name else name
            raise UserError(f"{self.path} has not SQuAD's layout: {where} must be {expected}, it is {_short(found)}")
        return found

    def text(self, name: str) -> str:
        return self.field(name, str, "a text")

    def items(self, name: str) -> List["_Place"]:
        prefix = f"{self.name}." if self.name else ""
        values = self.field(name, list, "a list")
        return [_Place(self.path, f"{prefix}{name}[{number}]", value) for number, value in enumerate(values)]


def _paragraph(place: _Place, title: str) -> Paragraph:
    return Paragraph(title, place.text("context"), tuple(_question(question) for question in place.items("qas")))


def _question(place: _Place) -> Question:
    answers = tuple(Answer(a.text("text"), a.field("answer_start", int, "a number")) for a in place.items("answers"))
    is_impossible = place.value.get("is_impossible", False)
    if not isinstance(is_impossible, bool):
        raise UserError(f"{place.path} has not SQuAD's layout: {place.name}.is_impossible must be true or false")
    # Evaluation asks whether there are answers; both files of version 2.0 agree with their flag.
    return Question(place.text("id"), place.text("question"), () if is_impossible else answers, is_impossible)


def _check_ids(data: SquadFile) -> None:
    seen = set()
    for question in data.questions():
        if question.id in seen:
            raise UserError(
                f"{data.path}: the id {question.id} stands twice: ids name predictions, so each must be one"
            )
        seen.add(question.id)
    if not seen:
        raise UserError(f"{data.path} holds no questions: give an official file of SQuAD")


def _short(value: Any) -> str:
    return "missing" if value is None else f"{json.dumps(value, ensure_ascii=False)[:60]}"

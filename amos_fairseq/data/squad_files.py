"""The layout of binarized SQuAD, as preprocess/squad writes it and the task reads it.

SPLIT.question.{bin,idx}                        ids of each question, without special tokens
SPLIT.context.{bin,idx}                         ids of each paragraph, once however many questions it has
SPLIT.context_start, SPLIT.context_end          first character, and the one behind the last, of every context token
SPLIT.contexts.jsonl                            {"title", "text"} of each paragraph
SPLIT.examples.jsonl                            a question a line, in the file's order: see Example
dict.txt  tokenizer/  squad.json                vocabulary; facts about sources, counts and what could not be aligned
"""

import functools
import json
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
from fairseq.data.indexed_dataset import MMapIndexedDataset

from amos_fairseq.errors import UserError

MANIFEST = "squad.json"
SPLITS = ("train", "valid")
TOKEN_ARRAYS = ("question", "context", "context_start", "context_end")
_HINT = "give the directory that preprocess/squad/prepare.sh wrote"


class AlignedAnswer(NamedTuple):
    """``start``: character; ``tokens``: first and last context token, None where no token stands for its characters."""

    text: str
    start: int
    tokens: Optional[Tuple[int, int]]


class Example(NamedTuple):
    """A question. ``context``: number of its paragraph; ``answers`` is empty where ``is_impossible``."""

    id: str
    context: int
    answers: Tuple[AlignedAnswer, ...]
    is_impossible: bool

    def to_json(self) -> str:
        answers = [answer._asdict() for answer in self.answers]
        return json.dumps(self._asdict() | {"answers": answers}, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> "Example":
        content = json.loads(line)
        answers = (
            AlignedAnswer(a["text"], a["start"], None if a["tokens"] is None else tuple(a["tokens"]))
            for a in content["answers"]
        )
        return cls(content["id"], content["context"], tuple(answers), content["is_impossible"])

    @property
    def target(self) -> Optional[Tuple[int, int]]:
        """Tokens of the first answer that has some: what training asks for."""
        return next((answer.tokens for answer in self.answers if answer.tokens is not None), None)


class SquadSplit:
    """One split, memory-mapped. Question i belongs to example i."""

    def __init__(self, directory: Path, split: str) -> None:
        """
        Raises:
            UserError: a file is missing, or they do not belong together.
        """
        self.directory, self.split = directory, split
        prefix = directory / split
        self.examples: List[Example] = [
            Example.from_json(line) for line in _lines(prefix.with_suffix(".examples.jsonl"))
        ]
        self.questions, self.contexts, self.starts, self.ends = (_open(prefix, name) for name in TOKEN_ARRAYS)
        if len(self.questions) != len(self.examples) or not len(self.contexts) == len(self.starts) == len(self.ends):
            raise UserError(f"{prefix}.*: the files do not belong together; prepare the data again")

    def __len__(self) -> int:
        return len(self.examples)

    @functools.cached_property
    def texts(self) -> List[str]:
        """The text of each paragraph."""
        return [json.loads(line)["text"] for line in _lines(self.directory / f"{self.split}.contexts.jsonl")]

    def offsets(self, context: int) -> Tuple[np.ndarray, np.ndarray]:
        """First characters, and those behind the last, of a paragraph's tokens: two [length] arrays."""
        return self.starts[context].numpy(), self.ends[context].numpy()


def read_manifest(directory: Path) -> Dict[str, Any]:
    """``squad.json``; :class:`UserError` where the directory holds none."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest.keys() >= {"settings", "tokenizer_sha256", "splits"}:
            return manifest
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {_HINT}") from None
    except (OSError, ValueError, AttributeError):
        pass
    raise UserError(f"{path} was not written by prepare.sh: {_HINT}")


def _open(prefix: Path, name: str) -> MMapIndexedDataset:
    path = f"{prefix}.{name}"
    if not MMapIndexedDataset.exists(path):
        raise UserError(f"{path}.bin or {path}.idx is missing: {_HINT}")
    return MMapIndexedDataset(path)


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", newline="\n") as stream:
            yield from stream
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {_HINT}") from None

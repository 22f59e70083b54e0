"""Encode a split of SQuAD, align its answers with tokens, and write memory-mapped arrays and lines of JSON."""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from amos_fairseq.downstream.squad.dataset import TOKEN_ARRAYS, AlignedAnswer, Example
from amos_fairseq.downstream.squad.official import Answer, Paragraph, Question, normalize_answer
from amos_fairseq.text.binarizing import NUM_FAIRSEQ_SYMBOLS, UNKNOWN_ID, BinarizedFile, SymbolIds
from amos_fairseq.text.tokenization import Tokenizer

# squad.json lists this many answers of each kind that do not fit.
NAMED_ANSWERS = 20


class Fit(str, Enum):
    """The match between an answer and the text of its tokens.

    ``exact``: it scores an exact match. ``wider``: the answer ends inside a token ("1910" in "1910s"), so the smallest span
    of tokens that contains it has more text. ``lost``: no token covers its characters. ``misplaced``: the context does not
    contain the answer at its ``answer_start``.
    """

    EXACT = "exact"
    WIDER = "wider"
    LOST = "lost"
    MISPLACED = "misplaced"


def align_answer(
    answer: Answer, context: str, starts: np.ndarray, ends: np.ndarray
) -> tuple[tuple[int, int] | None, Fit]:
    """Return the first and last token of an answer, or None if it is lost or misplaced.

    Args:
        starts, ends: [length] characters ``[start, end)`` of each context token; empty for a token without characters.
    """
    if context[answer.start : answer.start + len(answer.text)] != answer.text or answer.start < 0:
        return None, Fit.MISPLACED
    # No token covers spaces at the ends of an answer, so they select no further tokens.
    inside = np.flatnonzero((starts < ends) & (ends > answer.start) & (starts < answer.start + len(answer.text)))
    if len(inside) == 0:
        return None, Fit.LOST
    first, last = int(inside[0]), int(inside[-1])
    found = context[starts[first] : ends[last]]
    fits = normalize_answer(found) == normalize_answer(answer.text)
    return (first, last), Fit.EXACT if fits else Fit.WIDER


@dataclass
class SplitFacts:
    """Counts for ``squad.json``. ``untrainable``: questions with answers that are all lost or misplaced."""

    paragraphs: int = 0
    questions: int = 0
    impossible: int = 0
    untrainable: int = 0
    context_tokens: int = 0
    longest_context: int = 0
    longest_question: int = 0
    unknown: int = 0
    answers: dict[str, int] = field(default_factory=lambda: {fit.value: 0 for fit in Fit})
    named: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add_answer(self, fit: Fit, question: Question, answer: Answer, found: str) -> None:
        self.answers[fit.value] += 1
        if fit is not Fit.EXACT:
            named = self.named.setdefault(fit.value, [])
            if len(named) < NAMED_ANSWERS:
                named.append({"id": question.id, "answer": answer.text, "tokens_give": found})


class SplitWriter:
    """Write the files of one split into ``directory``; ``files`` closes them."""

    def __init__(self, directory: Path, split: str, tokenizer: Tokenizer, files: contextlib.ExitStack) -> None:
        self._tokenizer, self._ids = tokenizer, SymbolIds(tokenizer)
        self.facts = SplitFacts()
        # Offsets count characters of one paragraph.
        symbols = dict.fromkeys(("question", "context"), len(tokenizer) + NUM_FAIRSEQ_SYMBOLS)
        self._arrays = {
            name: files.enter_context(BinarizedFile(directory / f"{split}.{name}", symbols.get(name)))
            for name in TOKEN_ARRAYS
        }
        paths = (directory / f"{split}.{name}.jsonl" for name in ("examples", "contexts"))
        self._examples, self._contexts = (
            files.enter_context(open(path, "w", encoding="utf-8", newline="\n"))  # noqa: SIM115
            for path in paths
        )

    def add(self, paragraph: Paragraph) -> None:
        aligned = self._tokenizer.encode_with_offsets(paragraph.context)
        starts = np.array([start for _, start, _ in aligned], dtype=np.int32)
        ends = np.array([end for _, _, end in aligned], dtype=np.int32)
        self._add_ids("context", [piece for piece, _, _ in aligned])
        for name, offsets in (("context_start", starts), ("context_end", ends)):
            self._arrays[name].add_line(offsets)
        line = {"title": paragraph.title, "text": paragraph.context}
        self._contexts.write(json.dumps(line, ensure_ascii=False) + "\n")
        for question in paragraph.questions:
            self._add_question(question, paragraph.context, starts, ends)
        facts = self.facts
        facts.paragraphs += 1
        facts.context_tokens += len(aligned)
        facts.longest_context = max(facts.longest_context, len(aligned))

    def _add_question(self, question: Question, context: str, starts: np.ndarray, ends: np.ndarray) -> None:
        pieces = self._tokenizer.encode(question.text)
        self._add_ids("question", pieces)
        answers = []
        for answer in question.answers:
            tokens, fit = align_answer(answer, context, starts, ends)
            found = "" if tokens is None else context[starts[tokens[0]] : ends[tokens[1]]]
            answers.append(AlignedAnswer(answer.text, answer.start, tokens))
            self.facts.add_answer(fit, question, answer, found)
        example = Example(question.id, self.facts.paragraphs, tuple(answers), question.is_impossible)
        self._examples.write(example.to_json() + "\n")
        self.facts.questions += 1
        self.facts.impossible += question.is_impossible
        self.facts.untrainable += bool(answers) and example.target is None
        self.facts.longest_question = max(self.facts.longest_question, len(pieces))

    def _add_ids(self, name: str, pieces: Sequence[str]) -> None:
        ids = self._ids.of(pieces)
        self.facts.unknown += ids.count(UNKNOWN_ID)
        self._arrays[name].add_line(ids)


def write_squad_split(
    directory: Path, split: str, paragraphs: Sequence[Paragraph], tokenizer: Tokenizer, on_done: Callable[[int], object]
) -> SplitFacts:
    """Write all paragraphs of a split. ``on_done`` is called with the number of questions newly written."""
    with contextlib.ExitStack() as files:
        writer = SplitWriter(directory, split, tokenizer, files)
        for paragraph in paragraphs:
            writer.add(paragraph)
            on_done(len(paragraph.questions))
    return writer.facts

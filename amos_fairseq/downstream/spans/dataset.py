"""SQuAD: the binarized files, windows over long contexts, and batches of ``<s> question </s> context </s>``.

``amos prepare squad`` writes these files:

SPLIT.question.{bin,idx}                        ids of each question, without special tokens
SPLIT.context.{bin,idx}                         ids of each paragraph, once for all of its questions
SPLIT.context_start, SPLIT.context_end          start and end (exclusive) of every context token, in characters
SPLIT.contexts.jsonl                            {"title", "text"} of each paragraph
SPLIT.examples.jsonl                            one question per line, in the file's order: see Example
dict.txt  tokenizer/  squad.json                vocabulary; sources, counts and answers that could not be aligned
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from amos_fairseq.data.corpus import check_prepared, open_lines
from amos_fairseq.downstream.labeled_task import LabeledSequences
from amos_fairseq.errors import UserError
from amos_fairseq.inputs.question_files import MANIFEST, TOKEN_ARRAYS, Example
from amos_fairseq.untrusted import read_json_lines

_HINT = "give the directory that amos prepare squad wrote"


class SquadSplit:
    """One memory-mapped split. Question i belongs to example i."""

    def __init__(self, directory: Path, split: str) -> None:
        self.directory, self.split = directory, split
        prefix = directory / split
        check_prepared(directory, MANIFEST, split)
        self.examples: list[Example] = read_json_lines(directory / f"{split}.examples.jsonl", _HINT, Example.from_json)
        self.questions, self.contexts, self.starts, self.ends = (
            open_lines(f"{prefix}.{name}", _HINT) for name in TOKEN_ARRAYS
        )

    def __len__(self) -> int:
        return len(self.examples)

    @functools.cached_property
    def texts(self) -> list[str]:
        path = self.directory / f"{self.split}.contexts.jsonl"
        return read_json_lines(path, _HINT, lambda line: json.loads(line)["text"])

    def offsets(self, context: int) -> tuple[np.ndarray, np.ndarray]:
        """Return start and end (exclusive) of each token of a paragraph, in characters: [length], [length]."""
        return self.starts[context].numpy(), self.ends[context].numpy()


class WindowLimits(NamedTuple):
    """Lengths in tokens. The defaults are BERT's, except ``tokens`` (AMOS Appendix B: sequence length 512)."""

    tokens: int = 512  # the whole window
    doc_stride: int = 128  # distance between the starts of two windows
    question: int = 64  # a longer question is cut to this length
    num_separators: int = 1  # number of ``</s>`` between question and context, 1 or 2

    @property
    def num_special(self) -> int:
        """Number of special tokens in a window: ``<s>``, the separators and the last ``</s>``."""
        return 2 + self.num_separators


def context_ranges(length: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Return ``[begin, end)`` of the windows over a context of ``length`` tokens: at least one, together all tokens. All but
    the last are full. Their starts are ``stride`` apart, or ``room`` if that is less (BERT's SQuAD code)."""
    ranges = [(0, min(length, room))]
    while ranges[-1][1] < length:
        begin = ranges[-1][0] + min(stride, room)
        ranges.append((begin, min(length, begin + room)))
    return ranges


def window_of_most_context(ranges: list[tuple[int, int]]) -> np.ndarray:
    """Return, for every context token, the number of the window in which it has most context: [length] int64. BERT's rule: the
    smaller distance to both ends, plus a hundredth of the window's length; of equal scores the first window."""
    length = ranges[-1][1]
    best_score = np.full(length, -1.0)
    best = np.zeros(length, dtype=np.int64)
    for number, (begin, end) in enumerate(ranges):
        position = np.arange(begin, end)
        score = np.minimum(position - begin, end - 1 - position) + 0.01 * (end - begin)
        better = score > best_score[begin:end]
        best[begin:end][better] = number
        best_score[begin:end][better] = score[better]
    return best


class Window(NamedTuple):
    """Context tokens [begin, end) beside the question of an example. Token i is at position ``offset + i - begin``."""

    example: int
    number: int  # index among the windows of the example
    begin: int
    end: int
    offset: int


class SquadWindowDataset(LabeledSequences):
    """All windows of a split: in training shuffled, and without questions whose answers could not be aligned to tokens. The
    target of a window is the first and last token of the first answer in the file that it contains as a whole; of one without
    any 0, ``<s>``."""

    def __init__(self, split: SquadSplit, *, limits: WindowLimits, seed: int = 0, training: bool = False) -> None:
        super().__init__(split.directory, split.split, seed, training)
        if limits.tokens < limits.question + limits.num_special + 1:
            beside = f"--max-question-length {limits.question} and {limits.num_special} special tokens"
            raise UserError(f"--tokens-per-window {limits.tokens} leaves no room for a context beside {beside}")
        self.squad, self.limits = split, limits
        windows = [window for example in range(len(split)) for window in self._windows_of(example)]
        self._windows = np.array(windows, dtype=np.int64).reshape(-1, len(Window._fields))
        self.sizes = self._windows[:, 4] + self._windows[:, 3] - self._windows[:, 2] + 1

    def _windows_of(self, index: int) -> list[Window]:
        example, limits = self.squad.examples[index], self.limits
        if self.training and example.answers and not example.spans:
            return []
        question = min(int(self.squad.questions.sizes[index]), limits.question)
        room = limits.tokens - limits.num_special - question
        ranges = context_ranges(int(self.squad.contexts.sizes[example.context]), room, limits.doc_stride)
        offset = question + limits.num_special - 1
        return [Window(index, number, *bounds, offset) for number, bounds in enumerate(ranges)]

    def window(self, index: int) -> Window:
        return Window(*self._windows[index].tolist())

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``id`` int, ``tokens`` [L] int64, ``context`` (first position, count) and ``target`` (start, end)."""
        index = int(index)
        window = self.window(index)
        example = self.squad.examples[window.example]
        question = self.squad.questions[window.example][: self.limits.question]
        context = self.squad.contexts[example.context][window.begin : window.end]
        bos, eos = torch.tensor([self.bos]), torch.tensor([self.eos])
        return {
            "id": index,
            "tokens": torch.cat([bos, question.long(), *[eos] * self.limits.num_separators, context.long(), eos]),
            "context": (window.offset, len(context)),
            "target": self._target(window, example),
        }

    @staticmethod
    def _target(window: Window, example: Example) -> tuple[int, int]:
        for first, last in example.spans:
            if window.begin <= first and last < window.end:
                return first - window.begin + window.offset, last - window.begin + window.offset
        return 0, 0

    def add_labels(self, batch: dict[str, Any], samples: Sequence[dict[str, Any]]) -> None:
        """Add to ``net_input``: ``answer_mask`` [B,T] bool, True at context tokens, and ``span_targets``, two [B] int64."""
        answer_mask = torch.zeros_like(batch["net_input"]["src_tokens"], dtype=torch.bool)
        for row, sample in enumerate(samples):
            first, count = sample["context"]
            answer_mask[row, first : first + count] = True
        targets = torch.tensor([sample["target"] for sample in samples], dtype=torch.long)
        batch["net_input"] |= {"answer_mask": answer_mask, "span_targets": targets.unbind(1)}

"""Sentences of divided words, with labels or without, and names in the prepared data."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from amos_fairseq.inputs import UNSPACED
from amos_fairseq.inputs.files import is_blank
from amos_fairseq.inputs.summary import print_what_was_read

MANIFEST = "tagging.json"
# In the manifest. The second is there if words train in the raw text: some have no space between them; the third is the
# name of the training file if the dev sentences were chosen from it.
SEEN, RAW_TEXT, HELD_OUT = "dev_sentences_in_train", "raw_text", "held_out"
# Names of tasks, and so of folders in OUT of amos tag, begin with this: results of other benchmarks are not taken for these.
TASK_PREFIX = "tagging-"
UNLABELED = "unlabeled"  # the split of sentences without labels
WORD_ARRAYS = ("tokens", "word_start", "word_end")
_SPACES = re.compile(r"\s*")


def is_column_name(name: str) -> bool:
    """Return whether this is a name such as upos, which can be part of the name of a folder."""
    return len(name) <= 100 and re.fullmatch(r"[\w.:+-]*\w[\w.:+-]*", name) is not None


@dataclass
class Sentence:
    """The words of a sentence, and its columns by name, each as long as ``words``.

    Attributes:
        spaces: whether a space follows each word in the text, and False for the last; None where the file does not say it.
        lines: the line of each word, or its row in a table.
    """

    words: list[str]
    columns: dict[str, list[str]]
    spaces: list[bool] | None = None
    lines: Sequence[int] = field(default=(), compare=False, repr=False)

    @property
    def text(self) -> str:
        return join_words(self.words, self.spaces)

    def without_blank_words(self) -> "Sentence":
        kept = [place for place, word in enumerate(self.words) if not is_blank(word)]
        if len(kept) == len(self.words):
            return self
        columns = {name: [labels[place] for place in kept] for name, labels in self.columns.items()}
        words, lines = [self.words[place] for place in kept], [self.lines[place] for place in kept]
        text = join_words([" " if is_blank(word) else word for word in self.words], self.spaces)
        return Sentence(words, columns, self.spaces and spaces_in(text, words), lines)


@dataclass
class WordFile:
    """The sentences of a file.

    Attributes:
        kind: how it was read.
        left_out: what is no word or sentence, and how many.
    """

    path: Path
    kind: str
    sentences: list[Sentence]
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(self.sentences[0].columns)

    def report(self, command: str = "prepare", column: str | None = None) -> None:
        """Print what was read, and the first sentence with its labels in ``column``."""
        first, num_words = self.sentences[0], sum(len(sentence.words) for sentence in self.sentences)
        shown, columns = first.text, []
        if column is not None:
            shown, columns = " ".join(map("/".join, zip(first.words, first.columns[column], strict=True))), [column]
        what = f"sentences of {num_words:,} words"
        print_what_was_read(self.path, self.kind, columns, len(self.sentences), self.left_out, shown, command, what)

    def label_column(self) -> str:
        """Return the name of the column of labels where the user gives none: upos, or the last one."""
        return "upos" if "upos" in self.names else self.names[-1]


def spaces_in(text: str, words: Sequence[str]) -> list[bool] | None:
    """Return whether a space follows each word in the text; None if it does not consist of these words and spaces."""
    spaces, place, text = [], 0, text.strip()
    for word in words:
        if not text.startswith(word, place):
            return None
        end = place + len(word)
        place = _SPACES.match(text, end).end()
        spaces.append(place > end)
    return spaces if place == len(text) else None


def count_labels(sentences: Sequence[Sentence], column: str) -> Counter[str]:
    return Counter(label for sentence in sentences for label in sentence.columns[column])


def join_unspaced_words(sentences: Sequence[Sentence]) -> None:
    """Where a file does not tell the spaces, leave them out of sentences in which half the words or more are in scripts
    without spaces."""
    for sentence in sentences:
        is_unspaced = [UNSPACED.search(word) is not None for word in sentence.words if any(map(str.isalpha, word))]
        if sentence.spaces is None and any(is_unspaced) and 2 * sum(is_unspaced) >= len(is_unspaced):
            sentence.spaces = [*itertools.starmap(_needs_space, itertools.pairwise(sentence.words)), False]


def _needs_space(word: str, following: str) -> bool:
    """Return whether these are two words such as New York in a text without spaces, and not single characters of a word."""
    ends = word[-1] + following[0]
    return len(word + following) > 2 and ends.isalnum() and not UNSPACED.search(ends)


def join_words(words: Sequence[str], spaces: Sequence[bool] | None = None) -> str:
    """Return the text of words; ``spaces``: whether a space follows each of them, by default all but the last."""
    if spaces is None:
        return " ".join(words)
    return "".join(f"{word} " if space else word for word, space in zip(words, spaces, strict=True))

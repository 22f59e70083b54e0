"""Sentences of labeled words: column files of the CoNLL shared tasks, and CoNLL-U; names in the prepared data.

Messages name the file and the line.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from amos_fairseq.errors import UserError
from amos_fairseq.text.input_files import read_lines

MANIFEST = "tagging.json"
# Names of tasks, and so of folders in OUT of amos tag, begin with this: results of other benchmarks are not taken for these.
TASK_PREFIX = "tagging-"
UNLABELED = "unlabeled"  # the split of sentences without labels
WORD_ARRAYS = ("tokens", "word_start", "word_end")

# Names of the columns after the word, by the number of columns: CoNLL-2000 has three, CoNLL-2003 four.
COLUMN_NAMES = {2: ("label",), 3: ("pos", "chunk"), 4: ("pos", "chunk", "ner")}
CONLLU_NAMES = ("form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
CONLLU_WIDTH = 1 + len(CONLLU_NAMES)  # the number of the word comes before them
_DOCUMENT_START = "-DOCSTART-"
_BLANKS = re.compile(r"[ \t]+")  # not str.split(), which also splits at a no-break space inside a word
_RANGE_OR_EMPTY_NODE = re.compile(r"[0-9]+[-.][0-9]+")
MOST = 0.9  # of the lines of a column file have the same number of columns
LONGEST_SENTENCE = 1000  # words


def is_column_name(name: str) -> bool:
    """Return whether this is a name such as upos, which can be part of the name of a folder."""
    return len(name) <= 100 and re.fullmatch(r"[\w.:+-]*\w[\w.:+-]*", name) is not None


@dataclass
class Sentence:
    """The words of a sentence, and its columns by name, each as long as ``words``."""

    words: list[str]
    columns: dict[str, list[str]]


def is_conllu(path: Path) -> bool:
    return re.search(r"\.conllu(\.gz|\.xz|\.zst)?$", path.name.lower()) is not None


def read_sentences(path: Path, names: Sequence[str] | None = None) -> list[Sentence]:
    """Read a file as CoNLL-U if it is called so, else as columns; ``names``: see :func:`read_columns`."""
    if not is_conllu(path):
        return read_columns(path, names)
    if names is not None:
        raise UserError(f"--columns names those of column files; {path} is CoNLL-U, with {', '.join(CONLLU_NAMES)}")
    return read_conllu(path)


def read_columns(path: Path, names: Sequence[str] | None = None) -> list[Sentence]:
    """Read a column file: one word a line, its labels behind it, a blank line after each sentence.

    Columns are separated by a tab if the line has one, else by spaces. Lines that start with ``-DOCSTART-`` also end a
    sentence. The file may be compressed (.gz, .xz, .zst).

    Args:
        names: of the columns after the word; by default those of :data:`COLUMN_NAMES`, and for other numbers of columns
            "2", "3", ....
    """
    rows = list(_rows(_lines(path)))
    width = 1 + len(names) if names else next((len(cells) for _, cells in rows if cells), 0)
    sentences = _sentences(path, rows, width, f"(word, {', '.join(names)})" if names else "as in the first line")
    if width == 1:
        raise UserError(f"{path} has one column: expected a word and at least one label a line")
    names = names or COLUMN_NAMES.get(width) or [str(place) for place in range(2, width + 1)]
    return [Sentence(words, dict(zip(names, columns, strict=True))) for words, *columns in sentences]


def read_conllu(path: Path) -> list[Sentence]:
    """Read CoNLL-U: the columns are :data:`CONLLU_NAMES`, and ``form`` is ``words``.

    Comments, ranges of multiword tokens (``1-2``) and empty nodes (``1.1``) are skipped: words are the syntactic ones. The file
    may be compressed (.gz, .xz, .zst).
    """
    rows: list[tuple[int, list[str]]] = []
    expected = 1
    lines = ((number, line) for number, line in _lines(path) if not line.startswith("#"))
    for number, cells in _rows(lines, only_tabs=True):
        if not cells:
            expected = 0  # and then 1
        elif len(cells) != CONLLU_WIDTH or not all(cells):
            raise UserError(f"{path}, line {number}: not the ten columns of CoNLL-U, separated by tabs")
        elif _RANGE_OR_EMPTY_NODE.fullmatch(cells[0]):
            continue
        elif cells[0] != str(expected):
            raise UserError(f"{path}, line {number}: word id {cells[0]:.20}, expected {expected}")
        rows.append((number, cells[1:]))
        expected += 1
    sentences = _sentences(path, rows, len(CONLLU_NAMES), "of CoNLL-U")
    return [Sentence(columns[0], dict(zip(CONLLU_NAMES, columns, strict=True))) for columns in sentences]


def read_unlabeled(path: Path) -> tuple[list[list[str]], str]:
    """Read sentences whose words are divided, and whose labels are ignored.

    A file whose name ends in ``.conllu`` is CoNLL-U. Another file has one word a line, with further columns behind it, if a
    line has a tab, or if blank lines separate sentences and most other lines have the same number of columns; then all lines
    must have that number. Otherwise each line is a sentence with blanks between its words. Files may be compressed.

    Returns:
        The words of each sentence, and how the file was read.
    """
    if is_conllu(path):
        return [sentence.words for sentence in read_conllu(path)], "CoNLL-U"
    lines = list(_lines(path))
    rows = list(_rows(lines))
    words = [(number, cells) for number, cells in rows if cells]
    if not words:
        raise UserError(f"{path} has no sentence: expected one a line, with blanks between its words")
    first_tab = next((number for number, line in lines if "\t" in line and line.strip(" \t")), None)
    for number, cells in words:
        if first_tab and len(cells) == CONLLU_WIDTH and cells[0] == "1":
            raise UserError(f"{path}, line {number}: this is CoNLL-U: give the file a name that ends in .conllu")
    width, count = Counter(len(cells) for _, cells in words).most_common(1)[0]
    last = words[-1][0]
    has_blank_lines = any(not cells for number, cells in rows if number < last)
    if first_tab is None and not (has_blank_lines and count >= MOST * len(words)):
        return [cells for _, cells in words], "one sentence a line"
    why = f"; line {first_tab} has a tab, so the file has one word a line" if first_tab else ""
    sentences = _sentences(path, rows, width, f"as in most lines{why}")
    if not has_blank_lines and len(words) > LONGEST_SENTENCE:
        problem = (
            f"line {first_tab} has a tab, so the file has one word a line, but no blank line in {len(words):,} lines"
        )
        raise UserError(f"{path}: {problem}: separate sentences by blank lines, or give one a line without tabs")
    return [columns[0] for columns in sentences], "one word a line"


def _rows(lines: Iterable[tuple[int, str]], only_tabs: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield number and cells of each line, divided at tabs if it has one, else at blanks unless ``only_tabs``; no cells where
    a sentence ends."""
    for number, line in lines:
        if not line.strip(" \t") or line.startswith(_DOCUMENT_START):
            yield number, []
        elif only_tabs or "\t" in line:
            yield number, [cell.strip(" ") for cell in line.split("\t")]
        else:
            yield number, _BLANKS.split(line.strip(" "))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "no such file"
        raise UserError(f"{path}: {what}: give a column file or a CoNLL-U file")
    for number, line in read_lines(path):
        text = line.decode("utf-8").rstrip("\r\n")
        if "\r" in text or "\0" in text:
            what = "carriage return" if "\r" in text else "NUL character"
            raise UserError(f"{path}, line {number}: a {what} inside of the line: convert to Unix line ends, UTF-8")
        yield number, text


def _sentences(path: Path, rows: Iterable[tuple[int, list[str]]], width: int, expected: str) -> list[list[list[str]]]:
    """Return the columns of each sentence; each row must have ``width`` cells, as ``expected`` says."""
    sentences: list[list[list[str]]] = [[]]
    for number, cells in rows:
        if not cells:
            sentences.append([])
            continue
        if len(cells) != width:
            raise UserError(f"{path}, line {number}: {len(cells)} columns, expected {width} {expected}")
        if not all(cells):
            raise UserError(f"{path}, line {number}: column {cells.index('') + 1} is empty")
        sentences[-1].append(cells)
    if not any(sentences):
        raise UserError(f"{path} has no sentence: expected one word a line")
    return [[list(column) for column in zip(*sentence, strict=True)] for sentence in sentences if sentence]

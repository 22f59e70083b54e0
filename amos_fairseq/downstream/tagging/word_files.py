"""Sentences of divided words, with labels or without: column files, CoNLL-U, tables of lists; names in the prepared data.

What a file is depends on its content, not on its name. Messages name the file and the line.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amos_fairseq.downstream.tagging.schemes import notation_of
from amos_fairseq.errors import UserError
from amos_fairseq.output.terminal import say
from amos_fairseq.text.file_kinds import FOLDER, JSONL, PARQUET, kind_of, refuse_markup
from amos_fairseq.text.input_files import TableFile, is_blank, read_lines

MANIFEST = "tagging.json"
SEEN = "dev_sentences_in_train"  # in the manifest
# Names of tasks, and so of folders in OUT of amos tag, begin with this: results of other benchmarks are not taken for these.
TASK_PREFIX = "tagging-"
UNLABELED = "unlabeled"  # the split of sentences without labels
WORD_ARRAYS = ("tokens", "word_start", "word_end")

WORD = "word"  # in --columns, the column of the words
# Names of the columns after the word, by their number: CoNLL-2000 has two, CoNLL-2003 three.
COLUMN_NAMES = {1: ("label",), 2: ("pos", "chunk"), 3: ("pos", "chunk", "ner")}
CONLLU_NAMES = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
CONLLU, CONLLU_PLUS, COLUMNS, LINES = "CoNLL-U", "CoNLL-U Plus", "one word a line", "one sentence a line"
ROWS = "one sentence a row"
NAMES_OF_NUMBERS = "write names such as B-PER, or use save_to_disk or to_parquet of datasets, which keep them"
MOST = 0.9  # of the lines of a column file have the same number of columns
LONGEST_SENTENCE = 1000  # words
_DOCUMENT_START = "-DOCSTART-"
_BLANKS = re.compile(r"[ \t]+")  # not str.split(), which also splits at a no-break space inside a word
_COMMENT = re.compile(r"#(\s|$|[\w.]+ *=|(begin|end) document)")  # not #hashtag
_GLOBAL_COLUMNS = re.compile(r"# *global\.columns *= *(.+)")
_WORD_ID, _RANGE_OR_EMPTY_NODE = re.compile(r"[0-9]+([-.][0-9]+)?"), re.compile(r"[0-9]+[-.][0-9]+")
_WORD_NAMES = ("tokens", "words", "token", WORD, "form", "text")
_INDEX_NAMES = ("id", "index", "idx", "no", "nr")
_LABEL_NAMES = ("label", "tag", "pos", "ner", "chunk", "upos", "xpos", "lemma", "iob", "bio", "ne", "entity")
_HEADER = {*_WORD_NAMES, *_INDEX_NAMES, *_LABEL_NAMES, *(f"{name}s" for name in _LABEL_NAMES), "ner_tag", "ner_tags"}
FEW_WORDS = 5  # are no reason to doubt their place
NUMBER = re.compile(r"[-+]?[0-9]+([.,][0-9]+)?")
_NO_WORD = re.compile(r"[A-Z]?[\W\d_]+")  # a number, or an id such as T12 of brat
_SENTENCE_NUMBER = re.compile(r"sent(ence)?[ _]?(#|id|idx|no|nr|number)\t", re.IGNORECASE)
_WRITE_BLANK_LINES = r"""awk -F'\t' '$1 != "" && $1 != n {print ""; n = $1} {sub(/^[^\t]*\t/, ""); print}' FILE > NEW"""
_DIVIDE_TAGS = r"convert word/tag, for example with sed -E 's:/([^/ ]+)( |$):\t\1\n:g' FILE > NEW"
_WRITE_TABS = r"pandas.read_csv(FILE, keep_default_na=False).to_csv(NEW, sep='\t', index=False, quoting=3)"

Row = tuple[int, list[str]]  # the number of a line and its cells; none where a sentence ends


def is_column_name(name: str) -> bool:
    """Return whether this is a name such as upos, which can be part of the name of a folder."""
    return len(name) <= 100 and re.fullmatch(r"[\w.:+-]*\w[\w.:+-]*", name) is not None


@dataclass
class Sentence:
    """The words of a sentence, and its columns by name, each as long as ``words``; ``lines``: the line of each word, or its row
    in a table."""

    words: list[str]
    columns: dict[str, list[str]]
    lines: Sequence[int] = field(default=(), compare=False, repr=False)


@dataclass
class WordFile:
    """The sentences of a file; ``kind``: how it was read; ``notes``: what was left out."""

    path: Path
    kind: str
    sentences: list[Sentence]
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return list(self.sentences[0].columns)

    def report(self) -> None:
        """Say how the file was read."""
        columns = f" (columns {', '.join(self.names)})" if self.names else ""
        counted = f"{len(self.sentences):,} sentences, {self.kind}{columns}"
        say("; ".join([f"{self.path}: {counted}", *self.notes]))

    def label_column(self) -> str:
        """Return the name of the column of labels where the user gives none: upos, or the last one."""
        if "upos" in self.names:
            return "upos"
        *others, last = self.names
        marked = [name for name in others if self.has_marks(name)]
        last_is_marked = bool(notation_of(count_labels(self.sentences, last)))
        # Chunks and names (CoNLL-2003) are clear, but not outer and inner names, nor a last column of confidences.
        if marked and (not last_is_marked or (marked[0] == others[0] and marked[0].isdecimal())):
            problem = f"{self.path}: column {marked[-1]} marks spans, {last} {'too' if last_is_marked else 'does not'}"
            raise UserError(f"{problem}: choose one with --column {marked[-1]} or --column {last}")
        if not is_column_name(last):
            raise UserError(f"{self.path}: {last!r:.60} cannot name a column of labels: rename it, such as to ner_tags")
        return last

    def has_marks(self, name: str) -> bool:
        """Return whether all labels mark spans, not by their type alone: the lemma ``o`` is no mark."""
        counts = count_labels(self.sentences, name)
        notation = notation_of(counts)
        return notation.keys() >= counts.keys() and any(new not in ("O", f"I-{old}") for old, new in notation.items())


def count_labels(sentences: Sequence[Sentence], column: str) -> Counter[str]:
    return Counter(label for sentence in sentences for label in sentence.columns[column])


def read_sentences(path: Path, names: Sequence[str] | None = None, labeled: bool = True) -> WordFile:
    """Read sentences in any of these forms; text may be compressed (.gz, .xz, .zst).

    - CoNLL-U, and CoNLL-U Plus, which begins with ``# global.columns = ...``. Comments, ranges of multiword tokens (``1-2``)
      and empty nodes (``1.1``) are skipped: words are the syntactic ones.
    - One word a line, its labels behind it, a blank line after each sentence. Columns are separated by a tab if the line has
      one, else by spaces. An index before the word (1, 2, 3, ... in each sentence), comments and a header are left out, with a
      note. Lines that start with ``-DOCSTART-`` also end a sentence.
    - JSON lines, Parquet, or a folder of ``save_to_disk``: ``tokens`` (or ``words``) is a list, and so are the labels.
    - Unless ``labeled``, one sentence a line with blanks between its words: if no line has a tab, and if there is no blank line
      or the lines have different numbers of words.

    Args:
        names: of the columns of a column file behind the word; or of all, with ``word`` among them. By default those of
            :data:`COLUMN_NAMES`, and otherwise "2", "3", ..., the place in the file.
    """
    if kind_of(path) in (JSONL, PARQUET, FOLDER):
        file = _read_table(path, labeled)
    else:
        file = _read_word_lines(path, names, labeled)
    if names and file.kind != COLUMNS:
        raise UserError(f"--columns names those of column files; {path} is {file.kind}, with {', '.join(file.names)}")
    kept = [sentence for sentence in file.sentences if sentence.words not in ([], [_DOCUMENT_START])]
    if not kept:
        raise UserError(f"{path} has no sentence: expected one word a line")
    return WordFile(path, file.kind, kept, file.notes)


def read_conllu(path: Path) -> WordFile:
    """Read a CoNLL-U file, as :func:`read_sentences` does; refuse others."""
    is_table = kind_of(path) in (JSONL, PARQUET, FOLDER)
    file = WordFile(path, ROWS, []) if is_table else _read_word_lines(path, None, labeled=False)
    if file.kind != CONLLU:
        expected = "ten columns, separated by tabs, with the number of the word first"
        raise UserError(f"{path} is not CoNLL-U but {file.kind}: give a file with {expected}")
    return file


def _read_word_lines(path: Path, names: Sequence[str] | None, labeled: bool) -> WordFile:
    lines = list(_lines(path))
    rows = list(_rows(lines))
    words = [(number, cells) for number, cells in rows if cells and not _COMMENT.match(lines[number - 1])]
    if not words:
        raise UserError(f"{path} has no sentence: expected one word a line")
    width, count = Counter(len(cells) for _, cells in words).most_common(1)[0]
    if width != len(CONLLU_NAMES) and all(len(cells) == width and not cells[-1] for _, cells in words):
        width -= 1  # each line ends with a tab
        rows, words = ([(number, cells[:width]) for number, cells in part] for part in (rows, words))
    global_columns = _GLOBAL_COLUMNS.match(lines[0])
    numbered = sum(_WORD_ID.fullmatch(cells[0]) is not None for _, cells in words)
    if global_columns or (width == len(CONLLU_NAMES) and numbered >= MOST * len(words)):
        return _read_conllu_rows(path, rows, lines, global_columns[1].split() if global_columns else CONLLU_NAMES)
    has_blank_lines = any(not cells for number, cells in rows if number < words[-1][0])
    first_tab = next((number for number, _ in words if "\t" in lines[number - 1]), None)
    if not labeled and first_tab is None and not (has_blank_lines and count >= MOST * len(words)):
        refuse_markup(path)
        sentences = [Sentence(cells, {}, [number] * len(cells)) for number, cells in rows if cells]
        return WordFile(path, LINES, sentences)
    if labeled and _SENTENCE_NUMBER.match(lines[0]):
        raise UserError(f"{path}: column 1 numbers the sentences: write blank lines instead: {_WRITE_BLANK_LINES}")
    tagged = 2 * sum(all("/" in cell[1:-1] for cell in cells) for _, cells in words) > len(words)
    if labeled and (width == 1 or (not names and (tagged or 2 * count < len(words)))):
        number = words[0][0]
        advice = _DIVIDE_TAGS if tagged and width > 1 else f"from CSV, {_WRITE_TABS} writes tabs"
        expected = "expected one word a line with its labels behind it, separated by a tab or spaces, not"
        raise UserError(f"{path}, line {number}: {expected} {lines[number - 1]!r:.60}: {advice}")
    if not has_blank_lines and len(words) > LONGEST_SENTENCE:
        why = f"line {first_tab} has a tab, so the file has one word a line, but" if first_tab else "there is"
        problem = f"{path}: {why} no blank line in {len(words):,} lines: separate sentences by blank lines"
        raise UserError(f"{problem}{'' if labeled else ', or give one a line without tabs'}")
    notes = [] if has_blank_lines or len(words) == 1 else ["no line is blank: all words are one sentence"]
    rows = _without_comments(rows, words, lines, width, notes)
    expected = f"as in most lines{f'; line {first_tab} has a tab' if first_tab else ''}"
    if names and (WORD in names or width != len(names) + 2):  # one more may be an index
        width = len(names) + (WORD not in names)
        expected = f"({', '.join(names if WORD in names else [WORD, *names])})"
    sentences = _divided(path, rows, width, expected)
    places = _places_of_columns(path, sentences, names, labeled, notes)
    with_blank = sum(" " in cells[places[WORD]] for rows in sentences for _, cells in rows)
    if 2 * with_blank > len(words):
        raise UserError(f"{path}: {with_blank:,} of {len(words):,} words have blanks inside: expected one word a line")
    return WordFile(path, COLUMNS, [_sentence(rows, places, WORD) for rows in sentences if rows], notes)


def _read_conllu_rows(path: Path, rows: Iterable[Row], lines: Sequence[str], names: Sequence[str]) -> WordFile:
    places = {name.lower() if name.lower() in CONLLU_NAMES else name: place for place, name in enumerate(names)}
    if "form" not in places or len(places) < len(names):
        raise UserError(f"{path}, line 1: global.columns has {', '.join(names)}, but not FORM, or one of them twice")
    kind = CONLLU if tuple(places) == CONLLU_NAMES else CONLLU_PLUS
    columns = list(places)
    id_place, kept = places.pop("id", len(names)), []  # without it, no cell
    for number, cells in rows:
        line = lines[number - 1]
        if cells and line.startswith("#"):
            continue
        if "\t" not in line and len(cells) == len(names) > 1:
            advice = r"replace them, for example with sed -E 's/ +/\t/g'"
            raise UserError(f"{path}, line {number}: spaces between the columns; those of {kind} are tabs: {advice}")
        if not any(map(_RANGE_OR_EMPTY_NODE.fullmatch, cells[id_place : id_place + 1])):
            kept.append((number, cells))
    sentences = _divided(path, kept, len(names), f"of {kind}, separated by tabs", columns)
    for sentence in sentences:
        for expected, (number, cells) in enumerate(sentence, start=1):
            if cells[id_place : id_place + 1] not in ([], [str(expected)]):
                hints = {"1": "a blank line before it is missing", "0": "ids start at 1", "ID": "remove the header"}
                hint = f": {hints[cells[id_place]]}" if cells[id_place] in hints else ""
                raise UserError(f"{path}, line {number}: word id {cells[id_place]:.20}, expected {expected}{hint}")
    forms = Counter(cells[places["form"]] for rows in sentences for _, cells in rows)
    if 2 * forms["_"] > forms.total():
        raise UserError(f"{path}: {forms['_']:,} of {forms.total():,} words are _: this is a treebank without its text")
    return WordFile(path, kind, [_sentence(rows, places, "form") for rows in sentences])


def _sentence(rows: Sequence[Row], places: dict[str, int], words: str) -> Sentence:
    columns = {name: [cells[place] for _, cells in rows] for name, place in places.items()}
    return Sentence(columns.pop(WORD) if words == WORD else columns[words], columns, [number for number, _ in rows])


def _lines(path: Path) -> Iterator[str]:
    for number, line in read_lines(path):
        text = line.decode("utf-8").rstrip("\r\n")
        if "\r" in text or "\0" in text:
            what = "carriage return" if "\r" in text else "NUL character"
            raise UserError(f"{path}, line {number}: a {what} inside of the line: convert to Unix line ends, UTF-8")
        yield text


def _rows(lines: Iterable[str]) -> Iterator[Row]:
    """Yield number and cells of each line, divided at tabs if it has one, else at blanks; no cells where a sentence ends."""
    for number, line in enumerate(lines, start=1):
        if is_blank(line) or line.startswith(_DOCUMENT_START):
            yield number, []
        elif "\t" in line:
            yield number, [cell.strip(" ") for cell in line.split("\t")]
        else:
            yield number, _BLANKS.split(line.strip(" "))


def _without_comments(
    rows: list[Row], words: list[Row], lines: Sequence[str], width: int, notes: list[str]
) -> list[Row]:
    """Leave out comments of a column file. A line such as ``# O`` is a word if its label is # or that of another word."""
    last_cells = {"#"} | {cells[-1] for _, cells in words}  # the Penn Treebank tags # as #
    kept, comments = [], []
    for number, cells in rows:
        is_word = len(cells) == width and cells[-1] in last_cells
        if _COMMENT.match(lines[number - 1]) and not is_word:
            comments.append(number)
        else:
            kept.append((number, cells))
    if comments:
        notes.append(f"comments are left out ({len(comments):,}, the first in line {comments[0]})")
    return kept


def _divided(path: Path, rows: Iterable[Row], width: int, expected: str, names: Sequence[str] = ()) -> list[list[Row]]:
    """Return the rows of each sentence; refuse a row with an empty cell or without ``width`` cells; ``expected`` ends that
    message."""
    sentences: list[list[Row]] = [[]]
    for number, cells in rows:
        if not cells:
            sentences.append([])
            continue
        if len(cells) != width:
            raise UserError(f"{path}, line {number}: {len(cells)} columns, expected {width} {expected}")
        if not all(cells):
            place = cells.index("")
            name = f" ({names[place]})" if names else ""
            raise UserError(f"{path}, line {number}: column {place + 1}{name} is empty: fill it, or remove the line")
        sentences[-1].append((number, cells))
    return [sentence for sentence in sentences if sentence]


def _places_of_columns(
    path: Path, sentences: list[list[Row]], names: Sequence[str] | None, labeled: bool, notes: list[str]
) -> dict[str, int]:
    """Return the place of each column of a column file by its name, that of the words as :data:`WORD`. A header is removed."""
    first = next(rows for rows in sentences if rows)
    header = [cell.lower() for cell in first[0][1]]
    rest = [cells for rows in sentences for _, cells in rows][1:]
    word_name = next((name for name in _WORD_NAMES if name in header), None)
    if word_name and rest and _HEADER.issuperset(header) and all(cells[-1].lower() != header[-1] for cells in rest):
        notes.append(f"line {first[0][0]} is no word, but names the columns: {', '.join(header)}")
        del first[0]
        if names is None and len(set(header)) == len(header) > 1:
            names = [WORD if name == word_name else name for name in header]
    width = len(header)
    if names and WORD in names:
        return {name: place for place, name in enumerate(names) if name not in _INDEX_NAMES}
    start, needed = 0, 1 + (len(names) if names else int(labeled))
    if width > needed and all(map(_is_index, sentences)) and any(len(rows) > 1 for rows in sentences):
        notes.append("column 1 is the index of the word in its sentence, and left out")
        start = 1
    elif names and width > needed:
        problem = f"{path}: {width} columns, expected {needed} ({', '.join([WORD, *names])})"
        raise UserError(f"{problem}: --columns names those after the word, or all, with {WORD} among them")
    rest = [cells[start:] for rows in sentences for _, cells in rows]
    if names is None:
        _check_words(path, list(zip(*rest, strict=True)), start)
        names = COLUMN_NAMES.get(width - start - 1)
        tags = Counter(cells[1] for cells in rest) if names and len(names) > 1 else Counter()
        is_pos = notation_of(tags).keys() < tags.keys() and not all(map(NUMBER.fullmatch, tags))
        num_lemmas = sum(cells[0].lower() == cells[1].lower() for cells in rest) if tags else 0
        if names is None or (tags and (not is_pos or 2 * num_lemmas > len(rest))):
            names = [str(place + 1) for place in range(start + 1, width)]
    return {name: place for place, name in enumerate([WORD, *names], start)}


def _is_index(rows: Sequence[Row]) -> bool:
    """Return whether the first cells count the words of a sentence, from 1 or from 0."""
    first = [cells[0] for _, cells in rows]
    return not rows or (first[0] in ("0", "1") and first == [str(int(first[0]) + place) for place in range(len(rows))])


def _check_words(path: Path, values: Sequence[Sequence[str]], start: int) -> None:
    """Refuse a file whose words seem to be in another column: labels have fewer different values than words, or mark spans, and
    numbers and ids are no words. ``values``: those of each column from ``start`` on."""
    different = [set(of_column) for of_column in values]
    counts = [0 if all(map(_NO_WORD.fullmatch, column)) else len(column) for column in different]
    place = max(range(len(counts)), key=counts.__getitem__)
    first = Counter(values[0])
    if (counts[place] > max(2 * counts[0], FEW_WORDS)) or (place > 0 and notation_of(first).keys() >= first.keys()):
        others = [str(number + 1) for number in range(start + len(counts))]
        others[start + place] = WORD
        described = f"{len(first):,} different {'values' if counts[0] else 'numbers or ids'}"
        problem = f"{path}: column {start + 1} has {described}, column {start + place + 1} {counts[place]:,}"
        advice = f"put them first, or name all columns, such as --columns {','.join(others)}"
        raise UserError(f"{problem}: if the words are there, {advice}")


def _read_table(path: Path, labeled: bool) -> WordFile:
    """Read a table with a row for each sentence: a list of words, and lists of labels that are as long."""
    table, sentences, num_blank = TableFile(path), [], 0
    words_name = next((name for name in _WORD_NAMES if name in table.columns), None)
    names, notes = _label_columns(table, words_name) if labeled else ([], [])
    for number, row in table.rows():
        where, words = f"{path}, row {number}", row.get(words_name)
        if not isinstance(words, list):
            listed = f"the columns are {', '.join(table.columns):.200}"
            found = f"{words_name} is a text; {listed}" if isinstance(words, str) else listed
            raise UserError(f"{where}: no list of words called tokens or words: give one ({found})")
        for word in words:
            if not isinstance(word, str) or re.search(r"[\t\r\n]", word.strip()):
                raise UserError(f"{where}: {words_name} has {word!r:.60}, no word: correct it, or leave the row out")
        if labeled and not names:
            raise UserError(f"{where}: no list of labels that is as long as {words_name}, such as ner_tags: give one")
        columns = {name: row[name] for name in names}
        for name, labels in columns.items():
            if not isinstance(labels, list) or len(labels) != len(words):
                count = len(labels) if isinstance(labels, list) else "no"
                problem = f"{where}: {words_name} has {len(words)} words and {name} {count} labels"
                raise UserError(f"{problem}: correct it, or remove {name} if it does not label words")
            for label in labels:
                if isinstance(label, int):
                    raise UserError(f"{where}: {name} has numbers without names ({label!r:.20}): {NAMES_OF_NUMBERS}")
                if not isinstance(label, str) or not label.strip() or not label.isprintable():
                    raise UserError(f"{where}: {name} has {label!r:.60}, no label: correct it, or leave the row out")
        kept = [place for place, word in enumerate(words) if not is_blank(word)]
        num_blank += len(words) - len(kept)
        chosen = {name: [labels[place].strip() for place in kept] for name, labels in columns.items()}
        sentences.append(Sentence([words[place].strip() for place in kept], chosen, [number] * len(kept)))
    if num_blank:
        notes.append(f"{num_blank:,} blank words are left out")
    return WordFile(path, ROWS, sentences, notes)


def _label_columns(table: TableFile, words_name: str | None) -> tuple[list[str], list[str]]:
    """Return the names of the lists of labels, the likely ones last, and notes. The row with most words decides."""

    def num_words(row: dict[str, Any]) -> int:
        return len(row[words_name]) if isinstance(row.get(words_name), list) else -1

    row = max((row for _, row in table.rows()), key=num_words, default={})
    texts, called = [], []
    for name, values in row.items():
        if name == words_name or not isinstance(values, list):
            continue
        if re.search(r"(tag|label)s?$", name) and all(isinstance(value, str | int | None) for value in values):
            called.append(name)
        elif len(values) == num_words(row) and all(isinstance(value, str) for value in values):
            texts.append(name)
    numbers = [name for name in called if any(isinstance(value, int) for value in row[name])]
    if len(numbers) == len(called):
        return texts + called, []
    notes = [f"{name} is left out: it has numbers without names" for name in numbers]
    return texts + [name for name in called if name not in numbers], notes

"""Sentences of divided words, with labels or without: column files, CoNLL-U, tables of lists.

What a file is depends on its content, not on its name. Messages name the file and the line.
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.files import FOLDER, JSONL, PARQUET, is_blank, kind_of, read_lines
from amos_fairseq.inputs.schemes import notation_of
from amos_fairseq.inputs.sentences import Sentence, WordFile, join_unspaced_words, spaces_in
from amos_fairseq.inputs.tables import TableFile

WORD = "word"  # in --columns, the column of the words
# Names of the columns after the word, by their number: CoNLL-2000 has two, CoNLL-2003 three. The second of two is called ner if
# its spans are no chunks of CoNLL-2000, but entities, as in CoNLL-2002.
_CHUNKS = {"ADJP", "ADVP", "CONJP", "INTJ", "LST", "NP", "PP", "PRT", "SBAR", "UCP", "VP"}
COLUMN_NAMES = {1: ("label",), 2: ("pos", "chunk"), 3: ("pos", "chunk", "ner")}
CONLLU_NAMES = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
CONLLU, CONLLU_PLUS, COLUMNS, LINES = "CoNLL-U", "CoNLL-U Plus", "one word a line", "one sentence a line"
ROWS = "one sentence a row"
NAMES_OF_NUMBERS = "write names such as B-PER, or use save_to_disk or to_parquet of datasets, which keep them"
MOST = 0.9  # of the lines of a column file have the same number of columns
LONGEST_SENTENCE = 1000  # words
_TABLES = (JSONL, PARQUET, FOLDER)
_NO_SENTENCE = "has no sentence: expected one word a line"
_DOCUMENT_START = "-DOCSTART-"
_BLANKS = re.compile(r"[ \t]+")  # not str.split(), which also splits at a no-break space inside a word
_COMMENT = re.compile(r"#(\s|$|[\w.]+ *=|(begin|end) document)")  # not #hashtag
_GLUED = re.compile(r"\w[.!?,;:\"”»)]+$")
_TEXT, _NO_SPACE_AFTER = re.compile(r"# *text *= *(.+)"), "SpaceAfter=No"
_GLOBAL_COLUMNS = re.compile(r"# *global\.columns *= *(.+)")
_WORD_ID, _RANGE_OR_EMPTY_NODE = re.compile(r"[0-9]+([-.][0-9]+)?"), re.compile(r"[0-9]+[-.][0-9]+")
_WORD_NAMES = ("tokens", "words", "token", WORD, "form", "text")
_INDEX_NAMES = ("id", "index", "idx", "no", "nr")
_LABEL_NAMES = ("label", "tag", "pos", "ner", "chunk", "upos", "xpos", "lemma", "iob", "bio", "ne", "entity")
_HEADER = {*_WORD_NAMES, *_INDEX_NAMES, *_LABEL_NAMES, *(f"{name}s" for name in _LABEL_NAMES), "ner_tag", "ner_tags"}
_QUOTED = re.compile('"([^"]*"")+[^"]*"')  # a field of CSV with quotes inside
FEW_WORDS = 5  # are no reason to doubt their place
NUMBER = re.compile(r"[-+]?[0-9]+([.,][0-9]+)?")
_NO_WORD = re.compile(r"[A-Z]?[\W\d_]+")  # a number, or an id such as T12
# Other forms: the pattern of most lines, the name, and the advice.
_OTHER_FORMS = (
    (
        r"[^\s,;|]*([,;|][^\s,;|]*)+\s*$",
        "CSV",
        "write tabs, for example with pandas: read_csv(FILE, sep=SEPARATOR, header=None, dtype=str, keep_default_na=False, "
        "skip_blank_lines=False).to_csv(NEW, sep='\\t', quoting=3, header=False, index=False)",
    ),
    (
        r"[^\s/]+/\S+( +[^\s/]+/\S+)*\s*$",
        "word/tag",
        r"write one a line, for example with sed -E 's:/([^/ ]+)( |$):\t\1\n:g' FILE > NEW",
    ),
)


class Row(NamedTuple):
    """A line of a file, and its cells; none where a sentence ends."""

    number: int
    line: str
    cells: list[str]


def read_sentences(path: Path, names: Sequence[str] | None = None, labeled: bool = True) -> WordFile:
    """Read sentences in any of these forms; text may be compressed (.gz, .xz, .zst). Words that look blank are left out.

    - CoNLL-U, and CoNLL-U Plus, which begins with ``# global.columns = ...``. Words are the syntactic ones, without ranges
      (``1-2``) and empty nodes (``1.1``). The spaces between them are those of ``# text``, or of SpaceAfter.
    - One word a line, its labels behind it, separated by tabs or else spaces; a blank line, or one with ``-DOCSTART-``, after
      each sentence. An index before the word, comments and a header are left out, with a note.
    - JSON lines, Parquet, or a folder of ``save_to_disk``: ``tokens`` (or ``words``) is a list, and so are the labels.
    - Unless ``labeled``, one sentence a line with blanks between its words: if no line has a tab, and if there is no blank
      line, or one between all lines, or fewer than nine lines in ten have the same number of words.

    Unless ``labeled``, the sentences have no columns.

    ``names``: of the columns behind the word, or of all with ``word`` among them; by default :data:`COLUMN_NAMES`, "2", ...
    """
    is_table = kind_of(path) in _TABLES
    rows = [] if is_table else list(_rows(path))
    file = _read_table(path, labeled) if is_table else _read_word_lines(path, rows, names, labeled)
    if names and file.kind != COLUMNS:
        raise UserError(f"--columns names those of column files; {path} is {file.kind}: leave it out")
    if not labeled:
        file.sentences = [dataclasses.replace(sentence, columns={}) for sentence in file.sentences]
    sentences = [sentence.without_blank_words() for sentence in file.sentences]
    if num_blank := sum(map(len, (one.words for one in file.sentences))) - sum(len(one.words) for one in sentences):
        file.notes.append(f"{num_blank:,} blank words are left out")
    file.left_out = num_blank + sum(row.line.startswith(_DOCUMENT_START) for row in rows)
    file.left_out += sum(sentence.words in ([], [_DOCUMENT_START]) for sentence in file.sentences)
    sentences = [sentence for sentence in sentences if sentence.words not in ([], [_DOCUMENT_START])]
    if not sentences:
        raise UserError(f"{path} {_NO_SENTENCE}")
    return join_unspaced_words(dataclasses.replace(file, sentences=sentences))


def read_conllu(path: Path) -> WordFile:
    """Read a CoNLL-U file, with all of its words; refuse others."""
    file = (
        WordFile(path, ROWS, [])
        if kind_of(path) in _TABLES
        else _read_word_lines(path, list(_rows(path)), None, labeled=False)
    )
    if file.kind != CONLLU:
        raise UserError(f"{path} is not CoNLL-U but {file.kind}: give ten columns separated by tabs, numbers first")
    return join_unspaced_words(file)


def _read_word_lines(path: Path, rows: list[Row], names: Sequence[str] | None, labeled: bool) -> WordFile:
    words = [row for row in rows if row.cells and not _COMMENT.match(row.line)]
    if not words:
        raise UserError(f"{path} {_NO_SENTENCE}")
    width, count = Counter(len(row.cells) for row in words).most_common(1)[0]
    if width != len(CONLLU_NAMES) and all(len(row.cells) == width and not row.cells[-1] for row in words):
        width -= 1  # each line ends with a tab
        rows, words = ([row._replace(cells=row.cells[:width]) for row in part] for part in (rows, words))
    global_columns = _GLOBAL_COLUMNS.match(rows[0].line)
    numbered = sum(_WORD_ID.fullmatch(row.cells[0]) is not None for row in words)
    if global_columns or (width == len(CONLLU_NAMES) and numbered >= MOST * len(words)):
        return _read_conllu_rows(path, rows, global_columns[1].split() if global_columns else CONLLU_NAMES)
    for pattern, name, advice in _OTHER_FORMS:
        if 2 * sum(re.match(pattern, row.line) is not None for row in words) > len(words):
            raise UserError(f"{path}: {words[0].line!r:.60} is {name}: {advice}")
    has_blank_lines = any(not row.cells for row in rows[: words[-1].number])
    first_tab = next((row.number for row in words if "\t" in row.line), None)
    blocks = [list(block) for has_cells, block in itertools.groupby(rows, key=lambda row: bool(row.cells)) if has_cells]
    # Paragraphs of equal length are no columns.
    is_text = count < MOST * len(words) or not has_blank_lines or all(len(block) == 1 for block in blocks)
    if not labeled and first_tab is None and is_text:
        sentences = [Sentence(cells, {}, lines=[number] * len(cells)) for number, _, cells in rows if cells]
        glued = sum(bool(_GLUED.search(row.cells[-1])) for row in words)
        advice = "if signs are words in the labeled data, separate them by blanks"
        found = f"{glued:,} of {len(words):,} sentences end with a word and a sign without a blank between them"
        notes = [f"{found}: {advice}"] if glued > len(words) / 10 else []
        return WordFile(path, LINES, sentences, notes)
    if labeled and (width == 1 or (not names and 2 * count < len(words))):
        expected = "expected one word a line with its labels behind it, separated by a tab or spaces"
        row = next((row for row in words if len(row.cells) == 1), words[0])
        raise UserError(f"{path}, line {row.number}: {expected}, not {row.line!r:.60}")
    if not has_blank_lines and len(words) > LONGEST_SENTENCE:
        why = f"line {first_tab} has a tab, so the file has one word a line, but" if first_tab else "there is"
        raise UserError(f"{path}: {why} no blank line in {len(words):,} lines: separate sentences by blank lines")
    notes = [] if has_blank_lines or len(words) == 1 else ["no line is blank: all words are one sentence"]
    rows = _without_comments(rows, {"#"} | {row.cells[-1] for row in words}, width, notes)
    expected = f"as in most lines{f'; line {first_tab} has a tab' if first_tab else ''}"
    if names:
        names = names if WORD in names else [WORD, *names]
        if width != len(names) + 1:  # one more may be an index
            width, expected = len(names), f"({', '.join(names)})"
    sentences = _divided(path, rows, width, expected)
    places = _places_of_columns(path, sentences, names, labeled, notes)
    with_blank = sum(" " in row.cells[places[WORD]] for rows in sentences for row in rows)
    if 2 * with_blank > len(words):
        reason = f"{with_blank:,} of {len(words):,} words have blanks inside"
        raise UserError(f"{path}: {reason}: expected one word a line (amos classify reads texts with a label each)")
    quoted = [row.number for rows in sentences for row in rows if _QUOTED.fullmatch(row.cells[places[WORD]])]
    if quoted:
        advice = "if pandas wrote them, write them with quoting=3"
        notes.append(f"{len(quoted):,} words have the quotes of CSV, the first in line {quoted[0]}: {advice}")
    return WordFile(path, COLUMNS, [_sentence(rows, places, WORD) for rows in sentences if rows], notes)


def _read_conllu_rows(path: Path, rows: Sequence[Row], names: Sequence[str]) -> WordFile:
    places = {name.lower() if name.lower() in CONLLU_NAMES else name: place for place, name in enumerate(names)}
    if "form" not in places or len(places) < len(names):
        raise UserError(f"{path}, line 1: global.columns has {', '.join(names)}, but not FORM, or one of them twice")
    kind = CONLLU if tuple(places) == CONLLU_NAMES else CONLLU_PLUS
    columns = list(places)
    id_place, form, misc = places.pop("id", len(names)), places["form"], places.get("misc", len(names))
    has_space_after = misc < len(names) and any(_NO_SPACE_AFTER in row.line for row in rows)
    sentences, with_other_text = [], []
    for has_cells, block in itertools.groupby(rows, key=lambda row: bool(row.cells)):
        if not has_cells:
            continue
        text, ranges, kept = None, {}, []
        for row in block:
            row_id = "".join(row.cells[id_place : id_place + 1])  # without the column, no cell
            if row.line.startswith("#"):
                match = _TEXT.match(row.line)
                text = match[1] if match else text
            elif not _RANGE_OR_EMPTY_NODE.fullmatch(row_id):
                kept.append(row)
            elif "-" in row_id and len(row.cells) == len(names):
                first, _, last = row_id.partition("-")
                ranges[first] = (last, row)
        for words in _divided(path, kept, len(names), f"of {kind}, separated by tabs", columns):
            for expected, (number, _, cells) in enumerate(words, start=1):
                if cells[id_place : id_place + 1] not in ([], [str(expected)]):
                    hint = ": a blank line before it is missing" if cells[id_place] == "1" else ""
                    raise UserError(f"{path}, line {number}: word id {cells[id_place]:.20}, expected {expected}{hint}")
            tokens = list(_tokens(words, ranges, form))
            after = None if text is None else spaces_in(text, [token.cells[form] for token, _ in tokens])
            if text is not None and after is None:
                with_other_text.append(words[0].number)
            if after is None and has_space_after:
                after = [_NO_SPACE_AFTER not in token.cells[misc].split("|") for token, _ in tokens]
            sentences.append(_sentence(words, places, "form"))
            if after is not None:
                sentences[-1].spaces = _spaces_of_words(tokens, after, form)
    forms = Counter(word for sentence in sentences for word in sentence.words)
    if 2 * forms["_"] > forms.total():
        raise UserError(f"{path}: {forms['_']:,} of {forms.total():,} words are _: this is a treebank without its text")
    notes = []
    if with_other_text:
        where = f"{len(with_other_text):,} sentences have other words in # text, the first in line {with_other_text[0]}"
        notes.append(f"{where}: {'SpaceAfter gives their spaces' if has_space_after else 'it is not used'}")
    return WordFile(path, kind, sentences, notes)


def _tokens(words: list[Row], ranges: dict[str, tuple[str, Row]], form: int) -> Iterator[tuple[Row, list[str]]]:
    """Yield each token of the text of CoNLL-U, and its words: one, or those of a range (``1-2``)."""
    numbers = {str(number): number for number in range(1, len(words) + 1)}
    place = 0
    while place < len(words):
        last, token = ranges.get(str(place + 1), ("", words[place]))
        end = max(numbers.get(last, 0), place + 1)
        yield token, [row.cells[form] for row in words[place:end]]
        place = end


def _spaces_of_words(tokens: list[tuple[Row, list[str]]], after: list[bool], form: int) -> list[bool]:
    """Return whether a space follows each word; ``after``: whether one follows each token. The words of a range that are not
    its characters, as de les for des, have spaces between them, so that each has a piece of its own."""
    spaces = []
    for (token, words), space in zip(tokens, after, strict=True):
        spaces += [token.cells[form] != "".join(words)] * (len(words) - 1) + [space]
    return [*spaces[:-1], False]


def _sentence(rows: Sequence[Row], places: dict[str, int], words: str) -> Sentence:
    columns = {name: [row.cells[place] for row in rows] for name, place in places.items()}
    own = columns.pop(WORD) if words == WORD else columns[words]
    return Sentence(own, columns, lines=[row.number for row in rows])


def _rows(path: Path) -> Iterator[Row]:
    """Yield each line, divided at tabs if it has one, else at blanks."""
    for number, content in read_lines(path):
        line = content.rstrip("\r\n")
        if "\r" in line or "\0" in line:
            what = "carriage return" if "\r" in line else "NUL character"
            raise UserError(f"{path}, line {number}: a {what} inside of the line: convert to Unix line ends, UTF-8")
        cells = []
        if not is_blank(line) and not line.startswith(_DOCUMENT_START):
            cells = [cell.strip(" ") for cell in line.split("\t")] if "\t" in line else _BLANKS.split(line.strip(" "))
        yield Row(number, line, cells)


def _without_comments(rows: list[Row], labels: set[str], width: int, notes: list[str]) -> list[Row]:
    """Leave out comments of a column file. ``# O`` is a word if its label is # (Penn Treebank), or that of another word."""

    def is_comment(row: Row) -> bool:
        return _COMMENT.match(row.line) is not None and not (len(row.cells) == width and row.cells[-1] in labels)

    if comments := [row.number for row in rows if is_comment(row)]:
        notes.append(f"comments are left out ({len(comments):,}, the first in line {comments[0]})")
    return [row for row in rows if not is_comment(row)]


def _divided(path: Path, rows: Iterable[Row], width: int, expected: str, names: Sequence[str] = ()) -> list[list[Row]]:
    """Return the rows of each sentence; refuse a row with an empty cell or another number than ``width``."""
    sentences: list[list[Row]] = [[]]
    for row in rows:
        where = f"{path}, line {row.number}"
        if not row.cells:
            sentences.append([])
        elif len(row.cells) != width:
            raise UserError(f"{where}: {len(row.cells)} columns, expected {width} {expected}")
        elif not all(row.cells):
            place = row.cells.index("")
            name = f" ({names[place]})" if names else ""
            raise UserError(f"{where}: column {place + 1}{name} is empty: fill it, or remove the line")
        else:
            sentences[-1].append(row)
    return [sentence for sentence in sentences if sentence]


def _places_of_columns(
    path: Path, sentences: list[list[Row]], names: Sequence[str] | None, labeled: bool, notes: list[str]
) -> dict[str, int]:
    """Return the place of each column of a column file by its name, that of the words as :data:`WORD`. A header is removed;
    ``names``: of all columns, but for an index."""
    first = sentences[0][0]
    header, width = [cell.lower() for cell in first.cells], len(first.cells)
    rest = [row.cells for rows in sentences for row in rows if row.cells != first.cells]
    word_name = next((name for name in _WORD_NAMES if name in header), None)
    if word_name and rest and _HEADER.issuperset(header) and all(cells[-1].lower() != header[-1] for cells in rest):
        repeated = sum(map(len, sentences)) - len(rest) - 1
        more = f", as {repeated:,} more" if repeated else ""
        notes.append(f"line {first.number} is no word, but names the columns{more}: {', '.join(header)}")
        sentences[:] = ([row for row in rows if row.cells != first.cells] for rows in sentences)
        if names is None and len(set(header)) == width > 1:
            names = [WORD if name == word_name else name for name in header]
    if names and len(names) == width:
        return {name: place for place, name in enumerate(names) if name not in _INDEX_NAMES}
    start = 0
    if width > 1 + labeled and all(map(_is_index, sentences)) and any(len(rows) > 1 for rows in sentences):
        notes.append("column 1 is the index of the word in its sentence, and left out")
        start = 1
    if names and not start:
        problem = f"{path}: {width} columns, expected {len(names)} ({', '.join(names)})"
        raise UserError(f"{problem}: --columns names those after the word, or all, with {WORD} among them")
    if names is None:
        columns = list(zip(*(row.cells[start:] for rows in sentences for row in rows), strict=True))
        _check_words(path, columns, start)
        names = [WORD, *(COLUMN_NAMES.get(len(columns) - 1) or ())]
        if len(columns) > 2:
            tags = Counter(columns[1])
            is_pos = notation_of(tags).keys() < tags.keys() and not all(map(NUMBER.fullmatch, tags))
            num_lemmas = sum(word.lower() == tag.lower() for word, tag in zip(*columns[:2], strict=True))
            if len(names) == 1 or not is_pos or 2 * num_lemmas > len(columns[0]):
                names = [WORD, *(str(place + 1) for place in range(start + 1, width))]
            elif names[-1] == "chunk" and not _CHUNKS.issuperset(_types_of_spans(columns[-1])):
                names[-1] = "ner"
    return {name: place for place, name in enumerate(names, start)}


def _types_of_spans(labels: Sequence[str]) -> set[str]:
    """Return the types, such as NP and LOC, of labels that mark spans; nothing if these mark none."""
    return {label.partition("-")[2] for label in notation_of(Counter(labels)).values()} - {""}


def _is_index(rows: Sequence[Row]) -> bool:
    """Return whether the first cells count the words of a sentence, from 1 or from 0."""
    first = [row.cells[0] for row in rows]
    return not rows or (first[0] in ("0", "1") and first == [str(int(first[0]) + place) for place in range(len(rows))])


def _check_words(path: Path, values: Sequence[Sequence[str]], start: int) -> None:
    """Refuse a file whose words seem to be in another column. ``values``: those of each column from ``start`` on."""
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
    table, sentences = TableFile(path), []
    words_name = next((name for name in _WORD_NAMES if name in table.columns), None)
    names, notes = _label_columns(table, words_name) if labeled else ([], [])
    for number, row in table.rows():
        words, columns = row.get(words_name), {name: row[name] for name in names}
        problem = _problem_of_words(table, words_name, words)
        if labeled and not problem:
            problem = _problem_of_labels(words_name, len(words), columns)
        if problem:
            raise UserError(f"{path}, row {number}: {problem}")
        labels = {name: [label.strip() for label in of_column] for name, of_column in columns.items()}
        sentences.append(Sentence([word.strip() for word in words], labels, lines=[number] * len(words)))
    return WordFile(path, ROWS, sentences, notes)


def _problem_of_words(table: TableFile, name: str | None, words: Any) -> str | None:
    if not isinstance(words, list):
        found = f"{name} is a text; " if isinstance(words, str) else ""
        return f"no list of words called tokens or words: give one ({found}it has {', '.join(table.columns):.200})"
    wrong = (word for word in words if not isinstance(word, str) or re.search(r"[\t\r\n]", word.strip()))
    return next((f"{name} has {word!r:.60}, no word: correct it, or leave the row out" for word in wrong), None)


def _problem_of_labels(words_name: str, num_words: int, columns: dict[str, Any]) -> str | None:
    if not columns:
        return f"no list of labels that is as long as {words_name}, such as ner_tags: give one"
    for name, labels in columns.items():
        count = len(labels) if isinstance(labels, list) else "no"
        if count != num_words:
            problem = f"{words_name} has {num_words} words and {name} {count} labels"
            return f"{problem}: correct it, or remove {name} if it does not label words"
        for label in labels:
            if isinstance(label, int):
                return f"{name} has numbers without names ({label!r:.20}): {NAMES_OF_NUMBERS}"
            if not isinstance(label, str) or not label.strip() or not label.isprintable():
                return f"{name} has {label!r:.60}, no label: correct it, or leave the row out"
    return None


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


def heads_of(path: Path, sentence: Sentence) -> list[int]:
    """Return the number of the head of each word of CoNLL-U, 0 for the root."""
    heads = sentence.columns["head"]
    for number, (line, word, head) in enumerate(zip(sentence.lines, sentence.words, heads, strict=True), start=1):
        # int() of very many digits fails.
        if not head.isdecimal() or len(head) > 9 or int(head) > len(heads) or int(head) == number:
            raise UserError(f"{path}, line {line}: the head {head!r:.20} of {word!r:.60} is no other word: correct it")
    return list(map(int, heads))

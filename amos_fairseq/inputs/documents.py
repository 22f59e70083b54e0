"""The documents of an input: plain text, or a column of a table.

A document is ``bytes``: valid UTF-8, one non-empty stripped paragraph per line, each line ended by a line feed.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from amos_fairseq.errors import UserError
from amos_fairseq.inputs import TEXT_COLUMN
from amos_fairseq.inputs.file_kinds import (
    FOLDER,
    LARGEST_DOCUMENT_BYTES,
    PARQUET,
    TEXT,
    TSV,
    OnRead,
    ignore,
    kind_of,
    look_at,
    refuse_markup,
)
from amos_fairseq.inputs.input_files import (
    MISSING_WORDS,
    OFTEN_MISSING_WORDS,
    TableFile,
    clean_lines,
    is_much,
    lines_of,
    refuse_large,
)
from amos_fairseq.output.terminal import say

BLANK, LINE = "blank", "line"  # what ends a document of plain text, beside a number of lines

# At the start of a paragraph a tag, or an object of JSON; anywhere special tokens, <br>, entities, a written \n, [[ and
# {{ of a wiki.
# Each part begins with a character, not with an anchor: such patterns are found faster.
_MARKUP = re.compile(
    rb"<((?<![^\n]<)[!/?]?[A-Za-z][^<>\n]*|\|\w+\||/?s|unk|pad|mask|[be]os|br ?/?)>|\[((MASK|SEP|CLS|PAD|UNK|[BE]OS)\]|\[+)"
    rb'|&(quot|amp|apos|nbsp|[lg]t|#\d+);|\\n(?<=[.!?"]\\n)(?![a-z])|\{((?<![^\n]\{)"\w+":|\{+)'
)
_MARKUP_CHARACTERS = (b"<", b"[", b"&", b"\\", b"{")
_MARKS = r"[-*=_~#+•·— \t\r]+"  # lines without text, as sed spells it too
# Lines between documents: marks, and what ends a document in files for other programs.
_BETWEEN_DOCUMENTS = re.compile(rf"{_MARKS}|(?P<separator><\|\w+\|>|</s>|<eos>|\[(EOS|SEP)\])")
# The name of a column in the first line of a table; pandas writes none for its index.
_COLUMN_NAME = re.compile(r'"?[^\W\d][\w .()#/-]{0,39}"?')
_COLUMNS_OF_CONLLU = 10
_DAMAGED = ("\ufffd".encode(), b"\x1b", b"\b")  # of another encoding, of a terminal, and overstrikes
_MISSING = MISSING_WORDS | OFTEN_MISSING_WORDS


def document_end(path: Path, given: str | int | None) -> str | int | None:
    """Return what ends a document of an input: None for a table, what is ``given``, or what the text shows.

    A text of several lines without a blank one between them has a document on each LINE; else BLANK lines end one.
    """
    if kind_of(path) != TEXT:
        return None
    if given is not None:
        return given
    size, num_lines, is_separated = 0, 0, False
    for _, line in lines_of(path):
        for text in clean_lines(line.rstrip("\r\n")):
            if text and is_separated:
                return BLANK
            num_lines += bool(text)
            is_separated = num_lines > 0 and not text
        size += len(line)
        if size > LARGEST_DOCUMENT_BYTES:  # no document may be larger
            break
    return LINE if num_lines > 1 else BLANK


def read_documents(
    path: Path,
    column: str = TEXT_COLUMN,
    csv_quotes: bool = False,
    document: str | int | None = None,
    on_read: OnRead = ignore,
) -> Iterator[bytes]:
    """Yield the documents of an input in order, and an empty one for each row of a table that has no text.

    Each row of a table and each line of JSON is one, in the field ``column``. In plain text blank lines, each line or a number
    of lines end one: ``document``, by default see :func:`document_end`.
    """
    kind, first_lines = look_at(path)
    table = ""
    if kind == TEXT:
        table = _table_in(path, first_lines, column)
        refuse_markup(path, first_lines)
        documents = _documents_of_text(path, document or document_end(path, None), on_read)
    else:
        documents = _documents_of_table(TableFile(path, csv_quotes=csv_quotes, on_read=on_read), column)
    size = tags_size = num_tags = num_damaged = 0
    first_tag = b""
    for each in documents:
        size += len(each)
        num_damaged += sum(map(each.count, _DAMAGED))
        if any(character in each for character in _MARKUP_CHARACTERS):
            for match in _MARKUP.finditer(each):  # no list: a text of brackets has very many
                num_tags, tags_size = num_tags + 1, tags_size + match.end() - match.start()
                first_tag = first_tag or match.group()
        yield each
    if not size:
        place = "" if kind == TEXT else f" in {column}"
        raise UserError(f"{path} contains no text{place}: remove it from the inputs or fill it")
    if table:
        say(f"WARNING: {path} is read as text, but its first lines look like {table}")
    if num_damaged:
        say(
            f"WARNING: {path}: {num_damaged:,} characters are U+FFFD, ESC or BS, of another encoding or a terminal: convert "
            "the text from its source again"
        )
    if num_tags:
        say(
            f"{'WARNING: ' if is_much(num_tags, tags_size / size) else ''}{path}: {num_tags:,} tags, entities (such as &amp;), "
            "special tokens (such as <unk>), or parts of JSON or of a wiki stay in the text; the first is "
            f"{first_tag[:60].decode('utf-8', 'replace')}"
        )


def _table_in(path: Path, lines: Sequence[str], column: str) -> str:
    """Return what a text with these first lines seems to be, and advice; refuse one whose first line names the column."""
    lines = [line.rstrip("\r\n") for line in lines]
    if len(lines) < 2:
        return ""
    tabs, num_equal = Counter(line.count("\t") for line in lines).most_common(1)[0]
    is_table = tabs > 0 and 2 * num_equal > len(lines)
    if is_table and tabs == _COLUMNS_OF_CONLLU - 1:
        return "CoNLL-U: take its sentences, for example with sed -n 's/^# text = //p' FILE > NEW"
    for separator in "\t,;|":
        names = lines[0].split(separator)
        is_header = len(names) > 1 and all(map(_COLUMN_NAME.fullmatch, names if names[0] else names[1:]))
        num_rows = sum(line.count(separator) >= len(names) - 1 for line in lines[1:])
        if is_header and 2 * num_rows >= len(lines) - 1:
            is_table = True
            if column in (name.strip('"') for name in names):
                raise UserError(
                    f"{path} has the column {column} in its first line: give a table a name that ends in .csv or .tsv"
                )
    advice = "give it a name that ends in .csv or .tsv, or take its text, for example with cut -f2 FILE > NEW"
    return f"a table: {advice}" if is_table else ""


def _documents_of_text(path: Path, end: str | int, on_read: OnRead) -> Iterator[bytes]:
    most_lines = {BLANK: math.inf, LINE: 1}.get(end, end)
    document, num_lines, start = bytearray(), 0, 0  # a list of many short paragraphs would take many times their size
    first_separator, num_marks, first_mark = 0, 0, ""
    for number, line in lines_of(path, on_read):
        for text in clean_lines(line.rstrip("\r\n")):
            if text:
                start = start if document else number
                document += text.encode("utf-8")
                document += b"\n"
                num_lines += 1
            if document and (num_lines == most_lines or (end == BLANK and not text)):
                yield bytes(document)
                document, num_lines = bytearray(), 0
            if between := _BETWEEN_DOCUMENTS.fullmatch(text):
                if between["separator"] is None:
                    num_marks, first_mark = num_marks + 1, first_mark or text
                elif first_separator:
                    raise UserError(
                        f"{path}: lines {first_separator:,} and {number:,} are {text}, which ends a document for other "
                        "programs: replace such lines by blank ones, for example with sed"
                    )
                else:
                    first_separator = number
        refuse_large(document, path, "line", start)
    if document:
        yield bytes(document)
    if num_marks > 1:
        say(
            f"WARNING: {path}: {num_marks:,} lines such as {first_mark[:20]!r} have no letter or digit: if they are between "
            f"documents, make them blank, for example with sed -E 's/^{_MARKS}$//' FILE > NEW"
        )


def _documents_of_table(table: TableFile, column: str) -> Iterator[bytes]:
    if column not in table.columns:
        names = ", ".join(map(repr, table.columns))
        raise UserError(
            f"{table.path}: no column {column!r:.60}, it has {names[:200]}: give the name of the one with the text as "
            "--text-column NAME, or rename a file that is plain text to .txt"
        )
    unit = "row" if table.kind in (PARQUET, FOLDER) else "line"
    num_rows = without_text = first = 0
    for number, row in table.rows([column]):
        text = row[column]
        if not isinstance(text, str | None):
            raise UserError(f"{table.path}, {unit} {number}: {column} is {text!r:.60}, not a text")
        is_missing = text is None or text.strip() in _MISSING
        document = "" if is_missing else "".join(f"{line}\n" for line in clean_lines(text) if line)
        encoded = document.encode("utf-8")
        refuse_large(encoded, table.path, unit, number)
        num_rows += 1
        if not encoded:
            without_text, first = without_text + 1, first or number
        yield encoded
    if others := [name for name in table.columns if name != column]:
        say(f"{table.path}: text: {column}; not read: {', '.join(others)[:200]}")
    if without_text:
        say(
            f"{table.path}: {without_text:,} of its rows, the first in {unit} {first:,}, have no text in {column} "
            "(missing, blank, NULL or another such word, or half of a surrogate pair) and are skipped"
        )
    if table.num_blank_lines:
        say(f"{table.path}: {table.num_blank_lines:,} blank lines are left out")
    if broken := table.broken_lines:
        share = len(broken) / (len(broken) + num_rows)
        say(
            f"{'WARNING: ' if is_much(len(broken), share) else ''}{table.path}: {len(broken):,} of its rows ({share:.1%}), the "
            f"first in line {broken[0]:,}, do not have the {len(table.columns)} columns of its first line and are left out"
            + (" (if a program wrote it as CSV, give --csv-quotes)" if table.kind == TSV else "")
        )

"""The documents of an input: plain text, or a column of a table.

A document is ``bytes``: valid UTF-8, one non-empty stripped paragraph per line, each line ended by a line feed.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from amos_fairseq.errors import UserError
from amos_fairseq.output.terminal import say
from amos_fairseq.text import TEXT_COLUMN
from amos_fairseq.text.file_kinds import (
    FOLDER,
    LARGEST_DOCUMENT_BYTES,
    PARQUET,
    TEXT,
    TSV,
    OnRead,
    first_lines,
    ignore,
    kind_of,
    refuse_markup,
)
from amos_fairseq.text.input_files import TableFile, clean_lines, read_lines, refuse_large

BLANK, LINE = "blank", "line"  # what ends a document of plain text, beside a number of lines

# At the start of a paragraph a tag, or an object of JSON; anywhere special tokens, <br>, entities, a written \n.
# Each part begins with a character, not with an anchor: such patterns are found faster.
_MARKUP = re.compile(
    rb"<((?<![^\n]<)[!/?]?[A-Za-z][^<>\n]*|\|\w+\||/?s|unk|pad|mask|[be]os|br ?/?)>|\[(MASK|SEP|CLS|PAD|UNK|[BE]OS)\]"
    rb'|&(quot|amp|apos|nbsp|[lg]t|#\d+);|\\n(?<=[.!?"]\\n)(?![a-z])|\{(?<![^\n]\{)"\w+":'
)
_MARKS = r"[-*=_~#+•·— \t\r]+"  # lines without text, as sed spells it too
# A line of names without blanks, as a table begins; what databases write for a missing value.
_HEADER = re.compile(r'"?\w+"?([\t,;]"?\w+"?)+')
_DATABASE_NULL = "\\N"
# Lines that end a document in files for other programs.
_is_mark = re.compile(_MARKS).fullmatch
_SEPARATOR = re.compile(r"<\|\w+\|>|</s>|<eos>|\[(EOS|SEP)\]")


def document_end(path: Path, given: str | int | None) -> str | int | None:
    """Return what ends a document of an input: None for a table, what is ``given``, or what the text shows.

    A text of several lines without a blank one between them has a document on each LINE; else BLANK lines end one.
    """
    if kind_of(path) != TEXT:
        return None
    return given or _inferred_end(path)


def _inferred_end(path: Path) -> str:
    size, num_lines, is_separated = 0, 0, False
    for _, line in read_lines(path):
        for text in clean_lines(line.decode("utf-8").rstrip("\r\n")):
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
    kind = kind_of(path)
    if kind == TEXT:
        may_be_table = _looks_like_a_table(path, column)
        refuse_markup(path)
        documents = _documents_of_text(path, document or _inferred_end(path), on_read)
    else:
        documents = _documents_of_table(TableFile(path, csv_quotes=csv_quotes, on_read=on_read), column)
    is_empty, num_tags, first_tag = True, 0, b""
    for each in documents:
        is_empty = is_empty and not each
        if any(character in each for character in (b"<", b"[", b"&", b"\\", b'{"')):
            tags = [match.group() for match in _MARKUP.finditer(each)]
            num_tags, first_tag = num_tags + len(tags), first_tag or b"".join(tags[:1])
        yield each
    if is_empty:
        place = "" if kind == TEXT else f" in {column}"
        raise UserError(f"{path} contains no text{place}: remove it from the inputs or fill it")
    if kind == TEXT and may_be_table:
        say(
            f"WARNING: {path} is read as text, but its first lines look like a table: give it a name that ends in .csv or "
            ".tsv, or take its text, for example with cut -f2 FILE > NEW"
        )
    if num_tags:
        say(
            f"WARNING: {path}: {num_tags:,} tags, entities (such as &amp;), special tokens (such as <unk>) or parts of JSON "
            f"stay in the text; the first is {first_tag[:60].decode('utf-8', 'replace')}"
        )


def _looks_like_a_table(path: Path, column: str) -> bool:
    """Return whether a text begins with a header, or has tabs as a table has; refuse one whose header has the column."""
    lines = [line.decode("utf-8", "replace").strip() for line in first_lines(path)]
    has_header = len(lines) > 1 and _HEADER.fullmatch(lines[0]) is not None
    if has_header and column in re.findall(r"\w+", lines[0]):
        raise UserError(
            f"{path} has the column {column} in its first line: give a table a name that ends in .csv or .tsv"
        )
    tabs = {line.count("\t") for line in lines}
    return has_header or (len(lines) > 1 and len(tabs) == 1 and 0 not in tabs)


def _documents_of_text(path: Path, end: str | int, on_read: OnRead) -> Iterator[bytes]:
    most_lines = {BLANK: math.inf, LINE: 1}.get(end, end)
    document, lines, start = bytearray(), 0, 0  # a list of many short paragraphs would take many times their size
    separators: list[int] = []
    num_marks, first_mark = 0, ""
    for number, line in read_lines(path, on_read):
        for text in clean_lines(line.decode("utf-8").rstrip("\r\n")):
            if text:
                start = start if document else number
                document += f"{text}\n".encode()
                lines += 1
            if document and (lines == most_lines or (end == BLANK and not text)):
                yield bytes(document)
                document, lines = bytearray(), 0
            if _is_mark(text):
                num_marks, first_mark = num_marks + 1, first_mark or text
            if _SEPARATOR.fullmatch(text):
                separators.append(number)
                if len(separators) == 2:
                    raise UserError(
                        f"{path}: lines {separators[0]:,} and {number:,} are {text}, which ends a document for other programs: "
                        "replace such lines by blank ones, for example with sed"
                    )
        refuse_large(document, f"{path}: the document from line {start} on")
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
    without_text = first = 0
    for number, row in table.rows([column]):
        place = f"{table.path}, {unit} {number}"
        text = None if row[column] == _DATABASE_NULL else row[column]
        if not isinstance(text, str | None):
            raise UserError(f"{place}: {column} is {text!r:.60}, not a text")
        document = "".join(f"{line}\n" for line in clean_lines(text or "") if line).encode("utf-8")
        refuse_large(document, f"{place}: the document")
        if not document:
            without_text, first = without_text + 1, first or number
        yield document
    if others := [name for name in table.columns if name != column]:
        say(f"{table.path}: text: {column}; not read: {', '.join(others)[:200]}")
    if without_text:
        say(
            f"{table.path}: {without_text:,} of its rows, the first in {unit} {first:,}, have no text in {column} "
            "(missing, blank, \\N, or half of a surrogate pair) and are skipped"
        )
    if broken := table.broken_lines:
        say(
            f"{table.path}: {len(broken)} of its rows, the first in line {broken[0]}, do not have the {len(table.columns)} "
            "columns of its first line and are left out"
            + (" (if a program wrote it as CSV, give --csv-quotes)" if table.kind == TSV else "")
        )

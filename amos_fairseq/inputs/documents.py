"""The documents of an input: plain text, or a column of a table.

A document is ``bytes``: valid UTF-8, one non-empty stripped paragraph per line, each line ended by a line feed.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from amos_fairseq.errors import UserError
from amos_fairseq.inputs import BLANK, LINE, TEXT_COLUMN
from amos_fairseq.inputs.files import (
    TEXT,
    OnRead,
    clean_lines,
    ignore,
    kind_of,
    print_counts,
    print_first,
    read_lines,
    refuse_large,
)
from amos_fairseq.inputs.tables import TableFile, require_columns
from amos_fairseq.output.terminal import say

_UNDECODED = "\ufffd".encode()
_LARGEST_WIDTH = 200  # at which texts are wrapped
_ENDS = tuple(".!?:;\"')\u2026\u2019\u201d\u00bb")  # of sentences
_JOIN_LINES = """awk '{ gsub(/\\r/, "") } NF { $1 = $1; printf "%s ", $0; next } { print "\\n" }'"""


@dataclass
class DocumentFile:
    """An input of ``amos prepare text``.

    Attributes:
        column: of a table, the one of the text; each row is a document.
        document: what ends a document of plain text: a BLANK line, or each LINE.
        num_documents: counted by :meth:`read`.
        without_text: rows of a table that have no text, counted by :meth:`read`.
        form: the kind of file, for messages; set by :meth:`read`.
    """

    path: Path
    column: str = TEXT_COLUMN
    document: str = BLANK
    num_documents: int = 0
    without_text: int = 0
    form: str = ""

    def read(self, on_read: OnRead = ignore) -> Iterator[bytes]:
        """Yield the documents in order, and print at the end how many there are, and what was left out."""
        self.num_documents = self.without_text = 0
        table = None if kind_of(self.path) == TEXT else TableFile(self.path, on_read=on_read)
        self.form = TEXT if table is None else table.form
        num_undecoded, wrapping = 0, _Wrapping()
        for document in self._read_text(on_read, wrapping) if table is None else self._read_table(table):
            self.num_documents += 1
            num_undecoded += document.count(_UNDECODED)
            yield document
        if not self.num_documents:
            raise UserError(f"{self.path} contains no text: remove it from the inputs or fill it")
        if table is None:
            print_counts(self.path, self.num_documents, "documents", {})
        else:
            left_out = {f"without a text in {self.column}": self.without_text} | table.left_out
            print_counts(self.path, self.num_documents, table.counted("documents"), left_out)
        if num_undecoded:
            say(
                f"{self.path}: WARNING: {num_undecoded:,} characters U+FFFD: bytes that an earlier program did not decode"
            )
        if width := wrapping.width():
            what = f"most lines are wrapped at {width} characters, and each is read as a paragraph or document"
            how = f"between blank lines, {_JOIN_LINES} joins them (docs/converting.md)"
            say(f"{self.path}: WARNING: {what}: {how}")

    def print_first(self) -> None:
        """Print the kind and the first document; raise UserError if there is none."""
        document = next(self.read())
        is_text = self.form == TEXT
        form = f"{TEXT}, a document a line" if self.document == LINE else f"{TEXT}, blank lines between documents"
        paragraphs = document.decode("utf-8").removesuffix("\n").split("\n")
        columns = [] if is_text else [self.column]
        print_first(self.path, form if is_text else self.form, columns, " ¶ ".join(paragraphs))

    def _read_text(self, on_read: OnRead, wrapping: "_Wrapping") -> Iterator[bytes]:
        document, start = bytearray(), 0  # a list of many short paragraphs would take many times their size
        for number, line in read_lines(self.path, on_read):
            for text in clean_lines(line.rstrip("\r\n")):
                wrapping.add(text)
                if text:
                    start = start if document else number
                    document += text.encode("utf-8") + b"\n"
                if document and (self.document == LINE or not text):
                    yield bytes(document)
                    document.clear()
            refuse_large(document, self.path, f"the document from line {start} on")
        if document:
            yield bytes(document)

    def _read_table(self, table: TableFile) -> Iterator[bytes]:
        require_columns(table, [self.column], "choose one with --text-column")
        for number, row in table.rows([self.column]):
            text = row[self.column]
            if not isinstance(text, str | None):
                raise UserError(
                    f"{self.path}, row {number}: {self.column} is {text!r:.60}, not a text (docs/converting.md)"
                )
            document = "".join(f"{line}\n" for line in clean_lines(text or "") if line).encode("utf-8")
            refuse_large(document, self.path, f"row {number}")
            if document:
                yield document
            else:
                self.without_text += 1


class _Wrapping:
    """Whether a text is wrapped at a width: its lines end where the next word does not fit, and most inside of a sentence."""

    def __init__(self) -> None:
        self._before, self._num_pairs, self._num_inside = "", 0, 0
        self._changes = [0] * (_LARGEST_WIDTH + 22)  # sums: the pairs of lines that have each width

    def add(self, line: str) -> None:
        """Add the next line, "" for a blank one."""
        before, self._before = self._before, line
        if before and line:
            self._num_pairs += 1
            self._num_inside += line[0].islower() and not before.endswith(_ENDS)
            size = line.find(" ", 0, 20) if len(before) <= _LARGEST_WIDTH else -1  # of the word that did not fit
            if size > 0:
                self._changes[len(before)] += 1
                self._changes[len(before) + 1 + size] -= 1

    def width(self) -> int:
        """Return the width, or 0 if there is none."""
        fits, width = max((fits, width) for width, fits in enumerate(itertools.accumulate(self._changes)))
        return width if min(2 * self._num_inside, fits / 0.8) > self._num_pairs >= 30 <= width else 0

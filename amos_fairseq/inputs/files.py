"""Files of users: what they are, by their suffixes alone; their decompressed bytes and lines, in constant memory; what is
printed of them."""

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from amos_fairseq.errors import UserError, explain_os_errors
from amos_fairseq.inputs import FORMS
from amos_fairseq.inputs.raw_words import is_blank
from amos_fairseq.output.terminal import say
from amos_fairseq.untrusted import read_json

TEXT, TSV, CSV, JSONL, PARQUET, FOLDER = "plain text", "TSV", "CSV", "JSON lines", "Parquet", "folder of datasets"
_KINDS = {".tsv": TSV, ".csv": CSV, ".jsonl": JSONL, ".ndjson": JSONL, ".json": JSONL, ".parquet": PARQUET}

BUFFER_BYTES = 1 << 20
# A document is held in memory and belongs to one shard, so its size is limited, and so is that of a line. A small file that is
# large when it is decompressed does not fill the memory.
LARGEST_DOCUMENT_BYTES = 1 << 27
UTF8_MARK = b"\xef\xbb\xbf"
# What a compressed text may refer back to is in memory too. The program zstd has the same limit; xz -9 takes half of it.
_LARGEST_WINDOW_BYTES = 1 << 27
_COMPRESSED_PART_BYTES = 512  # at most 16 MiB of text
_STREAMS: dict[str, Callable[[], Any]] = {
    ".xz": lambda: lzma.LZMADecompressor(memlimit=_LARGEST_WINDOW_BYTES + (1 << 20)),
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW_BYTES).decompressobj(),
}
COMPRESSIONS = (".gz", *_STREAMS)
_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, zstandard.ZstdError)
_STATE, _INFO = "state.json", "dataset_info.json"  # of Dataset.save_to_disk

SHOWN_CHARACTERS = 300  # of the first item of a file

OnRead = Callable[[int], object]  # called with numbers of bytes that were read from disk


def ignore(size: int) -> None:
    pass


def kind_and_compression(path: Path) -> tuple[str, str]:
    """Return the suffixes of a name: ``(".jsonl", ".gz")`` for ``Text.jsonl.GZ``, an empty string for a missing one."""
    *before, last = ["", *(suffix.lower() for suffix in path.suffixes)]
    return (before[-1], last) if last in COMPRESSIONS else (last, "")


def kind_of(path: Path) -> str:
    """Return what an input is: a folder, what its suffix says (without that of a compression), or else plain text."""
    return FOLDER if path.is_dir() else _KINDS.get(kind_and_compression(path)[0], TEXT)


def files_of(path: Path) -> list[Path]:
    """Return the files of an input: the file itself, or those of a folder of ``save_to_disk``; none is elsewhere."""
    if not path.is_dir():
        return [path]
    state = read_json(path / _STATE, f"give a file, or a folder of Dataset.save_to_disk, of one split; {FORMS}")
    try:
        files = [path / _STATE, path / _INFO, *(path / each["filename"] for each in state["_data_files"])]
        is_whole = all(file.is_file() and file.resolve().parent == path.resolve() for file in files)
    except (KeyError, TypeError, ValueError, OSError):
        is_whole = False
    if not is_whole:
        raise UserError(f"{path} is no whole folder of Dataset.save_to_disk: files that {_STATE} names are missing")
    return files


@contextmanager
def opened(path: Path, on_read: OnRead = ignore) -> Iterator[BinaryIO]:
    """Open the content of a file, decompressed as its suffix says."""
    if not path.is_file():  # opening a pipe would wait for its writer
        raise UserError(f"{path}: {'is not a file' if path.exists() else 'no such file'}")
    compression = kind_and_compression(path)[1]
    with explain_os_errors(f"{path} cannot be read"), io.BufferedReader(_File(path, on_read), BUFFER_BYTES) as file:
        try:
            if compression == ".gz":
                yield io.BufferedReader(gzip.GzipFile(fileobj=file), BUFFER_BYTES)
            elif compression:
                yield io.BufferedReader(_Decompressed(file, _STREAMS[compression]), BUFFER_BYTES)
            else:
                yield file
        except _DAMAGED as error:
            raise UserError(
                f"{path} is damaged, not compressed as its name says, or compressed with a window of more than "
                f"{in_mib(_LARGEST_WINDOW_BYTES)} ({error}): download or compress it again"
            ) from error


class _File(io.FileIO):
    def __init__(self, path: Path, on_read: OnRead) -> None:
        super().__init__(path)
        self._on_read = on_read

    def readinto(self, buffer: memoryview) -> int:
        size = super().readinto(buffer)
        self._on_read(size)
        return size


class _Decompressed(io.RawIOBase):
    """The content of all streams or frames of a file.

    The readers of lzma and zstandard have no limit on the window, and that of zstandard takes a file that is cut for a whole
    one. Their decompressors return all that a part holds, so parts are small.
    """

    def __init__(self, file: BinaryIO, start: Callable[[], Any]) -> None:
        self._file, self._start = file, start
        self._stream, self._input, self._rest = None, b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self._rest:
            part = self._input or self._file.read(_COMPRESSED_PART_BYTES)
            if not part:
                if self._stream is not None:
                    raise EOFError("it ends inside of the compressed text")
                return 0
            self._stream = self._stream or self._start()
            self._rest = memoryview(self._stream.decompress(part))
            self._input = b""
            if self._stream.eof:
                self._stream, self._input = None, self._stream.unused_data
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def read_content(path: Path, limit: int) -> bytes:
    with opened(path) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise UserError(f"{path} holds more than {in_mib(limit)}: divide it into smaller files")
    return content


def read_lines(path: Path, on_read: OnRead = ignore) -> Iterator[tuple[int, str]]:
    """Yield numbered lines (from 1) of a text of UTF-8, with their line ends, without a byte-order mark."""
    with opened(path, on_read) as stream:
        yield from decoded_lines(stream, path)


def decoded_lines(stream: BinaryIO, name: str | Path) -> Iterator[tuple[int, str]]:
    num_utf8 = 0
    lines = iter(lambda: stream.readline(LARGEST_DOCUMENT_BYTES + 1), b"")
    for number, line in enumerate(lines, start=1):
        refuse_large(line, name, f"line {number}")
        if (nuls := line.count(0)) > max(7, len(line) / 20):  # clean_lines() removes single ones
            problem = f"{nuls:,} of its {len(line):,} bytes are NUL, as in UTF-16 without a byte-order mark"
            raise UserError(f"{name}, line {number}: {problem}: convert the whole file from its encoding; {FORMS}")
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{name}, line {number} is not UTF-8{_of_all_lines(lines, num_utf8)}") from None
        num_utf8 += not text.isascii()
        yield number, text.removeprefix("\ufeff") if number == 1 else text


def _of_all_lines(rest: Iterable[bytes], num_utf8: int) -> str:
    """Return what helps with a line that is not UTF-8: ``rest`` are the lines after it, and ``num_utf8`` those before it that
    are UTF-8 and not ASCII."""
    num_others = 1
    for line in rest:
        try:
            num_utf8 += not line.decode("utf-8").isascii()
        except UnicodeDecodeError:
            num_others += 1
    if not num_utf8:
        return f", and the rest of the file is ASCII or like it: convert the whole file from its encoding; {FORMS}"
    counts = f" (lines like it: {num_others:,}; lines of UTF-8, without ASCII: {num_utf8:,})"
    if num_utf8 < 10 * num_others:  # iconv -c would remove letters from much of the text
        return f"{counts}: the file mixes encodings: convert its parts before they are joined"
    return f"{counts}: iconv -c -f UTF-8 -t UTF-8 leaves the broken bytes out (docs/converting.md)"


def refuse_large(content: bytes | bytearray, name: str | Path, place: str) -> None:
    if len(content) > LARGEST_DOCUMENT_BYTES:
        raise UserError(
            f"{name}, {place}: longer than {in_mib(LARGEST_DOCUMENT_BYTES)}: divide it into shorter lines, with a blank line "
            "between documents, or give --document line"
        )


def clean_lines(text: str) -> list[str]:
    """Return the lines of a text without NUL and without spaces around them, "" for those that are blank.

    CR, LF and CR LF end a line. Other line separators of Unicode (VT, FF, U+0085, U+2028, U+2029, ...) count as spaces, because
    tokenizers would remove some and join the words.
    """
    if text.splitlines() == [text] and "\0" not in text:  # the usual case, in half of the time
        return ["" if is_blank(text) else text.strip()]
    lines = text.replace("\0", "").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return ["" if is_blank(line) else " ".join(line.splitlines()).strip() for line in lines]


def in_mib(size: int) -> str:
    return f"{size / (1 << 20):g} MiB"


def print_what_was_read(
    path: Path,
    kind: str,
    columns: Sequence[str],
    num_rows: int,
    left_out: Mapping[str, int],
    first: str,
    command: str = "prepare",
    what: str = "rows",
) -> None:
    """Print two lines: what was taken of a file, and its first item as the model will see it.

    ::

        prepare: reviews.tsv: TSV, columns text, label: 1,200 rows; left out: 3 without label
        prepare: reviews.tsv: the first: good film -> pos

    Args:
        kind: what the file was read as.
        columns: those that were taken, in this order; none of plain text.
        left_out: why rows were left out -> how many; zeros are not printed.
        first: the first row that was not left out.
        what: the rows are called.
    """
    print_first(path, kind, columns, first, command, f": {_counts(num_rows, what, left_out)}")


def print_first(
    path: Path, kind: str, columns: Sequence[str], first: str, command: str = "prepare", counts: str = ""
) -> None:
    """Print these lines without the counts, where counting takes long."""
    taken = f", column{'s' * (len(columns) > 1)} {', '.join(columns)}" if columns else ""
    say(f"{path}: {kind}{taken}{counts}", command)
    say(f"{path}: the first: {first if len(first) <= SHOWN_CHARACTERS else f'{first[:SHOWN_CHARACTERS]} ...'}", command)


def print_counts(path: Path, number: int, what: str, left_out: Mapping[str, int], command: str = "prepare") -> None:
    """Print what ``print_first`` leaves out."""
    say(f"{path}: {_counts(number, what, left_out)}", command)


def _counts(number: int, what: str, left_out: Mapping[str, int]) -> str:
    reasons = [f"{count:,} {why}" for why, count in left_out.items() if count]
    return f"{number:,} {what}" + (f"; left out: {', '.join(reasons)}" if reasons else "")

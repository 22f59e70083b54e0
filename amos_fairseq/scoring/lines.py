"""Lines of text as a model reads them, in windows of bounded work: files of any size need the memory of one window."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from amos_fairseq.checkpoints.read import Pretrained
from amos_fairseq.errors import UserError

LINES_ENCODED_AT_ONCE = 256  # tokenizers are faster with many
LINES_PER_WINDOW = 4096


@dataclass(frozen=True)
class Line:
    """One line: its number from 1, what stands in it, and its pieces in the spelling of ``dict.txt``."""

    number: int
    text: str
    pieces: list[str]
    tokens: Tensor  # [pieces + 2] int64: <s>, the pieces, </s>


def read_texts(file: Path) -> Iterator[str]:
    """The lines of a UTF-8 file without their ends.

    Raises:
        UserError: it cannot be read, or a line is not UTF-8.
    """
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                yield _decoded(file, number, line).rstrip("\r\n")
    except OSError as error:
        raise UserError(f"{file}: the text cannot be read ({error.strerror})") from error


def num_lines(file: Path) -> int:
    """Lines of a file, a last one without an end included; :class:`UserError` where it cannot be read."""
    count, last = 0, b"\n"
    try:
        with file.open("rb") as stream:
            while part := stream.read(1 << 20):
                count, last = count + part.count(b"\n"), part[-1:]
    except OSError as error:
        raise UserError(f"{file}: the text cannot be read ({error.strerror})") from error
    return count + (last != b"\n")


def _decoded(file: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}, line {number}: not UTF-8 at byte {error.start}; convert the file, for example with iconv"
        ) from error


def encoded_lines(pretrained: Pretrained, texts: Iterable[str], first: int) -> Iterator[Line]:
    """Each text as ``<s> pieces </s>``, numbered from ``first`` on."""
    dictionary = pretrained.dictionary
    texts, numbers = iter(texts), itertools.count(first)
    while some := list(itertools.islice(texts, LINES_ENCODED_AT_ONCE)):
        for text, pieces in zip(some, pretrained.tokenizer.encode_lines(some), strict=True):
            ids = [dictionary.bos(), *map(dictionary.index, pieces), dictionary.eos()]
            yield Line(next(numbers), text, pieces, torch.tensor(ids))


def windows(lines: Iterable[Line], cost: Callable[[Line], int], limit: int) -> Iterator[list[Line]]:
    """Consecutive lines until their ``cost`` reaches ``limit``, 4,096 lines at most and one at least."""
    window: list[Line] = []
    spent = 0
    for line in lines:
        window.append(line)
        spent += cost(line)
        if spent >= limit or len(window) == LINES_PER_WINDOW:
            yield window
            window, spent = [], 0
    if window:
        yield window

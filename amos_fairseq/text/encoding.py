"""Text to ids in the format of ``fairseq-preprocess``, byte for byte, without text files of pieces between.

Any number of processes gives the same bytes: they encode, and one process writes.
"""

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from amos_fairseq.errors import UserError
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.tokenizer import Tokenizer

# The ids of fairseq's own symbols: every dictionary begins with <s>, <pad>, </s>, <unk>.
END_ID, UNKNOWN_ID, NUM_FAIRSEQ_SYMBOLS = 2, 3, 4
# What is counted of a text. words: separated by white space; pieces: without the </s> of each line; tokens: with them and with
# the lines of </s> alone between documents; unknown: pieces that are not in dict.txt.
COUNTS = ("documents", "paragraphs", "words", "bytes", "pieces", "tokens", "unknown")
OTHER_CHECKPOINT = "a model does not see this share: start from a checkpoint with another tokenizer"
BATCH_ROWS = 1000
# A share of unknown pieces above these, in a corpus and in rows with labels, is a reason to warn, but not a handful of them: a
# tiny file has any share.
LARGEST_SHARE, LARGEST_SHARE_OF_LABELED, HANDFUL = 0.001, 0.01, 5
LARGEST_LOSS = 0.03  # of the rows of a table
# Applies a function to tasks, and yields the results in their order, as ``map`` does.
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


class BinarizedFile(contextlib.AbstractContextManager):
    """``PREFIX.bin`` and ``PREFIX.idx`` of lines of integers: a context manager, whose end without an error completes both.

    ``num_symbols``: of the dictionary, without ``<mask>``; fairseq chooses the integer type by it. None: 32 bits, for numbers
    that are no ids.
    """

    def __init__(self, prefix: Path | str, num_symbols: int | None) -> None:
        from fairseq.data.indexed_dataset import best_fitting_int_dtype  # takes seconds to import

        self._prefix = prefix
        self._type = np.int32 if num_symbols is None else best_fitting_int_dtype(num_symbols)
        self._lengths = array("i")  # a shard may have tens of millions of lines: a list would take gigabytes
        self._stream = open(f"{prefix}.bin", "wb")  # noqa: SIM115

    def add_lines(self, numbers: np.ndarray, lengths: Sequence[int]) -> None:
        """Append lines, which follow each other in ``numbers`` [sum of lengths]; a line of text ends with ``</s>``."""
        self._stream.write(numbers.astype(self._type).tobytes())
        self._lengths.extend(lengths)

    def add_line(self, numbers: Sequence[int] | np.ndarray) -> None:
        self.add_lines(np.asarray(numbers, dtype=np.int64), [len(numbers)])

    def __exit__(self, kind: object, *exception: object) -> None:
        self._stream.close()
        if kind is None:
            from fairseq.data.indexed_dataset import MMapIndexedDataset

            with MMapIndexedDataset.Index.writer(f"{self._prefix}.idx", self._type) as index:
                index._get_pointers = self._starts  # fairseq's makes a list
                index.write(self._lengths)

    def _starts(self, lengths: Sequence[int]) -> np.ndarray:
        """Return where each line begins in the file, in bytes, int64."""
        starts = np.zeros(len(lengths), np.int64)
        np.cumsum(lengths[:-1], out=starts[1:])
        starts *= np.dtype(self._type).itemsize
        return starts


_tokenizer: Tokenizer | None = None


def start_encoding_process(tokenizer_directory: Path) -> None:
    """Initialize a process that encodes, with one tokenizer and one thread."""
    global _tokenizer
    use_threads(1)
    _tokenizer = load_tokenizer(tokenizer_directory)


def encode_lines(lines: list[str]) -> list[list[int]]:
    """Return the ids of each line, without ``</s>``, in a process that :func:`start_encoding_process` has initialized."""
    return [_tokenizer.ids_of(pieces) for pieces in _tokenizer.encode_lines(lines)]


def encode_documents(text: str) -> tuple[list[int], list[int], dict[str, int]]:
    """Return ids and lengths of the lines, and the ``COUNTS``, of a text with a blank line behind each document.

    A paragraph without pieces is dropped, because a line of ``</s>`` alone ends a document.
    """
    documents = [document.split("\n") for document in text.split("\n\n")]
    encoded = iter(encode_lines([paragraph for document in documents for paragraph in document]))
    counts = dict.fromkeys(COUNTS, 0)
    ids: list[int] = []
    lengths: list[int] = []
    for document in documents:
        lines = [(paragraph, line) for paragraph in document if (line := next(encoded))]
        if lines and lengths:
            ids.append(END_ID)
            lengths.append(1)
        for paragraph, line in lines:
            ids += (*line, END_ID)
            lengths.append(len(line) + 1)
            counts["paragraphs"] += 1
            counts["words"] += len(paragraph.split())
            counts["bytes"] += len(paragraph.encode("utf-8")) + 1
            counts["pieces"] += len(line)
            counts["unknown"] += line.count(UNKNOWN_ID)
        counts["documents"] += bool(lines)
    counts["tokens"] = len(ids)
    return ids, lengths, counts


def encoded_file(text: Path) -> Path:
    return text.with_suffix(".npz")


def encode_file(text: Path) -> int:
    """Encode a file of documents into :func:`encoded_file`, and remove it, which frees the disk; return its size."""
    content = text.read_bytes()
    ids, lengths, counts = encode_documents(content.decode("utf-8"))
    dtype = np.uint16 if max(ids, default=0) < 1 << 16 else np.int32
    unfinished = text.with_suffix(".unfinished.npz")
    np.savez(unfinished, ids=np.array(ids, dtype), lengths=np.array(lengths, np.int32), counts=list(counts.values()))
    os.replace(unfinished, encoded_file(text))
    text.unlink()
    return len(content)


def join_encoded(files: Iterable[Path], prefix: Path, num_symbols: int) -> dict[str, int]:
    """Write what :func:`encode_file` left, in order, as one text with the name ``prefix``; return its ``COUNTS``."""
    totals = dict.fromkeys(COUNTS, 0)
    with BinarizedFile(prefix, num_symbols) as target:
        for path in files:
            try:
                with np.load(path) as encoded:  # which compares checksums
                    ids, lengths, counts = (encoded[name] for name in ("ids", "lengths", "counts"))
                file_counts = dict(zip(COUNTS, counts.tolist(), strict=True))
            except Exception as error:  # a zip file has many ways to be damaged
                hint = "what is unfinished was removed, repeat the command"
                raise UserError(f"{path} is damaged ({error}): {hint}") from error
            if len(lengths) and totals["documents"]:
                target.add_line([END_ID])
                totals["tokens"] += 1
            target.add_lines(ids, lengths.tolist())
            totals = {name: totals[name] + file_counts[name] for name in COUNTS}
    return totals


def encode_rows(
    rows: Sequence[tuple[str, ...]],
    prefixes: Sequence[Path],
    tokenizer: Tokenizer,
    map_in_order: Map,
    on_done: Callable[[int], object],
) -> dict[str, Any]:
    """Binarize text k of every row into ``prefixes[k]``, a line ended by ``</s>`` for each; return counts for ``task.json``.

    Tokens are those of ``<s> A </s>`` or ``<s> A </s> B </s>``; recipes with a second separator have one more in a pair.
    """
    tokens: list[int] = []  # of each row
    unknown, lost = 0, 0
    batches = (rows[start : start + BATCH_ROWS] for start in range(0, len(rows), BATCH_ROWS))
    with contextlib.ExitStack() as stack:
        num_symbols = len(tokenizer) + NUM_FAIRSEQ_SYMBOLS
        files = [stack.enter_context(BinarizedFile(prefix, num_symbols)) for prefix in prefixes]
        for texts, num_unknown, num_lost in map_in_order(encode_batch, batches):
            for file, (ids, lengths) in zip(files, texts, strict=True):
                file.add_lines(ids, lengths)
            batch_tokens = [1 + sum(row) for row in zip(*(lengths for _, lengths in texts), strict=True)]
            tokens += batch_tokens
            unknown, lost = unknown + num_unknown, lost + num_lost
            on_done(len(batch_tokens))
    if lost > HANDFUL and lost > LARGEST_LOSS * len(tokens):
        advice = "start from a checkpoint with a tokenizer for this text"
        raise UserError(f"the tokenizer knows no piece of {lost:,} of {len(tokens):,} rows: {advice}")
    return {"longest": max(tokens), **unknown_pieces(unknown, sum(tokens) - (1 + len(prefixes)) * len(tokens))}


def encode_batch(batch: list[tuple[str, ...]]) -> tuple[list[tuple[np.ndarray, list[int]]], int, int]:
    """Return the ids and lengths of the lines of each text of the rows, and the numbers of unknown pieces and of rows that have
    text and no known piece."""
    encoded = [encode_lines(list(column)) for column in zip(*batch, strict=True)]
    rows = zip(batch, zip(*encoded, strict=True), strict=True)
    lost = sum(any(map(str.strip, row)) and {UNKNOWN_ID}.issuperset(itertools.chain(*lines)) for row, lines in rows)
    texts, unknown = [], 0
    for lines in encoded:
        unknown += sum(line.count(UNKNOWN_ID) for line in lines)
        ids = np.array([index for line in lines for index in (*line, END_ID)], dtype=np.int32)
        texts.append((ids, [len(line) + 1 for line in lines]))
    return texts, unknown, lost


def unknown_pieces(number: int, pieces: int) -> dict[str, float]:
    """Return the number and share of unknown pieces under their names in manifests."""
    return {"unknown": number, "unknown_share": number / max(1, pieces)}


def describe_unknown(
    facts: Mapping[str, Any], advice: str = OTHER_CHECKPOINT, largest: float = LARGEST_SHARE_OF_LABELED
) -> str:
    """Return a text about the :func:`unknown_pieces` of ``facts``, with ``advice`` if their share is above the ``largest``."""
    text = f"{facts['unknown_share']:.3%} of the pieces unknown ({facts['unknown']:,})"
    are_many = facts["unknown"] > HANDFUL and facts["unknown_share"] > largest
    return f"{text}: WARNING: {advice}" if are_many else text


class KilledWorkerError(UserError):
    """The system killed a process, usually because memory is full; the same command may succeed with fewer of them."""


def available_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_threads(number: int) -> None:
    """Set how many threads the tokenizers library may start in this process; its results do not depend on it."""
    os.environ["RAYON_NUM_THREADS"] = str(number)
    if number == 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


@contextlib.contextmanager
def process_pool(number: int, initializer: Callable[..., None], *arguments: Any) -> Iterator[Map]:
    """Yield a ``map`` over ``number`` processes, each prepared by ``initializer(*arguments)``; 1 is this process itself."""
    if number == 1:
        initializer(*arguments)
        yield map
    else:
        with new_processes(number, initializer, *arguments) as map_in_order:
            yield map_in_order


def in_own_process(function: Callable[[Any], Any], argument: Any) -> Any:
    """Return ``function(argument)``, computed in a separate process: it frees its memory, and Ctrl-C ends C++ code."""
    with new_processes(1) as map_in_order:
        return next(map_in_order(function, [argument]))


@contextlib.contextmanager
def new_processes(number: int, initializer: Callable[..., None] = int, *arguments: Any) -> Iterator[Map]:
    """Yield a ``map`` over new processes. Any exception, Ctrl-C included, ends them at once, and so does the end of this
    process, also by kill -9."""
    spawn = multiprocessing.get_context("spawn")
    watched, held_open = spawn.Pipe(duplex=False)
    pool = ProcessPoolExecutor(number, spawn, _start_worker, (watched, initializer, *arguments))

    def map_in_order(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        # This call starts the processes, which inherit that Ctrl-C is blocked: only their parent handles it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return pool.map(function, tasks)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        yield map_in_order
        pool.shutdown()
    except BrokenProcessPool as error:
        raise KilledWorkerError(
            "a process was killed by the system, usually because memory is full (unless a line above gives another "
            "reason): give fewer --workers (or, where a vocabulary is learned, a smaller --sample-megabytes), and run the "
            "command again"
        ) from error
    finally:
        held_open.close()
        pool.shutdown(cancel_futures=True)


def _start_worker(watched: Connection, initializer: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=_end_with, args=(watched,), daemon=True).start()
    initializer(*arguments)


def _end_with(watched: Connection) -> None:
    """End this process when the other end of the pipe is closed: its parent has ended, or does not need it any more."""
    with contextlib.suppress(EOFError, OSError):
        watched.recv()
    os.kill(os.getpid(), signal.SIGKILL)

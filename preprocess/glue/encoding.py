"""Encode the texts and labels of rows as fairseq's ``sentence_prediction`` reads them, and count their lengths."""

import contextlib
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np

from amos_fairseq.fingerprint import DICTIONARY_FILE
from amos_fairseq.preprocess.common.binarizing import END_ID, NUM_FAIRSEQ_SYMBOLS, UNKNOWN_ID, BinarizedFile, SymbolIds
from amos_fairseq.preprocess.common.processes import ordered_results, use_threads
from amos_fairseq.preprocess.glue.tables import Row
from amos_fairseq.preprocess.glue.tasks import GlueTask, is_test
from amos_fairseq.tokenization import Tokenizer, load_tokenizer

# Maximum lengths of usual encoders. Fine-tuning cuts rows that are longer than the encoder's; here they are counted.
USUAL_MAX_POSITIONS = (64, 128, 256, 512)
_BATCH_ROWS = 1000

_tokenizer: Optional[Tokenizer] = None
_ids: Optional[SymbolIds] = None


@dataclass
class Counts:
    """``pieces[k]``: pieces of text k, without ``</s>``; ``unknown``: those of them that are not in ``dict.txt``.

    ``longest`` and ``longer`` (number of rows longer than each of ``USUAL_MAX_POSITIONS``) count tokens as in fine-tuning:
    ``<s> A </s>`` or ``<s> A </s> B </s>``. Recipes with a second separator have one token more in a pair.
    """

    pieces: List[int]
    rows: int = 0
    unknown: int = 0
    longest: int = 0
    longer: List[int] = field(default_factory=lambda: [0] * len(USUAL_MAX_POSITIONS))

    def add(self, ids_of_texts: List[List[int]]) -> None:
        lengths = [len(ids) for ids in ids_of_texts]
        self.pieces = [total + length for total, length in zip(self.pieces, lengths, strict=True)]
        tokens = 1 + sum(length + 1 for length in lengths)
        self.rows += 1
        self.longest = max(self.longest, tokens)
        self.longer = [count + (tokens > most) for count, most in zip(self.longer, USUAL_MAX_POSITIONS, strict=True)]
        self.unknown += sum(ids.count(UNKNOWN_ID) for ids in ids_of_texts)

    def merge(self, other: "Counts") -> None:
        self.pieces = [a + b for a, b in zip(self.pieces, other.pieces, strict=True)]
        self.rows += other.rows
        self.unknown += other.unknown
        self.longest = max(self.longest, other.longest)
        self.longer = [a + b for a, b in zip(self.longer, other.longer, strict=True)]

    def describe(self) -> Dict[str, Any]:
        """Return the counts for ``task.json``."""
        return {
            "longest": self.longest,
            "longer_than": {str(most): count for most, count in zip(USUAL_MAX_POSITIONS, self.longer, strict=True)},
            "unknown_share": self.unknown / max(1, sum(self.pieces)),
        }


def start_encoding_process(tokenizer_directory: str) -> None:
    """Initialize a process of the pool, with one tokenizer and one thread."""
    global _tokenizer, _ids
    use_threads(1)
    _tokenizer = load_tokenizer(tokenizer_directory)
    _ids = SymbolIds(_tokenizer)


def encode_rows(
    rows: List[Row],
    prefixes: List[Path],
    tokenizer: Tokenizer,
    pool: Executor,
    processes: int,
    on_done: Callable[[int], object],
) -> Counts:
    """Binarize text k of every row into ``prefixes[k]``: a line for each row, ended by ``</s>``.

    ``on_done`` is called with the number of rows newly encoded.
    """
    total = Counts([0] * len(prefixes))
    with contextlib.ExitStack() as stack:
        num_symbols = len(tokenizer) + NUM_FAIRSEQ_SYMBOLS
        files = [stack.enter_context(BinarizedFile(prefix, num_symbols)) for prefix in prefixes]
        for texts, counts in ordered_results(pool, processes, encode_batch, _batches(rows)):
            for file, (ids, lengths) in zip(files, texts, strict=True):
                file.add_lines(ids, lengths)
            total.merge(counts)
            on_done(counts.rows)
    return total


def encode_batch(batch: List[Tuple[str, ...]]) -> Tuple[List[Tuple[np.ndarray, List[int]]], Counts]:
    """Return the ids and lengths of the lines of each text of the rows, and the counts of the batch."""
    encoded = [_tokenizer.encode_lines(list(column)) for column in zip(*batch, strict=True)]
    columns = [[list(map(_ids.__getitem__, pieces)) for pieces in lines] for lines in encoded]
    counts = Counts([0] * len(columns))
    for row in zip(*columns, strict=True):
        counts.add(list(row))
    ids = [np.array([index for line in lines for index in (*line, END_ID)], dtype=np.int32) for lines in columns]
    return [(of_text, [len(line) + 1 for line in lines]) for of_text, lines in zip(ids, columns, strict=True)], counts


def write_labels(directory: Path, task: GlueTask, rows: Dict[str, List[Row]]) -> None:
    """Write ``directory/label``: binarized, with a ``dict.txt`` in the order of the classes; for a regression as text.

    A label is a line like any other: ``sentence_prediction`` removes its ``</s>``. fairseq reads the targets of a regression
    from ``SPLIT.label``, one number per line.
    """
    target = directory / "label"
    target.mkdir()
    labels = {split: [row.label for row in rows[split]] for split in rows if not is_test(split)}
    if task.is_regression:
        for split, values in labels.items():
            (target / f"{split}.label").write_text("".join(f"{value}\n" for value in values), encoding="utf-8")
        return
    classes = "".join(f"{label} 1\n" for label in task.labels)
    (target / DICTIONARY_FILE).write_text(classes, encoding="utf-8")
    ids = {label: index for index, label in enumerate(task.labels, NUM_FAIRSEQ_SYMBOLS)}
    for split, values in labels.items():
        with BinarizedFile(target / split, NUM_FAIRSEQ_SYMBOLS + len(ids)) as file:
            lines = np.array([index for value in values for index in (ids[value], END_ID)], dtype=np.int32)
            file.add_lines(lines, [2] * len(values))


def _batches(rows: List[Row]) -> Iterator[List[Tuple[str, ...]]]:
    for start in range(0, len(rows), _BATCH_ROWS):
        yield [row.texts for row in rows[start : start + _BATCH_ROWS]]

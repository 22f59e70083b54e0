"""Predictions for texts: outputs of a head, their names, and ``amos classify --predict``, which labels the rows of a table."""

import csv
import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import ListDataset
from scipy.special import expit, softmax
from torch import Tensor

from amos_fairseq.checkpoint_files import HeadOutputs
from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.downstream.labeled_task import pad_tokens
from amos_fairseq.downstream.model import TEXT_HEAD
from amos_fairseq.downstream.prediction import load_best, predict
from amos_fairseq.downstream.texts.dataset import UNKNOWN_CLASS, ShortenedTexts, join_texts
from amos_fairseq.downstream.texts.prepare import NAME
from amos_fairseq.downstream.texts.scores import predictions_of
from amos_fairseq.errors import UserError
from amos_fairseq.files import csv_lines, write_lines
from amos_fairseq.inputs.files import print_counts, print_first
from amos_fairseq.inputs.rows import check_columns, texts_of
from amos_fairseq.inputs.tables import TableFile
from amos_fairseq.output.terminal import progress_bar, say

PREDICTION, PROBABILITY = "prediction", "probability"  # the columns that are added
ALL = "probabilities"  # of all labels by name, in Python
ROWS_AT_ONCE = 10_000  # in memory
UNKNOWN_NAME = "<unknown>"  # a class that the training set lacks, among the labels of dev


def name_predictions(kind: str, labels: Sequence[str], values: np.ndarray) -> list[Any]:
    """Return predictions or targets as plain values: the name of a class, a list of labels, or a number."""
    if kind == "number":
        return [float(f"{value:.9g}") for value in values]  # float32 has no more digits
    if kind == "classes":
        return [UNKNOWN_NAME if value == UNKNOWN_CLASS else labels[value] for value in values.tolist()]
    return [[labels[index] for index in np.flatnonzero(row)] for row in values]


def predict_logits(
    loaded: LoadedCheckpoint,
    sequences: Sequence[Tensor],
    device: str,
    stop: threading.Event | None = None,
    task: str = TEXT_HEAD,
) -> np.ndarray:
    """Return the outputs of a head for texts, N LongTensors [L]: [N, outputs] float64, of a regression in the unit of its
    values. ``task``: the one whose head it is, where there are several."""
    head = TEXT_HEAD if TEXT_HEAD in loaded.model.classification_heads else task

    def inputs(indices: list[int]) -> dict[str, Any]:
        return pad_tokens([sequences[index] for index in indices]) | {"classification_head_name": head}

    def read_out(output: tuple[Tensor, None], indices: list[int]) -> np.ndarray:
        return output[0].float().double().cpu().numpy()

    logits = np.stack(predict(loaded.model, list(map(len, sequences)), inputs, read_out, device, stop))
    if not np.isfinite(logits).all():
        raise UserError(f"{loaded.file} predicts numbers that are not finite: train it with a lower --lr")
    return logits


def label_table(
    results: Path, file: Path, out: Path, texts: Sequence[str] | None, no_header: bool, probabilities: bool, device: str
) -> int:
    """Write the rows of ``file`` to ``out`` with ``prediction`` and, for classes, ``probability``; return their number.

    Each row is one of ``out``. The added columns of a row without text are empty, and all columns of a row with another number
    of them. The columns of the texts are those that ``results``, the OUT of ``amos classify``, was trained on, unless ``texts``
    names others.
    """
    ((_, loaded),) = load_best(results, NAME, "amos classify")
    head = loaded.head(TEXT_HEAD)
    table = TableFile(file, not no_header and head.header, all_keys=True)
    texts = texts or head.text_columns
    check_columns(table, texts, None)
    if len(texts) != len(head.text_columns):
        raise UserError(f"--text {' '.join(texts)}: the model was trained on {len(head.text_columns)} columns")
    added = [PREDICTION, PROBABILITY] if head.kind == "classes" else [PREDICTION]
    if probabilities and head.kind == "number":
        raise UserError(f"--probabilities: {head.name} is a number: leave it out")
    added += [f"{PROBABILITY} {label}" for label in head.labels] if probabilities else []
    columns = list(dict.fromkeys([*table.columns, *added]))
    if replaced := [name for name in added if name in table.columns]:  # those of an earlier model
        say(f"{file}: its columns {', '.join(replaced)} get other values in {out.name}", "classify")
    counted: Counter[str] = Counter()

    def labeled_rows() -> Iterator[dict[str, Any]]:
        rows = rows_in_order(table, texts)
        while chunk := list(itertools.islice(rows, ROWS_AT_ONCE)):
            inputs = [texts_of(values, texts, f"{file}, line {number}") for number, values in chunk]
            predicted: Iterator[dict[str, Any]] = iter(())
            if with_text := list(filter(any, inputs)):
                if not counted["with text"]:
                    print_first(file, table.kind, texts, " | ".join(with_text[0]), "classify")
                predictions, num_cut = predict_texts(loaded, TEXT_HEAD, with_text, device)
                spelled = ({f"{PROBABILITY} {name}": p for name, p in of.get(ALL, {}).items()} for of in predictions)
                predicted = (cells | more for cells, more in zip(predictions, spelled, strict=True))
                counted["cut"] += num_cut
            for (_, values), row in zip(chunk, inputs, strict=True):
                cells = next(predicted) if any(row) else {}
                yield values | {name: cells.get(name) for name in added}
            counted["rows"] += len(chunk)
            counted["with text"] += len(with_text)
            bar.update(len(chunk))

    with progress_bar(None, "label", "row", delay=2) as bar:
        write_lines(out, table_lines(out.suffix.lower(), columns, labeled_rows()))
    without = {"without text": counted["rows"] - counted["with text"] - len(table.broken_lines)} | table.left_out
    print_counts(file, counted["with text"], table.counted("rows are labeled"), without, "classify")
    if counted["cut"]:
        say(f"{file}: {counted['cut']:,} rows of more than {loaded.model.max_positions()} tokens are cut", "classify")
    return counted["rows"]


def rows_in_order(table: TableFile, texts: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row of a table with its number, also with ``texts`` inside of objects; one with another number of columns has
    no values."""
    num_broken = 0
    for number, values in itertools.chain(table.rows([*table.columns, *texts]), [(0, None)]):
        for line in table.broken_lines[num_broken:]:
            yield line, dict.fromkeys(table.columns)
        num_broken = len(table.broken_lines)
        if values is not None:
            yield number, values


def encode(loaded: LoadedCheckpoint, inputs: Sequence[tuple[str, ...]]) -> ShortenedTexts:
    dictionary, texts = loaded.dictionary, []
    for column in zip(*inputs, strict=True):
        lines = loaded.tokenizer.encode_lines(list(column))
        tokens = [torch.tensor([*map(dictionary.index, pieces), dictionary.eos()]) for pieces in lines]
        texts.append(ListDataset(tokens, np.array([len(line) for line in tokens])))
    return ShortenedTexts(join_texts(texts, dictionary.bos(), loaded.separator), loaded.model.max_positions())


def predict_texts(
    loaded: LoadedCheckpoint, head: str, texts: Sequence[tuple[str, ...]], device: str
) -> tuple[list[dict[str, Any]], int]:
    """Return what a head predicts for texts, each as many as the model was trained on; and how many are too long, and cut."""
    encoded = encode(loaded, [tuple(" ".join(text.splitlines()) for text in each) for each in texts])
    logits = predict_logits(loaded, list(encoded), device, task=head)
    return list(predicted_cells(loaded.head(head), logits)), encoded.num_cut


def predicted_cells(head: HeadOutputs, logits: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield the columns that are added to each row of ``logits`` [N, outputs], and the probability of each of the labels."""
    kind = head.kind
    for row, name in zip(logits, name_predictions(kind, head.labels, predictions_of(kind, logits)), strict=True):
        probabilities = [round(float(share), 6) for share in (softmax(row) if kind == "classes" else expit(row))]
        cells = {PREDICTION: name} | ({PROBABILITY: max(probabilities)} if kind == "classes" else {})
        yield cells if kind == "number" else cells | {ALL: dict(zip(head.labels, probabilities, strict=True))}


def table_lines(suffix: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table: JSON lines, or CSV, with tabs for .tsv, in which lists and objects are JSON. The names of the
    columns of .tsv are in quotes, so that :class:`TableFile` does not take those of other fields for a part of the texts.

    NaN is missing (null, or an empty cell), and the infinities are the texts Infinity and -Infinity, because JSON has neither.
    """
    plain_rows = ({name: without_nan(row[name]) for name in columns} for row in rows)
    if suffix == ".jsonl":
        return (f"{as_json(row)}\n" for row in plain_rows)
    cells = ([as_json(cell) if isinstance(cell, list | dict) else cell for cell in row.values()] for row in plain_rows)
    if suffix == ".csv":
        return csv_lines(itertools.chain([columns], cells))
    return itertools.chain(csv_lines([columns], "\t", csv.QUOTE_ALL), csv_lines(cells, "\t"))


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [without_nan(each) for each in value]
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if not isinstance(value, float) or np.isfinite(value):
        return value
    return None if np.isnan(value) else json.dumps(value)

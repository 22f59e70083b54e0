"""``amos classify --predict``: label the rows of a table with the run that is best on dev."""

import csv
import io
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import ListDataset
from scipy.special import softmax

from amos_fairseq.checkpoints.read import LoadedCheckpoint, load_checkpoint
from amos_fairseq.data.labeled_texts import ShortenedTexts, join_texts, read_task_record
from amos_fairseq.data.text_scores import predictions_of
from amos_fairseq.errors import UserError
from amos_fairseq.files import explain_write_errors, write_text
from amos_fairseq.finetuning.classification import NAME, predict_logits, spell
from amos_fairseq.finetuning.runs import read_results
from amos_fairseq.finetuning.summary import best_checkpoint, summarize
from amos_fairseq.prepare.classification import find_columns, open_table, texts_of
from amos_fairseq.strangers import field
from amos_fairseq.terminal import say

PREDICTION, PROBABILITY = "prediction", "probability"  # the columns that are added
SUFFIXES = (".tsv", ".csv", ".jsonl")


def check_output(out: Path) -> None:
    """Raise :class:`UserError` unless ``out`` names a table that can be written."""
    if out.suffix.lower() not in SUFFIXES:
        raise UserError(f"--out {out}: with --predict it is a file: give a name that ends with {', '.join(SUFFIXES)}")
    if out.is_dir():
        raise UserError(f"--out {out} is a directory: give the name of a file")


def label_table(
    results: Path, file: Path, out: Path, texts: Sequence[str] | None, device: str, stop: threading.Event
) -> int:
    """Write the rows of ``file`` to ``out`` with the columns ``prediction`` and, for classes, ``probability``.

    Args:
        results: ``--out`` of ``amos classify``.
        texts: the columns of the texts; None for those that the model was trained on.

    Returns:
        The number of rows.

    Raises:
        UserError: there is no finished run, a column is missing, or a file cannot be read or written.
        Stopped: ``stop`` is set.
    """
    check_output(out)
    if out.exists() and file.exists() and out.samefile(file):
        raise UserError(f"--out {out} is the table to label: give the name of another file")
    summary = summarize([result for result in read_results(results) if result.task == NAME]).get(NAME)
    if summary is None:
        raise UserError(
            f"{results} has no finished run of amos classify: give the --out of that command as --checkpoint"
        )
    checkpoint, best = best_checkpoint(results, summary), summary.best
    record = read_task_record(checkpoint.parent, "repeat amos classify with another --out")
    table = open_table(file, record.get("header") is not False)
    columns = find_columns(table, texts or text_columns(record, checkpoint), None, True, labeled=False)
    if len(columns.texts) != len(text_columns(record, checkpoint)):
        raise UserError(f"--text {' '.join(columns.texts)}: the model was trained on another number of columns")
    if taken := {PREDICTION, PROBABILITY} & set(table.columns):
        raise UserError(f"{file} has a column {taken.pop()!r}, which is added here: rename it")
    rows = list(table.rows())
    say(
        f"seed {best.seed} is the best on dev ({best.main_score} {best.main:.1f}); it labels {len(rows):,} rows",
        "classify",
    )
    loaded = load_checkpoint(checkpoint)
    inputs = [texts_of(values, columns.texts) for _, values in rows]
    for what, count in (
        ("rows have no text and are labeled anyway", sum(not any(map(str.strip, own)) for own in inputs)),
        ("lines have another number of columns and are left out", len(table.broken_lines)),
    ):
        if count:
            say(f"{file}: {count:,} {what}", "classify")
    encoded = encode(loaded, inputs)
    if encoded.num_cut:
        say(f"{file}: {encoded.num_cut:,} rows of more than {encoded.max_tokens} tokens are cut", "classify")
    logits = predict_logits(loaded, [encoded[index] for index in range(len(rows))], device, stop)
    if not np.isfinite(logits).all():
        raise UserError(f"{checkpoint} predicts values that are no finite numbers: train it with a lower --lr")
    kind, labels = record["kind"], record["labels"]
    predictions = predictions_of(kind, logits)
    added: list[dict[str, Any]] = [{PREDICTION: name} for name in spell(kind, labels, predictions)]
    if kind == "classes":
        for own, probability in zip(added, softmax(logits, axis=1).max(axis=1), strict=True):
            own[PROBABILITY] = round(float(probability), 6)
    elif out.suffix.lower() == ".jsonl":  # where lists and numbers have a type
        for own in added:
            own[PREDICTION] = json.loads(own[PREDICTION])
    labeled = [values | own for (_, values), own in zip(rows, added, strict=True)]
    with explain_write_errors(out, "make room, permit writing, or give another --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, format_table(labeled, out.suffix.lower()))
    return len(labeled)


def text_columns(record: Mapping[str, Any], checkpoint: Path) -> list[str]:
    """Return the columns that the model was trained on; raise :class:`UserError` if ``task.json`` has none."""
    try:
        names = field(dict(record), "text_columns", list)
        if 1 <= len(names) <= 2 and all(isinstance(name, str) for name in names):
            return names
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{checkpoint.parent} does not say on which columns the model was trained: repeat amos classify")


def encode(loaded: LoadedCheckpoint, inputs: Sequence[tuple[str, ...]]) -> ShortenedTexts:
    """Return the tokens of rows of one or two texts, as in fine-tuning."""
    dictionary, texts = loaded.dictionary, []
    for column in zip(*inputs, strict=True):
        lines = loaded.tokenizer.encode_lines(list(column))
        tokens = [torch.tensor([*map(dictionary.index, pieces), dictionary.eos()]) for pieces in lines]
        texts.append(ListDataset(tokens, np.array([len(line) for line in tokens])))
    return ShortenedTexts(join_texts(texts, dictionary.bos(), loaded.separator), loaded.model.max_positions())


def format_table(rows: Sequence[Mapping[str, Any]], suffix: str) -> str:
    """Return a table as text: CSV, with tabs for .tsv, or JSON lines."""
    if suffix == ".jsonl":
        return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, rows[0], delimiter="\t" if suffix == ".tsv" else ",", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()

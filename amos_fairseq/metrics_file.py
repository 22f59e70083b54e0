"""The file ``SAVE_DIR/metrics.jsonl`` of a run: its format, and how to read it.

Each line is one JSON object::

    {"split": "train", "update": 100, "epoch": 0.25, "loss": 12.1, "mlm_loss_4": 5.3, ..., "lr": 0.0001, "wps": 41250.0}

``split`` is ``train`` (fairseq's ``train_inner``: the mean since the previous such line, every ``--log-interval``
updates) or the name of a validation subset (``valid``). ``update`` counts optimizer steps, ``epoch`` counts passes over
the training data. Every other value is a finite number, or null where the logged value was not finite, under the key
that the console and TensorBoard use. :mod:`amos_fairseq.compat.metrics_log` writes the file.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

FILE_NAME = "metrics.jsonl"
TAIL_BYTES = 4096  # longer than any record


class Line(NamedTuple):
    """One line of the file.

    Attributes:
        number: line number, from 1.
        text: the line without its newline.
        record: the parsed record; None where the line is not a whole record.
    """

    number: int
    text: bytes
    record: dict[str, Any] | None


def parse_lines(content: bytes) -> list[Line]:
    """Parse the content of the file, or of its last part."""
    return [Line(number, text, _parse_record(text)) for number, text in enumerate(content.splitlines(), start=1)]


def _parse_record(text: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None where the line is cut short or is not a record."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("update"), int) or "split" not in record:
        return None
    values = (value for key, value in record.items() if key != "split")
    return record if all(value is None or isinstance(value, (int, float)) for value in values) else None


def read_records(save_dir: Path) -> list[dict[str, Any]]:
    """Return all whole records of the run in ``save_dir`` in order; none before the first is written."""
    path = save_dir / FILE_NAME
    if not path.is_file():
        return []
    return [line.record for line in parse_lines(path.read_bytes()) if line.record is not None]


def updates_so_far(save_dir: Path) -> int:
    """Return the update of the last whole record of a run; 0 before the first. Only the end of the file is read."""
    try:
        with (save_dir / FILE_NAME).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = parse_lines(file.read())
    except FileNotFoundError:
        return 0
    return next((line.record["update"] for line in reversed(lines) if line.record is not None), 0)

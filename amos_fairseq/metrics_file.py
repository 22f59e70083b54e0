"""The file ``SAVE_DIR/metrics.jsonl`` of a run: its format, and how to read it.

Each line is one JSON object::

    {"split": "train", "update": 100, "epoch": 0.25, "loss": 12.1, "mlm_loss_4": 5.3, ..., "lr": 0.0001, "wps": 41250.0}

``split`` is ``train`` (fairseq's ``train_inner``: the mean since the previous such line, every ``--log-interval``
updates) or the name of a validation subset (``valid``). ``update`` counts optimizer steps, ``epoch`` counts passes over
the training data. Every other value is a finite number, or null where the logged value was not finite, under the key
that the console and TensorBoard use. :mod:`amos_fairseq.run.metrics_log` writes the file.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

from amos_fairseq.errors import UserError
from amos_fairseq.strangers import finite_number, parse_json, plain_name, read_bytes, whole_number

FILE_NAME = "metrics.jsonl"
TAIL_BYTES = 4096  # longer than any record
LARGEST_VALUE = 1e100  # of a logged value; larger ones are read as not finite


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
        record = parse_json(text)
        whole_number(record.get("update"))
        plain_name(record.get("split"))
        values = {plain_name(key): value for key, value in record.items() if key not in ("update", "split")}
        numbers = {key: finite_number(value) for key, value in values.items() if value is not None}
    except ValueError:
        return None
    # No figure has axes for 1e308, and sums of such values are infinite.
    return record | {key: None for key, number in numbers.items() if abs(number) > LARGEST_VALUE}


def read_records(save_dir: Path) -> list[dict[str, Any]]:
    """Return all whole records of the run in ``save_dir`` in order; none before the first is written."""
    path = save_dir / FILE_NAME
    if not path.is_file():
        return []
    lines = parse_lines(read_bytes(path, "remove it, or copy the run again"))
    return [line.record for line in lines if line.record is not None]


def updates_so_far(save_dir: Path) -> int:
    """Return the update of the last whole record of a run; 0 before the first. Only the end of the file is read.

    Raises:
        UserError: something else than a file has its name.
    """
    path = save_dir / FILE_NAME
    if path.exists() and not path.is_file():  # opening a pipe waits for its writer
        raise UserError(f"{path} is not a file: remove it")
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = parse_lines(file.read())
    except FileNotFoundError:
        return 0
    return next((line.record["update"] for line in reversed(lines) if line.record is not None), 0)

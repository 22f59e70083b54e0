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


class NewRecords:
    """What a training appends to the metrics file of ``save_dir`` from now on. Each call reads only what is new.

    Attributes:
        update: update of the last record, also where it was there before; 0 before the first.
    """

    def __init__(self, save_dir: Path) -> None:
        self.update = 0
        self._path, self._inode, self._end = save_dir / FILE_NAME, None, 0
        if self._path.exists():
            self._inode = 0  # of no file, so that what is there counts as read
            self.read()

    def read(self) -> list[dict[str, Any]]:
        """Return the whole records that were appended since the last call.

        A resumed run replaces the file by one without the records that it writes again: what is in another file counts as read.
        """
        if self._path.exists() and not self._path.is_file():  # opening a pipe waits for its writer
            raise UserError(f"{self._path} is not a file: remove it")
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                is_same = self._inode in (None, status.st_ino) and status.st_size >= self._end
                begin = self._end if is_same else max(0, status.st_size - TAIL_BYTES)
                file.seek(begin)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._inode, self._end = status.st_ino, begin + len(whole)
        records = [line.record for line in parse_lines(whole) if line.record is not None]
        if records:
            self.update = records[-1]["update"]
        return records if is_same else []

"""The file ``SAVE_DIR/metrics.jsonl`` of a run: its format, and how to read it.

Each line is one JSON object::

    {"split": "train", "update": 100, "epoch": 0.25, "loss": 12.1, "mlm_loss_4": 5.3, ..., "lr": 0.0001, "wps": 41250.0}

``split`` is ``train`` (fairseq's ``train_inner``: the mean since the previous such line, every ``--log-interval``
updates) or the name of a validation subset (``valid``). ``update`` counts optimizer steps, ``epoch`` counts passes over
the training data. Every other value is a finite number, or null where the logged value was not finite, under the key
that the console and TensorBoard use. :mod:`amos_fairseq.run.progress` writes the file.
"""

import json
from pathlib import Path
from typing import Any

FILE_NAME = "metrics.jsonl"


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None where the line is cut short or is not a record."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"update", "split"} <= record.keys() else None


def read_records(save_dir: Path) -> list[dict[str, Any]]:
    """Return all whole records of the run in ``save_dir`` in order; none before the first is written."""
    path = save_dir / FILE_NAME
    records = map(parse_record, path.read_bytes().splitlines() if path.exists() else [])
    return [record for record in records if record is not None]


class NewRecords:
    """What a training appends to the metrics file of ``save_dir`` from now on; ``update``: of the last one, or 0."""

    def __init__(self, save_dir: Path) -> None:
        self.update = 0
        self._save_dir, self._size = save_dir, -1  # before the first call
        self._records: list[dict[str, Any]] = []
        self.read()

    def read(self) -> list[dict[str, Any]]:
        """Return the records since the last call; a resumed run removes those that it writes again."""
        file = self._save_dir / FILE_NAME
        size = file.stat().st_size if file.exists() else 0
        if size == self._size:
            return []
        before, self._records, self._size = self._records, read_records(self._save_dir), size
        self.update = self._records[-1]["update"] if self._records else 0
        number_of_old = sum(1 for old, record in zip(before, self._records, strict=False) if old == record)
        return self._records[number_of_old:]

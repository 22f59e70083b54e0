"""Write every logged line of a run to ``SAVE_DIR/metrics.jsonl`` (format: :mod:`amos_fairseq.run.metrics_file`).

The averages that fairseq prints at the end of an epoch are not recorded: they are means over other updates than the
interval records, and would not fit on the same curve.
"""

import functools
import json
import logging
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from numbers import Number
from typing import Any

import torch
from fairseq.logging import metrics
from fairseq.logging.meters import Meter

from amos_fairseq.compat.collectives import on_first_rank
from amos_fairseq.files import explain_write_errors, no_links, whole_file
from amos_fairseq.run.metrics_file import FILE_NAME, parse_lines

logger = logging.getLogger(__name__)

INTERVAL = "train_inner"  # fairseq's name for the meters that are reset after each logged record


def to_number(value: Any) -> float | None:
    """Convert a fairseq statistic to a Python number, or to None where it is not finite.

    Raises:
        TypeError: the statistic is not a number.
    """
    if isinstance(value, Meter):
        value = value.smoothed_value
    if torch.is_tensor(value) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, Number):
        raise TypeError(f"not a number: {value!r}")
    value = int(value) if isinstance(value, int) else float(value)
    return value if math.isfinite(value) else None


def numeric_stats(stats: dict[str, Any]) -> dict[str, float | None]:
    """Return the numeric statistics. ``num_updates`` is excluded: it is the record's ``update``."""
    numbers = {}
    for key, value in stats.items():
        if key == "num_updates":
            continue
        try:
            numbers[key] = to_number(value)
        except TypeError:
            continue  # a meter may hold a list, or text for the console
    return numbers


class MetricsLog:
    """The metrics file of one run. Only the first rank writes to it."""

    def __init__(self, save_dir: str) -> None:
        self.path = os.path.join(save_dir, FILE_NAME)
        self._epoch, self._iterator = 1, None

    def follow(self, epoch: int, iterator: Any) -> None:
        """Set the epoch, counted from 1, and the iterator over its updates that training uses from now on."""
        self._epoch, self._iterator = epoch, iterator

    @property
    def epoch(self) -> float:
        """Passes over the training data so far. The iterator knows its position, also after a resume within an epoch."""
        done = self._iterator.n / max(len(self._iterator), 1) if self._iterator is not None else 0.0
        return round(self._epoch - 1 + done, 6)

    def append(self, split: str, update: int, stats: dict[str, Any]) -> None:
        """Append one record and close the file, so that a killed process can damage only the last line.

        Raises:
            UserError: the file is a link, or cannot be written.
        """
        record = {"split": split, "update": int(update), "epoch": self.epoch, **numeric_stats(stats)}
        with self._explained(), open(self.path, "ab", opener=no_links) as file:
            file.write(json.dumps(record, allow_nan=False).encode() + b"\n")

    def _explained(self) -> AbstractContextManager[None]:
        hint = "make room or permit writing, then start the same command again to continue from the last checkpoint"
        return explain_write_errors(f"{self.path}: metrics", hint)

    def cut_back(self, update: int) -> None:
        """Remove the records after ``update``, which the resumed run writes again, and all broken lines.

        The file is replaced atomically or left unchanged. ``update`` 0 removes all records.

        Raises:
            UserError: the file is a link, or cannot be read or written.
        """
        if not os.path.exists(self.path):
            return
        with self._explained():
            with open(self.path, "rb", opener=no_links) as file:
                content = file.read()
            remaining = b"".join(self._remaining_lines(content, update))
            if remaining == content:
                return
            logger.info("%s: cut back to update %d", self.path, update)
            with whole_file(self.path) as unfinished, open(unfinished, "wb") as file:
                file.write(remaining)

    def _remaining_lines(self, content: bytes, update: int) -> Iterator[bytes]:
        for line in parse_lines(content):
            if line.record is None:
                logger.warning("%s: line %d is broken and is dropped", self.path, line.number)
            elif line.record["update"] <= update:
                yield line.text + b"\n"


_logs: dict[str, MetricsLog] = {}
_resumed_updates: dict[str, int] = {}


def note_resumed_update(cfg: Any, trainer: Any, epoch_itr: Any, extra_state: dict[str, Any] | None) -> None:
    """Note the update after which the file continues.

    Between two epochs fairseq restores no meters, so that the first record would be the mean of fewer updates than in an
    undisturbed run.
    """
    _resumed_updates[cfg.save_dir] = trainer.get_num_updates()
    meters = (extra_state or {}).get("metrics", {})
    if trainer.get_num_updates() > 0 and not cfg.reset_meters and INTERVAL in meters:
        metrics.load_state_dict({INTERVAL: meters[INTERVAL]})


def follow_epoch(save_dir: str, epoch: int, iterator: Any) -> None:
    """Follow the updates of an epoch; a collective operation at the first one after a resume."""
    log = _log_in(save_dir)
    log.follow(epoch, iterator)
    # Here and not when the checkpoint was loaded: a run that is refused in between changes nothing.
    if save_dir in _resumed_updates:
        on_first_rank(functools.partial(log.cut_back, _resumed_updates.pop(save_dir)))


def append_record(save_dir: str, split: str, update: int, stats: dict[str, Any]) -> None:
    """Append what fairseq logs after an interval of updates or a validation."""
    _log_in(save_dir).append(split, update, stats)


def _log_in(save_dir: str) -> MetricsLog:
    return _logs.setdefault(save_dir, MetricsLog(save_dir))

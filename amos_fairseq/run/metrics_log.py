"""Write every logged line of a run to ``SAVE_DIR/metrics.jsonl`` (format: :mod:`amos_fairseq.run.metrics_file`).

The averages that fairseq prints at the end of an epoch are not recorded: they are means over other updates than the
interval records, and would not fit on the same curve.
"""

import functools
import json
import logging
import math
import os
from contextlib import AbstractContextManager
from numbers import Number
from typing import Any

import torch
from fairseq.logging import metrics
from fairseq.logging.meters import Meter, StopwatchMeter

from amos_fairseq.compat.distribution import from_first_rank
from amos_fairseq.files import explain_write_errors, whole_file
from amos_fairseq.run.hook import Hook
from amos_fairseq.run.metrics_file import FILE_NAME, parse_lines

logger = logging.getLogger(__name__)

INTERVAL = "train_inner"  # fairseq's name for the meters that are reset after each logged record


def numeric_stats(stats: dict[str, Any]) -> dict[str, float | None]:
    """Return the statistics as Python numbers, None where not finite, without ``num_updates`` and texts for the console."""
    numbers = {}
    for key, value in stats.items():
        if isinstance(value, Meter):
            value = value.smoothed_value
        if torch.is_tensor(value) and value.numel() == 1:
            value = value.item()
        if key != "num_updates" and isinstance(value, Number):
            value = int(value) if isinstance(value, int) else float(value)
            numbers[key] = value if math.isfinite(value) else None
    return numbers


class MetricsLog(Hook):
    """The metrics file of a run. Only the first rank writes to it."""

    def __init__(self) -> None:
        self.resumed_update: int | None = None  # where the file has not been cut back to it yet
        self.epoch, self.batches = 1, None  # counted from 1; the iterator over its updates
        self.task: Any = None

    def after_load(self, cfg: Any, trainer: Any, epoch_itr: Any, extra_state: dict[str, Any] | None) -> None:
        """Note the update after which the file continues, and restore the meters of the interval.

        fairseq does not restore them between two epochs.
        """
        self.resumed_update = trainer.get_num_updates()
        meters = (extra_state or {}).get("metrics", {})
        if trainer.get_num_updates() > 0 and not cfg.reset_meters and INTERVAL in meters:
            metrics.load_state_dict({INTERVAL: meters[INTERVAL]})
        wall = metrics.get_meter("default", "wall")
        if isinstance(wall, StopwatchMeter) and wall.start_time is None:
            wall.start()  # fairseq restores it stopped, and would log 0 from then on

    def before_epoch(self, cfg: Any, trainer: Any) -> None:
        self.task = getattr(trainer, "task", None)

    def before_bar(self, save_dir: str, batches: Any, settings: dict[str, Any]) -> None:
        """Follow the updates of an epoch; a collective operation at the first one after a resume."""
        self.epoch, self.batches = settings["epoch"], batches
        # Here and not when the checkpoint was loaded: a run that is refused in between changes nothing.
        if self.resumed_update is not None:
            from_first_rank(functools.partial(cut_back, save_dir, self.resumed_update))
            self.resumed_update = None

    def before_logging(self, save_dir: str, split: str, update: int, values: dict[str, Any]) -> None:
        """Append one record and close the file, so that a killed process can damage only the last line."""
        # The iterator knows its position, also after a resume within an epoch.
        done = self.batches.n / max(len(self.batches), 1) if self.batches is not None else 0.0
        if (of_phase := getattr(self.task, "phase_iterator", None)) is not None:
            done = of_phase.position / of_phase.dataset.stream_length
        epoch = round(self.epoch - 1 + done, 6)
        record = {"split": split, "update": int(update), "epoch": epoch, **numeric_stats(values)}
        path = os.path.join(save_dir, FILE_NAME)
        with _explained(path), open(path, "ab") as file:
            file.write(json.dumps(record, allow_nan=False).encode() + b"\n")


def cut_back(save_dir: str, update: int) -> None:
    """Remove the records after ``update``, which the resumed run writes again, and all broken lines; all or nothing."""
    path = os.path.join(save_dir, FILE_NAME)
    if not os.path.exists(path):
        return
    with _explained(path):
        with open(path, "rb") as file:
            content = file.read()
        lines = parse_lines(content)
        for line in lines:
            if line.record is None:
                logger.warning("%s: line %d is broken and is dropped", path, line.number)
        remaining = b"".join(line.text + b"\n" for line in lines if line.record and line.record["update"] <= update)
        if remaining != content:
            logger.info("%s: cut back to update %d", path, update)
            with whole_file(path) as unfinished, open(unfinished, "wb") as file:
                file.write(remaining)


def _explained(path: str) -> AbstractContextManager[None]:
    hint = "make room or permit writing, then start the same command again to continue from the last checkpoint"
    return explain_write_errors(f"{path}: metrics", hint)

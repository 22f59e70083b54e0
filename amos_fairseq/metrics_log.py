"""Every logged line of a run as numbers: ``SAVE_DIR/metrics.jsonl``, the file that ``amos plot`` reads.

One JSON object a line::

    {"split": "train", "update": 100, "epoch": 0.25, "loss": 12.1, "mlm_loss_4": 5.3, ..., "lr": 0.0001, "wps": 41250.0}

``split`` is ``train`` (fairseq's ``train_inner``: the mean since the line before it, every ``--log-interval``
updates) or the name of a validation subset (``valid``). ``update`` counts optimizer steps, ``epoch`` passes over the
training data. Every other value is a finite number or null, under the key that the console and TensorBoard use, without
the strings that fairseq makes for the console. The averages that fairseq prints at the end of an epoch are left out:
they are means over other updates and would stand beside the curve.
"""

import functools
import json
import logging
import math
import os
from collections.abc import Callable
from numbers import Number
from typing import Any, Iterator, Optional

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import progress_bar
from fairseq.logging.meters import Meter

from amos_fairseq.collectives import on_first_rank
from amos_fairseq.errors import UserError
from amos_fairseq.files import whole_file

logger = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"


def to_number(value: Any) -> Optional[float]:
    """A statistic of fairseq as a Python number, None where it is not finite; TypeError where it is no number."""
    if isinstance(value, Meter):
        value = value.smoothed_value
    if torch.is_tensor(value) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, Number):
        raise TypeError(f"not a number: {value!r}")
    value = int(value) if isinstance(value, int) else float(value)
    return value if math.isfinite(value) else None


def numbers_of(stats: dict[str, Any]) -> dict[str, Optional[float]]:
    """The statistics that are numbers. ``num_updates`` is left out: it is the record's ``update``."""
    numbers = {}
    for key, value in stats.items():
        if key == "num_updates":
            continue
        try:
            numbers[key] = to_number(value)
        except TypeError:
            continue  # a meter may hold a list or a text for the console; it has no place on a curve
    return numbers


class MetricsLog:
    """The file of one run, written by the master rank alone."""

    def __init__(self, save_dir: str) -> None:
        self.path = os.path.join(save_dir, FILE_NAME)
        self._epoch, self._iterator = 1, None

    def follow(self, epoch: int, iterator: Any) -> None:
        """Tell the epoch, counted from 1, and the iterator over its updates that training goes through from now on."""
        self._epoch, self._iterator = epoch, iterator

    @property
    def epoch(self) -> float:
        """Passes over the training data so far. The iterator knows its place, also after a resume within an epoch."""
        done = self._iterator.n / max(len(self._iterator), 1) if self._iterator is not None else 0.0
        return round(self._epoch - 1 + done, 6)

    def append(self, split: str, update: int, stats: dict[str, Any]) -> None:
        """Append one record, closing the file, so that a kill can cut the last line only.

        Raises:
            UserError: the file cannot be written.
        """
        record = {"split": split, "update": int(update), "epoch": self.epoch, **numbers_of(stats)}
        try:
            with open(self.path, "ab") as file:
                file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        except OSError as error:
            raise self._unwritten(error) from error

    def _unwritten(self, error: OSError) -> UserError:
        return UserError(
            f"{self.path}: metrics cannot be written ({error.strerror}); make room or permit writing, "
            "then start the same command again to continue from the last checkpoint"
        )

    def cut_back(self, update: int) -> None:
        """Drop what stands after ``update``: the resumed run writes it again. 0 starts the file anew.

        A last line that a kill cut short goes as well. The file is replaced whole or left as it is.

        Raises:
            UserError: the file cannot be read or written.
        """
        if not os.path.exists(self.path):
            return
        try:
            with open(self.path, "rb") as file:
                content = file.read()
            kept = b"".join(self._kept_lines(content, update))
            if kept == content:
                return
            logger.info("%s: cut back to update %d", self.path, update)
            with whole_file(self.path) as unfinished, open(unfinished, "wb") as file:
                file.write(kept)
        except OSError as error:
            raise self._unwritten(error) from error

    def _kept_lines(self, content: bytes, update: int) -> Iterator[bytes]:
        for number, line in enumerate(content.splitlines(), start=1):
            try:
                recorded_update = int(json.loads(line)["update"])
            except (ValueError, KeyError, TypeError):
                logger.warning("%s: line %d is broken and is dropped", self.path, number)
                continue
            if recorded_update <= update:
                yield line + b"\n"


class MetricsProgressBar(progress_bar.BaseProgressBar):
    """Passes everything on to another bar and records what is logged (as fairseq's own wrapper bars do)."""

    def __init__(self, wrapped_bar: Any, iterator: Any, metrics_log: MetricsLog) -> None:
        self.wrapped_bar = wrapped_bar
        self.iterator = iterator
        self.metrics_log = metrics_log

    def __len__(self) -> int:
        return len(self.iterator)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wrapped_bar)

    def log(self, stats: dict[str, Any], tag: Optional[str] = None, step: Optional[int] = None) -> None:
        """Record statistics of a training interval (fairseq's only caller of this method)."""
        self.metrics_log.append("train", step, stats)
        self.wrapped_bar.log(stats, tag=tag, step=step)

    def print(self, stats: dict[str, Any], tag: Optional[str] = None, step: Optional[int] = None) -> None:
        """Record the statistics of a validation; the end-of-epoch averages of training pass unrecorded."""
        if tag != "train":
            self.metrics_log.append(tag, step, stats)
        self.wrapped_bar.print(stats, tag=tag, step=step)

    def update_config(self, config: dict[str, Any]) -> None:
        self.wrapped_bar.update_config(config)


def is_master_rank() -> bool:
    """True in the one process that writes files (also where nothing is distributed)."""
    return distributed_utils.get_global_rank() == 0


_logs: dict[str, MetricsLog] = {}
_resumed_updates: dict[str, int] = {}


def record_logged_values(make_bar: Callable[..., Any], iterator: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``progress_bar.progress_bar``: the bars of fairseq's trainer record what they log."""
    bar = make_bar(iterator, *args, **kwargs)
    # Only fairseq's trainer passes the checkpoint directory (under the name that Aim uses); other commands do not.
    save_dir = kwargs.get("aim_param_checkpoint_dir")
    if save_dir is None:
        return bar
    log = _logs.setdefault(save_dir, MetricsLog(save_dir))
    if kwargs.get("prefix") is None:  # for validation it holds the name of the subset
        log.follow(kwargs["epoch"], iterator)
        # Here and not when the checkpoint was loaded: a run that is refused in between changes nothing.
        if save_dir in _resumed_updates:
            on_first_rank(functools.partial(log.cut_back, _resumed_updates.pop(save_dir)))
    return MetricsProgressBar(bar, iterator, log) if is_master_rank() else bar


def note_resumed_update(load_checkpoint: Callable[..., Any], cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """Replace ``checkpoint_utils.load_checkpoint``: note the update after which the file continues."""
    loaded = load_checkpoint(cfg, trainer, **kwargs)
    _resumed_updates[cfg.save_dir] = trainer.get_num_updates()
    return loaded

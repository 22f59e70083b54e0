"""What a run prints, its first lines and its progress, and what it writes to ``SAVE_DIR/metrics.jsonl``.

The averages that fairseq prints at the end of an epoch are not recorded: they are means over other updates than the
interval records, and would not fit on the same curve.
"""

import functools
import json
import logging
import math
import os
import sys
import time
from collections import deque
from contextlib import AbstractContextManager
from numbers import Number
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics
from fairseq.logging.meters import Meter, StopwatchMeter
from omegaconf import OmegaConf
from tqdm import tqdm

from amos_fairseq.compat.distribution import from_first_rank
from amos_fairseq.files import explain_write_errors, whole_file
from amos_fairseq.optim.warmup_stable_decay import WarmupStableDecay, schedule_of
from amos_fairseq.run.hook import Hook
from amos_fairseq.run.metrics_file import FILE_NAME, parse_record

logger = logging.getLogger(__name__)

SECONDS_TO_FIRST_LINE, SECONDS_BETWEEN_LINES = 30.0, 60.0
UPDATES_OF_RATE = 100  # the rate is that of the last ones, with the validations and checkpoints between them
NEVER = 1_000_000_000  # checkpoint.save_interval, in epochs, of the recipes
SLOW_UPDATES = 2  # the first ones of a process allocate memory and choose kernels: the rate leaves them out
MEASURED = SLOW_UPDATES + 20  # after this update of the process a line gives the time to the end


class Progress(Hook):
    """The position of a run and its rate: a bar over the whole run on a terminal, lines elsewhere. Stock fairseq prints a bar
    per epoch, or a line per ``--log-interval`` updates, which may be hours apart on a CPU, and never how long a run takes."""

    def __init__(self) -> None:
        self.trainer: Any = None  # from the first epoch on
        self._total: int | None = None
        self._schedule: WarmupStableDecay | None = None
        self._times: deque[float] = deque(maxlen=UPDATES_OF_RATE + 1)
        self._last_line, self._seconds_to_next = time.monotonic(), SECONDS_TO_FIRST_LINE
        self._num_updates = 0  # of this process
        self._bar: tqdm | None = None

    def before_launch(self, cfg: Any) -> None:
        """Log what a training run will do, before anything is loaded."""
        logging.getLogger("fairseq_cli.train").addFilter(is_text)
        if cfg.distributed_training.distributed_rank != 0:
            return
        updates, epochs = cfg.optimization.max_update, cfg.optimization.max_epoch
        if minutes := OmegaConf.select(cfg, "lr_scheduler.minutes"):
            limit = f"{minutes:g} minutes, with updates"
        else:
            limit = " or ".join([f"{updates:,} updates"] * bool(updates) + [f"{epochs} epochs"] * bool(epochs))
        if minutes or updates or epochs:
            logger.info(f"{cfg.checkpoint.save_dir}: {limit}{_update_size(cfg)}; {_saves(cfg)}")

    def before_epoch(self, cfg: Any, trainer: Any) -> None:
        if self.trainer is None:
            self.trainer = trainer
            self._total = getattr(trainer, "planned_updates", cfg.optimization.max_update) or None
            self._schedule = schedule_of(trainer)
            self._last_line = time.monotonic()

    def before_bar(self, save_dir: str, batches: Any, settings: dict[str, Any]) -> None:
        """On a terminal, show one bar for the run in place of fairseq's, which starts again with every epoch."""
        is_bar = (settings.get("log_format") or settings.get("default_log_format")) == "tqdm"
        if not (is_bar and self.trainer and sys.stderr.isatty() and distributed_utils.get_global_rank() == 0):
            return
        settings["log_format"] = "none"
        if self._bar is None:
            bar_settings = {"total": self._total, "unit": "update"}
            if self._minutes:
                bar_settings = {
                    "total": self._minutes,
                    "bar_format": "{percentage:3.0f}%|{bar}| {n:.1f} of {total:g} min{postfix}",
                }
            self._bar = tqdm(initial=self._done(), dynamic_ncols=True, smoothing=0.05, **bar_settings)

    def before_next_batch(self) -> None:
        """Note the end of an update, and show the loss if fairseq's log interval has not shown it for a while, a mean over the
        interval so far."""
        if self.trainer is None:
            return
        num_updates, now = self.trainer.get_num_updates(), time.monotonic()
        self._num_updates += 1
        if self._num_updates >= SLOW_UPDATES:
            self._times.append(now)
        if self._bar is not None:
            self._bar.update(self._done() - self._bar.n)
        is_late = now - self._last_line > self._seconds_to_next
        if not is_late and self._num_updates != MEASURED:
            return
        loss = metrics.get_meter(INTERVAL, "loss")
        if loss is None or not loss.count:  # its record has just been logged, or all its updates overflowed
            return
        self.note_line()
        stats = metrics.get_smoothed_values(INTERVAL)
        if self._bar is not None:
            self._show_beside_bar(stats)
            return
        of = f" of {self._total:,}" if self._total else ""
        of += f", minute {self._done():.1f} of {self._minutes:g}" if self._minutes else ""
        left = self.time_left(", about {} to the end")
        logger.info(f"update {num_updates:,}{of}: loss {_number(stats['loss']):.3f}{self._rate()}{left}")

    def note_line(self) -> None:
        self._last_line, self._seconds_to_next = time.monotonic(), SECONDS_BETWEEN_LINES

    def before_logging(self, save_dir: str, split: str, update: int, values: dict[str, Any]) -> None:
        """Show the loss and the throughput of an interval beside the bar; without a bar, add the time to the end."""
        if split != "train" or self.trainer is None:
            return
        self.note_line()
        if self._bar is not None:
            self._show_beside_bar(values)
        elif left := self.time_left():
            values["left"] = left

    def _show_beside_bar(self, stats: dict[str, Any]) -> None:
        rate = stats.get("tokens_per_second", stats.get("wps"))
        shown = [f"update {self.trainer.get_num_updates():,}"] if self._minutes else []
        shown += [f"{_number(rate):,.0f} tokens/s"] if rate is not None else []
        shown += [f"loss {_number(stats['loss']):.3f}"] if "loss" in stats else []
        self._bar.set_postfix_str(", ".join(shown))

    def after_epoch(self, should_stop: bool) -> None:
        """Close the bar with the last epoch, and where an epoch ends with an exception."""
        if should_stop and self._bar is not None:
            self._bar.update(self._done() - self._bar.n)
            self._bar.close()

    @property
    def _minutes(self) -> float:
        """The budget of time; 0 where updates or epochs end the run."""
        return self._schedule.cfg.minutes if self._schedule else 0.0

    def _done(self) -> float:
        return self._schedule.seconds / 60 if self._minutes else self.trainer.get_num_updates()

    def time_left(self, text: str = "{}") -> str:
        """Return ``text`` with the time to the end; empty where it is not known."""
        if self._minutes:
            return text.format(duration(max(0.0, 60 * (self._minutes - self._done()))))
        seconds = self._seconds_per_update()
        if seconds is None or self._total is None:
            return ""
        return text.format(duration(seconds * max(0, self._total - self.trainer.get_num_updates())))

    def _rate(self) -> str:
        """Return the rate after a comma; empty where it is not known."""
        seconds = self._seconds_per_update()
        if seconds is None:
            return ""
        if seconds < 0.1:
            return f", {1 / max(seconds, 1e-9):.0f} updates/s"
        return f", {seconds:.2g} s per update" if seconds < 10 else f", {seconds:.0f} s per update"

    def _seconds_per_update(self) -> float | None:
        if len(self._times) < 2:
            return None
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1)


def is_text(record: logging.LogRecord) -> bool:
    """Leave out the configuration and the tree of modules, hundreds of lines which fairseq logs as objects."""
    return isinstance(record.msg, str)


def _update_size(cfg: Any) -> str:
    """Return the size of an update, where the settings determine it."""
    if not cfg.dataset.batch_size or cfg.dataset.max_tokens:
        return ""
    if phases := OmegaConf.select(cfg, "task.phases"):
        return f" in the phases {phases}"
    ranks, length = cfg.distributed_training.distributed_world_size, getattr(cfg.task, "tokens_per_sample", None)
    sequences = cfg.dataset.batch_size * cfg.optimization.update_freq[0] * ranks
    tokens = f" x {length} = {sequences * length:,} tokens" if length else ""
    return f" of {sequences} sequences{tokens}, on {ranks} rank{'' if ranks == 1 else 's'}"


def _saves(cfg: Any) -> str:
    checkpoint, minutes = cfg.checkpoint, getattr(cfg.task, "save_interval_minutes", 0)
    if checkpoint.no_save:
        return "no checkpoints"
    times = [f"{checkpoint.save_interval_updates:,} updates"] if checkpoint.save_interval_updates > 0 else []
    times += [f"{minutes:g} minutes"] if minutes else []
    if not times and checkpoint.save_interval >= NEVER:
        return "a checkpoint at the end"
    times = times or ["epoch" if checkpoint.save_interval == 1 else f"{checkpoint.save_interval} epochs"]
    return f"a checkpoint every {' and every '.join(times)}"


def duration(seconds: float) -> str:
    """Return a time in its two largest units, such as "2 h 10 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next((index for index, (number, _) in enumerate(units) if number), len(units) - 1)
    return " ".join(f"{number} {unit}" for number, unit in units[first : first + 2])


def _number(value: Any) -> float:
    return float(value.smoothed_value if isinstance(value, Meter) else value)


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
        """Note the update after which the file continues, and restore the meters of the interval, as fairseq does not."""
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
        if (phase_iterator := getattr(self.task, "phase_iterator", None)) is not None:
            done = phase_iterator.position / phase_iterator.dataset.stream_length
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
        lines = content.splitlines()
        records = list(map(parse_record, lines))
        if num_broken := records.count(None):
            logger.warning("%s: %d broken lines are dropped", path, num_broken)
        kept = [line for line, record in zip(lines, records, strict=True) if record and record["update"] <= update]
        remaining = b"".join(line + b"\n" for line in kept)
        if remaining != content:
            logger.info("%s: cut back to update %d", path, update)
            with whole_file(path) as unfinished, open(unfinished, "wb") as file:
                file.write(remaining)


def _explained(path: str) -> AbstractContextManager[None]:
    hint = "make room or permit writing, then start the same command again to continue from the last checkpoint"
    return explain_write_errors(f"{path}: metrics", hint)

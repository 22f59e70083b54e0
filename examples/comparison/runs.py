"""The processes of a comparison: pretraining and fine-tuning of an entry, under one time limit."""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from budgets import SHARES, update_at
from entries import Entry, hydra_overrides
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from amos_fairseq.checkpoint_files import read_header, training_seconds_of
from amos_fairseq.errors import INTERRUPTED, REQUEUE, UserError
from amos_fairseq.experiments.benchmark import Stopped
from amos_fairseq.experiments.records import RESULT_FILE, RunResult, in_order, read_result
from amos_fairseq.experiments.runner import PACKAGE, environment, train
from amos_fairseq.process import python_command
from amos_fairseq.recipes.composition import RECIPES
from amos_fairseq.run.metrics_file import read_records

# Where a progress bar cannot be rewritten, it is printed rarely.
SECONDS_BETWEEN_LINES = 30.0
# A checkpoint of a run must agree with its entry in these settings (None: in all); settings that only one of them has come
# from an older or newer version of the package.
COMPARED = {
    **dict.fromkeys(("task", "model", "criterion", "optimization", "optimizer", "lr_scheduler")),
    "dataset": ("batch_size", "max_tokens", "train_subset"),
    "common": ("seed",),
}
NOT_COMPARED = {"task.data", "task.save_dir", "task.tokenizer_directory"}
TIMED_UPDATES, TIMED_LINES = 48, 6


class Runner:
    """Run processes one after another until they are stopped by the time limit, Ctrl-C or SIGTERM.

    Attributes:
        stop: set at the end of the time, or by a signal.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._interrupted = False

    def handle_signal(self, number: int, frame: object) -> None:
        """Let the running process save its state and end."""
        self._interrupted = self._interrupted or number == signal.SIGINT
        self.stop.set()

    @property
    def exit_code(self) -> int:
        """Exit code after a stop: 75 if the same command should be started again, 130 after Ctrl-C."""
        return INTERRUPTED if self._interrupted else REQUEUE

    def run(
        self,
        label: str,
        command: list[str],
        directory: Path,
        variables: dict[str, str],
        total: int,
        progress: Callable[[int], int],
    ) -> None:
        """Run one process to its end with a progress bar; its output goes to ``directory/train.log``.

        Args:
            total: end of the bar.
            progress: position of the bar for the number of updates in ``directory/metrics.jsonl``.

        Raises:
            Stopped: it was stopped, and has saved its state.
            RunFailed: it ended with an error.
        """
        if self.stop.is_set():
            raise Stopped
        directory.mkdir(parents=True, exist_ok=True)
        interval = 0.5 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
        with tqdm(total=total, initial=progress(0), desc=label, mininterval=interval) as bar:
            move = lambda updates, records: _move(bar, progress(updates))  # noqa: E731
            train(command, directory, variables, self.stop, move, start_process)
            _move(bar, total)


def start_process(command: list[str], variables: dict[str, str], log: Path) -> subprocess.Popen:
    """Start a command in a process and session of its own; it ends with its standard input, a pipe from this process."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )


def _move(bar: tqdm, position: int) -> None:
    bar.update(max(0, position - bar.n))


@contextlib.contextmanager
def limited_runner(minutes: float) -> Iterator[Runner]:
    """Yield a runner that stops after ``minutes``, or never for 0, and handles SIGINT and SIGTERM."""
    runner = Runner()
    timer = threading.Timer(minutes * 60, runner.stop.set)
    timer.daemon = True
    if minutes:
        timer.start()
    previous = {number: signal.signal(number, runner.handle_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield runner
    finally:
        timer.cancel()
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Pretraining:
    """The pretraining run of an entry.

    Attributes:
        cfg: composed configuration of the run.
        settings: Hydra key -> value, in addition to those of the entry's config.
        save_dir: SAVE_DIR.
        device: "cpu" or "cuda:0".
    """

    entry: Entry
    cfg: DictConfig
    settings: dict[str, Any]
    save_dir: Path
    device: str

    @property
    def max_update(self) -> int:
        return int(self.cfg.optimization.max_update)

    @property
    def finished(self) -> bool:
        return self.num_updates >= self.max_update

    @property
    def num_updates(self) -> int:
        header = self._last_header()
        return int(header["optimizer_history"][-1]["num_updates"]) if header else 0

    def _last_header(self) -> dict[str, Any] | None:
        last = self.save_dir / "checkpoint_last.pt"
        return read_header(str(last)) if last.is_file() else None

    def checkpoint(self, share: float) -> Path | None:
        """Return the checkpoint at a share of the updates; None if it is not written yet."""
        found = sorted(self.save_dir.glob(f"checkpoint_*_{update_at(self.max_update, share)}.pt"))
        if found:
            return found[0]
        # At the end of an epoch fairseq saves none by updates.
        return self.save_dir / "checkpoint_last.pt" if share == 1.0 and self.finished else None

    def check(self) -> None:
        """Raise :class:`UserError` if SAVE_DIR contains a run with other settings."""
        header = self._last_header()
        saved = (header.get("cfg") or {}) if header else {}
        for group, keys in COMPARED.items():
            old = saved.get(group) or {}
            for key in sorted(old.keys() & self.cfg[group].keys() & set(keys or old)):
                new = OmegaConf.to_container(OmegaConf.create({"value": self.cfg[group][key]}))["value"]
                if (group, key, new) == ("task", "precision", "auto"):  # a run that continues keeps its own
                    continue
                if f"{group}.{key}" not in NOT_COMPARED and not _equal(old[key], new):
                    raise UserError(
                        f"{self.save_dir} was trained with {group}.{key}={old[key]}, not {new}: give another OUT, or "
                        "remove that folder"
                    )

    def run(self, runner: Runner) -> None:
        """Train to the end of the budget, then remove the other checkpoints.

        Raises:
            Stopped: the runner was stopped; the checkpoint is saved.
            RunFailed: training ended with an error.
        """
        command = hydra_command(self.entry, self.settings, self.save_dir, self.device)
        variables, start = environment(self.device, 1), self.num_updates
        label = f"{self.entry.name}: pretraining"
        try:
            runner.run(label, command, self.save_dir, variables, self.max_update, lambda updates: max(updates, start))
        finally:
            self.prune()

    def prune(self) -> None:
        """Remove the checkpoints of updates that are no share."""
        shares = {update_at(self.max_update, share) for share in SHARES}
        for file in self.save_dir.glob("checkpoint_*_*.pt"):
            if int(file.stem.rsplit("_", 1)[1]) not in shares:
                file.unlink()

    def hours(self, share: float) -> float | None:
        """Return the training time up to a checkpoint, including validation, saving, and all parts of a resumed run."""
        file = self.checkpoint(share)
        return training_seconds_of(read_header(str(file))) / 3600 if file else None

    def tokens_per_second(self) -> float | None:
        """Return the median over the logged intervals; None before the first."""
        speeds = logged_values(self.save_dir, "wps")
        return statistics.median(speeds) if speeds else None


def logged_values(save_dir: Path, key: str) -> list[float]:
    """Return the values that a run logged for its training intervals under ``key``."""
    values = [record.get(key) for record in read_records(save_dir) if record["split"] == "train"]
    return [value for value in values if value is not None]


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, (int, float)) and isinstance(new, (int, float)):
        return float(old) == float(new)
    return str(old) == str(new)


def hydra_command(entry: Entry, settings: dict[str, Any], save_dir: Path, device: str) -> list[str]:
    """Return the command of one ``fairseq-hydra-train`` process; run again, it resumes."""
    own = {
        "checkpoint.save_dir": str(save_dir),
        "common.user_dir": str(PACKAGE),
        "common.cpu": device == "cpu",
        # The settings are those of one process, however many GPUs the machine has.
        "distributed_training.distributed_world_size": 1,
    }
    command = python_command("fairseq_cli.hydra_train", "-W", "ignore", with_parent=True)
    return [*command, "--config-dir", str(RECIPES), "--config-name", entry.config, *hydra_overrides(settings | own)]


def measure_seconds_per_update(
    entry: Entry, settings: dict[str, Any], directory: Path, device: str, runner: Runner
) -> float:
    """Train some updates without saving and return the seconds of one: the median of the logged intervals but the first.

    Raises:
        Stopped: the runner was stopped.
        RunFailed: training ended with an error.
    """
    timed = settings | {
        "optimization.max_update": TIMED_UPDATES,
        "lr_scheduler.warmup_updates": 1,
        "common.log_interval": TIMED_UPDATES // TIMED_LINES,
        "checkpoint.no_save": True,
        "dataset.disable_validation": True,
    }
    command, variables = hydra_command(entry, timed, directory, device), environment(device, 1)
    runner.run(f"{entry.name}: timing", command, directory, variables, TIMED_UPDATES, lambda updates: updates)
    speeds, batches = (logged_values(directory, key)[-(TIMED_LINES - 1) :] for key in ("wps", "wpb"))
    return statistics.median(batch / speed for batch, speed in zip(batches, speeds, strict=True))


def num_threads() -> str:
    """Return the CPU threads of a training run, which its hours depend on."""
    return os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count())


@dataclass(frozen=True)
class FineTuning:
    """The fine-tuning runs of one checkpoint, made by ``amos glue``.

    Attributes:
        directory: the OUT of ``amos glue``.
        flags: further flags with their values.
    """

    label: str
    checkpoint: Path | None
    data: Path
    directory: Path
    tasks: tuple[str, ...]
    num_seeds: int
    flags: tuple[str, ...]

    @property
    def results(self) -> list[RunResult]:
        """Results of the requested tasks and seeds; the folder may contain more."""
        files = self.directory.glob(f"runs/*/*/seed*/{RESULT_FILE}")
        found = in_order(read_result(file.parent) for file in files)
        return [result for result in found if result.task in self.tasks and result.seed <= self.num_seeds]

    @property
    def finished(self) -> bool:
        return len({(result.task, result.seed) for result in self.results}) == len(self.tasks) * self.num_seeds

    def run(self, runner: Runner) -> None:
        """Make the runs that have no result yet.

        Raises:
            Stopped: the runner was stopped; an active run has saved its state.
            RunFailed: ``amos glue`` ended with an error.
        """
        values = {
            "--checkpoint": self.checkpoint,
            "--data": self.data,
            "--out": self.directory,
            "--tasks": ",".join(self.tasks),
            "--seeds": self.num_seeds,
        }
        command = [*python_command("amos_start", "-W", "ignore", with_parent=True), "glue"]
        command += [*(str(part) for pair in values.items() for part in pair), *self.flags]
        total = len(self.tasks) * self.num_seeds
        runner.run(self.label, command, self.directory, dict(os.environ), total, lambda _: len(self.results))

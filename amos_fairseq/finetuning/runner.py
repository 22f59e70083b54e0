"""Execution of planned runs on the available devices. Finished runs are not repeated, stopped runs continue."""

import contextlib
import queue
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from amos_fairseq.errors import UserError
from amos_fairseq.files import no_links
from amos_fairseq.finetuning.benchmark import Benchmark, Stopped
from amos_fairseq.finetuning.pretrained_checkpoint import PretrainedCheckpoint
from amos_fairseq.finetuning.report import best_run
from amos_fairseq.finetuning.runs import (
    Result,
    Run,
    check_identity,
    create_directory,
    package_versions,
    read_result,
    read_results,
    write_result,
)
from amos_fairseq.finetuning.training import (
    LOG_FILE,
    RunFailed,
    checkpoint_to_score,
    environment,
    epoch_and_seconds,
    keep_weights_only,
    remove_checkpoints,
    train,
    training_command,
)

MOST_RUNS = 1024  # at a time


@dataclass(frozen=True)
class Failure:
    run: Run
    reason: str

    @property
    def log(self) -> Path:
        return self.run.directory / LOG_FILE


@dataclass(frozen=True)
class Runner:
    """Executes runs of a benchmark.

    Attributes:
        devices: "cpu" or "cuda:N"; one run at a time on each entry. An entry may occur several times.
        precision: "fp32", "fp16" or "bf16".
        keep_checkpoints: keep all checkpoints with the optimizer state, not only the weights of each task's best run.
        stop: set by SIGINT and SIGTERM while runs are executed.
    """

    benchmark: Benchmark
    pretrained: PretrainedCheckpoint
    out: Path
    devices: tuple[str, ...]
    precision: str = "fp32"
    keep_checkpoints: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    _cleanup_lock: threading.Lock = field(default_factory=threading.Lock)

    def execute(self, runs: Sequence[Run]) -> list[Failure]:
        """Execute the runs that have no result yet.

        Returns:
            The runs that failed; a failure does not stop the other runs.

        Raises:
            UserError: a directory holds another run; raised before anything is started.
            Stopped: SIGINT or SIGTERM arrived; the child processes have saved their state and exited.
        """
        for run in runs:
            check_identity(run)
        open_runs = [run for run in runs if read_result(run.directory) is None]
        free_devices: queue.SimpleQueue[str] = queue.SimpleQueue()
        for device in self.devices:
            free_devices.put(device)
        with (
            stop_on_signals(self.stop),
            ProgressDisplay(len(runs), num_done=len(runs) - len(open_runs)) as display,
            ThreadPoolExecutor(len(self.devices)) as threads,
        ):
            futures = [threads.submit(self._run_on_free_device, run, free_devices, display) for run in open_runs]
            unfinished: set[Future] = set(futures)
            while unfinished:  # short waits: Python runs signal handlers in between
                unfinished = wait(unfinished, timeout=0.5).not_done
        if self.stop.is_set():
            raise Stopped
        return [failure for future in futures if (failure := future.result()) is not None]

    def _run_on_free_device(
        self, run: Run, free_devices: "queue.SimpleQueue[str]", display: "ProgressDisplay"
    ) -> Failure | None:
        if self.stop.is_set():
            return None
        device = free_devices.get()
        try:
            display.start(run)
            result = self._train_and_evaluate(run, device, display)
            display.finish(run, f"{result.main_score} {result.main:.1f} after epoch {result.epoch:g}")
        except Stopped:
            display.stopped(run)
        except (RunFailed, UserError) as error:
            display.finish(run, f"FAILED: {error}")
            return Failure(run, str(error))
        except Exception as error:  # a bug in one run must not stop the others; its log gets the traceback
            with (
                contextlib.suppress(OSError, UserError),
                open(run.directory / LOG_FILE, "a", encoding="utf-8", opener=no_links) as log,
            ):
                log.write(traceback.format_exc())
            display.finish(run, f"FAILED: {type(error).__name__}: {error}")
            return Failure(run, f"{type(error).__name__}: {error}")
        finally:
            free_devices.put(device)
        return None

    def _train_and_evaluate(self, run: Run, device: str, display: "ProgressDisplay") -> Result:
        create_directory(run)
        self.benchmark.copy_tokenizer_and_labels(run.task.name, run.directory)
        command = training_command(run, self.benchmark, self.pretrained, device, self.precision)
        variables = environment(device, len(self.devices))
        train(command, run.directory, variables, self.stop, lambda updates: display.advance(run, updates))
        display.evaluating(run)
        checkpoint = checkpoint_to_score(run)
        scores = self.benchmark.evaluate(run.task.name, checkpoint, run.directory, device, self.stop)
        epoch, seconds = epoch_and_seconds(run, checkpoint)
        start_sha256 = run.identity.get("intermediate_sha256", self.pretrained.sha256)
        result = Result(
            task=run.task.name, trial=run.trial, seed=run.seed, directory=str(run.directory.relative_to(self.out)),
            main_score=run.task.main_score, scores=scores, checkpoint=checkpoint.name, epoch=epoch, seconds=seconds,
            start_sha256=None if run.finetune_from is None else start_sha256, identity=run.identity,
            versions=package_versions(), notes=run.task.notes,
        )  # fmt: skip
        # The result is written before checkpoints are removed: a kill in between leaves too many files, not too few.
        with self._cleanup_lock:
            write_result(self.out, result)
            if not self.keep_checkpoints:
                self._keep_best_weights_only(result.task, checkpoint)
        return result

    def _keep_best_weights_only(self, task: str, checkpoint: Path) -> None:
        """Keep only the weights of the task's best run so far; ``checkpoint`` is the newest one."""
        keep_weights_only(checkpoint)
        results = [result for result in read_results(self.out) if result.task == task]
        best = best_run(results)
        for result in results:
            if result != best:
                remove_checkpoints(self.out / result.directory)


@contextlib.contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Set ``stop`` on SIGINT and SIGTERM."""

    def set_stop(number: int, frame: FrameType | None) -> None:
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, set_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def find_devices(cpu: bool, parallel: int) -> tuple[str, ...]:
    """Return the GPUs, for one run each; without GPUs or with ``cpu``, the CPU for ``parallel`` runs at a time.

    Raises:
        UserError: ``parallel`` is below 1, or more than a machine can run.
    """
    if parallel < 1:
        raise UserError(f"--parallel {parallel} starts no run: give 1 or more")
    if parallel > MOST_RUNS:
        raise UserError(f"--parallel {parallel} asks for too many runs at a time: give at most {MOST_RUNS:,}")
    if cpu or not torch.cuda.is_available():
        return ("cpu",) * parallel
    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))


class ProgressDisplay:
    """The active runs and their progress, as bars in a terminal and as lines elsewhere. Thread-safe."""

    def __init__(self, num_runs: int, num_done: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip
        self._num_runs, self._num_done = num_runs, num_done
        self._epochs: dict[str, int] = {}
        self._bar_ids: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "ProgressDisplay":
        if self._num_done:
            self._print(f"{self._num_done} of {self._num_runs} runs are already finished")
        self._bars.start()
        self._total = self._bars.add_task("runs", total=self._num_runs, completed=self._num_done)
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def start(self, run: Run) -> None:
        with self._lock:
            self._bar_ids[run.label] = self._bars.add_task(run.label, total=run.total_updates)
            self._epochs[run.label] = 0
        self._print(f"{run.label}: {run.hyperparameters.epochs} epochs, {run.total_updates} updates")

    def advance(self, run: Run, updates: int) -> None:
        epoch = min(updates // run.updates_per_epoch + 1, run.hyperparameters.epochs)
        with self._lock:
            is_new_epoch = epoch > self._epochs[run.label] > 0
            self._epochs[run.label] = epoch
            name = f"{run.label}, epoch {epoch} of {run.hyperparameters.epochs}"
            self._bars.update(self._bar_ids[run.label], completed=updates, description=name)
        if is_new_epoch and not self.console.is_terminal:
            self._print(name)

    def evaluating(self, run: Run) -> None:
        with self._lock:
            self._bars.update(self._bar_ids[run.label], description=f"{run.label}, scoring")

    def finish(self, run: Run, outcome: str) -> None:
        """Show the score of a finished run, or the reason of a failed one."""
        with self._lock:
            self._num_done += 1
            num_done = self._num_done
            self._bars.remove_task(self._bar_ids.pop(run.label))
            self._bars.update(self._total, completed=num_done)
        self._print(f"{run.label}: {outcome} ({num_done} of {self._num_runs} runs)")

    def stopped(self, run: Run) -> None:
        with self._lock:
            self._bars.remove_task(self._bar_ids.pop(run.label))
        self._print(f"{run.label}: stopped")

    def _print(self, line: str) -> None:
        # As Text, because the name of a trial or a path may contain rich's markup.
        self.console.print(Text(line), soft_wrap=True)

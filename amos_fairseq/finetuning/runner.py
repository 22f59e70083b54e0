"""Goes through a plan of runs on the devices at hand; what is finished is not made again, what was stopped continues."""

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

from amos_fairseq.errors import UserError
from amos_fairseq.finetuning.benchmark import Benchmark, Stopped
from amos_fairseq.finetuning.plan import Run, check_identity, claim_directory
from amos_fairseq.finetuning.progress import Display
from amos_fairseq.finetuning.results import Result, read_result, read_results, versions, write_result
from amos_fairseq.finetuning.starting_point import StartingPoint
from amos_fairseq.finetuning.statistics import best_run
from amos_fairseq.finetuning.training import (
    LOG_FILE,
    RunFailed,
    chosen_checkpoint,
    environment,
    epoch_and_seconds,
    keep_weights_only,
    remove_checkpoints,
    train,
    training_command,
)


@dataclass(frozen=True)
class Failure:
    run: Run
    reason: str

    @property
    def log(self) -> Path:
        return self.run.directory / LOG_FILE


@dataclass(frozen=True)
class Runner:
    """How runs are made.

    Attributes:
        devices: one run at a time on each entry, "cpu" or "cuda:N"; an entry may stand several times.
        precision: "fp32", "fp16" or "bf16".
        keep_checkpoints: keep all checkpoints with the optimizer's state, not only the weights of each task's best run.
    """

    benchmark: Benchmark
    start: StartingPoint
    out: Path
    devices: tuple[str, ...]
    precision: str = "fp32"
    keep_checkpoints: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    _pruning: threading.Lock = field(default_factory=threading.Lock)

    def execute(self, runs: Sequence[Run]) -> list[Failure]:
        """Make the runs that have no result yet.

        Returns:
            The runs that failed; the others go on.

        Raises:
            UserError: a directory holds another run, before anything is started.
            Stopped: SIGINT or SIGTERM came; children have saved their state and ended.
        """
        for run in runs:
            check_identity(run)
        open_runs = [run for run in runs if read_result(run.directory) is None]
        free: queue.SimpleQueue[str] = queue.SimpleQueue()
        for device in self.devices:
            free.put(device)
        with (
            stop_on_signals(self.stop),
            Display(len(runs), done=len(runs) - len(open_runs)) as display,
            ThreadPoolExecutor(len(self.devices)) as threads,
        ):
            futures = {threads.submit(self._run_on_free_device, run, free, display): run for run in open_runs}
            _wait_for(futures)
        if self.stop.is_set():
            raise Stopped
        return [failure for future in futures if (failure := future.result()) is not None]

    def _run_on_free_device(self, run: Run, free: "queue.SimpleQueue[str]", display: Display) -> Failure | None:
        if self.stop.is_set():
            return None
        device = free.get()
        try:
            display.start(run)
            result = self._run(run, device, display)
            display.finish(run, f"{result.main_score} {result.main:.1f} after epoch {result.epoch:g}")
        except Stopped:
            display.stopped(run)
        except (RunFailed, UserError) as error:
            display.finish(run, f"FAILED: {error}")
            return Failure(run, str(error))
        except Exception as error:  # one broken run must not end the others; its log says all
            with contextlib.suppress(OSError), (run.directory / LOG_FILE).open("a", encoding="utf-8") as log:
                log.write(traceback.format_exc())
            display.finish(run, f"FAILED: {type(error).__name__}: {error}")
            return Failure(run, f"{type(error).__name__}: {error}")
        finally:
            free.put(device)
        return None

    def _run(self, run: Run, device: str, display: Display) -> Result:
        claim_directory(run)
        self.benchmark.furnish(run.task.name, run.directory)
        command = training_command(run, self.benchmark, self.start, device, self.precision)
        variables = environment(device, len(self.devices))
        train(command, run.directory, variables, self.stop, lambda updates: display.advance(run, updates))
        display.evaluating(run)
        checkpoint = chosen_checkpoint(run)
        scores = self.benchmark.evaluate(run.task.name, checkpoint, run.directory, device, self.stop)
        epoch, seconds = epoch_and_seconds(run, checkpoint)
        result = Result(
            task=run.task.name, point=run.point, seed=run.seed, directory=str(run.directory.relative_to(self.out)),
            main_score=run.task.main_score, scores=scores, checkpoint=checkpoint.name, epoch=epoch, seconds=seconds,
            start_sha256=self._start_sha256(run), identity=run.identity, versions=versions(),
            notes=run.task.notes,
        )  # fmt: skip
        self._finish(result, checkpoint)
        return result

    def _start_sha256(self, run: Run) -> str | None:
        if run.start is None:
            return None
        return run.identity.get("intermediate_sha256", self.start.sha256)

    def _finish(self, result: Result, checkpoint: Path) -> None:
        """Write the result, last of all what takes its place on the disk: a kill in between leaves too much, not too
        little."""
        with self._pruning:
            write_result(self.out, result)
            if self.keep_checkpoints:
                return
            keep_weights_only(checkpoint)
            of_task = [other for other in read_results(self.out) if other.task == result.task]
            best = best_run(of_task)
            for other in of_task:
                if other != best:
                    remove_checkpoints(self.out / other.directory)


def _wait_for(futures: "dict[Future, Run]") -> None:
    """Wait in short steps: Python runs signal handlers between them."""
    unfinished = set(futures)
    while unfinished:
        unfinished = wait(unfinished, timeout=0.5).not_done


@contextlib.contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Set ``stop`` at SIGINT and SIGTERM."""

    def note(number: int, frame: FrameType | None) -> None:
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def find_devices(cpu: bool, parallel: int) -> tuple[str, ...]:
    """The GPUs, one run on each; without GPUs or with ``cpu`` as many runs at a time as ``parallel`` says.

    Raises:
        UserError: ``parallel`` is no number of runs.
    """
    if parallel < 1:
        raise UserError(f"--parallel {parallel} starts nothing: give 1 or more")
    if cpu or not torch.cuda.is_available():
        return ("cpu",) * parallel
    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))

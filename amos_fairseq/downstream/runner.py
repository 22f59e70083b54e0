"""Execution of planned runs on the available devices. Finished runs are not repeated, stopped runs continue."""

import contextlib
import functools
import queue
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from amos_fairseq.downstream.benchmark import Benchmark, Stopped
from amos_fairseq.downstream.progress_display import ProgressDisplay
from amos_fairseq.downstream.runs import (
    LOG_FILE,
    Failure,
    RunResult,
    TaskRun,
    package_versions,
    read_result,
    read_results,
    write_result,
)
from amos_fairseq.downstream.summary import best_run
from amos_fairseq.downstream.training import (
    RunFailed,
    checkpoint_to_score,
    environment,
    epoch_and_seconds,
    keep_weights_only,
    remove_checkpoints,
    train,
    training_command,
    training_server,
)
from amos_fairseq.errors import UserError
from amos_fairseq.files import no_links
from amos_fairseq.python_process import ForkServer


@dataclass(frozen=True)
class Runner:
    """Executes runs of a benchmark on the session's devices; ``stop`` is set by SIGINT and SIGTERM meanwhile."""

    benchmark: Benchmark
    stop: threading.Event = field(default_factory=threading.Event)
    _cleanup_lock: threading.Lock = field(default_factory=threading.Lock)

    def execute(self, runs: Sequence[TaskRun]) -> list[Failure]:
        """Execute the runs that have no result yet.

        Returns:
            The runs that failed; a failure does not stop the other runs.

        Raises:
            UserError: a directory holds another run; raised before anything is started.
            Stopped: SIGINT or SIGTERM arrived; the child processes have saved their state and exited.
        """
        for run in runs:
            run.check_directory()
        devices = self.benchmark.session.devices
        open_runs = [run for run in runs if read_result(run.directory) is None]
        free_devices: queue.SimpleQueue[str] = queue.SimpleQueue()
        for device in devices:
            free_devices.put(device)
        with (
            stop_on_signals(self.stop),
            training_server(devices, self.stop) as server,
            ProgressDisplay(len(runs), num_done=len(runs) - len(open_runs)) as display,
            ThreadPoolExecutor(len(devices)) as threads,
        ):
            futures = [
                threads.submit(self._run_on_free_device, run, free_devices, server, display) for run in open_runs
            ]
            unfinished: set[Future] = set(futures)
            while unfinished:  # short waits: Python runs signal handlers in between
                unfinished = wait(unfinished, timeout=0.5).not_done
        if self.stop.is_set():
            raise Stopped
        return [failure for future in futures if (failure := future.result()) is not None]

    def _run_on_free_device(
        self, run: TaskRun, free_devices: queue.SimpleQueue, server: ForkServer, display: ProgressDisplay
    ) -> Failure | None:
        if self.stop.is_set():
            return None
        device = free_devices.get()
        try:
            display.start(run)
            result = self._train_and_evaluate(run, device, server, display)
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

    def _train_and_evaluate(self, run: TaskRun, device: str, server: ForkServer, display: ProgressDisplay) -> RunResult:
        benchmark, session, task = self.benchmark, self.benchmark.session, run.task
        run.create_directory()
        benchmark.fill_directory(run)
        command, variables = training_command(run, benchmark, device), environment(device, len(session.devices))
        advance = functools.partial(display.advance, run)
        train(command, run.directory, variables, self.stop, advance, server.start)
        display.evaluating(run)
        checkpoint = checkpoint_to_score(run)
        scores = benchmark.evaluate(task.name, checkpoint, run.directory, device, self.stop)
        epoch, seconds = epoch_and_seconds(run, checkpoint)
        start_sha256 = run.identity.get("intermediate_sha256", session.checkpoint.sha256)
        result = RunResult(
            task=task.name,
            trial=run.trial,
            seed=run.seed,
            directory=str(run.directory.relative_to(session.out)),
            main_score=task.main_score,
            scores=scores,
            checkpoint=checkpoint.name,
            epoch=epoch,
            seconds=seconds,
            start_sha256=None if run.finetune_from is None else start_sha256,
            identity=run.identity,
            versions=package_versions(),
            notes=task.notes,
        )
        # The result is written before checkpoints are removed: a kill in between leaves too many files, not too few.
        with self._cleanup_lock:
            write_result(session.out, result)
            if not session.keep_checkpoints:
                self._keep_best_weights_only(task.name, checkpoint)
        return result

    def _keep_best_weights_only(self, task: str, checkpoint: Path) -> None:
        """Keep only the weights of the task's best run so far; ``checkpoint`` is the newest one."""
        keep_weights_only(checkpoint)
        out = self.benchmark.session.out
        results = [result for result in read_results(out) if result.task == task]
        best = best_run(results)
        for result in results:
            if result != best:
                remove_checkpoints(out / result.directory)


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

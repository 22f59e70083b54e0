"""Execute the runs of a :class:`~amos_fairseq.experiments.benchmark.Benchmark`, and write their results and table.

A run is one ``fairseq-train`` in its own directory and process, followed by one call of ``evaluate`` in a thread of this
process. Several runs are active at once, each on its own device. Finished runs are not repeated, stopped runs continue.

OUT/NAME.setup.json                         the settings that all results of a benchmark in OUT share
OUT/NAME.md, NAME.csv, NAME.json            the table, and all results for other programs
"""

import contextlib
import functools
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import torch

from amos_fairseq.checkpoint_files import read_header, training_seconds_of
from amos_fairseq.errors import INTERRUPTED, REQUEUE, UserError
from amos_fairseq.experiments.benchmark import (
    LINEAR,
    LOG_FILE,
    Benchmark,
    Failure,
    Stopped,
    TaskRun,
    common_notes,
    save_results,
    schedules_in_words,
    settings_in_words,
    verdicts,
)
from amos_fairseq.experiments.progress_display import ProgressDisplay, counted
from amos_fairseq.experiments.records import (
    NO_BASELINES,
    Baselines,
    RunResult,
    best_run,
    content_sha256,
    package_versions,
    read_results,
    read_summary,
    write_result,
)
from amos_fairseq.experiments.session import claim_output_directory
from amos_fairseq.files import TOKENIZER_DIRECTORY, claim, file_sha256, whole_file
from amos_fairseq.output.tables import Table
from amos_fairseq.python_process import SECONDS_TO_SAVE, ForkedCommand
from amos_fairseq.recipes import PACKAGE
from amos_fairseq.run.metrics_file import NewRecords
from amos_fairseq.text.encoding import number_of_processes

# These variables of a launcher would turn a fine-tuning process into one of the launcher's ranks.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NO_RESULTS = (".pt", ".log", ".jsonl")  # files of a run: checkpoints, and logs of the training
POLL_SECONDS = 0.2
SERVER_KILLED = 255  # multiprocessing's exit code where the process that starts trainings is gone


class RunFailed(Exception):
    """A run ended without a result. The message is one line."""


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


class Runner:
    """Executes runs of a benchmark on the session's devices; ``stop`` is set by SIGINT and SIGTERM meanwhile."""

    def __init__(self, benchmark: Benchmark) -> None:
        self.benchmark, self.session, self.stop = benchmark, benchmark.session, threading.Event()
        self._cleanup_lock = threading.Lock()

    def execute(self, runs: Sequence[TaskRun]) -> list[Failure]:
        """Execute the runs that have no result yet, and return those that failed; a failure does not stop the others. After a
        signal, wait until the processes have saved their state and exited, and raise :class:`Stopped`."""
        for run in runs:
            run.check_directory()
        # All of OUT is read before the first training: the table would refuse a damaged result after the last one.
        finished = {self.session.out / result.directory for result in read_results(self.session.out)}
        open_runs = [run for run in runs if run.directory not in finished]
        free_devices: queue.SimpleQueue[str] = queue.SimpleQueue()
        for device in self.session.devices:
            free_devices.put(device)
        multiprocessing.set_forkserver_preload(["amos_fairseq.experiments.forked_training"])
        display = ProgressDisplay(len(runs), num_done=len(runs) - len(open_runs))
        with stop_on_signals(self.stop), ThreadPoolExecutor(len(self.session.devices)) as threads:
            futures = [threads.submit(self._run_on_free_device, run, free_devices, display) for run in open_runs]
            unfinished = set(futures)
            while unfinished:  # short waits: Python runs signal handlers in between
                unfinished = wait(unfinished, timeout=0.5).not_done
        if self.stop.is_set():
            raise Stopped
        return [failure for future in futures if (failure := future.result()) is not None]

    def _run_on_free_device(
        self, run: TaskRun, free_devices: queue.SimpleQueue, display: ProgressDisplay
    ) -> Failure | None:
        if self.stop.is_set():
            return None
        device = free_devices.get()
        display.start(run)
        try:
            result = self._train_and_evaluate(run, device, display)
        except Stopped:
            display.finish(run, "stopped", is_done=False)
            return None
        except (RunFailed, UserError) as error:
            reason = str(error)
        except Exception as error:  # a bug in one run must not stop the others; its log gets the traceback
            reason = f"{type(error).__name__}: {error}"
            with contextlib.suppress(OSError, UserError), _open_log(run.directory) as log:
                log.write(traceback.format_exc().encode())
        else:
            display.finish(run, f"{result.main_score} {result.main:.1f} after epoch {result.epoch:g}")
            return None
        finally:
            free_devices.put(device)
        display.finish(run, f"FAILED: {reason}")
        return Failure(run, reason)

    def _train_and_evaluate(self, run: TaskRun, device: str, display: ProgressDisplay) -> RunResult:
        benchmark, session, task = self.benchmark, self.session, run.task
        run.check_directory(claim)
        benchmark.fill_directory(run)
        command, variables = training_command(run, benchmark, device), environment(device, len(session.devices))
        report = functools.partial(display.advance, run)
        start = functools.partial(ForkedCommand, server_variables=variables_of_server(session.devices))
        train(command, run.directory, variables, self.stop, report, start)
        display.evaluating(run)
        checkpoint = run.directory / f"checkpoint_{run.hyperparameters.checkpoint}.pt"
        if not checkpoint.is_file():
            raise RunFailed(f"training ended without {checkpoint.name}")
        scores = benchmark.evaluate(task.name, checkpoint, device, self.stop)
        epoch, seconds = epoch_and_seconds(run, checkpoint)
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
            identity=run.identity,
            checkpoint_sha256=[file_sha256(checkpoint)],
            files=sha256_of_files(run.directory),
            versions=package_versions(),
            notes=list(task.notes),
        )
        with self._cleanup_lock:
            if session.keep_checkpoints:
                write_result(session.out, result)
                return result
            # A kill leaves a checkpoint that continues the training, or a result and one of the two that it names.
            with weights_alone(checkpoint, benchmark.only_trains) as kept:
                write_result(session.out, replace(result, checkpoint_sha256=[kept, *result.checkpoint_sha256]))
            remove_checkpoints(run.directory, kept=checkpoint)
            results = [other for other in read_results(session.out) if other.task == task.name]
            best = best_run(results)
            for other in results:
                if other is not best and len(other.checkpoint_sha256) > 1:  # one: of --keep-checkpoints
                    remove_checkpoints(session.out / other.directory)
        return result


def sha256_of_files(directory: Path) -> dict[str, str]:
    """Return the sha256 of labels, predictions and scores of a run, by their path. A checkpoint has that of its tokenizer."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    bound = [path for path in files if path.suffix not in NO_RESULTS and path.parent.name != TOKENIZER_DIRECTORY]
    return {path.relative_to(directory).as_posix(): file_sha256(path) for path in bound}


def training_command(run: TaskRun, benchmark: Benchmark, device: str) -> list[str]:
    """Return the module and its arguments. Running it again continues from the run's own ``checkpoint_last.pt``."""
    session = benchmark.session
    command = ["fairseq_cli.train", *benchmark.train_flags(run), "--user-dir", str(PACKAGE)]
    command += ["--task", benchmark.trained_as, "--criterion", benchmark.trained_as]
    command += session.checkpoint.model_flags()
    command += run.hyperparameters.train_flags(run.schedule)
    if run.finetune_from is not None:
        command += ["--finetune-from-model", str(run.finetune_from)]
    command += ["--save-dir", str(run.directory), "--no-epoch-checkpoints", "--seed", str(run.seed)]
    # About a hundred records a run, and one at least every 20 updates.
    log_interval = min(max(1, run.schedule.total_updates // 100), 20)
    command += ["--log-format", "simple", "--log-interval", str(log_interval)]
    # With a GPU, a loader process hides the collating of a batch; on a CPU it would take a core from the training.
    command += ["--cpu", "--num-workers", "0"] if device == "cpu" else ["--num-workers", "1"]
    return command if session.precision == "float32" else [*command, f"--{session.precision}"]


def environment(device: str, num_devices: int) -> dict[str, str]:
    """Return this process's environment with one visible GPU, or for the CPU with no GPU and a share of the cores."""
    variables = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    if device.startswith("cuda:"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        variables["CUDA_VISIBLE_DEVICES"] = names[int(device.removeprefix("cuda:"))].strip()
        return variables
    # fairseq starts a rank on every visible GPU, even with --cpu. Runs that each use all cores slow one another down.
    return {"OMP_NUM_THREADS": cores_of_a_run(num_devices)} | variables | {"CUDA_VISIBLE_DEVICES": ""}


def cores_of_a_run(num_runs: int) -> str:
    return str(max(1, number_of_processes(None) // num_runs))


def variables_of_server(devices: Sequence[str]) -> dict[str, str]:
    """Return the variables of the process that forks the trainings, which libraries read when they are imported."""
    variables = {"CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}  # fairseq counts the GPUs, as the number of ranks
    if devices[0] == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = cores_of_a_run(len(devices))
    return variables


def train(
    command: list[str],
    directory: Path,
    variables: Mapping[str, str],
    stop: threading.Event,
    report: Callable[[int, list[dict[str, Any]]], None],
    start: Callable[[list[str], Mapping[str, str], BinaryIO], Any] = ForkedCommand,
) -> None:
    """Run the command until it exits; its output is appended to ``train.log``. Once ``stop`` is set, it is asked to save a
    checkpoint and exit.

    Raise :class:`Stopped` then, or :class:`RunFailed` for any other failure. If the process of a killed command still trains in
    ``directory``, it holds the lock of this SAVE_DIR, and the new process fails with a message that says so.

    Args:
        report: called several times a second with the number of updates so far and the records of the metrics file since the
            last call.
        start: starts the process. Its output goes to an open file, and it ends when this process ends.
    """
    metrics = NewRecords(directory)
    with _open_log(directory) as log:
        begin = log.tell()  # earlier output belongs to an earlier part of the run
        process = start(command, variables, log)
        deadline, code = None, None
        try:
            while code is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(POLL_SECONDS)
                records = metrics.read()  # also the score of the last epoch
                report(metrics.update, records)
                if stop.is_set() and deadline is None:
                    process.send_signal(signal.SIGTERM)
                    deadline = time.monotonic() + SECONDS_TO_SAVE
                elif deadline is not None and time.monotonic() > deadline:
                    process.kill()
        except BaseException:
            process.kill()
            process.wait()
            raise
    if code == 0:
        return
    if stop.is_set():
        raise Stopped
    raise RunFailed(_failure_reason(code, directory / LOG_FILE, begin))


def _open_log(directory: Path) -> BinaryIO:
    return open(directory / LOG_FILE, "ab")


def _failure_reason(code: int, log: Path, begin: int) -> str:
    """Return the line of a user error if there is one, otherwise the last line of the output."""
    by_signal = {REQUEUE: "SIGTERM, SIGUSR1 or SIGUSR2", INTERRUPTED: "SIGINT"}
    if code in by_signal:
        return f"ended by {by_signal[code]} from outside"
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended by {name}{', perhaps because memory was full' if name == 'SIGKILL' else ''}"
    if code == SERVER_KILLED:
        return "the process that starts trainings was killed"
    text = log.read_bytes()[begin:].decode("utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    user_errors = [line for line in lines if line.startswith("amos_fairseq: error:")]
    last = (user_errors or lines or ["no output"])[-1]
    return last.removeprefix("amos_fairseq: error:").strip()


def epoch_and_seconds(run: TaskRun, checkpoint: Path) -> tuple[float, float]:
    """Return the number of epochs at ``checkpoint`` and the duration of the whole training in seconds."""
    updates, schedule = read_header(str(checkpoint))["optimizer_history"][-1]["num_updates"], run.schedule
    epochs = schedule.num_epochs if updates == schedule.total_updates else updates / schedule.updates_per_epoch
    return round(float(epochs), 4), round(training_seconds(run.directory / "checkpoint_last.pt"), 1)


def training_seconds(checkpoint: Path) -> float:
    """Return the training time up to a checkpoint, over all parts of the run, with validation; 0 if it is unknown."""
    try:
        return training_seconds_of(read_header(str(checkpoint)))
    except ValueError:
        return 0.0


@contextlib.contextmanager
def weights_alone(checkpoint: Path, only_trains: tuple[str, ...]) -> Iterator[str]:
    """Replace a checkpoint by one without what only training needs: the optimizer state, two thirds of the file, and the
    weights with the prefixes ``only_trains``. Yield the sha256 of the new file before it replaces the old one."""
    state = read_header(str(checkpoint))
    state["last_optimizer_state"] = None
    state["model"] = {key: value for key, value in state["model"].items() if not key.startswith(only_trains)}
    try:
        with whole_file(str(checkpoint)) as unfinished:
            torch.save(state, unfinished)
            yield file_sha256(unfinished)
    except (OSError, RuntimeError) as error:
        raise UserError(f"{checkpoint} cannot be written ({error}): free some space, then start again") from error


def remove_checkpoints(directory: Path, kept: Path | None = None) -> None:
    for file in directory.glob("checkpoint*.pt"):
        if file != kept:
            file.unlink()


@dataclass(frozen=True)
class Outcome:
    """What a command has done: the table (None if no run has a result), the runs that failed, the files that were written, and
    messages about them."""

    table: Table | None
    failures: list[Failure]
    files: Sequence[Path] = ()
    notices: Sequence[str] = ()


def run_benchmark(benchmark: Benchmark) -> Outcome:
    """Execute the runs that have no result yet, then write the table of all results in OUT; raise :class:`Stopped` after SIGINT
    or SIGTERM."""
    out, setup = benchmark.session.out, benchmark.setup()
    claim_output_directory(out, benchmark.name, setup)
    runner = Runner(benchmark)
    with stop_on_signals(runner.stop):
        baselines = find_baselines(benchmark, runner.stop)
    failures = benchmark.execute(runner.execute)
    results, summaries = benchmark.summarize(read_results(out))
    if not results:
        return Outcome(None, failures)
    notes = [*verdicts(benchmark, summaries, baselines), *common_notes(benchmark, results, summaries, baselines)]
    table = benchmark.table(summaries, baselines, [*notes, *benchmark.notes(results, summaries)])
    if any("±" in cell for row in table.rows for cell in row):  # one seed has no deviation
        table = replace(table, title=f"{table.title}: median ± standard deviation over seeds")
    files = save_results(benchmark, setup, table, results, summaries, baselines)
    more, notices = benchmark.write_more(summaries, runner.stop)
    return Outcome(table, failures, [*files, *more], notices)


def find_baselines(benchmark: Benchmark, stop: threading.Event) -> dict[str, Baselines]:
    """Return the baselines of each task: those of earlier calls, unless the data are others now, and of this one."""
    file, advice = benchmark.session.out / f"{benchmark.name}.json", "delete it, and the same command writes it again"
    summary, constants = read_summary(file, advice, optional=True), benchmark.constants()
    baselines = {} if summary is None else summary.baselines
    for task, constant in constants.items():
        # The tasks of one model for all are no tasks of the benchmark.
        trained = [benchmark.tasks[task]] if task in benchmark.tasks else benchmark.tasks.values()
        data = content_sha256([[each.data_sha256, each.num_examples] for each in trained])
        earlier = baselines.get(task, NO_BASELINES)
        kept = earlier.scores if earlier.data_sha256 == data else {}
        baselines[task] = replace(constant, scores=kept | constant.scores, data_sha256=data)
    if "linear" in benchmark.session.baselines and any(LINEAR not in baselines[task].scores for task in constants):
        for task, scores in benchmark.linear_scores(stop).items():
            baselines[task].scores[LINEAR] = scores
    return baselines


def run_and_print(out: str, benchmark: Benchmark) -> None:
    """Run the benchmark in ``out``, and print its table, notices and paths. SIGINT and SIGTERM exit with a line that says how
    to continue; a run that failed is a :class:`UserError`."""
    print(settings_in_words(benchmark.session), *schedules_in_words(benchmark), sep="\n", flush=True)
    try:
        outcome = run_benchmark(benchmark)
    except (Stopped, KeyboardInterrupt):
        print(f"stopped; finished runs are in {out}, and the same command continues with the others", file=sys.stderr)
        sys.exit(INTERRUPTED)
    if outcome.table is not None:
        outcome.table.print()
    for line in (*outcome.notices, *outcome.files):
        print(line)
    failures = outcome.failures
    for failure in failures:
        print(f"{failure.run.label}: {failure.reason} (log: {failure.log})", file=sys.stderr)
    if failures:
        failed = f"{counted(len(failures), 'run')} failed (log of the first: {failures[0].log})"
        raise UserError(f"{failed}; the same command repeats only what failed")


def stoppable(work: Callable[..., int], *arguments: Any) -> int:
    """Call ``work(*arguments, stop)`` with an event that SIGINT and SIGTERM set; they end the command as Ctrl-C does."""
    stop = threading.Event()
    with stop_on_signals(stop):
        try:
            return work(*arguments, stop)
        except Stopped:
            raise KeyboardInterrupt from None

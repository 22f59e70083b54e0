"""Run the trainings of a fine-tuning command, several at once, and show their progress.

A run is one ``fairseq-train`` in its own directory and process, followed by one call of ``evaluate`` in a thread of this
process. Each device has one run at a time. OUT/runs/TASK/IDENTITY/seedN is named by what determines the
result: finished runs are not repeated, stopped ones continue, and a command with other settings has other directories.
"""

import contextlib
import dataclasses
import io
import math
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from amos_fairseq.checkpoint_files import read_header, training_seconds_of
from amos_fairseq.errors import EXIT_CODES, IN_OUT, INTERRUPTED, REQUEUE, UserError, explain_os_errors, handled_signals
from amos_fairseq.experiments.benchmark import Benchmark, RunFailed, Stopped, TaskRun, counted
from amos_fairseq.experiments.records import (
    RESULT_FILE,
    RunResult,
    best_run,
    in_order,
    package_versions,
    read_result,
    write_result,
)
from amos_fairseq.files import explain_write_errors, whole_file
from amos_fairseq.process import SECONDS_TO_SAVE, ForkedCommand
from amos_fairseq.recipes import PACKAGE
from amos_fairseq.run.metrics_file import NewRecords
from amos_fairseq.text.encoding import available_processors

# These variables of a launcher would turn a fine-tuning process into one of the launcher's ranks.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOG_FILE = "train.log"
POLL_SECONDS = 0.2
SECONDS_BETWEEN_LINES = 30.0
SECONDS_TO_MEASURE = 5.0  # the speed of the first run
SERVER_KILLED = 255  # multiprocessing's exit code where the process that starts trainings is gone


@dataclass(frozen=True)
class Failure:
    run: TaskRun
    reason: str

    @property
    def log(self) -> Path:
        return self.run.directory / LOG_FILE


class RunProgress:
    """Show a run with epoch, loss, dev score and remaining time: a bar in a terminal, elsewhere a line for each dev score and
    every 30 seconds."""

    def __init__(self, run: TaskRun, estimate: Callable[[float], None]) -> None:
        self.run, self.has_bar, self.last_line = run, sys.stderr.isatty(), monotonic()
        self.estimate: Callable[[float], None] | None = estimate
        self.first: tuple[int, float] | None = None  # the update at the first look at a running training, and its time
        self.values: dict[str, str] = {}  # the last loss and dev score
        num_epochs, num_updates = run.schedule.num_epochs, run.schedule.total_updates
        place = sys.stderr if self.has_bar else io.StringIO()
        self.bar = tqdm(total=num_updates, desc=run.label, unit="update", leave=False, file=place)
        planned = f"{counted(num_epochs, 'epoch')}, {counted(num_updates, 'update')}"
        tqdm.write(f"{run.label}: {'fitted to frozen states' if run.hyperparameters.linear else planned}")

    def advance(self, update: int, records: Sequence[dict[str, Any]]) -> None:
        """Show the number of updates so far, and what the run has written to its metrics file since the last call; once its
        speed is known, give the seconds of an update to ``estimate``."""
        schedule, has_score = self.run.schedule, False
        epoch = int(update // schedule.updates_per_epoch) + 1  # of the next update, or of a new dev score
        for record in records:
            if record["split"] == "train":
                self.values["train"] = score_of(record, "loss")
            elif record["split"] == "valid":
                self.values["dev"], has_score = f"dev {score_of(record, self.run.task.main_score)}", True
                epoch = math.ceil(record["update"] / schedule.updates_per_epoch)
        if update and self.first is None:
            self.first = update, monotonic()
        num_updates, seconds = (update - self.first[0], monotonic() - self.first[1]) if self.first else (0, 0.0)
        if self.estimate is not None and num_updates and seconds > SECONDS_TO_MEASURE:
            self.estimate(seconds / num_updates)
            self.estimate = None
        place = f"epoch {min(epoch, schedule.num_epochs)} of {schedule.num_epochs}"
        self.bar.set_description(f"{self.run.label}, {place}", refresh=False)
        self.bar.set_postfix_str(", ".join(self.values.values()), refresh=False)
        self.bar.update(update - self.bar.n)
        if not self.has_bar and (has_score or monotonic() - self.last_line >= SECONDS_BETWEEN_LINES):
            self.last_line = monotonic()
            tqdm.write(str(self.bar))


def score_of(record: dict[str, Any], name: str) -> str:
    """Return a score in percent with its name, or the loss where the validation computes no score."""
    if name in record and name != "loss":
        value, digits = record[name], 1
    else:
        name, value, digits = "loss", record.get("loss"), 3
    return f"{name} {'is not finite' if value is None else f'{value:.{digits}f}'}"


class Runner:
    """Executes runs of a benchmark on the session's devices.

    Attributes:
        stop: set by a signal of :data:`amos_fairseq.errors.EXIT_CODES` meanwhile.
        exit_code: of that signal.
        runs, failures: of all calls of :meth:`execute`.
    """

    def __init__(self, benchmark: Benchmark) -> None:
        self.benchmark, self.session, self.stop = benchmark, benchmark.session, threading.Event()
        self.exit_code = INTERRUPTED
        self.runs: list[TaskRun] = []
        self.failures: list[Failure] = []
        self._num_done = 0
        self._updates_to_do = 0  # of the runs of this call, until the estimate is shown
        self._devices: queue.SimpleQueue[str] = queue.SimpleQueue()
        for device in self.session.devices:
            self._devices.put(device)
        self._lock = threading.Lock()  # of results, and of the checkpoints that stay

    def execute(self, runs: Sequence[TaskRun]) -> None:
        """Execute the runs that have no result yet; a failure does not stop the others.

        After a signal, wait until the processes have saved their state and exited, and raise :class:`Stopped`.
        """
        out = self.session.out
        with explain_os_errors(f"{out} cannot be written", ": give another --out"):
            (out / "runs").mkdir(parents=True, exist_ok=True)
        finished = self.results(runs) if any(run.hyperparameters.linear for run in runs) else []
        if finished and not (best := best_run(finished)).checkpoint_in(out).is_file():
            # Another command with the same linear model has preferred a run of its own, and removed these weights.
            (out / best.directory / RESULT_FILE).unlink()
        open_runs = [run for run in runs if read_result(run.directory) is None]
        self.runs += runs
        self._num_done += len(runs) - len(open_runs)
        self._updates_to_do = sum(run.schedule.total_updates for run in open_runs)
        if len(open_runs) < len(runs):
            tqdm.write(f"{len(runs) - len(open_runs)} of {len(runs)} runs are already finished")
        if self.session.devices[0] == "cpu":  # before the process that forks the trainings imports PyTorch
            os.environ.setdefault("OMP_NUM_THREADS", cores_of_a_run(len(self.session.devices)))
        multiprocessing.set_forkserver_preload(["amos_fairseq.experiments.forked_training"])
        with handled_signals(self._note_signal), ThreadPoolExecutor(len(self.session.devices)) as threads:
            futures = [threads.submit(self._execute_one, run) for run in open_runs]
            while wait(futures, timeout=0.5).not_done:  # short waits: Python runs signal handlers in between
                pass
        if self.stop.is_set():
            raise Stopped(self.exit_code)
        for future in futures:
            future.result()

    def _note_signal(self, number: int, _: object) -> None:
        if number == signal.SIGINT or not self.stop.is_set():
            self.exit_code = EXIT_CODES[number]
        self.stop.set()

    def _say_estimate(self, seconds: float) -> None:
        """Say once how long all runs of this call take, from the seconds of an update of the first one."""
        with self._lock:
            updates, self._updates_to_do = self._updates_to_do, 0
        if updates:
            minutes = updates * seconds / len(self.session.devices) / 60
            tqdm.write(f"about {max(minutes, 0.1):.1f} minutes for {counted(updates, 'update')} in all without scoring")

    def _execute_one(self, run: TaskRun) -> None:
        """Execute a run on the next free device, and show how it ended."""
        if self.stop.is_set():
            return
        device, progress = self._devices.get(), RunProgress(run, self._say_estimate)
        try:
            result = self._train_and_evaluate(run, device, progress)
            when = "" if run.hyperparameters.linear else f" after epoch {result.epoch:g}"
            outcome = f"{result.main_score} {result.main:.1f}{when}"
            outcome += f" ({self._num_done} of {len(self.runs)} runs)"
        except Stopped:
            outcome = "stopped"
        except Exception as error:  # a bug in one run must not stop the others; its log gets the traceback
            reason = str(error)
            if not isinstance(error, RunFailed | UserError):
                reason = f"{type(error).__name__}: {error}"
                with contextlib.suppress(OSError), open(run.directory / LOG_FILE, "a", encoding="utf-8") as log:
                    log.write(traceback.format_exc())
            self.failures.append(Failure(run, reason))
            outcome = f"FAILED: {reason}"
        finally:
            self._devices.put(device)
            progress.bar.close()
        tqdm.write(f"{run.label}: {outcome}")

    def _train_and_evaluate(self, run: TaskRun, device: str, progress: RunProgress) -> RunResult:
        benchmark, session, task = self.benchmark, self.session, run.task
        run.directory.mkdir(parents=True, exist_ok=True)
        benchmark.fill_directory(run)
        variables = environment(device, len(session.devices))
        train(training_command(run, benchmark, device), run.directory, variables, self.stop, progress.advance)
        progress.bar.set_description(f"{run.label}, scoring")
        checkpoint = run.directory / f"checkpoint_{run.hyperparameters.checkpoint}.pt"
        if not checkpoint.is_file():
            raise RunFailed(f"training ended without {checkpoint.name}")
        if run.hyperparameters.linear:
            fitted = benchmark.fit(task.name, checkpoint, device, self.stop)
            with final_weights(checkpoint, None, lambda weights: weights | fitted):
                pass
        scores = benchmark.evaluate(task.name, checkpoint, device, self.stop)
        epoch, seconds = epoch_and_seconds(run, checkpoint)
        result = RunResult(
            task=task.name,
            trial=run.trial,
            seed=run.seed,
            identity=run.directory.parent.name,
            directory=str(run.directory.relative_to(session.out)),
            main_score=task.main_score,
            scores=scores,
            checkpoint=checkpoint.name,
            epoch=epoch,
            seconds=seconds,
            settings=run.settings,
            keeps_checkpoints=session.keep_checkpoints,
            versions=package_versions(),
            notes=list(task.notes),
        )
        with self._lock:
            self._finish(run, checkpoint, result)
            self._num_done += 1
        return result

    def _finish(self, run: TaskRun, checkpoint: Path, result: RunResult) -> None:
        """Write the result and, without --keep-checkpoints, keep the weights of the task's best run alone."""
        only_trains = None if self.session.keep_checkpoints else self.benchmark.only_trains
        # A kill leaves a checkpoint that continues the training, or a result and the checkpoint that it names.
        with final_weights(checkpoint, only_trains, lambda weights: self.benchmark.calibrated(weights, result.scores)):
            write_result(self.session.out, result)
        if self.session.keep_checkpoints:
            return
        remove_checkpoints(run.directory, kept=checkpoint)
        results = self.results(each for each in self.runs if each.task.name == run.task.name)
        best = best_run(results)
        for other in results:
            if other is not best and not other.keeps_checkpoints:
                remove_checkpoints(self.session.out / other.directory)

    def results(self, runs: Iterable[TaskRun]) -> list[RunResult]:
        """Return the results of runs that are finished, and of other seeds with the same settings, in order."""
        trials = {run.directory.parent: run.trial for run in runs}
        finished = ((read_result(path), trial) for folder, trial in trials.items() for path in folder.glob("seed*"))
        # Another command may have had other trials.
        return in_order(dataclasses.replace(result, trial=trial) for result, trial in finished if result is not None)


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
    variables = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES} | IN_OUT
    if device.startswith("cuda:"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        variables["CUDA_VISIBLE_DEVICES"] = names[int(device.removeprefix("cuda:"))].strip()
        return variables
    # fairseq starts a rank on every visible GPU, even with --cpu. Runs that each use all cores slow one another down.
    return {"OMP_NUM_THREADS": cores_of_a_run(num_devices)} | variables | {"CUDA_VISIBLE_DEVICES": ""}


def cores_of_a_run(num_runs: int) -> str:
    return str(max(1, available_processors() // num_runs))


def train(
    command: list[str],
    directory: Path,
    variables: Mapping[str, str],
    stop: threading.Event,
    report: Callable[[int, list[dict[str, Any]]], None],
    start: Callable[[list[str], Mapping[str, str], Path], Any] = ForkedCommand,
) -> None:
    """Run the command until it exits; its output is appended to ``train.log``. Once ``stop`` is set, it is asked to save a
    checkpoint and exit.

    Raise :class:`Stopped` then, or :class:`RunFailed` for any other failure. If the process of a killed command still trains in
    ``directory``, it holds the lock of this SAVE_DIR, and the new process fails with a message that says so.

    Args:
        report: called several times a second with the number of updates so far and the records of the metrics file since the
            last call.
        start: starts the process. It appends its output to a file, and it ends when this process ends.
    """
    metrics, log = NewRecords(directory), directory / LOG_FILE
    log.touch()
    begin = log.stat().st_size  # earlier output belongs to an earlier part of the run
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
                deadline = monotonic() + SECONDS_TO_SAVE
            elif deadline is not None and monotonic() > deadline:
                process.kill()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if code != 0:
        raise Stopped if stop.is_set() else RunFailed(_failure_reason(code, log, begin))


def _failure_reason(code: int, log: Path, begin: int) -> str:
    """Return the line of a user error if there is one, otherwise the last line of the output."""
    by_signal = {REQUEUE: "SIGTERM, SIGUSR1, SIGUSR2 or SIGHUP", INTERRUPTED: "SIGINT"}
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
    return (user_errors or lines or ["no output"])[-1].removeprefix("amos_fairseq: error:").strip()


def epoch_and_seconds(run: TaskRun, checkpoint: Path) -> tuple[float, float]:
    """Return the number of epochs at ``checkpoint`` and the duration of the whole training in seconds, with validation."""
    updates, schedule = read_header(str(checkpoint))["optimizer_history"][-1]["num_updates"], run.schedule
    epochs = schedule.num_epochs if updates == schedule.total_updates else updates / schedule.updates_per_epoch
    seconds = training_seconds_of(read_header(str(run.directory / "checkpoint_last.pt")))
    return round(float(epochs), 4), round(seconds, 1)


@contextlib.contextmanager
def final_weights(
    checkpoint: Path, only_trains: tuple[str, ...] | None, calibrated: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> Iterator[None]:
    """Replace a checkpoint, after the body, by one with calibrated weights and without what only training needs: the optimizer
    state, two thirds of the file, and the weights with the prefixes ``only_trains`` (None: keep all)."""
    state = read_header(str(checkpoint))
    state["model"] = calibrated(state["model"])
    if only_trains is not None:
        state["last_optimizer_state"] = None
        state["model"] = {key: value for key, value in state["model"].items() if not key.startswith(only_trains)}
    with (
        explain_write_errors(checkpoint, "free some space, then start again"),
        whole_file(str(checkpoint)) as unfinished,
    ):
        torch.save(state, unfinished)
        yield


def remove_checkpoints(directory: Path, kept: Path | None = None) -> None:
    for file in directory.glob("checkpoint*.pt"):
        if file != kept:
            file.unlink()

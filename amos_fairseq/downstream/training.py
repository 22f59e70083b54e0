"""One fine-tuning as a process of stock ``fairseq-train``: its command, environment, progress, exit and checkpoints.

The imports of a training take five seconds. A command that fine-tunes pays for them once: :func:`training_server` starts a
process that has imported everything and forks one process for each run. The run computes what its command line would in a new
process.
"""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

import torch

from amos_fairseq.checkpoint_files import read_header, training_seconds_of
from amos_fairseq.downstream.benchmark import Benchmark, Stopped
from amos_fairseq.downstream.runs import LOG_FILE, TaskRun
from amos_fairseq.downstream.views import CROSS_VIEWS
from amos_fairseq.errors import INTERRUPTED, REQUEUE, UserError
from amos_fairseq.files import no_links, whole_file, write_text
from amos_fairseq.python_process import SECONDS_TO_SAVE, ForkedProcess, ForkServer, python_command
from amos_fairseq.recipes import PACKAGE
from amos_fairseq.run.metrics_file import NewRecords
from amos_fairseq.strangers import plain_name, read_text

PROCESS_FILE = "train.process"  # name and host of the process that trains
# These variables of a launcher would turn a fine-tuning process into one of the launcher's ranks.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
POLL_SECONDS = 0.2
MOST_UPDATES_PER_RECORD = 20
# torch.optim imports torch._dynamo when the first optimizer is made.
IMPORTED = ("amos_fairseq", "torch._dynamo")


class RunFailed(Exception):
    """A run that failed; the message is one line."""


def training_command(run: TaskRun, benchmark: Benchmark, device: str) -> list[str]:
    """Return the complete command. Running it again continues from the run's own ``checkpoint_last.pt``."""
    command = [*python_command("fairseq_cli.train", with_parent=True), *benchmark.train_flags(run)]
    command += ["--user-dir", str(PACKAGE), *benchmark.session.checkpoint.model_flags()]
    command += run.hyperparameters.train_flags(run.task.num_examples, run.task.carries_rest)
    if run.finetune_from is not None:
        command += ["--finetune-from-model", str(run.finetune_from)]
    command += ["--save-dir", str(run.directory), "--no-epoch-checkpoints", "--seed", str(run.seed)]
    command += ["--log-format", "simple", "--log-interval", str(log_interval(run.total_updates))]
    # With a GPU, a loader process hides the collating of a batch; on a CPU it would take a core from the training.
    command += ["--cpu", "--num-workers", "0"] if device == "cpu" else ["--num-workers", "1"]
    precision = benchmark.session.precision
    return command if precision == "float32" else [*command, f"--{precision}"]


def log_interval(total_updates: int) -> int:
    """Return the number of updates between two records: a hundred a run, and in a long run enough for a loss every minute."""
    return min(max(1, total_updates // 100), MOST_UPDATES_PER_RECORD)


def environment(device: str, num_devices: int) -> dict[str, str]:
    """Return this process's environment with one visible GPU, or for the CPU with no GPU and a share of the cores."""
    variables = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    if device.startswith("cuda:"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        variables["CUDA_VISIBLE_DEVICES"] = names[int(device.removeprefix("cuda:"))].strip()
    else:
        variables["CUDA_VISIBLE_DEVICES"] = ""  # fairseq starts a rank on every visible GPU, even with --cpu
        # Runs that each use all cores slow one another down.
        variables.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_devices)))
    return variables


def training_server(devices: Sequence[str], stop: Event) -> ForkServer:
    """Return the server that forks the runs on ``devices``; each run gets the same number of threads.

    Once ``stop`` is set, nothing waits for its imports any more.
    """
    # OpenMP reads the number of threads when it is loaded.
    variables = environment("cpu", len(devices)) if devices[0] == "cpu" else dict(os.environ)
    # fairseq counts the GPUs when it is imported, as the default number of ranks. That of a run is one, which it sees itself.
    return ForkServer(IMPORTED, variables | {"CUDA_VISIBLE_DEVICES": ""}, stop)


def start_process(command: Sequence[str], variables: Mapping[str, str], log: BinaryIO) -> subprocess.Popen:
    """Start a command in a new process and session, with a pipe as its standard input and its output in ``log``."""
    return subprocess.Popen(
        command, env=variables, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
    )


def train(
    command: list[str],
    directory: Path,
    variables: dict[str, str],
    stop: Event,
    report: Callable[[int, list[dict[str, Any]]], None],
    start: Callable[..., subprocess.Popen | ForkedProcess] = start_process,
) -> None:
    """Run the command until it exits; its output is appended to ``train.log``.

    Args:
        variables: environment of the process.
        stop: once it is set, the process is asked to save a checkpoint and exit.
        report: called several times a second with the number of updates so far and the records of the metrics file since the
            last call.
        start: :func:`start_process`, or ``start`` of a :class:`~amos_fairseq.python_process.ForkServer`.

    Raises:
        Stopped: the process was asked to stop and has exited, or ``stop`` was set before it could start.
        RunFailed: the process exited with an error, or could not be started.
        UserError: the log is a link, or the metrics file is not a file.
    """
    metrics = NewRecords(directory)

    def report_progress() -> None:
        records = metrics.read()
        report(metrics.update, records)

    with open(directory / LOG_FILE, "ab", opener=no_links) as log:
        _lock(log, directory)
        begin = log.tell()  # earlier output belongs to an earlier part of the run
        # In a session of its own, Ctrl-C in a terminal does not reach the child; this process stops it in order.
        # The pipe ends with this process, and then the child does (python_process.py).
        try:
            process = start(command, variables, log)
        except ChildProcessError as error:
            raise Stopped if stop.is_set() else RunFailed(str(error)) from error
        try:
            with contextlib.suppress(OSError):  # a full disk: only the message to a second process is shorter
                write_text(directory / PROCESS_FILE, f"process {process.pid} on {socket.gethostname()}\n")
            code = _wait(process, stop, report_progress)
        except ChildProcessError as error:  # the child loses its pipe: it saves and exits
            raise RunFailed(str(error)) from error
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            process.stdin.close()
            (directory / PROCESS_FILE).unlink(missing_ok=True)
    if code == 0:
        return
    if stop.is_set():
        raise Stopped
    raise RunFailed(_failure_reason(code, directory / LOG_FILE, begin))


def _lock(log: BinaryIO, directory: Path) -> None:
    """Lock the log while a training writes to it. The training process inherits the lock and holds it even if this
    process is killed. Raise :class:`RunFailed` if such a process is still running."""
    holder = directory / PROCESS_FILE
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        try:
            name = plain_name(read_text(holder, "", largest=200).strip())
        except (UserError, ValueError):
            name = "another process"  # which has not written it yet
        raise RunFailed(f"{name} is training in {directory}: wait until it exits, or stop it") from error
    holder.unlink(missing_ok=True)  # of a process that was killed


def _wait(process: subprocess.Popen | ForkedProcess, stop: Event, report_progress: Callable[[], None]) -> int:
    deadline = None
    while True:
        try:
            code = process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            report_progress()
        else:
            report_progress()  # the score of the last epoch
            return code
        if stop.is_set() and deadline is None:
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + SECONDS_TO_SAVE
        elif deadline is not None and time.monotonic() > deadline:
            process.kill()


def _failure_reason(code: int, log: Path, begin: int) -> str:
    """Return the line of a user error if there is one, otherwise the last line of the output."""
    by_signal = {REQUEUE: "SIGTERM, SIGUSR1 or SIGUSR2", INTERRUPTED: "SIGINT"}
    if code in by_signal or code < 0:
        name = by_signal.get(code) or signal.Signals(-code).name
        return f"ended by {name} from outside"
    text = log.read_bytes()[begin:].decode("utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    user_errors = [line for line in lines if line.startswith("amos_fairseq: error:")]
    last = (user_errors or lines or ["no output"])[-1]
    return last.removeprefix("amos_fairseq: error:").strip()


def checkpoint_to_score(run: TaskRun) -> Path:
    """Return the checkpoint that the recipe scores; raise :class:`RunFailed` if training did not write it."""
    file = run.directory / f"checkpoint_{run.hyperparameters.checkpoint}.pt"
    if not file.is_file():
        raise RunFailed(f"training ended without {file.name}")
    return file


def epoch_and_seconds(run: TaskRun, checkpoint: Path) -> tuple[float, float]:
    """Return the number of epochs at ``checkpoint`` and the duration of the whole training in seconds."""
    updates = read_header(str(checkpoint))["optimizer_history"][-1]["num_updates"]
    # fairseq adds to the seconds of the checkpoint that the run started from.
    before = training_seconds(run.finetune_from) if run.finetune_from is not None else 0.0
    seconds = training_seconds(run.directory / "checkpoint_last.pt") - before
    epochs = run.num_epochs if updates == run.total_updates else updates / run.updates_per_epoch
    return round(float(epochs), 4), round(seconds, 1)


def training_seconds(checkpoint: Path) -> float:
    """Return the training time up to a checkpoint, over all parts of the run, including validation and saving."""
    try:
        return training_seconds_of(read_header(str(checkpoint)))
    except ValueError:
        return 0.0


def keep_weights_only(checkpoint: Path) -> None:
    """Drop what only trains from a checkpoint: the optimizer state, two thirds of the file, and the modules of views. Remove
    the other checkpoints beside it."""
    state = read_header(str(checkpoint))
    state["last_optimizer_state"] = None
    state["model"] = {key: value for key, value in state["model"].items() if not key.startswith(CROSS_VIEWS)}
    try:
        with whole_file(str(checkpoint)) as unfinished:
            torch.save(state, unfinished)
    except (OSError, RuntimeError) as error:
        raise UserError(f"{checkpoint} cannot be written ({error}): free some space, then start again") from error
    remove_checkpoints(checkpoint.parent, but=checkpoint)


def remove_checkpoints(directory: Path, but: Path | None = None) -> None:
    for file in directory.glob("checkpoint*.pt"):
        if file != but:
            file.unlink()

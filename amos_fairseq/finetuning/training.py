"""One fine-tuning as a process of stock ``fairseq-train``: its command, its end, its progress, its checkpoints."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import BinaryIO

import torch

import amos_fairseq
from amos_fairseq.compat.safe_loading import read_header
from amos_fairseq.compat.signals import REQUEUE
from amos_fairseq.errors import UserError
from amos_fairseq.files import whole_file
from amos_fairseq.finetuning.benchmark import Benchmark, Stopped
from amos_fairseq.finetuning.plan import Run
from amos_fairseq.finetuning.settings import settings_flags, total_updates, updates_per_epoch
from amos_fairseq.finetuning.starting_point import StartingPoint
from amos_fairseq.metrics_file import updates_so_far

PACKAGE = Path(amos_fairseq.__file__).parent
LOG_FILE = "train.log"
# A launcher's variables would make one of its ranks of a fine-tuning process.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SECONDS_TO_SAVE = 300.0
SECONDS_BETWEEN_LOOKS = 0.2


class RunFailed(Exception):
    """A run that ended otherwise than it should; the message is one line."""


def training_command(run: Run, benchmark: Benchmark, start: StartingPoint, device: str, precision: str) -> list[str]:
    """The whole command; typed again it continues from the run's own ``checkpoint_last.pt``."""
    command = [sys.executable, "-m", "fairseq_cli.train", *benchmark.train_flags(run.task.name)]
    command += ["--user-dir", str(PACKAGE), *start.model_flags(), *settings_flags(run.settings, run.task.rows)]
    if run.start is not None:
        command += ["--finetune-from-model", str(run.start)]
    command += ["--save-dir", str(run.directory), "--no-epoch-checkpoints", "--seed", str(run.seed)]
    command += ["--log-format", "simple", "--log-interval", str(log_interval(run))]
    # Beside a GPU a loader process hides the collating of a batch; on a CPU it would take a core from the training.
    command += ["--cpu", "--num-workers", "0"] if device == "cpu" else ["--num-workers", "1"]
    return command if precision == "fp32" else [*command, f"--{precision}"]


def log_interval(run: Run) -> int:
    """About a hundred lines a run, so that progress moves."""
    return max(1, total_updates(run.settings, run.task.rows) // 100)


def environment(device: str, num_devices: int) -> dict[str, str]:
    """This process's environment with one visible GPU, or for the CPU with none and this run's share of the cores."""
    variables = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    if device.startswith("cuda:"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        variables["CUDA_VISIBLE_DEVICES"] = names[int(device.removeprefix("cuda:"))].strip()
    else:
        variables["CUDA_VISIBLE_DEVICES"] = ""  # fairseq would ask for a rank on each GPU that it sees, --cpu or not
        # Runs that each take all cores slow one another down.
        variables.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_devices)))
    return variables


def train(
    command: list[str], directory: Path, variables: dict[str, str], stop: Event, report: Callable[[int], None]
) -> None:
    """Run the command to its end; what it prints is appended to ``train.log``.

    Args:
        stop: once set, the process saves a checkpoint and ends.
        report: told the number of updates so far.

    Raises:
        Stopped: it was asked to stop, and has.
        RunFailed: it ended with an error.
    """
    with (directory / LOG_FILE).open("ab") as log:
        _lock(log, directory)
        begin = log.tell()  # what stands before is of an earlier part of the run
        # A session of its own: Ctrl-C in a terminal reaches this process alone, which ends its children in order.
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = _wait(process, directory, stop, report)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if code == 0:
        return
    if stop.is_set():
        raise Stopped
    raise RunFailed(_reason(code, directory / LOG_FILE, begin))


def _lock(log: BinaryIO, directory: Path) -> None:
    """The log is locked while a training writes to it: its process inherits the lock, and keeps it should this one be
    killed. Raises :class:`RunFailed` where such a process lives."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise RunFailed(f"another process is training in {directory}: wait for its end, or end it") from error


def _wait(process: subprocess.Popen, directory: Path, stop: Event, report: Callable[[int], None]) -> int:
    deadline = None
    while True:
        try:
            return process.wait(SECONDS_BETWEEN_LOOKS)
        except subprocess.TimeoutExpired:
            report(updates_so_far(directory))
        if stop.is_set() and deadline is None:
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + SECONDS_TO_SAVE
        elif deadline is not None and time.monotonic() > deadline:
            process.kill()


def _reason(code: int, log: Path, begin: int) -> str:
    """The line that says why: of a user's mistake, or the last one of a traceback."""
    text = log.read_bytes()[begin:].decode("utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if code == REQUEUE or code < 0:
        name = "SIGTERM, SIGUSR1 or SIGUSR2" if code == REQUEUE else signal.Signals(-code).name
        return f"ended by {name} from outside"
    named = [line for line in lines if line.startswith("amos_fairseq: error:")]
    last = (named or lines or ["no output"])[-1]
    return last.removeprefix("amos_fairseq: error:").strip()


def chosen_checkpoint(run: Run) -> Path:
    """The checkpoint that the recipe scores; raises :class:`RunFailed` where training has left none."""
    file = run.directory / f"checkpoint_{run.settings.checkpoint}.pt"
    if not file.is_file():
        raise RunFailed(f"training ended without {file.name}")
    return file


def epoch_and_seconds(run: Run, checkpoint: Path) -> tuple[float, float]:
    """Passes over the training data at ``checkpoint``, and seconds of the whole training, all its parts together."""
    updates = read_header(str(checkpoint))["optimizer_history"][-1]["num_updates"]
    epochs = updates / updates_per_epoch(run.task.rows, run.settings.batch_size)
    # fairseq counts on from the seconds of the checkpoint that training started from.
    before = training_seconds(run.start) if run.start is not None else 0.0
    return round(epochs, 4), round(training_seconds(run.directory / "checkpoint_last.pt") - before, 1)


def training_seconds(checkpoint: Path) -> float:
    """Seconds of the whole training at a checkpoint, all its parts together; validation and saving are in them."""
    return float(read_header(str(checkpoint)).get("extra_state", {}).get("previous_training_time", 0.0))


def keep_weights_only(checkpoint: Path) -> None:
    """Take the optimizer's state, two thirds of the file, out of a checkpoint, and remove the others beside it."""
    state = read_header(str(checkpoint))
    state["last_optimizer_state"] = None
    try:
        with whole_file(str(checkpoint)) as unfinished:
            torch.save(state, unfinished)
    except (OSError, RuntimeError) as error:
        raise UserError(f"{checkpoint} cannot be written ({error}): make room, then start again") from error
    remove_checkpoints(checkpoint.parent, but=checkpoint)


def remove_checkpoints(directory: Path, but: Path | None = None) -> None:
    for file in directory.glob("checkpoint*.pt"):
        if file != but:
            file.unlink()

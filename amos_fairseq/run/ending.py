"""What ends a run before its limit: a user's mistake, and a signal.

Mistakes. A user's mistake is reported as one line on stderr and exit code 1, in ``fairseq-train`` and ``fairseq-hydra-train``.

Every rank runs in :func:`exit_on_mistake`. Two places outside of it are replaced too: the end of the process, for mistakes in
the flags; and Hydra, which stores the exception of a job and raises it again, for a YAML that imports the plugin after the
launch. Besides :class:`UserError`, :func:`line_for` says what is a mistake. Every other exception keeps its traceback.

Signals. SIGTERM, SIGUSR1, SIGUSR2, SIGHUP and Ctrl-C end a run after the present update, with a checkpoint and an exit code.

Slurm sends SIGTERM before the time limit and at preemption, and ``--signal=USR1@300`` earlier, to every process of a job step.
A rank records the signal, and all ranks agree on the update after which they stop (three numbers summed over the ranks after
each update, only if there are several). Rank 0 saves ``checkpoint_last.pt`` with the exact position in the epoch, and all ranks
exit with :data:`amos_fairseq.errors.REQUEUE`: the batch script requeues on the exit code. Before fairseq launches its ranks
(under Hydra: before it creates its trainer) a signal kills the process as usual: there is nothing to save.

Ctrl-C (SIGINT) does the same with the exit code :data:`amos_fairseq.errors.INTERRUPTED`, because such a run must not be started
again automatically. Before the first update it ends the run at once, and so does a second Ctrl-C; within
:data:`SAME_PRESS_SECONDS` it counts once, because a launcher sends it to its ranks again.

``checkpoint_last.pt`` is also written every ``task.save_interval_minutes``: an update may take a minute on a CPU.
"""

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
from fairseq import checkpoint_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import utils as distributed_utils
from fairseq.trainer import Trainer
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from amos_fairseq.checkpoint_files import describe_other_weights
from amos_fairseq.errors import EXIT_CODES, INTERRUPTED, REQUEUE, UserError, handle_signals, handled_signals, one_line
from amos_fairseq.files import NO_ROOM
from amos_fairseq.run.hook import Hook
from amos_fairseq.run.resume import DEFAULT_FILE
from amos_fairseq.setting_checks import describe, setting

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator: .*tried to allocate|DataLoader worker \(pid.*is killed by signal: Killed"
)
LESS_MEMORY = (
    "memory is full ({}): lower --batch-size (dataset.batch_size) and raise --update-freq (optimization.update_freq) by the "
    "same factor, which trains the same, or use fewer loader processes (--num-workers)"
)


def line_for(error: BaseException) -> str | None:
    """Return the line for a user's mistake; None for an exception that keeps its traceback."""
    if isinstance(error, UserError):
        # A loader process sends its traceback as text, which ends with the message.
        return str(error).rpartition("amos_fairseq.errors.UserError: ")[2].strip()
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return f"{error.filename or 'a file'} cannot be written ({error.strerror}): make room, then start again"
    if isinstance(error, OSError) and error.filename is not None:  # a read-only disk, a stale handle of NFS
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, FileNotFoundError):  # fairseq's own
        return str(error)
    if isinstance(error, OmegaConfBaseException):
        return f"the configuration cannot be used: {describe(error)}"
    if str(error).startswith("Cannot load model parameters from checkpoint"):
        # torch lists the differences to the checkpoint in the chained exception.
        path = str(error).removeprefix("Cannot load model parameters from checkpoint ").partition(";")[0]
        differences = describe_other_weights(str(error.__context__ or ""))
        return f"{path} contains another model than the settings describe: {differences}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or OUT_OF_MEMORY.search(str(error)):
        return LESS_MEMORY.format(one_line(str(error)) or "no memory left")
    is_refusal = isinstance(error, AssertionError | ImportError | ValueError) or type(error) is Exception
    if is_refusal and str(error) and is_of_fairseq(error):
        return str(error)  # what fairseq says of settings that it cannot use
    return None


def is_of_fairseq(error: BaseException) -> bool:
    """Return whether fairseq itself raised the exception, not this package or a library that it calls."""
    frames = traceback.walk_tb(error.__traceback__)
    module = [frame.f_globals.get("__name__", "") for frame, _ in frames][-1:]
    return bool(module) and module[0].partition(".")[0] in ("fairseq", "fairseq_cli")


def report(error: BaseException) -> int | None:
    """Print the line for a user's mistake, or for Ctrl-C before the first update; return the exit code, None for a bug."""
    rank = distributed_utils.get_global_rank()
    if isinstance(error, KeyboardInterrupt):
        if rank == 0:
            print("\namos_fairseq: interrupted: nothing was saved", file=sys.stderr, flush=True)
        return INTERRUPTED
    line = line_for(error)
    if line is None:
        return None
    name = f"rank {rank}: " if rank > 0 else ""
    sys.stdout.flush()
    print(f"amos_fairseq: error: {name}{one_line(line)}", file=sys.stderr, flush=True)
    return error.exit_code if isinstance(error, UserError) else UserError.exit_code


@contextlib.contextmanager
def exit_on_mistake() -> Iterator[None]:
    """Turn what :func:`report` reports into ``SystemExit``, which neither Hydra nor a spawned rank catches."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        code = report(error)
        if code is None:
            raise
        raise SystemExit(code) from None


def exception_hook(error_class: type, error: BaseException, traceback: TracebackType | None) -> None:
    """Report a mistake that ends one of fairseq's scripts."""
    with contextlib.suppress(Exception):
        if (code := report(error)) is not None:
            raise SystemExit(code)
    sys.__excepthook__(error_class, error, traceback)


def report_mistake_of_job(return_value: Callable[..., Any], job: JobReturn) -> Any:
    """Replace ``JobReturn.return_value``, which raises the exception of a Hydra job."""
    if isinstance(job._return_value, Exception) and (code := report(job._return_value)) is not None:
        raise SystemExit(code)
    return return_value(job)


SIGNALS = tuple(EXIT_CODES)
SAME_PRESS_SECONDS = 1.0

_received: list[int] = []
_interrupted_at: list[float] = []
_trains = threading.Event()


def note_signal(number: int, frame: FrameType | None) -> None:
    """Handler: record the signal, and forward it to spawned ranks if this process only launches them."""
    ranks = [child for child in multiprocessing.active_children() if not child.daemon]  # loader processes are daemons
    for rank in ranks:
        os.kill(rank.pid, number)
    if number == signal.SIGINT:
        _interrupt(launches=bool(ranks))
    _received.append(number)


def _interrupt(launches: bool) -> None:
    """Note Ctrl-C and say what happens; end this process at a second one, and where it neither trains nor has ranks."""
    if not (launches or _trains.is_set()):
        raise KeyboardInterrupt
    now = time.monotonic()
    if _interrupted_at and now - _interrupted_at[0] > SAME_PRESS_SECONDS:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    if not _interrupted_at and not launches and distributed_utils.get_global_rank() == 0:
        # Not through a logger, which the signal may have interrupted.
        os.write(2, b"\nCtrl-C: finishing this update and saving; press it again to stop at once\n")
    _interrupted_at.append(now)


def install_handlers() -> None:
    """Handle the signals from now on, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    handle_signals(note_signal)
    for number in SIGNALS:
        signal.siginterrupt(number, False)  # system calls of NCCL and gloo must not fail with EINTR


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Handle the signals while ranks run, in the process that launches them, and forget afterwards what was received."""
    try:
        with handled_signals(note_signal):
            install_handlers()
            yield
    finally:
        _received.clear()
        _interrupted_at.clear()
        _trains.clear()


@dataclass
class SaveSettings(FairseqDataclass):
    save_interval_minutes: float = setting(
        30.0,
        "write checkpoint_last.pt when the last checkpoint is older than this (0: only at --save-interval and "
        "--save-interval-updates; ours)",
        "0 or more",
    )


class Signals(Hook):
    """Stop the run, or save it, after an update that is complete and, where due, validated and saved."""

    def __init__(self) -> None:
        self.time_of_save = time.monotonic()  # at first: of the start
        self.saved_update: int | None = None

    def before_trainer(self, cfg: Any) -> None:
        install_handlers()

    def before_epoch(self, cfg: Any, trainer: Trainer) -> None:
        _trains.set()

    def after_save(self, trainer: Trainer) -> None:
        self.saved_update, self.time_of_save = trainer.get_num_updates(), time.monotonic()

    def update_completed(self, cfg: Any, trainer: Trainer, epoch_itr: Any, is_last: bool) -> None:
        code, save_is_due = self.due(trainer)
        if code is not None and not is_last:
            self.save_and_exit(cfg, trainer, epoch_itr, code)
        if save_is_due and not (is_last or cfg.checkpoint.no_save):
            self.save(cfg, trainer, epoch_itr)

    def due(self, trainer: Trainer) -> tuple[int | None, bool]:
        """Return INTERRUPTED if any rank has received Ctrl-C, REQUEUE if another signal, else None; and whether to save now, by
        the clock of the first rank. All ranks get the same answer."""
        minutes = getattr(trainer.task.cfg, "save_interval_minutes", 0)
        is_late = 0 < 60 * minutes < time.monotonic() - self.time_of_save
        save_is_due = is_late and distributed_utils.get_global_rank() == 0
        flags = [float(flag) for flag in (bool(_received), signal.SIGINT in _received, save_is_due)]
        if trainer.data_parallel_world_size > 1:
            on_device = torch.tensor(flags, device=trainer.device)
            distributed_utils.all_reduce(on_device, group=trainer.data_parallel_process_group)
            flags = on_device.tolist()
        stop, interrupted, save = map(bool, flags)
        return INTERRUPTED if interrupted else REQUEUE if stop else None, save

    def save_and_exit(self, cfg: Any, trainer: Trainer, epoch_itr: Any, code: int) -> NoReturn:
        updates = trainer.get_num_updates()
        name = signal.Signals(_received[0]).name if _received else "a signal to another rank"
        if cfg.checkpoint.no_save:
            logger.warning(f"{name}: stopping after update {updates}; nothing is saved (--no-save)")
        else:
            self.save(cfg, trainer, epoch_itr)
        if trainer.data_parallel_world_size > 1:
            torch.distributed.barrier()  # a launcher kills the other ranks as soon as the first one exits
        # A branch has its restore_file from run/resume.py: its command is repeated as it is.
        goes_back = cfg.checkpoint.restore_file != DEFAULT_FILE and not OmegaConf.select(cfg, "lr_scheduler.decay_from")
        command = "the same command without --restore-file and --reset-*" if goes_back else "the same command"
        logger.info(f"{name}: stopped after update {updates}, exit code {code}; start {command} again to continue")
        sys.exit(code)

    def save(self, cfg: Any, trainer: Trainer, epoch_itr: Any) -> None:
        """Write ``checkpoint_last.pt`` unless this update has been saved there."""
        if self.saved_update != trainer.get_num_updates() or cfg.checkpoint.no_last_checkpoints:
            checkpoint = OmegaConf.merge(cfg.checkpoint, {"no_last_checkpoints": False})
            checkpoint_utils.save_checkpoint(checkpoint, trainer, epoch_itr, None)


def handle_in_loader_process(set_worker_signal_handlers: Callable[..., Any]) -> None:
    """In a loader process, exit on SIGTERM from its own rank, which sends it to one that does not respond, and ignore signals
    from others: that of a job step would kill it before its rank, which waits for a batch."""
    set_worker_signal_handlers()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    rank = os.getppid()

    def listen() -> None:
        while True:
            info = signal.sigwaitinfo(SIGNALS)
            if info.si_pid == rank and info.si_signo == signal.SIGTERM:
                os._exit(0)  # as PyTorch's own handler does

    threading.Thread(target=listen, daemon=True, name="signals").start()

"""SIGTERM, SIGUSR1 and SIGUSR2 end a run after the present update, with a checkpoint and an exit code for requeueing.

Slurm sends SIGTERM before the time limit and at preemption, and ``--signal=USR1@300`` earlier; submitit requests SIGUSR2 in
the same way. All of them reach every process of a job step. Stock fairseq exits at once and loses what came after the last
checkpoint. Here a rank records the signal, and all ranks agree on the update after which they stop (one number summed over
the ranks after each update, only if there are several). Rank 0 saves ``checkpoint_last.pt`` with the exact position in the
epoch, and all ranks exit with :data:`amos_fairseq.errors.REQUEUE`. In the seconds before fairseq launches its ranks (under
Hydra: before it creates its trainer) a signal kills the process as usual: there is nothing to save.

submitit installs its own handlers in each rank before Hydra calls fairseq: SIGTERM is logged and ignored; at SIGUSR2 rank 0
requeues the job and exits at once, or raises an error near the time limit, and nothing is saved in either case. The handlers
of this module replace them while fairseq runs, so that a rank saves first. It exits with SystemExit, which submitit does not
record as the job's result, and the batch script requeues on the exit code
(``examples/multi_node/config/cluster/slurm_8x8.yaml``).

The same signal would kill the loader processes first, and with them the rank that waits for a batch. They therefore obey
SIGTERM only from their own rank, which is how torch ends a loader process that does not respond.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

from amos_fairseq.errors import REQUEUE

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_received: list[int] = []


def record(number: int, frame: FrameType | None) -> None:
    """Handler: record the signal, and forward it to spawned ranks if this process only launches them."""
    _received.append(number)
    for child in multiprocessing.active_children():
        if not child.daemon:  # loader processes are daemons
            os.kill(child.pid, number)


def install_handlers() -> None:
    """Handle the signals from now on, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in SIGNALS:
        signal.signal(number, record)
        signal.siginterrupt(number, False)  # system calls of NCCL and gloo must not fail with EINTR


@contextlib.contextmanager
def restored_handlers() -> Iterator[None]:
    """Restore the handlers of a program that calls fairseq as a function."""
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)


def stop_is_requested(trainer: Trainer) -> bool:
    """Return whether any rank has received a signal. All ranks call it after the same update and get the same answer."""
    if trainer.data_parallel_world_size == 1:
        return bool(_received)
    flag = torch.tensor([float(bool(_received))], device=trainer.device)
    distributed_utils.all_reduce(flag, group=trainer.data_parallel_process_group)
    return bool(flag.item() > 0)


def save_and_exit(cfg: Any, trainer: Trainer, epoch_itr: Any) -> NoReturn:
    """Write ``checkpoint_last.pt`` unless this update has been saved there, wait for rank 0, and exit with REQUEUE."""
    updates = trainer.get_num_updates()
    name = signal.Signals(_received[0]).name if _received else "a signal to another rank"
    if cfg.checkpoint.no_save:
        logger.warning(f"{name}: stopping after update {updates}; nothing is saved (--no-save)")
    elif getattr(trainer, "update_of_last_save", None) != updates or cfg.checkpoint.no_last_checkpoints:
        logger.info(f"{name}: saving after update {updates}")
        checkpoint = OmegaConf.merge(cfg.checkpoint, {"no_last_checkpoints": False})
        checkpoint_utils.save_checkpoint(checkpoint, trainer, epoch_itr, None)
    if trainer.data_parallel_world_size > 1:
        torch.distributed.barrier()  # a launcher kills the other ranks as soon as the first one exits
    logger.info(f"{name}: stopped after update {updates}, exit code {REQUEUE}; start the same command again to go on")
    sys.exit(REQUEUE)


def stop_after_update(
    validate_and_save: Callable[..., Any],
    cfg: Any,
    trainer: Trainer,
    task: Any,
    epoch_itr: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Stop after ``validate_and_save``, which follows each update: the update is complete and, where due, saved."""
    valid_losses, is_last = validate_and_save(cfg, trainer, task, epoch_itr, *args, **kwargs)
    if stop_is_requested(trainer) and not is_last:
        save_and_exit(cfg, trainer, epoch_itr)
    return valid_losses, is_last


def record_last_save(save_checkpoint: Callable[..., Any], cfg: Any, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Record at which update the trainer was saved."""
    saved = save_checkpoint(cfg, trainer, *args, **kwargs)
    trainer.update_of_last_save = trainer.get_num_updates()
    return saved


def handle_in_launcher(call_main: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Handle signals in the process that launches ranks, until they have ended."""
    with restored_handlers():
        install_handlers()
        return call_main(*args, **kwargs)


def handle_in_rank(make_trainer: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> None:
    """Handle signals in a rank before its trainer is created."""
    install_handlers()
    make_trainer(trainer, *args, **kwargs)


def handle_in_loader_process(set_worker_signal_handlers: Callable[..., Any]) -> None:
    """In a loader process, exit on SIGTERM from its own rank and ignore signals from other processes."""
    set_worker_signal_handlers()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    rank = os.getppid()

    def listen() -> None:
        while True:
            info = signal.sigwaitinfo(SIGNALS)
            if info.si_pid == rank and info.si_signo == signal.SIGTERM:
                os._exit(0)

    threading.Thread(target=listen, daemon=True, name="signals").start()

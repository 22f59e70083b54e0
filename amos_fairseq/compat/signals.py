"""SIGTERM, SIGUSR1 and SIGUSR2 end a run after its running update, with a checkpoint and a code that a scheduler can requeue.

Slurm sends SIGTERM before the time limit and at preemption, ``--signal=USR1@300`` earlier; submitit asks for SIGUSR2 the
same way. All of them go to every process of a job step. Stock fairseq dies at once and loses what came after the last
checkpoint. Here a rank notes the signal, all ranks agree on the update at which they stop (one number summed over the
ranks after each update, only where there are several), rank 0 saves ``checkpoint_last.pt`` with the exact position in the
epoch, and all exit with :data:`REQUEUE`. In the seconds before fairseq launches its ranks (under Hydra: before it makes its
trainer) a signal kills as usual: nothing is lost.

submitit has handlers of its own in each rank, set before Hydra calls fairseq: SIGTERM is logged and ignored; at SIGUSR2
rank 0 requeues the job and exits at once, or raises an error near the time limit, and in both cases nothing is saved. The
handlers of this module replace them as long as fairseq runs, so that a rank saves first. It leaves by SystemExit, which
submitit does not record as the job's result, and the batch script requeues on the exit code
(``examples/multi_node/config/cluster/slurm_8x8.yaml``).

The same signal would kill the loader processes first, and with them the rank that waits for a batch. They therefore obey
SIGTERM only where their own rank sends it, which is how torch ends a loader process that does not answer.
"""

import contextlib
import functools
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
from torch.utils.data._utils import signal_handling

from amos_fairseq.compat.train_script import wrap_when_training

logger = logging.getLogger(__name__)

# EX_TEMPFAIL of <sysexits.h>: "temporary failure, the user is invited to retry". No code of Python, fairseq or a signal
# (128 + n) is the same, so that a batch script can requeue on this code alone.
REQUEUE = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_received: list[int] = []


def note(number: int, frame: FrameType | None) -> None:
    """Handler: remember the signal, and pass it on to spawned ranks where this process only launches them."""
    _received.append(number)
    for child in multiprocessing.active_children():
        if not child.daemon:  # loader processes are daemons
            os.kill(child.pid, number)


def install() -> None:
    """Handle the signals from now on, if this thread may."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in SIGNALS:
        signal.signal(number, note)
        signal.siginterrupt(number, False)  # system calls of NCCL and gloo are not to fail with EINTR


@contextlib.contextmanager
def restored_handlers() -> Iterator[None]:
    """A program that calls fairseq as a function has its own handlers back afterwards."""
    kept = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)


def stop_is_requested(trainer: Trainer) -> bool:
    """Whether any rank has received a signal; the same answer on all ranks, because they ask after the same update."""
    if trainer.data_parallel_world_size == 1:
        return bool(_received)
    flag = torch.tensor([float(bool(_received))], device=trainer.device)
    distributed_utils.all_reduce(flag, group=trainer.data_parallel_process_group)
    return bool(flag.item() > 0)


def save_and_exit(cfg: Any, trainer: Trainer, epoch_itr: Any) -> NoReturn:
    """Write ``checkpoint_last.pt`` unless this update's is there already, wait for rank 0, exit with REQUEUE."""
    updates = trainer.get_num_updates()
    name = signal.Signals(_received[0]).name if _received else "a signal to another rank"
    if cfg.checkpoint.no_save:
        logger.warning(f"{name}: stopping after update {updates}; nothing is saved (--no-save)")
    elif getattr(trainer, "update_of_last_save", None) != updates or cfg.checkpoint.no_last_checkpoints:
        logger.info(f"{name}: saving after update {updates}")
        checkpoint = OmegaConf.merge(cfg.checkpoint, {"no_last_checkpoints": False})
        checkpoint_utils.save_checkpoint(checkpoint, trainer, epoch_itr, None)
    if trainer.data_parallel_world_size > 1:
        torch.distributed.barrier()  # a launcher kills the other ranks as soon as the first one has gone
    logger.info(f"{name}: stopped after update {updates}, exit code {REQUEUE}; start the same command again to go on")
    sys.exit(REQUEUE)


def _stop_after(validate_and_save: Callable[..., Any]) -> Callable[..., Any]:
    """``validate_and_save`` runs after each update, so that an update is complete and, where due, validated and saved."""

    @functools.wraps(validate_and_save)
    def validate_save_and_stop(cfg: Any, trainer: Trainer, task: Any, epoch_itr: Any, *args: Any, **kwargs: Any) -> Any:
        valid_losses, is_last = validate_and_save(cfg, trainer, task, epoch_itr, *args, **kwargs)
        if stop_is_requested(trainer) and not is_last:
            save_and_exit(cfg, trainer, epoch_itr)
        return valid_losses, is_last

    return validate_save_and_stop


def obey_own_rank_only() -> None:
    """In a loader process: SIGTERM from its rank ends it, what others send is left to the rank."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    rank = os.getppid()

    def listen() -> None:
        while True:
            info = signal.sigwaitinfo(SIGNALS)
            if info.si_pid == rank and info.si_signo == signal.SIGTERM:
                os._exit(0)

    threading.Thread(target=listen, daemon=True, name="signals").start()


def apply() -> None:
    """Handle signals in ranks and launchers, keep loader processes alive, look at the flag after each update."""
    make_trainer, call_main = Trainer.__init__, distributed_utils.call_main
    save_checkpoint, set_loader_handlers = checkpoint_utils.save_checkpoint, signal_handling._set_worker_signal_handlers

    @functools.wraps(make_trainer)
    def make_trainer_and_listen(self: Trainer, *args: Any, **kwargs: Any) -> None:
        install()
        make_trainer(self, *args, **kwargs)

    @functools.wraps(call_main)
    def listen_and_call_main(*args: Any, **kwargs: Any) -> Any:
        with restored_handlers():
            install()
            return call_main(*args, **kwargs)

    @functools.wraps(save_checkpoint)
    def save_and_remember(cfg: Any, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        saved = save_checkpoint(cfg, trainer, *args, **kwargs)
        trainer.update_of_last_save = trainer.get_num_updates()
        return saved

    @functools.wraps(set_loader_handlers)
    def set_handlers_and_obey() -> None:
        set_loader_handlers()
        obey_own_rank_only()

    Trainer.__init__ = make_trainer_and_listen
    distributed_utils.call_main = listen_and_call_main
    checkpoint_utils.save_checkpoint = save_and_remember
    signal_handling._set_worker_signal_handlers = set_handlers_and_obey
    wrap_when_training("validate_and_save", _stop_after)

"""Report a user's mistake as one line on stderr and exit code 1, in ``fairseq-train`` and ``fairseq-hydra-train``.

Every rank runs in :func:`exit_on_mistake`. Two places outside of it would print a traceback, and are replaced too: the end of
the process, for mistakes in the flags; and Hydra, which stores the exception of a job and raises it again, for a YAML that
imports the plugin after the launch. Besides :class:`UserError`, the mistakes are full memory, files that cannot be read or
written, and what fairseq itself refuses. Every other exception keeps its traceback: it is a bug.
"""

import contextlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from hydra.core.utils import JobReturn
from omegaconf.errors import OmegaConfBaseException

from amos_fairseq.checkpoint_files import describe_other_weights
from amos_fairseq.compat.patching import running_scripts
from amos_fairseq.errors import INTERRUPTED, UserError, one_line
from amos_fairseq.files import NO_ROOM
from amos_fairseq.setting_checks import describe

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


def install_exception_hook() -> None:
    """Report mistakes that end fairseq's scripts. Other programs keep their own hook."""
    if running_scripts():
        sys.excepthook = _exception_hook


def _exception_hook(error_class: type, error: BaseException, traceback: TracebackType | None) -> None:
    with contextlib.suppress(Exception):
        if (code := report(error)) is not None:
            raise SystemExit(code)
    sys.__excepthook__(error_class, error, traceback)


def report_mistake_of_job(return_value: Callable[..., Any], job: JobReturn) -> Any:
    """Replace ``JobReturn.return_value``, which raises the exception of a Hydra job."""
    if isinstance(job._return_value, Exception) and (code := report(job._return_value)) is not None:
        raise SystemExit(code)
    return return_value(job)

"""A user's mistake ends ``fairseq-train`` and ``fairseq-hydra-train`` with one line on stderr and exit code 1.

Every rank runs under :func:`exit_on_mistake` (see :mod:`amos_fairseq.compat.launch`). Two places remain that would print a
traceback: Python at the end of the process, for mistakes found while the flags are parsed, and Hydra, which keeps the
exception of a job and raises it again, where a YAML has the plugin imported after the launch. Beside :class:`UserError`
these are the mistakes that stock fairseq answers with an exception of its own, known by their words. Every other exception
keeps its traceback: it is a bug, not a mistake of the user.
"""

import contextlib
import re
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from hydra.core.utils import JobReturn

from amos_fairseq.compat.train_script import running_scripts
from amos_fairseq.errors import UserError
from amos_fairseq.files import NO_ROOM

# Exception, pattern of its words, line for the user (group 1 stands for \1).
COMMON_MISTAKES: list[tuple[type[Exception], str, str]] = [
    (AssertionError, r"Must specify batch size", "give --batch-size (dataset.batch_size) or --max-tokens"),
    (AssertionError, r"Please specify criterion", "give --criterion (criterion._name)"),
    (AssertionError, r"((?:Criterion|Optimizer) does not match.*)", r"the checkpoint comes from another run: \1"),
    (ValueError, r"(.*) is required!", r"\1 is missing: name one by flag or in the YAML"),
    (ValueError, r"(--finetune-from-model .* does not exist)", r"\1: give the path of a checkpoint"),
    (ValueError, r"(--finetune-from-model can not be set together with .*)", r"\1"),
    (ValueError, r"--finetune-from-model and --restore-file", "give --finetune-from-model or --restore-file, not both"),
    (ValueError, r"Seed must be (between .*)", r"--seed (common.seed) must lie \1"),
    (Exception, r"The dataset is empty", "no block of the data is left to train on: give more text"),
    (
        Exception,
        r"Size of sample #\d+ is invalid \(=(\d+)\) since max_positions=(\d+)",
        r"a row of the data has \1 tokens, the model reads \2: give --shorten-method truncate (sentence_prediction) to cut "
        "such rows, or --skip-invalid-size-inputs-valid-test to leave them out",
    ),
    (Exception, r"Trying to use an uninitialized 'dummy' batch", "there are fewer batches than ranks: use fewer ranks"),
    (
        RuntimeError,
        r"DataLoader worker \(pid.*?\) (is killed by signal: \w+|exited unexpectedly)",
        r"a loader process \1, most often for want of memory: lower --num-workers, then start the same command again",
    ),
    (
        torch.OutOfMemoryError,
        r"(.*?out of memory)",
        r"\1: lower --batch-size and raise --update-freq by the same factor",
    ),
]
FILE_MISTAKES = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)


def line_for(error: BaseException) -> str | None:
    """The line for a user's mistake; None for an exception that deserves its traceback."""
    if isinstance(error, UserError):
        # A loader process sends its traceback along as text; the message is the end of it.
        return str(error).rpartition("amos_fairseq.errors.UserError: ")[2].strip()
    if isinstance(error, FILE_MISTAKES):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return f"{error.filename or 'a file'} cannot be written ({error.strerror}): make room, then start again"
    if str(error).startswith("Cannot load model parameters from checkpoint"):
        return _misfit(error)
    for kind, pattern, line in COMMON_MISTAKES:
        found = re.match(pattern, str(error), re.DOTALL)
        if isinstance(error, kind) and found:
            return found.expand(line)
    return None


def _misfit(error: BaseException) -> str:
    """A checkpoint of another model: the first differences, as torch lists them in the exception behind."""
    differences = " ".join(str(error.__context__ or "").split())
    path = str(error).removeprefix("Cannot load model parameters from checkpoint ").partition(";")[0]
    return f"{path} holds another model than the flags describe; {differences[:300]}"


def report(line: str) -> None:
    """Print the one line; other ranks than the first say who they are."""
    rank = distributed_utils.get_global_rank()
    name = f"rank {rank}: " if rank > 0 else ""
    sys.stdout.flush()
    print(f"amos_fairseq: error: {name}{' '.join(line.split())}", file=sys.stderr, flush=True)


def exit_code_for(error: BaseException) -> int | None:
    """Report a mistake and return the exit code; None for every other exception, which is left alone."""
    line = line_for(error)
    if line is None:
        return None
    report(line)
    return 1


@contextlib.contextmanager
def exit_on_mistake() -> Iterator[None]:
    """Turn a user's mistake into ``SystemExit``, which neither Hydra nor a spawned rank catches."""
    try:
        yield
    except Exception as error:
        code = exit_code_for(error)
        if code is None:
            raise
        raise SystemExit(code) from None


def _exception_hook(kind: type, error: BaseException, traceback: TracebackType | None) -> None:
    with contextlib.suppress(Exception):
        code = exit_code_for(error)
        if code is not None:
            raise SystemExit(code)
    sys.__excepthook__(kind, error, traceback)


def apply() -> None:
    """Report mistakes at the two places named above."""
    job_value = JobReturn.return_value
    JobReturn.return_value = property(lambda self: _value_or_exit(self, job_value), job_value.fset)
    if running_scripts():  # a mistake in the flags comes before call_main; other programs keep their own hook
        sys.excepthook = _exception_hook


def _value_or_exit(job: JobReturn, value: property) -> Any:
    kept = job._return_value
    code = exit_code_for(kept) if isinstance(kept, Exception) else None
    if code is not None:
        raise SystemExit(code)
    return value.fget(job)

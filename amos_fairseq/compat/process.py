"""Start of a process: warnings, a torchaudio that does not load, needless lines, reads and copies. End: prefetching threads."""

import copy
import importlib
import importlib.util
import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra.core.config_store import ConfigStore
from torch.nn import Module, Parameter

from amos_fairseq.process import silence_text_to_speech

HARMLESS_WARNINGS = (
    r"hydra\.experimental\..* is no longer experimental",
    r"\s*The version_base parameter is not specified",
    r"In '.*': Usage of deprecated keyword in package header",
    r"\s*'config' is validated against ConfigStore schema with the same name",
    r"\s*The strict flag in the compose API is deprecated",
    r"'pin_memory' argument is set as true but no accelerator is found",
    r"`torch\.cuda\.amp\.autocast\(args\.\.\.\)` is deprecated",
    r"`torch\.jit\.script` is deprecated",  # fairseq.models.model_utils decorates a function with it
    r"`broadcast_buffers` is deprecated",  # fairseq passes it to DistributedDataParallel, on every rank
    r"The given NumPy array is not writable",  # slices of a memory-mapped file, which nothing writes to
)


def silence_harmless_warnings() -> None:
    """Silence warnings of fairseq and Hydra that a user cannot act on. Call before fairseq is imported."""
    for message in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    silence_text_to_speech()
    logging.getLogger("fairseq.checkpoint_utils").addFilter(leave_out_needless_score)


def leave_out_needless_score(record: logging.LogRecord) -> bool:
    """Shorten fairseq's line about a saved checkpoint where its score is the number of updates, as in our recipes, or None."""
    record.msg = re.sub(r"(@ (\d+) updates), score (\2(\.0)?|None)\)", r"\1)", str(record.msg))
    return True


def hide_broken_torchaudio() -> None:
    """Hide a torchaudio that cannot be imported. Call before ``transformers`` is imported.

    fairseq requires torchaudio, whose wheel on PyPI is built for CUDA; next to a CPU build of torch its import fails, and with
    it that of ``transformers`` 5, which imports torchaudio wherever it is installed. ``None`` in ``sys.modules`` means "not
    installed" to ``import`` and to ``importlib.util.find_spec``, which ``transformers`` calls.
    """
    if importlib.util.find_spec("torchaudio") is None:
        return
    try:
        importlib.import_module("torchaudio")  # takes 0.1 s where it works
    except Exception:  # OSError from the dynamic linker, ImportError, RuntimeError of a version check
        sys.modules["torchaudio"] = None


def open_without_reading(warm_up: Callable[..., Any], path: str) -> None:
    """Replace ``_warmup_mmap_file``, which reads a whole memory-mapped file in every rank and for every shard.

    That takes minutes of an idle device where the corpus is on a network disk, and evicts other pages from memory.
    """


def share_config_store(
    initialize: Callable[..., None], repository: CachingConfigRepository, delegate: IConfigRepository
) -> None:
    """Replace ``CachingConfigRepository.__init__``, which copies ``delegate`` and with it every configuration class of fairseq.

    The copies take half of the time of a composition. A repository changes its sources, of which it needs a copy, but not
    the store behind them: ``ConfigStore.load`` returns copies.
    """
    store = ConfigStore.instance()
    initialize(repository, None)
    repository.delegate = copy.deepcopy(delegate, {id(store): store})


def shared_parameters(stock: Callable[..., Any], model: Module) -> list[list[str]]:
    """Return the names of each parameter that has several, without those that are None.

    Replaces ``_catalog_shared_params``, for which all absent biases are one parameter: one line of the log for each.
    """
    names: dict[Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [shared for shared in names.values() if len(shared) > 1]


def stop_readers() -> None:
    """End fairseq's prefetching threads before the process ends.

    They are daemons: where one is in C++ code when the interpreter ends, as while it reads its first batches or closes its
    loader processes, the process aborts with SIGABRT instead of its exit code (one start in twelve of a finished run).
    """
    from fairseq.data import iterators  # not before the warnings are silenced

    readers = [thread for thread in threading.enumerate() if isinstance(thread, iterators.BackgroundConsumer)]
    for reader in readers:
        reader._max_len = 0  # the next item is the last one
        with reader._queue.mutex:  # which the reader may be waiting for space in
            reader._queue.maxsize = sys.maxsize
            reader._queue.not_full.notify_all()
    for reader in readers:
        reader.join(timeout=60)

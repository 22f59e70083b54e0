"""Unwanted side effects of other libraries: lines that say nothing, a broken torchaudio, copies and reads of
what nobody needs."""

import copy
import importlib
import importlib.util
import logging
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra.core.config_store import ConfigStore
from omegaconf import open_dict

from amos_fairseq.process_settings import silence_text_to_speech

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
# What fairseq logs at every start, validation and checkpoint, by logger. Lines about what was read, written or is wrong remain.
NOISE = re.compile(
    r"fairseq_cli\.train: (task|model|criterion|num\. expert|max tokens|training on|begin |Start |end of epoch)"
    r"|fairseq\.trainer: (Preparing|No existing|loading train|begin |Saving|Finished)"
    r"|fairseq\.(data\.data_utils: loaded|data\.iterators: grouped|checkpoint_utils: Preparing)"
)


def silence_harmless_warnings() -> None:
    """Silence warnings of fairseq and Hydra that a user cannot act on. Call before fairseq is imported.

    They would hide the first line that matters. Every other warning is shown. What is logged before the plugin is imported
    cannot be silenced: ``fairseq-train`` and ``fairseq-hydra-train`` import fairseq first, whose text-to-speech task logs
    while it is imported, and Hydra composes the configuration before it creates the callback that imports the plugin.
    """
    for message in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    silence_text_to_speech()


class ConsoleFilter(logging.Filter):
    """Keep what says little out of the console: it is in the log file, and the settings are also in every checkpoint.

    Attributes:
        bar: a progress bar on the terminal; a line first removes it, and the bar appears again with the next update.
    """

    bar: Any = None

    def filter(self, record: logging.LogRecord) -> bool:
        # fairseq logs the configuration and the tree of modules as objects.
        if not isinstance(record.msg, str) or NOISE.match(f"{record.name}: {record.getMessage()}"):
            return False
        if self.bar is not None:
            self.bar.clear()
        return True


def console_filters() -> list[ConsoleFilter]:
    """Return the filters of the consoles of this process."""
    return [found for handler in logging.root.handlers for found in handler.filters if isinstance(found, ConsoleFilter)]


def quiet_console(cfg: Any) -> None:
    """Filter what a run prints, where a log file or a terminal shows that the output is not itself the log.

    A line that cannot be printed, on a full disk or to a closed pipe, is lost without a traceback of its own; the run goes on.
    """
    logging.raiseExceptions = False
    if cfg.get("job_logging_cfg"):  # fairseq configures Hydra's logging again from this
        with open_dict(cfg):
            cfg.job_logging_cfg.filters = {"console": {"()": f"{ConsoleFilter.__module__}.{ConsoleFilter.__name__}"}}
            for handler in cfg.job_logging_cfg.handlers.values():
                if handler["class"] == "logging.StreamHandler":
                    handler.filters = ["console"]
                elif handler["class"] == "logging.FileHandler":
                    handler.encoding = "utf-8"
    consoles = [handler for handler in logging.root.handlers if type(handler) is logging.StreamHandler]
    for console in consoles:
        if not console_filters() and (console.stream.isatty() or len(consoles) < len(logging.root.handlers)):
            console.addFilter(ConsoleFilter())


def hide_broken_torchaudio() -> None:
    """Hide a torchaudio that cannot be imported. Call before ``transformers`` is imported.

    fairseq requires torchaudio for its speech tasks. The wheel on PyPI is built for CUDA; next to a CPU build of torch its
    import fails (``libcudart`` is missing). ``transformers`` 5 imports torchaudio wherever it is installed
    (``transformers/audio_utils.py``), so that ``from transformers import AutoModel`` fails as well. ``None`` in
    ``sys.modules`` means "not installed" to ``import`` and to ``importlib.util.find_spec``, which ``transformers`` calls.

    The effect ends with the process. ``pip uninstall torchaudio``, which ``examples/environment.sh`` runs where it is
    needed, has the same effect for programs that do not import this package.
    """
    if importlib.util.find_spec("torchaudio") is None:
        return
    try:
        importlib.import_module("torchaudio")  # takes 0.1 s where it works
    except Exception:  # OSError from the dynamic linker, ImportError, RuntimeError of a version check
        sys.modules["torchaudio"] = None


def open_without_reading(warm_up: Callable[..., Any], path: str) -> None:
    """Replace ``_warmup_mmap_file``, which reads a whole memory-mapped file in every rank and for every shard.

    That takes minutes of an idle device where the corpus is on a network disk, and evicts other pages from memory. Loader
    processes read the blocks of an epoch in random order, each when it is needed.
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

"""AMOS and related objectives as a fairseq plugin: ``fairseq-train --user-dir amos_fairseq``.

:func:`register` patches fairseq and registers everything with it. Where fairseq has been imported, as by ``--user-dir``, which
imports this package before the flags are parsed, that happens when this package is imported. Otherwise importing it takes a
fraction of a second, and :func:`load` and the commands that need fairseq register first. Code that uses other modules of this
package together with fairseq calls :func:`register` before it imports fairseq.
"""

import contextlib
import functools
import importlib
import logging
import sys
import types
from collections.abc import Iterator
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from amos_fairseq.checkpoints.encoder import Encoder

__version__ = "0.1.0"  # setup.py reads this line
OBJECTIVES = ("mlm", "electra", "teams", "electric", "amos")
# Modules of downstream/, each of which registers a task and its criterion.
DOWNSTREAM_TASKS = ("words.task", "spans.task", "texts.task", "multi_task.task")


@contextlib.contextmanager
def root_logger_kept() -> Iterator[None]:
    """Import fairseq inside: two of its tasks configure logging when they are imported, so that every library would print.

    Another one, for text to speech, logs a line about tensorboardX.
    """
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        yield
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


SCORES = ("sklearn", "sklearn.metrics", "scipy.stats")


class _Later(types.ModuleType):
    """A module whose functions are imported when they are called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(self.__name__), name)(*args, **kwargs)

        return call


@contextlib.contextmanager
def scores_imported_later() -> Iterator[None]:
    """Import fairseq inside: two of its files import scikit-learn and scipy, a quarter of the time that it takes."""
    postponed = {name: _Later(name) for name in SCORES if name not in sys.modules}
    for name, module in postponed.items():
        package, _, attribute = name.rpartition(".")
        if package in postponed:
            setattr(postponed[package], attribute, module)
    sys.modules.update(postponed)
    try:
        yield
    finally:
        for name in postponed:
            del sys.modules[name]


@functools.cache
def register() -> None:
    """Import fairseq, patch it, and register the tasks, models, criterions, optimizers and schedules of this package, once."""
    with root_logger_kept():
        with scores_imported_later():
            from amos_fairseq import compat

        compat.apply()

        from amos_fairseq.run import hooks  # imports fairseq's tasks: a torchaudio that does not load is hidden now

        hooks.apply()
        # models/NAME.py and criterions/NAME.py of each objective register themselves with fairseq when they are imported.
        for objective in OBJECTIVES:
            importlib.import_module(f"amos_fairseq.models.{objective}")
            importlib.import_module(f"amos_fairseq.criterions.{objective}")
        for module in (
            *(f"downstream.{task}" for task in DOWNSTREAM_TASKS),
            "tasks.text_pretraining",
            "optim.grouped_adam",
            "optim.warmup_stable_decay",
        ):
            importlib.import_module(f"amos_fairseq.{module}")


def load(
    checkpoint: str | PathLike,
    tokenizer: str | PathLike | None = None,
    device: "str | torch.device | None" = None,
    dtype: "torch.dtype | None" = None,
    batch_size: int = 32,
    layer: int | None = None,
) -> "Encoder":
    """Load the encoder of a checkpoint or SAVE_DIR in eval mode: ``load(path)(["a text"]).pooled()`` returns features.

    See :func:`amos_fairseq.checkpoints.encoder.load` for arguments, shapes and errors.
    """
    register()
    from amos_fairseq.checkpoints import encoder
    from amos_fairseq.errors import UserError

    try:
        return encoder.load(checkpoint, tokenizer, device, dtype, batch_size, layer)
    except UserError as error:
        raise error.with_traceback(None) from None  # the message says it all; a traceback would bury it


if "fairseq" in sys.modules:
    register()

"""How fairseq is imported: without the lines that it logs, and without libraries that training needs only later.

Importing :mod:`amos_fairseq.compat` imports fairseq, so that this is outside of it.
"""

import contextlib
import importlib
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any


def silence_text_to_speech() -> None:
    """Silence the line about tensorboardX that fairseq's text-to-speech task logs when it is imported."""
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)


@contextlib.contextmanager
def root_logger_kept() -> Iterator[None]:
    """Import fairseq inside: two of its tasks configure logging when they are imported, so that every library would print."""
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

"""Functions of fairseq's training script can be replaced only once the script is running.

``fairseq_cli.train`` calls ``train`` and ``validate_and_save`` as globals of its own module, which is called
``fairseq_cli.train`` under ``fairseq-train`` and Hydra, ``__main__`` under ``python -m`` and ``torchrun -m``, and
``__mp_main__`` in a rank that fairseq has spawned. Importing it early would set up logging to stdout for every program
that imports the plugin. Hence replacements are kept here and take place when fairseq makes its trainer.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fairseq.trainer import Trainer

MODULE_NAMES = ("fairseq_cli.train", "__main__", "__mp_main__")
_wrappers: list[tuple[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = []


def wrap_when_training(name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the script's function ``name`` by ``wrapper(function)`` when a trainer is made."""
    _wrappers.append((name, wrapper))


def running_scripts() -> list[ModuleType]:
    """fairseq's training script under each of the names that it has in this process."""
    modules = {id(module): module for module in map(sys.modules.get, MODULE_NAMES)}
    return [module for module in modules.values() if hasattr(module, "validate_and_save")]


def wrap_functions() -> None:
    """Make the replacements, once for each module."""
    for module in running_scripts():
        if getattr(module, "wrapped_by_amos_fairseq", False):
            continue
        for name, wrapper in _wrappers:
            setattr(module, name, wrapper(getattr(module, name)))
        module.wrapped_by_amos_fairseq = True


def apply() -> None:
    """Let fairseq's trainer start the replacements."""
    make_trainer = Trainer.__init__

    @functools.wraps(make_trainer)
    def make_trainer_and_wrap(self: Trainer, *args: Any, **kwargs: Any) -> None:
        wrap_functions()
        make_trainer(self, *args, **kwargs)

    Trainer.__init__ = make_trainer_and_wrap

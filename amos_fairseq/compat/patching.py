"""Replace functions of fairseq, torch and Hydra, also those of fairseq's training script.

The module of the training script is named ``fairseq_cli.train`` under ``fairseq-train`` and Hydra, ``__main__`` under
``python -m`` and ``torchrun -m``, and ``__mp_main__`` in a rank that fairseq has spawned. To import it early would configure
logging to stdout in every program that imports the plugin, so its functions are replaced only in a process that runs it.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

SCRIPT_NAMES = ("fairseq_cli.train", "__main__", "__mp_main__")


class Script(Enum):
    """fairseq's training script as the owner of a function."""

    STARTING = "replaced at once, in the scripts that are running; also in the Hydra entry point"
    TRAINING = "replaced when the script creates its trainer"


class Patch(NamedTuple):
    """One function, method or property to replace.

    ``replacement`` is called with the stock function and then with its arguments. The attribute keeps the name and docstring of
    the stock function, and the function itself as ``__wrapped__``.
    """

    owner: ModuleType | type | Script
    name: str
    replacement: Callable[..., Any]

    def apply_to(self, owner: ModuleType | type) -> None:
        attribute = inspect.getattr_static(owner, self.name)
        stock = attribute.fget if isinstance(attribute, property) else getattr(owner, self.name)

        def call_replacement(*args: Any, **kwargs: Any) -> Any:
            return self.replacement(stock, *args, **kwargs)

        if inspect.isroutine(stock):  # not a class, whose attributes would be copied
            functools.update_wrapper(call_replacement, stock)
        if isinstance(attribute, property):
            setattr(owner, self.name, property(call_replacement, attribute.fset))
        else:
            is_static = isinstance(attribute, staticmethod)
            setattr(owner, self.name, staticmethod(call_replacement) if is_static else call_replacement)


_of_scripts: dict[Script, list[Patch]] = {Script.STARTING: [], Script.TRAINING: []}


def apply_patches(patches: Iterable[Patch]) -> None:
    for patch in patches:
        if isinstance(patch.owner, Script):
            _of_scripts[patch.owner].append(patch)
        else:
            patch.apply_to(patch.owner)
    patch_starting_scripts()


def patch_starting_scripts() -> None:
    """Replace what a script calls before it creates its trainer, in the scripts that are running.

    A script imports the plugin while it runs; in a process that a fork server has started, it is imported before the script.
    """
    _patch_modules(Script.STARTING, (*running_scripts(), *running_hydra_scripts()))


def patch_training_script() -> None:
    _patch_modules(Script.TRAINING, running_scripts())


def _patch_modules(owner: Script, modules: Iterable[ModuleType]) -> None:
    for module in modules:
        done = vars(module).setdefault("patched_by_amos_fairseq", [])
        for patch in _of_scripts[owner]:
            if patch not in done:
                patch.apply_to(module)
                done.append(patch)


def running_scripts() -> list[ModuleType]:
    """Return fairseq's training script under each of its names in this process."""
    modules = {id(module): module for module in map(sys.modules.get, SCRIPT_NAMES)}
    return [module for module in modules.values() if hasattr(module, "validate_and_save")]


def running_hydra_scripts() -> list[ModuleType]:
    """Return fairseq's Hydra entry point under each of its names; it fills in defaults before it trains."""
    modules = map(sys.modules.get, ("fairseq_cli.hydra_train", "__main__"))
    return [module for module in modules if hasattr(module, "_hydra_main") and hasattr(module, "add_defaults")]

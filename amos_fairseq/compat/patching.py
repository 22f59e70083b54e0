"""Replace functions of fairseq, torch and Hydra, also those of fairseq's training script.

Also what is set or replaced when a process starts (warnings, a torchaudio that does not load, needless lines, reads and copies)
or ends (prefetching threads).

The module of the training script is named ``fairseq_cli.train`` under ``fairseq-train`` and Hydra, ``__main__`` under
``python -m`` and ``torchrun -m``, and ``__mp_main__`` in a rank that fairseq has spawned. To import it early would configure
logging to stdout in every program that imports the plugin, so its functions are replaced only in a process that runs it.
"""

import copy
import functools
import importlib
import importlib.util
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

import torch
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra.core.config_store import ConfigStore
from torch.nn import Module, Parameter

SCRIPT_NAMES = ("fairseq_cli.train", "__main__", "__mp_main__")


class Script(Enum):
    """fairseq's training script as the owner of a function."""

    STARTING = "replaced at once, in the scripts that are running; also in the Hydra entry point"
    TRAINING = "replaced when the script creates its trainer"


class Patch(NamedTuple):
    """One function, method or property to replace. ``replacement`` is called with the stock function and then with its
    arguments. The attribute keeps its name and docstring, and the function itself as ``__wrapped__``."""

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
    """Replace what the scripts that are running call before they create their trainer. A script imports the plugin while it
    runs; in a process that a fork server has started, it is imported before the script."""
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


def hide_broken_torchaudio() -> None:
    """Hide a torchaudio that cannot be imported, as the CUDA wheel beside a CPU build of torch: ``transformers`` 5 imports it
    wherever it is installed. ``None`` in ``sys.modules`` means "not installed" to ``import`` and to ``find_spec``."""
    if importlib.util.find_spec("torchaudio") is None:
        return
    try:
        importlib.import_module("torchaudio")  # takes 0.1 s where it works
    except Exception:  # OSError from the dynamic linker, ImportError, RuntimeError of a version check
        sys.modules["torchaudio"] = None


def open_without_reading(warm_up: Callable[..., Any], path: str) -> None:
    """Replace ``_warmup_mmap_file``, which reads a whole memory-mapped file in every rank: minutes on a network disk."""


def share_config_store(
    initialize: Callable[..., None], repository: CachingConfigRepository, delegate: IConfigRepository
) -> None:
    """Replace ``CachingConfigRepository.__init__``, which copies ``delegate`` and with it every configuration class of fairseq:
    half of the time of a composition. A repository changes its sources, but not the store behind them: ``ConfigStore.load``
    returns copies."""
    store = ConfigStore.instance()
    initialize(repository, None)
    repository.delegate = copy.deepcopy(delegate, {id(store): store})


def shared_parameters(stock: Callable[..., Any], model: Module) -> list[list[str]]:
    """Return the names of each parameter that has several. For fairseq all absent biases are one: a line of the log each."""
    names: dict[Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [shared for shared in names.values() if len(shared) > 1]


def seed_update(stock: Callable[..., Any], trainer: Any) -> None:
    """Seed the generators for an update, without reading their states first."""
    seed_generators(trainer.cfg.common.seed + trainer.get_num_updates())


def seed_generators(seed: int) -> None:
    """Seed PyTorch's generators on the CPU and on CUDA. ``torch.manual_seed`` also prepares the seeds of other kinds of
    devices, each with a text of the call stack."""
    if torch.cuda.is_initialized() or not torch.cuda.is_available():
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
    else:  # CUDA may start later
        torch.manual_seed(seed)


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

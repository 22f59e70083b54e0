"""A misspelt task, arch, criterion, optimizer or scheduler is said to be one, and so is a pair that does not fit.

argparse refuses unknown names on the command line, but through Hydra they reach fairseq's registries, which answer with
``KeyError: "'_name'"`` or with the whole configuration. ``fairseq_cli.train.main`` imports the plugin and fills in
defaults right after it: there every name is known and nothing has been built. So does the Hydra entry before it, where the
YAML has the plugin imported.

A criterion of this package reads the named output of the model of its own name (``squad``: of the task of its name). Beside
another one it would end in a traceback about a field that is missing.
"""

import difflib
import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from fairseq import options
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY

from amos_fairseq.compat.train_script import running_scripts
from amos_fairseq.errors import UserError

BUILT_FROM_REGISTRIES = ("criterion", "optimizer", "lr_scheduler")


def known_names() -> dict[str, set[str]]:
    """Section of the configuration -> names that it may have."""
    names = {kind: set(REGISTRIES[kind]["registry"]) for kind in BUILT_FROM_REGISTRIES}
    return {"task": set(TASK_REGISTRY), "model": {*ARCH_MODEL_NAME_REGISTRY, *MODEL_REGISTRY}, **names}


def name_of(section: Any) -> str | None:
    """What a section of the configuration names; a section without settings may be its name alone."""
    return section if isinstance(section, str) else section and section.get("_name")


def check_names(cfg: Any) -> None:
    """Raise :class:`UserError` for the first section whose name is missing or unknown."""
    for kind, known in known_names().items():
        name = name_of(cfg.get(kind))
        if name is None:
            raise UserError(f"no {kind} is named: set {kind}._name (by flag: --{'arch' if kind == 'model' else kind})")
        if name not in known:
            similar = difflib.get_close_matches(name, sorted(known), n=3)
            hint = f"did you mean {' or '.join(similar)}" if similar else "is the package that registers it installed"
            raise UserError(f"there is no {kind} '{name}' ({kind}._name): {hint}?")


def check_fit(cfg: Any) -> None:
    """Raise :class:`UserError` for a criterion of this package beside a task or a model of it that it cannot train."""
    task, arch, criterion = (name_of(cfg.get(kind)) for kind in ("task", "model", "criterion"))
    models, criterions, tasks = map(ours, (MODEL_REGISTRY, REGISTRIES["criterion"]["registry"], TASK_REGISTRY))
    model = ARCH_MODEL_NAME_REGISTRY.get(arch, arch)
    if criterion not in criterions:
        return
    needed = criterion if criterion in tasks else "text_pretraining"
    # A user's own task may pretrain as well.
    if task != needed and not (criterion in models and hasattr(TASK_REGISTRY[task], "masked_share")):
        raise UserError(f"--criterion {criterion} (criterion._name) needs --task {needed}, not {task}")
    if criterion in models and model in models and criterion != model:
        raise UserError(
            f"--criterion {criterion} (criterion._name) does not fit --arch {arch} (model._name): give --criterion {model}, "
            f"or an architecture of {criterion} such as --arch {criterion}_base"
        )


def ours(registry: Mapping[str, type]) -> set[str]:
    """Names under which this package has registered something itself."""
    return {name for name, registered in registry.items() if registered.__module__.startswith("amos_fairseq.")}


def _checking(add_defaults: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(add_defaults)
    def check_and_add_defaults(cfg: Any) -> None:
        check_names(cfg)
        check_fit(cfg)
        add_defaults(cfg)

    return check_and_add_defaults


def _checking_flags(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Flags are made a configuration before the script begins, where a criterion looks for settings of its own model."""

    @functools.wraps(parse)
    def parse_and_check(*args: Any, **kwargs: Any) -> Any:
        result = parse(*args, **kwargs)
        flags = vars(result if isinstance(result, Namespace) else result[0])
        if all(flags.get(name) for name in ("task", "arch", "criterion")):  # other programs than training have fewer
            check_fit({"task": flags["task"], "model": flags["arch"], "criterion": flags["criterion"]})
        return result

    return parse_and_check


def apply() -> None:
    """Check the flags, and in the scripts that are running, if they are."""
    options.parse_args_and_arch = _checking_flags(options.parse_args_and_arch)
    for script in (*running_scripts(), *running_hydra_scripts()):
        script.add_defaults = _checking(script.add_defaults)


def running_hydra_scripts() -> list[ModuleType]:
    """fairseq's Hydra entry under its names: it fills in defaults, of the criterion that is named, before it trains."""
    modules = map(sys.modules.get, ("fairseq_cli.hydra_train", "__main__"))
    return [module for module in modules if hasattr(module, "_hydra_main") and hasattr(module, "add_defaults")]

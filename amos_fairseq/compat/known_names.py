"""A misspelt task, arch, criterion, optimizer or scheduler is said to be one.

argparse refuses unknown names on the command line, but through Hydra they reach fairseq's registries, which answer with
``KeyError: "'_name'"`` or with the whole configuration. ``fairseq_cli.train.main`` imports the plugin and fills in
defaults right after it: there every name is known and nothing has been built.
"""

import difflib
import functools
from collections.abc import Callable
from typing import Any

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


def check_names(cfg: Any) -> None:
    """Raise :class:`UserError` for the first section whose name is missing or unknown."""
    for kind, known in known_names().items():
        section = cfg.get(kind)
        name = section if isinstance(section, str) else section and section.get("_name")
        if name is None:
            raise UserError(f"no {kind} is named: set {kind}._name (by flag: --{'arch' if kind == 'model' else kind})")
        if name not in known:
            similar = difflib.get_close_matches(name, sorted(known), n=3)
            hint = f"did you mean {' or '.join(similar)}" if similar else "is the package that registers it installed"
            raise UserError(f"there is no {kind} '{name}' ({kind}._name): {hint}?")


def _checking(add_defaults: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(add_defaults)
    def check_and_add_defaults(cfg: Any) -> None:
        check_names(cfg)
        add_defaults(cfg)

    return check_and_add_defaults


def apply() -> None:
    """Check in the training script that is running, if one is."""
    for script in running_scripts():
        script.add_defaults = _checking(script.add_defaults)

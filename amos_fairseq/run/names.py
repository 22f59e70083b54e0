"""Refuse unknown tasks, architectures, criterions, optimizers and schedulers, pairs that do not fit, and what is not supported.

argparse refuses unknown names on the command line, but through Hydra they reach fairseq's registries, which raise
``KeyError: "'_name'"`` or an error with the whole configuration. A criterion of this package uses the named output of the model
with the same name (``squad``: of the task with that name); with another one it would fail with a traceback.
"""

import difflib
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY
from omegaconf import OmegaConf

from amos_fairseq.compat.distribution import raise_on_every_rank
from amos_fairseq.errors import UserError
from amos_fairseq.run.hook import Hook
from amos_fairseq.setting_checks import config_class, read_section

# Keys of a detection that only validation logs.
OF_VALIDATION = ("rtd_state_variance", "rtd_first_component", "rtd_participation_ratio")


def check_config(cfg: Any) -> None:
    """Check names and values before fairseq fills in the defaults of the components that they select."""
    names = {kind: set(REGISTRIES[kind]["registry"]) for kind in ("criterion", "optimizer", "lr_scheduler")}
    names |= {"task": set(TASK_REGISTRY), "model": {*ARCH_MODEL_NAME_REGISTRY, *MODEL_REGISTRY}}
    for kind, known in names.items():
        name = name_of(cfg.get(kind))
        if str(name) not in known:
            similar = difflib.get_close_matches(str(name), sorted(known), n=3)
            hint = f"did you mean {' or '.join(similar)}" if similar else "is the package that registers it installed"
            flag = "arch" if kind == "model" else kind
            raise UserError(f"there is no {kind} '{name}' ({kind}._name, by flag --{flag}): {hint}?")
    for kind in names:  # unknown settings, and values that the fields do not take
        fields = config_class(kind, name_of(cfg[kind]))
        if fields is not None and OmegaConf.is_dict(cfg[kind]):
            unknown = [key for key in cfg[kind] if key not in (*fields.__dataclass_fields__, "_name")]
            if len(unknown) > 1:  # the recipe's settings of another component
                remove = " ".join(f"~{kind}.{key}" for key in unknown)
                raise UserError(f"{kind}: {name_of(cfg[kind])} does not have {', '.join(unknown)}: add {remove}")
            read_section(kind, fields, cfg[kind])
    check_fit(cfg)


def check_flags(flags: Namespace) -> None:
    """Check the flags before they are converted to a configuration, where a criterion looks up settings of its model."""
    chosen = {
        kind: getattr(flags, name, None)
        for kind, name in (("task", "task"), ("model", "arch"), ("criterion", "criterion"))
    }
    if all(chosen.values()):  # programs other than training have fewer
        check_fit(chosen)


def name_of(section: Any) -> str | None:
    """Return the name in a section of the configuration; a section without settings may be only its name."""
    return section.get("_name") if isinstance(section, Mapping) else getattr(section, "_name", section)


def check_fit(cfg: Any) -> None:
    """Raise :class:`UserError` for a criterion of this package with a task or a model of it that it cannot train."""
    if fitting := fitting_flags(*(name_of(cfg.get(kind)) for kind in ("task", "model", "criterion"))):
        names = ", ".join(f"{kind} {name_of(cfg.get(kind))}" for kind in ("task", "model", "criterion"))
        raise UserError(f"{names} do not fit each other: give {fitting}")


def fitting_flags(task: str, arch: str, criterion: str) -> str | None:
    """Return what to give instead of a criterion that cannot train this task and model; None if it can."""
    models, criterions, tasks = map(ours, (MODEL_REGISTRY, REGISTRIES["criterion"]["registry"], TASK_REGISTRY))
    model = ARCH_MODEL_NAME_REGISTRY.get(arch, arch)
    if criterion not in criterions:
        # A criterion of fairseq itself; one of another package may be written for our tasks.
        if task in tasks and REGISTRIES["criterion"]["registry"][criterion].__module__.startswith("fairseq."):
            return (
                f"--criterion {task if task in criterions else model if model in models else 'amos'} (criterion._name)"
            )
        return None
    needed = criterion if criterion in tasks else "text_pretraining"
    # A user's own task may pretrain as well.
    if task != needed and not (criterion in models and hasattr(TASK_REGISTRY[task], "masked_share")):
        return f"--task {needed} (task._name)"
    is_stock = MODEL_REGISTRY[model].__module__.startswith("fairseq.") if model in MODEL_REGISTRY else False
    if criterion in models and (is_stock or (model in models and criterion != model)):
        other = "" if is_stock else f"--criterion {model} (criterion._name), or "
        return f"{other}an architecture of {criterion} such as --arch {criterion}_base (model._name)"
    return None


def ours(registry: Mapping[str, type]) -> set[str]:
    """Return the names that this package has registered."""
    return {name for name, registered in registry.items() if registered.__module__.startswith("amos_fairseq.")}


class BestMetric(Hook):
    """Check ``--best-checkpoint-metric`` after the first update, instead of after the first validation.

    A criterion of this package logs the same keys in both. Validation adds ``OF_VALIDATION`` where there is a detection loss,
    and the names in the attribute ``of_validation`` of the criterion. A stock criterion may log others.
    """

    is_checked = False

    def after_update(self, trainer: Any, logged: dict[str, Any] | None) -> None:
        if not logged or self.is_checked:
            return
        self.is_checked = True
        criterion, metric = trainer.get_criterion(), trainer.cfg.checkpoint.best_checkpoint_metric
        if trainer.cfg.dataset.disable_validation or not type(criterion).__module__.startswith("amos_fairseq."):
            return
        names = sorted(["num_updates", *(name for name in logged if not name.startswith("_"))])
        names += OF_VALIDATION if "rtd_loss" in logged else ()
        names += getattr(criterion, "of_validation", ())
        if metric not in names:
            raise_on_every_rank(
                f"--best-checkpoint-metric {metric} (checkpoint.best_checkpoint_metric) is not logged: give one of "
                f"{', '.join(names)}"
            )

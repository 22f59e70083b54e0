"""Checks of settings from a command line, a YAML file or a checkpoint: names, what fits together, type, choices and range.

argparse refuses unknown names of tasks, architectures and criterions, but through Hydra they reach fairseq's registries, which
raise ``KeyError: "'_name'"``. A criterion of this package uses the named output of the model with the same name (``squad``: of
the task with that name); with another one it would fail with a traceback.

OmegaConf checks types and choices against the configuration's dataclass. A field states its range in its metadata, as one of
:data:`RANGES`; for settings of fairseq itself :data:`RANGES_OF_FAIRSEQ` states it.
"""

import dataclasses
import difflib
import math
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
from omegaconf import II, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from amos_fairseq.errors import UserError

RANGES = {
    "above 0": lambda number: number > 0,
    "0 or more": lambda number: number >= 0,
    "1 or more": lambda number: number >= 1,
    "2 or more": lambda number: number >= 2,
    "0 or more and below 1": lambda number: 0 <= number < 1,
    "0 or more and at most 1": lambda number: 0 <= number <= 1,
    "above 0 and below 1": lambda number: 0 < number < 1,
    "above 0 and at most 1": lambda number: 0 < number <= 1,
}


def setting(default: Any, help: str, within: str | None = None) -> Any:
    """Return the field of a configuration: a flag and a YAML key with this default, its help, and one of :data:`RANGES`."""
    return dataclasses.field(default=default, metadata={"help": help, **({"range": within} if within else {})})


# Other values of these would end in an exception of Python, or train nothing.
RANGES_OF_FAIRSEQ = {
    "common": {"log_interval": "1 or more"},
    "dataset": dict.fromkeys(("batch_size", "max_tokens", "validate_interval"), "1 or more")
    | {"num_workers": "0 or more"},
    "optimization": {"lr": "above 0", "update_freq": "1 or more"},
    "checkpoint": {"save_interval": "1 or more"},
}


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as flags, {"encoder_layers": 12, "disentangled_embeddings": True} -> ["--encoder-layers=12",
    "--disentangled-embeddings"]; no value can be read as a further flag. False is the absence of a flag."""
    values = {name: "" if value is True else f"={value!s}" for name, value in settings.items() if value is not False}
    return [f"--{name.replace('_', '-')}{value}" for name, value in values.items()]


def config_class(kind: str, name: Any) -> type | None:
    """Return the dataclass of a section (task, model, criterion, ...) with this ``_name``; None if it has none."""
    if not isinstance(name, str):  # from a file
        return None
    if kind == "task":
        return TASK_DATACLASS_REGISTRY.get(name)
    if kind == "model":
        return MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(name, name))
    return REGISTRIES[kind]["dataclass_registry"].get(name) if kind in REGISTRIES else None


def read_section(kind: str, fields: type, values: Mapping[str, Any]) -> DictConfig:
    """Return ``values`` over the defaults of the dataclass ``fields``."""
    try:
        return OmegaConf.merge(OmegaConf.structured(fields), values)
    except OmegaConfBaseException as error:
        raise UserError(f"{kind}.{describe(error)}") from error


def describe(error: OmegaConfBaseException) -> str:
    """Return the key of OmegaConf's error and the reason, which contains the value and what is allowed."""
    return f"{error.full_key or error.key}: {str(error).partition(chr(10))[0]}"


def check_saved_settings(file: Path, cfg: Mapping[str, Any]) -> None:
    """Refuse a checkpoint with an invalid setting of a task or criterion of this package."""
    for kind, default in (("task", "text_pretraining"), ("criterion", None)):
        section = cfg.get(kind)
        fields = config_class(kind, section.get("_name", default)) if isinstance(section, dict) else None
        if fields is not None and fields.__module__.startswith("amos_fairseq."):
            _saved_section(file, kind, fields, section)


def model_settings(file: Path, saved: Mapping[str, Any]) -> DictConfig:
    """Return the model's settings in a checkpoint, with the defaults of fields that were added later. fairseq adds missing
    fields by model name only, and a checkpoint written with ``--arch amos_base`` names the architecture."""
    name = str(saved.get("_name") or saved.get("arch"))
    model_class = ARCH_MODEL_REGISTRY.get(name) or MODEL_REGISTRY.get(name, object)
    # A model may be defined elsewhere and derived from one of this package.
    if not any(base.__module__.startswith("amos_fairseq.") for base in model_class.__mro__):
        raise UserError(
            f"{file} contains a model of the architecture {name!r}, which is not one of this package: give a checkpoint that "
            "fairseq-train --user-dir amos_fairseq wrote"
        )
    fields = config_class("model", name)
    # What newer versions take from another section, such as the planned updates, has no default that can be resolved here.
    unset = {each.name: each.type() for each in dataclasses.fields(fields) if str(each.default).startswith("${")}
    return _saved_section(file, "model", fields, {**unset, **saved, "_name": name})


def _saved_section(file: Path, kind: str, fields: type, saved: Mapping[str, Any]) -> DictConfig:
    """Return the settings of a section of a checkpoint over the defaults of its dataclass; unknown ones are left out."""
    known = {field.name for field in dataclasses.fields(fields)}
    try:
        settings = read_section(kind, fields, {key: value for key, value in saved.items() if key in known})
        check_ranges(settings, fields)
    except (UserError, OmegaConfBaseException) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{file} contains a setting that no run has: {reason}") from error
    return settings


def check_ranges(cfg: Any, fields: type) -> None:
    """Refuse a value of ``cfg`` outside the range of its field, or not finite."""
    for name, range_ in _ranges_of(fields).items():
        _check_value(f"--{name.replace('_', '-')}", getattr(cfg, name, None), range_)


def check_configuration(cfg: Mapping[str, Any]) -> None:
    """Check the ranges of a complete, resolved configuration."""
    for kind, section in cfg.items():
        if not isinstance(section, Mapping):
            continue
        fields = config_class(kind, section.get("_name"))
        ranges = {**RANGES_OF_FAIRSEQ.get(kind, {}), **(_ranges_of(fields) if fields else {})}
        for name in section:
            if not OmegaConf.is_missing(section, name):
                _check_value(f"{kind}.{name} (--{name.replace('_', '-')})", section[name], ranges.get(name))
        if kind == "criterion" and fields:
            _check_follows_model(fields, section, cfg["model"])


def _check_follows_model(fields: type, criterion: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Refuse a criterion whose copy of a setting of the model has another value."""
    for field in dataclasses.fields(fields):
        name = field.name
        if field.default == II(f"model.{name}") and name in model and criterion.get(name, model[name]) != model[name]:
            raise UserError(f"criterion.{name} is {criterion[name]}, model.{name} {model[name]}: set only model.{name}")


def _ranges_of(fields: type) -> dict[str, str]:
    return {field.name: field.metadata["range"] for field in dataclasses.fields(fields) if "range" in field.metadata}


def _check_value(label: str, value: Any, range_: str | None) -> None:
    """Refuse a number, or one in a list, that is not finite or outside of ``range_``, one of :data:`RANGES`."""
    for number in value if isinstance(value, (list, tuple)) or OmegaConf.is_list(value) else [value]:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            continue
        if not math.isfinite(number) or (range_ and not RANGES[range_](number)):
            limits = [*["a finite number"] * (not math.isfinite(number)), *[range_] * bool(range_)]
            raise UserError(f"{label} {number} must be {', '.join(limits)}")


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
    models, criterions, tasks = map(
        names_of_package, (MODEL_REGISTRY, REGISTRIES["criterion"]["registry"], TASK_REGISTRY)
    )
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


def names_of_package(registry: Mapping[str, type]) -> set[str]:
    """Return the names that this package has registered."""
    return {name for name, registered in registry.items() if registered.__module__.startswith("amos_fairseq.")}

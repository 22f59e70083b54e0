"""Checks of settings from a command line, a YAML file or a checkpoint: type, choices and range.

OmegaConf checks types and choices against the configuration's dataclass. A field states its range in its metadata, as one of
:data:`RANGES`; for settings of fairseq itself :data:`RANGES_OF_FAIRSEQ` states it.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fairseq.models import (
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    MODEL_REGISTRY,
)
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import II, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from amos_fairseq.errors import UserError


class Range(NamedTuple):
    low: float
    includes_low: bool = True
    high: float = math.inf
    includes_high: bool = False

    def __contains__(self, value: float) -> bool:
        is_above = value >= self.low if self.includes_low else value > self.low
        return is_above and (value <= self.high if self.includes_high else value < self.high)


RANGES = {
    "above 0": Range(0, includes_low=False),
    "0 or more": Range(0),
    "1 or more": Range(1),
    "2 or more": Range(2),
    "0 or more and below 1": Range(0, high=1),
    "0 or more and at most 1": Range(0, high=1, includes_high=True),
    "above 0 and below 1": Range(0, includes_low=False, high=1),
    "above 0 and at most 1": Range(0, includes_low=False, high=1, includes_high=True),
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
    """Return settings as flags, {"encoder_layers": 12} -> ["--encoder-layers=12"]; no value can be read as a further flag."""
    return [f"--{name.replace('_', '-')}={value!s}" for name, value in settings.items()]


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
    """Return the model's settings in a checkpoint, with the defaults of fields that were added after they were saved.

    fairseq adds missing fields by model name only, and a checkpoint written with ``--arch amos_base`` names the architecture.
    """
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
            raise UserError(
                f"criterion.{name} is {criterion[name]}, model.{name} {model[name]}: set model.{name} alone"
            )


def _ranges_of(fields: type) -> dict[str, str]:
    return {field.name: field.metadata["range"] for field in dataclasses.fields(fields) if "range" in field.metadata}


def _check_value(label: str, value: Any, range_: str | None) -> None:
    """Refuse a number, or one in a list, that is not finite or outside of ``range_``, one of :data:`RANGES`."""
    for number in value if isinstance(value, (list, tuple)) or OmegaConf.is_list(value) else [value]:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            continue
        if not math.isfinite(number) or (range_ and number not in RANGES[range_]):
            limits = [*["a finite number"] * (not math.isfinite(number)), *[range_] * bool(range_)]
            raise UserError(f"{label} {number} must be {', '.join(limits)}")

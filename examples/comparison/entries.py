"""The compared entries (a config and its own settings) under one preset, and a check that nothing else differs."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from amos_fairseq.errors import UserError
from amos_fairseq.models.configuration import EncoderConfig
from amos_fairseq.recipes import quoted
from amos_fairseq.recipes.composition import RECIPES, compose_recipe

CONFIGS = Path(__file__).resolve().parent / "configs"
NAME = re.compile(r"[A-Za-z0-9_.-]+")

# Settings that all entries must share. The length of the schedule follows from the budget; mask_treatment and the settings that
# a model adds to EncoderConfig belong to the objective, and so does its paper's activation in a classification head.
SHARED = {
    "common": ("seed",),
    "task": ("tokens_per_sample", "sample_break_mode", "mask_prob", "precision", "data"),
    "model": tuple(
        name for name in EncoderConfig.__dataclass_fields__ if name not in ("_name", "pooler_activation_fn")
    ),
    "dataset": ("batch_size", "max_tokens", "train_subset"),
    "optimization": ("lr", "update_freq", "clip_norm"),
    "optimizer": None,
    "lr_scheduler": ("_name", "power", "end_learning_rate"),
}


@dataclass(frozen=True)
class Entry:
    """One entry of the comparison.

    Attributes:
        name: name of its folder.
        label: name in tables and figures.
        config: name of a YAML file of amos_fairseq/recipes.
        settings: Hydra key -> value, in addition to the preset's.
    """

    name: str
    label: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Preset:
    """Settings that all entries share.

    Attributes:
        settings: Hydra key -> value.
        warmup_share: fraction of all updates.
        warmup_updates: instead of a fraction, their number, at most a quarter of all.
        fine_tuning: flags of ``amos glue`` with their values.
    """

    size: str
    settings: dict[str, Any]
    warmup_share: float | None
    warmup_updates: int | None
    fine_tuning: dict[str, Any]

    def warmup(self, max_update: int) -> int:
        """Return the updates in which the rate rises, of a run of ``max_update``."""
        if self.warmup_updates is not None:
            return min(self.warmup_updates, max_update // 4)
        return max(1, round(max_update * self.warmup_share))


def read_yaml(file: Path) -> dict[str, Any]:
    """Read a mapping; raise :class:`UserError` for anything else."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): name a file of entries with --entries") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid YAML ({error}): fix it") from error
    if not isinstance(content, dict):
        raise UserError(
            f"{file} is not a mapping: write 'NAME: {{config: ...}}' for each entry, as in {CONFIGS}/entries.yaml"
        )
    return content


def read_preset(size: str, settings: dict[str, Any]) -> Preset:
    """Read a preset; ``settings`` of the user override it."""
    content = read_yaml(CONFIGS / f"{size}.yaml")
    warmup = [content.get(name) for name in ("warmup_share", "warmup_updates")]
    return Preset(size, content["settings"] | settings, *warmup, content["fine_tuning"])


def read_entries(file: Path, size: str, names: list[str] | None) -> list[Entry]:
    """Read the entries of a file, all or those of ``names`` in that order.

    Raises:
        UserError: the file is invalid, or has no entry of such a name.
    """
    content = read_yaml(file)
    for name in names or []:
        if name not in content:
            raise UserError(f"--objectives {name}: no such entry in {file}; it has {', '.join(map(str, content))}")
    return [_entry(file, str(name), content[name], size) for name in names or content]


def _entry(file: Path, name: str, values: Any, size: str) -> Entry:
    if not NAME.fullmatch(name):
        raise UserError(f"{file}: {name!r} is not a valid folder name: use letters, digits, '_', '-' and '.'")
    try:
        known = {"config": str(values["config"]).format(size=size), "settings": dict(values.get("settings") or {})}
        unknown = values.keys() - known.keys() - {"label"}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise UserError(f"{file}: {name} needs 'config: NAME' and may have label and settings ({error})") from error
    if unknown:
        raise UserError(f"{file}: {name} has {', '.join(map(str, unknown))}; it may have config, label and settings")
    if not (RECIPES / f"{known['config']}.yaml").is_file():
        raise UserError(f"{file}: {name} starts from {known['config']}, but {RECIPES} has no {known['config']}.yaml")
    return Entry(name, str(values.get("label", name)), **known)


def hydra_overrides(settings: dict[str, Any]) -> list[str]:
    """Format KEY=VALUE for Hydra; strings are quoted, since a path may contain spaces, commas and equals signs."""
    return [f"{key}={_hydra_value(value)}" for key, value in settings.items()]


def _hydra_value(value: Any) -> str:
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return f"[{','.join(map(_hydra_value, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse "model.dropout=0.1" to ("model.dropout", 0.1); raise :class:`UserError` for other formats."""
    key, equals, value = text.partition("=")
    if not (equals and re.fullmatch(r"\w+(\.\w+)+", key)):
        raise UserError(f"--set {text!r} is not KEY=VALUE with a KEY like model.dropout")
    try:
        return key, OmegaConf.to_container(OmegaConf.create({"value": yaml.safe_load(value)}))["value"]
    except yaml.YAMLError as error:
        raise UserError(f"--set {text}: the value is not valid YAML") from error


def compose_entry(entry: Entry, settings: dict[str, Any]) -> DictConfig:
    """Compose the resolved configuration that ``fairseq-hydra-train`` uses for this entry; may raise :class:`UserError`."""
    try:
        return compose_recipe(entry.config, hydra_overrides(settings))
    except UserError as error:
        raise UserError(f"{entry.name}: {error}") from error


def shared_settings(cfg: DictConfig) -> dict[str, Any]:
    """Return "group.key" -> value of all settings that must not differ between entries."""
    values = {}
    for group, keys in SHARED.items():
        for key in keys if keys is not None else sorted(cfg[group]):
            if cfg[group].get(key) is not None:
                values[f"{group}.{key}"] = OmegaConf.to_container(OmegaConf.create({"value": cfg[group][key]}))["value"]
    return values


def check_shared(configs: dict[str, DictConfig]) -> dict[str, Any]:
    """Return the settings that all entries share.

    Raises:
        UserError: two entries differ in one, so their scores would not compare the objectives.
    """
    first, *others = configs
    expected = shared_settings(configs[first])
    for name in others:
        found = shared_settings(configs[name])
        for key in sorted(expected.keys() | found.keys()):
            if found.get(key) != expected.get(key):
                raise UserError(
                    f"{key} is {expected.get(key)} for {first} and {found.get(key)} for {name}: a comparison needs one "
                    f"value, give it with --set {key}=VALUE"
                )
    return expected

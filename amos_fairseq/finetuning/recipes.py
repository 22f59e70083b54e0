"""Recipes: hyperparameters of every task of a benchmark, as YAML files that state the source of each number.

::

    description: one line
    defaults: {batch_size: 32, warmup: 1/16, ...}      # fields of Settings
    sizes: {small: {defaults: {...}, tasks: {...}}}    # what depends on the encoder's size
    tasks: {CoLA: {lr: 2.0e-5, epochs: 10}, ...}       # every task that the recipe knows
    grid: {lr: [...], ...}                             # a search: all combinations; a task may have its own
    extends: electra                                   # a built-in recipe: its section, where this file has none

Later layers win: defaults, the size's defaults, the task, the size's task. A value that stands in the task replaces the
grid's values of that name.
"""

import dataclasses
import itertools
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from amos_fairseq.errors import UserError
from amos_fairseq.finetuning.settings import Settings

DIRECTORY = Path(__file__).with_name("recipes")
SECTIONS = ("description", "defaults", "sizes", "tasks", "grid", "extends")
FIELDS = {field.name: field.type for field in dataclasses.fields(Settings)}
# Widths of thesis Table 5.1; whatever lies between two of them takes the recipe of the larger.
SIZE_WIDTHS = {"small": 256, "base": 768, "large": 1024}


@dataclass(frozen=True)
class Recipe:
    """A recipe for encoders of one size.

    Attributes:
        name: of a built-in recipe, or the path of the user's.
        points: task -> its combinations of hyperparameters; one, or all of a grid.
    """

    name: str
    description: str
    size: str
    points: dict[str, tuple[Settings, ...]]

    def of(self, task: str) -> tuple[Settings, ...]:
        """Raises :class:`UserError` where the recipe does not know the task."""
        if task not in self.points:
            known = ", ".join(self.points)
            raise UserError(f"the recipe {self.name} has nothing for {task}: add it under tasks (it has {known})")
        return self.points[task]


def recipe_names() -> list[str]:
    return sorted(path.stem for path in DIRECTORY.glob("*.yaml"))


def size_of(width: int) -> str:
    """The size whose settings an encoder of this width takes: tiny ones the small's, wider than large the large's."""
    return next((size for size, largest in SIZE_WIDTHS.items() if width <= largest), "large")


def load_recipe(name: str, size: str, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read a recipe by name or by the path of a YAML file.

    Args:
        size: "small", "base" or "large".
        overrides: fields of :class:`Settings` that the command line sets for every task; they also replace a grid's.

    Raises:
        UserError: there is no such recipe, or a section, field or value in it is not understood.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else DIRECTORY / f"{name}.yaml"
    content = _read(path, name)
    by_size = _section(content, "sizes", path).get(size, {})
    points = {}
    for task, own in _section(content, "tasks", path).items():
        of_size = _section(by_size, "tasks", path).get(task)
        layers = [_mapping(content, "defaults", path), _mapping(by_size, "defaults", path), own, of_size, overrides]
        points[task] = _points(layers, _mapping(content, "grid", path), f"{path}, {task}")
    return Recipe(name, str(content.get("description", name)), size, points)


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        known = ", ".join(recipe_names())
        raise UserError(
            f"there is no recipe {name}: choose one of {known}, or give the path of a .yaml file"
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: the recipe cannot be read ({reason})") from error
    if isinstance(content, dict) and "extends" in content:
        base = str(content["extends"])
        if base == name or base not in recipe_names():
            raise UserError(f"{path}: extends names a built-in recipe, one of {', '.join(recipe_names())}, not {base}")
        content = _read(DIRECTORY / f"{base}.yaml", base) | content
    if not isinstance(content, dict) or not content.get("tasks") or set(content) - set(SECTIONS):
        raise UserError(f"{path} is no recipe: it needs the section tasks and may have {', '.join(SECTIONS)}, no other")
    return content


def _section(content: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    section = _mapping(content, name, path)
    return {key: _mapping(section, key, path) for key in section}


def _mapping(content: dict[str, Any], name: str, where: object) -> dict[str, Any]:
    mapping = content.get(name) or {}
    if not isinstance(mapping, dict):
        raise UserError(f"{where}: {name} must map names to settings, such as 'CoLA: {{lr: 2.0e-5}}'")
    return mapping


def _points(layers: list[dict[str, Any] | None], grid: dict[str, list[Any]], where: str) -> tuple[Settings, ...]:
    """All combinations, the grid's last name changing fastest."""
    fixed: dict[str, Any] = {}
    ranges = dict(grid)
    for layer in layers:
        values = dict(layer or {})
        ranges.update(_mapping(values, "grid", where))
        values.pop("grid", None)
        fixed.update(values)
        if layer is not layers[0]:  # a default gives way to the grid, anything more particular replaces it
            ranges = {name: choices for name, choices in ranges.items() if name not in values}
    names = list(ranges)
    combinations = itertools.product(*(_choices(ranges[name], name, where) for name in names))
    return tuple(_settings({**fixed, **dict(zip(names, values, strict=True))}, where) for values in combinations)


def _choices(values: Any, name: str, where: str) -> list[Any]:
    if not isinstance(values, list) or not values:
        raise UserError(f"{where}: the grid's {name} must be a list of values")
    return values


def _settings(values: dict[str, Any], where: str) -> Settings:
    unknown = sorted(set(values) - set(FIELDS))
    if unknown:
        raise UserError(f"{where}: {unknown[0]} is no setting; known are {', '.join(FIELDS)}")
    missing = [name for name in ("lr", "epochs", "batch_size", "warmup") if name not in values]
    if missing:
        raise UserError(f"{where}: {missing[0]} is missing (needed: lr, epochs, batch_size, warmup)")
    try:
        return Settings(**{name: _value(name, value) for name, value in values.items()})
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _value(name: str, value: Any) -> Any:
    """YAML reads 2e-5 (without a point) and 1/16 as texts."""
    kind = FIELDS[name]
    try:
        if kind is float:
            return float(Fraction(value)) if isinstance(value, str) and "/" in value else float(value)
        if kind is int:
            return int(str(value))  # int() alone would cut 2.5 down to 2
        if kind is str:
            return str(value)
        first, second = value
        return float(first), float(second)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        expected = {float: "a number", int: "a whole number", str: "a word"}.get(kind, "two numbers")
        raise UserError(f"{name} {value!r} must be {expected}") from error

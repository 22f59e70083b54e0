"""Recipes: the hyperparameters of every task of a benchmark, as YAML files that state the source of each value.

::

    description: one line
    defaults: {batch_size: 32, warmup: 1/16, ...}      # fields of Hyperparameters
    sizes: {small: {defaults: {...}, tasks: {...}}}    # values that depend on the encoder's size
    tasks: {CoLA: {lr: 2.0e-5, epochs: 10}, ...}       # every task of the recipe
    grid: {lr: [...], ...}                             # grid search over all combinations; a task may have its own
    extends: electra                                   # a built-in recipe; provides the sections that this file lacks

A number may be a fraction (1/16), or divided by the width of the encoder or its power of 1.5 (0.04/width, 1.06/width^1.5).
Later layers override earlier ones: defaults, the size's defaults, the task, the size's task. What a recipe sets replaces
the value of that name in the sizes of the recipe that it extends. A value given for the task replaces the grid's values of
that name. Each combination of hyperparameters is called a trial.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, NamedTuple  # noqa: UP035 (OmegaConf reads these spellings)

from omegaconf import MISSING, OmegaConf

from amos_fairseq.errors import UserError
from amos_fairseq.experiments import RECIPES, recipe_file, recipe_names
from amos_fairseq.modules.heads import LINEAR_HEAD, POOLINGS
from amos_fairseq.setting_checks import check_ranges, read_section, setting
from amos_fairseq.text.encoding import END_ID
from amos_fairseq.untrusted import read_yaml

WORDS = "tagging"  # the section of a recipe for labels of words, and for trees
# Widths of thesis Table 5.1. A width between two of them uses the recipe of the larger size.
SIZE_WIDTHS = {"small": 256, "base": 768, "large": 1024}
CHOICES = {
    "head": ("dense", LINEAR_HEAD),
    "pooling": POOLINGS,
    "num_separators": (1, 2),
    "checkpoint": ("best", "last"),
    "linear": (False,),  # a recipe has the trained settings, and amos classify adds the linear ones: as_linear()
}
COUNT, SIZE, POSITIVE, SHARE = "0 or more", "1 or more", "above 0", "0 or more and below 1"


class Schedule(NamedTuple):
    """The length of a run."""

    updates_per_epoch: float  # no whole number where the examples of the last batch begin the next epoch
    repetitions: int  # how often the training set is read in the place of one epoch of the recipe
    num_epochs: int
    total_updates: int
    warmup_updates: int


@dataclass(frozen=True)
class Hyperparameters:
    lr: float = setting(MISSING, "the peak of the learning rate", POSITIVE)
    epochs: int = setting(MISSING, "how often the training set is read", SIZE)
    batch_size: int = setting(MISSING, "examples of an update", SIZE)
    warmup: float = setting(MISSING, "share of the updates in which the rate rises; then it falls linearly to 0", SHARE)
    weight_decay: float = setting(0.0, "of all but biases and LayerNorm", COUNT)
    clip_norm: float = setting(0.0, "largest norm of the gradient; 0 disables clipping", COUNT)
    dropout: float = setting(0.1, "of hidden states", SHARE)
    attention_dropout: float = setting(0.1, "of attention probabilities", SHARE)
    pooler_dropout: float = setting(0.0, "before the output layer of the head", SHARE)
    adam_betas: tuple[float, float] = setting((0.9, 0.999), "of both moments", SHARE)
    adam_eps: float = setting(1e-6, "epsilon of Adam", POSITIVE)
    bias_correction: bool = setting(True, "of Adam's moments")
    layer_wise_lr_decay: float = setting(1.0, "factor of the learning rate per layer, from the top down", POSITIVE)
    head: str = setting("dense", "of texts: a dense layer with the objective's activation before the output; or linear")
    num_separators: int = setting(1, "</s> between the texts of a pair")
    checkpoint: str = setting("best", "which one is scored: the best on dev after an epoch, or the last")
    similar_lengths: bool = setting(False, "batches of examples of similar length, which need little padding")
    # Mosbach et al. 2021 and Zhang et al. 2021: small data need more epochs than BERT's 3. There are still as many
    # checkpoints, and scores on dev, as ``epochs``.
    min_updates: int = setting(0, "repeat all epochs two times, three times, ... for as many updates", COUNT)
    min_updates_per_label: int = setting(0, "of a table of texts: as many for each label, if that is more", COUNT)
    pooling: str = setting("first", "what the head of texts reads: the state of the first token, or the mean of all")
    freeze_encoder: bool = setting(False, "train the head alone")
    linear: bool = setting(False, "of amos classify: scikit-learn fits the output layer to the frozen states")
    label_smoothing: float = setting(0.0, "of words: share of a label that is spread over all in training", SHARE)
    views: str = setting("", "of words: cross-view training; see SequenceTaggingConfig")
    unlabeled_start: float = setting(0.1, "of views: share of the updates before they train the encoder", SHARE)

    @property
    def separator(self) -> int | None:
        """Value of ``--separator-token``: a token between the texts of a pair, in addition to the first one's ``</s>``."""
        return END_ID if self.num_separators == 2 else None

    def as_linear(self) -> "Hyperparameters":
        """Return the settings of a linear model: a training of one update makes its files, then the output layer is fitted."""
        head = {"linear": True, "head": LINEAR_HEAD, "pooling": "mean", "freeze_encoder": True}
        return dataclasses.replace(self, **head, checkpoint="last", epochs=1, min_updates=0, dropout=0.0)

    def for_labels(self, number: int) -> "Hyperparameters":
        """Return the settings for a table with ``number`` labels: the head has a row for each, which few examples train."""
        least = max(self.min_updates, number * self.min_updates_per_label)
        return dataclasses.replace(self, min_updates=least, min_updates_per_label=0)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"adam_betas": list(self.adam_betas)}

    def schedule(self, num_examples: int, continues_across_epochs: bool = False) -> Schedule:
        """Return the length of a run. ``continues_across_epochs``: the rest of an epoch that fills no batch begins the next."""
        if self.linear:
            return Schedule(1, 1, 1, 1, 0)
        batches = num_examples / self.batch_size
        updates_per_epoch = batches if continues_across_epochs else math.ceil(batches)
        repetitions = max(1, math.ceil(self.min_updates / (updates_per_epoch * self.epochs)))
        num_epochs = self.epochs * repetitions
        total = (
            num_examples * num_epochs // self.batch_size if continues_across_epochs else updates_per_epoch * num_epochs
        )
        # Rounded down, as the integer division by 16 or 10 in AMOS's released script. In binary, 1/10 of 30 can be 2.9999...;
        # the result must still be 3.
        return Schedule(updates_per_epoch, repetitions, num_epochs, total, math.floor(self.warmup * total + 1e-6))

    def train_flags(self, schedule: Schedule) -> list[str]:
        """Return the flags of ``fairseq-train``. Every batch has ``batch_size`` examples: by default fairseq would split the
        last batch of an epoch at a multiple of 8, and the number of updates would differ from the schedule's."""
        first_moment, second_moment = self.adam_betas
        flags = {
            "batch-size": self.batch_size,
            "required-batch-size-multiple": 1,
            "max-epoch": schedule.num_epochs,
            "optimizer": "grouped_adam",
            "adam-betas": f"({first_moment}, {second_moment})",
            "lr-scheduler": "polynomial_decay",
            "warmup-updates": schedule.warmup_updates,
            "total-num-update": schedule.total_updates,
        }
        for name in (
            *("lr", "adam_eps", "weight_decay", "layer_wise_lr_decay", "clip_norm", "dropout", "attention_dropout"),
            *("pooler_dropout", "pooling"),
        ):
            flags[name.replace("_", "-")] = getattr(self, name)
        if self.head == LINEAR_HEAD:
            flags["pooler-activation-fn"] = LINEAR_HEAD
        if self.separator is not None:
            flags["separator-token"] = self.separator
        if schedule.repetitions > 1:
            flags |= {"save-interval": schedule.repetitions, "validate-interval": schedule.repetitions}
        arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        arguments += ["--similar-lengths"] if self.similar_lengths else []
        arguments += ["--freeze-encoder"] if self.freeze_encoder else []
        arguments += ["--max-update", "1"] if self.linear else []
        return arguments if self.bias_correction else [*arguments, "--no-bias-correction"]


@dataclass(frozen=True)
class Recipe:
    """A recipe for one encoder."""

    name: str  # of a built-in recipe, or path of a user's file
    description: str
    size: str  # empty if the values do not depend on it
    trials: dict[str, tuple[Hyperparameters, ...]]  # of each task one, or all combinations of a grid

    def trials_of(self, task: str) -> tuple[Hyperparameters, ...]:
        if task not in self.trials:
            known = ", ".join(self.trials)
            raise UserError(f"the recipe {self.name} has no settings for {task}: add it under tasks (it has {known})")
        return self.trials[task]


def size_for_width(width: int) -> str:
    """Return the smallest size that is at least ``width`` wide; "large" for wider encoders."""
    return next((size for size, largest in SIZE_WIDTHS.items() if width <= largest), "large")


def load_recipe(
    name: str, size: str, overrides: dict[str, Any] | None = None, width: int = SIZE_WIDTHS["base"]
) -> Recipe:
    """Read a built-in recipe, or a YAML file, for an encoder of this size and width. ``overrides``: fields of
    :class:`Hyperparameters` from the command line, for every task; they also replace a grid's."""
    if overrides and "min_updates" in overrides:
        overrides = overrides | {"min_updates_per_label": 0}
    path = recipe_file(name)
    content = _with_numbers(_read_sections(path, name), width)
    sizes = content["sizes"]
    if unknown := sizes.keys() - SIZE_WIDTHS:
        raise UserError(f"{path}: sizes: {unknown.pop()} must be small, base or large")
    size_settings = sizes.get(size, {"defaults": {}, "tasks": {}})
    for_all = [content["defaults"], {"grid": content["grid"]}, size_settings["defaults"]]
    trials = {
        task: _trials([*for_all, settings, size_settings["tasks"].get(task, {}), overrides or {}], f"{path}, {task}")
        for task, settings in content["tasks"].items()
    }
    return Recipe(name, content["description"] or name, size if size in sizes else "", trials)


@dataclass
class SizeSection:
    defaults: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006
    tasks: Dict[str, Dict[str, Any]] = field(default_factory=dict)  # noqa: UP006


@dataclass
class RecipeFile:
    """The sections of a YAML file; see the top of this module."""

    tasks: Dict[str, Dict[str, Any]] = MISSING  # noqa: UP006
    description: str = ""
    defaults: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006
    sizes: Dict[str, SizeSection] = field(default_factory=dict)  # noqa: UP006
    grid: Dict[str, List[Any]] = field(default_factory=dict)  # noqa: UP006
    extends: str = ""


def _read_sections(path: Path, name: str) -> dict[str, Any]:
    """Return the sections of a recipe, those that it extends among them."""
    content = read_yaml(path, "correct the recipe")
    content = content if isinstance(content, dict) else {}
    own = OmegaConf.to_container(read_section(f"{path}: recipe", RecipeFile, content))
    base = own["extends"]
    if not base:
        if own["tasks"] == MISSING:
            raise UserError(f"{path} is not a recipe: it needs the section tasks, or extends")
        return own
    if base == name or base not in recipe_names():
        known = ", ".join(recipe_names())
        raise UserError(f"{path}: extends must name a built-in recipe, one of {known}, not {base}")
    inherited = _read_sections(RECIPES / f"{base}.yaml", base)
    own_tasks = {} if own["tasks"] == MISSING else own["tasks"]
    for size in inherited["sizes"].values():  # what this file sets is meant for every size
        for values, replaced in (
            (size["defaults"], own["defaults"].keys() | own["grid"].keys()),
            *((values, own_tasks.get(task, {}).keys()) for task, values in size["tasks"].items()),
        ):
            for name in values.keys() & replaced:
                del values[name]
    return inherited | {section: own[section] for section in content}


def _trials(layers: list[dict[str, Any]], where: str) -> tuple[Hyperparameters, ...]:
    """Return all combinations of the grid; its last name varies fastest. Each layer overrides those before it, also a grid."""
    fixed: dict[str, Any] = {}
    grid: dict[str, Any] = {}
    for layer in layers:
        values = {name: value for name, value in layer.items() if name != "grid"}
        fixed |= values
        own_grid = read_section(where, RecipeFile, {"grid": layer.get("grid") or {}}).grid  # of a task, too
        grid |= OmegaConf.to_container(own_grid)
        grid = {name: choices for name, choices in grid.items() if choices and name not in values}
    fixed |= {name: choices[0] for name, choices in grid.items()}
    first = _hyperparameters(fixed, where)
    # Each value is read once: AMOS's grid has 912 combinations.
    choices_as_read = [
        [getattr(_hyperparameters(fixed | {name: choice}, where), name) for choice in choices]
        for name, choices in grid.items()
    ]
    return different(
        dataclasses.replace(first, **dict(zip(grid, values, strict=True)))
        for values in itertools.product(*choices_as_read)
    )


def different(trials: Iterable[Hyperparameters]) -> tuple[Hyperparameters, ...]:
    """Return each trial once, in order: equal ones would train in the same directory."""
    return tuple(dict.fromkeys(trials))


def _hyperparameters(values: Mapping[str, Any], where: str) -> Hyperparameters:
    settings = OmegaConf.to_container(read_section(where, Hyperparameters, values))
    if missing := [name for name, value in settings.items() if value == MISSING]:
        raise UserError(f"{where}: {missing[0]} is missing (needed: lr, epochs, batch_size, warmup)")
    if len(settings["adam_betas"]) != 2:
        raise UserError(f"{where}: adam_betas {settings['adam_betas']} must be two numbers")
    settings["adam_betas"] = tuple(settings["adam_betas"])
    hyperparameters = Hyperparameters(**settings)
    try:
        check_ranges(hyperparameters, Hyperparameters)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    for name, choices in CHOICES.items():
        if (value := settings[name]) not in choices:
            raise UserError(f"{where}: {name} {value} must be {' or '.join(map(str, choices))}")
    return hyperparameters


def _with_numbers(value: Any, width: int) -> Any:
    """Replace each 1/16, 0.04/width or 1.06/width^1.5, which YAML loads as a string, by a number."""
    if isinstance(value, dict):
        return {key: _with_numbers(each, width) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_numbers(each, width) for each in value]
    match = re.fullmatch(r"(\d+|\d*\.\d+)/([1-9]\d*|width|width\^1\.5)", value) if isinstance(value, str) else None
    if match is None:
        return value
    return float(match[1]) / float({"width": width, "width^1.5": width**1.5}.get(match[2], match[2]))

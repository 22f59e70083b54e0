"""Recipes: the hyperparameters of every task of a benchmark, as YAML files that state the source of each value.

::

    description: one line
    defaults: {batch_size: 32, warmup: 1/16, ...}      # fields of Hyperparameters
    sizes: {small: {defaults: {...}, tasks: {...}}}    # values that depend on the encoder's size
    tasks: {CoLA: {lr: 2.0e-5, epochs: 10}, ...}       # every task of the recipe
    grid: {lr: [...], ...}                             # grid search over all combinations; a task may have its own
    extends: electra                                   # a built-in recipe; provides the sections that this file lacks

Later layers override earlier ones: defaults, the size's defaults, the task, the size's task. A value given for the task
replaces the grid's values of that name. Each combination of hyperparameters is called a trial.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml
from fairseq.data import Dictionary

from amos_fairseq.downstream.views import VIEW_LAYERS
from amos_fairseq.errors import UserError
from amos_fairseq.models.configuration import check_new_top_layers, parse_layers
from amos_fairseq.modules.heads import LINEAR_HEAD, POOLINGS

DIRECTORY = Path(__file__).with_name("recipes")
SECTIONS = ("description", "defaults", "sizes", "tasks", "grid", "extends")
WORDS = "tagging"  # the section of all words with labels, also of trees
# Widths of thesis Table 5.1. A width between two of them uses the recipe of the larger size.
SIZE_WIDTHS = {"small": 256, "base": 768, "large": 1024}


CHOICES = {
    "head": ("dense", LINEAR_HEAD),
    "pooling": POOLINGS,
    "view_layers": VIEW_LAYERS,
    "num_separators": (1, 2),
    "checkpoint": ("best", "last"),
}
SMALLEST, BELOW_ONE = math.ulp(0.0), math.nextafter(1.0, 0.0)
FRACTIONS = (
    "dropout",
    "attention_dropout",
    "pooler_dropout",
    "warmup",
    "adam_betas",
    "label_smoothing",
    "unlabeled_start",
)
RANGES = (  # names, the smallest and the largest value, and both in words
    (("lr", "adam_eps", "layer_wise_lr_decay"), SMALLEST, 1000, "above 0 and at most 1,000"),
    (("epochs", "batch_size"), 1, 1_000_000, "above 0 and at most 1,000,000"),
    (FRACTIONS, 0, BELOW_ONE, "at least 0 and below 1"),
    (("weight_decay", "clip_norm"), 0, 1_000_000, "0 or above, at most 1,000,000"),
    (("min_updates", "new_top_layers"), 0, 1_000_000, "from 0 to 1,000,000"),
)


def check_value(name: str, value: Any, shown: str) -> None:
    """Raise :class:`UserError` if a hyperparameter is out of range; ``shown``: what the message calls it."""
    if name in CHOICES and value not in CHOICES[name]:
        raise UserError(f"{shown} {value} must be {' or '.join(map(str, CHOICES[name]))}")
    for names, low, high, expected in RANGES:
        for each in (value if isinstance(value, tuple) else (value,)) if name in names else ():
            if not low <= each <= high:
                raise UserError(f"{shown} {each} must be {expected}")


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters of one fine-tuning run.

    Attributes:
        warmup: fraction of all updates in which the learning rate rises; it then decays linearly to 0.
        clip_norm: maximum gradient norm; 0 disables clipping.
        layer_wise_lr_decay: factor of the learning rate per layer, from the top down; 1 gives all layers the same rate.
        bias_correction: of Adam's moments.
        head: ``dense`` (a dense layer with the activation of the checkpoint's objective, then the output layer), or
            ``linear`` (the output layer alone); for classification and regression.
        num_separators: number of ``</s>`` between the texts of a pair, 1 or 2.
        checkpoint: which checkpoint is scored: ``best`` on the dev set after an epoch, or ``last``.
        similar_lengths: batches of examples of similar length, which need little padding, instead of random ones.
        min_updates: train for twice, three times, ... as many epochs as ``epochs`` says if those have fewer updates (Mosbach et
            al. 2021 and Zhang et al. 2021: small data need more epochs than BERT's 3). The number of checkpoints and scores on
            dev stays that of ``epochs``.
        layers: what the head reads: ``last``, the number of a layer, as a string, or ``mix``; see
            :class:`~amos_fairseq.models.fine_tuning.FineTunedModel`.
        new_top_layers: how many of the upper layers start from new random weights.
        pooling: what a classification head reads: the state of the ``first`` token, or the ``mean`` of all.
        label_smoothing: for words with labels: the share of a label that is spread over all labels in training.
        views: for words: cross-view training, :class:`~amos_fairseq.downstream.tagging.task.SequenceTaggingConfig`; likewise
            ``view_layers`` and ``unlabeled_start``.
    """

    lr: float
    epochs: int
    batch_size: int
    warmup: float
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    dropout: float = 0.1
    attention_dropout: float = 0.1
    pooler_dropout: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-6
    bias_correction: bool = True
    layer_wise_lr_decay: float = 1.0
    head: str = "dense"
    num_separators: int = 1
    checkpoint: str = "best"
    similar_lengths: bool = False
    min_updates: int = 0
    layers: str = "last"
    new_top_layers: int = 0
    pooling: str = "first"
    label_smoothing: float = 0.0
    views: str = ""
    view_layers: str = "half"
    unlabeled_start: float = 0.1

    def __post_init__(self) -> None:
        for name in FIELDS:
            check_value(name, getattr(self, name), name)

    @property
    def separator(self) -> int | None:
        """Value of ``--separator-token``: a token between the texts of a pair, in addition to the first one's ``</s>``."""
        return Dictionary().eos() if self.num_separators == 2 else None

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"adam_betas": list(self.adam_betas)}

    def updates_per_epoch(self, num_examples: int, carries_rest: bool = False) -> float:
        """Return the number of batches in an epoch. The last one may be smaller; with ``carries_rest`` it is completed in the
        next epoch, and this is no whole number."""
        return num_examples / self.batch_size if carries_rest else math.ceil(num_examples / self.batch_size)

    def repetitions(self, num_examples: int, carries_rest: bool = False) -> int:
        """Return how often the training set is read in the place of one epoch, so that there are ``min_updates``."""
        return max(1, math.ceil(self.min_updates / (self.updates_per_epoch(num_examples, carries_rest) * self.epochs)))

    def num_epochs(self, num_examples: int, carries_rest: bool = False) -> int:
        return self.epochs * self.repetitions(num_examples, carries_rest)

    def total_updates(self, num_examples: int, carries_rest: bool = False) -> int:
        epochs = self.num_epochs(num_examples, carries_rest)
        if carries_rest:
            return num_examples * epochs // self.batch_size
        return self.updates_per_epoch(num_examples) * epochs

    def check_layers(self, num_layers: int) -> None:
        """Refuse settings that name layers which an encoder with this number of layers lacks."""
        try:
            kept, _ = parse_layers(self.layers, num_layers)
            check_new_top_layers(self.new_top_layers, kept)
        except ValueError as error:
            raise UserError(str(error)) from error

    def warmup_updates(self, num_examples: int, carries_rest: bool = False) -> int:
        """Round down, as the integer division by 16 or 10 in AMOS's released script does."""
        # In binary, 1/10 of 30 can be 2.9999...; the result must still be 3.
        return math.floor(self.warmup * self.total_updates(num_examples, carries_rest) + 1e-6)

    def train_flags(self, num_examples: int, carries_rest: bool = False) -> list[str]:
        """Return the flags of ``fairseq-train`` for optimizer, schedule, regularization, head, separators and length.

        Every batch has ``batch_size`` examples (``--required-batch-size-multiple 1``). fairseq's default would split the
        last batch of an epoch at a multiple of 8, and the number of updates would differ from the schedule's.
        """
        first_moment, second_moment = self.adam_betas
        flags = {
            "batch-size": self.batch_size,
            "required-batch-size-multiple": 1,
            "max-epoch": self.num_epochs(num_examples, carries_rest),
            "optimizer": "grouped_adam",
            "adam-betas": f"({first_moment}, {second_moment})",
            "adam-eps": self.adam_eps,
            "weight-decay": self.weight_decay,
            "layer-wise-lr-decay": self.layer_wise_lr_decay,
            "clip-norm": self.clip_norm,
            "lr": self.lr,
            "lr-scheduler": "polynomial_decay",
            "warmup-updates": self.warmup_updates(num_examples, carries_rest),
            "total-num-update": self.total_updates(num_examples, carries_rest),
            "dropout": self.dropout,
            "attention-dropout": self.attention_dropout,
            "pooler-dropout": self.pooler_dropout,
            "layers": self.layers,
            "new-top-layers": self.new_top_layers,
            "pooling": self.pooling,
        }
        if self.head == LINEAR_HEAD:
            flags["pooler-activation-fn"] = LINEAR_HEAD
        if self.separator is not None:
            flags["separator-token"] = self.separator
        if (interval := self.repetitions(num_examples, carries_rest)) > 1:
            flags |= {"save-interval": interval, "validate-interval": interval}
        arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        arguments += ["--similar-lengths"] if self.similar_lengths else []
        return arguments if self.bias_correction else [*arguments, "--no-bias-correction"]


FIELDS = {field.name: field.type for field in dataclasses.fields(Hyperparameters)}


@dataclass(frozen=True)
class Recipe:
    """A recipe for encoders of one size.

    Attributes:
        name: name of a built-in recipe, or path of a user's file.
        trials: task -> its trials: one, or all combinations of a grid.
    """

    name: str
    description: str
    size: str
    trials: dict[str, tuple[Hyperparameters, ...]]

    def trials_of(self, task: str) -> tuple[Hyperparameters, ...]:
        """Return the trials of a task; refuse one that the recipe lacks."""
        if task not in self.trials:
            known = ", ".join(self.trials)
            raise UserError(f"the recipe {self.name} has no settings for {task}: add it under tasks (it has {known})")
        for name in ("label_smoothing", "views", "view_layers", "unlabeled_start"):
            default = getattr(Hyperparameters, name)
            if task != WORDS and any(getattr(trial, name) != default for trial in self.trials[task]):
                raise UserError(f"the recipe {self.name}, {task}: {name} is for words with labels: move it to {WORDS}")
        return self.trials[task]


def recipe_names() -> list[str]:
    return sorted(path.stem for path in DIRECTORY.glob("*.yaml"))


def size_for_width(width: int) -> str:
    """Return the smallest size that is at least ``width`` wide; "large" for wider encoders."""
    return next((size for size, largest in SIZE_WIDTHS.items() if width <= largest), "large")


def load_recipe(name: str, size: str, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read a recipe.

    Args:
        name: name of a built-in recipe, or path of a YAML file.
        size: "small", "base" or "large".
        overrides: fields of :class:`Hyperparameters` from the command line, for every task; they also replace a grid's.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else DIRECTORY / f"{name}.yaml"
    content = _read(path, name)
    of_size = _section(content, "sizes", path).get(size, {})
    size_tasks = _section(of_size, "tasks", path)
    defaults = [_mapping(content, "defaults", path), _mapping(of_size, "defaults", path)]
    trials = {
        task: _trials(
            [*defaults, own, size_tasks.get(task), overrides], _mapping(content, "grid", path), f"{path}, {task}"
        )
        for task, own in _section(content, "tasks", path).items()
    }
    return Recipe(name, str(content.get("description", name)), size, trials)


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        known = ", ".join(recipe_names())
        raise UserError(f"there is no recipe {name}: give the path of a .yaml file or one of {known}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: the recipe cannot be read ({reason})") from error
    if isinstance(content, dict) and "extends" in content:
        base = str(content["extends"])
        if base == name or base not in recipe_names():
            raise UserError(
                f"{path}: extends must name a built-in recipe, one of {', '.join(recipe_names())}, not {base}"
            )
        content = _read(DIRECTORY / f"{base}.yaml", base) | content
    if not isinstance(content, dict) or not content.get("tasks") or set(content) - set(SECTIONS):
        raise UserError(f"{path} is not a recipe: it needs the section tasks and may only have {', '.join(SECTIONS)}")
    return content


def _section(content: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    section = _mapping(content, name, path)
    return {key: _mapping(section, key, path) for key in section}


def _mapping(content: dict[str, Any], name: str, where: object) -> dict[str, Any]:
    mapping = content.get(name) or {}
    if not isinstance(mapping, dict):
        raise UserError(f"{where}: {name} must map names to settings, such as 'CoLA: {{lr: 2.0e-5}}'")
    return mapping


def _trials(layers: list[dict[str, Any] | None], grid: dict[str, Any], where: str) -> tuple[Hyperparameters, ...]:
    """Return all combinations of the grid; its last name varies fastest."""
    fixed: dict[str, Any] = {}
    ranges = dict(grid)
    for layer in layers:
        values = dict(layer or {})
        ranges.update(_mapping(values, "grid", where))
        values.pop("grid", None)
        fixed.update(values)
        if layer is not layers[0]:  # the grid overrides defaults; a more specific value overrides the grid
            ranges = {name: choices for name, choices in ranges.items() if name not in values}
    for name, choices in ranges.items():
        if not isinstance(choices, list) or not choices:
            raise UserError(f"{where}: the grid's {name} must be a list of values")
    combinations = itertools.product(*ranges.values())
    return tuple(
        _hyperparameters({**fixed, **dict(zip(ranges, values, strict=True))}, where) for values in combinations
    )


def _hyperparameters(values: dict[str, Any], where: str) -> Hyperparameters:
    unknown = sorted(set(values) - set(FIELDS))
    if unknown:
        raise UserError(f"{where}: {unknown[0]} is not a known setting; choose from {', '.join(FIELDS)}")
    missing = [name for name in ("lr", "epochs", "batch_size", "warmup") if name not in values]
    if missing:
        raise UserError(f"{where}: {missing[0]} is missing (needed: lr, epochs, batch_size, warmup)")
    try:
        return Hyperparameters(**{name: _value(name, value) for name, value in values.items()})
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _value(name: str, value: Any) -> Any:
    """Convert a value to the field's type. YAML loads 2e-5 (without a point) and 1/16 as strings."""
    kind = FIELDS[name]
    try:
        if kind is float:
            return float(Fraction(value)) if isinstance(value, str) and "/" in value else float(value)
        if kind is bool:
            return {"true": True, "false": False}[str(value).lower()]
        if kind is int:
            return int(str(value))  # int() alone would truncate 2.5 to 2
        if kind is str:
            return str(value)
        first, second = value
        return float(first), float(second)
    except (KeyError, ValueError, TypeError, ArithmeticError) as error:
        expected = {float: "a number", int: "an integer", str: "a string", bool: "true or false"}.get(
            kind, "two numbers"
        )
        raise UserError(f"{name} {value!r} must be {expected}") from error

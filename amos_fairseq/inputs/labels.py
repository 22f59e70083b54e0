"""Labels of a table: which are missing, whether they are classes, sets of labels or numbers, and what a class is called."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import numpy as np

from amos_fairseq.errors import UserError, printable
from amos_fairseq.inputs.files import is_blank

# What a label is: one class of several, any number of labels, or a number (a regression).
KINDS = ("classes", "labels", "number")
TASK_FILE = "task.json"  # in prepared tables: kind and names of the labels, sources, counts
MOST_CLASSES = 10_000
# Of labels that are numbers: the largest, and their mean over their deviation. Models compute them in float32, and scores their
# squares.
LARGEST_NUMBER, LARGEST_RATIO = 1e30, 1e5
SHOWN_CHARACTERS = 100  # of a list of labels in a message


def is_missing(value: Any) -> bool:
    """Return whether a cell has no value: None, nan, or a blank text."""
    if isinstance(value, str):
        return is_blank(value)
    return value is None or (isinstance(value, float) and math.isnan(value))


def number_of(label: Any) -> float | None:
    """Return the number that a label is, or None for a name and for what a model cannot compute."""
    try:
        number = math.nan if isinstance(label, bool) else float(label)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST_NUMBER else None


def infer_kind(labels: Sequence[Any]) -> str:
    """Return what the labels are, none of which is missing.

    "labels": there are lists. "number": all are numbers, some with a fraction. "classes": all others.
    """
    if any(isinstance(label, list) for label in labels):
        return "labels"
    numbers = list(map(number_of, labels))
    are_numbers = None not in numbers and not all(map(float.is_integer, numbers))
    return "number" if are_numbers else "classes"


def parse_label(value: Any, kind: str, separator: str) -> str | list[str] | float:
    """Return the name of a class, the different names of a list, or a number; raise ``ValueError`` for something else."""
    if kind == "number":
        return parse_number(value)
    values = value if isinstance(value, list) else [value]
    if kind == "labels" and isinstance(value, str):
        values = value.split(separator)
    if any(isinstance(part, list | dict) for part in values) or (kind == "classes" and isinstance(value, list)):
        raise ValueError(f"the label {value!r:.60} is not one of {'several classes' if kind == 'classes' else 'names'}")
    names = list(dict.fromkeys(name_of(each) for each in values if not is_missing(each)))
    return names[0] if kind == "classes" else names


def parse_number(value: Any) -> float:
    """Return the number of a label that has to be one; raise ``ValueError`` if it is none."""
    number = number_of(value)
    if number is None:
        raise ValueError(
            f"the label {str(value)[:60]!r} is not a number from -{LARGEST_NUMBER:g} to {LARGEST_NUMBER:g}"
        )
    return number


def name_of(value: Any) -> str:
    """Return the name of a class: 1 for 1.0 and "1.00", as tables with missing values spell whole numbers, true for True, and
    with one plain space in place of others, such as the no-break spaces of web pages."""
    name = str(value).lower() if isinstance(value, bool) else printable(" ".join(str(value).split()))
    whole = re.fullmatch(r"(-?[0-9]+)\.0+", name)
    return whole[1] if whole else name


def sorted_names(names: set[str]) -> list[str]:
    """Return the names in the order of their numbers, or of their characters if one is no number."""
    are_numbers = all(number_of(name) is not None for name in names)
    return sorted(names, key=lambda name: (number_of(name) if are_numbers else 0, name))


def listed(names: Sequence[str] | set[str]) -> str:
    """Return the names as a list of limited length; those with a comma are in quotes."""
    spelled = (repr(name) if "," in name else name for name in sorted_names(set(names)))
    return shorten(", ".join(spelled), SHOWN_CHARACTERS, placeholder=" ...")


@dataclass(frozen=True)
class LabelSpace:
    """What the labels of a task are."""

    kind: str  # one of :data:`KINDS`
    names: Sequence[str] = ()  # in the order of the classes; empty for numbers
    mean: float | None = None  # of the numbers of the training set, by which the outputs of a model are scaled
    deviation: float | None = None

    @classmethod
    def of(cls, kind: str, labels: Sequence[Any], source: str) -> "LabelSpace":
        """Return the space of the parsed labels of the training set; refuse labels of which a model can learn nothing."""
        if kind == "number":
            mean, deviation = float(np.mean(labels)), float(np.std(labels))
            if not deviation > abs(mean) / LARGEST_RATIO:
                raise UserError(
                    f"{source}: the labels, of mean {mean:.6g}, differ by {deviation:.2g}, too little for float32: subtract a "
                    "constant from them, or give another column as --label"
                )
            return cls(kind, (), mean, deviation)
        names = set(labels) if kind == "classes" else {name for row in labels for name in row}
        if not (2 if kind == "classes" else 1) <= len(names) <= MOST_CLASSES:
            raise UserError(
                f"{source}: {len(names):,} different {kind} ({listed(names)}): give the column of the labels as --label"
            )
        return cls(kind, sorted_names(names))

    def __str__(self) -> str:
        if self.kind == "number":
            return f"numbers of mean {self.mean:.4g} and standard deviation {self.deviation:.4g}"
        return f"{len(self.names)} {self.kind} ({listed(self.names)})"

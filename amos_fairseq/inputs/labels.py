"""Labels of a table: which are missing, whether they are classes, sets of labels or numbers, and what a class is called."""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Number
from textwrap import shorten
from typing import Any

import numpy as np

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.input_files import MISSING_WORDS, OFTEN_MISSING_WORDS, is_blank
from amos_fairseq.strangers import parse_json

# What a label is: one class of several, any number of labels, or a number (a regression).
KINDS = ("classes", "labels", "number")
TASK_FILE = "task.json"  # in prepared tables: kind and names of the labels, sources, counts
# Whole numbers with at most this many different values may have gaps: -1 and 1, or stars without a 3.
FEW_CLASSES = 20
MOST_CLASSES = 10_000
# Of labels that are numbers: the largest, and their mean over their deviation. Models compute them in float32, and scores their
# squares.
LARGEST_NUMBER, LARGEST_RATIO = 1e30, 1e5
SHOWN_CHARACTERS = 100  # of a list of labels in a message
# These are missing values in a column of numbers. In other columns they can be names, such as NA for Namibia.
MISSING_BESIDE_NUMBERS = OFTEN_MISSING_WORDS | {"-"}
# Inside of names they belong to the spelling of Persian and Hindi, and to emoji.
_JOINERS = re.compile("(?<=.)[\u200c\u200d](?=.)")
_OTHER_SPACES = re.compile("[\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]")
LONGEST_LIST = 1 << 20  # characters of a cell: parsed, a list takes some thirty times as much memory
# Numbers as tables for people have them: 0,5 and 1.037,50 and 0.7% and 1 000.
_OTHER_NUMBER = re.compile("[+-]?[0-9.]+(,[0-9.]+ ?%?| ?%|([ \xa0\u202f][0-9]{3})+(,[0-9]+)?)")
# ``float`` also reads 1_1, 1E1, inf, digits of other scripts and 007: here these are names.
_NUMBER = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-][0-9]+)?")


def is_missing(value: Any, words: Collection[str] = MISSING_WORDS) -> bool:
    """Return whether a cell has no value: None, nan, a blank text, or one of ``words``."""
    if isinstance(value, str):
        return is_blank(value) or value.strip() in words
    return value is None or (isinstance(value, float) and math.isnan(value))


def number_of(label: Any) -> float | None:
    """Return the number that a label is, or None for a name."""
    if isinstance(label, bool) or not isinstance(label, str | Number):
        return None
    if isinstance(label, str) and not _NUMBER.fullmatch(label.strip()):
        return None
    number = float(label)
    return number if math.isfinite(number) else None


def missing_words(labels: Sequence[Any], kind: str | None) -> set[str]:
    words = MISSING_WORDS | MISSING_BESIDE_NUMBERS
    present = [label for label in labels if not is_missing(label, words)]
    are_numbers = kind == "number" or (present and all(number_of(label) is not None for label in present))
    return words if are_numbers else MISSING_WORDS


def with_lists(labels: Sequence[Any], source: str) -> list[Any]:
    """Return the labels, as lists if each is a list in JSON; refuse lists as Python and numpy print them."""
    spelled = [label.strip() if isinstance(label, str) else "" for label in labels if not is_missing(label)]
    if not spelled or not all(
        label[:1] == "[" and label[-1:] == "]" and len(label) <= LONGEST_LIST for label in spelled
    ):
        return list(labels)
    try:
        return [None if is_missing(label) else parse_json(label, list) for label in labels]
    except ValueError:
        printed = next((label for label in spelled if re.search(r"[',]|\d\.? ", label)), None)
        if printed is None:  # names such as [POS]
            return list(labels)
    example = shorten(printed, SHOWN_CHARACTERS, placeholder=" ...")
    raise UserError(f'{source}: labels such as {example} are no lists of JSON: write them as ["a", "b"]')


def infer_kind(labels: Sequence[Any], source: str) -> str:
    """Return what the labels are; none of them is missing.

    "labels": lists. "number": numbers, some with a fraction. "classes": names, and whole numbers that number the classes.
    Raise :class:`UserError` for other whole numbers, such as prices, ages and a scale to 100, and for numbers among names.
    """
    if any(isinstance(label, list | tuple) for label in labels):
        return "labels"
    found = list(map(number_of, labels))
    numbers = [number for number in found if number is not None]
    names = [str(label).strip() for label, number in zip(labels, found, strict=True) if number is None]
    if names and all(map(_OTHER_NUMBER.fullmatch, names)):
        advice = "write numbers as 1234 or 1.5, or give --kind classes or --kind labels"
        raise UserError(f"{source}: the labels have commas, spaces or %, such as {names[0]!r:.60}: {advice}")
    if any(isinstance(label, float) and math.isinf(label) for label in labels):
        raise UserError(f"{source}: a label is infinite: remove its row, or give another column as --label")
    distinct = sorted(set(numbers))
    are_whole = all(number.is_integer() for number in distinct)
    if are_whole and are_numbered_classes(distinct, len(numbers)):
        return "classes"
    if not are_whole and not names:
        return "number"
    counts = f"{len(numbers):,} numbers{' among names' if names else ''} with {len(distinct):,} different values"
    named = f"; a name is {names[0]!r:.60}" if names else ""
    raise UserError(
        f"{source}: whether the labels are classes or numbers is not clear ({counts}, from {distinct[0]:g} to "
        f"{distinct[-1]:g}{named}): give --kind classes or --kind number, or another column as --label"
    )


def are_numbered_classes(distinct: Sequence[float], count: int) -> bool:
    """Return whether whole numbers, sorted, are numbers of classes; ``count``: of the labels.

    The numbers of many classes begin with 0 or 1 and have no gap, and each class has two rows or more on average. From 0 or 1
    to 100 is a scale, too. Few different values are classes if they repeat; ranks have no gap, but each is there once.
    """
    if not distinct:
        return True
    num_classes, first, last = len(distinct), distinct[0], distinct[-1]
    has_no_gap = last - first + 1 == num_classes
    repeat = count >= 2 * num_classes
    if num_classes <= FEW_CLASSES:
        return repeat or (has_no_gap and (count > num_classes or num_classes <= 2))
    return repeat and has_no_gap and first in (0, 1) and last != 100


def parse_label(value: Any, kind: str, separator: str, missing: set[str] = MISSING_WORDS) -> str | list[str] | float:
    """Return the name of a class, the different names of a list, or a number; raise ``ValueError`` for something else."""
    if kind == "number":
        return parse_number(value)
    is_list = isinstance(value, list | tuple)
    if any(isinstance(part, list | tuple | dict) for part in (value if is_list else [value])):
        raise ValueError("the label is an object, or a list of lists: is it the column of the labels?")
    if kind == "classes":
        if is_list:
            raise ValueError("the label is a list: give --kind labels")
        values = [value]
    else:
        values = value if is_list else [] if is_missing(value, missing) else str(value).split(separator)
    names = list(dict.fromkeys(name_of(each) for each in values if not is_missing(each, missing)))
    for name in names:
        between = _JOINERS.sub("", name)
        if (unseen := next((character for character in between if not character.isprintable()), None)) is not None:
            raise ValueError(f"the label {name[:60]!r} has the invisible character U+{ord(unseen):04X}: remove it")
        if re.match(r'\{\s*"|\[\s*["\]]', name):
            raise ValueError(f"the label {name[:60]!r} is JSON among names: give names, or in each row a list of names")
    return names[0] if kind == "classes" else names


def check_lists(labels: Sequence[Any], source: str) -> None:
    """Refuse lists of zeros and ones, one for each label, and lists of probabilities: the names of labels are expected."""
    lists = [label for label in labels if isinstance(label, list | tuple)]
    values = {value for label in lists for value in label if isinstance(value, int | float)}
    is_one_hot = values and values <= {0, 1} and len(set(map(len, lists))) == 1 and len(lists[0]) > 1
    if is_one_hot or any(not float(value).is_integer() for value in values):
        example = shorten(str(lists[0]), SHOWN_CHARACTERS, placeholder=" ...")
        raise UserError(f"{source}: its lists are numbers, such as {example}: give lists of the names of labels")


def parse_number(value: Any) -> float:
    """Return the number of a label that has to be one; raise ``ValueError`` if it is none."""
    spelled = "" if isinstance(value, bool) else str(value).strip()
    try:
        number = float(spelled) if re.fullmatch("[0-9eE.+-]+", spelled) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        is_other = _OTHER_NUMBER.fullmatch(spelled)
        advice = "write it with a decimal point, without %" if is_other else "give another --kind"
        raise ValueError(f"the label {str(value)[:60]!r} is not a finite number: {advice}")
    if abs(number) > LARGEST_NUMBER:
        raise ValueError(f"the label {number:g} is larger than {LARGEST_NUMBER:g}: give all labels in a larger unit")
    return number


def name_of(value: Any) -> str:
    """Return the name of a class: 1 for 1.0 and "1.00", as tables with missing values spell whole numbers, and with plain
    spaces in place of others, such as the no-break spaces of web pages."""
    if isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    name = _OTHER_SPACES.sub(" ", str(value)).strip()
    whole = re.fullmatch(r"(-?[0-9]+)\.0+", name)
    return whole[1] if whole else name


def sorted_names(names: set[str]) -> list[str]:
    try:
        return sorted(names, key=lambda name: (float(name), name))
    except ValueError:
        return sorted(names)


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
    def of(cls, kind: str, labels: Sequence[Any], source: str, is_inferred: bool) -> "LabelSpace":
        """Return the space of the parsed labels of the training set; raise :class:`UserError` if there is nothing to learn.

        ``is_inferred``: the user did not give the kind. Very many classes are then refused: it is likely the wrong column.
        """
        if kind == "number":
            mean, deviation = float(np.mean(labels)), float(np.std(labels))
            if not deviation > 0:
                raise UserError(f"{source}: each row has the label {labels[0]:g}: give another column as --label")
            if abs(mean) > LARGEST_RATIO * deviation:
                differ = f"of mean {mean:.6g} differ by {deviation:.2g}, which float32 does not tell apart"
                raise UserError(f"{source}: the labels {differ}: subtract a constant from them")
            return cls(kind, (), mean, deviation)
        names = set(labels) if kind == "classes" else {name for row in labels for name in row}
        if len(names) < (2 if kind == "classes" else 1):
            problem = f"each row has the label {labels[0]}" if kind == "classes" else "no row has a label"
            raise UserError(f"{source}: {problem}: give the column of the labels as --label")
        if len(names) > MOST_CLASSES or (
            is_inferred and kind == "classes" and len(names) > max(FEW_CLASSES, len(labels) // 2)
        ):
            counts = f"{len(labels):,} labels have {len(names):,} different values"
            raise UserError(f"{source}: the {counts}: give another column as --label, or their --kind")
        return cls(kind, sorted_names(names))

    def __str__(self) -> str:
        if self.kind == "number":
            return f"numbers of mean {self.mean:.4g} and standard deviation {self.deviation:.4g}"
        return f"{len(self.names)} {self.kind} ({listed(self.names)})"

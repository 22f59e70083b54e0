"""Read rows of the official files: texts, label and id."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from amos_fairseq.downstream.classification.glue.tasks import LARGEST_SCORE, GlueTask, is_test
from amos_fairseq.errors import UserError
from amos_fairseq.text.table_files import TableFile
from amos_fairseq.text.text_files import COMPRESSIONS

_ID_COLUMNS = ("index", "id")


class GlueRow(NamedTuple):
    """``label``: as in the file, empty in a test file; ``id``: the row's id in a submission."""

    texts: tuple[str, ...]
    label: str
    id: str


@dataclass
class GlueTable:
    """One file. ``broken_lines``: line numbers (from 1) with another number of columns than the header."""

    rows: list[GlueRow]
    broken_lines: list[int]
    sha256: str


def find_files(directory: Path, task: GlueTask) -> dict[str, Path]:
    """Return the file of each split, plain or compressed. A test file may be missing unless it is the only one.

    Raises:
        UserError: a training or development file is missing, or a file exists in two formats.
    """
    found = {split: _find(directory, places) for split, places in task.files.items()}
    for split, places in task.files.items():
        if found[split] is None and (not is_test(split) or len(found) == 1):
            raise UserError(
                f"{directory / places[0]}: no such file (nor as {', '.join(COMPRESSIONS)}): copy the official files of "
                f"{task.name} there under their names, or download them with amos prepare glue-download"
            )
    return {split: path for split, path in found.items() if path is not None}


def has_any_file(directory: Path, task: GlueTask) -> bool:
    return any(_candidates(directory, places) for places in task.files.values())


def _candidates(directory: Path, places: tuple[str, ...]) -> list[Path]:
    paths = [directory / f"{place}{compression}" for place in places for compression in ("", *COMPRESSIONS)]
    return [path for path in paths if path.is_file()]


def _find(directory: Path, places: tuple[str, ...]) -> Path | None:
    paths = _candidates(directory, places)
    if len(paths) > 1:
        raise UserError(f"{paths[0]} and {paths[1]} are the same part of a task: keep one of them")
    return paths[0] if paths else None


def read_table(
    path: Path, task: GlueTask, split: str, on_read: Callable[[int], object] = lambda size: None
) -> GlueTable:
    """Read every row of a file, in order.

    Quotes are ordinary characters in these files, also in QQP's, whose texts were written with the quotes of CSV, because
    Hugging Face's processors read them so. A line with more or fewer columns than the header (a tab or a line end inside a
    text) has its text or label elsewhere, so it is skipped and counted.

    Raises:
        UserError: the file is not UTF-8, damaged or empty, a column is missing, or a label is not one of the task.
    """
    table = TableFile(path, task.columns_without_header(split), on_read, ordinary_quotes=True)
    _check_columns(path, table.columns, task, split)
    first = 1 if task.columns_without_header(split) else 2
    rows = [_row(path, number, number - first, fields, task, split) for number, fields in table.rows()]
    return GlueTable(rows, table.broken_lines, table.sha256)


def _check_columns(path: Path, names: tuple[str, ...], task: GlueTask, split: str) -> None:
    needed = task.texts if is_test(split) else (*task.texts, task.label)
    missing = [name for name in needed if name not in names]
    if missing:
        raise UserError(
            f"{path}: no column {missing[0]!r} in its first line, which has {', '.join(map(repr, names))[:200]}: is it "
            f"the official file of {task.name}, with its header?"
        )


def _row(path: Path, number: int, position: int, fields: dict[str, str], task: GlueTask, split: str) -> GlueRow:
    label = "" if is_test(split) else fields[task.label].strip()
    if not is_test(split) and not _is_label(label, task):
        expected = f"a number from 0 to {LARGEST_SCORE:g}" if task.is_regression else f"one of {', '.join(task.labels)}"
        raise UserError(f"{path}, line {number}: label {label[:60]!r} is not {expected}: is it a file of {task.name}?")
    ids = (fields[column] for column in _ID_COLUMNS if column in fields)
    return GlueRow(tuple(_clean(fields[name]) for name in task.texts), label, next(ids, str(position)))


def _is_label(label: str, task: GlueTask) -> bool:
    if not task.is_regression:
        return label in task.labels
    try:
        return 0 <= float(label) <= LARGEST_SCORE  # false for nan too
    except ValueError:
        return False


def _clean(text: str) -> str:
    """Replace carriage returns, which end a line for fairseq."""
    return text.replace("\r", " ")

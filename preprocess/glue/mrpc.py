"""MRPC's tables out of the files of its authors: GLUE gives out only the list of development pairs."""

from pathlib import Path
from typing import Iterable, List, Set, Tuple

from amos_fairseq.errors import UserError
from preprocess.common.reading import InputFile

_HEADER = ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")
_TEST_HEADER = ("index", *_HEADER[1:])


def build_mrpc(train: Path, test: Path, dev_ids: Path, directory: Path) -> None:
    """Write ``train.tsv``, ``dev.tsv`` and ``test.tsv`` into ``directory``.

    A training pair whose two ids stand in ``dev_ids`` belongs to the development set, every other line to the training
    set, in the order of the file. Broken lines are passed on: ``prepare.sh`` counts them.

    Raises:
        UserError: another header, or the list does not fit the training file.
    """
    wanted = {(fields[0], fields[1]) for _, fields in _fields(dev_ids) if len(fields) > 1}
    lines, dev_lines = [_HEADER], [_HEADER]
    found: Set[Tuple[str, str]] = set()
    for fields in _rows(train):
        pair = (*fields[1:3], "", "")[:2]
        if pair in wanted:
            found.add(pair)
            dev_lines.append(fields)
        else:
            lines.append(fields)
    if not wanted or found != wanted:
        raise UserError(
            f"{dev_ids}: {len(found)} of its {len(wanted)} pairs of ids stand in {train.name}: take the list and the file "
            "of the same release"
        )
    _write(directory / "train.tsv", lines)
    _write(directory / "dev.tsv", dev_lines)
    _write(directory / "test.tsv", [_TEST_HEADER, *((str(i), *row[1:]) for i, row in enumerate(_rows(test)))])


def _rows(path: Path) -> Iterable[Tuple[str, ...]]:
    lines = _fields(path)
    header = next(lines, (0, ()))[1]
    if header != _HEADER:
        raise UserError(f"{path}: its first line is {header!r}, not {_HEADER!r}: it is not MRPC's file")
    return (fields for _, fields in lines)


def _fields(path: Path):
    for number, line in InputFile(path).lines():
        yield number, tuple(line.decode("utf-8").rstrip("\r\n").split("\t"))


def _write(path: Path, rows: List[Tuple[str, ...]]) -> None:
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8", newline="\n")

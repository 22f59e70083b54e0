"""One task's encoded files to what fairseq's ``sentence_prediction`` reads."""

from pathlib import Path
from typing import Dict, List

from preprocess.common.binarizing import check_binarized, run_fairseq_preprocess
from preprocess.glue.encoding import Counts
from preprocess.glue.tables import Row
from preprocess.glue.tasks import GlueTask, is_test

# A label's line is short: a second process would only wait for the first.
_LABEL_FLAGS = ["--workers", "1"]


def binarize_texts(directory: Path, encoded: Dict[str, List[Path]], dictionary: Path, processes: int) -> None:
    """``directory/input0`` and, for pairs, ``input1``: every split with ``dict.txt``. The encoded files are removed."""
    texts = len(next(iter(encoded.values())))
    for number in range(texts):
        files = {split: paths[number] for split, paths in encoded.items()}
        target = directory / f"input{number}"
        run_fairseq_preprocess(target, dictionary, [*_prefixes(files), "--workers", str(processes)])
        for path in files.values():
            path.unlink()


def binarize_labels(directory: Path, task: GlueTask, rows: Dict[str, List[Row]]) -> None:
    """``directory/label``: binarized with a ``dict.txt`` in the order of the classes; for a regression as text.

    fairseq reads the targets of a regression from ``SPLIT.label``, a number a line.
    """
    target = directory / "label"
    target.mkdir()
    labelled = {split: rows[split] for split in rows if not is_test(split)}
    files = {split: target / f"{split}.label" for split in labelled}
    for split, path in files.items():
        path.write_text("".join(f"{row.label}\n" for row in labelled[split]), encoding="utf-8")
    if task.is_regression:
        return
    dictionary = directory / "labels.txt"
    dictionary.write_text("".join(f"{label} 1\n" for label in task.labels), encoding="utf-8")
    run_fairseq_preprocess(target, dictionary, [*_prefixes(files), *_LABEL_FLAGS, *([] if files else ["--dict-only"])])
    for path in (*files.values(), dictionary):
        path.unlink()


def check_task(directory: Path, task: GlueTask, rows: Dict[str, List[Row]], counts: Dict[str, Counts]) -> None:
    """Assert that every row of every split arrived, with all its pieces."""
    for split, count in counts.items():
        for number, pieces in enumerate(count.pieces):
            check_binarized(directory / f"input{number}" / split, count.rows, pieces)
        if not is_test(split) and not task.is_regression:
            check_binarized(directory / "label" / split, len(rows[split]), len(rows[split]))


def _prefixes(files: Dict[str, Path]) -> List[str]:
    """``--validpref A,B`` becomes ``valid`` and ``valid1``."""
    flags = []
    for kind in ("train", "valid", "test"):
        paths = [str(files[split]) for split in sorted(files) if split.startswith(kind)]
        flags += [f"--{kind}pref", ",".join(paths)] if paths else []
    return flags

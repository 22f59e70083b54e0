"""Binarize one task's encoded files for fairseq's ``sentence_prediction``."""

from pathlib import Path
from typing import Callable, Dict, List

from preprocess.common.binarizing import check_binarized, run_fairseq_preprocess
from preprocess.glue.encoding import Counts
from preprocess.glue.tables import Row
from preprocess.glue.tasks import GlueTask, is_test


def expected_ids(counts: Dict[str, Counts]) -> int:
    """Return the number of ids that the two functions below write, for a progress bar."""
    texts = sum(sum(count.pieces) + count.rows * len(count.pieces) for count in counts.values())
    return texts + sum(_label_ids(count.rows) for split, count in counts.items() if not is_test(split))


def binarize_texts(
    directory: Path,
    encoded: Dict[str, List[Path]],
    counts: Dict[str, Counts],
    dictionary: Path,
    processes: int,
    on_ids: Callable[[int], object],
) -> None:
    """Write every split and ``dict.txt`` to ``directory/input0`` and, for pairs, ``input1``; remove the encoded files.

    ``on_ids`` is called with the number of ids newly written.
    """
    texts = len(next(iter(encoded.values())))
    for number in range(texts):
        files = {split: paths[number] for split, paths in encoded.items()}
        expected = sum(count.pieces[number] + count.rows for count in counts.values())
        flags = [*_prefixes(files), "--workers", str(processes)]
        run_fairseq_preprocess(
            directory / f"input{number}", dictionary, flags, expected, _differences(expected, on_ids)
        )
        for path in files.values():
            path.unlink()


def binarize_labels(
    directory: Path, task: GlueTask, rows: Dict[str, List[Row]], processes: int, on_ids: Callable[[int], object]
) -> None:
    """Write ``directory/label``: binarized, with a ``dict.txt`` in the order of the classes; for a regression as text.

    fairseq reads the targets of a regression from ``SPLIT.label``, one number per line.
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
    expected = sum(_label_ids(len(rows)) for rows in labelled.values())
    flags = [*_prefixes(files), "--workers", str(processes)] if files else ["--dict-only"]
    run_fairseq_preprocess(target, dictionary, flags, expected, _differences(expected, on_ids))
    for path in (*files.values(), dictionary):
        path.unlink()


def _label_ids(rows: int) -> int:
    """fairseq-preprocess appends ``</s>`` to a label as to any line; ``sentence_prediction`` removes it."""
    return 2 * rows


def _differences(expected: int, on_ids: Callable[[int], object]) -> Callable[[float], None]:
    """Convert a growing share of ``expected`` to numbers of new ids."""
    reported = 0

    def on_done(share: float) -> None:
        nonlocal reported
        step = int(share * expected) - reported
        reported += step
        on_ids(step)

    return on_done


def check_task(directory: Path, task: GlueTask, rows: Dict[str, List[Row]], counts: Dict[str, Counts]) -> None:
    """Assert that every row of every split was written, with all its pieces."""
    for split, count in counts.items():
        for number, pieces in enumerate(count.pieces):
            check_binarized(directory / f"input{number}" / split, count.rows, pieces)
        if not is_test(split) and not task.is_regression:
            check_binarized(directory / "label" / split, len(rows[split]), len(rows[split]))


def _prefixes(files: Dict[str, Path]) -> List[str]:
    """Return the flags: fairseq writes ``--validpref A,B`` as ``valid`` and ``valid1``."""
    flags = []
    for kind in ("train", "valid", "test"):
        paths = [str(files[split]) for split in sorted(files) if split.startswith(kind)]
        flags += [f"--{kind}pref", ",".join(paths)] if paths else []
    return flags

"""One task's encoded files to what fairseq's ``sentence_prediction`` reads."""

from pathlib import Path
from typing import Callable, Dict, List

from preprocess.common.binarizing import check_binarized, run_fairseq_preprocess
from preprocess.glue.encoding import Counts
from preprocess.glue.tables import Row
from preprocess.glue.tasks import GlueTask, is_test


def expected_ids(counts: Dict[str, Counts]) -> int:
    """Ids that both functions below will write, for a bar of progress."""
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
    """``directory/input0`` and, for pairs, ``input1``: every split with ``dict.txt``. The encoded files are removed.

    ``on_ids`` is told how many ids more are written.
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
    expected = sum(_label_ids(len(rows)) for rows in labelled.values())
    flags = [*_prefixes(files), "--workers", str(processes)] if files else ["--dict-only"]
    run_fairseq_preprocess(target, dictionary, flags, expected, _differences(expected, on_ids))
    for path in (*files.values(), dictionary):
        path.unlink()


def _label_ids(rows: int) -> int:
    """fairseq-preprocess ends a label with ``</s>`` as it does any line; ``sentence_prediction`` takes that off."""
    return 2 * rows


def _differences(expected: int, on_ids: Callable[[int], object]) -> Callable[[float], None]:
    """From a growing share of ``expected`` to steps of ids."""
    told = 0

    def on_done(share: float) -> None:
        nonlocal told
        step = int(share * expected) - told
        told += step
        on_ids(step)

    return on_done


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

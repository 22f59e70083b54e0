"""Stock ``fairseq-preprocess``, called in this process, and a check of what it wrote."""

import logging
from pathlib import Path
from typing import List

import numpy
from fairseq import options
from fairseq.data.indexed_dataset import MMapIndexedDataset
from fairseq_cli import preprocess


def run_fairseq_preprocess(directory: Path, dictionary: Path, arguments: List[str]) -> None:
    """``fairseq-preprocess --only-source`` into ``directory`` with ``dictionary``, without its log.

    The command's own entry is called, because its imports take longer than a small file. ``arguments``: its other
    flags (``--trainpref``, ``--workers``, ...); every line of a file gets ``</s>`` at its end.
    """
    log = logging.getLogger("fairseq_cli.preprocess")
    handlers, level = list(log.handlers), log.level
    log.setLevel(logging.WARNING)
    fixed = ["--only-source", "--srcdict", str(dictionary), "--destdir", str(directory)]
    try:
        preprocess.main(options.get_preprocessing_parser().parse_args([*fixed, *arguments]))
    finally:
        log.setLevel(level)
        for handler in set(log.handlers) - set(handlers):  # it opens preprocess.log anew for every call
            log.removeHandler(handler)
            handler.close()
        (directory / "preprocess.log").unlink(missing_ok=True)


def check_binarized(prefix: Path, lines: int, pieces: int) -> None:
    """Assert that the binarized file has every line and every piece that was encoded, and ``</s>`` for each line."""
    dataset = MMapIndexedDataset(str(prefix))
    found, ids = len(dataset), int(numpy.sum(dataset.sizes, dtype=numpy.int64))
    assert (found, ids) == (lines, pieces + lines), (
        f"{prefix}: {found} lines and {ids} ids binarized, {lines} and {pieces + lines} encoded"
    )

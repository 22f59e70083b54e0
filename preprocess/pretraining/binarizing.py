"""One shard of a corpus through stock ``fairseq-preprocess``."""

from pathlib import Path
from typing import Callable, Optional

from preprocess.common.binarizing import run_fairseq_preprocess


def binarize_shard(
    train: Path,
    valid: Optional[Path],
    dictionary: Path,
    directory: Path,
    processes: int,
    expected: int,
    on_done: Callable[[float], object],
) -> None:
    """``train`` and ``valid`` with ``dict.txt`` into ``directory``; the rest as in :func:`run_fairseq_preprocess`."""
    arguments = ["--trainpref", str(train), "--workers", str(processes)]
    arguments += ["--validpref", str(valid)] if valid else []
    run_fairseq_preprocess(directory, dictionary, arguments, expected, on_done)

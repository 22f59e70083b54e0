"""AMOS and its family as a fairseq plugin: ``fairseq-train --user-dir amos_fairseq``.

This is the one place that registers everything; fairseq imports it before it parses the flags.
"""

from os import PathLike
from typing import TYPE_CHECKING

from amos_fairseq import compat

if TYPE_CHECKING:
    from amos_fairseq.interop.checkpoint import Encoder

compat.apply()

from amos_fairseq import criterions, models, optim, tasks  # noqa: E402, F401


def load(checkpoint: str | PathLike, tokenizer: str | PathLike | None = None) -> "Encoder":
    """The pretrained encoder of a checkpoint or SAVE_DIR, in eval mode: ``load(path)("text")`` gives its features.

    See :func:`amos_fairseq.interop.checkpoint.load` for shapes and errors.
    """
    # Imported here: training needs no tokenizer library.
    from amos_fairseq.interop import checkpoint as checkpoints

    return checkpoints.load(checkpoint, tokenizer)

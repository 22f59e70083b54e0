"""AMOS and its family as a fairseq plugin: ``fairseq-train --user-dir amos_fairseq``.

This is the one place that registers everything; fairseq imports it before it parses the flags.
"""

from os import PathLike
from typing import TYPE_CHECKING

from amos_fairseq import compat

if TYPE_CHECKING:
    import torch

    from amos_fairseq.checkpoints.encoder import Encoder

compat.apply()

from amos_fairseq import criterions, models, optim, tasks  # noqa: E402, F401


def load(
    checkpoint: str | PathLike,
    tokenizer: str | PathLike | None = None,
    device: "str | torch.device | None" = None,
    dtype: "torch.dtype | None" = None,
    batch_size: int = 32,
) -> "Encoder":
    """The encoder of a checkpoint or SAVE_DIR, in eval mode: ``load(path)(["a text"]).pooled()`` gives its features.

    See :func:`amos_fairseq.checkpoints.encoder.load` for arguments, shapes and errors.
    """
    # Imported here: training needs no tokenizer library.
    from amos_fairseq.checkpoints import encoder

    return encoder.load(checkpoint, tokenizer, device, dtype, batch_size)

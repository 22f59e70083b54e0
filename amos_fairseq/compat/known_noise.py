"""Silence what fairseq and Hydra say and no user can act on.

A dozen lines about deprecated spellings inside fairseq, a package for a speech task and pinned memory without an
accelerator stand between the user and the first line that matters. Each is named here; every other warning passes.

Only what is said after the plugin is imported can be kept quiet. ``amos``, a spawned rank and a program that imports
``amos_fairseq`` begin with it. ``fairseq-train`` and ``fairseq-hydra-train`` import fairseq first, and Hydra composes the
configuration before it builds the callback that imports the plugin: there the lines about the speech task and about
Hydra's own spelling remain, and those of training (pinned memory, autocast) go.
"""

import logging
import warnings

HARMLESS = (
    r"hydra\.experimental\..* is no longer experimental",
    r"\s*The version_base parameter is not specified",
    r"In '.*': Usage of deprecated keyword in package header",
    r"\s*'config' is validated against ConfigStore schema with the same name",
    r"\s*The strict flag in the compose API is deprecated",
    r"'pin_memory' argument is set as true but no accelerator is found",
    r"`torch\.cuda\.amp\.autocast\(args\.\.\.\)` is deprecated",
    r"`torch\.jit\.script` is deprecated",  # of fairseq.models.model_utils, which decorates a function with it
    r"`broadcast_buffers` is deprecated",  # fairseq gives it to DistributedDataParallel, on every rank
    r"The given NumPy array is not writable",  # rows of a mapped file, which nobody writes to
)


def apply() -> None:
    """Call before fairseq is imported: its text-to-speech task logs while it is being imported."""
    for message in HARMLESS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)

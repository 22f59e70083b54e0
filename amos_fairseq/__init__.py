"""AMOS and related objectives as a fairseq plugin: ``fairseq-train --user-dir amos_fairseq``.

``register`` patches fairseq and registers everything with it. Where fairseq has been imported, as by ``--user-dir``, which
imports this package before the flags are parsed, that happens when this package is imported. Otherwise importing it takes a
fraction of a second, and ``load`` and the commands that need fairseq register first. Code that uses other modules of this
package together with fairseq calls ``register`` before it imports fairseq.
"""

import contextlib
import functools
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from amos_fairseq.checkpoints.encoder import Encoder

__version__ = "0.1.0"  # setup.py reads this line
__all__ = ["load", "register"]
OBJECTIVES = ("mlm", "electra", "teams", "electric", "amos")
# Modules of downstream/, each of which registers a task and its criterion.
DOWNSTREAM_TASKS = ("words.task", "spans.task", "texts.task", "multi_task.task")

# The module of downstream/ whose predict_texts() predicts with a head of this kind.
PREDICTED_BY = dict.fromkeys(("classes", "labels", "number"), "texts.labeling")
PREDICTED_BY |= dict.fromkeys(("words", "spans"), "words.command")


@contextlib.contextmanager
def root_logger_kept() -> Iterator[None]:
    """Import fairseq inside: two of its tasks configure logging when they are imported, so that every library would print.

    Another one, for text to speech, logs a line about tensorboardX.
    """
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        yield
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


SCORES, TENSORBOARD = ("sklearn", "sklearn.metrics", "scipy.stats"), "torch.utils.tensorboard"


class _Later(types.ModuleType):
    """A module whose functions are imported when they are called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(self.__name__), name)(*args, **kwargs)

        return call


@contextlib.contextmanager
def scores_imported_later() -> Iterator[None]:
    """Import fairseq inside: two of its files import scikit-learn and scipy, a quarter of the time that it takes, and one
    TensorBoard, 0.3 s."""
    names = [*SCORES, TENSORBOARD] if importlib.util.find_spec("tensorboard") else SCORES
    postponed = {name: _Later(name) for name in names if name not in sys.modules}
    for name, module in postponed.items():
        package, _, attribute = name.rpartition(".")
        if package in postponed:
            setattr(postponed[package], attribute, module)
    sys.modules.update(postponed)
    try:
        yield
    finally:
        for name in postponed:
            del sys.modules[name]


@functools.cache
def register() -> None:
    """Import fairseq, patch it, and register the tasks, models, criterions, optimizers and schedules of this package, once."""
    with root_logger_kept():
        with scores_imported_later():
            from amos_fairseq import compat

        compat.apply()

        from amos_fairseq.run import hooks  # imports fairseq's tasks: a torchaudio that does not load is hidden now

        hooks.apply()
        # models/NAME.py and criterions/NAME.py of each objective register themselves with fairseq when they are imported.
        for objective in OBJECTIVES:
            importlib.import_module(f"amos_fairseq.models.{objective}")
            importlib.import_module(f"amos_fairseq.criterions.{objective}")
        for module in (
            *(f"downstream.{task}" for task in DOWNSTREAM_TASKS),
            "tasks.text_pretraining",
            "optim.grouped_adam",
            "optim.warmup_stable_decay",
        ):
            importlib.import_module(f"amos_fairseq.{module}")


def load(
    checkpoint: str | PathLike,
    tokenizer: str | PathLike | None = None,
    device: "str | torch.device | None" = None,
    dtype: "torch.dtype | None" = None,
    batch_size: int = 32,
    layer: int | None = None,
) -> "Encoder":
    """Load a model in eval mode: texts in, features out, and what it predicts where it was fine-tuned on labels.

    Example::

        encoder = amos_fairseq.load("RUN", device="cuda", dtype=torch.bfloat16)
        features = encoder(["A text.", "Another one.", ("A question?", "Its answer.")])
        vectors = features.pooled()  # [3, D]; features.states[0, features.mask[0]] are the tokens of the first text, [L, D]
        layers = encoder(["A text."], all_layers=True).layers  # layers[k] are the states of layer k, [1, T, D]
        amos_fairseq.load("RESULTS").predict(["A text."])  # RESULTS: of amos classify or amos tag

    Args:
        checkpoint: a file; the SAVE_DIR of a run, whose ``checkpoint_last.pt`` is read; the OUT of ``amos classify`` or ``amos
            tag``, whose selected run is read; or a Hugging Face folder.
        tokenizer: directory of the tokenizer; the default is the directory ``tokenizer`` beside the checkpoint, or the folder.
        device: such as ``"cuda"`` or ``"cuda:1"``; the default is the CPU.
        dtype: float32 (the default), bfloat16 or float16, on every device.
        batch_size: number of texts in one forward pass.
        layer: the layer whose states are returned: 1 for the first, 0 for its input; those above it are not computed. By
            default the last.

    Raises:
        UserError: the file is missing, damaged or contains foreign objects; there is no tokenizer, or it is not the one that
            the checkpoint was trained with; there is no such layer; or the device is not available.
    """
    register()
    from amos_fairseq.checkpoint_files import is_hugging_face
    from amos_fairseq.checkpoints.encoder import Encoder, check_device
    from amos_fairseq.errors import UserError
    from amos_fairseq.hugging_face.import_folder import load_model

    try:
        check_device(device, dtype)
        encoder = Encoder(load_model(checkpoint, tokenizer), batch_size, layer).eval()
    except UserError as error:
        raise error.with_traceback(None) from None  # the message says it all; a traceback would bury it
    source = Path(checkpoint) if is_hugging_face(Path(checkpoint)) else encoder.loaded.file
    encoder.source = source.absolute(), tokenizer and Path(tokenizer).absolute()
    return encoder.to(device=device, dtype=dtype)


if "fairseq" in sys.modules:
    register()

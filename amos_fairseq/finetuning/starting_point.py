"""The checkpoint that fine-tuning starts from: its architecture as flags, its fingerprint, its tokenizer."""

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY

from amos_fairseq.data.fingerprint import file_sha256
from amos_fairseq.errors import UserError
from amos_fairseq.files import read_header
from amos_fairseq.finetuning.recipes import size_of
from amos_fairseq.models.configuration import EncoderConfig
from amos_fairseq.models.electric import NO_ENCODER

# Settings of single objectives that decide which encoder of a checkpoint is kept.
BRANCH_FIELDS = {"representation", "task_heads", "mws_loss_weight", "rtd_loss_weight"}
# The recipe sets these.
RECIPE_FIELDS = ("dropout", "attention_dropout", "pooler_dropout")
# How pretraining ran, which says nothing about the encoder.
RUN_FIELDS = ("activation_checkpointing", "compile", "kernels")


@dataclass(frozen=True)
class StartingPoint:
    """What the runner has to know of a checkpoint.

    Attributes:
        arch: name of its architecture.
        model: its settings of the encoder, without those of a recipe.
        task_state: the hashes of tokenizer and dictionary that it remembers.
        from_scratch: the runs take the architecture only and start from random weights.
    """

    file: Path
    sha256: str
    arch: str
    model: dict[str, Any]
    task_state: dict[str, Any]
    num_updates: int
    from_scratch: bool = False

    @property
    def max_positions(self) -> int:
        return int(self.model["max_positions"])

    @property
    def size(self) -> str:
        """Which of a recipe's sizes fits: "small", "base" or "large"."""
        return size_of(int(self.model["encoder_embed_dim"]))

    def model_flags(self) -> list[str]:
        """``--arch`` and every setting of the encoder, so that flags and checkpoint describe the same shapes."""
        flags = ["--arch", self.arch]
        for name, value in self.model.items():
            flags += [f"--{name.replace('_', '-')}", str(value)]
        return flags

    def check_tokenizer(self, directory: Path) -> None:
        """Raise :class:`UserError` unless ``directory`` is the tokenizer that the checkpoint was trained with."""
        try:
            read_tokenizer(self.file, directory, self.task_state)
        except UserError as error:
            raise UserError(
                f"the data do not fit the checkpoint: {error}, and prepare the data with that tokenizer"
            ) from error


def read_starting_point(checkpoint: str | Path, from_scratch: bool = False) -> StartingPoint:
    """Look into a checkpoint (a file, or a SAVE_DIR, whose ``checkpoint_last.pt`` is taken) without reading its weights.

    Raises:
        UserError: it is missing, damaged, not of this package, or of an objective without an encoder.
    """
    file = checkpoint_file(Path(checkpoint)).resolve()
    header = read_header(str(file))
    try:
        settings = header["cfg"]["model"]
        settings = vars(settings) if isinstance(settings, argparse.Namespace) else dict(settings)
        arch = settings["_name"]
        known = {field.name for field in dataclasses.fields(architecture(arch))} & (ENCODER_FIELDS | BRANCH_FIELDS)
        model = {
            name: settings[name] for name in sorted(known & settings.keys()) if name not in RECIPE_FIELDS + RUN_FIELDS
        }
        num_updates = int(header["optimizer_history"][-1]["num_updates"])
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"{file} is no checkpoint of fairseq-train with this package: {error} is missing in it"
        ) from error
    if settings.get("electric_variant") == "two_tower":
        raise UserError(f"{file}: {NO_ENCODER}")
    state = header.get("task_state") or {}
    return StartingPoint(file, file_sha256(file), arch, model, state, num_updates, from_scratch)


ENCODER_FIELDS = {field.name for field in dataclasses.fields(EncoderConfig)} - {"_name"}


def architecture(arch: str) -> type:
    """The settings class of one of our architectures; raises :class:`UserError` for any other."""
    settings = getattr(ARCH_MODEL_REGISTRY.get(arch), "__dataclass", None)
    if not (isinstance(settings, type) and issubclass(settings, EncoderConfig)):
        raise UserError(f"the checkpoint's architecture is {arch!r}, none of this package: give another checkpoint")
    return settings

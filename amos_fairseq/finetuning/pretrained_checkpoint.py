"""The checkpoint that fine-tuning starts from: its architecture as flags, its fingerprint, its tokenizer."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from amos_fairseq.checkpoints.read import check_state, model_settings, read_tokenizer
from amos_fairseq.checkpoints.write import as_flags
from amos_fairseq.errors import UserError
from amos_fairseq.files import checkpoint_file, read_header, task_state_of
from amos_fairseq.finetuning.recipes import size_for_width
from amos_fairseq.fingerprint import file_sha256
from amos_fairseq.models.configuration import EncoderConfig
from amos_fairseq.models.electric import NO_ENCODER

ENCODER_FIELDS = {field.name for field in dataclasses.fields(EncoderConfig)} - {"_name"}
# Settings of single objectives that decide which encoder of a checkpoint is fine-tuned.
BRANCH_FIELDS = {"representation", "task_heads", "mws_loss_weight", "rtd_loss_weight"}
# Settings that the recipe provides.
RECIPE_FIELDS = {"dropout", "attention_dropout", "pooler_dropout"}
# Settings of the pretraining process, which do not describe the encoder.
RUN_FIELDS = {"activation_checkpointing", "compile", "kernels"}
MODEL_FIELDS = (ENCODER_FIELDS | BRANCH_FIELDS) - RECIPE_FIELDS - RUN_FIELDS


@dataclass(frozen=True)
class PretrainedCheckpoint:
    """The facts about a checkpoint that fine-tuning needs, without its weights.

    Attributes:
        model: settings of the encoder, without those that the recipe provides.
        task_state: the stored hashes of tokenizer and dictionary.
        from_scratch: whether runs use only the architecture and start from random weights.
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
        """The size of the recipe to use: "small", "base" or "large"."""
        return size_for_width(int(self.model["encoder_embed_dim"]))

    def model_flags(self) -> list[str]:
        """Return ``--arch`` and every setting of the encoder as flags, so that the model gets the checkpoint's shapes."""
        return ["--arch", self.arch, *as_flags(self.model)]

    def check_tokenizer(self, directory: Path) -> None:
        """Raise :class:`UserError` unless ``directory`` holds the tokenizer that the checkpoint was trained with."""
        try:
            read_tokenizer(self.file, directory, self.task_state)
        except UserError as error:
            raise UserError(
                f"the data do not fit the checkpoint: {error}, and prepare the data with that tokenizer"
            ) from error


def read_pretrained_checkpoint(checkpoint: str | Path, from_scratch: bool = False) -> PretrainedCheckpoint:
    """Read a checkpoint's header, but not its weights.

    Args:
        checkpoint: a file, or a SAVE_DIR, whose ``checkpoint_last.pt`` is used.

    Raises:
        UserError: the file is missing, damaged, not from this package, or of an objective without an encoder.
    """
    file = checkpoint_file(Path(checkpoint)).resolve()
    header = read_header(str(file))
    check_state(file, header)
    settings = OmegaConf.to_container(model_settings(file, header["cfg"]["model"]), enum_to_str=True)
    model = {name: settings[name] for name in sorted(MODEL_FIELDS & settings.keys())}
    num_updates = int(header["optimizer_history"][-1]["num_updates"])
    if settings.get("electric_variant") == "two_tower":
        raise UserError(f"{file}: {NO_ENCODER}")
    state = task_state_of(str(file), header)
    return PretrainedCheckpoint(file, file_sha256(file), settings["_name"], model, state, num_updates, from_scratch)

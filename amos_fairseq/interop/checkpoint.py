"""A checkpoint of ours as a model that reads text: safely loaded, with the vocabulary that it was trained on."""

import argparse
import dataclasses
import os
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional, Union

import torch
from fairseq.data import Dictionary
from fairseq.models import (
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    MODEL_REGISTRY,
    BaseFairseqModel,
    build_model,
)
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from amos_fairseq.data.fingerprint import directory_sha256, file_sha256
from amos_fairseq.errors import UserError
from amos_fairseq.files import explain_load_errors
from amos_fairseq.interop.tokenizer import Tokenizer, load_tokenizer
from amos_fairseq.models.fine_tuning import FineTunedModel
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.special_tokens import MASK_SYMBOL

CheckpointPath = Union[str, os.PathLike]


@dataclass(frozen=True)
class Pretrained:
    """What a checkpoint holds, ready to read text.

    Attributes:
        file: the checkpoint.
        model: in eval mode, float32, on the CPU.
        dictionary: the pieces in the order of the embedding, ``<mask>`` last.
        tokenizer: the one that binarized the corpus.
        task: settings of the task, plain values.
        num_updates: optimizer steps until the checkpoint.
        criterion: settings of the criterion, plain values.
    """

    file: Path
    model: BaseFairseqModel
    dictionary: Dictionary
    tokenizer: Tokenizer
    task: dict[str, Any]
    num_updates: int
    criterion: dict[str, Any]

    def tokens(self, text: str) -> Tensor:
        """``<s>``, the pieces of each line and ``</s>`` after it, as the corpus was binarized: LongTensor [L].

        Raises:
            UserError: the text holds nothing to encode.
        """
        lines = [self.tokenizer.encode(line) for line in re.split(r"[\r\n]+", text)]
        ids = [self.dictionary.bos()]
        for pieces in filter(None, lines):
            ids += [self.dictionary.index(piece) for piece in pieces] + [self.dictionary.eos()]
        if len(ids) == 1:
            raise UserError("the text is empty: give at least one word")
        return torch.tensor(ids)


def load_pretrained(checkpoint: CheckpointPath, tokenizer: Optional[CheckpointPath] = None) -> Pretrained:
    """Read a checkpoint with its vocabulary.

    Args:
        checkpoint: a file, or a SAVE_DIR, whose ``checkpoint_last.pt`` is taken.
        tokenizer: directory of the tokenizer; without it the ``tokenizer`` directory beside the checkpoint.

    Raises:
        UserError: the file is missing, damaged or holds foreign objects; there is no tokenizer, or it is not the one
            that the checkpoint was trained with.
    """
    file = checkpoint_file(Path(checkpoint))
    state = read_state(file)
    found = read_tokenizer(file, tokenizer, state.get("task_state") or {})
    dictionary = Dictionary()
    for symbol in (*found.dictionary_symbols, MASK_SYMBOL):
        dictionary.add_symbol(symbol)
    model = restore_model(file, state, dictionary)
    num_updates = state["optimizer_history"][-1]["num_updates"]
    model.set_num_updates(num_updates)
    criterion = state["cfg"].get("criterion") or {}
    return Pretrained(file, model.eval(), dictionary, found, state["cfg"]["task"], num_updates, criterion)


def checkpoint_file(path: Path) -> Path:
    file = path / "checkpoint_last.pt" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file} is missing: give a checkpoint or the SAVE_DIR of a run that has saved one")
    return file


def read_state(file: Path) -> dict[str, Any]:
    """The content of a checkpoint; nothing in the file can run code (what compat/checkpoints.py allows, and no more)."""
    with explain_load_errors(str(file)):
        state = torch.load(file, map_location="cpu", weights_only=True)
    parts = ("cfg", "model", "optimizer_history")
    if not isinstance(state, dict) or not all(state.get(part) for part in parts):
        raise UserError(f"{file} is no checkpoint of fairseq-train: one of {', '.join(parts)} is missing in it")
    if "num_updates" not in state["optimizer_history"][-1]:
        raise UserError(f"{file} does not say after how many updates it was saved: give a checkpoint as it was saved")
    if not all(state["cfg"].get(section) for section in ("model", "task")):
        raise UserError(
            f"{file} does not say what was trained (cfg.model, cfg.task): give a checkpoint as it was saved"
        )
    return state


def read_tokenizer(file: Path, directory: Optional[CheckpointPath], task_state: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a run, compared by sha256 with the one that the checkpoint remembers."""
    place = Path(directory) if directory else file.parent / "tokenizer"
    try:
        tokenizer = load_tokenizer(place)
    except UserError as error:
        hint = "" if directory else "; name the tokenizer of the run with --tokenizer DIR"
        raise UserError(f"{error}{hint}") from error
    remembered = task_state.get("tokenizer_sha256")
    if remembered is not None:
        matches = remembered in (tokenizer.sha256, directory_sha256(place))
    else:  # the corpus came without a tokenizer: its dictionary must at least be the same
        remembered = task_state.get("dictionary_sha256")
        written = place / "dict.txt"
        matches = remembered is None or (written.is_file() and file_sha256(written) == remembered)
    if not matches:
        raise UserError(
            f"{place} is not the tokenizer that {file} was trained with (sha256 {remembered[:12]}... expected): "
            "give the SAVE_DIR/tokenizer of that run"
        )
    return tokenizer


def restore_model(file: Path, state: dict[str, Any], dictionary: Dictionary) -> BaseFairseqModel:
    """Build the model from the settings in the checkpoint and fill it; half-precision weights become float32."""
    settings = state["cfg"]["model"]
    settings = settings if isinstance(settings, argparse.Namespace) else with_defaults(settings)
    check_is_ours(file, settings)
    # A model of this package asks its task for the dictionary, and whether it masks blocks.
    task = SimpleNamespace(source_dictionary=dictionary)
    if not FineTunedModel.is_fine_tuned(state["model"]):
        task.masked_share = None
    try:
        model = build_model(settings, task, from_checkpoint=True)
        if isinstance(model, FineTunedModel):
            model.register_heads_of(state["model"])
        model.load_state_dict(state["model"], strict=True, model_cfg=settings)
    except (AssertionError, AttributeError, KeyError, RuntimeError) as error:
        reason = textwrap.shorten(str(error), width=300, placeholder=" ...")
        raise UserError(
            f"{file} holds no model of this package ({reason}): give a checkpoint that fairseq-train --user-dir amos_fairseq "
            "wrote"
        ) from error
    return model


def check_is_ours(file: Path, settings: argparse.Namespace | DictConfig) -> None:
    """:class:`UserError` for another model of fairseq's, before it is built with the settings of a task that is not here."""
    name = getattr(settings, "_name", None) or getattr(settings, "arch", None)
    model_class = ARCH_MODEL_REGISTRY.get(name) or MODEL_REGISTRY.get(name, object)
    if not issubclass(model_class, PretrainingModel):
        raise UserError(
            f"{file} holds a model of the architecture {name!r}, which is none of this package: give a checkpoint that "
            "fairseq-train --user-dir amos_fairseq wrote"
        )


def with_defaults(settings: dict[str, Any]) -> DictConfig:
    """Settings of a model with the fields that it has got since they were saved; fairseq adds them to models only, which a
    checkpoint written with ``--arch amos_base`` does not name."""
    name = ARCH_MODEL_NAME_REGISTRY.get(settings.get("_name"), settings.get("_name"))
    if name not in MODEL_DATACLASS_REGISTRY:
        return OmegaConf.create(settings)
    return OmegaConf.merge(OmegaConf.create(dataclasses.asdict(MODEL_DATACLASS_REGISTRY[name]())), settings)

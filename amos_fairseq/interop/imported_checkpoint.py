"""Foreign weights as a checkpoint of fairseq-train: settings by its own parser, the model by its own builder.

What the foreign model lacks (a generator, heads) starts as the model class initialises it. A checkpoint written here has
seen no update: it is there for ``--finetune-from-model``, ``--restore-file`` with ``--reset-*``, ``load`` and ``export``.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY, BaseFairseqModel, build_model
from omegaconf import DictConfig, OmegaConf, open_dict

from amos_fairseq.data.fingerprint import directory_sha256, file_sha256
from amos_fairseq.data.vocabulary import DICTIONARY_FILE, TOKENIZER_DIRECTORY
from amos_fairseq.errors import UserError
from amos_fairseq.files import os_error_behind, whole_file
from amos_fairseq.interop.hugging_face import Weights
from amos_fairseq.interop.tokenizer import Tokenizer
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.special_tokens import MASK_SYMBOL

# exp(-10,000) is 0 in every precision, and float16 can hold it.
NEVER_PREDICTED = -1e4
# What stands for the corpus in the task's settings: whoever looks for one reads where the weights come from.
_IMPORTED_FROM = "imported from "


@dataclass(frozen=True)
class Imported:
    """A model of ours that holds foreign weights.

    Attributes:
        config: the whole configuration, as fairseq-train would have saved it.
        model: of the architecture in ``config``.
        tokenizer: whose pieces the rows of the embedding are.
        source: where the weights come from, in words.
        fresh: parameters that nothing foreign went into.
        leftover: foreign weights that have no place here.
        remarks: what else a user must know, in sentences.
    """

    config: DictConfig
    model: BaseFairseqModel
    tokenizer: Tokenizer
    source: str
    fresh: list[str]
    leftover: list[str]
    remarks: list[str]


def flags_of(settings: dict[str, Any]) -> list[str]:
    """{"encoder_layers": 12} -> ["--encoder-layers", "12"]."""
    return [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def configuration(arch: str, settings: dict[str, Any], source: str) -> DictConfig:
    """What ``fairseq-train --arch ARCH`` saves with these settings of the model as flags; ``source`` as in :class:`Imported`.

    Raises:
        UserError: there is no such architecture.
    """
    if not issubclass(ARCH_MODEL_REGISTRY.get(arch, object), PretrainingModel):
        known = (name for name, model in ARCH_MODEL_REGISTRY.items() if issubclass(model, PretrainingModel))
        raise UserError(f"--arch {arch} is no architecture of this package: give one of {', '.join(sorted(known))}")
    fixed = ["--task", "text_pretraining", "--optimizer", "grouped_adam", "--lr", "0"]
    fixed += ["--arch", arch, "--criterion", arch.partition("_")[0]]
    parser = options.get_training_parser()
    flags = options.parse_args_and_arch(parser, ["imported", *fixed, *flags_of(settings)])
    config = convert_namespace_to_omegaconf(flags)
    with open_dict(config):
        config.task.data = _IMPORTED_FROM + source
    return config


def source_of(task: dict[str, Any]) -> str:
    """Where the weights come from, for a checkpoint with these settings of its task; empty if training has changed them."""
    data = str(task.get("data") or "")
    return data.removeprefix(_IMPORTED_FROM) if data.startswith(_IMPORTED_FROM) else ""


def changed_flags(config: DictConfig) -> list[str]:
    """The flags of the model that differ from what its architecture sets: what fairseq-train must be given."""
    plain = configuration(config.model._name, {}, "").model
    return flags_of({name: value for name, value in config.model.items() if value != plain[name]})


def build(config: DictConfig, tokenizer: Tokenizer, seed: int) -> BaseFairseqModel:
    """The pretraining model of ``config`` with initial values drawn from ``seed``; the caller's noise stays as it was."""
    dictionary = Dictionary()
    for symbol in (*tokenizer.dictionary_symbols, MASK_SYMBOL):
        dictionary.add_symbol(symbol)
    # A task that masks blocks gets the whole model, with its generator.
    task = SimpleNamespace(source_dictionary=dictionary, masked_share=config.task.mask_prob)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_model(config.model, task)


@torch.no_grad()
def fill(model: BaseFairseqModel, weights: Weights) -> list[str]:
    """Put ``weights`` (names of the model) in their places; returns the parameters that got none.

    Raises:
        UserError: a weight has another shape than its place, or the model has no such place.
    """
    places = model.state_dict()
    for name, tensor in weights.items():
        if name not in places or places[name].shape != tensor.shape:
            there = list(places[name].shape) if name in places else "nothing"
            raise UserError(
                f"the weights do not fit their configuration: {name} would be {list(tensor.shape)}, the configuration "
                f"says {there}; take both files from the same model"
            )
        places[name].copy_(tensor)
    filled = {places[name].data_ptr() for name in weights}  # ELECTRA's two networks share some under two names
    return sorted(name for name, place in places.items() if place.data_ptr() not in filled)


def write(imported: Imported, out: Path) -> None:
    """``out`` and, beside it, ``tokenizer/``: both whole, or neither written.

    Raises:
        UserError: ``out`` exists, another tokenizer lies beside it, or the place cannot be written.
    """
    check_place(out)
    directory = out.parent / TOKENIZER_DIRECTORY
    is_new = not directory.exists()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write_tokenizer(imported.tokenizer, directory)
        # A file and not its name: only then torch says why it could not write.
        with whole_file(str(out)) as unfinished, open(unfinished, "wb") as file:
            torch.save(checkpoint_state(imported, directory), file)
    except BaseException as error:
        if is_new:
            shutil.rmtree(directory, ignore_errors=True)
        cause = os_error_behind(error) if isinstance(error, Exception) and not isinstance(error, UserError) else None
        if cause is None:
            raise
        raise UserError(f"{out} cannot be written ({cause.strerror}): make room, or give another place") from error


def check_place(out: Path) -> None:
    """Raise :class:`UserError` unless ``out`` may become a new checkpoint: known before the long work starts."""
    if out.suffix != ".pt":
        raise UserError(f"{out} must end in .pt: fairseq knows checkpoints by it")
    if out.exists():
        raise UserError(f"{out} exists: remove it, or give another name")


def checkpoint_state(imported: Imported, tokenizer_directory: Path) -> dict[str, Any]:
    """What fairseq-train saves, before its first update."""
    config = imported.config
    return {
        "args": None,
        "cfg": OmegaConf.to_container(config, resolve=True, enum_to_str=True),
        "model": imported.model.state_dict(),
        "criterion": None,
        "optimizer_history": [
            {
                "criterion_name": config.criterion._name,
                "optimizer_name": config.optimizer._name,
                "lr_scheduler_state": {},
                "num_updates": 0,
            }
        ],
        "task_state": {
            "tokenizer_sha256": directory_sha256(tokenizer_directory),
            "dictionary_sha256": file_sha256(tokenizer_directory / DICTIONARY_FILE),
        },
        "extra_state": {
            "metrics": {},
            "previous_training_time": 0,
            # Version 2 at the beginning of an epoch: fairseq then starts its meters afresh.
            "train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True},
        },
        "last_optimizer_state": None,
    }


def _write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    if directory.exists():
        if directory_sha256(directory) != tokenizer.sha256:
            raise UserError(f"{directory} holds another tokenizer: give OUT.pt a directory of its own")
        return
    unfinished = directory.with_name(f"{TOKENIZER_DIRECTORY}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        tokenizer.save(unfinished)
        os.rename(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)

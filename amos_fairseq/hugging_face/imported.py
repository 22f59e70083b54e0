"""A foreign model as a checkpoint of fairseq-train.

Its settings come from fairseq-train's own parser, its model from fairseq's builder. What the foreign model lacks (a generator,
heads) starts from the model class's initial values. The checkpoint is at update 0: it is for ``--finetune-from-model``,
``--restore-file`` with ``--reset-*``, ``load`` and ``export``.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import models, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY, BaseFairseqModel
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor

from amos_fairseq.checkpoint_files import check_output_file
from amos_fairseq.checkpoints.read import IMPORTED_FROM, dictionary_of
from amos_fairseq.errors import UserError
from amos_fairseq.files import (
    DICTIONARY_FILE,
    TOKENIZER_DIRECTORY,
    directory_sha256,
    explain_write_errors,
    file_sha256,
    whole_file,
    whole_folder,
)
from amos_fairseq.hugging_face.weights import NEVER_PREDICTED, Weights
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.setting_checks import as_flags
from amos_fairseq.text.tokenization.fast_tokenizer import ABSENT
from amos_fairseq.text.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class Imported:
    config: DictConfig  # complete, as fairseq-train would have saved it
    model: BaseFairseqModel
    tokenizer: Tokenizer
    source: str  # where the weights come from
    newly_initialized: list[str]  # parameters that got no foreign weight
    unexpected_keys: list[str]  # foreign weights that the model has no parameter for
    remarks: list[str]  # what else a user must know


def configuration(arch: str, settings: dict[str, Any], source: str) -> DictConfig:
    """Return the configuration that ``fairseq-train --arch ARCH`` saves with these settings of the model as flags."""
    if not issubclass(ARCH_MODEL_REGISTRY.get(arch, object), PretrainingModel):
        known = (name for name, model in ARCH_MODEL_REGISTRY.items() if issubclass(model, PretrainingModel))
        raise UserError(f"--arch {arch} is not an architecture of this package: give one of {', '.join(sorted(known))}")
    fixed = ["--task", "text_pretraining", "--optimizer", "grouped_adam", "--lr", "0"]
    fixed += ["--arch", arch, "--criterion", arch.partition("_")[0]]
    if arch in ("electra_large", "electric_large"):
        fixed += ["--mask-prob", "0.25"]  # ELECTRA, Table 6; amos score needs the share
    parser = options.get_training_parser()
    flags = options.parse_args_and_arch(parser, ["imported", *fixed, *as_flags(settings)])
    config = convert_namespace_to_omegaconf(flags)
    with open_dict(config):
        config.task.data = IMPORTED_FROM + source
    return config


def build_model(config: DictConfig, tokenizer: Tokenizer, seed: int) -> BaseFairseqModel:
    """Build the pretraining model of ``config`` with initial values from ``seed``; the caller's random state is unchanged."""
    # A task that masks blocks gets the whole model, with its generator.
    task = SimpleNamespace(source_dictionary=dictionary_of(tokenizer), masked_share=config.task.mask_prob)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return models.build_model(config.model, task)


@torch.no_grad()
def fill(model: BaseFairseqModel, weights: Weights, ids: Tensor) -> list[str]:
    """Copy ``weights`` (names of the model) into the model; return the names of the parameters that got none.

    The rows of the vocabulary are put in our order. A token without a foreign row keeps its initial embedding, and an MLM head
    never predicts it, so that the softmax over the other tokens is the imported one.

    Args:
        ids: [dictionary size] int64, the foreign id of each of our rows, -1 where there is none.
    """
    model.make_room(weights)
    state = model.state_dict()
    known = (ids != ABSENT).nonzero().squeeze(1)
    for name, theirs in weights.items():
        has_rows_of_vocabulary = re.fullmatch(r"embed_tokens\.weight|mlm_heads?(\.\d+)?\.bias", name)
        compared = slice(1 if has_rows_of_vocabulary else 0, None)  # the number of rows may differ
        if name not in state or state[name].shape[compared] != theirs.shape[compared]:
            expected = list(state[name].shape) if name in state else "nothing"
            fault = f"{name} is {list(theirs.shape)}, in the configuration {expected}"
        elif has_rows_of_vocabulary and int(ids.max()) >= len(theirs):
            fault = f"{len(theirs)} rows of vocabulary, and the tokenizer has the id {int(ids.max())}"
        else:
            fault = ""
        if fault:
            raise UserError(f"these weights do not belong to their configuration or tokenizer: {fault}")
        if not has_rows_of_vocabulary:
            state[name].copy_(theirs)
            continue
        if theirs.dim() == 1:
            state[name].fill_(NEVER_PREDICTED)
        state[name][known] = theirs[ids[known]].to(state[name].dtype)
    filled = {state[name].data_ptr() for name in weights}  # ELECTRA's two networks share some under two names
    return sorted(name for name, tensor in state.items() if tensor.data_ptr() not in filled)


def write(imported: Imported, out: Path) -> None:
    """Write ``out`` and, beside it, ``tokenizer/``: both completely, or neither."""
    check_output_file(out)
    directory = out.parent / TOKENIZER_DIRECTORY
    is_new = not directory.exists()
    with explain_write_errors(out, "make room, or give another place"):
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            if is_new:
                with whole_folder(directory) as unfinished_folder:
                    imported.tokenizer.save(unfinished_folder)
            elif directory_sha256(directory) != imported.tokenizer.sha256:
                raise UserError(
                    f"{directory} is the tokenizer of another model: give {out.name} a directory of its own"
                )
            # An open file instead of its name: only then torch reports why it could not write.
            with whole_file(str(out)) as unfinished, open(unfinished, "wb") as file:
                torch.save(checkpoint_state(imported, directory), file)
        except BaseException:
            if is_new:
                shutil.rmtree(directory, ignore_errors=True)
            raise


def checkpoint_state(imported: Imported, tokenizer_directory: Path) -> dict[str, Any]:
    """Return the state that fairseq-train would save before its first update."""
    config = imported.config
    optimizer = {"criterion_name": config.criterion._name, "optimizer_name": config.optimizer._name}
    optimizer |= {"lr_scheduler_state": {}, "num_updates": 0}
    return {
        "args": None,
        "cfg": OmegaConf.to_container(config, resolve=True, enum_to_str=True),
        "model": imported.model.state_dict(),
        "criterion": None,
        "optimizer_history": [optimizer],
        "task_state": {
            "tokenizer_sha256": directory_sha256(tokenizer_directory),
            "dictionary_sha256": file_sha256(tokenizer_directory / DICTIONARY_FILE),
        },
        "extra_state": {
            "metrics": {},
            "previous_training_time": 0,
            "newly_initialized": sorted({name.partition(".")[0] for name in imported.newly_initialized}),
            # Version 2 at the beginning of an epoch: fairseq then resets its meters.
            "train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True},
        },
        "last_optimizer_state": None,
    }


def report_lines(imported: Imported, out: Path, seed: int | None = None) -> list[str]:
    """Return lines about what is imported, initialized or left out, and the flags that build the same model."""
    model = imported.config.model
    sizes = {name: parameter.numel() for name, parameter in imported.model.named_parameters()}
    initialized = [name for name in imported.newly_initialized if name in sizes]
    total = sum(sizes.values())
    num_imported = total - sum(sizes[name] for name in initialized)
    lines = [f"{imported.source}: {num_imported:,} of {total:,} parameters of {model._name} are imported"]
    if initialized:
        modules = ", ".join(sorted({name.split(".")[0] for name in initialized}))
        of_seed = f" (--seed {seed})" if seed is not None else ""
        lines.append(f"initialized randomly{of_seed}: {modules} ({len(initialized)} weights)")
    lines += imported.remarks
    if imported.unexpected_keys:
        lines.append(f"left out, no counterpart in this model: {', '.join(imported.unexpected_keys)}")
    lines.append(f"wrote {out} and {out.parent / TOKENIZER_DIRECTORY}")
    # fairseq-train needs the flags that differ from the architecture's.
    defaults = configuration(model._name, {}, "").model
    changed = as_flags({name: value for name, value in model.items() if value != defaults[name]})
    lines.append(f"flags of fairseq-train that build this model: --arch {' '.join([model._name, *changed])}")
    return lines

"""Foreign weights: tables of their names, and the checkpoint of fairseq-train that is written from them.

Its settings come from fairseq-train's own parser, its model from fairseq's builder. Parts that the foreign model lacks (a
generator, heads) start from the model class's initial values. The checkpoint is at update 0: it is for
``--finetune-from-model``, ``--restore-file`` with ``--reset-*``, ``load`` and ``export``.
"""

import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fairseq import models, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY, BaseFairseqModel
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor

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
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.text.tokenization import Tokenizer
from amos_fairseq.text.tokenization.fast_tokenizer import ABSENT

# An output bias: exp(-10,000) is 0 in every precision, and float16 can represent it.
NEVER_PREDICTED = -1e4
Weights = dict[str, Tensor]


class Renaming(NamedTuple):
    """One line of a table of names, for a group of weights: ``N`` is the number of a layer, ``*`` is ``weight`` and ``bias``.

    Attributes:
        theirs: the name in the other library, or several names whose tensors are one tensor of ours.
        conversion: what changes beside the name, in a form that the tables of a library share; None: nothing.
        first_layer: number of the first layer that has these weights, counted from 0.
    """

    ours: str
    theirs: str | tuple[str, ...]
    conversion: Any = None
    first_layer: int = 0


def expand_names(table: Collection[Renaming], num_layers: int) -> Iterator[tuple[str, list[str], Any]]:
    """Yield each line once per layer and once for weight and bias: our name, their names, conversion."""
    for line in table:
        theirs = [line.theirs] if isinstance(line.theirs, str) else line.theirs
        for layer in range(line.first_layer, num_layers) if ".N." in line.ours else (0,):
            for last in ("weight", "bias") if line.ours.endswith("*") else ("",):
                ours, *others = (name.replace(".N.", f".{layer}.").replace("*", last) for name in (line.ours, *theirs))
                yield ours, others, line.conversion


def count_layers(names: Collection[str], prefix: str) -> int:
    """Return one more than the highest number that follows ``prefix`` in ``names``."""
    numbers = [int(found.group(1)) for name in names if (found := re.match(rf"{re.escape(prefix)}(\d+)\.", name))]
    return max(numbers, default=-1) + 1


@dataclass(frozen=True)
class Imported:
    """A model of this package with foreign weights.

    Attributes:
        config: the complete configuration, as fairseq-train would have saved it.
        source: description of where the weights come from.
        newly_initialized: parameters that got no foreign weight.
        unexpected_keys: foreign weights that the model has no parameter for.
        remarks: other things that a user must know, in sentences.
    """

    config: DictConfig
    model: BaseFairseqModel
    tokenizer: Tokenizer
    source: str
    newly_initialized: list[str]
    unexpected_keys: list[str]
    remarks: list[str]


def as_flags(settings: dict[str, Any]) -> list[str]:
    """Return settings as flags: {"encoder_layers": 12} -> ["--encoder-layers=12"], of which a foreign value cannot make two."""
    return [f"--{name.replace('_', '-')}={value!s}" for name, value in settings.items()]


def configuration(arch: str, settings: dict[str, Any], source: str) -> DictConfig:
    """Return the configuration that ``fairseq-train --arch ARCH`` saves with these settings of the model as flags."""
    if not issubclass(ARCH_MODEL_REGISTRY.get(arch, object), PretrainingModel):
        known = (name for name, model in ARCH_MODEL_REGISTRY.items() if issubclass(model, PretrainingModel))
        raise UserError(f"--arch {arch} is not an architecture of this package: give one of {', '.join(sorted(known))}")
    fixed = ["--task", "text_pretraining", "--optimizer", "grouped_adam", "--lr", "0"]
    fixed += ["--arch", arch, "--criterion", arch.partition("_")[0]]
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

    The rows of the vocabulary are put in our order. An embedding without a foreign one keeps its initial values; in the output
    layer of an MLM head it is never predicted, so that its softmax is the imported one.

    Args:
        ids: [dictionary size] int64, the foreign id of each of our rows, -1 where there is none.
    """
    state = model.state_dict()
    for name, tensor in weights.items():
        if name in state and re.fullmatch(r"embed_tokens\.weight|mlm_heads?(\.\d+)?\.bias", name):
            initial = state[name] if tensor.dim() > 1 else torch.full_like(state[name], NEVER_PREDICTED)
            tensor = to_our_rows(tensor, ids, initial)
        if name not in state or state[name].shape != tensor.shape:
            expected = list(state[name].shape) if name in state else "nothing"
            raise UserError(
                f"the weights do not fit their configuration: {name} would be {list(tensor.shape)}, the configuration "
                f"says {expected}; take both files from the same model"
            )
        state[name].copy_(tensor)
    filled = {state[name].data_ptr() for name in weights}  # ELECTRA's two networks share some under two names
    return sorted(name for name, tensor in state.items() if tensor.data_ptr() not in filled)


def to_our_rows(theirs: Tensor, ids: Tensor, initial: Tensor) -> Tensor:
    """Return ``theirs`` [their rows, ...] in the order of our dictionary; ``initial`` [our rows, ...] where there is none."""
    if theirs.shape[1:] != initial.shape[1:]:
        raise UserError(
            f"the vocabulary's rows have the shape {list(theirs.shape[1:])}, the configuration says "
            f"{list(initial.shape[1:])}; take both files from the same model"
        )
    check_rows(ids, len(theirs))
    ours = initial.clone()
    known = (ids != ABSENT).nonzero().squeeze(1)
    ours[known] = theirs[ids[known]].to(ours.dtype)
    return ours


def check_rows(ids: Tensor, num_rows: int) -> None:
    """Raise :class:`UserError` if the tokenizer has an id that a vocabulary of ``num_rows`` rows lacks."""
    if int(ids.max()) >= num_rows:
        raise UserError(
            f"the tokenizer has the id {int(ids.max())}, the model only {num_rows} rows of vocabulary: "
            "they do not belong together, or the model was not resized after tokens were added"
        )


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
                raise UserError(f"{directory} holds another tokenizer: give OUT.pt a directory of its own")
            # An open file instead of its name: only then torch reports why it could not write.
            with whole_file(str(out)) as unfinished, open(unfinished, "wb") as file:
                torch.save(checkpoint_state(imported, directory), file)
        except BaseException:
            if is_new:
                shutil.rmtree(directory, ignore_errors=True)
            raise


def report_lines(imported: Imported, out: Path, seed: int) -> list[str]:
    """Return lines about what is imported, initialized or left out, and the flags that build the same model."""
    config = imported.config
    sizes = {name: parameter.numel() for name, parameter in imported.model.named_parameters()}
    initialized = [name for name in imported.newly_initialized if name in sizes]
    num_imported = sum(sizes.values()) - sum(sizes[name] for name in initialized)
    lines = [
        f"{imported.source}: {num_imported:,} of {sum(sizes.values()):,} parameters of {config.model._name} are imported"
    ]
    if initialized:
        modules = ", ".join(sorted({name.split(".")[0] for name in initialized}))
        lines.append(f"initialized randomly (--seed {seed}): {modules} ({len(initialized)} weights)")
    lines += imported.remarks
    if imported.unexpected_keys:
        lines.append(f"left out, no counterpart in this model: {', '.join(imported.unexpected_keys)}")
    lines.append(f"wrote {out} and {out.parent / TOKENIZER_DIRECTORY}")
    # fairseq-train needs the flags that differ from the architecture's.
    defaults = configuration(config.model._name, {}, "").model
    changed = as_flags({name: value for name, value in config.model.items() if value != defaults[name]})
    lines.append(f"flags of fairseq-train that build this model: --arch {' '.join([config.model._name, *changed])}")
    return lines


def check_output_file(out: Path) -> None:
    """Raise :class:`UserError` unless ``out`` may become a new checkpoint; called before any long work."""
    if out.suffix != ".pt":
        raise UserError(f"{out} must end in .pt: fairseq recognizes checkpoints by this ending")
    if out.exists():
        raise UserError(f"{out} exists: remove it, or give another name")


def checkpoint_state(imported: Imported, tokenizer_directory: Path) -> dict[str, Any]:
    """Return the state that fairseq-train would save before its first update."""
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
            # Version 2 at the beginning of an epoch: fairseq then resets its meters.
            "train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True},
        },
        "last_optimizer_state": None,
    }

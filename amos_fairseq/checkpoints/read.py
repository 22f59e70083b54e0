"""Read a checkpoint of this package safely, with its model, its dictionary and the tokenizer that it was trained with."""

import argparse
import hashlib
import os
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel, build_model
from omegaconf import DictConfig
from torch import Tensor

from amos_fairseq.checkpoint_files import (
    HeadOutputs,
    checkpoint_file,
    describe_other_weights,
    heads_in,
    num_updates_of,
    read_header,
    task_state_of,
)
from amos_fairseq.errors import UserError
from amos_fairseq.files import DICTIONARY_FILE, TOKENIZER_DIRECTORY, directory_sha256, file_sha256
from amos_fairseq.models.pretraining import GeneratorNetwork, PretrainingModel, class_of_checkpoint, is_fine_tuned
from amos_fairseq.setting_checks import check_saved_settings, model_settings
from amos_fairseq.text import MASK_SYMBOL
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.standalone import kept_lengths
from amos_fairseq.text.tokenization.tokenizer import Tokenizer
from amos_fairseq.untrusted import values_in

CheckpointPath = str | os.PathLike
LARGEST_SETTING = 2**63 - 1  # of PyTorch's and fairseq's integers
IMPORTED_FROM = "imported from "  # in the task's settings of imported weights, in place of the corpus


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The content of a checkpoint, pretrained or fine-tuned, ready for text.

    Attributes:
        model: in eval mode, float32, on the CPU.
        dictionary: the pieces in the order of the embedding, ``<mask>`` last.
        tokenizer: the one that binarized the corpus.
        task, criterion: their settings, plain values.
        num_updates: optimizer steps until the checkpoint.
        parent: the checkpoint that the run started from (``--finetune-from-model``), as it was given; empty without one.
        is_new: modules of imported weights that their source lacks: random values.
        heads: what the outputs of each head mean, which predicts labels.
    """

    file: Path
    model: BaseFairseqModel
    dictionary: Dictionary
    tokenizer: Tokenizer
    task: dict[str, Any]
    num_updates: int
    criterion: dict[str, Any]
    parent: str = ""
    is_new: frozenset[str] = frozenset()
    heads: dict[str, HeadOutputs] = field(default_factory=dict)

    @property
    def imported_from(self) -> str:
        """Where imported weights come from; empty if they were trained here."""
        return import_source(self.task)

    def head(self, name: str) -> HeadOutputs:
        if name not in self.heads:
            known = f"{', '.join(self.heads)}): give one of them"
            none = "none; that of a Hugging Face folder is not read): fine-tune it first"
            raise UserError(f"{self.file} has no head {name} (it has {known if self.heads else none}")
        return self.heads[name]

    @property
    def separator(self) -> int | None:
        """The ``--separator-token`` of the task, which a fine-tuned model reads before the second text of a pair; None without
        one, as in pretraining."""
        separator = self.task.get("separator_token")
        if separator is not None and not (type(separator) is int and 0 <= separator < len(self.dictionary)):
            raise UserError(f"{self.file}: the separator token {separator!r} is not in its dictionary")
        return separator

    @property
    def num_separators(self) -> int:
        """Number of tokens between the texts of a pair: ``</s>``, and ``separator`` if there is one."""
        return 1 if self.separator is None else 2

    def num_special(self, num_texts: int) -> int:
        """Return the number of special tokens in an input of one or two texts."""
        return 2 + (num_texts - 1) * self.num_separators

    def framed(self, texts: Sequence[Sequence[int]], limit: int) -> list[int]:
        """Return ``<s> A </s>`` or ``<s> A </s> B </s>``, as in fine-tuning: texts cut to ``limit`` tokens in all."""
        end = self.dictionary.eos()
        between = [end] if self.separator is None else [end, self.separator]
        kept = kept_lengths([len(text) for text in texts], limit - self.num_special(len(texts)))
        first, *second = (text[:length] for text, length in zip(texts, kept, strict=True))
        ids = [self.dictionary.bos(), *first]
        for text in second:
            ids += [*between, *text]
        return [*ids, end]

    def tokens(self, text: str) -> Tensor:
        return torch.tensor(self.token_ids(text))

    def token_ids(self, text: str) -> list[int]:
        """Return ``<s>``, then the pieces of each line followed by ``</s>``, as in the corpus."""
        # Other line ends are spaces, as in the corpus: some tokenizers would remove them and join the words.
        lines = [self.tokenizer.encode(" ".join(line.splitlines())) for line in re.split(r"[\r\n]+", text)]
        ids = [self.dictionary.bos()]
        for pieces in filter(None, lines):
            ids += [self.dictionary.index(piece) for piece in pieces] + [self.dictionary.eos()]
        if len(ids) == 1:
            raise UserError("the text is empty: give at least one word")
        return ids


def load_checkpoint(checkpoint: CheckpointPath, tokenizer: CheckpointPath | None = None) -> LoadedCheckpoint:
    """Read a checkpoint, a file or a SAVE_DIR, with its tokenizer; see ``amos_fairseq.load``."""
    file = checkpoint_file(Path(checkpoint))
    return restore_checkpoint(file, read_state(file), tokenizer)


def restore_checkpoint(file: Path, state: dict[str, Any], tokenizer: CheckpointPath | None = None) -> LoadedCheckpoint:
    """Build the model of the content of a checkpoint, as ``read_state`` returns it, with its tokenizer."""
    cfg = state["cfg"]
    settings = model_settings(file, cfg["model"])
    settings.freeze_encoder = False  # that was for one training
    if str(settings.kernels) == "triton":  # which needs a C compiler: only a training asks for it, and tries it first
        settings.kernels = "fast"
    task_state = state["task_state"]
    run_tokenizer = read_tokenizer(file, tokenizer, task_state)
    dictionary = dictionary_of(run_tokenizer)
    model = restore_model(file, settings, state["model"], dictionary)
    num_updates = state["optimizer_history"][-1]["num_updates"]
    model.set_num_updates(num_updates)
    return LoadedCheckpoint(
        file,
        model.eval(),
        dictionary,
        run_tokenizer,
        cfg["task"],
        num_updates,
        cfg.get("criterion") or {},
        parent_of(cfg),
        newly_initialized(state),
        named_heads(file, model, cfg["task"], heads_in(task_state)),
    )


def named_heads(
    file: Path, model: BaseFairseqModel, task: dict[str, Any], recorded: dict[str, HeadOutputs]
) -> dict[str, HeadOutputs]:
    """Return what the outputs of the model's heads for labels mean; those of fairseq's own task have no names."""
    heads = {}
    for name, head in getattr(model, "heads", {}).items():
        is_number = bool(task.get("regression_target")) or head.num_outputs == 1
        heads[name] = recorded.get(name) or HeadOutputs("number" if is_number else "classes", [])
        if name in recorded and max(1, len(recorded[name].labels)) != head.num_outputs:
            names = len(recorded[name].labels)
            raise UserError(
                f"{file} names {names:,} labels of {name}, which has {head.num_outputs:,}: give another file"
            )
    return heads


def newly_initialized(state: dict[str, Any]) -> frozenset[str]:
    """Return the modules of imported weights, not trained yet, that ``amos import`` has initialized randomly."""
    extra = state.get("extra_state")
    is_imported = state["optimizer_history"][-1]["num_updates"] == 0 and isinstance(extra, dict)
    names = extra.get("newly_initialized") if is_imported else None
    return frozenset(map(str, names if isinstance(names, list) else []))


def parent_of(cfg: dict[str, Any]) -> str:
    """Return the checkpoint that a run started from, as the user gave it; empty without one."""
    settings = cfg.get("checkpoint")
    return str(settings.get("finetune_from_model") or "") if isinstance(settings, dict) else ""


def import_source(task: dict[str, Any]) -> str:
    """Return where imported weights come from, given the settings of a checkpoint's task; empty if they were trained here."""
    data = str(task.get("data") or "")
    return data.removeprefix(IMPORTED_FROM) if data.startswith(IMPORTED_FROM) else ""


def origin_of(file: str, seen: tuple[str, ...] = ()) -> str:
    """Return what the weights of a checkpoint were imported from or where they were trained first, and each training since, as
    far as the files are still there; empty for none. ``seen``: those that began with it."""
    try:
        state = read_state(Path(file)) if os.path.isfile(file) and os.path.realpath(file) not in seen else None
    except UserError:  # replaced by something else
        state = None
    if state is None or (source := import_source(state["cfg"]["task"])):
        return "" if state is None else source
    trained = f"{num_updates_of(file, state):,} updates"
    first = origin_of(parent_of(state["cfg"]), (*seen, os.path.realpath(file)))
    model = state["cfg"]["model"]  # of a run with flags it may have the name of the arch alone
    objective = str(model.get("_name") or model.get("arch")).partition("_")[0]
    return f"{first}, then {trained} ({objective})" if first else f"{Path(file).parent.name}, {trained}"


def read_state(file: Path) -> dict[str, Any]:
    """Return the content of a checkpoint of fairseq-train with valid settings; its tensors are mapped from the disk.

    Of a run with flags, fairseq 0.12 may have saved a section of the settings as it was parsed; it becomes a dictionary.
    """
    state = read_header(str(file))
    num_updates_of(str(file), state)
    task_state = task_state_of(str(file), state)
    sections, weights = state.get("cfg"), state.get("model")
    sections = sections.items() if isinstance(sections, dict) else ()
    cfg = {name: vars(part) if isinstance(part, argparse.Namespace) else part for name, part in sections}
    is_whole = all(isinstance(part, dict) for part in (weights, cfg.get("model"), cfg.get("task")))
    if not is_whole or not all(isinstance(name, str) and torch.is_tensor(part) for name, part in weights.items()):
        raise UserError(
            f"{file} is not a checkpoint of fairseq-train: it needs tensors as weights, and what was trained (cfg.model, "
            "cfg.task)"
        )
    try:
        odd = next(filter(_is_odd, values_in(cfg)), None)
    except ValueError as error:
        odd = str(error)
    if odd is not None:
        raise UserError(f"{file} contains a setting that no run has ({reprlib.repr(odd)}): give it as it was saved")
    check_saved_settings(file, cfg)
    return {**state, "cfg": cfg, "task_state": task_state}


def _is_odd(value: Any) -> bool:
    """Return whether no run has saved this setting.

    fairseq saves resolved settings: OmegaConf would read environment variables for "${oc.env:NAME}".
    """
    return (isinstance(value, str) and "${" in value) or (isinstance(value, int) and abs(value) > LARGEST_SETTING)


def read_tokenizer(file: Path, directory: CheckpointPath | None, task_state: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of a run: its sha256, or that of its dictionary, must be the one in the checkpoint."""
    path = Path(directory) if directory else file.parent / TOKENIZER_DIRECTORY
    try:
        tokenizer = load_tokenizer(path)
    except UserError as error:
        hint = "" if directory else "; name the tokenizer of the run with --tokenizer DIR"
        raise UserError(f"{error}{hint}") from error
    expected, present = task_state.get("tokenizer_sha256"), {tokenizer.sha256, directory_sha256(path)}
    if expected is None:  # the corpus came without a tokenizer
        dictionary = path / DICTIONARY_FILE
        expected, present = task_state.get("dictionary_sha256"), {dictionary.is_file() and file_sha256(dictionary)}
    if expected is not None and expected not in present:
        wanted = f"sha256 {expected[:12]}... expected"
        raise UserError(
            f"{path} is not the tokenizer that {file} was trained with ({wanted}): give that run's tokenizer"
        )
    return tokenizer


def dictionary_of(tokenizer: Tokenizer) -> Dictionary:
    """Return the dictionary of the tasks of this package: the tokenizer's pieces, then ``<mask>``."""
    dictionary = Dictionary()
    for symbol in (*tokenizer.dictionary_symbols, MASK_SYMBOL):
        dictionary.add_symbol(symbol)
    dictionary.protected_symbols = tokenizer.protected_symbols
    return dictionary


def load_generator(
    cfg: DictConfig, dictionary: Dictionary, compares_tokens: bool = True
) -> tuple[list[GeneratorNetwork], str]:
    """Read the networks of ``--generator-checkpoint`` of a model with settings ``cfg`` and this dictionary.

    Returns also the sha256 of the weights in its files, joined by colons.
    """
    networks, hashes = [], []
    try:
        for path in cfg.generator_checkpoint.split(os.pathsep):
            file = checkpoint_file(Path(path))
            state = read_state(file)
            if compares_tokens and _tokens_of(file, state["task_state"]) != dictionary.symbols:
                raise UserError(
                    f"{file} has other tokens than the corpus, or no {TOKENIZER_DIRECTORY} beside it: copy the whole SAVE_DIR "
                    f"of that run, and binarize the text with its {TOKENIZER_DIRECTORY} (amos prepare --tokenizer)"
                )
            settings = model_settings(file, state["cfg"]["model"])
            settings.kernels, settings.activation_checkpointing = cfg.kernels, False
            hashes.append(weights_sha256(state["model"]))
            with torch.device("cpu"):  # also where FLOPs are counted on the meta device
                model = restore_model(file, settings, state["model"], dictionary)
            own = model.generator_networks() if isinstance(model, PretrainingModel) else []
            if not own or model.max_positions() < cfg.max_positions:
                raise UserError(
                    f"{file} reads {model.max_positions()} tokens and has {len(own)} networks with an MLM head: give an mlm, "
                    f"electra, teams or amos that reads --max-positions {cfg.max_positions}"
                )
            networks += own
    except UserError as error:
        raise UserError(f"--generator-checkpoint: {error}") from error
    return networks, ":".join(hashes)


def weights_sha256(weights: dict[str, Tensor]) -> str:
    """Return the sha256 of names and values, whatever else their file contains."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode("utf-8"))
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _tokens_of(file: Path, task_state: dict[str, Any]) -> list[str] | None:
    """Return the tokens of the dictionary beside a checkpoint; None if it is not there, or not the one of the checkpoint."""
    path = file.parent / TOKENIZER_DIRECTORY / DICTIONARY_FILE
    if not path.is_file() or file_sha256(path) != task_state.get("dictionary_sha256"):
        return None
    dictionary = Dictionary.load(str(path))
    dictionary.add_symbol(MASK_SYMBOL)
    return dictionary.symbols


def restore_model(
    file: Path, settings: DictConfig, weights: dict[str, Tensor], dictionary: Dictionary
) -> BaseFairseqModel:
    """Build the model of ``settings`` and load its weights, as float32; a frozen generator is read when it is needed."""
    # A model of this package asks its task for the dictionary, whether it masks blocks, and which heads it needs.
    has_heads = is_fine_tuned(weights)
    asked = {"masked_share": None, "load_generator": lambda cfg: load_generator(cfg, dictionary)[0]}
    if has_heads:
        asked = {"model_class": class_of_checkpoint(weights)}
    task = SimpleNamespace(source_dictionary=dictionary, **asked)
    try:
        model = build_model(settings, task, from_checkpoint=True)
        if has_heads:
            model.register_heads_of(weights)
        model.load_state_dict(weights, strict=True, model_cfg=settings)
    except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = describe_other_weights(str(error))
        raise UserError(
            f"{file} does not contain a model of this package ({reason}): give a checkpoint that it wrote"
        ) from error
    return model

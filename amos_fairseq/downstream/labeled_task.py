"""What all tasks with labels share: settings, a model with a head, the order of an epoch, and padded batches of tokens."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, List  # noqa: UP035 (fairseq reads the types of config classes, in typing's spelling)

import numpy as np
import torch
from fairseq import metrics
from fairseq.criterions import FairseqCriterion
from fairseq.data import Dictionary, FairseqDataset
from fairseq.dataclass import FairseqDataclass
from omegaconf import II, OmegaConf

from amos_fairseq.checkpoint_files import HEADS, HeadOutputs
from amos_fairseq.criterions.pretraining import mean
from amos_fairseq.data.block_iterator import similar_lengths
from amos_fairseq.data.corpus import Vocabulary
from amos_fairseq.data.seeding import EpochOrder, Purpose, keyed_generator
from amos_fairseq.downstream.model import FineTunedModel
from amos_fairseq.errors import UserError
from amos_fairseq.setting_checks import setting
from amos_fairseq.tasks.corpus_task import CorpusTask, arch_name

AVERAGE = "average"  # of the main scores of several tasks, in logs and results


@dataclass
class LabeledTaskConfig(FairseqDataclass):
    similar_lengths: bool = setting(
        False, "train on batches of sequences of similar length, which need little padding (default: random)"
    )
    seed: int = II("common.seed")
    save_dir: str = II("checkpoint.save_dir")
    train_subset: str = II("dataset.train_subset")
    update_freq: List[int] = II("optimization.update_freq")  # noqa: UP006


class LabeledTask(CorpusTask):
    """A task on prepared labels.

    Attributes:
        model_class: the class of the model, for every architecture; :meth:`add_head` adds its heads.
        head_for: what the head predicts, for error messages.
    """

    trains_on_rest = True
    model_class: type[FineTunedModel]
    head_for: str

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> FineTunedModel:
        model = super().build_model(cfg, from_checkpoint)
        if not isinstance(model, FineTunedModel):
            raise UserError(f"--arch {arch_name(cfg)} has no head for {self.head_for}: give one of amos_fairseq")
        heads = {name: asdict(outputs) for name, outputs in self.add_head(model).items()}
        self.state.merge_state_dict({HEADS: heads})
        return model

    def order_of_epoch(self, dataset: Any, batches_per_update: int, batch_size: int) -> np.ndarray:
        global_batch = batches_per_update * batch_size
        if hasattr(dataset, "whole_updates"):  # the mixture of several tasks
            self.check_update_freq()
            return self.arrange(dataset, dataset.whole_updates(global_batch), global_batch)
        return self.arrange(dataset, super().order_of_epoch(dataset, batches_per_update, batch_size), global_batch)

    def check_update_freq(self) -> None:
        if len(set(self.cfg.update_freq)) > 1:
            raise UserError(f"--update-freq {self.cfg.update_freq}: all updates have the same size: give one number")

    def arrange(self, dataset: Any, indices: np.ndarray, global_batch: int) -> np.ndarray:
        """Return the order of an epoch, with ``--similar-lengths`` in global batches of similar length."""
        if not self.cfg.similar_lengths:
            return indices
        generator = keyed_generator(Purpose.SIMILAR_LENGTHS, self.cfg.seed, dataset.epoch, 0)
        return similar_lengths(indices, dataset.sizes, global_batch, generator)

    def has_sharded_data(self, split: str) -> bool:
        return False  # several folders of data are several tasks, not the shards of one corpus

    def add_head(self, model: FineTunedModel) -> dict[str, HeadOutputs]:
        """Add the heads that depend on the data. Return what the outputs of each that predicts labels mean: it is saved in the
        checkpoints."""
        return {}


class LabeledCriterion(FairseqCriterion):
    """A criterion that logs sums, so that fairseq may add them over ranks and accumulated batches."""

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


def log_means(logging_outputs: list[dict[str, Any]], *keys: str) -> dict[str, Any]:
    """Return the sums over all ranks and accumulated batches; log those of ``keys``, by ``sample_size``, without a first _."""
    totals = {key: sum(log.get(key, 0) for log in logging_outputs) for key in logging_outputs[0]}
    count = float(totals["sample_size"])
    for key in keys:
        if key in totals:
            metrics.log_scalar(key.removeprefix("_"), mean(totals[key], count), count, round=4)
    return totals


def open_vocabulary(
    directories: Sequence[Path], tokenizer: str | None = None, separator: int | None = None
) -> tuple[Vocabulary, Dictionary]:
    """Return the vocabulary of folders with a ``dict.txt``, and its dictionary; refuse another ``--separator-token``."""
    vocabulary = Vocabulary.of_corpus(list(directories), tokenizer)
    dictionary = vocabulary.load_dictionary()
    if separator not in (None, dictionary.eos()):
        raise UserError(f"--separator-token {separator} is not </s>: give {dictionary.eos()}, or leave it out")
    return vocabulary, dictionary


def prepared_directories(cfg: Any, kind: str, several: bool = True) -> list[Path]:
    """Return the directories in ``cfg.data``, with ``several`` separated by ``:``; refuse a missing one."""
    if OmegaConf.is_missing(cfg, "data"):
        raise UserError("no data directory is given: give the directory that amos prepare wrote, as task.data=DIR")
    directories = [Path(name) for name in (str(cfg.data).split(os.pathsep) if several else [str(cfg.data)])]
    for directory in directories:
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory: give the one that amos prepare {kind} wrote")
    return directories


class LabeledSequences(EpochOrder, FairseqDataset):
    """The sequences of a split, shuffled for ``training`` by ``seed``; ``sizes`` are their numbers of tokens. A subclass makes
    the items, which have at least ``id`` and ``tokens``."""

    sizes: np.ndarray
    bos, pad, eos = Dictionary().bos(), Dictionary().pad(), Dictionary().eos()  # of all dictionaries

    def __init__(self, directory: Path, split: str, seed: int, training: bool) -> None:
        super().__init__()
        self.directory, self.source = directory, f"{directory}/{split}"
        self.seed, self.training, self.epoch = seed, training, 1

    def __len__(self) -> int:
        return len(self.sizes)

    def collater(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch padded to its longest sequence; ``{}`` for an empty list (a rank without data).

        Returns:
            ``id`` LongTensor [B]; ``nsentences``, ``ntokens`` (real tokens) and ``first_id`` Python ints; ``net_input``
            with ``src_tokens`` LongTensor [B,T] and ``lengths``, B Python ints; and what a subclass adds.
        """
        if not samples:
            return {}
        lengths = [len(sample["tokens"]) for sample in samples]
        tokens = torch.full((len(samples), max(lengths)), self.pad, dtype=torch.long)
        for row, sample in enumerate(samples):
            tokens[row, : lengths[row]] = sample["tokens"]
        batch = {
            "id": torch.tensor([sample["id"] for sample in samples], dtype=torch.long),
            "nsentences": len(samples),
            "ntokens": sum(lengths),
            "first_id": samples[0]["id"],
            "net_input": {"src_tokens": tokens, "lengths": lengths},
        }
        self.add_labels(batch, samples)
        return batch

    def add_labels(self, batch: dict[str, Any], samples: Sequence[dict[str, Any]]) -> None:
        """Add the labels of the samples to the batch, in place; each data set has its own."""
        raise NotImplementedError(f"{type(self).__name__}.add_labels")

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    size = num_tokens

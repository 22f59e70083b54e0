"""What all tasks with labels share: settings, a model with a head, the order of an epoch, padded batches of tokens, and
the rows of several tasks in one data set."""

import os
from collections.abc import Mapping, Sequence
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
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from amos_fairseq.checkpoint_files import HEADS, HeadOutputs
from amos_fairseq.criterions.pretraining import mean
from amos_fairseq.data.block_iterator import similar_lengths
from amos_fairseq.data.corpus import Vocabulary
from amos_fairseq.data.seeding import EpochOrder, Purpose, keyed_generator
from amos_fairseq.downstream.model import FineTunedModel
from amos_fairseq.errors import UserError
from amos_fairseq.experiments import SAMPLING_EXPONENT
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
        model_class: the class of the model, for every architecture; ``add_head`` adds its heads.
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
            indices = dataset.whole_updates(global_batch)
        else:
            indices = super().order_of_epoch(dataset, batches_per_update, batch_size)
        if not self.cfg.similar_lengths:
            return indices
        generator = keyed_generator(Purpose.SIMILAR_LENGTHS, self.cfg.seed, dataset.epoch, 0)
        return similar_lengths(indices, dataset.sizes, global_batch, generator)

    def check_update_freq(self) -> None:
        if len(set(self.cfg.update_freq)) > 1:
            raise UserError(f"--update-freq {self.cfg.update_freq}: all updates have the same size: give one number")

    def has_sharded_data(self, split: str) -> bool:
        return False  # several folders of data are several tasks, not the shards of one corpus

    def add_head(self, model: FineTunedModel) -> dict[str, HeadOutputs]:
        """Add the heads that depend on the data. Return what the outputs of each that predicts labels mean: it is saved in the
        checkpoints."""
        return {}


class LabeledCriterion(FairseqCriterion):
    """A criterion that logs sums, so that fairseq may add them over ranks and accumulated batches. Its ``forward`` returns the
    summed loss (float32 scalar), the number of rows, words or windows that divides it, and the sums to log."""

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


def prepared_directories(cfg: Any, several: bool = True) -> list[Path]:
    """Return the directories in ``cfg.data``, with ``several`` separated by ``:``."""
    data = "???" if OmegaConf.is_missing(cfg, "data") else str(cfg.data)
    return [Path(name) for name in (data.split(os.pathsep) if several else [data])]


def pad_tokens(sequences: Sequence[Tensor]) -> dict[str, Any]:
    """Return the arguments of an encoder for LongTensors [L]: ``src_tokens`` [B,T] int64 and ``lengths``, B Python ints."""
    tokens = pad_sequence(sequences, batch_first=True, padding_value=LabeledSequences.pad)
    return {"src_tokens": tokens.long(), "lengths": list(map(len, sequences))}


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
        net_input = pad_tokens([sample["tokens"] for sample in samples])
        batch = {
            "id": torch.tensor([sample["id"] for sample in samples], dtype=torch.long),
            "nsentences": len(samples),
            "ntokens": sum(net_input["lengths"]),
            "first_id": samples[0]["id"],
            "net_input": net_input,
        }
        self.add_labels(batch, samples)
        return batch

    def add_labels(self, batch: dict[str, Any], samples: Sequence[dict[str, Any]]) -> None:
        """Add the labels of the samples to the batch, in place; each data set has its own."""


def rows_per_epoch(sizes: Sequence[int], exponent: float = SAMPLING_EXPONENT) -> list[int]:
    """Return n = |D_max|^(1-e) |D|^e, rounded, for tasks of |D| rows and ``exponent`` e: the largest is read once an epoch.

    So P(task) is proportional to |D|^e (thesis, section 3.3: 0.75); there tasks are drawn at random, here in fixed numbers.
    """
    largest = max(sizes)
    return [round(largest ** (1 - exponent) * size**exponent) for size in sizes]


def check_epoch(num_rows: int, update: int) -> None:
    """Refuse an epoch of several tasks that is smaller than an update of so many rows."""
    if num_rows < update:
        raise UserError(f"an epoch has {num_rows} rows, fewer than the {update} of one update: lower --batch-size")


class MixedTasks(LabeledSequences):
    """The rows of several tasks, one task after the other.

    In an epoch each row of a task of |D| rows is read floor(n / |D|) or ceil(n / |D|) times, for n of ``rows_per_epoch``.
    The rows that are read once more follow a permutation of the task from epoch to epoch, so that the counts of two rows of a
    task never differ by more than one. The rows of all tasks are shuffled together (thesis, section 3.2.1). All epochs make one
    sequence, which is cut into updates: the rest of an epoch begins the first update of the next one.

    Args:
        tasks: their rows by the name of their head; the order matters.
        split: for messages.
        seed: of the order.
        exponent: of ``rows_per_epoch``.
    """

    def __init__(
        self,
        tasks: Mapping[str, LabeledSequences],
        split: str,
        seed: int,
        training: bool,
        exponent: float = SAMPLING_EXPONENT,
    ) -> None:
        super().__init__(next(iter(tasks.values())).directory, split, seed, training)
        self.source = ", ".join(rows.source for rows in tasks.values())
        self.tasks = dict(tasks)
        self.starts = np.cumsum([0, *map(len, tasks.values())])[:-1]
        self.sizes = np.concatenate([rows.sizes for rows in tasks.values()])
        self.rows_of_tasks = rows_per_epoch([len(rows) for rows in tasks.values()], exponent)

    def order(self, epoch: int) -> np.ndarray:
        """Return the rows that an epoch draws, shuffled: [sum of n] int64."""
        drawn = []
        for number, (start, rows, count) in enumerate(
            zip(self.starts, self.tasks.values(), self.rows_of_tasks, strict=True)
        ):
            whole, rest = divmod(count, len(rows))
            once_more = keyed_generator(Purpose.ROWS_OF_A_TASK, self.seed, 0, number).permutation(len(rows))
            first = (epoch - 1) * rest
            rest_of_epoch = once_more[np.arange(first, first + rest) % len(rows)]
            drawn.append(start + np.concatenate([np.tile(np.arange(len(rows)), whole), rest_of_epoch]))
        return keyed_generator(Purpose.BLOCK_ORDER, self.seed, epoch, 0).permutation(np.concatenate(drawn))

    def whole_updates(self, global_batch: int) -> np.ndarray:
        """Return the rows of the current epoch's updates of ``global_batch`` rows: [N] int64."""
        check_epoch(sum(self.rows_of_tasks), global_batch)
        carried, order = self.rows_before() % global_batch, self.order(self.epoch)
        if carried:
            order = np.concatenate([self.order(self.epoch - 1)[-carried:], order])
        return order[: len(order) - len(order) % global_batch]

    def rows_before(self) -> int:
        """Return how many rows the earlier epochs have drawn."""
        return (self.epoch - 1) * sum(self.rows_of_tasks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the item of a task, with ``id``, int, as the place among the rows of all tasks."""
        number = self._task_of(index)
        return list(self.tasks.values())[number][index - self.starts[number]] | {"id": int(index)}

    def _task_of(self, index: Any) -> Any:
        return np.searchsorted(self.starts, index, side="right") - 1

    def rows_of_heads(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return the places in the batch of the rows of each task, [b] int64; b may be 0."""
        tasks = torch.from_numpy(self._task_of(batch["id"].numpy()))
        return {name: (tasks == number).nonzero().squeeze(1) for number, name in enumerate(self.tasks)}

    def add_labels(self, batch: dict[str, Any], samples: Sequence[dict[str, Any]]) -> None:
        """Add ``rows_of_heads`` to ``net_input``; and ``labels``, for each task what its ``labels_of`` these rows returns,
        their ``id`` [b] int64 among the rows of the task, and the number of these, ``num_rows``."""
        places = batch["net_input"]["rows_of_heads"] = self.rows_of_heads(batch)
        batch["labels"] = {}
        for (name, rows), start in zip(self.tasks.items(), self.starts.tolist(), strict=True):
            in_task = batch["id"][places[name]] - start
            batch["labels"][name] = rows.labels_of(in_task) | {"id": in_task, "num_rows": len(rows)}

"""The base class of this package's tasks: vocabulary, batches in a fixed order, and random numbers of a micro-batch."""

import copy
import logging
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.tasks import FairseqTask

from amos_fairseq.compat.distribution import from_first_rank
from amos_fairseq.compat.patching import seed_generators
from amos_fairseq.data.block_iterator import BlockBatchIterator, blocks_per_batch, equal_batches, whole_updates
from amos_fairseq.data.corpus import Vocabulary
from amos_fairseq.data.seeding import Purpose, noise_seed

logger = logging.getLogger(__name__)


class CorpusTask(FairseqTask):
    """A task on a binarized corpus. A checkpoint's ``task_state`` holds the sha256 of the vocabulary.

    A subclass has ``seed``, ``update_freq`` and the setting that ``length`` names, the tokens of the longest sample, in its
    configuration, and a Python int ``first_id`` in its samples. ``trains_on_rest``: one rank with one micro-batch per update
    also trains on what makes no whole update.
    """

    length: str
    trains_on_rest = False

    def __init__(self, cfg: Any, vocabulary: Vocabulary, dictionary: Dictionary) -> None:
        super().__init__(cfg)
        self.vocabulary, self.dictionary = vocabulary, dictionary
        self.state.merge_state_dict(vocabulary.fingerprints())

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary | None:
        return None

    def max_positions(self) -> int:
        return getattr(self.cfg, self.length)

    def get_batch_iterator(
        self,
        dataset: Any,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        max_positions: int | None = None,
        epoch: int = 1,
        **settings: Any,
    ) -> BlockBatchIterator:
        """Return equal batches of an epoch. In training, blocks that make no whole update are left out, others in each epoch
        (see :func:`~amos_fairseq.data.block_iterator.whole_updates`).

        In ``max_tokens`` each sample counts as :attr:`length` tokens. ``settings``: for :meth:`iterator_settings`.
        """
        dataset = copy.copy(dataset)  # with an epoch of its own: a run may also validate on its training data
        flag = f"--{self.length.replace('_', '-')}"
        batch_size = blocks_per_batch(self.max_positions(), max_tokens, max_sentences, max_positions, flag)
        settings = self.iterator_settings(dataset, epoch, **settings)
        if dataset.training:
            indices = self.order_of_epoch(dataset, settings["num_shards"] * settings["update_freq"], batch_size)
        else:
            indices = dataset.ordered_indices()
        return BlockBatchIterator(dataset, equal_batches(indices, batch_size), **settings)

    def iterator_settings(
        self,
        dataset: Any,
        epoch: int,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        data_buffer_size: int = 0,
        **ignored: Any,
    ) -> dict[str, int]:
        """Set the epoch of ``dataset``, and return the settings of an iterator over it. ``ignored``: fairseq's arguments for
        corpora whose samples differ in length, and for reused iterators."""
        dataset.set_epoch(epoch)
        schedule = self.cfg.update_freq if dataset.training else [1]
        return {
            "update_freq": schedule[min(epoch, len(schedule)) - 1],
            "num_shards": num_shards,
            "shard_id": shard_id,
            "num_workers": num_workers,
            "epoch": epoch,
            "buffer_size": data_buffer_size,
        }

    def order_of_epoch(self, dataset: Any, batches_per_update: int, batch_size: int) -> np.ndarray:
        """Return the samples that train in the data set's current epoch, in their order: [N] int64."""
        indices = dataset.ordered_indices()
        if self.trains_on_rest and batches_per_update == 1:
            return indices
        used = whole_updates(indices, batches_per_update * batch_size, dataset.source)
        logger.info(f"epoch {dataset.epoch}: {len(used)} blocks in whole updates, {len(indices) - len(used)} left out")
        return used

    def train_step(
        self,
        sample: dict[str, Any],
        model: Any,
        criterion: Any,
        optimizer: Any,
        update_num: int,
        ignore_grad: bool = False,
    ) -> tuple[torch.Tensor, int, dict[str, Any]]:
        """Run fairseq's step with noise from (seed, update, first sample). fairseq seeds all ranks alike once per update: they
        would share dropout and Gumbel noise."""
        sample = self.begin_step(sample, criterion, update_num)
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    def begin_step(self, sample: dict[str, Any], criterion: Any, update_num: int) -> dict[str, Any]:
        """Return :meth:`before_step`, and seed PyTorch's generators for this sample."""
        sample = self.before_step(sample, criterion, update_num)
        seed_generators(noise_seed(Purpose.TRAINING_NOISE, self.cfg.seed, update_num, sample["first_id"]))
        return sample

    def before_step(self, sample: dict[str, Any], criterion: Any, update_num: int) -> dict[str, Any]:
        """Return the sample for the update after ``update_num`` others; what depends on that number alone resumes exactly."""
        return sample

    def begin_epoch(self, epoch: int, model: Any) -> None:
        """Write what belongs to the checkpoints into SAVE_DIR before the first one can be written."""
        from_first_rank(self.write_vocabulary)

    def write_vocabulary(self) -> None:
        self.vocabulary.copy_into(self.cfg.save_dir)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise :class:`UserError` if the vocabulary of the checkpoint differs from this task's."""
        self.vocabulary.refuse_other(state_dict)


def arch_name(cfg: Any) -> str:
    """Return the architecture of a model's settings, from flags or from YAML."""
    return getattr(cfg, "arch", None) or cfg._name

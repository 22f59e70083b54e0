"""The base class of this package's tasks: vocabulary, batches in a fixed order, and random numbers of a micro-batch."""

import logging
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.tasks import FairseqTask

from amos_fairseq.data.block_iterator import BlockBatchIterator, equal_batches, whole_updates
from amos_fairseq.data.seeding import Purpose, noise_seed
from amos_fairseq.data.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


class CorpusTask(FairseqTask):
    """A task on a binarized corpus. A checkpoint's ``task_state`` holds the sha256 of the vocabulary.

    A subclass has ``seed`` and ``update_freq`` in its configuration, and a Python int ``first_id`` in its samples.
    """

    def __init__(self, cfg: Any, vocabulary: Vocabulary, dictionary: Dictionary) -> None:
        super().__init__(cfg)
        self.vocabulary, self.dictionary = vocabulary, dictionary
        self.state.merge_state_dict(vocabulary.fingerprints())

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        epoch: int = 1,
        data_buffer_size: int = 0,
        partial_update: bool = False,
        **ignored: Any,
    ) -> BlockBatchIterator:
        """Return equal batches of an epoch, for training those that make whole updates.

        Args:
            dataset: shuffles itself by epoch.
            batch_size: samples per batch of a rank.
            partial_update: whether one rank with one micro-batch per update also trains on the rest.
            ignored: fairseq's arguments for corpora whose samples differ in length, and for reused iterators.

        Raises:
            UserError: the corpus is smaller than one update.
        """
        dataset.set_epoch(epoch)
        indices, update_freq = dataset.ordered_indices(), 1
        if dataset.training:
            schedule = self.cfg.update_freq
            update_freq = schedule[min(epoch, len(schedule)) - 1]
            if not partial_update or num_shards * update_freq > 1:
                used = whole_updates(indices, num_shards * update_freq * batch_size, dataset.source)
                logger.info(f"epoch {epoch}: {len(used)} blocks in whole updates, {len(indices) - len(used)} left out")
                indices = used
        return BlockBatchIterator(
            dataset,
            equal_batches(indices, batch_size),
            update_freq=update_freq,
            num_shards=num_shards,
            shard_id=shard_id,
            num_workers=num_workers,
            epoch=epoch,
            buffer_size=data_buffer_size,
        )

    def train_step(
        self,
        sample: dict[str, Any],
        model: Any,
        criterion: Any,
        optimizer: Any,
        update_num: int,
        ignore_grad: bool = False,
    ) -> tuple[torch.Tensor, int, dict[str, Any]]:
        """Run fairseq's step with noise from (seed, update, first sample).

        fairseq seeds all ranks alike once per update: they would share dropout and Gumbel noise, and the noise of a
        micro-batch would depend on whether it comes first or second on its rank.
        """
        torch.manual_seed(noise_seed(Purpose.TRAINING_NOISE, self.cfg.seed, update_num, sample["first_id"]))
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise :class:`UserError` if the vocabulary of the checkpoint differs from this task's."""
        self.vocabulary.refuse_other(state_dict)


def arch_name(cfg: Any) -> str:
    """Return the architecture of a model's settings, from flags or from YAML."""
    return getattr(cfg, "arch", None) or cfg._name

"""Labeled sentences with unlabeled ones beside them, for cross-view training (thesis, section 4.1)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from fairseq.data import ConcatDataset, FairseqDataset

from amos_fairseq.data.seeding import Purpose, keyed_generator
from amos_fairseq.downstream.multi_task.dataset import MixedSentences
from amos_fairseq.downstream.tagging.dataset import TaggedSentences, WordSequences


class WithUnlabeled(FairseqDataset):
    """Each labeled sentence of an epoch with one unlabeled sentence, so that their batches have the same size (Table 4.1).

    An index is a place in the epoch, of which :meth:`begin_epoch` says the order. The n-th labeled sentence since the beginning
    of the training has the n-th sentence of an endless sequence of permutations of the unlabeled ones: it depends on the seed
    and the place alone, and all are read once before one is read again.

    Args:
        labeled: the training set. It is shuffled by itself.
        unlabeled: sentences of one or more files.
        seed: of the permutations.

    Attributes:
        weight: the expected number of labeled words for an unlabeled one.
    """

    def __init__(
        self, labeled: TaggedSentences | MixedSentences, unlabeled: Sequence[WordSequences], seed: int
    ) -> None:
        self.labeled, self.unlabeled = labeled, ConcatDataset(unlabeled)
        self.collate_unlabeled = unlabeled[0].collater
        self.seed, self.training, self.source = seed, True, labeled.source
        means = [part.words_per_sentence for part in unlabeled]
        words_per_sentence = np.average(means, weights=[len(part) for part in unlabeled])
        self.weight = float(labeled.words_per_sentence / words_per_sentence)
        self.begin_epoch(np.arange(len(labeled)), 0, by_length=False)

    def __len__(self) -> int:
        """Return the number of labeled sentences. With several tasks, an epoch may draw more or fewer."""
        return len(self.labeled)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    size = num_tokens

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """False: a reused iterator would repeat the first epoch's order."""
        return False

    @property
    def epoch(self) -> int:
        return self.labeled.epoch

    def set_epoch(self, epoch: int) -> None:
        self.labeled.set_epoch(epoch)

    def begin_epoch(self, order: np.ndarray, first: int, by_length: bool) -> np.ndarray:
        """Set the labeled sentences of the epoch, and return their places: [N] int64.

        Args:
            order: [N] int64, indices of ``labeled``.
            first: number of sentences in all epochs before.
            by_length: give the longest unlabeled sentence of the epoch to the longest labeled one, and so on. Batches of
                similar lengths then stay such, and have a number of unlabeled words in proportion to the labeled ones.
        """
        self.order, self.sizes = order, self.labeled.sizes[order]
        self.beside = self._endless(first, first + len(order))
        if by_length:
            ranks = self.sizes.argsort(kind="stable").argsort(kind="stable")
            self.beside = self.beside[self.unlabeled.sizes[self.beside].argsort(kind="stable")][ranks]
        return np.arange(len(order), dtype=np.int64)

    def _endless(self, first: int, last: int) -> np.ndarray:
        """Return the unlabeled sentences from place ``first`` to place ``last`` of the endless sequence."""
        size = len(self.unlabeled)
        start, stop = first // size, -(-last // size)
        passes = [
            keyed_generator(Purpose.UNLABELED, self.seed, number, 0).permutation(size) for number in range(start, stop)
        ]
        return np.concatenate([*passes, np.empty(0, dtype=np.int64)])[first - start * size : last - start * size]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the labeled sentence, with the other one as ``unlabeled``."""
        return self.labeled[int(self.order[index])] | {"unlabeled": self.unlabeled[int(self.beside[index])]}

    def collater(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the labeled batch; in its ``net_input`` ``unlabeled``, that of the other sentences; and the Python numbers
        ``num_unlabeled_words`` and ``unlabeled_weight``, which is :attr:`weight`."""
        batch = self.labeled.collater(samples)
        if batch:
            others = [sample["unlabeled"] for sample in samples]
            batch["net_input"]["unlabeled"] = self.collate_unlabeled(others)["net_input"]
            batch["num_unlabeled_words"] = sum(len(other["positions"]) for other in others)
            batch["unlabeled_weight"] = self.weight
        return batch

"""The order of samples in an epoch, from (seed, epoch) alone."""

import numpy as np

from amos_fairseq.data.seeding import Purpose, keyed_generator


class EpochOrder:
    """Before ``FairseqDataset`` among the bases of a dataset with ``seed``, ``epoch`` and ``training``."""

    def ordered_indices(self) -> np.ndarray:
        """Indices [N] int64: a permutation from (seed, epoch) for training, ascending for validation."""
        if not self.training:
            return np.arange(len(self), dtype=np.int64)
        return keyed_generator(Purpose.BLOCK_ORDER, self.seed, self.epoch, 0).permutation(len(self))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """False: an iterator that fairseq kept would repeat the first epoch's order."""
        return False

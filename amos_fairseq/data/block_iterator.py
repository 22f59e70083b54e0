"""Batches of blocks over ranks and updates, and a position in the epoch that does not depend on the number of ranks.

An epoch is one order of blocks, cut into global batches of G = ranks * update_freq * batch size consecutive blocks:
an update uses the next G blocks, whatever the factors of G are. fairseq counts its position in batches of one rank, which
becomes wrong when the number of ranks changes; here a checkpoint stores it in blocks.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from fairseq.data import iterators

from amos_fairseq.data.masked_blocks import MaskedBlockDataset
from amos_fairseq.errors import UserError

logger = logging.getLogger(__name__)

POOL = 50  # global batches that are sorted by length together

RESET_HINT = "add --reset-dataloader (checkpoint.reset_dataloader=true) to start again with the first epoch"
BATCH_SIZE, UPDATE_FREQ = "--batch-size (dataset.batch_size)", "--update-freq (optimization.update_freq)"
LENGTH = "--tokens-per-sample (task.tokens_per_sample)"


def blocks_per_batch(
    tokens_per_block: int,
    max_tokens: int | None,
    max_sentences: int | None,
    max_positions: int | None,
    flag: str = "--tokens-per-sample",
) -> int:
    """Return ``max_sentences`` or what fits into ``max_tokens``; ``flag``: the one that sets ``tokens_per_block``."""
    limits = [limit for limit in (max_sentences, max_tokens and max_tokens // tokens_per_block) if limit is not None]
    if (max_positions or tokens_per_block) < tokens_per_block or min(limits, default=0) < 1:
        raise UserError(
            f"a batch with --batch-size {max_sentences}, --max-tokens {max_tokens} and a model of --max-positions "
            f"{max_positions} has no room for a sequence of {flag} {tokens_per_block}: give more, or shorter sequences"
        )
    return min(limits)


def equal_batches(indices: np.ndarray, batch_size: int) -> list[list[int]]:
    """Return ``indices`` in order, ``batch_size`` per batch; the last batch has the rest."""
    return [indices[start : start + batch_size].tolist() for start in range(0, len(indices), batch_size)]


def batches_by_length(lengths: Sequence[int] | np.ndarray, tokens_per_batch: int) -> Iterator[list[int]]:
    """Yield indices of ``lengths`` in batches of at most ``tokens_per_batch`` tokens with padding, or of one longer sequence.
    The longest come first; sequences of equal length keep their order."""
    lengths = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    first = 0
    while first < len(order):
        count = max(1, tokens_per_batch // int(lengths[order[first]]))
        yield order[first : first + count].tolist()
        first += count


def similar_lengths(
    indices: np.ndarray, lengths: np.ndarray, global_batch: int, generator: np.random.Generator
) -> np.ndarray:
    """Return the order in which each ``global_batch`` consecutive sequences have similar lengths, so that they need little
    padding.

    ``indices`` [N], the shuffled order of an epoch, is cut into pools of ``POOL`` global batches, each pool is sorted by
    length, and the global batches are shuffled by ``generator``. A pool is a random sample, so a sequence meets others in each
    epoch. What makes no global batch stays at the end. ``lengths``: tokens of each sequence of the data set.
    """
    used = len(indices) - len(indices) % global_batch
    pools = (indices[start : min(start + POOL * global_batch, used)] for start in range(0, used, POOL * global_batch))
    batches = [
        batch for pool in pools for batch in pool[np.argsort(lengths[pool], kind="stable")].reshape(-1, global_batch)
    ]
    shuffled = [batches[index] for index in generator.permutation(len(batches))]
    return np.concatenate([*shuffled, indices[used:]])


def whole_updates(indices: Sequence[int] | np.ndarray, global_batch: int, source: str) -> Any:
    """Return the longest prefix of an epoch's order that makes whole global batches.

    fairseq normalizes a partial last update wrongly on several ranks with update_freq > 1 (a rank without data counts
    as sample size 0 for all its micro-batches), so there is none. The order differs in every epoch, so other epochs use
    the blocks that one leaves out. The rule depends on the global batch only: the blocks are the same for any number of
    ranks.
    """
    used = len(indices) - len(indices) % global_batch
    if used == 0:
        raise UserError(
            f"{source} has {len(indices)} blocks, fewer than the {global_batch} of one update (ranks x update_freq x "
            f"batch size): give more text, or a smaller {BATCH_SIZE}, {UPDATE_FREQ} or {LENGTH}"
        )
    return indices[:used]


class BlockBatchIterator(iterators.EpochBatchIterator):
    """fairseq's epoch iterator over equal batches, in the dataset's own order, with a position in blocks.

    fairseq's second shuffle of whole batches is off, because its result depends on the batch size of a rank. Loader processes
    start again in each epoch: fairseq's persistent ones would never receive ``set_epoch`` and would repeat the masks of the
    first epoch. ``update_freq``: micro-batches per update and rank; 1 for validation.
    """

    def __init__(
        self, dataset: MaskedBlockDataset, batches: list[list[int]], *, update_freq: int, **settings: int
    ) -> None:
        super().__init__(
            dataset=dataset,
            collate_fn=dataset.collater,
            batch_sampler=batches,
            **settings,
            disable_shuffling=True,
            reuse_dataloader=False,
            persistent_workers=False,
        )
        self.update_freq = update_freq

    @property
    def blocks_per_step(self) -> int:
        return self.num_shards * len(self.frozen_batches[0])

    @property
    def global_batch(self) -> int:
        return self.blocks_per_step * self.update_freq

    def _get_iterator_for_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """Return fairseq's iterator without the reference cycle through its batch sampler: the garbage collector, which frees a
        cycle, destroys a loader's queues before the loader, and each of its processes then waits for a timeout of 5 s."""
        iterator = super()._get_iterator_for_epoch(*args, **kwargs)
        self.epoch_batch_sampler.ordered_batches = None  # no longer needed
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """Return fairseq's entries, the position in blocks, and the numbers of blocks of the corpus and of the batches."""
        state = super().state_dict()
        state["blocks_in_epoch"] = state["iterations_in_epoch"] * self.blocks_per_step
        state["blocks_in_corpus"] = len(self.dataset)
        state["blocks_per_update"] = self.global_batch
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the saved position, with as many ranks and micro-batches as there are now."""
        saved = state_dict.get("blocks_per_update", self.global_batch)
        if saved != self.global_batch and state_dict["iterations_in_epoch"] == 0:
            logger.warning(f"updates of {self.global_batch} blocks instead of {saved}, from this epoch on")
        if state_dict["iterations_in_epoch"] > 0:
            state_dict = {**state_dict, "iterations_in_epoch": self._steps_until(state_dict)}
        super().load_state_dict(state_dict)

    def _steps_until(self, state_dict: dict[str, Any]) -> int:
        """Return the position of the state in batches of this rank; refuse one that is not the end of an update here."""
        position = state_dict.get("blocks_in_epoch", 0)
        here = {"blocks_in_corpus": len(self.dataset), "blocks_per_update": self.global_batch}
        saved = {name: state_dict.get(name) for name in here}
        is_end = position > 0 and position % self.global_batch == 0
        is_end &= position < sum(len(batch) for batch in self.frozen_batches)
        if saved != here or not is_end or ("phase" in state_dict) != hasattr(self, "phase"):
            raise UserError(
                f"the checkpoint is inside epoch {state_dict['epoch']} of a run on {saved['blocks_in_corpus']} blocks with "
                f"{saved['blocks_per_update']} per update (ranks x update_freq x batch size), this one is on "
                f"{len(self.dataset)} with {self.global_batch}: keep the data, its order of phases, {LENGTH}, and the update "
                f"by {UPDATE_FREQ} and {BATCH_SIZE}, or {RESET_HINT}"
            )
        return position // self.blocks_per_step

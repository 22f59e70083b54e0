"""The batches of an epoch: equal over loader processes, ranks and splits of an update; differences between epochs."""

import numpy as np
import pytest
from block_datasets import iterate, make_dataset, random_lines, rows_by_id

from amos_fairseq.data.block_iterator import whole_updates
from amos_fairseq.errors import UserError


def test_empty_batch_of_a_rank_without_data() -> None:
    dataset = make_dataset(random_lines(60), training=False)
    assert dataset.collater([]) == {}
    num_batches = -(-len(dataset) // 2)
    ranks = 4 if num_batches % 4 else 3
    shares = [iterate(dataset, 1, num_shards=ranks, shard_id=rank) for rank in range(ranks)]
    assert sum(batch == {} for share in shares for batch in share) > 0
    together = rows_by_id([batch for share in shares for batch in share])
    assert together == rows_by_id(iterate(dataset, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("num_shards", "num_workers"), [(1, 2), (2, 1), (4, 0)])
def test_equal_for_any_ranks_and_loader_processes(num_shards: int, num_workers: int) -> None:
    """Epoch 2 in a fresh process, where fairseq's persistent loader processes would repeat epoch 1."""
    lines = random_lines(300)
    expected = rows_by_id(iterate(make_dataset(lines), epoch=2))
    batches = []
    for rank in range(num_shards):
        dataset = make_dataset(lines)
        iterate(dataset, 1, num_shards=num_shards, shard_id=rank, num_workers=num_workers)
        batches += iterate(dataset, 2, num_shards=num_shards, shard_id=rank, num_workers=num_workers)
    assert rows_by_id(batches) == expected


def test_epochs_differ_in_masks_and_order() -> None:
    dataset = make_dataset(random_lines(300))
    first, second, again = (rows_by_id(iterate(dataset, epoch)) for epoch in (1, 2, 1))
    assert first == again
    assert list(first) != list(second)
    common = first.keys() & second.keys()
    # Two samples of 5 of about 30 agree with probability 1 / 142,506.
    assert sum(first[block] == second[block] for block in common) <= 1
    assert all(first[block][0] == second[block][0] for block in common)


def test_validation_ignores_the_epoch_and_keeps_the_order() -> None:
    dataset = make_dataset(random_lines(100), training=False)
    first, third = rows_by_id(iterate(dataset, 1)), rows_by_id(iterate(dataset, 3))
    assert first == third
    assert list(first) == list(range(len(dataset)))


def test_corpus_smaller_than_one_update_is_refused() -> None:
    assert whole_updates(np.arange(17), 8, "DATA/train").tolist() == list(range(16))
    with pytest.raises(UserError, match=r"DATA/train has 7 blocks, fewer than the 8 of one update"):
        whole_updates(np.arange(7), 8, "DATA/train")

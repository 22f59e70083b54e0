"""The mixture of tasks: numbers of rows by hand, the order as one sequence, and batches."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from amos_fairseq.downstream.labeled_task import MixedTasks, rows_per_epoch


class Rows:
    """Rows of a task: tokens of the length index % 5 + 2, and the label 100 * number + index."""

    directory, source = Path("data"), "data"

    def __init__(self, number: int, count: int) -> None:
        self.number, self.sizes = number, np.arange(count) % 5 + 2

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int):
        return {"id": int(index), "tokens": torch.full((int(self.sizes[index]),), 5 + self.number)}

    def labels_of(self, rows):
        return {"target": 100 * self.number + rows}


def mixed(*counts: int, seed: int = 1, training: bool = True) -> MixedTasks:
    tasks = {f"task{number}": Rows(number, count) for number, count in enumerate(counts)}
    return MixedTasks(tasks, "train", seed, training)


def test_rows_of_an_epoch_by_hand() -> None:
    """10,000^0.25 is 10; 16^0.75 is 8, 81^0.75 is 27. By size each row is read once."""
    assert rows_per_epoch([16, 81, 10_000], 0.75) == [80, 270, 10_000]
    assert rows_per_epoch([16, 81, 10_000], 0.5) == [400, 900, 10_000]
    assert rows_per_epoch([16, 81, 10_000], 1) == [16, 81, 10_000]
    assert rows_per_epoch([16, 81, 10_000], 0) == [10_000] * 3
    assert rows_per_epoch([7], 0.75) == [7]


def test_each_row_is_read_floor_or_ceil_times_in_an_epoch_and_in_all() -> None:
    counts, tasks = (16, 81, 10_000), mixed(16, 81, 10_000)
    total: Counter = Counter()
    for epoch in (1, 2, 3, 4):
        order = tasks.order(epoch)
        assert len(order) == 80 + 270 + 10_000
        found = Counter(order.tolist())
        total.update(found)
        for start, count, drawn in zip((0, 16, 97), counts, (80, 270, 10_000), strict=True):
            for times, drawn_so_far in ((found, drawn), (total, epoch * drawn)):
                own = [times[row] for row in range(start, start + count)]
                assert sum(own) == drawn_so_far
                assert set(own) <= {drawn_so_far // count, -(-drawn_so_far // count)}
    assert tasks.order(1).tolist() != tasks.order(2).tolist()
    assert tasks.order(2).tolist() == mixed(16, 81, 10_000).order(2).tolist()
    assert tasks.order(2).tolist() != mixed(16, 81, 10_000, seed=2).order(2).tolist()
    assert len({int(row >= 16) for row in tasks.order(1)[:1000]}) == 2, "tasks are mixed"


@pytest.mark.parametrize("global_batch", [1, 7, 32, 96, 97])
def test_epochs_are_one_sequence_of_whole_updates(global_batch: int) -> None:
    """16 and 81 rows: 24 + 81 rows an epoch. The rest of an epoch begins the next one; the last rest is left out."""
    tasks, found = mixed(16, 81), []
    in_epoch = 24 + 81
    for epoch in range(1, 8):
        tasks.set_epoch(epoch)
        rows = tasks.whole_updates(global_batch)
        assert len(rows) % global_batch == 0
        found.append(rows)
        assert sum(map(len, found)) == epoch * in_epoch // global_batch * global_batch
    expected = np.concatenate([tasks.order(epoch) for epoch in range(1, 8)])
    joined = np.concatenate(found)
    np.testing.assert_array_equal(joined, expected[: len(joined)])


def test_a_batch_has_the_labels_of_each_task() -> None:
    tasks = mixed(3, 4, 2)
    batch = tasks.collater([tasks[index] for index in (8, 0, 6, 2)])
    assert batch["id"].tolist() == [8, 0, 6, 2]
    assert batch["net_input"]["lengths"] == [3, 2, 5, 4]
    tokens = [[7, 7, 7, 1, 1], [5, 5, 1, 1, 1], [6, 6, 6, 6, 6], [5, 5, 5, 5, 1]]
    assert batch["net_input"]["src_tokens"].tolist() == tokens
    places = {name: rows.tolist() for name, rows in batch["net_input"]["rows_of_heads"].items()}
    assert places == {"task0": [1, 3], "task1": [2], "task2": [0]}
    targets = {name: labels["target"].tolist() for name, labels in batch["labels"].items()}
    assert targets == {"task0": [0, 2], "task1": [103], "task2": [201]}
    assert [own["id"].tolist() for own in batch["labels"].values()] == [[0, 2], [3], [1]]
    alone = tasks.collater([tasks[4]])
    assert [rows.tolist() for rows in alone["net_input"]["rows_of_heads"].values()] == [[], [0], []]

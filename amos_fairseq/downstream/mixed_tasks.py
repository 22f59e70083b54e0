"""The rows of several tasks in one data set: how many of each an epoch has, and in which order."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amos_fairseq.data.seeding import Purpose, keyed_generator
from amos_fairseq.downstream.labeled_task import LabeledSequences
from amos_fairseq.errors import UserError

SAMPLING_EXPONENT = 0.75  # thesis, section 3.3, from Bowman et al. (2018)


def rows_per_epoch(sizes: Sequence[int], exponent: float) -> list[int]:
    """Return n = |D_max|^(1-e) |D|^e, rounded, for tasks of |D| rows and ``exponent`` e: the largest is read once an epoch.

    So P(task) is proportional to |D|^e (thesis, section 3.3: 0.75); there tasks are drawn at random, here in fixed numbers.
    """
    if not 0 <= exponent <= 1:
        raise UserError(f"--sampling-exponent {exponent:g}: give a number from 0 (equal shares) to 1 (shares by size)")
    largest = max(sizes)
    return [round(largest ** (1 - exponent) * size**exponent) for size in sizes]


def note_on_shares(exponent: float) -> tuple[str, ...]:
    """Return the footnote of scores with another exponent than the thesis has."""
    if exponent == SAMPLING_EXPONENT:
        return ()
    return (f"a task of N rows has a share of the training proportional to N^{exponent:g} (--sampling-exponent)",)


def check_epoch(num_rows: int, update: int) -> None:
    """Refuse an epoch of several tasks that is smaller than an update of so many rows."""
    if num_rows < update:
        raise UserError(f"an epoch has {num_rows} rows, fewer than the {update} of one update: lower --batch-size")


class MixedTasks(LabeledSequences):
    """The rows of several tasks, one task after the other.

    In an epoch each row of a task of |D| rows is read floor(n / |D|) or ceil(n / |D|) times, for n of :func:`rows_per_epoch`.
    The rows that are read once more follow a permutation of the task from epoch to epoch, so that the counts of two rows of a
    task never differ by more than one. The rows of all tasks are shuffled together (thesis, section 3.2.1). All epochs make one
    sequence, which is cut into updates: the rest of an epoch begins the first update of the next one.

    Args:
        tasks: their rows by the name of their head; the order matters.
        split: for messages.
        seed: of the order.
        exponent: of :func:`rows_per_epoch`.
    """

    def __init__(
        self,
        tasks: Mapping[str, LabeledSequences],
        split: str,
        seed: int,
        training: bool,
        exponent: float = SAMPLING_EXPONENT,
    ) -> None:
        directory = next(iter(tasks.values())).directory
        super().__init__(directory, split, seed, training)
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
        """Add :meth:`rows_of_heads` to ``net_input``; and ``labels``, for each task what its ``labels_of`` these rows returns,
        their ``id`` [b] int64 among the rows of the task, and the number of these, ``num_rows``."""
        places = batch["net_input"]["rows_of_heads"] = self.rows_of_heads(batch)
        batch["labels"] = {}
        for (name, rows), start in zip(self.tasks.items(), self.starts.tolist(), strict=True):
            in_task = batch["id"][places[name]] - start
            batch["labels"][name] = rows.labels_of(in_task) | {"id": in_task, "num_rows": len(rows)}

"""Worker processes: results in order, errors of a worker, and a worker that the system kills."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder

from amos_fairseq.errors import UserError
from amos_fairseq.text.encoding import (
    COUNTS,
    BinarizedFile,
    KilledWorkerError,
    in_own_process,
    join_encoded,
    process_pool,
)


def fail_at_three(number: int) -> int:
    if number == 3:
        raise UserError("three")
    return os.getpid()


def kill_this(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_results_are_in_order_and_small_work_needs_no_process() -> None:
    with process_pool(2, int) as two, process_pool(1, int) as one:
        assert list(two(str, range(20))) == list(map(str, range(20)))
        assert os.getpid() not in two(fail_at_three, range(3))
        assert set(one(fail_at_three, range(3))) == {os.getpid()}
    assert in_own_process(fail_at_three, 1) != os.getpid()


def test_an_error_of_a_worker_is_raised_here_and_ends_the_others() -> None:
    with pytest.raises(UserError, match=r"^three$"), process_pool(2, int) as map_in_order:
        list(map_in_order(fail_at_three, range(5)))
    with pytest.raises(KilledWorkerError, match="killed by the system, usually because memory is full"):
        in_own_process(kill_this, 0)


def test_a_file_of_which_nothing_is_left_is_counted(tmp_path: Path) -> None:
    for name, ids in (("0.npz", [5, 6, 2]), ("1.npz", [])):
        lengths = [len(ids)] if ids else []
        counts = [1] * len(COUNTS) if ids else [0] * (len(COUNTS) - 1) + [7]
        np.savez(tmp_path / name, ids=np.array(ids, np.int32), lengths=np.array(lengths, np.int64), counts=counts)
    totals = join_encoded([tmp_path / "0.npz", tmp_path / "1.npz"], tmp_path / "train", 9)
    assert totals == dict.fromkeys(COUNTS, 1) | {COUNTS[-1]: 8}


@pytest.mark.parametrize("lines", [[], [[5, 2]], [[5, 6, 2], [2], [70_000, 2]]])
def test_the_index_is_that_of_fairseq(lines: list[list[int]], tmp_path: Path) -> None:
    """Its writer calls ``_get_pointers``, which BinarizedFile replaces."""
    builder = MMapIndexedDatasetBuilder(tmp_path / "expected.bin", np.int32)
    with BinarizedFile(tmp_path / "found", None) as file:
        for line in lines:
            builder.add_item(torch.tensor(line))
            file.add_line(line)
    builder.finalize(tmp_path / "expected.idx")
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"found.{suffix}").read_bytes() == (tmp_path / f"expected.{suffix}").read_bytes()
    with MMapIndexedDataset.Index.writer(tmp_path / "other.idx", np.int32) as index:
        index._get_pointers = lambda sizes: [7 for _ in sizes]
        index.write([1])
    assert (tmp_path / "other.idx").read_bytes()[-8:] == (7).to_bytes(8, "little")

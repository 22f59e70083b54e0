"""Worker processes: results in order, errors of a worker, and a worker that the system kills."""

import os
import signal

import pytest

from amos_fairseq.errors import UserError
from amos_fairseq.text.processes import KilledWorkerError, in_own_process, process_pool


def fail_at_three(number: int) -> int:
    if number == 3:
        raise UserError("three")
    return os.getpid()


def kill_this(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_results_are_in_order_and_few_are_computed_ahead() -> None:
    taken: list[int] = []
    tasks = (taken.append(number) or number for number in range(20))
    with process_pool(2) as in_order:
        for number, result in enumerate(in_order(str, tasks)):
            assert result == str(number)
            assert len(taken) <= number + 4


def test_small_work_needs_no_process() -> None:
    with process_pool(2) as two, process_pool(1) as one:
        assert set(two(fail_at_three, [1])) == set(one(fail_at_three, range(3))) == {os.getpid()}
    assert in_own_process(fail_at_three, 1) != os.getpid()


def test_an_error_of_a_worker_is_raised_here_and_ends_the_others() -> None:
    with pytest.raises(UserError, match=r"^three$"), process_pool(2) as in_order:
        list(in_order(fail_at_three, range(5)))
    with pytest.raises(KilledWorkerError, match="killed by the system, usually because memory is full"):
        in_own_process(kill_this, 0)

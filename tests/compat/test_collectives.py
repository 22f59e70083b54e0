"""A value, or an error, of the first rank reaches every rank: two connected ranks, and a process alone."""

import pytest
from rank_functions import succeed_on_two_ranks

from amos_fairseq.compat.collectives import from_first_rank, raise_on_every_rank
from amos_fairseq.errors import COLLAPSED, CollapsedError, UserError


def test_one_process() -> None:
    assert from_first_rank(lambda: {"path": "last.pt"}) == {"path": "last.pt"}
    raise_on_every_rank(None)
    for call in from_first_rank:
        with pytest.raises(ZeroDivisionError):
            call(lambda: 1 / 0)
    with pytest.raises(CollapsedError, match=r"^flat$"):
        raise_on_every_rank("flat", CollapsedError)


class CannotBePickled(OSError):
    """As exceptions of libraries that hold a lock or a file."""

    def __reduce__(self) -> None:
        raise TypeError("cannot pickle")


def fail(rank: int, error: Exception) -> None:
    """The action of the first rank; the others must not call it."""
    assert rank == 0
    raise error


def every_way_to_end(rank: int) -> None:
    """After each error both ranks still meet in the next operation: none is a step behind."""
    errors = (UserError("no such file"), CollapsedError("flat"), CannotBePickled("gone"), ValueError("a bug"))
    for number, error in enumerate(errors):
        for call in from_first_rank:
            with pytest.raises(SystemExit if rank else type(error)) as ended:
                call(lambda error=error: fail(rank, error))
            if rank:
                assert ended.value.code == (COLLAPSED if number == 1 else 1)
            else:
                assert ended.value is error
        assert from_first_rank(lambda number=number: (rank, number)) == (0, number)
    with pytest.raises(SystemExit if rank else CollapsedError) as ended:
        raise_on_every_rank(None if rank else "flat", CollapsedError)
    assert rank == 0 or ended.value.code == COLLAPSED
    raise_on_every_rank("only rank 1 found this" if rank else None)
    called = []
    from_first_rank(lambda: called.append(rank))
    assert called == ([] if rank else [0])


@pytest.mark.slow
def test_an_error_of_the_first_rank_ends_both() -> None:
    succeed_on_two_ranks(every_way_to_end)

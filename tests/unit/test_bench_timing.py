"""Statistics of steps by hand numbers, the order of a contest, and the machine's peaks against their definition."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from amos_fairseq.bench import machine, timing
from amos_fairseq.bench.timing import Spread, alternate, best_seconds, speed_ratio, tokens_per_second

CPU = torch.device("cpu")


def test_tokens_per_second_are_those_of_each_step() -> None:
    """100 tokens in 2, 1, 4 and 5 seconds: 50, 100, 25, 20 a second; the median is halfway between 25 and 50."""
    assert tokens_per_second([2.0, 1.0, 4.0, 5.0], 100) == Spread(37.5, 20.0, 100.0)


def test_ratios_are_taken_step_by_step() -> None:
    """A machine that becomes 10 times slower for one round changes no ratio: 3/1, 20/10, 1/1."""
    assert speed_ratio([1.0, 10.0, 1.0], [3.0, 20.0, 1.0]) == Spread(2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="zip"):
        speed_ratio([1.0, 1.0], [1.0])


def test_contestants_take_turns_on_equal_batches() -> None:
    seen: list[tuple[str, int]] = []

    def contestant(name: str) -> Any:
        return SimpleNamespace(name=name, step=lambda batch: seen.append((name, batch["id"])))

    told: list[str] = []
    seconds = alternate([contestant("A"), contestant("B")], [{"id": 0}, {"id": 1}], 3, CPU, told.append)
    assert seen == [("A", 0), ("B", 0), ("A", 1), ("B", 1), ("A", 0), ("B", 0)]
    assert [len(own) for own in seconds] == [3, 3]
    assert told == ["step 1 of 3", "step 2 of 3", "step 3 of 3"]


def test_a_step_is_timed_whole() -> None:
    """A step that sleeps for 20 ms takes at least as long, the empty one beside it less."""
    sleeper = SimpleNamespace(name="sleeper", step=lambda batch: time.sleep(0.02))
    idler = SimpleNamespace(name="idler", step=lambda batch: None)
    slow, fast = alternate([sleeper, idler], [{}], 3, CPU, lambda text: None)
    assert min(slow) >= 0.02 > min(fast)


@pytest.mark.parametrize(("budget", "repetitions"), [(0.0, 3), (7.0, 4)])
def test_the_best_of_as_many_repetitions_as_fit(
    budget: float, repetitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 + 1 + 2 seconds of the least three, one more up to 7 and beyond; and a first call that nobody times."""
    calls, seconds = [], iter([3.0, 1.0, 2.0, 5.0, 0.5])

    def timed(call: Any, device: torch.device) -> float:
        call()
        return next(seconds)

    monkeypatch.setattr(timing, "seconds_of", timed)
    assert best_seconds(lambda: calls.append(1), CPU, budget) == 1.0
    assert len(calls) == 1 + repetitions


def test_peaks_are_operations_and_bytes_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every repetition declared to last 0.5 s: 2 n^3 operations of the larger product, and a copy's two ways."""
    calls: list[torch.Tensor] = []

    def half_a_second(call: Any, device: torch.device, budget: float) -> float:
        calls.append(call())
        return 0.5

    monkeypatch.setattr(machine, "best_seconds", half_a_second)
    assert machine.matmul_peak(CPU, torch.bfloat16, edges=(2, 4)) == 2 * 4**3 / 0.5
    assert [(tuple(product.shape), product.dtype) for product in calls] == [
        ((2, 2), torch.bfloat16),
        ((4, 4), torch.bfloat16),
    ]
    assert machine.memory_bandwidth(CPU, size=100) == 2 * 100 / 0.5

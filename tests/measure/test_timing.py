"""Statistics of steps by hand, the order of a contest, and the peaks of a machine against their definition."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from amos_fairseq.measure import measurement
from amos_fairseq.measure.measurement import (
    MedianAndRange,
    alternate,
    best_seconds,
    speed_ratio,
    sustained_seconds,
    tokens_per_second,
)

CPU = torch.device("cpu")


def test_tokens_per_second_are_those_of_each_step() -> None:
    """100 tokens in 2, 1, 4 and 5 seconds: 50, 100, 25, 20 a second; the median is halfway between 25 and 50."""
    assert tokens_per_second([2.0, 1.0, 4.0, 5.0], 100) == MedianAndRange(37.5, 20.0, 100.0)


def test_ratios_are_taken_step_by_step() -> None:
    """A machine that becomes 10 times slower for one round changes no ratio: 3/1, 20/10, 1/1."""
    assert speed_ratio([1.0, 10.0, 1.0], [3.0, 20.0, 1.0]) == MedianAndRange(2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="zip"):
        speed_ratio([1.0, 1.0], [1.0])


def test_contestants_take_turns_on_equal_batches() -> None:
    seen: list[tuple[str, int]] = []

    def contestant(name: str) -> Any:
        return SimpleNamespace(name=name, step=lambda batch: seen.append((name, batch["id"])))

    reported: list[str] = []
    seconds = alternate([contestant("A"), contestant("B")], [{"id": 0}, {"id": 1}], 3, CPU, reported.append)
    assert seen == [("A", 0), ("B", 0), ("A", 1), ("B", 1), ("A", 0), ("B", 0)]
    assert [len(own) for own in seconds] == [3, 3]
    assert reported == ["step 1 of 3", "step 2 of 3", "step 3 of 3"]


def test_seconds_include_the_whole_step() -> None:
    """A step that sleeps for 20 ms takes at least as long, the empty one beside it less."""
    sleeper = SimpleNamespace(name="sleeper", step=lambda batch: time.sleep(0.02))
    idler = SimpleNamespace(name="idler", step=lambda batch: None)
    slow, fast = alternate([sleeper, idler], [{}], 3, CPU, lambda text: None)
    assert min(slow) >= 0.02 > min(fast)


@pytest.mark.parametrize(("budget", "repetitions"), [(0.0, 3), (7.0, 4)])
def test_best_of_the_repetitions_in_a_budget(budget: float, repetitions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least three, of 3 + 1 + 2 seconds; a fourth exceeds 7 seconds; and a first call that is not timed."""
    calls, seconds = [], iter([3.0, 1.0, 2.0, 5.0, 0.5])

    def timed(call: Any, device: torch.device) -> float:
        call()
        return next(seconds)

    monkeypatch.setattr(measurement, "seconds_of", timed)
    assert best_seconds(lambda: calls.append(1), CPU, budget) == 1.0
    assert len(calls) == 1 + repetitions


class Clock:
    """A clock that only ``clock.takes(seconds)`` advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.synchronizations = 0.0, 0
        monkeypatch.setattr(measurement.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(measurement, "synchronize", self.synchronize)

    def takes(self, seconds: float) -> None:
        self.now += seconds

    def synchronize(self, device: torch.device) -> None:
        self.synchronizations += 1


def test_sustained_time_is_a_median(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of 1 s, except one of 0.01 s and one of 100 s among the six that count, which do not change the result."""
    clock, calls = Clock(monkeypatch), []
    outliers = {7: 0.01, 8: 100.0}

    def call() -> None:
        calls.append(1)
        clock.takes(outliers.get(len(calls), 1.0))

    assert sustained_seconds(call, CPU, budget=10.0, min_bursts=6) == 1.0
    assert len(calls) > 8


def test_first_half_of_a_sustained_time_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that needs 0.5 s a call until 6 s of a budget of 10 s are over, and then 1 s, at its power limit.

    By hand: an uncounted call, 12 of 0.5 s (those from 5 s on count: two) and 4 of 1 s: the median of six is 1.
    """
    clock, calls = Clock(monkeypatch), []

    def call() -> None:
        calls.append(1)
        clock.takes(0.5 if len(calls) <= 13 else 1.0)

    assert sustained_seconds(call, CPU, budget=10.0) == 1.0
    assert len(calls) == 1 + 12 + 4


def test_short_calls_are_timed_in_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of 2**-10 s, and 2**-7 s for each synchronization, which is eight calls' time: of a burst it is a part.

    Bursts grow to 32 calls, 2**-5 s and the two synchronizations around it, of which the clock sees the second.
    """
    clock = Clock(monkeypatch)

    def synchronize(device: torch.device) -> None:
        clock.synchronizations += 1
        clock.takes(2**-7)

    monkeypatch.setattr(measurement, "synchronize", synchronize)
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        clock.takes(2**-10)

    assert measurement.BURST_SECONDS == 0.03 < 2**-5
    assert sustained_seconds(call, CPU, budget=1.0) == (32 * 2**-10 + 2**-7) / 32
    assert clock.synchronizations < len(calls) / 10


def test_small_budget_gives_three_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seconds = Clock(monkeypatch), iter([9.0, 3.0, 1.0, 2.0])
    assert sustained_seconds(lambda: clock.takes(next(seconds)), CPU, budget=0.0) == 2.0


def test_peaks_are_operations_and_bytes_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with 160 FLOP/s for products of 2, 256 for those of 4, too slow for 32; a copy of half a second."""
    clock, products, copies = Clock(monkeypatch), [], []

    def product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        products.append((left, right, out))
        clock.takes({2: 16 / 160, 4: 128 / 256}[len(left)])

    monkeypatch.setattr(torch, "mm", product)
    assert measurement.matmul_peak(CPU, torch.bfloat16, edges=(2, 4, 32)) == 256
    assert {tuple(matrix.shape) for matrices in products for matrix in matrices} == {(2, 2), (4, 4)}
    assert {matrix.dtype for matrices in products for matrix in matrices} == {torch.bfloat16}

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        copies.append(source)
        clock.takes(0.5)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    assert measurement.memory_bandwidth(CPU, size=800) == 2 * 800 / 0.5
    assert {source.nbytes for source in copies} == {800}


def test_matrices_are_random_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean 0 and standard deviation 1, each within 5 of its own standard errors (probability 6e-7 to be outside)."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(measurement, "sustained_seconds", lambda call, device, budget: 1.0)
    monkeypatch.setattr(torch, "empty_like", lambda matrix: seen.append(matrix) or torch.zeros_like(matrix))
    measurement.matmul_seconds(256, CPU, torch.float32)
    (matrix,) = seen
    assert abs(matrix.mean()) < 5 / 256
    assert abs(matrix.std() - 1) < 5 / (2**0.5 * 256)
    measurement.memory_bandwidth(CPU, size=2**16)
    assert seen[1].unique().numel() == 2**13  # 2**13 different random values of 64 bits

"""Seconds of steps that alternate between contestants, and what they say."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

Batch = dict[str, Any]
Progress = Callable[[str], None]
# Calls that are timed together: long against the microseconds of a launch and the tens of microseconds of a synchronisation.
BURST_SECONDS = 0.03


class Contestant(Protocol):
    """Something that trains.

    Attributes:
        name: of its row.
        description: what it is, in one sentence.
        module: everything trainable.
    """

    name: str
    description: str
    module: nn.Module

    def step(self, batch: Batch) -> None:
        """One update of the parameters with ``batch``, which lies on the CPU as a loader gives it."""


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of several numbers."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Spread":
        return cls(statistics.median(numbers), min(numbers), max(numbers))

    def as_json(self) -> dict[str, float]:
        return {"median": self.median, "min": self.least, "max": self.most}


def tokens_per_second(seconds: Sequence[float], tokens_per_step: int) -> Spread:
    return Spread.of([tokens_per_step / second for second in seconds])


def speed_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """How many times as fast the first is, step by step: the i-th steps of both ran one after the other."""
    return Spread.of([their / our for our, their in zip(ours, theirs, strict=True)])


def wait_for(device: torch.device) -> None:
    """Until the device has done everything that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    wait_for(device)
    start = time.perf_counter()
    call()
    wait_for(device)
    return time.perf_counter() - start


def best_seconds(call: Callable[[], Any], device: torch.device, budget: float, least_repeats: int = 3) -> float:
    """The fastest of as many repetitions as fit into ``budget`` seconds, after one that does not count."""
    call()
    best, spent, repeats = float("inf"), 0.0, 0
    while repeats < least_repeats or spent < budget:
        seconds = seconds_of(call, device)
        best, spent, repeats = min(best, seconds), spent + seconds, repeats + 1
    return best


def sustained_seconds(call: Callable[[], Any], device: torch.device, budget: float, least_bursts: int = 3) -> float:
    """Median seconds of one ``call`` when it is repeated without a pause for ``budget`` seconds.

    Calls are timed in bursts with one synchronisation each: a burst of one call at first, of twice as many while bursts are
    shorter than :data:`BURST_SECONDS`. Bursts that start in the first half of the budget do not count, because a processor
    lowers its clock to its power limit only after some hundred milliseconds; at least ``least_bursts`` count. The median
    does not depend on one burst that was too short or that another program slowed down.
    """
    call()
    counted: list[float] = []
    spent, repeats = 0.0, 1
    while spent < budget or len(counted) < least_bursts:
        seconds = seconds_of(lambda number=repeats: [call() for _ in range(number)], device)
        if spent >= budget / 2:
            counted.append(seconds / repeats)
        spent += seconds
        if seconds < BURST_SECONDS:
            repeats *= 2
    return statistics.median(counted)


def alternate(
    contestants: Sequence[Contestant], batches: Sequence[Batch], steps: int, device: torch.device, progress: Progress
) -> list[list[float]]:
    """Seconds of ``steps`` steps of each contestant, in rounds of one step each: A B C A B C ...

    What disturbs the machine for longer than a step so disturbs all alike. In a round all see the same batch.
    """
    seconds: list[list[float]] = [[] for _ in contestants]
    for number in range(steps):
        progress(f"step {number + 1} of {steps}")
        batch = batches[number % len(batches)]
        for own, contestant in zip(seconds, contestants, strict=True):
            own.append(seconds_of(lambda c=contestant, b=batch: c.step(b), device))
    return seconds

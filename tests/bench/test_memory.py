"""Bytes of live tensors against sums by hand."""

import torch
from torch import Tensor

from amos_fairseq.bench.measurement import LiveBytes, held_bytes, step_peak

KIB = 1024  # 256 float32 numbers


def numbers(count: int = 256, **settings) -> Tensor:
    return torch.ones(count, **settings)


def test_what_lives_counts_once_and_as_long_as_it_lives() -> None:
    before = numbers()
    with LiveBytes() as live:
        first = numbers()
        assert live.now == KIB
        view = first.view(16, 16)[3:]
        first.add_(before)
        before.mul_(2)
        assert live.now == KIB  # views share, results in place are no new tensors
        second = first + before
        assert live.now == 2 * KIB
        del first
        assert live.now == 2 * KIB  # the view keeps it
        del view
        assert live.now == KIB
        del second
        assert (live.now, live.peak, live.largest) == (0, 2 * KIB, KIB)


def test_what_autograd_keeps_counts() -> None:
    """exp keeps its result for the backward pass, the sum keeps nothing; then come gradients of result, exp and input."""
    leaf = numbers(requires_grad=True)
    with LiveBytes() as live:
        loss = leaf.exp().sum()
        assert live.now == KIB + 4
        loss.backward()
        assert live.now == KIB + 4  # the gradient of the leaf; what was kept is gone
    assert leaf.grad is not None


def test_the_peak_of_a_step_is_its_largest_moment() -> None:
    """Three parts of 4 KiB live together, then one of 8 KiB alone."""

    def step() -> None:
        parts = [numbers(4 * 256) for _ in range(3)]
        parts.clear()
        numbers(8 * 256)

    assert step_peak(step, torch.device("cpu")) == 12 * KIB


def test_held_bytes_are_those_of_storages() -> None:
    weight = numbers()
    assert held_bytes(weight, weight.view(16, 16), numbers(dtype=torch.bfloat16)) == KIB + KIB // 2

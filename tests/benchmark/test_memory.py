"""Bytes of live tensors against sums by hand."""

import torch
from torch import Tensor
from training_step import LiveBytes, held_bytes, step_peak

KIB = 1024  # 256 float32 values


def values(count: int = 256, **settings) -> Tensor:
    return torch.ones(count, **settings)


def test_live_tensors_count_once() -> None:
    before = values()
    with LiveBytes() as live:
        first = values()
        assert live.now == KIB
        view = first.view(16, 16)[3:]
        first.add_(before)
        before.mul_(2)
        assert live.now == KIB  # views and in-place results are not new tensors
        second = first + before
        assert live.now == 2 * KIB
        del first
        assert live.now == 2 * KIB  # the view keeps it
        del view
        assert live.now == KIB
        del second
        assert (live.now, live.peak, live.largest) == (0, 2 * KIB, KIB)


def test_tensors_saved_by_autograd_count() -> None:
    """exp saves its result for the backward pass, the sum saves nothing."""
    leaf = values(requires_grad=True)
    with LiveBytes() as live:
        loss = leaf.exp().sum()
        assert live.now == KIB + 4
        loss.backward()
        assert live.now == KIB + 4  # the gradient of the leaf; the saved result is freed
    assert leaf.grad is not None


def test_peak_of_a_step() -> None:
    """Three tensors of 4 KiB at once, then one of 8 KiB alone."""

    def step() -> None:
        parts = [values(4 * 256) for _ in range(3)]
        parts.clear()
        values(8 * 256)

    assert step_peak(step, torch.device("cpu")) == 12 * KIB


def test_held_bytes_are_those_of_storages() -> None:
    weight = values()
    assert held_bytes(weight, weight.view(16, 16), values(dtype=torch.bfloat16)) == KIB + KIB // 2

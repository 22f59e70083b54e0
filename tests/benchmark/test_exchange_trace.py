"""Exchanges and backward passes of a synthetic Chrome trace with values by hand."""

from typing import Any

import pytest
from benchmark.rank_traces import BACKWARD, EXCHANGE, NODE, UPDATE, updates_of


def event(name: str, start: float, end: float, kind: str = "float", shape: tuple[int, ...] = (1,)) -> dict[str, Any]:
    """Milliseconds here, microseconds in a trace."""
    arguments = {"Input type": [kind], "Input Dims": [list(shape)]}
    return {"ph": "X", "name": name, "ts": 1e3 * start, "dur": 1e3 * (end - start), "args": arguments}


def synthetic_update(start: float) -> list[dict[str, Any]]:
    """Two micro-batches. The second backward pass computes from 40 to 60 and ends at 70, when all sums are received."""
    events = [
        event(UPDATE, 0, 100),
        event(BACKWARD, 10, 20),
        event(f"{NODE}: MmBackward0", 11, 20),
        event(BACKWARD, 40, 70),
        event(f"{NODE}: MmBackward0", 41, 50),
        event(f"{NODE}: torch::autograd::AccumulateGrad", 55, 60),
        event(EXCHANGE, 45, 50, "c10::BFloat16", (1000,)),
        event(EXCHANGE, 48, 56, "c10::BFloat16", (50, 20)),  # overlaps with the first, in another thread
        event(EXCHANGE, 58, 69, "c10::BFloat16", (3, 100)),
        event(EXCHANGE, 75, 77, "double", (7,)),
        event(EXCHANGE, 80, 81, "double", (2,)),
    ]
    return [each | {"ts": each["ts"] + 1e3 * start} for each in events]


def test_an_update_by_hand() -> None:
    # A trace is not sorted by time.
    first, second = updates_of([*synthetic_update(500), *synthetic_update(0)][::-1])
    assert (first.span.start, second.span.start) == pytest.approx((0, 0.5))
    for update in (first, second):
        backward = [(span.start - update.span.start, span.end - update.span.start) for span in update.backward]
        assert backward == [pytest.approx((0.01, 0.02)), pytest.approx((0.04, 0.06))]
        assert update.waiting == pytest.approx(0.01)
        assert [exchange.num_bytes for exchange in update.gradients] == [2000, 2000, 600]
        assert [exchange.num_bytes for exchange in update.others] == [56, 16]
        assert update.exchanging == pytest.approx(0.011 + 0.011)  # 45 to 56, 58 to 69
        assert update.hidden == pytest.approx(0.011 + 0.002)
        assert update.overlap == pytest.approx(13 / 22)

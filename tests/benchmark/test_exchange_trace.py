"""Exchanges and backward passes of a synthetic Chrome trace with values by hand."""

from typing import Any

import pytest
from benchmark.rank_traces import (
    BACKWARD,
    EXCHANGE,
    NODE,
    UPDATE,
    Span,
    bytes_of,
    common,
    median_update,
    merged,
    updates_of,
)


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


def test_spans() -> None:
    spans = [Span(5, 6), Span(0, 2), Span(1, 3), Span(3, 4)]
    assert merged(spans) == [Span(0, 4), Span(5, 6)]
    assert common(Span(0, 4), Span(3, 9)) == 1
    assert common(Span(0, 4), Span(5, 6)) == 0


def test_bytes_by_type_and_shape() -> None:
    assert bytes_of(event(EXCHANGE, 0, 1, "double", (4, 2))) == 64
    with pytest.raises(KeyError):
        bytes_of(event(EXCHANGE, 0, 1, "a new type", (4, 2)))


def test_median_update() -> None:
    events = []
    for number, length in enumerate((30, 10, 20, 40)):
        update, *rest = synthetic_update(1000 * number)
        events += [update | {"dur": update["dur"] + 1e3 * length}, *rest]
    assert median_update(updates_of(events)).span.seconds == pytest.approx(0.12)

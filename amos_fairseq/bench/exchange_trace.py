"""When ranks exchange gradients, read from a Chrome trace of ``torch.profiler``, as :mod:`amos_fairseq.bench.ranks` makes it.

Gloo marks each sum over ranks with its own start and end, in a thread beside the one that computes. fairseq marks every
backward pass; DistributedDataParallel lets it end only when the last sum is there, so where the gradients were complete
is told by the last node of autograd inside it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

UPDATE = "update"  # marked by the program that is traced
BACKWARD = "backward"  # marked by fairseq's task
EXCHANGE = "gloo:all_reduce"
NODE = "autograd::engine::evaluate_function"
BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4}


class Span(NamedTuple):
    """Seconds on the trace's clock."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def holds(self, moment: float) -> bool:
        return self.start <= moment <= self.end


class Exchange(NamedTuple):
    """A sum over ranks; its time includes waiting for a rank that is not there yet."""

    span: Span
    num_bytes: int


@dataclass(frozen=True)
class TracedUpdate:
    """An update of one rank.

    Attributes:
        span: from its first forward pass to its statistics.
        backward: of each micro-batch, until its gradients were complete.
        waiting: seconds that the last backward pass went on after that, for sums that were not there yet.
        gradients: sums of gradients, in the order of their start.
        others: every other sum: statistics, gradient norms.
    """

    span: Span
    backward: list[Span]
    waiting: float
    gradients: list[Exchange]
    others: list[Exchange]

    @property
    def num_bytes(self) -> int:
        """Bytes of gradients that this rank gave."""
        return sum(exchange.num_bytes for exchange in self.gradients)

    @property
    def exchanging(self) -> float:
        """Seconds in which gradients were exchanged; sums that run beside each other count once."""
        return sum(span.seconds for span in merged([exchange.span for exchange in self.gradients]))

    @property
    def hidden(self) -> float:
        """Of these, the seconds in which a backward pass still computed gradients."""
        spans = merged([exchange.span for exchange in self.gradients])
        return sum(common(span, backward) for span in spans for backward in self.backward)

    @property
    def overlap(self) -> float:
        """The share of the exchange that lies inside the backward pass."""
        return self.hidden / self.exchanging if self.gradients else math.nan


def merged(spans: Sequence[Span]) -> list[Span]:
    """The same moments as spans that do not touch each other."""
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and span.start <= joined[-1].end:
            joined[-1] = Span(joined[-1].start, max(joined[-1].end, span.end))
        else:
            joined.append(span)
    return joined


def common(one: Span, other: Span) -> float:
    """Seconds that lie in both."""
    return max(0.0, min(one.end, other.end) - max(one.start, other.start))


def median_update(updates: Sequence[TracedUpdate]) -> TracedUpdate:
    """The one of median length; of an even number the shorter of the middle two."""
    return sorted(updates, key=lambda update: update.span.seconds)[(len(updates) - 1) // 2]


def read_updates(path: Path) -> list[TracedUpdate]:
    """The updates of a trace, in order; the trace has to be recorded with shapes."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return updates_of([event for event in events if event.get("ph") == "X"])


def updates_of(events: Sequence[dict[str, Any]]) -> list[TracedUpdate]:
    """From complete events ("ph": "X") of a Chrome trace, whose times are microseconds."""
    backward = named(events, BACKWARD)
    nodes = [span_of(event) for event in events if event["name"].startswith(NODE)]
    exchanges = [Exchange(span_of(event), bytes_of(event)) for event in events if event["name"] == EXCHANGE]
    exchanges.sort()
    return [update_in(span, backward, nodes, exchanges) for span in named(events, UPDATE)]


def update_in(
    update: Span, backward: Sequence[Span], nodes: Sequence[Span], exchanges: Sequence[Exchange]
) -> TracedUpdate:
    own = [span for span in backward if update.holds(span.start)]
    computing = [Span(span.start, max(node.end for node in nodes if span.holds(node.start))) for span in own]
    of_update = [exchange for exchange in exchanges if update.holds(exchange.span.start)]
    of_gradients = [exchange for exchange in of_update if any(span.holds(exchange.span.start) for span in own)]
    return TracedUpdate(
        span=update,
        backward=computing,
        waiting=own[-1].end - computing[-1].end,
        gradients=of_gradients,
        others=[exchange for exchange in of_update if exchange not in of_gradients],
    )


def named(events: Sequence[dict[str, Any]], name: str) -> list[Span]:
    return sorted(span_of(event) for event in events if event["name"] == name)


def span_of(event: dict[str, Any]) -> Span:
    return Span(event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)


def bytes_of(event: dict[str, Any]) -> int:
    """Of the tensors that an event was given."""
    arguments = event["args"]
    return sum(
        BYTES[kind] * math.prod(shape)
        for kind, shape in zip(arguments["Input type"], arguments["Input Dims"], strict=True)
    )

#!/usr/bin/env python3
"""Trace several ranks on one machine: what they exchange in an update, and how much of it the backward pass hides.

    bash examples/benchmark/ranks.sh OUT amos_small

Each rank writes a Chrome trace for each number of micro-batches; the first rank also writes a Markdown page. Every process is
a gloo rank on the CPU and runs updates of fairseq's own trainer on synthetic text under ``torch.profiler``. The page is
computed from the traces. Gloo records each sum over ranks with its start and end, in a thread beside the computing one.
fairseq records every backward pass; DistributedDataParallel ends it only when the last sum has finished, so the gradients are
complete at the end of the last autograd node inside it.
"""

import argparse
import datetime
import json
import logging
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench import describe_machine
from fairseq.distributed import utils as distributed_utils
from torch.profiler import ProfilerActivity, profile, record_function
from training_step import Batch, FairseqStep, Setup, random_batches, set_up

from amos_fairseq.cli.arguments import HelpFormatter, add_overrides
from amos_fairseq.compat.distribution import TORCHRUN_VARIABLES, arrange_ranks, raise_on_every_rank
from amos_fairseq.errors import UserError, explain_os_errors
from amos_fairseq.files import whole_file, write_text
from amos_fairseq.output.terminal import markdown_rows
from amos_fairseq.recipes import DEFAULT_VOCABULARY
from amos_fairseq.run.ending import exit_on_mistake

WARMUP_UPDATES = 2  # DistributedDataParallel sorts its buckets by the first backward pass
UPDATE = "update"  # recorded by trace_updates
BACKWARD = "backward"  # recorded by fairseq's task
EXCHANGE = "gloo:all_reduce"
NODE = "autograd::engine::evaluate_function"
BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4}


class Span(NamedTuple):
    """Start and end in seconds on the clock of the trace."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def holds(self, moment: float) -> bool:
        return self.start <= moment <= self.end


class Exchange(NamedTuple):
    """A sum over ranks; its time includes waiting for ranks that start it later."""

    span: Span
    num_bytes: int


@dataclass(frozen=True)
class TracedUpdate:
    """An update of one rank.

    Attributes:
        span: from its first forward pass to its statistics.
        backward: backward pass of each micro-batch, until its gradients are complete.
        waiting: seconds that the last backward pass then waits for unfinished sums.
        gradients: sums of gradients, in the order of their start.
        others: all other sums: statistics, gradient norms.
    """

    span: Span
    backward: list[Span]
    waiting: float
    gradients: list[Exchange]
    others: list[Exchange]

    @property
    def num_bytes(self) -> int:
        """Bytes of gradients that this rank contributes."""
        return sum(exchange.num_bytes for exchange in self.gradients)

    @property
    def exchanging(self) -> float:
        """Seconds in which gradients are exchanged; simultaneous sums count once."""
        return sum(span.seconds for span in merged([exchange.span for exchange in self.gradients]))

    @property
    def hidden(self) -> float:
        """Seconds of the exchange in which a backward pass still computes gradients."""
        spans = merged([exchange.span for exchange in self.gradients])
        return sum(common(span, backward) for span in spans for backward in self.backward)

    @property
    def overlap(self) -> float:
        """Fraction of the exchange that is hidden."""
        return self.hidden / self.exchanging if self.gradients else math.nan


def merged(spans: Sequence[Span]) -> list[Span]:
    """Return the union of the spans as spans that do not touch."""
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and span.start <= joined[-1].end:
            joined[-1] = Span(joined[-1].start, max(joined[-1].end, span.end))
        else:
            joined.append(span)
    return joined


def common(one: Span, other: Span) -> float:
    """Return the seconds that are in both spans."""
    return max(0.0, min(one.end, other.end) - max(one.start, other.start))


def median_update(updates: Sequence[TracedUpdate]) -> TracedUpdate:
    """Return the update of median length; of an even number the shorter of the middle two."""
    return sorted(updates, key=lambda update: update.span.seconds)[(len(updates) - 1) // 2]


def read_updates(path: Path) -> list[TracedUpdate]:
    """Return the updates of a trace in order; the trace has to be recorded with shapes."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return updates_of([event for event in events if event.get("ph") == "X"])


def updates_of(events: Sequence[dict[str, Any]]) -> list[TracedUpdate]:
    """Parse complete events ("ph": "X") of a Chrome trace, whose times are microseconds."""
    backward = named(events, BACKWARD)
    nodes = [span_of(event) for event in events if event["name"].startswith(NODE)]
    exchanges = sorted(Exchange(span_of(event), bytes_of(event)) for event in events if event["name"] == EXCHANGE)
    return [update_in(span, backward, nodes, exchanges) for span in named(events, UPDATE)]


def update_in(
    update: Span, backward: Sequence[Span], nodes: Sequence[Span], exchanges: Sequence[Exchange]
) -> TracedUpdate:
    own = [span for span in backward if update.holds(span.start)]
    computing = [Span(span.start, max(node.end for node in nodes if span.holds(node.start))) for span in own]
    of_update = [exchange for exchange in exchanges if update.holds(exchange.span.start)]
    of_gradients = [exchange for exchange in of_update if any(span.holds(exchange.span.start) for span in own)]
    others = [exchange for exchange in of_update if exchange not in of_gradients]
    return TracedUpdate(update, computing, own[-1].end - computing[-1].end, of_gradients, others)


def named(events: Sequence[dict[str, Any]], name: str) -> list[Span]:
    return sorted(span_of(event) for event in events if event["name"] == name)


def span_of(event: dict[str, Any]) -> Span:
    return Span(event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)


def bytes_of(event: dict[str, Any]) -> int:
    """Return the bytes of an event's input tensors."""
    inputs = zip(event["args"]["Input type"], event["args"]["Input Dims"], strict=True)
    return sum(BYTES[dtype] * math.prod(shape) for dtype, shape in inputs)


@dataclass(frozen=True)
class RanksReport:
    """Traces of all ranks.

    Attributes:
        config, overrides: as given on the command line.
        traced: number of micro-batches per update -> traced updates, by rank.
    """

    config: str
    overrides: Sequence[str]
    setup: Setup
    num_ranks: int
    machine: dict[str, Any]
    traced: dict[int, list[list[TracedUpdate]]] = field(default_factory=dict)
    time: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.timezone.utc))

    @property
    def work_name(self) -> str:
        length = self.setup.cfg.task.tokens_per_sample
        return f"{Path(self.config).stem}_T{length}_{self.setup.precision}_{self.num_ranks}ranks"

    @property
    def name(self) -> str:
        """File name of the page."""
        return f"{self.time:%Y-%m-%d_%H%M%S}_{self.work_name}"


def check_launch() -> None:
    """Raise :class:`UserError` if this process is not one of several that torchrun has started."""
    if any(name not in os.environ for name in TORCHRUN_VARIABLES) or int(os.environ["WORLD_SIZE"]) < 2:
        raise UserError("there is only one rank: start several with 'bash examples/benchmark/ranks.sh OUT_DIR CONFIG'")


def trace_ranks(arguments: argparse.Namespace, out: Path) -> RanksReport | None:
    """Connect, trace, and read all traces on the first rank; return None on the others. Every rank has to call this."""
    torch.set_num_threads(1)
    setup = set_up(arguments.config, arguments.overrides, arguments.precision, "cpu", arguments.vocabulary_size)
    arrange_ranks(setup.cfg, os.environ, num_gpus=0)
    distributed_utils.distributed_init(setup.cfg)
    logging.getLogger().setLevel(logging.WARNING)  # fairseq has set it to INFO on the first rank
    try:
        return trace_connected(arguments, out, setup)
    finally:
        torch.distributed.destroy_process_group()


def trace_connected(arguments: argparse.Namespace, out: Path, setup: Setup) -> RanksReport | None:
    training = setup.cfg.distributed_training
    rank, num_ranks = training.distributed_rank, training.distributed_world_size
    # A load above 0 before the ranks have started means that other programs use the machine.
    machine = describe_machine(setup.device) | {"load_of_last_minute": round(os.getloadavg()[0], 1)}
    report = RanksReport(arguments.config, arguments.overrides, setup, num_ranks, machine)
    paths = {
        freq: [out / f"{report.work_name}_freq{freq}_rank{number}.json" for number in range(num_ranks)]
        for freq in arguments.update_freq
    }
    for freq in arguments.update_freq:
        if rank == 0:
            print(f"{arguments.updates} updates of {freq} micro-batches on {num_ranks} ranks", file=sys.stderr)
        step, batches = make_step(setup, freq, rank)
        micro_batches = [batches[number % len(batches)] for number in range(freq)]
        trace_updates(step, micro_batches, arguments.updates, paths[freq][rank])
    raise_on_every_rank(None)  # wait until all traces are written
    if rank > 0:
        return None
    report.traced.update({freq: [read_updates(path) for path in of_ranks] for freq, of_ranks in paths.items()})
    return report


def make_step(setup: Setup, update_freq: int, rank: int) -> tuple[FairseqStep, list[Batch]]:
    """Return a trainer for ``update_freq`` micro-batches per update, and batches whose first differs between ranks."""
    setup.cfg.optimization.update_freq = [update_freq]
    batches = random_batches(setup)
    first = rank % len(batches)
    return FairseqStep(setup), batches[first:] + batches[:first]


def trace_updates(step: FairseqStep, micro_batches: Sequence[Batch], updates: int, path: Path) -> None:
    """Record ``updates`` updates after a warm-up as a Chrome trace."""
    for _ in range(WARMUP_UPDATES):
        step.update(micro_batches)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiled:
        for _ in range(updates):
            with record_function(UPDATE):
                step.update(micro_batches)
    with whole_file(str(path)) as unfinished:
        profiled.export_chrome_trace(unfinished)


HOW_TO_READ = """\
A sum over ranks is one `all_reduce` of gloo, in a thread beside the computing one; its time includes waiting for ranks that
start it later. Hidden is the time between the start of a backward pass and the moment at which its last gradient is complete;
DistributedDataParallel then waits for the rest. The ranks share the cores of this machine, so an exchange slows down the
backward pass that hides it: the number of exchanges and their early start are the same on other machines, their duration is
not.
"""
RANKS_HEAD = (
    "update_freq, rank",
    "update, ms",
    "last backward pass, ms",
    "sums of gradients",
    "MB of gradients",
    "exchange, ms",
    "hidden",
    "waiting after the backward pass, ms",
    "other sums",
    "bytes of these",
)
TIMELINE_HEAD = ("sum", "MB", "ms after the start of the update", "at this share of the last backward pass")


def as_markdown(report: RanksReport) -> str:
    """Return a page: title, all ranks, one timeline for each number of micro-batches, and the machine."""
    cfg = report.setup.cfg
    sections = [
        f"# {report.config}, {report.num_ranks} ranks, {report.setup.precision}, CPU, {report.time:%Y-%m-%d}",
        f"{cfg.dataset.batch_size} sequences of {cfg.task.tokens_per_sample} tokens per micro-batch and rank; buckets of "
        f"{cfg.distributed_training.bucket_cap_mb} MiB; {report.setup.vocabulary_size:,} entries in the dictionary. Settings "
        f"besides the recipe: {' '.join(report.overrides) or 'none'}. Medians over the traced updates.",
        markdown_rows(RANKS_HEAD, rank_rows(report)),
        HOW_TO_READ.strip(),
        *timelines(report),
        "## Machine and versions",
        markdown_rows(("", ""), ((name, str(value)) for name, value in report.machine.items())),
    ]
    return "\n\n".join(sections) + "\n"


def rank_rows(report: RanksReport) -> Iterator[Sequence[str]]:
    for update_freq, ranks in report.traced.items():
        for rank, updates in enumerate(ranks):
            yield f"{update_freq}, rank {rank}", *rank_cells(updates)


def rank_cells(updates: Sequence[TracedUpdate]) -> Iterator[str]:
    yield median_ms(update.span.seconds for update in updates)
    yield median_ms(update.backward[-1].seconds for update in updates)
    yield distinct(len(update.gradients) for update in updates)
    yield distinct(round(update.num_bytes / 1e6, 1) for update in updates)
    yield median_ms(update.exchanging for update in updates)
    yield f"{statistics.median(update.overlap for update in updates):.0%}"
    yield median_ms(update.waiting for update in updates)
    yield distinct(len(update.others) for update in updates)
    yield distinct(" + ".join(str(other.num_bytes) for other in update.others) for update in updates)


def median_ms(seconds: Iterator[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f}"


def distinct(values: Iterator[Any]) -> str:
    """Return the one value of all updates, or all distinct values."""
    return ", ".join(dict.fromkeys(map(str, values)))


def timelines(report: RanksReport) -> Iterator[str]:
    for update_freq, ranks in report.traced.items():
        update = median_update(ranks[0])
        spans = ", ".join(between(update, *span) for span in update.backward)
        yield f"## An update of {update_freq} micro-batches on rank 0"
        yield f"Backward passes from {spans} ms after the start of the update."
        yield markdown_rows(TIMELINE_HEAD, timeline_rows(update))


def timeline_rows(update: TracedUpdate) -> Iterator[Sequence[str]]:
    backward = update.backward[-1]
    for kind, exchanges in (("gradients", update.gradients), ("other", update.others)):
        for number, exchange in enumerate(exchanges, start=1):
            shares = " to ".join(f"{(moment - backward.start) / backward.seconds:.0%}" for moment in exchange.span)
            cells = f"{exchange.num_bytes / 1e6:.3g}", between(update, *exchange.span)
            yield f"{kind} {number}", *cells, shares if kind == "gradients" else ""


def between(update: TracedUpdate, start: float, end: float) -> str:
    return " to ".join(f"{1e3 * (moment - update.span.start):.1f}" for moment in (start, end))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="torchrun --standalone --nproc-per-node N examples/benchmark/rank_traces.py",
        description=__doc__.split("\n\n")[0],
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("config", metavar="CONFIG", help="recipe such as amos_small, or path of a YAML file")
    add_overrides(parser, "dataset.batch_size=4")
    add("--precision", choices=("float32", "bf16"), default="float32", help="dtype of the model and its gradients")
    add("--update-freq", type=int, nargs="+", default=[1, 4], metavar="N", help="micro-batches per update")
    add("--updates", type=int, default=3, metavar="N", help="traced updates for each value of --update-freq")
    add("--vocabulary-size", type=int, metavar="N", default=DEFAULT_VOCABULARY, help="number of dictionary entries")
    add("--out", metavar="DIR", required=True, help="directory for the page and the traces")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Trace this rank; every rank calls this. Raises :class:`UserError` for values that trace nothing."""
    if min(*arguments.update_freq, arguments.updates) < 1:
        raise UserError("--update-freq and --updates must be at least 1")
    check_launch()
    out = Path(arguments.out)
    with explain_os_errors(f"--out {out} cannot be made", ": give another directory"):
        out.mkdir(parents=True, exist_ok=True)
    report = trace_ranks(arguments, out)
    if report is not None:
        page = as_markdown(report)
        print(page, end="")
        write_text(out / f"{report.name}.md", page)
        print(f"\n{out / report.name}.md and a trace for each rank and number of micro-batches")


if __name__ == "__main__":
    with exit_on_mistake():
        parsed = build_parser().parse_args()
        run(parsed)

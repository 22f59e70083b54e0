"""What :mod:`amos_fairseq.bench.ranks` found, as a page of Markdown."""

import datetime
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from amos_fairseq.bench.exchange_trace import Exchange, TracedUpdate, median_update
from amos_fairseq.bench.markdown import plain, table
from amos_fairseq.bench.settings import BenchSettings, Setup

HOW_TO_READ = """\
A sum over ranks is one `all_reduce` of gloo, in a thread beside the one that computes; its time includes waiting for a rank
that is not there yet. Hidden is what lies between the start of a backward pass and the moment at which the last of its
gradients was complete; DistributedDataParallel then waits for the rest. The ranks share the cores of this machine, so that
an exchange takes time from the backward pass that hides it: that exchanges start early, and how many there are, is the same
on other machines; how long they take is not.
"""


@dataclass(frozen=True)
class RanksReport:
    """Traces of all ranks.

    Attributes:
        traced: micro-batches of an update -> its traced updates, by rank.
    """

    settings: BenchSettings
    setup: Setup
    num_ranks: int
    machine: dict[str, Any]
    versions: dict[str, str]
    traced: dict[int, list[list[TracedUpdate]]] = field(default_factory=dict)
    time: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.timezone.utc))

    @property
    def work_name(self) -> str:
        recipe = self.settings.config.rstrip("/").split("/")[-1].removesuffix(".yaml").removesuffix(".pt")
        length = self.setup.cfg.task.tokens_per_sample
        return f"{recipe}_T{length}_{self.setup.precision}_{self.num_ranks}ranks"

    @property
    def name(self) -> str:
        """Of the page."""
        return f"{self.time:%Y-%m-%d_%H%M%S}_{self.work_name}"


def as_markdown(report: RanksReport) -> str:
    """Title, all ranks, one timeline for each number of micro-batches, and the machine."""
    cfg = report.setup.cfg
    sections = [
        f"# {report.settings.config}, {report.num_ranks} ranks, {report.setup.precision}, CPU, {report.time:%Y-%m-%d}",
        f"{cfg.dataset.batch_size} sequences of {cfg.task.tokens_per_sample} tokens a micro-batch and rank; buckets of "
        f"{cfg.distributed_training.bucket_cap_mb} MiB; {report.setup.vocabulary_size:,} entries in the dictionary. Settings "
        f"beside the recipe: {' '.join(report.settings.overrides) or 'none'}. Medians over the traced updates.",
        table(RANKS_HEAD, rank_rows(report)),
        HOW_TO_READ.strip(),
        *timelines(report),
        "## Machine and versions",
        table(("", ""), ((name, plain(value)) for name, value in (report.machine | report.versions).items())),
    ]
    return "\n\n".join(sections) + "\n"


RANKS_HEAD = (
    "update_freq, rank", "update, ms", "last backward pass, ms", "sums of gradients", "MB of gradients", "exchange, ms",
    "hidden", "waiting after the backward pass, ms", "other sums", "bytes of these",
)  # fmt: skip


def rank_rows(report: RanksReport) -> Iterator[Sequence[str]]:
    for update_freq, ranks in report.traced.items():
        for rank, updates in enumerate(ranks):
            yield f"{update_freq}, rank {rank}", *rank_cells(updates)


def rank_cells(updates: Sequence[TracedUpdate]) -> Iterator[str]:
    yield middle_ms(update.span.seconds for update in updates)
    yield middle_ms(update.backward[-1].seconds for update in updates)
    yield counts(len(update.gradients) for update in updates)
    yield counts(round(update.num_bytes / 1e6, 1) for update in updates)
    yield middle_ms(update.exchanging for update in updates)
    yield f"{statistics.median(update.overlap for update in updates):.0%}"
    yield middle_ms(update.waiting for update in updates)
    yield counts(len(update.others) for update in updates)
    yield counts(" + ".join(str(other.num_bytes) for other in update.others) for update in updates)


def middle_ms(seconds: Iterator[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f}"


def counts(numbers: Iterator[Any]) -> str:
    """What should be the same in all updates: one number, or all that there were."""
    return ", ".join(dict.fromkeys(str(number) for number in numbers))


def timelines(report: RanksReport) -> Iterator[str]:
    for update_freq, ranks in report.traced.items():
        update = median_update(ranks[0])
        yield f"## An update of {update_freq} micro-batches on rank 0"
        yield (
            "Backward passes from "
            + ", ".join(between(update, span.start, span.end) for span in update.backward)
            + " ms "
            "after the start of the update."
        )
        yield table(TIMELINE_HEAD, timeline_rows(update))


TIMELINE_HEAD = ("sum", "MB", "ms after the start of the update", "at this share of the last backward pass")


def timeline_rows(update: TracedUpdate) -> Iterator[Sequence[str]]:
    kinds = [("gradients", update.gradients), ("other", update.others)]
    for kind, exchanges in kinds:
        for number, exchange in enumerate(exchanges, start=1):
            yield f"{kind} {number}", *timeline_cells(update, exchange)


def timeline_cells(update: TracedUpdate, exchange: Exchange) -> Iterator[str]:
    backward = update.backward[-1]
    shares = ((moment - backward.start) / backward.seconds for moment in exchange.span)
    yield f"{exchange.num_bytes / 1e6:.3g}"
    yield between(update, *exchange.span)
    yield " to ".join(f"{share:.0%}" for share in shares) if exchange in update.gradients else ""


def between(update: TracedUpdate, start: float, end: float) -> str:
    return " to ".join(f"{1e3 * (moment - update.span.start):.1f}" for moment in (start, end))

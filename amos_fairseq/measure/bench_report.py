"""The results of ``amos bench`` as JSON values and as a page of Markdown."""

import dataclasses
import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from amos_fairseq.measure.configuration import BenchSettings, BenchSetup
from amos_fairseq.measure.fairseq_step import SyntheticText
from amos_fairseq.measure.measurement import MedianAndRange, speed_ratio, tokens_per_second
from amos_fairseq.output.tables import markdown_rows


@dataclass(frozen=True)
class ContestRow:
    """Results of a contestant.

    Attributes:
        unequal_work: how its work differs from ours; empty if it does not.
        seconds: of each measured step.
        flops_per_token: forward and backward pass, counted like ``amos flops`` (convention "today") on the reference
            implementation: operations that a kernel repeats count once.
        held_bytes: weights, gradients, master weights and moments, which are held between steps.
        peak_bytes: maximum during a step, including ``held_bytes``; None if unknown (compiled code on a CPU).
    """

    name: str
    description: str
    is_ours: bool
    unequal_work: str
    parameters: int
    seconds: list[float]
    tokens_per_step: int
    flops_per_token: float
    held_bytes: int
    peak_bytes: int | None

    @property
    def tokens_per_second(self) -> MedianAndRange:
        return tokens_per_second(self.seconds, self.tokens_per_step)

    @property
    def flops_per_second(self) -> float:
        return self.flops_per_token * self.tokens_per_second.median


@dataclass(frozen=True)
class MicroBenchmarkTime:
    """Time of one operation of the step by itself.

    Attributes:
        seconds: by implementation.
        flops, bytes: minimum to compute, and to read and write.
        floor: seconds that the machine needs for the slower of both at its measured peaks.
    """

    name: str
    sizes: str
    flops: float
    bytes: float
    floor: float
    seconds: dict[str, float]


@dataclass(frozen=True)
class BenchReport:
    """All results of a run; :meth:`as_json` names them."""

    settings: BenchSettings
    setup: BenchSetup
    rows: list[ContestRow]
    not_compiled: dict[str, str]
    text: SyntheticText
    vocabulary_rows: int
    parts: dict[str, float]
    micro_benchmarks: list[MicroBenchmarkTime]
    matmul_peak: float
    bandwidth: float
    machine: dict[str, Any]
    versions: dict[str, str]
    time: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.timezone.utc))

    @property
    def best_of_ours(self) -> ContestRow:
        """The faster of our rows, plain or compiled."""
        return max((row for row in self.rows if row.is_ours), key=lambda row: row.tokens_per_second.median)

    def ratio(self, row: ContestRow) -> MedianAndRange | None:
        """Return how many times as fast our best row is, step by step; None for our own rows."""
        return None if row.is_ours else speed_ratio(self.best_of_ours.seconds, row.seconds)

    def fraction_of_peak(self, row: ContestRow) -> float:
        return row.flops_per_second / self.matmul_peak

    @property
    def loader_processes(self) -> int:
        """Number of loader processes that keep up with our best row: the ratio of tokens/s, rounded up."""
        return max(1, -int(-self.best_of_ours.tokens_per_second.median // self.text.loaded_tokens_per_second))

    @property
    def name(self) -> str:
        """File name: date, recipe, length, precision, device."""
        recipe, setup = self.settings.recipe_name, self.setup
        length = setup.cfg.task.tokens_per_sample
        return f"{self.time:%Y-%m-%d_%H%M%S}_{recipe}_T{length}_{setup.precision}_{setup.device.type}"

    def as_json(self) -> dict[str, Any]:
        """Return plain values; bytes, seconds, FLOP/s and tokens/s without prefixes."""
        return {
            "time": self.time.isoformat(timespec="seconds"),
            "settings": dataclasses.asdict(self.settings),
            "work": {
                "objective": self.setup.cfg.criterion._name,
                "sequences": self.setup.batch_size,
                "tokens_per_sequence": self.setup.cfg.task.tokens_per_sample,
                "masked_positions": self.text.masked_per_batch,
                "vocabulary_rows": self.vocabulary_rows,
                "precision": self.setup.precision,
                "device": self.setup.device.type,
            },
            "contestants": [self._row_as_json(row) for row in self.rows],
            "not_compiled": self.not_compiled,
            "matmul_peak": self.matmul_peak,
            "memory_bandwidth": self.bandwidth,
            "parts": self.parts,
            "data": {
                "tokens_per_second": self.text.loaded_tokens_per_second,
                "reads_corpus": self.text.reads_corpus,
                "loader_processes": self.loader_processes,
            },
            "pieces": [dataclasses.asdict(each) for each in self.micro_benchmarks],
            "machine": self.machine,
            "versions": self.versions,
            "config": OmegaConf.to_container(self.setup.cfg, enum_to_str=True),
        }

    def _row_as_json(self, row: ContestRow) -> dict[str, Any]:
        ratio, values = self.ratio(row), dataclasses.asdict(row)
        del values["tokens_per_step"]
        return values | {
            "tokens_per_second": dataclasses.asdict(row.tokens_per_second),
            "flops_per_second": row.flops_per_second,
            "fraction_of_peak": self.fraction_of_peak(row),
            "ours_is_faster_by": ratio and dataclasses.asdict(ratio),
        }


HOW_TO_READ = """\
The rows take turns step by step, after the warm-up; a step is forward, backward, clipping, optimizer and statistics of one
micro-batch. The ratio compares our best row with the row, step by step: median (minimum to maximum). Model FLOP/s count the
matrix products of the reference implementation; the peak is the fastest square product of this machine in the same precision
and run. Memory: what is held between steps, and the maximum during a step; on a CPU the bytes of tensors, on a GPU PyTorch's
own count.
"""
CONTEST_HEAD = (
    "",
    "tokens/s",
    "smallest to largest",
    "ours is faster by",
    "model TFLOP/s",
    "of peak",
    "memory held",
    "at peak",
    "parameters",
)


def as_markdown(report: BenchReport) -> str:
    """Return a page: title, contest, parts, data, micro-benchmarks, machine and the whole configuration."""
    settings, setup, machine = report.settings, report.setup, report.machine | report.versions
    limits = {
        "matrix peak": f"{report.matmul_peak / 1e12:.3g} TFLOP/s in {setup.precision}, sustained, random normal values",
        "memory bandwidth": f"{report.bandwidth / 1e9:.3g} GB/s, sustained",
    }
    sections = [
        f"# {settings.config}, {setup.precision}, {setup.device.type}, {report.time:%Y-%m-%d}",
        f"{setup.batch_size} sequences of {setup.cfg.task.tokens_per_sample} tokens, {report.text.masked_per_batch} masked "
        f"positions, {report.vocabulary_rows:,} vocabulary rows, {len(report.rows[0].seconds)} steps a row after "
        f"{settings.warmup} of warm-up.",
        markdown_rows(CONTEST_HEAD, (contest_cells(report, row) for row in report.rows)),
        *(f"`{row.name}`: {row.unequal_work}." for row in report.rows if row.unequal_work),
        *(f"`{name}` is not in the contest: {reason}" for name, reason in report.not_compiled.items()),
        HOW_TO_READ.strip(),
        "## Where our step spends its time",
        markdown_rows(("part", "share"), ((name, f"{share:.1%}") for name, share in report.parts.items())),
        data_line(report),
        *micro_benchmark_section(report.micro_benchmarks),
        "## Machine and versions",
        markdown_rows(("", ""), ((name, plain(value)) for name, value in (limits | machine).items())),
        "## Configuration",
        f"```yaml\n{OmegaConf.to_yaml(setup.cfg).strip()}\n```",
    ]
    return "\n\n".join(sections) + "\n"


def contest_cells(report: BenchReport, row: ContestRow) -> Sequence[str]:
    speed, ratio = row.tokens_per_second, report.ratio(row)
    return (
        f"`{row.name}` {row.description}",
        f"{speed.median:,.0f}",
        f"{speed.min:,.0f} to {speed.max:,.0f}",
        "" if ratio is None else f"{ratio.median:.2f} ({ratio.min:.2f} to {ratio.max:.2f})",
        f"{row.flops_per_second / 1e12:.3g}",
        f"{report.fraction_of_peak(row):.1%}",
        mebibytes(row.held_bytes),
        mebibytes(row.peak_bytes),
        f"{row.parameters:,}",
    )


def data_line(report: BenchReport) -> str:
    text = report.text
    work, end = ("reads and masks", ".") if text.reads_corpus else ("masks", " (reading the corpus not counted).")
    return (
        f"Batches are prepared in parallel with the step: one loader process {work} {text.loaded_tokens_per_second:,.0f} "
        f"tokens/s; processes needed to keep up: {report.loader_processes}{end}"
    )


def micro_benchmark_section(benchmarks: Sequence[MicroBenchmarkTime]) -> Iterable[str]:
    if not benchmarks:
        return
    ways = list(benchmarks[0].seconds)
    head = ("operation", "sizes", "GFLOP", "MiB", "floor, ms", *(f"{way}, ms" for way in ways))
    yield "## Operations by themselves"
    yield markdown_rows(head, (micro_benchmark_cells(each, ways) for each in benchmarks))
    yield (
        "Forward and backward pass if there is one; the fastest of several repetitions. The floor is the slower of FLOPs over "
        "the measured matrix peak and bytes over the measured bandwidth: inputs, weights, results and their gradients once."
    )


def micro_benchmark_cells(timed: MicroBenchmarkTime, ways: Sequence[str]) -> Sequence[str]:
    times = (f"{1e3 * timed.seconds[way]:.3g} ({timed.seconds[way] / timed.floor:.1f}x)" for way in ways)
    work = (f"{timed.flops / 1e9:.3g}", f"{timed.bytes / 2**20:.3g}", f"{1e3 * timed.floor:.3g}")
    return timed.name, timed.sizes, *work, *times


def plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return "none" if value is None else str(value)


def mebibytes(number: int | None) -> str:
    return "not seen" if number is None else f"{number / 2**20:,.0f} MiB"

"""The report as a page of Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

from omegaconf import OmegaConf

from amos_fairseq.bench.report import PieceTime, Report, Row

HOW_TO_READ = """\
Steps alternate between the rows, after the warm-up; a step is forward, backward, clipping, optimizer and statistics of one
micro-batch. The ratio is that of our best row to the row, step by step: median (smallest to largest). Model FLOP/s count the
matrix products of the plain definitions, over the fastest square product of this machine in the same number format and run.
Memory: what stays between steps, and the most during a step; on a CPU the bytes of tensors, on a GPU PyTorch's own count.
"""


def as_markdown(report: Report) -> str:
    """Title, contest, parts, data, pieces, machine and the whole configuration."""
    sections = [
        f"# {report.settings.config}, {report.setup.precision}, {report.setup.device.type}, {report.time:%Y-%m-%d}",
        work_line(report),
        table(CONTEST_HEAD, (contest_cells(report, row) for row in report.rows)),
        *(f"`{row.name}`: {row.unequal_work}." for row in report.rows if row.unequal_work),
        *(f"`{name}` is not in the contest: {reason}" for name, reason in report.refusals.items()),
        HOW_TO_READ.strip(),
        "## Where our step spends its time",
        table(("part", "share"), ((name, f"{share:.1%}") for name, share in report.parts.items())),
        data_line(report),
        *pieces_section(report.pieces),
        "## Machine and versions",
        table(("", ""), ((name, plain(value)) for name, value in machine_rows(report))),
        "## Configuration",
        f"```yaml\n{OmegaConf.to_yaml(report.setup.cfg).strip()}\n```",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def work_line(report: Report) -> str:
    row = report.rows[0]
    return (
        f"{report.batch_size} sequences of {report.setup.cfg.task.tokens_per_sample} tokens, "
        f"{report.text.masked_per_batch} masked positions, {report.num_rows:,} vocabulary rows, "
        f"{len(row.seconds)} steps a row after {report.settings.warmup} of warm-up."
    )


CONTEST_HEAD = (
    "", "tokens/s", "smallest to largest", "ours is faster by", "model TFLOP/s", "of peak", "memory held", "at peak",
    "parameters",
)  # fmt: skip


def contest_cells(report: Report, row: Row) -> Sequence[str]:
    speed, ratio = row.tokens_per_second, report.ratio(row)
    return (
        f"`{row.name}` {row.description}",
        f"{speed.median:,.0f}",
        f"{speed.least:,.0f} to {speed.most:,.0f}",
        "" if ratio is None else f"{ratio.median:.2f} ({ratio.least:.2f} to {ratio.most:.2f})",
        f"{row.flops_per_second / 1e12:.3g}",
        f"{report.fraction_of_peak(row):.1%}",
        mebibytes(row.held_bytes),
        mebibytes(row.peak_bytes),
        f"{row.num_parameters:,}",
    )


def data_line(report: Report) -> str:
    work = "reads and masks" if report.text.reads_corpus else "masks"
    return (
        f"Data is made beside the step: one loader process {work} {report.text.loaded_tokens_per_second:,.0f} tokens/s, so "
        f"that {report.loader_processes} of them would keep up"
        + ("." if report.text.reads_corpus else " (reading the corpus not counted).")
    )


def pieces_section(pieces: Sequence[PieceTime]) -> Iterable[str]:
    if not pieces:
        return
    ways = list(pieces[0].seconds)
    yield "## Pieces by themselves"
    yield table(
        ("piece", "sizes", "GFLOP", "MiB", "floor, ms", *(f"{way}, ms" for way in ways)),
        (piece_cells(piece, ways) for piece in pieces),
    )
    yield (
        "Forward and backward where there is one; the fastest of several repetitions. The floor is the slower of FLOPs over "
        "the measured matrix peak and bytes over the measured bandwidth: inputs, weights, results and their gradients once."
    )


def piece_cells(piece: PieceTime, ways: Sequence[str]) -> Sequence[str]:
    times = (f"{1e3 * piece.seconds[way]:.3g} ({piece.seconds[way] / piece.floor:.1f}x)" for way in ways)
    return (
        piece.name, piece.sizes, f"{piece.flops / 1e9:.3g}", f"{piece.bytes / 2**20:.3g}", f"{1e3 * piece.floor:.3g}",
        *times,
    )  # fmt: skip


def machine_rows(report: Report) -> Iterable[tuple[str, Any]]:
    yield (
        "matrix peak",
        f"{report.matmul_peak / 1e12:.3g} TFLOP/s in {report.setup.precision}, sustained, random normal numbers",
    )
    yield "memory bandwidth", f"{report.bandwidth / 1e9:.3g} GB/s, sustained"
    yield from report.machine.items()
    yield from report.versions.items()


def plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return "none" if value is None else str(value)


def mebibytes(number: int | None) -> str:
    return "not seen" if number is None else f"{number / 2**20:,.0f} MiB"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """First column to the left, numbers to the right."""
    align = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, align, *rows))

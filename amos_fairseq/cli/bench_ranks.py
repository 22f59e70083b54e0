"""Trace several ranks on one machine: what they exchange in an update, and how much of it the backward pass hides.

    torchrun --standalone --nproc-per-node 2 -m amos_fairseq.cli.bench_ranks amos_small --set dataset.batch_size=4 --out OUT

Each rank writes a Chrome trace for each number of micro-batches; the first rank also writes a Markdown page.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from amos_fairseq.bench.rank_traces import RanksSettings, as_markdown, check_launch, trace_ranks
from amos_fairseq.bench.settings import BenchSettings
from amos_fairseq.cli.arguments import DEFAULT_VOCABULARY, HelpFormatter, add_overrides
from amos_fairseq.cli.bench import make_directory, write_file
from amos_fairseq.compat.user_errors import exit_on_mistake
from amos_fairseq.errors import UserError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --standalone --nproc-per-node N -m amos_fairseq.cli.bench_ranks",
        description=__doc__.split("\n\n")[0],
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("config", metavar="CONFIG", help="same as for amos bench, such as amos_small")
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
    make_directory(out)
    bench = BenchSettings(
        arguments.config, arguments.overrides, precision=arguments.precision, threads=1, device="cpu",
        vocabulary_size=arguments.vocabulary_size,
    )  # fmt: skip
    settings = RanksSettings(bench, arguments.update_freq, arguments.updates, out)
    report = trace_ranks(settings, DEFAULT_VOCABULARY, lambda text: print(text, file=sys.stderr, flush=True))
    if report is not None:
        page = as_markdown(report)
        print(page, end="")
        write_file(out / f"{report.name}.md", page)
        print(f"\n{out / report.name}.md and a trace for each rank and number of micro-batches")


def main(arguments: Sequence[str] | None = None) -> None:
    with exit_on_mistake():
        parsed = build_parser().parse_args(arguments)
        logging.getLogger().setLevel(logging.WARNING)  # importing fairseq has set it to DEBUG
        run(parsed)


if __name__ == "__main__":
    main()

"""A trace of several ranks on one machine: what they exchange in an update, and how much of it the backward pass hides.

    torchrun --standalone --nproc-per-node 2 -m amos_fairseq.cli.ranks amos_small --set dataset.batch_size=4 --out OUT

Each rank leaves a Chrome trace for each number of micro-batches, the first one a page of Markdown.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from amos_fairseq.bench.rank_traces import RanksSettings, as_markdown, check_launch, trace_ranks
from amos_fairseq.bench.settings import BenchSettings
from amos_fairseq.cli.bench import make_directory, write
from amos_fairseq.cli.flops import DEFAULT_VOCABULARY
from amos_fairseq.compat.user_errors import exit_on_mistake
from amos_fairseq.errors import UserError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --standalone --nproc-per-node N -m amos_fairseq.cli.ranks",
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", help="as for amos bench, such as amos_small")
    parser.add_argument(
        "--set", dest="overrides", nargs="+", action="extend", metavar="KEY=VALUE", default=[],
        help="settings to change, such as dataset.batch_size=4",
    )  # fmt: skip
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32", help="of model and gradients")
    parser.add_argument(
        "--update-freq", type=int, nargs="+", default=[1, 4], metavar="N", help="micro-batches of an update"
    )
    parser.add_argument("--updates", type=int, default=3, metavar="N", help="traced updates for each of these numbers")
    parser.add_argument(
        "--vocabulary-size", type=int, metavar="N", default=DEFAULT_VOCABULARY, help="entries of the dictionary"
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="where the page and the traces go")
    return parser


def run(flags: argparse.Namespace) -> None:
    """Every rank runs this; :class:`UserError` for numbers that trace nothing."""
    if min(*flags.update_freq, flags.updates) < 1:
        raise UserError("--update-freq and --updates must be at least 1")
    check_launch()
    out = Path(flags.out)
    make_directory(out)
    bench = BenchSettings(
        flags.config, flags.overrides, precision=flags.precision, threads=1, device="cpu",
        vocabulary_size=flags.vocabulary_size,
    )  # fmt: skip
    settings = RanksSettings(bench, flags.update_freq, flags.updates, out)
    report = trace_ranks(settings, DEFAULT_VOCABULARY, lambda text: print(text, file=sys.stderr, flush=True))
    if report is not None:
        page = as_markdown(report)
        print(page, end="")
        write(out / f"{report.name}.md", page)
        print(f"\n{out / report.name}.md and a trace for each rank and number of micro-batches")


def main(words: Sequence[str] | None = None) -> None:
    with exit_on_mistake():
        flags = build_parser().parse_args(words)
        logging.getLogger().setLevel(logging.WARNING)  # importing fairseq has set it to DEBUG
        run(flags)


if __name__ == "__main__":
    main()

"""``amos plot``: the curves of one or several runs, from their ``metrics.jsonl``, as PNG and SVG."""

import argparse
from typing import Any

from amos_fairseq.cli.runs import read_runs
from amos_fairseq.errors import UserError

DESCRIPTION = """\
Draw the curves of one or several runs: MLM loss per generator depth (Figure 1b of the AMOS paper), mixture weights
(5a), accuracy on replaced tokens (5b), detection AUC, learning rate and throughput; of fine-tuning runs the loss and the
scores. Thin lines are training, markers
validation; colours are depths, line styles are runs. DIR receives all panels as overview.png and overview.svg, and each
one as pictures of its own.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plot",
        help="curves of training runs as PNG and SVG",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="LOG_OR_DIR", help="metrics.jsonl, or the SAVE_DIR that holds it")
    parser.add_argument("--out", default="plots", metavar="DIR", help="where the pictures go; made if absent")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    runs = read_runs(arguments.runs)
    # Imported here: matplotlib takes a second that `amos --help` need not wait.
    from amos_fairseq.cli import plot_panels

    try:
        written = plot_panels.draw_all(runs, arguments.out)
    except OSError as error:
        raise UserError(
            f"{arguments.out}: pictures cannot be written ({error.strerror}); choose another directory with --out"
        ) from error
    for message in written:
        print(message)

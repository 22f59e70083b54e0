"""``amos plot``: plot the training curves of runs as PNG and SVG."""

import argparse
from typing import Any

from amos_fairseq.cli.arguments import add_subcommand
from amos_fairseq.errors import explain_os_errors

DESCRIPTION = """\
Plot the curves of one or several runs: MLM loss per generator depth (Figure 1b of the AMOS paper) beside the unigram entropy of
the text, mixture weights (5a), recall of replaced tokens (5b: "accuracy on replaced tokens"), detection AUC, learning rate and
throughput; values that only some objectives log (multi-word selection, reward, predictions of the main network) where a run
has them; of fine-tuning runs the loss and the scores. Thin lines show training, markers validation; colors distinguish depths,
line styles runs. The command writes overview.png and overview.svg with all panels to DIR, and each panel as files of its own.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "plot", "plot training curves", DESCRIPTION, run)
    text = "metrics.jsonl, or the SAVE_DIR that contains it"
    parser.add_argument("runs", nargs="+", metavar="LOG_OR_DIR", help=text)
    parser.add_argument("--out", default="plots", metavar="DIR", help="directory for the figures")


def run(arguments: argparse.Namespace) -> None:
    with explain_os_errors(f"{arguments.out}: figures cannot be written", "; choose another directory with --out"):
        from amos_fairseq.report.curves import plot_curves, read_curves

        for message in plot_curves(read_curves(arguments.runs), arguments.out):
            print(message)

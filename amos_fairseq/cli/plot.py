"""``amos plot``: plot the training curves of runs, or the scores of fine-tuning, as PNG and SVG."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.cli.arguments import add_subcommand
from amos_fairseq.errors import UserError, explain_os_errors

DESCRIPTION = """\
Plot the curves of one or several runs: MLM loss per generator depth (Figure 1b of the AMOS paper) beside the unigram entropy of
the text, mixture weights (5a), recall of replaced tokens (5b: "accuracy on replaced tokens"), detection AUC, learning rate and
throughput; values that only some objectives log (multi-word selection, reward, predictions of the main network) where a run
has them; of fine-tuning runs the loss and the scores. Thin lines show training, markers validation; colors distinguish depths,
line styles runs. The command writes overview.png and overview.svg with all panels to DIR, and each panel as files of its own.
Given the glue.json and squad.json of amos glue and amos squad instead, it plots the scores of every seed side by side, as
scores.png and scores.svg.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "plot", "plot training curves or fine-tuning scores", DESCRIPTION)
    text = "metrics.jsonl, or the SAVE_DIR that contains it; or glue.json and squad.json files"
    parser.add_argument("runs", nargs="+", metavar="LOG_OR_DIR", help=text)
    parser.add_argument("--out", default="plots", metavar="DIR", help="directory for the figures")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    score_files = [path for path in arguments.runs if path.endswith(".json")]
    if score_files and score_files != arguments.runs:
        raise UserError("curves and scores are different figures: give logs, or the .json files of results, not both")

    problem = f"{arguments.out}: figures cannot be written"
    with explain_os_errors(problem, "; choose another directory with --out"):
        if score_files:
            from amos_fairseq.downstream.results import read_summary
            from amos_fairseq.report.figures import plot_scores

            advice = "give the glue.json, squad.json ... as the command wrote it"
            messages = plot_scores([read_summary(Path(file), advice) for file in score_files], arguments.out)
        else:
            from amos_fairseq.report.curves import plot_curves, read_curves

            messages = plot_curves(read_curves(arguments.runs), arguments.out)
    for message in messages:
        print(message)

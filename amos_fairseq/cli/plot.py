"""``amos plot``: the curves of one or several runs, from their ``metrics.jsonl``, as PNG and SVG."""

import argparse
from typing import Any

from amos_fairseq.cli.runs import read_runs
from amos_fairseq.errors import UserError

DESCRIPTION = """\
Draw the curves of one or several runs: MLM loss per generator depth (Figure 1b of the AMOS paper), mixture weights (5a),
accuracy on replaced tokens (5b), detection AUC, learning rate and throughput; what only some objectives log (selection,
reward, the main network's own guesses) where a run has it; of fine-tuning runs the loss and the scores. Thin lines are
training, markers validation; colours are depths, line styles are runs. DIR receives all panels as overview.png and
overview.svg, and each one as pictures of its own. Given the glue.json and squad.json of amos glue and amos squad, draw
the scores of every seed side by side instead, as scores.png and scores.svg.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plot",
        help="curves of training runs as PNG and SVG",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="LOG_OR_DIR",
        help="metrics.jsonl, or the SAVE_DIR that holds it; or glue.json, squad.json",
    )
    parser.add_argument("--out", default="plots", metavar="DIR", help="where the pictures go; made if absent")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    of_results = [path for path in arguments.runs if path.endswith(".json")]
    if of_results and of_results != arguments.runs:
        raise UserError(
            "curves and scores go into different pictures: give logs, or the .json files of results, not both"
        )
    try:
        messages = draw_results(arguments) if of_results else draw_curves(arguments)
    except OSError as error:
        raise UserError(
            f"{arguments.out}: pictures cannot be written ({error.strerror}); choose another directory with --out"
        ) from error
    for message in messages:
        print(message)


# matplotlib is imported where it draws: it takes a second that `amos --help` need not wait.
def draw_curves(arguments: argparse.Namespace) -> list[str]:
    runs = read_runs(arguments.runs)
    from amos_fairseq.cli.plot_panels import draw_all

    return draw_all(runs, arguments.out)


def draw_results(arguments: argparse.Namespace) -> list[str]:
    from amos_fairseq.cli.plot_scores import draw_scores, read_results

    return draw_scores(read_results(arguments.runs), arguments.out)

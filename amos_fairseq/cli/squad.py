"""``amos squad``: a checkpoint fine-tuned on SQuAD over several seeds; or the official scores of a prediction file."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amos_fairseq.cli import fine_tuning_flags
from amos_fairseq.errors import UserError

if TYPE_CHECKING:
    from amos_fairseq.finetuning.squad.benchmark import SquadSettings

DESCRIPTION = """\
Fine-tune a checkpoint of this package on SQuAD 1.1 or 2.0 (what DIR was prepared of): one fairseq-train a seed, on each
GPU one at a time. Prints and saves medians and standard deviations of EM and F1 (squad.md, squad.csv, squad.json in OUT);
predictions in the official format, the n best answers and null odds lie with each run. Stopped or interrupted, the same
command continues. With --evaluate nothing is trained: it prints the official scores of a prediction file.
"""
NEEDED = ("checkpoint", "data", "out")
# The head of the paper (thesis section 5.2.4); TEAMS does not name its own, nor the thesis that of its BERT.
HEAD_OF_RECIPE = {"electra": "joint", "electric": "joint"}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "squad",
        help="fine-tune a checkpoint on SQuAD, or score a prediction file",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    fine_tuning_flags.add_run_flags(parser, "what preprocess/squad/prepare.sh wrote", required=False)
    fine_tuning_flags.add_recipe_flags(parser)
    add_squad_flags(parser)
    fine_tuning_flags.add_device_flags(parser)
    parser.add_argument("--paper", action="store_true", help="show the paper's AMOS, ELECTRA and BERT in rows beside")
    add_evaluation_flags(parser)
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def add_squad_flags(parser: argparse.ArgumentParser) -> None:
    """Absent flags are absent in the namespace: the recipe, or the length that the encoder reads, decides."""
    add = parser.add_argument
    add("--span-head", choices=("independent", "joint"), default=argparse.SUPPRESS,
        help="start and end independently, or XLNet's joint head (default: joint for electra and electric)")  # fmt: skip
    add("--tokens-per-window", type=int, metavar="N", default=argparse.SUPPRESS,
        help="question and context (default: 512, or what the encoder reads)")  # fmt: skip
    add("--doc-stride", type=int, metavar="N", default=argparse.SUPPRESS,
        help="tokens between windows (default: 128, or a quarter of a shorter window)")  # fmt: skip
    add("--max-question-length", type=int, metavar="N", default=argparse.SUPPRESS,
        help="tokens of a question (default: 64, or half of a shorter window)")  # fmt: skip
    add("--max-answer-length", type=int, metavar="N", default=30, help="tokens of an answer")
    add("--n-best", type=int, metavar="N", default=20, help="answers kept for each question")


def add_evaluation_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scores of a prediction file")
    group.add_argument(
        "--evaluate", nargs=2, metavar=("PREDICTIONS", "DATASET"), default=argparse.SUPPRESS,
        help="print EM and F1 of predictions.json on an official dev file",
    )  # fmt: skip
    group.add_argument(
        "--null-odds", metavar="FILE", default=argparse.SUPPRESS,
        help="null_odds.json (any scale); the best thresholds are searched with it",
    )  # fmt: skip
    group.add_argument(
        "--null-threshold", type=float, metavar="X", default=argparse.SUPPRESS,
        help="odds above it count as no answer (default: predictions are taken as they stand)",
    )  # fmt: skip


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if hasattr(arguments, "evaluate"):
        print_scores(arguments)
        return
    missing = [f"--{name}" for name in NEEDED if not hasattr(arguments, name)]
    if missing:
        parser.error(f"the following arguments are required: {', '.join(missing)} (or --evaluate)")
    # Imported here: torch and fairseq take seconds that `amos --help` need not wait.
    from amos_fairseq.finetuning.benchmark import Stopped
    from amos_fairseq.finetuning.squad.experiment import run_squad

    session = fine_tuning_flags.session_of(arguments)
    settings = read_settings(arguments, session.checkpoint.max_positions)
    try:
        outcome = run_squad(session, Path(arguments.data), settings, with_paper=arguments.paper)
    except (Stopped, KeyboardInterrupt):
        fine_tuning_flags.say_stopped(arguments.out)
    if outcome.table is not None:
        outcome.table.print()
    fine_tuning_flags.say_files(outcome.files)
    fine_tuning_flags.report_failures(outcome.failures)


def read_settings(arguments: argparse.Namespace, max_positions: int) -> "SquadSettings":
    """Raises :class:`UserError` for lengths that cannot be."""
    from amos_fairseq.data.squad import WindowLimits
    from amos_fairseq.finetuning.squad_benchmark import SquadSettings
    from amos_fairseq.squad.decoding import DecodingLimits

    usual = WindowLimits()
    tokens = getattr(arguments, "tokens_per_window", min(usual.tokens, max_positions))
    if tokens > max_positions:
        raise UserError(
            f"--tokens-per-window {tokens}: the checkpoint's encoder reads {max_positions} tokens, give no more"
        )
    windows = WindowLimits(
        tokens,
        getattr(arguments, "doc_stride", min(usual.doc_stride, max(1, tokens // 4))),
        getattr(arguments, "max_question_length", min(usual.question, max(1, tokens // 2))),
    )
    for name in ("max_answer_length", "n_best"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be 1 or more")
    head = getattr(arguments, "span_head", HEAD_OF_RECIPE.get(arguments.recipe, "independent"))
    return SquadSettings(head, windows, DecodingLimits(arguments.max_answer_length, arguments.n_best))


def print_scores(arguments: argparse.Namespace) -> None:
    """The scores as JSON on stdout, as the official script prints them."""
    from amos_fairseq.finetuning.squad.official import evaluate, read_null_odds, read_predictions, read_squad

    predictions, dataset = map(Path, arguments.evaluate)
    odds = read_null_odds(Path(arguments.null_odds)) if hasattr(arguments, "null_odds") else None
    if odds is None and hasattr(arguments, "null_threshold"):
        raise UserError("--null-threshold needs --null-odds: without them there is nothing to compare")
    questions = list(read_squad(dataset).questions())
    threshold = getattr(arguments, "null_threshold", float("inf"))
    scores, missing = evaluate(questions, read_predictions(predictions), odds, threshold)
    if missing:
        print(
            f"{missing} of {len(questions)} questions have no prediction; no score counts them (as in the official script "
            "of SQuAD 2.0; that of 1.1 counts them as wrong)", file=sys.stderr,
        )  # fmt: skip
    print(json.dumps(scores, indent=2))

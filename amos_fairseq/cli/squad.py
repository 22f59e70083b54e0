"""``amos squad``: fine-tune a checkpoint on SQuAD over several seeds, or compute the official scores of a prediction file."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amos_fairseq.cli import fine_tuning
from amos_fairseq.cli.arguments import add_subcommand, import_fairseq
from amos_fairseq.downstream.squad.official import evaluate, read_null_odds, read_predictions, read_squad
from amos_fairseq.errors import UserError

if TYPE_CHECKING:
    from amos_fairseq.downstream.squad.command import SquadSettings

DESCRIPTION = """\
Fine-tune a checkpoint of this package on SQuAD 1.1 or 2.0, whichever the dev file is of: one fairseq-train process per seed,
one at a time on each GPU. The command prints and saves medians and standard deviations of EM and F1 (squad.md, squad.csv and
squad.json in OUT); each run also has its predictions in the official format, its n best answers and its null odds. After a
stop the same command continues. Raw files are converted with the tokenizer of the checkpoint, once; OUT/data keeps the
result. With --evaluate the command trains nothing and prints the official scores of a prediction file.
"""
REQUIRED = ("checkpoint", "out")
# The head of the paper (thesis section 5.2.4); TEAMS does not name its head, nor does the thesis for its BERT.
HEAD_OF_RECIPE = {"electra": "joint", "electric": "joint"}


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "squad", "fine-tune a checkpoint on SQuAD, or score predictions", DESCRIPTION)
    fine_tuning.add_arguments(
        parser,
        "directory that amos prepare squad wrote",
        required=False,
        has_pooling=False,
        raw_help="an official JSON file of SQuAD 1.1 or 2.0, plain or as .gz, .xz or .zst",
    )
    add = parser.add_argument
    text = "independent start and end, or XLNet's joint head (default: joint for electra and electric)"
    add("--span-head", choices=("independent", "joint"), help=text)
    text = "tokens of question and context together (default: 512, or the maximum of the encoder)"
    add("--tokens-per-window", type=int, metavar="N", help=text)
    text = "tokens from one window to the next (default: 128, or a quarter of a shorter window)"
    add("--doc-stride", type=int, metavar="N", help=text)
    text = "maximum number of tokens of a question (default: 64, or half of a shorter window)"
    add("--max-question-length", type=int, metavar="N", help=text)
    add("--max-answer-length", type=int, metavar="N", default=30, help="maximum number of tokens of an answer")
    add("--n-best", type=int, metavar="N", default=20, help="answers to keep for each question")
    add = parser.add_argument_group("scores of a prediction file").add_argument
    text = "print EM and F1 of predictions.json on an official dev file (default: fine-tune)"
    add("--evaluate", nargs=2, type=Path, metavar=("PREDICTIONS", "DATASET"), help=text)
    text = "null_odds.json, on any scale, to search the best thresholds with (default: do not search)"
    add("--null-odds", type=Path, metavar="FILE", help=text)
    text = "odds above it mean no answer (default: use the predictions unchanged)"
    add("--null-threshold", type=float, metavar="X", help=text)
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if arguments.evaluate is not None:
        print_scores(arguments)
        return
    missing = [f"--{name}" for name in REQUIRED if getattr(arguments, name) is None]
    if missing:
        parser.error(f"the following arguments are required: {', '.join(missing)} (or --evaluate)")
    files = fine_tuning.raw_files(arguments)
    import_fairseq(arguments.checkpoint, arguments.subcommand)
    from amos_fairseq.downstream.squad.command import Squad

    session = fine_tuning.session_from(arguments, Squad.name)

    settings = read_settings(arguments, session.checkpoint.max_positions)
    if files is None:
        data = Path(arguments.data)
    else:
        from amos_fairseq.downstream.squad.prepare import prepare_squad_inside

        with fine_tuning.preparing(session, Squad.name) as tokenizer:
            data = prepare_squad_inside(session.out, *files, tokenizer)
    fine_tuning.run_and_print(arguments.out, Squad(session, data, settings, arguments.paper))


def read_settings(arguments: argparse.Namespace, max_positions: int) -> "SquadSettings":
    """Return the settings of windows, head and decoding for an encoder of ``max_positions``.

    Raises:
        UserError: a length is out of range.
    """
    from amos_fairseq.downstream.squad.command import DecodingLimits, SquadSettings
    from amos_fairseq.downstream.squad.dataset import WindowLimits

    def given_or(value: Any, default: Any) -> Any:
        return default if value is None else value

    defaults = WindowLimits()
    tokens = given_or(arguments.tokens_per_window, min(defaults.tokens, max_positions))
    if tokens > max_positions:
        raise UserError(
            f"--tokens-per-window {tokens} is more than the {max_positions} tokens of the encoder's maximum input"
        )
    windows = WindowLimits(
        tokens,
        given_or(arguments.doc_stride, min(defaults.doc_stride, max(1, tokens // 4))),
        given_or(arguments.max_question_length, min(defaults.question, max(1, tokens // 2))),
    )
    for name in ("max_answer_length", "n_best"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be 1 or more")
    head = given_or(arguments.span_head, HEAD_OF_RECIPE.get(arguments.recipe, "independent"))
    return SquadSettings(head, windows, DecodingLimits(arguments.max_answer_length, arguments.n_best))


def print_scores(arguments: argparse.Namespace) -> None:
    """Print the scores as JSON on stdout, in the format of the official script."""
    predictions, dataset = arguments.evaluate
    odds = None if arguments.null_odds is None else read_null_odds(arguments.null_odds)
    if odds is None and arguments.null_threshold is not None:
        raise UserError("--null-threshold needs --null-odds: without them there is nothing to compare")
    questions = list(read_squad(dataset).questions())
    threshold = float("inf") if arguments.null_threshold is None else arguments.null_threshold
    scores, missing = evaluate(questions, read_predictions(predictions), odds, threshold)
    if missing:
        notice = (
            f"{missing} of {len(questions)} questions have no prediction and are not part of any score (as in the official "
            "script of SQuAD 2.0; the script of 1.1 counts them as wrong)"
        )
        print(notice, file=sys.stderr)
    print(json.dumps(scores, indent=2))

"""``amos parse``: fine-tune a checkpoint on dependency trees over several seeds."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.cli import fine_tuning
from amos_fairseq.cli.arguments import add_subcommand, add_unlabeled
from amos_fairseq.experiments import PARSING_VIEWS

DESCRIPTION = """\
Fine-tune a checkpoint of this package on the dependency trees of a treebank, one run per seed. The command prints and saves
medians and standard deviations of LAS and UAS (parsing.md and parsing.json in OUT); each run also has the dev
file with its trees (predictions.conllu). After a stop the same command continues. With --views the model also learns from
sentences without trees (cross-view training). With --predict the run that is best on dev parses other sentences.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "parse", "fine-tune a checkpoint on dependency trees", DESCRIPTION, run)
    fine_tuning.add_arguments(
        parser,
        None,
        has_pooling=False,
        raw_help="treebank in CoNLL-U, plain or as .gz, .xz or .zst",
        recipe="own_labels",
    )
    add_unlabeled(parser.add_argument)
    fine_tuning.add_cross_views(parser, PARSING_VIEWS)
    text = "OUT of this command as --checkpoint: write the sentences of FILE with the trees of its best run to the file --out"
    parser.add_argument("--predict", metavar="FILE", type=Path, help=text)


def run(arguments: argparse.Namespace) -> None:
    if arguments.predict is not None:
        fine_tuning.check_prediction(arguments)
    elif arguments.train is None or arguments.dev is None:
        arguments.parser.error("give the treebanks as --train FILE --dev FILE, or sentences to parse as --predict FILE")
    fine_tuning.start(arguments)
    from amos_fairseq.downstream.words.parsing_command import main

    main(arguments)

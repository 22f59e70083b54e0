"""``amos prepare``: convert raw text to a binarized corpus, as ``preprocess/pretraining/prepare.sh`` does in a checkout."""

import argparse
from typing import Any

from amos_fairseq.cli.arguments import add_subcommand
from amos_fairseq.preprocess.pretraining.arguments import DESCRIPTION, add_arguments


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "prepare", "convert text to a binarized corpus", DESCRIPTION)
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from amos_fairseq.preprocess.common.processes import end_children_with_this_process
    from amos_fairseq.preprocess.pretraining import prepare

    end_children_with_this_process()
    prepare.run(arguments)

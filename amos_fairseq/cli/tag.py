"""``amos tag``: fine-tune a checkpoint on sequence tagging over several seeds."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.cli import fine_tuning
from amos_fairseq.cli.arguments import add_subcommand

DESCRIPTION = """\
Fine-tune a checkpoint of this package on a column of labeled words (parts of speech, chunks, named entities): one
fairseq-train process per seed, one at a time on each GPU. The command prints and saves medians and standard deviations of
accuracy or, for IOB labels, of span F1 (tagging.md, tagging.csv and tagging.json in OUT); each run also has its predictions.
Several columns may share one OUT and then one table. After a stop the same command continues.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(
        subparsers, "tag", "fine-tune a checkpoint on sequence tagging (POS, chunks, NER)", DESCRIPTION
    )
    fine_tuning.add_arguments(parser, "directory that amos prepare tagging wrote", has_paper=False, has_pairs=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    session = fine_tuning.session_from(arguments)
    from amos_fairseq.finetuning.tagging import Tagging

    fine_tuning.run_and_print(arguments.out, Tagging(session, Path(arguments.data)))

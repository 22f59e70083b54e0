"""``amos parse``: fine-tune a checkpoint on dependency trees over several seeds."""

import argparse
from typing import Any

from amos_fairseq.cli import fine_tuning
from amos_fairseq.cli.arguments import add_subcommand, import_fairseq

DESCRIPTION = """\
Fine-tune a checkpoint of this package on the dependency trees of a treebank: one fairseq-train process per seed, one at a time
on each GPU. The command prints and saves medians and standard deviations of LAS and UAS (parsing.md, parsing.csv and
parsing.json in OUT); each run also has the dev file with its trees (predictions.conllu). After a stop the same command
continues. The files are converted with the tokenizer of the checkpoint, once; OUT/data keeps the result.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "parse", "fine-tune a checkpoint on dependency trees", DESCRIPTION)
    fine_tuning.add_arguments(
        parser,
        None,
        has_paper=False,
        has_pairs=False,
        has_pooling=False,
        raw_help="treebank in CoNLL-U, plain or as .gz, .xz or .zst",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    arguments.data = None
    train, dev = fine_tuning.raw_files(arguments)
    import_fairseq(arguments.checkpoint, arguments.subcommand)
    from amos_fairseq.finetuning.parsing import Parsing

    session = fine_tuning.session_from(arguments, Parsing.name)
    from amos_fairseq.prepare.parsing import prepare_parsing_inside

    with fine_tuning.preparing(session, Parsing.name) as tokenizer:
        data = prepare_parsing_inside(session.out, train, dev, tokenizer)
    fine_tuning.run_and_print(arguments.out, Parsing(session, data))

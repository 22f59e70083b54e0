"""``amos verify``: compare a corpus with the hashes that amos prepare stored."""

import argparse
from typing import Any

from amos_fairseq.cli.arguments import add_subcommand, import_fairseq
from amos_fairseq.errors import UserError
from amos_fairseq.files import TOKENIZER_DIRECTORY

DESCRIPTION = """\
Read all files of a corpus of amos prepare and compare them with corpus.json: tokens, indices, dictionaries and tokenizer.
Training itself compares only sizes. A difference exits with code 1 and names the file.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "verify", "compare a corpus with its hashes", DESCRIPTION, run)
    text = "directory that amos prepare wrote, or DIR0:DIR1:... for shards of it"
    parser.add_argument("data", metavar="DATA", help=text)


def run(arguments: argparse.Namespace) -> None:
    import_fairseq()
    from amos_fairseq.data.corpus import Vocabulary, corpus_directories, shard_directories, verify_files

    directories = corpus_directories(shard_directories(arguments.data))
    if Vocabulary.of_corpus(directories, None).load_tokenizer() is None:
        raise UserError(
            f"{arguments.data}: the corpus has no folder {TOKENIZER_DIRECTORY}: copy that folder again, or repeat amos prepare"
        )
    size = verify_files(directories)
    shards = f"{len(directories)} shard{'s' * (len(directories) > 1)}"
    print(f"{arguments.data}: the {size:,} bytes in {shards} and the tokenizer are as amos prepare wrote them")

"""``amos verify``: compare a corpus with the hashes that amos prepare stored."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.cli.arguments import add_subcommand, import_fairseq
from amos_fairseq.errors import UserError
from amos_fairseq.files import TOKENIZER_DIRECTORY
from amos_fairseq.output.terminal import say

DESCRIPTION = """\
Read all files of a corpus of amos prepare and compare them with corpus.json: tokens, indices, dictionaries and tokenizer.
Training itself compares only sizes. A difference exits with code 1 and names the file.

With --tokenizer, give a corpus of fairseq-preprocess the tokenizer that made its text: it is compared with dict.txt and with
lines of the text, and written into DATA/tokenizer. Runs of the corpus then have it too; name it for a run that is older
(amos export CHECKPOINT FOLDER --tokenizer DATA/tokenizer).
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "verify", "compare a corpus with its hashes", DESCRIPTION, run)
    text = "directory that amos prepare wrote, or DIR0:DIR1:... for shards of it"
    parser.add_argument("data", metavar="DATA", help=text)
    text = "the tokenizer of a corpus that has none, in any form that amos prepare takes"
    parser.add_argument("--tokenizer", type=Path, metavar="TOKENIZER", help=text)
    parser.add_argument("--vocabulary", type=Path, metavar="FILE", help="the vocabulary of fastBPE's codes")


def run(arguments: argparse.Namespace) -> None:
    import_fairseq()
    from amos_fairseq.data.corpus import Vocabulary, add_tokenizer, corpus_directories, shard_directories, verify_files

    if arguments.vocabulary is not None and arguments.tokenizer is None:
        arguments.parser.error("--vocabulary needs --tokenizer CODES, the codes of fastBPE")
    if arguments.tokenizer is not None:
        say(add_tokenizer(shard_directories(arguments.data), arguments.tokenizer, arguments.vocabulary), "verify")
        return
    directories = corpus_directories(shard_directories(arguments.data))
    if Vocabulary.of_corpus(directories, None).load_tokenizer() is None:
        raise UserError(
            f"{arguments.data}: the corpus has no folder {TOKENIZER_DIRECTORY}: copy that folder again, repeat amos prepare, "
            "or give a corpus of fairseq-preprocess the tokenizer of its text (--tokenizer)"
        )
    size = verify_files(directories)
    shards = f"{len(directories)} shard{'s' * (len(directories) > 1)}"
    print(f"{arguments.data}: the {size:,} bytes in {shards} and the tokenizer are as amos prepare wrote them")

"""The arguments of ``amos prepare`` and ``prepare.sh``, apart from the work, whose imports would slow down ``amos --help``."""

import argparse
from pathlib import Path

DESCRIPTION = """\
Convert raw text to a binarized corpus for fairseq-train.

Inputs are UTF-8: .jsonl with one document per line ({"text": ...}), anything else plain text with one paragraph per
line and blank lines between documents; each also as .gz, .xz or .zst. NUL characters are removed. All processors are
used, in constant memory. An interrupted run continues when the command is repeated."""
# AMOS, section 4: 32,768 uncased (base), 64,000 cased SentencePiece (base++).
DEFAULT_VOCAB_SIZE = 32768


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``amos prepare`` and ``prepare.sh``."""
    add = parser.add_argument
    add("text", nargs="+", type=Path, metavar="TEXT", help="input files, in the order of the corpus")
    add("--out", required=True, type=Path, metavar="DIR", help="output directory; its name must not contain a colon")
    vocabulary = parser.add_mutually_exclusive_group()
    vocabulary.add_argument(
        "--bpe", choices=("sentencepiece", "fastbpe"), help="vocabulary to learn (default: sentencepiece)"
    )
    vocabulary.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="use an existing one: a tokenizer directory of a corpus or run, one with a Hugging Face tokenizer.json, or a "
        "SentencePiece BPE model (FILE.model) without normalization",
    )
    add("--vocab-size", type=int, help=f"pieces to learn, without special symbols (default: {DEFAULT_VOCAB_SIZE})")
    case = parser.add_mutually_exclusive_group()
    case.add_argument("--cased", action="store_true", default=None, help="keep case (default for sentencepiece)")
    case.add_argument(
        "--uncased", action="store_false", dest="cased", default=None, help="lower-case (default for fastbpe)"
    )
    add("--workers", type=int, default=None, help="processes; the result is the same (default: all processors)")
    add("--seed", type=int, default=1, help="samples validation documents and the sample (default: %(default)s)")
    add("--valid-share", type=float, default=0.01, help="share of the text to hold out (default: %(default)s)")
    add("--valid-megabytes", type=float, default=4, help="hold out no more than this (default: %(default)s)")
    add("--sample-megabytes", type=float, default=200, help="text to learn pieces from (default: %(default)s)")
    add("--shard-megabytes", type=float, default=1000, help="maximum text of one shard (default: %(default)s)")

"""The flags of ``prepare.sh`` and what they mean together."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

from amos_fairseq.errors import UserError
from amos_fairseq.tokenization import Tokenizer, load_tokenizer
from preprocess.common.reading import refuse_other_formats
from preprocess.pretraining.splitting import SplitSettings

_DESCRIPTION = """Raw text to a binarized corpus for fairseq-train.

Inputs are UTF-8: .jsonl with a document a line ({"text": ...}), anything else plain text with a paragraph a line and
blank lines between documents; each also as .gz, .xz or .zst. NUL characters are left out. All processors are used in
constant memory. A run that was interrupted goes on when the command is repeated."""
_MEGABYTE = 1_000_000
# AMOS, section 4: 32,768 uncased (base), 64,000 cased SentencePiece (base++).
_DEFAULT_VOCAB_SIZE = 32768


@dataclass(frozen=True)
class Settings:
    """What decides on the content of a corpus, besides its inputs. ``bpe`` None: a tokenizer was given."""

    split: SplitSettings
    bpe: Optional[str]
    vocab_size: Optional[int]
    cased: Optional[bool]

    def describe(self, tokenizer: Optional[Tokenizer]) -> Dict[str, Any]:
        """For ``corpus.json``; two runs with equal descriptions and inputs write the same bytes."""
        vocabulary = (
            {"tokenizer": tokenizer.sha256, "cased": tokenizer.cased}
            if tokenizer is not None
            else {"tokenizer": None, "cased": self.cased}
        )
        return {"bpe": self.bpe, "vocab_size": self.vocab_size, **vocabulary, **vars(self.split)}


@dataclass(frozen=True)
class Arguments:
    inputs: List[Path]
    out: Path
    settings: Settings
    workers: int
    tokenizer: Optional[Tokenizer]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "prepare.sh", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("text", nargs="+", type=Path, metavar="TEXT", help="input files, in the order of the corpus")
    add("--out", required=True, type=Path, metavar="DIR", help="directory of the corpus; its name may hold no colon")
    vocabulary = parser.add_mutually_exclusive_group()
    vocabulary.add_argument(
        "--bpe", choices=("sentencepiece", "fastbpe"), help="vocabulary to learn (default: sentencepiece)"
    )
    vocabulary.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="use an existing one: a tokenizer directory of a corpus or run, or one with a Hugging Face tokenizer.json",
    )
    add("--vocab-size", type=int, help=f"pieces to learn, without special symbols (default: {_DEFAULT_VOCAB_SIZE})")
    case = parser.add_mutually_exclusive_group()
    case.add_argument("--cased", action="store_true", default=None, help="keep case (default for sentencepiece)")
    case.add_argument(
        "--uncased", action="store_false", dest="cased", default=None, help="lower-case (default for fastbpe)"
    )
    add("--workers", type=int, default=None, help="processes; the result is the same (default: all processors)")
    add("--seed", type=int, default=1, help="chooses validation documents and the sample (default: %(default)s)")
    add("--valid-share", type=float, default=0.01, help="share of the text to hold out (default: %(default)s)")
    add("--valid-megabytes", type=float, default=4, help="hold out no more than this (default: %(default)s)")
    add("--sample-megabytes", type=float, default=200, help="text to learn pieces from (default: %(default)s)")
    add("--shard-megabytes", type=float, default=1000, help="text of one shard at most (default: %(default)s)")
    return parser


def read_arguments(given: argparse.Namespace) -> Arguments:
    """Check what can be checked before any work.

    Raises:
        UserError: an input is missing, a number is out of range, a flag contradicts another, a tokenizer is broken.
    """
    _check_inputs(given.text)
    if ":" in str(given.out):
        raise UserError(f"--out {given.out}: fairseq separates the shards of a corpus by colons, choose a name without")
    if given.out.exists() and not given.out.is_dir():
        raise UserError(f"--out {given.out} is not a directory")
    return Arguments(given.text, given.out, _settings(given), _workers(given), _tokenizer(given))


def _settings(given: argparse.Namespace) -> Settings:
    if not 0 < given.valid_share < 1:
        raise UserError(f"--valid-share {given.valid_share} must lie between 0 and 1")
    sizes = {}
    for name in ("shard", "valid", "sample"):
        sizes[f"{name}_bytes"] = round(getattr(given, f"{name}_megabytes") * _MEGABYTE)
        if sizes[f"{name}_bytes"] < 1:
            raise UserError(f"--{name}-megabytes must be greater than 0")
    split = SplitSettings(seed=given.seed, valid_share=given.valid_share, **sizes)
    if given.tokenizer is not None:
        return Settings(split, None, None, None)
    bpe = given.bpe or "sentencepiece"
    size = _DEFAULT_VOCAB_SIZE if given.vocab_size is None else given.vocab_size
    if size < 1:
        raise UserError(f"--vocab-size {size} must be greater than 0")
    return Settings(split, bpe, size, bpe == "sentencepiece" if given.cased is None else given.cased)


def _tokenizer(given: argparse.Namespace) -> Optional[Tokenizer]:
    if given.tokenizer is None:
        return None
    for flag in ("vocab_size", "cased"):
        if getattr(given, flag) is not None:
            name = "--vocab-size" if flag == "vocab_size" else "--cased or --uncased"
            raise UserError(f"{name} cannot stand beside --tokenizer: the tokenizer decides")
    return load_tokenizer(given.tokenizer)


def _workers(given: argparse.Namespace) -> int:
    if given.workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if given.workers < 1:
        raise UserError(f"--workers {given.workers} must be at least 1")
    return given.workers


def _check_inputs(paths: List[Path]) -> None:
    for path in paths:
        refuse_other_formats(path)
        if not path.exists():
            raise UserError(f"{path}: no such file")
        if not path.is_file():
            raise UserError(f"{path} is not a file: give the files themselves, for example {path}/*")
        if not os.access(path, os.R_OK):
            raise UserError(f"{path} cannot be read: permission denied")
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty: remove it from the inputs or fill it")
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("the same input file is given twice")

"""The flags of ``prepare.sh`` and what they mean together."""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, Optional

from amos_fairseq.errors import UserError

_DESCRIPTION = """SQuAD 1.1 or 2.0 to what the task squad reads: questions, paragraphs and characters of every token.

TRAIN_JSON and DEV_JSON are official files, plain or as .gz, .xz or .zst. Lengths of windows are flags of the task, not
of this command. Answers that do not fit the tokens are counted, and named in OUT/squad.json. A finished OUT, of the same
files and settings, is left alone."""


@dataclass(frozen=True)
class Settings:
    """What decides on the content of OUT, besides files and tokenizer. ``max_train_questions`` None: all."""

    max_train_questions: Optional[int]
    seed: int

    def describe(self) -> Dict[str, Any]:
        """For ``squad.json``. The seed matters only where questions are chosen."""
        return asdict(self) | ({"seed": None} if self.max_train_questions is None else {})


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "prepare.sh", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("train", type=Path, metavar="TRAIN_JSON", help="train-v1.1.json or train-v2.0.json")
    add("dev", type=Path, metavar="DEV_JSON", help="the dev file of the same version")
    add("tokenizer", type=Path, metavar="TOKENIZER_DIR", help="tokenizer of a corpus or run, or tokenizer.json's place")
    add("out", type=Path, metavar="OUT", help="directory of the result")
    add("--max-train-questions", type=int, default=None, metavar="N", help="draw so many to train on (default: all)")
    add("--seed", type=int, default=1, help="draws the questions of --max-train-questions (default: %(default)s)")
    return parser


def read_settings(given: argparse.Namespace) -> Settings:
    """:class:`UserError` for numbers out of range and files that are not there, before any work."""
    for path in (given.train, given.dev):
        if not path.is_file():
            raise UserError(f"{path}: no such file: give an official file of SQuAD")
    if given.max_train_questions is not None and given.max_train_questions < 1:
        raise UserError(f"--max-train-questions {given.max_train_questions} must be at least 1")
    return Settings(given.max_train_questions, given.seed)

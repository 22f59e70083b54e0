"""Help formatting, and the arguments that several subcommands share.

The modules of this folder import PyTorch, fairseq and other large libraries inside the functions that need them, after the
arguments were checked: ``amos --help`` and mistakes take a fraction of a second.
"""

import argparse
import difflib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import amos_fairseq
from amos_fairseq.checkpoint_files import checkpoint_file, is_hugging_face
from amos_fairseq.errors import UserError
from amos_fairseq.experiments.records import best_checkpoint
from amos_fairseq.output.terminal import say
from amos_fairseq.recipes import did_you_mean


def import_fairseq(
    checkpoint: str | None = None, name: str | None = None, inputs: Iterable[str | Path | None] = ()
) -> None:
    """Import PyTorch, fairseq and this package, which takes seconds, unless the checkpoint or one of the ``inputs`` (None: not
    given) is missing; the command ``name`` says first what it reads."""
    for path in inputs:
        if path is not None and not Path(path).exists():
            raise UserError(f"{path}: no such file or folder")
    if checkpoint is not None and not is_hugging_face(Path(checkpoint)):
        checkpoint_file(best_checkpoint(Path(checkpoint)))
    if name is not None:
        say(f"reading {checkpoint}", name)
    amos_fairseq.register()


def refuse_ranks(name: str) -> None:
    """Refuse a command that starts its trainings itself as one of several ranks: each would do all of the work."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"amos {name} starts its trainings itself, on all GPUs: start it once, without torchrun (WORLD_SIZE is set)"
        )


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Append the default of an option to its help, unless that is None, False or empty, or the help states it already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is False or action.default in (None, (), []) or "(default: " in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class ArgumentParser(argparse.ArgumentParser):
    """Takes no abbreviations, and names an unknown option, with one that is similar, before it misses another."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **options)

    def parse_known_args(self, args: Sequence[str], namespace: argparse.Namespace | None = None) -> Any:
        takes_rest = any(action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in self._actions)
        for word in () if takes_rest else itertools.takewhile("--".__ne__, args):
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in word and name not in self._option_string_actions:
                similar = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.75)
                self.error(f"unrecognized arguments: {name}{did_you_mean(similar)}")
        return super().parse_known_args(args, namespace)


def add_subcommand(
    subparsers: Any, name: str, help: str, description: str, run: Callable[[argparse.Namespace], object]
) -> argparse.ArgumentParser:
    """Add the parser of a subcommand, which ``run`` gets among its arguments; ``help`` is its line in ``amos --help``."""
    parser = subparsers.add_parser(name, help=help, description=description, formatter_class=HelpFormatter)
    parser.set_defaults(run=run, parser=parser)
    return parser


def number(kind: Callable[[str], float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return a ``type`` of argparse: a finite number, int or float, from ``least`` to ``most``."""

    def parse(text: str) -> float:
        value = kind(text)
        if not (least <= value <= most and math.isfinite(value)):
            limit = "" if most == math.inf else f" and at most {most:,}"
            raise argparse.ArgumentTypeError(f"{text} must be at least {least:,}{limit}")
        return value

    parse.__name__ = kind.__name__  # argparse names it where the text is no number
    return parse


SIZE = number(int, 1)


def refuse_given(args: argparse.Namespace, names: Iterable[str], reason: str) -> None:
    """Refuse options that were given, because of ``reason``."""
    for name in names:
        if getattr(args, name) != args.parser.get_default(name):
            flag = "set" if name == "overrides" else name.replace("_", "-")
            args.parser.error(f"--{flag} {reason}: leave it out")


def add_checkpoint(
    parser: argparse.ArgumentParser,
    chosen_in_run: str = "its last checkpoint, or the best one where fine-tuning kept only that",
) -> None:
    text = f"checkpoint, or SAVE_DIR of a run ({chosen_in_run}), or a Hugging Face folder"
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=text)
    text = "tokenizer directory of the run (default: the directory tokenizer beside the checkpoint, or the folder)"
    parser.add_argument("--tokenizer", metavar="DIR", help=text)


def add_overrides(parser: argparse.ArgumentParser, example: str) -> None:
    several = {"nargs": "+", "action": "extend", "metavar": "KEY=VALUE", "default": []}
    text = f"settings to change, such as {example} (default: none)"
    parser.add_argument("--set", dest="overrides", **several, help=text)


def add_label_columns(add: Any) -> None:
    """Add --column and --columns, which choose the labels of a file of labeled words."""
    text = (
        "labels to predict: upos (default), xpos or deprel of CoNLL-U; a name of --columns (default: the last column, "
    )
    text += (
        "label, of files with one word a line); a list in tables (default: tags or ner_tags, or the spans of a text)"
    )
    add("--column", metavar="NAME", help=text)
    text = "names of all columns of files with one word a line, with word among them (default: word,2,...,label)"
    add("--columns", metavar="A,B,...", type=lambda value: value.split(","), help=text)


def add_unlabeled(add: Any) -> None:
    """Add --labeled and --unlabeled, which choose the sentences that train with and without labels."""
    text = "train on N sentences with labels, at equal distances in the file (default: all)"
    add("--labeled", type=SIZE, metavar="N", help=text)
    text = "sentences for --views, whose labels are ignored: the same forms as --train, or one sentence a line with blanks "
    text += "between its words; or rest, the training sentences that --labeled leaves"
    add("--unlabeled", metavar="FILE", help=text)

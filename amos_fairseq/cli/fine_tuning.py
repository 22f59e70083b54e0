"""Arguments that the commands of fine-tuning share, and the checks of them that need no large import."""

import argparse
import os
from pathlib import Path

from amos_fairseq.cli.arguments import import_fairseq, refuse_given
from amos_fairseq.errors import UserError
from amos_fairseq.experiments import VIEW_LAYERS, VIEW_TARGETS, recipe_file
from amos_fairseq.output.terminal import say
from amos_fairseq.recipes import PRECISIONS

SIZES = ("small", "base", "large")
INPUTS = ("train", "dev", "data", "predict", "teachers", "own_tasks")  # arguments that name existing files and folders
SAMPLING_EXPONENT = 0.75


def add_arguments(
    parser: argparse.ArgumentParser,
    data_help: str | None,
    has_pairs: bool = True,
    has_pooling: bool = True,
    raw_help: str | None = None,
    dev_default: str = "",
    several_data: bool = False,
    recipe: str = "amos",
) -> None:
    """Add what to fine-tune, the recipe and options that override it (None leaves the recipe's value), and the devices.

    Args:
        data_help: of --data; None for a command without it.
        has_pairs: whether an input can be a pair of texts.
        has_pooling: whether the head reads one vector for each input.
        raw_help: what a raw file is, for --train and --dev, which may then replace --data (:func:`check_data`).
        dev_default: what --dev is by default, for its help.
        several_data: whether --data takes several directories.
        recipe: the default of --recipe.
    """
    add = parser.add_argument
    text = "checkpoint, or SAVE_DIR of a run (its last checkpoint)"
    add("--checkpoint", metavar="CKPT", required=True, help=text)
    if raw_help is not None:
        text = f"raw files, converted with the tokenizer of the checkpoint and kept in OUT/data: {raw_help}"
        add("--train", metavar="FILE", type=Path, help=text)
        add("--dev", metavar="FILE", type=Path, help=f"the same, to score on{dev_default}")
        data_help = None if data_help is None else f"instead of --train and --dev: {data_help}"
    if data_help is not None:
        several = {"nargs": "+", "action": "extend"} if several_data else {}
        add("--data", metavar="DIR", required=raw_help is None, help=data_help, **several)
    text = "directory for runs, tables and predictions; the same command continues there"
    add("--out", metavar="DIR", required=True, help=text)
    add("--seeds", type=int, metavar="N", default=5, help="runs per task, with seeds 1 to N")
    add("--from-scratch", action="store_true", help="baseline: initialize the checkpoint's architecture randomly")
    text = "own_labels, amos, amos_grid, bam, electra, electric, mlm, teams, or the path of a YAML file"
    add("--recipe", metavar="NAME", default=recipe, help=text)
    text = "small, base or large, of a recipe with sizes (default: from the encoder's width)"
    add("--size", choices=SIZES, metavar="SIZE", help=text)
    add("--lr", type=float, help="learning rate of every task (default: the recipe's)")
    add("--epochs", type=int, metavar="N", help="epochs of every task (default: the recipe's)")
    add("--batch-size", type=int, metavar="N", help="batch size of every task (default: the recipe's)")
    if has_pairs:
        text = "</s> between the texts of a pair, 1 or 2 (default: the recipe's: 2 in amos and amos_grid, else 1)"
        add("--num-separators", type=int, choices=(1, 2), metavar="N", help=text)
    text = "repeat all epochs until there are N updates or more, for small data (default: the recipe's)"
    add("--min-updates", type=int, metavar="N", help=text)
    text = "the head reads layer K (a number from 1 on), and the layers above it are left out; mix: a learned mixture of all "
    text += "layers; or last (default: the recipe's, last)"
    add("--layers", metavar="K", help=text)
    text = "start the N upper layers from new random weights, for small data (default: the recipe's, 0)"
    add("--new-top-layers", type=int, metavar="N", help=text)
    text = "train the head alone, with a rate for it (0.001) instead of a built-in recipe's"
    add("--freeze-encoder", action="store_const", const=True, help=text)
    if has_pooling:
        text = "the head reads the state of the first token, or the mean of all (default: the recipe's, first)"
        add("--pooling", choices=("first", "mean"), help=text)
    text = "batches of examples of similar length, which need little padding, or random ones (default: the recipe's)"
    add("--similar-lengths", action=argparse.BooleanOptionalAction, help=text)

    add("--parallel", type=int, metavar="N", default=1, help="concurrent runs on the CPU; each GPU runs one at a time")
    add("--cpu", action="store_true", help="do not use GPUs")
    text = (
        "dtype of the training; auto: bf16 where the CPU, or every GPU, has fast bfloat16 products, else float32; fp16 "
    )
    text += "needs a GPU"
    add("--precision", choices=PRECISIONS, default="float32", help=text)
    text = "keep all checkpoints of every run, not only the weights of each task's best run"
    add("--keep-checkpoints", action="store_true", help=text)


def add_sampling_exponent(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option of several tasks in one model; ``what``: what it is for."""
    text = f"{what}: the share of a task of N rows is proportional to N to this power (0: equal shares; 1: by size)"
    parser.add_argument("--sampling-exponent", type=float, metavar="E", default=SAMPLING_EXPONENT, help=text)


def add_cross_views(parser: argparse.ArgumentParser, views: tuple[str, ...]) -> None:
    """Add the options of cross-view training, of labels of words or of trees; ``views``: those of the head."""
    add = parser.add_argument
    text = "cross-view training on the sentences of --unlabeled: views separated by ',', of "
    text += f"{', '.join(views)}, and the baseline word_dropout (default: the recipe's, none)"
    add("--views", metavar="A,B,...", help=text)
    text = "layers that compute the one-sided states: the lower half, or all (default: the recipe's, half)"
    add("--view-layers", choices=VIEW_LAYERS, help=text)
    text = "what a view learns of an unlabeled word: the predicted probabilities, or the most likely class alone "
    add("--view-targets", choices=VIEW_TARGETS, help=text + "(default: the recipe's, soft)")
    text = "leave out unlabeled words whose most likely class has a smaller probability (default: the recipe's, 0)"
    add("--view-confidence", type=float, metavar="P", help=text)
    text = "fraction of the updates before unlabeled sentences train the model itself; until then they train only the "
    text += "modules of the views (default: the recipe's, 0.1)"
    add("--unlabeled-start", type=float, metavar="F", help=text)


def check_prediction(arguments: argparse.Namespace, *used: str) -> None:
    """Refuse an option that was given with ``--predict`` and is not among the ``used`` ones, and an ``--out`` that exists: it
    may be anything, such as the labels that people have given to these rows."""
    used += ("subcommand", "checkpoint", "predict", "out", "cpu")
    refuse_given(arguments, [name for name in vars(arguments) if name not in used], "has no effect with --predict")
    if not arguments.out or str(arguments.out).endswith(os.sep):
        raise UserError(f"--out {arguments.out}: with --predict it is a file: give its name")
    if os.path.lexists(arguments.out):
        raise UserError(f"{arguments.out} exists: give another --out")
    if not (folder := Path(arguments.out).absolute().parent).is_dir():
        raise UserError(f"{arguments.out}: there is no folder {folder}: create it, or give another --out")
    if not Path(arguments.checkpoint).exists():
        raise UserError(
            f"--checkpoint {arguments.checkpoint}: no such file or folder: give the --out of the command that trained"
        )


def check_data(arguments: argparse.Namespace, needs_dev: bool = True) -> None:
    flags = [f"--{name}" for name in ("train", "dev") if getattr(arguments, name) is not None]
    if arguments.data is not None and flags:
        raise UserError(f"{' and '.join(flags)} and --data are two ways to give the data: leave one of them out")
    if arguments.data is None and not flags:
        raise UserError("there are no data: give raw files as --train FILE --dev FILE, or prepared ones as --data DIR")
    if flags == ["--dev"] or (flags == ["--train"] and needs_dev):
        missing = "--dev" if flags == ["--train"] else "--train"
        raise UserError(f"{flags[0]} needs {missing} too, the other raw file")


def start(arguments: argparse.Namespace) -> None:
    """Say what is read, look for the files and the recipe, and import PyTorch and fairseq, which takes seconds."""
    given = [getattr(arguments, name, None) for name in INPUTS]
    inputs = [path for value in given for path in (value if isinstance(value, list) else [value])]
    if getattr(arguments, "predict", None) is None:
        recipe_file(arguments.recipe)
        import_fairseq(arguments.checkpoint, arguments.subcommand, inputs)
    else:
        say(f"reading {arguments.checkpoint} and {arguments.predict}", arguments.subcommand)
        import_fairseq(inputs=inputs)

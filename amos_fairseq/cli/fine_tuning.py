"""Arguments that the commands of fine-tuning share, and the checks of them that need no large import."""

import argparse
import os
from pathlib import Path

from amos_fairseq.checkpoint_files import is_hugging_face
from amos_fairseq.cli.arguments import add_overrides, import_fairseq, number, refuse_given, refuse_ranks
from amos_fairseq.errors import UserError
from amos_fairseq.experiments import recipe_file
from amos_fairseq.inputs.files import COMPRESSIONS
from amos_fairseq.output.terminal import say
from amos_fairseq.recipes import PRECISIONS

INPUTS = ("train", "dev", "test", "data", "predict", "teachers")  # arguments that name existing files and folders


def add_arguments(
    parser: argparse.ArgumentParser,
    data_help: str | None,
    has_pooling: bool = True,
    raw_help: str | None = None,
    dev_default: str = "",
    several_data: bool = False,
    recipe: str = "amos",
) -> None:
    """Add what to fine-tune, the recipe and options that override it (None leaves the recipe's value), and the devices.

    Args:
        data_help: of --data; None for a command without it.
        has_pooling: whether the head reads one vector for each input.
        raw_help: what a raw file is, for --train and --dev, which may then replace --data (:func:`check_data`).
        dev_default: what --dev is by default, for its help.
        several_data: whether --data takes several directories.
        recipe: the default of --recipe; one for own labels has one seed, those of the papers' benchmarks five.
    """
    add = parser.add_argument
    text = "checkpoint, SAVE_DIR of a run (its last checkpoint), or a Hugging Face folder, which is imported into OUT/imported"
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
    seeds = 1 if recipe == "own_labels" else 5
    text = f"runs per task, with seeds 1 to N (default: {seeds})"
    add("--seeds", type=number(int, 1, 10_000), metavar="N", default=seeds, help=text)
    add("--from-scratch", action="store_true", help="baseline: initialize the checkpoint's architecture randomly")
    text = "own_labels, amos, amos_grid, bam, electra, electric, mlm, teams, or the path of a YAML file"
    add("--recipe", metavar="NAME", default=recipe, help=text)
    add("--lr", type=float, help="learning rate of every task (default: the recipe's)")
    add("--epochs", type=int, metavar="N", help="epochs of every task (default: the recipe's)")
    add("--batch-size", type=int, metavar="N", help="batch size of every task (default: the recipe's)")
    text = "repeat all epochs until there are N updates or more, for small data (default: the recipe's)"
    add("--min-updates", type=int, metavar="N", help=text)
    text = "train the head alone, with a rate for it (0.001) instead of a built-in recipe's"
    add("--freeze-encoder", action="store_const", const=True, help=text)
    if has_pooling:
        text = "the head reads the state of the first token, or the mean of all (default: the checkpoint's or recipe's)"
        add("--pooling", choices=("first", "mean"), help=text)
    add_overrides(parser, "weight_decay=0.01 label_smoothing=0.1")

    add(
        "--parallel",
        type=number(int, 1, 1024),
        metavar="N",
        default=1,
        help="concurrent runs on the CPU; each GPU runs one at a time",
    )
    add("--cpu", action="store_true", help="do not use GPUs")
    text = (
        "dtype of the training; auto: bf16 where the CPU, or every GPU, has fast bfloat16 products, else float32; fp16 "
    )
    text += "needs a GPU"
    add("--precision", choices=PRECISIONS, default="float32", help=text)
    text = "keep all checkpoints of every run, not only the weights of each task's best run"
    add("--keep-checkpoints", action="store_true", help=text)


def add_cross_views(parser: argparse.ArgumentParser, views: tuple[str, ...]) -> None:
    """Add the options of cross-view training, of labels of words or of trees; ``views``: those of the head."""
    add = parser.add_argument
    text = "cross-view training on the sentences of --unlabeled: views separated by ',', of "
    text += f"{', '.join(views)}, and the baseline word_dropout (default: the recipe's, none)"
    add("--views", metavar="A,B,...", help=text)


def check_prediction(args: argparse.Namespace, *used: str, suffixes: tuple[str, ...] = ()) -> None:
    """Refuse an option that was given with ``--predict`` and is not among the ``used`` ones, an ``--out`` that has none of the
    ``suffixes``, and one that exists: it may be anything, such as the labels that people have given to these rows."""
    used += ("subcommand", "checkpoint", "predict", "out", "cpu")
    refuse_given(args, [name for name in vars(args) if name not in used], "has no effect with --predict")
    out = Path(args.out).absolute()
    suffix = out.suffix.lower()
    if suffix in COMPRESSIONS or (suffixes and suffix not in suffixes):
        name = f"that ends with {', '.join(suffixes)}" if suffixes else f"without {suffix}"
        raise UserError(f"--out {args.out}: with --predict it is a file, not compressed: give a name {name}")
    if os.path.lexists(out) or not out.parent.is_dir():
        problem = "exists" if os.path.lexists(out) else f"is in {out.parent}, which is no folder"
        raise UserError(f"{args.out} {problem}: give the name of a new file as --out")


def check_data(args: argparse.Namespace, needs_dev: bool = True) -> None:
    """Refuse anything but prepared data alone or raw files alone."""
    raw = (args.train, args.dev)
    is_complete = args.train is not None and not (needs_dev and args.dev is None)
    if not (raw == (None, None) if args.data is not None else is_complete):
        dev = "--dev FILE" if needs_dev else "[--dev FILE]"
        args.parser.error(f"give either raw files as --train FILE {dev}, or prepared ones as --data DIR")


def start(args: argparse.Namespace) -> None:
    """Say what is read, look for the files and the recipe, and import PyTorch and fairseq, which takes seconds."""
    refuse_ranks(args.subcommand)
    named = [getattr(args, name, None) for name in INPUTS]
    inputs = [path for value in named for path in (value if isinstance(value, list) else [value])]
    if getattr(args, "predict", None) is None:
        recipe_file(args.recipe)
        import_fairseq(args.checkpoint, args.subcommand, inputs)
        if is_hugging_face(Path(args.checkpoint)):
            from amos_fairseq.hugging_face.import_folder import import_into

            args.checkpoint, lines = import_into(Path(args.checkpoint), Path(args.out) / "imported")
            for line in lines:
                say(line, args.subcommand)
    else:
        say(f"reading {args.checkpoint} and {args.predict}", args.subcommand)
        import_fairseq(inputs=[*inputs, args.checkpoint])

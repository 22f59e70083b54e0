"""Arguments, session and exits that ``amos glue``, ``amos squad`` and ``amos tag`` share."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from amos_fairseq.downstream.views import VIEW_LAYERS
from amos_fairseq.errors import INTERRUPTED, UserError
from amos_fairseq.output.terminal import say
from amos_fairseq.recipes import PRECISIONS

if TYPE_CHECKING:
    from amos_fairseq.downstream.benchmark import Benchmark
    from amos_fairseq.downstream.session import Session
    from amos_fairseq.text.tokenization import Tokenizer

SIZES = ("small", "base", "large")


def add_arguments(
    parser: argparse.ArgumentParser,
    data_help: str | None,
    required: bool = True,
    has_paper: bool = True,
    has_pairs: bool = True,
    has_pooling: bool = True,
    raw_help: str | None = None,
    several_data: bool = False,
) -> None:
    """Add what to fine-tune, the recipe and options that override it (None leaves the recipe's value), and the devices.

    Args:
        data_help: of --data; None for a command without it, which then needs ``raw_help`` or options of its own.
        required: whether the parser itself requires --checkpoint, --data and --out.
        has_paper: whether the papers report the scores.
        has_pairs: whether an input can be a pair of texts.
        has_pooling: whether the head reads one vector for each input.
        raw_help: what a raw file is, for --train and --dev, which may then replace --data (:func:`raw_files`).
        several_data: whether --data takes several directories.
    """
    add = parser.add_argument
    text = "checkpoint, or SAVE_DIR of a run (its last checkpoint)"
    add("--checkpoint", metavar="CKPT", required=required, help=text)
    if raw_help is not None:
        text = f"raw files, converted with the tokenizer of the checkpoint and kept in OUT/data: {raw_help}"
        add("--train", metavar="FILE", type=Path, help=text)
        add("--dev", metavar="FILE", type=Path, help="the same, to score on")
        data_help = None if data_help is None else f"instead of --train and --dev: {data_help}"
    if data_help is not None:
        several = {"nargs": "+", "action": "extend"} if several_data else {}
        add("--data", metavar="DIR", required=required and raw_help is None, help=data_help, **several)
    text = "directory for runs, tables and predictions; the same command continues there"
    add("--out", metavar="DIR", required=required, help=text)
    add("--seeds", type=int, metavar="N", default=5, help="runs per task, with seeds 1 to N")
    add("--from-scratch", action="store_true", help="baseline: initialize the checkpoint's architecture randomly")
    if has_paper:
        add("--paper", action="store_true", help="add rows with the paper's AMOS, ELECTRA and BERT to the table")

    text = "amos, amos_grid, bam, electra, electric, mlm, teams, or the path of a YAML file"
    add("--recipe", metavar="NAME", default="amos", help=text)
    text = "small, base or large, where the recipe depends on it (default: from the encoder's width)"
    add("--size", choices=SIZES, metavar="SIZE", help=text)
    add("--lr", type=float, help="learning rate of every task (default: the recipe's)")
    add("--epochs", type=int, metavar="N", help="epochs of every task (default: the recipe's)")
    add("--batch-size", type=int, metavar="N", help="batch size of every task (default: the recipe's)")
    if has_pairs:
        text = "</s> between the texts of a pair, 1 or 2 (default: the recipe's: 2 in amos and amos_grid, else 1)"
        add("--num-separators", type=int, choices=(1, 2), metavar="N", help=text)
    else:
        parser.set_defaults(num_separators=None)

    text = "repeat all epochs until there are N updates or more, for small data (default: the recipe's, 0)"
    add("--min-updates", type=int, metavar="N", help=text)
    text = "the head reads layer K (a number from 1 on), and the layers above it are left out; mix: a learned mixture of all "
    text += "layers; or last (default: the recipe's, last)"
    add("--layers", metavar="K", help=text)
    text = "start the N upper layers from new random weights, for small data (default: the recipe's, 0)"
    add("--new-top-layers", type=int, metavar="N", help=text)
    if has_pooling:
        text = "the head reads the state of the first token, or the mean of all (default: the recipe's, first)"
        add("--pooling", choices=("first", "mean"), help=text)
    else:
        parser.set_defaults(pooling=None)

    text = "batches of examples of similar length, which need little padding, or random ones (default: the recipe's)"
    add("--similar-lengths", action=argparse.BooleanOptionalAction, help=text)

    add("--parallel", type=int, metavar="N", default=1, help="concurrent runs on the CPU; each GPU runs one at a time")
    add("--cpu", action="store_true", help="do not use GPUs")
    text = "dtype of the training; auto: as in the results in OUT, and for new ones bf16 where the CPU, or every GPU, "
    text += "supports bfloat16 in hardware, else float32; fp16 needs a GPU"
    add("--precision", choices=PRECISIONS, default="float32", help=text)
    text = "keep all checkpoints of every run, not only the weights of each task's best run"
    add("--keep-checkpoints", action="store_true", help=text)


def add_cross_views(parser: argparse.ArgumentParser, views: tuple[str, ...]) -> None:
    """Add the options of cross-view training, of labels of words or of trees; ``views``: those of the head."""
    add = parser.add_argument
    text = "cross-view training on the sentences of --unlabeled: views separated by ',', of "
    text += f"{', '.join(views)}, and the baseline word_dropout (default: the recipe's, none)"
    add("--views", metavar="A,B,...", help=text)
    text = "layers that compute the one-sided states: the lower half, or all (default: the recipe's, half)"
    add("--view-layers", choices=VIEW_LAYERS, help=text)
    text = "fraction of the updates before unlabeled sentences train the model itself; until then they train only the "
    text += "modules of the views (default: the recipe's, 0.1)"
    add("--unlabeled-start", type=float, metavar="F", help=text)


def session_from(arguments: argparse.Namespace, name: str) -> "Session":
    """Open the session of the benchmark ``name`` that the arguments describe. fairseq is imported.

    Raises:
        UserError: a value cannot be used.
    """
    from amos_fairseq.downstream.session import OVERRIDES, open_session

    overrides = {name: getattr(arguments, name, None) for name in OVERRIDES}
    session = open_session(
        arguments.checkpoint,
        arguments.out,
        arguments.recipe,
        name,
        size=arguments.size,
        num_seeds=arguments.seeds,
        from_scratch=arguments.from_scratch,
        overrides=overrides,
        cpu=arguments.cpu,
        parallel=arguments.parallel,
        precision=arguments.precision,
        keep_checkpoints=arguments.keep_checkpoints,
    )
    if arguments.precision == "auto":
        say(f"precision {session.precision}", arguments.subcommand)
    return session


def check_prediction(parser: argparse.ArgumentParser, arguments: argparse.Namespace, used: tuple[str, ...]) -> None:
    """Raise :class:`UserError` for an option that was given with ``--predict`` and is not among the ``used`` ones."""
    for name, value in vars(arguments).items():
        if name not in used and value != parser.get_default(name):
            raise UserError(f"--{name.replace('_', '-')} has no effect with --predict: leave it out")


def raw_files(arguments: argparse.Namespace) -> tuple[Path, Path] | None:
    """Return the values of --train and --dev; None where --data is given instead.

    Raises:
        UserError: neither, both, or half of them.
    """
    train, dev = arguments.train, arguments.dev
    if arguments.data is not None:
        if train is None and dev is None:
            return None
        given = "--train" if dev is None else "--dev" if train is None else "--train and --dev"
        raise UserError(f"{given} and --data are two ways to give the data: leave one of them out")
    if train is None and dev is None:
        raise UserError("there are no data: give raw files as --train FILE --dev FILE, or prepared ones as --data DIR")
    if train is None or dev is None:
        given, missing = ("--train", "--dev") if dev is None else ("--dev", "--train")
        raise UserError(f"{given} needs {missing} too, the other raw file")
    return train, dev


@contextlib.contextmanager
def preparing(session: "Session", name: str) -> Iterator["Tokenizer"]:
    """Yield the checkpoint's tokenizer to prepare data inside of OUT with. Ctrl-C and disk errors end in one line.

    Args:
        name: of the benchmark.

    Raises:
        UserError: OUT holds results of another checkpoint, or there is no tokenizer beside the checkpoint.
    """
    from amos_fairseq.downstream.session import preparing as session_preparing

    with session_preparing(session, name) as tokenizer:
        yield tokenizer


def run_and_print(out: str, benchmark: "Benchmark") -> None:
    """Run the benchmark in ``out``, and print its table, notices and paths.

    SIGINT and SIGTERM exit with a line that says how to continue; raise :class:`UserError` if a run failed.
    """
    from amos_fairseq.downstream.benchmark import Stopped
    from amos_fairseq.downstream.runner import run_benchmark

    try:
        outcome = run_benchmark(benchmark)
    except (Stopped, KeyboardInterrupt):
        print(f"stopped; finished runs are in {out}, and the same command continues with the others", file=sys.stderr)
        sys.exit(INTERRUPTED)
    if outcome.table is not None:
        outcome.table.print()
    for line in (*outcome.notices, *outcome.files):
        print(line)
    failures = outcome.failures
    for failure in failures:
        print(f"{failure.run.label}: {failure.reason} (log: {failure.log})", file=sys.stderr)
    if failures:
        raise UserError(
            f"{len(failures)} runs failed (log of the first: {failures[0].log}); the same command repeats only these"
        )

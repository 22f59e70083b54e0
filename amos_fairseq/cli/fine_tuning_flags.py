"""Flags that ``amos glue`` and ``amos squad`` share, and how such a command ends."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from amos_fairseq.errors import UserError

if TYPE_CHECKING:
    from amos_fairseq.finetuning.runner import Failure
    from amos_fairseq.finetuning.session import Session

STOPPED = 130  # what a shell reports of a command that SIGINT ended


def add_run_flags(parser: argparse.ArgumentParser, data_help: str, required: bool = True) -> None:
    """``required``: whether the parser itself asks for --checkpoint, --data and --out."""
    add = parser.add_argument
    needed = {"metavar": "DIR", "required": required, "default": argparse.SUPPRESS}
    add("--checkpoint", **needed | {"metavar": "CKPT"}, help="a checkpoint, or the SAVE_DIR of a run (its last one)")
    add("--data", **needed, help=data_help)
    add("--out", **needed, help="where runs, tables and predictions go; the same command continues")
    add("--seeds", type=int, metavar="N", default=5, help="runs per task, seeds 1 to N")
    add("--from-scratch", action="store_true", help="random weights in the checkpoint's architecture, as a baseline")


def add_recipe_flags(parser: argparse.ArgumentParser) -> None:
    """Absent flags are absent in the namespace: the recipe decides."""
    add = parser.add_argument
    add("--recipe", metavar="NAME", default="amos",
        help="amos, amos_grid, electra, electric, mlm, teams, or the path of a YAML file")  # fmt: skip
    add("--size", choices=("small", "base", "large"), metavar="SIZE", default=argparse.SUPPRESS,
        help="small, base or large, where the recipe differs (default: by the encoder's width)")  # fmt: skip
    add("--lr", type=float, default=argparse.SUPPRESS, help="for every task (default: the recipe's)")
    add("--epochs", type=int, metavar="N", default=argparse.SUPPRESS, help="for every task (default: the recipe's)")
    add("--batch-size", type=int, metavar="N", default=argparse.SUPPRESS, help="for every task (default: the recipe's)")


def add_device_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--parallel", type=int, metavar="N", default=1, help="runs at a time on the CPU; GPUs take one each")
    add("--cpu", action="store_true", help="leave GPUs alone")
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument("--fp16", action="store_true", help="train in float16 instead of float32, on a GPU")
    precision.add_argument("--bf16", action="store_true", help="train in bfloat16 instead of float32, on a GPU")
    add("--keep-checkpoints", action="store_true",
        help="keep every run's checkpoints whole, not only the weights of each task's best run")  # fmt: skip


def session_of(arguments: argparse.Namespace) -> "Session":
    """Raises :class:`UserError` for what cannot be used."""
    from amos_fairseq.finetuning.session import OVERRIDES, open_session

    return open_session(
        arguments.checkpoint,
        arguments.out,
        arguments.recipe,
        size=getattr(arguments, "size", None),
        num_seeds=arguments.seeds,
        from_scratch=arguments.from_scratch,
        overrides={name: getattr(arguments, name, None) for name in OVERRIDES},
        cpu=arguments.cpu,
        parallel=arguments.parallel,
        precision="fp16" if arguments.fp16 else "bf16" if arguments.bf16 else "fp32",
        keep_checkpoints=arguments.keep_checkpoints,
    )


def say_stopped(out: str) -> None:
    """Tell that the work can be continued, and exit."""
    print(f"stopped; finished runs stay in {out}, and the same command continues the others", file=sys.stderr)
    sys.exit(STOPPED)


def report_failures(failures: "list[Failure]") -> None:
    """Raise :class:`UserError` if a run failed, after a line for each."""
    for failure in failures:
        print(f"{failure.run.label}: {failure.reason} (log: {failure.log})", file=sys.stderr)
    if failures:
        raise UserError(
            f"runs that failed: {len(failures)} (the first: {failures[0].log}); the same command repeats them, and no other"
        )


def say_files(files: list[Path]) -> None:
    for file in files:
        print(file)

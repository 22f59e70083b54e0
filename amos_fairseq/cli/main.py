"""The ``amos`` command: tools around training. Each subcommand is a file with ``add_parser`` and ``run``."""

import argparse
import logging
import os
import signal
import sys
from typing import Optional, Sequence

from amos_fairseq.cli import (
    bench,
    export,
    flops,
    glue,
    import_,
    inspect,
    plot,
    prepare,
    recipes,
    score,
    squad,
    train,
    verify,
)
from amos_fairseq.errors import report_user_errors

INTERRUPTED = 128 + signal.SIGINT  # the exit status that shells report for a command ended by Ctrl-C
SUBCOMMANDS = (prepare, recipes, train, inspect, plot, import_, export, glue, squad, score, flops, bench, verify)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="amos", description="Tools around AMOS pretraining with fairseq-train.")
    subparsers = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", required=True)
    for subcommand in SUBCOMMANDS:
        subcommand.add_parser(subparsers)
    return parser


@report_user_errors()
def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run one subcommand and return its exit status.

    A :class:`UserError` exits with one line and status 1, wrong flags with status 2, Ctrl-C with status 130.
    """
    parsed = build_parser().parse_args(arguments)
    # Importing fairseq sets the root logger to DEBUG, which would print thousands of lines about fonts and files.
    logging.getLogger().setLevel(logging.WARNING)
    try:
        parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # `amos inspect ... | head` closes the output early; without this the interpreter complains when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print(f"amos {parsed.subcommand}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())

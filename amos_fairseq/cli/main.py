"""The ``amos`` command: everything around training. One file per subcommand, with ``add_parser`` and ``run``."""

import argparse
import logging
import os
import signal
import sys
from typing import Optional, Sequence

from amos_fairseq.cli import bench, export, flops, glue, import_, inspect, plot, score, squad
from amos_fairseq.errors import report_user_errors

INTERRUPTED = 128 + signal.SIGINT  # what shells say of a command that Ctrl-C has ended
SUBCOMMANDS = (inspect, plot, import_, export, glue, squad, score, flops, bench)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="amos", description="What surrounds AMOS pretraining with fairseq-train.")
    subparsers = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", required=True)
    for subcommand in SUBCOMMANDS:
        subcommand.add_parser(subparsers)
    return parser


@report_user_errors()
def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run one subcommand. A user's mistake ends it with one line and status 1; unknown flags with status 2,
    Ctrl-C with 130."""
    parsed = build_parser().parse_args(arguments)
    # Importing fairseq sets the root logger to DEBUG; thousands of lines about fonts and files would bury our own.
    logging.getLogger().setLevel(logging.WARNING)
    try:
        parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # `amos inspect ... | head` closes our output early; the interpreter must not complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print(f"amos {parsed.subcommand}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())

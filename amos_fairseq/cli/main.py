"""The ``amos`` command: tools around training. Each subcommand is a file with ``add_parser`` and ``run``."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence

from amos_fairseq.cli import (
    adapt,
    classify,
    export,
    flops,
    glue,
    import_,
    parse,
    prepare,
    probe,
    recipes,
    report,
    score,
    squad,
    tag,
    train,
    verify,
)
from amos_fairseq.cli.arguments import ArgumentParser
from amos_fairseq.errors import INTERRUPTED, UserError, report_user_errors
from amos_fairseq.files import NO_ROOM
from amos_fairseq.process import describe_versions
from amos_fairseq.recipes import did_you_mean

SUBCOMMANDS = (
    prepare,
    recipes,
    train,
    adapt,
    report,
    import_,
    export,
    classify,
    glue,
    squad,
    tag,
    parse,
    probe,
    score,
    flops,
    verify,
)


def build_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="amos",
        description="Pretrain, fine-tune, export and measure text encoders: AMOS, ELECTRA, TEAMS, Electric and MLM.",
    )
    parser.add_argument("--version", action="version", version=describe_versions())
    subparsers = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", required=True)
    for subcommand in SUBCOMMANDS:
        subcommand.add_parser(subparsers)
    return parser


@report_user_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    A :class:`UserError` exits with one line and status 1, wrong flags with status 2, Ctrl-C with status 130.
    """
    parser, arguments = build_parser(), prepare.with_kind(sys.argv[1:] if arguments is None else arguments)
    refuse_unknown_subcommand(parser, arguments)
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions (docs: pip install argcomplete)
        import argcomplete

        argcomplete.autocomplete(parser)
    subcommand = "--help"
    try:
        parsed, rest = parser.parse_known_args(arguments)
        if rest:
            parsed.parser.error(f"unrecognized arguments: {' '.join(rest)}")
        subcommand = parsed.subcommand
        parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:  # `amos recipes | head` closes the output early
        discard_output()
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        discard_output()  # rich exits with 1 when it prints to a closed pipe
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        place = error.filename or "the output"
        if error.filename is None:  # perhaps of the standard output
            discard_output()
        raise UserError(f"{place} cannot be written ({error.strerror}): make room, then start again") from error
    except KeyboardInterrupt:
        print(f"amos {subcommand}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def refuse_unknown_subcommand(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    (names,) = [list(action.choices) for action in parser._actions if action.dest == "subcommand"]
    if argv and not argv[0].startswith("-") and argv[0] not in names:
        similar = difflib.get_close_matches(argv[0], names, n=1)
        parser.error(f"there is no subcommand {argv[0]!r} (amos --help lists all){did_you_mean(similar)}")


def discard_output() -> None:
    """Drop what is not printed yet; otherwise the interpreter complains when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())

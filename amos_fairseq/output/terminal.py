"""What a long command prints to stderr: messages, progress bars, and one line where it ends early."""

import contextlib
import sys
from collections.abc import Iterator

from tqdm import tqdm

from amos_fairseq.errors import INTERRUPTED, UserError, one_line
from amos_fairseq.files import NO_ROOM


def say(line: str, name: str = "prepare") -> None:
    """Print a line about the work to stderr, where the progress bars are."""
    print(f"{name}: {one_line(line)}", file=sys.stderr, flush=True)


def progress_bar(total: int | None, name: str, unit: str, delay: float = 0.0) -> tqdm:
    """Create a progress bar. ``delay``: seconds before it is shown, for work that is usually short."""
    seconds = 0.5 if sys.stderr.isatty() else 15  # a log file stores every line
    return tqdm(total=total, desc=name, unit=unit, unit_scale=True, mininterval=seconds, delay=delay, file=sys.stderr)


@contextlib.contextmanager
def ending_in_one_line(repeated: str, name: str = "prepare") -> Iterator[None]:
    """Turn a disk error into a :class:`UserError`, and Ctrl-C into one line and exit code 130.

    ``repeated``: what the command ``name`` does when it is run again.
    """
    try:
        yield
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        if error.errno in NO_ROOM:
            raise UserError(
                f"no space left ({error.strerror}{place}): make room and repeat the command, {repeated}"
            ) from error
        raise UserError(f"{error.strerror or error}{place}") from error
    except KeyboardInterrupt:
        say(f"interrupted: repeat the command, {repeated}", name)
        raise SystemExit(INTERRUPTED) from None

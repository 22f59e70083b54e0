"""What the commands of ``preprocess`` have in common: their voice, their progress bar, and how they end."""

import contextlib
import os
import sys
from typing import Iterator

from tqdm import tqdm

from amos_fairseq.errors import UserError
from amos_fairseq.files import NO_ROOM


def say(line: str, name: str = "prepare") -> None:
    """A line about the work, on stderr beside the bars."""
    print(f"{name}: {line}", file=sys.stderr, flush=True)


def progress_bar(total: int, name: str, unit: str, delay: float = 0.0) -> tqdm:
    """``delay``: seconds before a bar is shown at all, for work that is mostly done before anybody wonders."""
    seconds = 0.5 if sys.stderr.isatty() else 15  # a log file keeps every line
    return tqdm(total=total, desc=name, unit=unit, unit_scale=True, mininterval=seconds, delay=delay, file=sys.stderr)


@contextlib.contextmanager
def ending_in_one_line(repeated: str, name: str = "prepare") -> Iterator[None]:
    """A disk's mistake becomes a :class:`UserError`; Ctrl-C one line and status 130.

    Args:
        repeated: what the same command does when it is typed again.
        name: of the command, before what it says.
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
        sys.stderr.flush()
        os._exit(130)  # at once: the processes of a pool end with this one

"""Messages, progress bars, number of processes and exits that the commands of ``preprocess`` share."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional

from tqdm import tqdm

from amos_fairseq.errors import UserError, one_line
from amos_fairseq.files import NO_ROOM
from amos_fairseq.strangers import is_unicode

MOST_PROCESSES = 1024


def say(line: str, name: str = "prepare") -> None:
    """Print a line about the work to stderr, where the progress bars are."""
    print(f"{name}: {one_line(line)}", file=sys.stderr, flush=True)


def check_names(*paths: Path) -> None:
    """Raise :class:`UserError` if UTF-8 cannot represent the path of an input or output, which manifests contain."""
    for path in paths:
        if not is_unicode(str(path)):
            raise UserError(f"the name of {str(path)!r} is not UTF-8: rename it, for example with convmv")


def progress_bar(total: int, name: str, unit: str, delay: float = 0.0) -> tqdm:
    """Create a progress bar. ``delay``: seconds before it is shown, for work that is usually short."""
    seconds = 0.5 if sys.stderr.isatty() else 15  # a log file stores every line
    return tqdm(total=total, desc=name, unit=unit, unit_scale=True, mininterval=seconds, delay=delay, file=sys.stderr)


def is_finished(
    out: Path, description: Dict[str, Any], kind: str, manifest: str, read_manifest: Callable[[Path], Dict[str, Any]]
) -> bool:
    """Return True if OUT holds the data that would be made, False if it is empty or missing.

    Args:
        description: entries of the manifest that must be equal: settings, tokenizer_sha256, sources.
        kind: of the data, in the message.
        manifest: name of the file in OUT.

    Raises:
        UserError: OUT holds anything else.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not out.is_dir():
        raise UserError(f"OUT {out} is not a directory")
    if not (out / manifest).is_file():
        raise UserError(f"OUT {out} is not empty and contains no {kind} data of prepare.sh: give another directory")
    found = read_manifest(out)
    for name, value in description.items():
        if found.get(name) != value:
            other = {"settings": "settings", "tokenizer_sha256": "tokenizer", "sources": "files"}[name]
            raise UserError(f"{out} was made with other {other}: give another OUT, or remove it")
    return True


def number_of_processes(workers: Optional[int]) -> int:
    """Return the value of ``--workers``; without it, the number of processors available to this process.

    Raises:
        UserError: it is less than 1, or so large that starting the processes would stop the machine.
    """
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise UserError(f"--workers {workers} must be at least 1")
    if workers > MOST_PROCESSES:
        raise UserError(f"--workers {workers} asks for too many processes: give at most {MOST_PROCESSES:,}")
    return workers


@contextlib.contextmanager
def ending_in_one_line(repeated: str, name: str = "prepare") -> Iterator[None]:
    """Turn a disk error into a :class:`UserError`, and Ctrl-C into one line and exit code 130.

    Args:
        repeated: what the same command does when it is run again.
        name: of the command, printed before the message.
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

"""How commands fail: a full disk, and the one line of an error."""

import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file of this process can grow beyond ``limit`` bytes: writes fail with EFBIG, as they do with ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def error_line(
    capsys: pytest.CaptureFixture, main: Callable[[list[str]], Any], *arguments: object, reports_progress: bool = False
) -> str:
    """Call ``main`` with arguments that it must refuse, and return its error: exit code 1 and a single line on stderr,
    or of wrong flags the exit code 2 and argparse's line behind the usage. ``reports_progress``: other lines may come before.
    """
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    *before, line = capsys.readouterr().err.removesuffix("\n").split("\n")
    if ended.value.code == 2:
        assert before[0].startswith("usage: amos "), before
        assert line.startswith("amos "), line
        return line
    assert ended.value.code == 1
    assert line.startswith("amos_fairseq: error: ")
    assert reports_progress or not before, before
    assert not any("error" in earlier for earlier in before), before
    return line


def refusal(done: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """Return the error of a process that ended with ``code`` and a single line about it."""
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line]
    assert line.startswith("amos_fairseq: error: ")
    return line.removeprefix("amos_fairseq: error: ")

"""How the attacks run commands, and what counts as harm."""

import fcntl
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from forked_command import ON_CPU, run_module
from tiny_runs import ROOT

import amos_start

# 1: refused; 2: wrong flags; 76: diverged. Hydra ends with 1 as well.
EXIT_CODES = {0, 1, 2, 76}
# Of one process, where the clock would depend on what else runs; the attacks here take a few.
PROCESSOR_SECONDS = 60
# Beyond what this process has. Without a limit, an attack that succeeds would fill the memory of the machine.
MORE_MEMORY = 3 << 30
LONGEST_OUTPUT = 1 << 20  # of a pipe that nobody reads until the command has ended
LONGEST_LINE = 4000
ERROR = "amos_fairseq: error: "


class Place(NamedTuple):
    """Where the attacks happen: a folder for copies, and what is copied.

    Attributes:
        references: an undisturbed run in each precision.
        workplace: small inputs for every command of ``amos``.
    """

    folder: Path
    corpus: Path
    references: dict[str, Path]
    workplace: Path


def command_harm(code: int, text: str, folder: Path | None = None) -> str:
    """Return what is wrong with the end of a command."""
    if "Traceback" in text:
        return "traceback: " + text[text.rindex("Traceback") :].strip().splitlines()[-1][:300]
    if code == -signal.SIGXCPU:
        return f"more than {PROCESSOR_SECONDS} seconds"
    if code not in EXIT_CODES:
        return f"exit code {code}"
    if code == 1 and "error" not in text.lower():
        return "exit code 1 without a line"
    left = list(folder.rglob("*.unfinished.*")) if folder is not None else []
    return f"left {left[0].name}" if left else ""


def amos_harm(code: int, text: str, folder: Path | None = None) -> str:
    """:func:`command_harm` of a command ``amos``, which gives its error in exactly one line that can be printed."""
    errors = [line for line in text.splitlines() if line.startswith(ERROR)]
    if harm := command_harm(code, text, folder):
        return harm
    if code == 1 and len(errors) != 1:
        return f"exit code 1 with {len(errors)} lines of errors: {text[-300:]!r}"
    if any(len(line) > LONGEST_LINE or not line.isprintable() for line in errors):
        return f"a line that cannot be read: {errors[0][:100]!r}"
    return ""


def run_command(module: str, arguments: Sequence[str], cwd: Path = ROOT) -> tuple[int, str]:
    """Run a module in a process that has imported PyTorch and fairseq, but not the plugin; return exit code and output."""
    done = run_module(module, arguments, cwd, ON_CPU)
    return done.returncode, done.stdout + done.stderr


def run_amos(arguments: Sequence[object], cwd: Path, seconds: float = 900) -> tuple[int, str]:
    """Run ``amos`` in a fork of this process, which has imported all that it needs: most take a fraction of a second.

    After ``seconds`` the command and all that it has started are killed.
    """
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, LONGEST_OUTPUT)
    pid = os.fork()
    if pid == 0:
        _become_amos([str(argument) for argument in arguments], cwd, writer)
    os.close(writer)
    end, ended, status = time.monotonic() + seconds, 0, signal.SIGKILL
    while not ended and time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what the command has started, too
    if not ended:
        _, status = os.waitpid(pid, 0)
    with open(reader, "rb") as output:
        return os.waitstatus_to_exitcode(status), output.read().decode(errors="replace")


def _become_amos(arguments: list[str], cwd: Path, output: int) -> NoReturn:
    code: object = 1
    try:
        os.setpgid(0, 0)
        os.chdir(cwd)
        empty = os.open(os.devnull, os.O_RDONLY)
        for number, file in enumerate((empty, output, output)):
            os.dup2(file, number)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS + 5))
        resource.setrlimit(resource.RLIMIT_AS, (_virtual_memory() + MORE_MEMORY, resource.RLIM_INFINITY))
        torch.set_num_threads(1)  # threads do not survive a fork
        sys.argv = ["amos", *arguments]
        code = amos_start.main()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
        except (OSError, ValueError):
            code = 120  # as the interpreter
        os._exit(code if isinstance(code, int) else int(code is not None))


def _virtual_memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

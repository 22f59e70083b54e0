"""Python commands in forked processes: what a new process does, without the five seconds of imports before it.

The server of :mod:`multiprocessing` forks them. It has imported PyTorch and fairseq, but not the plugin. Forked processes have
one thread. What depends on the start of an interpreter, and a command that replaces itself, needs a new process.
"""

import atexit
import io
import logging
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest import mock

from tiny_runs import ROOT, environment

# torch.optim imports torch._dynamo when the first optimizer is made.
IMPORTED = ["fairseq.tasks", "fairseq.trainer", "hydra.core.hydra_config", "torch._dynamo", "matplotlib.pyplot"]
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
HELPERS = str(Path(__file__).parent)
# multiprocessing asks for the ends of all processes when it starts one; of two threads that ask at once, one gets no answer.
LOCK = threading.Lock()


@cache
def _start_server() -> None:
    # Libraries read variables while they are imported: not those that a test has set.
    with mock.patch.dict(os.environ, environment(), clear=True):
        multiprocessing.set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()


class ForkedProcess(ForkServerProcess):
    """``python -m MODULE ARGUMENTS`` or ``python SCRIPT ARGUMENTS``, with what ``subprocess.Popen`` offers.

    The process has a session of its own. It is killed when this process ends.

    Args:
        files: descriptors that become its standard input, output and error.
    """

    stdin: BinaryIO

    def __init__(self, command: Sequence[str], cwd: Path | str, env: Mapping[str, str], files: Sequence[int]) -> None:
        super().__init__(name="MainProcess")
        self.command, self.cwd, self.env, self.files = list(command), str(cwd), dict(env), list(files)
        with LOCK:
            _start_server()
            self.start()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "files": [DupFd(number) for number in self.files]}

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while the command runs."""
        with LOCK:
            return self.exitcode

    def wait(self, timeout: float = float("inf")) -> int:
        """Return the exit code; raise ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.command, timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def run(self) -> None:
        """Be the command; multiprocessing calls this in the new process."""
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        multiprocessing.set_start_method(None, force=True)
        # A message during the imports has configured logging; the command configures it in its own way.
        logging.root.handlers.clear()
        for number, file in enumerate(self.files):
            descriptor = file.detach()
            os.dup2(descriptor, number)
            os.close(descriptor)
        # The server's own does not know what its number has become: a file, a pipe or a terminal.
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(self.env)
        os.chdir(self.cwd)
        given = [path for path in self.env.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[:] = [self.cwd, *given, *(path for path in sys.path if path not in ("", str(ROOT), HELPERS))]
        sys.exit(_run(self.command[1:]))


def _run(command: list[str]) -> int:
    """What the interpreter does with its arguments; return its exit code."""
    if command[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        del command[:2]
    code: object = 1
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = command, os.path.dirname(os.path.abspath(command[0]))
            runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    if isinstance(code, str):
        print(code, file=sys.stderr)
    atexit._run_exitfuncs()
    return code if isinstance(code, int) else int(code is not None)


@atexit.register  # after the function of multiprocessing that waits for all processes, so called before it
def _kill_all() -> None:
    for process in multiprocessing.active_children():
        if isinstance(process, ForkedProcess):
            process.kill_group()


def start_module(
    module: str,
    arguments: Sequence[str],
    cwd: Path,
    stdout: Path,
    stderr: Path,
    env: Mapping[str, str] | None = None,
) -> ForkedProcess:
    """Start ``python -m module arguments`` in ``cwd`` with the variables ``env`` added and the output in two files."""
    command = [sys.executable, "-m", module, *arguments]
    with open(os.devnull, "rb") as stdin, stdout.open("wb") as out, stderr.open("wb") as err:
        files = [file.fileno() for file in (stdin, out, err)]
        return ForkedProcess(command, cwd, environment(dict(env or {})), files)


def popen(
    command: Sequence[str], env: Mapping[str, str], stdin: int, stdout: BinaryIO, stderr: BinaryIO, **_: bool
) -> ForkedProcess:
    """``subprocess.Popen`` as the fine-tuning commands use it, with a pipe as standard input."""
    assert stdin == subprocess.PIPE
    assert command[0] == sys.executable
    reader, writer = os.pipe()
    process = ForkedProcess(command, os.getcwd(), env, [reader, stdout.fileno(), stderr.fileno()])
    os.close(reader)
    process.stdin = open(writer, "wb")  # noqa: SIM115
    return process


def run_main(main: Callable[[list[str]], int | None], *arguments: object) -> subprocess.CompletedProcess[str]:
    """Call the ``main`` of a command in this process; the trainings that it starts are forked."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    forking = SimpleNamespace(**{**vars(subprocess), "Popen": popen})
    with mock.patch("amos_fairseq.finetuning.training.subprocess", forking), redirect_stdout(out), redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments]) or 0
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def run_module(
    module: str, arguments: Sequence[str], cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return exit code and output.

    Raises:
        subprocess.TimeoutExpired: After ``timeout`` seconds; the command and its children are killed.
    """
    return _run_together([env or {}], module, arguments, cwd, timeout)[0]


def rank_variables(num_ranks: int) -> list[dict[str, str]]:
    """The variables that torchrun sets for each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def run_ranks(
    num_ranks: int, module: str, arguments: Sequence[str], cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """Run a command once for each rank."""
    ranks = [{**(env or {}), **variables} for variables in rank_variables(num_ranks)]
    return _run_together(ranks, module, arguments, cwd, timeout=300)


def _run_together(
    environments: Sequence[Mapping[str, str]], module: str, arguments: Sequence[str], cwd: Path, timeout: float
) -> list[subprocess.CompletedProcess[str]]:
    with tempfile.TemporaryDirectory() as folder:
        outputs = [[Path(folder) / f"{name}{rank}" for name in ("out", "err")] for rank in range(len(environments))]
        processes = [
            start_module(module, arguments, cwd, *paths, env) for paths, env in zip(outputs, environments, strict=True)
        ]
        try:
            codes = [process.wait(timeout) for process in processes]
        finally:
            for process in processes:
                process.kill_group()  # and what it has started
        texts = [[path.read_text(encoding="utf-8") for path in paths] for paths in outputs]
    return [subprocess.CompletedProcess(module, code, *text) for code, text in zip(codes, texts, strict=True)]


def run_command(module: str, arguments: Sequence[str], num_ranks: int = 1, env: Mapping[str, str] | None = None) -> str:
    """Run ``python -m module arguments`` in the checkout on CPU ranks, and return what they print.

    Raises:
        AssertionError: A rank fails.
    """
    on_cpu = {**ON_CPU, **(env or {})}
    ranks = [on_cpu] if num_ranks == 1 else [{**on_cpu, **variables} for variables in rank_variables(num_ranks)]
    done = _run_together(ranks, module, arguments, ROOT, timeout=300)
    text = "".join(rank.stdout + rank.stderr for rank in done)
    assert all(rank.returncode == 0 for rank in done), text[-6000:]
    return text

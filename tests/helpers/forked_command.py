"""Run modules as commands in forked processes, without the five seconds of imports of a new interpreter.

The server of :mod:`multiprocessing` forks them. It has imported PyTorch and fairseq, but not the plugin. What depends on the
start of an interpreter, and a command that replaces itself, needs a new process.
"""

import atexit
import faulthandler
import io
import logging
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tiny_runs import ROOT, environment  # not the plugin: the new process imports this file, too

# torch.optim imports torch._dynamo when the first optimizer is made.
IMPORTED = ["fairseq.tasks", "fairseq.trainer", "hydra.core.hydra_config", "torch._dynamo", "matplotlib.pyplot"]
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
HELPERS = str(Path(__file__).parent)


@cache
def _start_server() -> None:
    # Libraries read variables while they are imported: not those that a test has set.
    with mock.patch.dict(os.environ, environment(), clear=True):
        multiprocessing.set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()


class ForkedCommand(ForkServerProcess):
    """``python -m module arguments`` in ``cwd`` with the variables ``env`` added, the output appended to two files.

    The process has a session of its own. It is killed when this process ends.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], cwd: Path, *outputs: Path, env: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(name="MainProcess")
        self.command, self.cwd, self.outputs = [module, *arguments], str(cwd), outputs
        self.env = environment(dict(env or {}))
        for path in outputs:
            path.touch()
        _start_server()
        self.start()

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while the command runs."""
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
        for number, path in enumerate(("/dev/null", *self.outputs)):
            os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
        # The server's own does not know what its number has become.
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(self.env)
        faulthandler.enable(2)  # as its variable does in a new process
        os.chdir(self.cwd)
        given = [path for path in self.env.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[:] = [self.cwd, *given, *(path for path in sys.path if path not in ("", str(ROOT), HELPERS))]
        sys.argv = self.command
        try:
            runpy.run_module(self.command[0], run_name="__main__", alter_sys=True)
        finally:
            atexit._run_exitfuncs()


@atexit.register  # after the function of multiprocessing that waits for all processes, so called before it
def _kill_all() -> None:
    for process in multiprocessing.active_children():
        if isinstance(process, ForkedCommand):
            process.kill_group()


def _free_port() -> int:
    """A port below those that the system gives out: the ranks of another test process do not get it before it is bound."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(10_000, 30_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def rank_variables(num_ranks: int) -> list[dict[str, str]]:
    """The variables that torchrun sets for each rank."""
    port = str(_free_port())
    world = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def run_ranks(
    module: str,
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    cwd: Path = ROOT,
    timeout: float = 300,
) -> list[subprocess.CompletedProcess[str]]:
    """Run a command once with each environment, all at the same time, and return exit codes and output.

    Raises:
        subprocess.TimeoutExpired: After ``timeout`` seconds; the commands and their children are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [[Path(folder) / f"{name}{rank}" for name in ("out", "err")] for rank in range(len(environments))]
        ranks = [
            ForkedCommand(module, arguments, cwd, *paths, env=env)
            for paths, env in zip(outputs, environments, strict=True)
        ]
        try:
            codes = [rank.wait(timeout) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill_group()  # and what it has started
        texts = [[path.read_text(encoding="utf-8") for path in paths] for paths in outputs]
    return [subprocess.CompletedProcess(module, code, *text) for code, text in zip(codes, texts, strict=True)]


def run_module(
    module: str, arguments: Sequence[str], cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a command, as :func:`run_ranks` does, once."""
    return run_ranks(module, arguments, [env or {}], cwd, timeout)[0]


def run_command(module: str, arguments: Sequence[str], num_ranks: int = 1, env: Mapping[str, str] | None = None) -> str:
    """Run a command on CPU ranks, assert that none fails, and return what they print."""
    ranks = [{}] if num_ranks == 1 else rank_variables(num_ranks)
    done = run_ranks(module, arguments, [{**ON_CPU, **(env or {}), **variables} for variables in ranks])
    text = "".join(rank.stdout + rank.stderr for rank in done)
    assert all(rank.returncode == 0 for rank in done), text[-6000:]
    return text


def run_main(
    main: Callable[[list[str]], int | None], *arguments: object, in_new_processes: bool = False
) -> subprocess.CompletedProcess[str]:
    """Call the ``main`` of a command in this process. One server forks the trainings of all commands.

    Args:
        in_new_processes: start each training in a new process instead.
    """
    from amos_fairseq.downstream import training

    out, err, code = io.StringIO(), io.StringIO(), 0
    server = SimpleNamespace(start=training.start_process) if in_new_processes else _training_server()
    shared = mock.patch("amos_fairseq.downstream.runner.training_server", return_value=nullcontext(server))
    with shared, redirect_stdout(out), redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments]) or 0
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@cache
def _training_server() -> Any:
    """The process that forks the trainings of all commands; it ends with this process."""
    from amos_fairseq.downstream.training import training_server

    with mock.patch.dict(os.environ, environment(), clear=True):
        return training_server(["cpu"], Event())

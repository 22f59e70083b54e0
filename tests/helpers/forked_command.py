"""Commands of fairseq in forked processes: what a new process does, without the five seconds of imports before it."""

import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from tiny_runs import ROOT, environment


class ForkServer:
    """A process that has imported PyTorch and fairseq, but no plugin, and forks itself for every command.

    A command gets its own arguments, working directory, output, process group and additional environment variables. A
    variable that a library reads while it is imported (``OMP_NUM_THREADS``) has no effect there: such a command needs a new
    process.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        cwd: Path,
        stdout: Path,
        stderr: Path,
        env: Mapping[str, str] | None = None,
    ) -> "ForkedProcess":
        """Start ``python -m module arguments`` in ``cwd`` with the variables ``env`` added and the output in two files."""
        for path in (stdout, stderr):
            path.touch()
        command = {"module": module, "arguments": list(arguments), "cwd": str(cwd), "env": dict(env or {})}
        return ForkedProcess(self, self.ask({"start": command | {"outputs": [str(stdout), str(stderr)]}}))

    def run(
        self,
        module: str,
        arguments: Sequence[str],
        cwd: Path,
        env: Mapping[str, str] | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess:
        """Run a command to its end and return exit code and output.

        Raises:
            subprocess.TimeoutExpired: After ``timeout`` seconds; the command and its children are killed.
        """
        (done,) = self._run_together([env or {}], module, arguments, cwd, timeout)
        return done

    def run_ranks(
        self, num_ranks: int, module: str, arguments: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None
    ) -> list[subprocess.CompletedProcess]:
        """Run a command once for each rank, with the environment variables that torchrun sets."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        world = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [{**(env or {}), **world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
        return self._run_together(ranks, module, arguments, cwd, timeout=300)

    def _run_together(
        self,
        environments: Sequence[Mapping[str, str]],
        module: str,
        arguments: Sequence[str],
        cwd: Path,
        timeout: float,
    ) -> list[subprocess.CompletedProcess]:
        command = [sys.executable, "-m", module, *arguments]
        with tempfile.TemporaryDirectory() as folder:
            outputs = [[Path(folder) / f"{name}{rank}" for name in ("out", "err")] for rank in range(len(environments))]
            processes = [
                self.start(module, arguments, cwd, *paths, env)
                for paths, env in zip(outputs, environments, strict=True)
            ]
            try:
                codes = [process.wait(timeout) for process in processes]
            finally:
                for process in processes:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait(timeout)
            texts = [[path.read_text(encoding="utf-8") for path in paths] for paths in outputs]
        return [subprocess.CompletedProcess(command, code, *text) for code, text in zip(codes, texts, strict=True)]

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@cache
def fork_server() -> ForkServer:
    """Return the server of this test process, with one thread a process; it ends when this process ends."""
    return ForkServer(environment())


def run_command(module: str, arguments: Sequence[str], num_ranks: int = 1, env: Mapping[str, str] | None = None) -> str:
    """Run ``python -m module arguments`` in the checkout on CPU ranks, and return what they print.

    Raises:
        AssertionError: A rank fails.
    """
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", **(env or {})}
    if num_ranks == 1:
        ranks = [fork_server().run(module, arguments, ROOT, on_cpu)]
    else:
        ranks = fork_server().run_ranks(num_ranks, module, arguments, ROOT, on_cpu)
    text = "".join(done.stdout + done.stderr for done in ranks)
    assert all(done.returncode == 0 for done in ranks), text[-6000:]
    return text


class ForkedProcess:
    """What ``subprocess.Popen`` offers of a running command."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while the command runs."""
        if self._returncode is None:
            self._returncode = self._server.ask({"poll": self.pid})
        return self._returncode

    def wait(self, timeout: float) -> int:
        """Return the exit code; raise ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code


def _serve() -> dict[str, Any] | None:
    """Answer requests until the input ends and return None; in a forked child, return the command that it runs."""
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            answer = os.fork()
            if answer == 0:
                return request["start"]
            os.setpgid(answer, answer)  # here and in the child: either may be first
        else:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer), flush=True)
    return None


def _run(command: dict[str, Any]) -> None:
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, path in enumerate(command["outputs"], start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
    os.environ.update(command["env"])
    os.chdir(command["cwd"])
    # As with ``python -m``: modules of the working directory come first.
    sys.path[0] = command["cwd"]
    sys.argv[1:] = command["arguments"]
    runpy.run_module(command["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    for name in ("fairseq.tasks", "fairseq.trainer", "hydra.core.hydra_config"):
        import_module(name)
    # A message during the import has configured logging; the command configures it in its own way.
    logging.root.handlers.clear()
    if (command := _serve()) is not None:
        _run(command)

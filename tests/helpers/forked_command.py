"""Python commands in forked processes: what a new process does, without the five seconds of imports before it."""

import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from tiny_runs import ROOT, environment

# torch.optim imports torch._dynamo when the first optimizer is made.
IMPORTED = ("fairseq.tasks", "fairseq.trainer", "hydra.core.hydra_config", "torch._dynamo", "matplotlib.pyplot")
# Libraries read these variables while they are imported: a command with other values needs a new process.
READ_AT_IMPORT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "PYTHONHASHSEED", "TRITON_INTERPRET", "CXX")
# What the interpreter forks for: a module of these packages, python_process.py of the package, or a script in examples/.
# Anything else is a new process.
FORKED_PACKAGES = ("amos_fairseq", "amos_start", "fairseq_cli", "submitit", "torch")
COMMANDS = {
    "amos": "amos_start",
    "fairseq-train": "fairseq_cli.train",
    "fairseq-hydra-train": "fairseq_cli.hydra_train",
    "fairseq-preprocess": "fairseq_cli.preprocess",
}
# The interpreter forwards what a scheduler, torchrun or a terminal sends.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LENGTH_BYTES = 8


class ForkServer:
    """A process that has imported PyTorch and fairseq, but not the plugin, and forks itself for every command.

    A command gets its own arguments, working directory, files, process group and environment variables. It is started with
    :meth:`start` or :meth:`run`, or by a process that runs the executable ``python``: a script, torchrun, or a command that
    starts others with ``sys.executable``, which is ``python`` in a forked process. The console commands are beside it.
    Only ``python`` compares the variables of READ_AT_IMPORT: it starts a new process for other values.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        folder = Path(tempfile.mkdtemp(prefix="fork_server_"))
        self.python = _make_interpreter(folder, {name: env.get(name) for name in READ_AT_IMPORT})
        self._address = str(folder / "socket")
        # The server removes the folder and ends when its standard input is closed, so at the latest with this process.
        self._process = subprocess.Popen([sys.executable, __file__, "serve", folder], env=env, stdin=subprocess.PIPE)
        while not os.path.exists(self._address):
            assert self._process.poll() is None, "the fork server did not start (see above)"
            time.sleep(0.01)

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
        command = {"module": module, "arguments": list(arguments), "cwd": str(cwd), "env": environment(dict(env or {}))}
        with open(os.devnull, "rb") as stdin, stdout.open("wb") as out, stderr.open("wb") as err:
            return ForkedProcess(self._address, command, [file.fileno() for file in (stdin, out, err)])

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
        command = [self.python, "-m", module, *arguments]
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
    """What ``subprocess.Popen`` offers of a running command. The command is killed when this object is deleted."""

    def __init__(self, address: str, command: Mapping[str, Any], files: Sequence[int]) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        request = json.dumps(command).encode()
        socket.send_fds(self._connection, [len(request).to_bytes(LENGTH_BYTES, "big")], list(files))
        self._connection.sendall(request)
        self._answers = self._connection.makefile("r")
        self.pid = int(self._answers.readline())
        self._returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while the command runs."""
        return self._returncode if self._returncode is not None else self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        code = self._returncode if self._returncode is not None else self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def _wait(self, timeout: float | None) -> int | None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            if selector.select(timeout):
                self._returncode = int(self._answers.readline())
        return self._returncode


def _make_interpreter(folder: Path, variables: Mapping[str, str | None]) -> str:
    """Write an executable that behaves as this environment's Python and asks the server in ``folder`` to fork.

    Python finds an environment beside the executable by whose name it was started, so ``folder`` is one of links: a command
    that is not forked runs in a new process under the same name.
    """
    executable = folder / "bin" / "python"
    executable.parent.mkdir()
    if sys.prefix != sys.base_prefix:
        shutil.copy(Path(sys.prefix) / "pyvenv.cfg", folder)
        (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
    here = Path(__file__).resolve()
    executable.write_text(
        f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(here.parent)!r})\n"
        f"from {here.stem} import interpret\ninterpret({sys.executable!r}, {str(folder / 'socket')!r}, {variables!r})\n"
    )
    executable.chmod(0o755)
    for name, module in COMMANDS.items():
        command = executable.with_name(name)
        command.write_text(f'#!/bin/sh\nexec "{executable}" -m {module} "$@"\n')
        command.chmod(0o755)
    return str(executable)


def interpret(python: str, address: str, variables: Mapping[str, str | None]) -> None:
    """Fork for the command line of this process, or replace the process by ``python`` where forking would differ."""
    command = _parsed(sys.argv[1:])
    if command is None or any(os.environ.get(name) != value for name, value in variables.items()):
        os.execv(python, sys.argv)
    process = ForkedProcess(address, {**command, "cwd": os.getcwd(), "env": dict(os.environ)}, [0, 1, 2])
    for number in FORWARDED:
        signal.signal(number, lambda received, _: os.kill(process.pid, received))
    code = process.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _parsed(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Module or script of a Python command line and its arguments; None for what gains nothing from the imports."""
    rest = list(arguments)
    quiet = False
    while rest[:1] == ["-u"] or rest[:2] == ["-W", "ignore"]:
        quiet = quiet or rest[0] == "-W"
        del rest[: 1 if rest[0] == "-u" else 2]
    if rest[:1] == ["-m"] and rest[1].split(".")[0] in FORKED_PACKAGES:
        return {"module": rest[1], "arguments": rest[2:], "quiet": quiet}
    script = os.path.abspath(rest[0]) if rest else ""
    if script.startswith(f"{ROOT}{os.sep}examples{os.sep}") or script == str(
        ROOT / "amos_fairseq" / "python_process.py"
    ):
        return {"script": rest[0], "arguments": rest[1:], "quiet": quiet}
    return None


class _Command:
    """A request that the server has received, with the files of its standard streams."""

    def __init__(self, connection: socket.socket) -> None:
        length, self.files, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 3)
        with connection.makefile("rb") as file:
            self.request = json.loads(file.read(int.from_bytes(length, "big")))

    def run(self, python: str) -> None:
        """Become the process of the command."""
        for number, file in enumerate(self.files):
            os.dup2(file, number)
            os.close(file)
        # The server's own does not know what its number has become: a file, a pipe or a terminal.
        sys.stdout = open(1, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(self.request["env"])
        os.chdir(self.request["cwd"])
        if os.environ.get("PYTHONUNBUFFERED"):
            sys.stdout.reconfigure(write_through=True)
        if self.request.get("quiet"):
            warnings.simplefilter("ignore")
        sys.executable = python
        sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        if "script" in self.request:
            sys.argv = [self.request["script"], *self.request["arguments"]]
            sys.path[0] = os.path.dirname(os.path.abspath(self.request["script"]))
            runpy.run_path(self.request["script"], run_name="__main__")
        else:
            # As with ``python -m``: modules of the working directory come first.
            sys.argv[1:] = self.request["arguments"]
            sys.path[0] = self.request["cwd"]
            runpy.run_module(self.request["module"], run_name="__main__", alter_sys=True)


def _serve(address: str) -> _Command | None:
    """Fork for every connection until the standard input ends and return None; in a child, return its command."""
    clients: dict[int, socket.socket] = {}  # process id -> connection
    listener = socket.socket(socket.AF_UNIX)
    ended, wakeup = socket.socketpair()
    for end in (ended, wakeup):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup.fileno())
    # A terminal and `timeout` send these to the tests and to the server, which first ends its commands.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    for source in (sys.stdin, listener, ended):
        selector.register(source, selectors.EVENT_READ)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                for pid in clients:
                    os.killpg(pid, signal.SIGKILL)
                return None
            if key.fileobj is ended:
                ended.recv(4096)
                _report_ended(clients, selector)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                command = _Command(connection)
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    for number in (signal.SIGCHLD, signal.SIGTERM):
                        signal.signal(number, signal.SIG_DFL)
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    selector.close()
                    for open_socket in (listener, ended, wakeup, connection, *clients.values()):
                        open_socket.close()
                    os.setpgid(0, 0)
                    return command
                os.setpgid(pid, pid)  # here and in the child: either may be first
                for file in command.files:
                    os.close(file)
                clients[pid] = connection
                connection.sendall(f"{pid}\n".encode())
                selector.register(connection, selectors.EVENT_READ, pid)
            elif key.data in clients:  # nothing but the end of its client makes a connection readable
                os.killpg(key.data, signal.SIGKILL)
                selector.unregister(key.fileobj)


def _report_ended(clients: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    for pid in list(clients):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            connection = clients.pop(pid)
            if connection in selector.get_map():
                selector.unregister(connection)
            with suppress(OSError):  # its client has ended
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            connection.close()


def _main() -> None:
    folder = Path(sys.argv[2])
    for name in IMPORTED:
        import_module(name)
    # A message during the import has configured logging; the command configures it in its own way.
    import_module("logging").root.handlers.clear()
    if (command := _serve(str(folder / "socket"))) is not None:
        del sys.argv[1:]
        command.run(str(folder / "bin" / "python"))
    else:
        shutil.rmtree(folder)


if __name__ == "__main__":
    _main()

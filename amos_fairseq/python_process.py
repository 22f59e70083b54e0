"""Start Python so that it imports nothing from the current folder, and ends with the process that started it.

``python -m`` and ``python -c`` look for modules in the current folder first: a file ``yaml.py`` in the folder of a downloaded
run would be executed. Here a command starts Python with this file as a script, which runs a module as ``-m`` does:

    python python_process.py [--with-parent] MODULE ARGUMENTS

The script needs only the standard library. ``PYTHONPATH`` has its usual effect; an empty entry in it is the current folder.

Where several such processes need the same imports, a :class:`ForkServer` pays for them once. Its process is this script, too:

    python python_process.py --forks SOCKET MODULES
"""

import contextlib
import importlib
import io
import json
import logging
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
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

WITH_PARENT = "--with-parent"
FORKS = "--forks"
READY = b"\n"  # from the process that forks, once it has imported its modules
# The time that a training has to finish its update and to write a checkpoint after its parent was killed.
SECONDS_TO_SAVE = 300.0


def python_command(module: str, *options: str, with_parent: bool = False) -> list[str]:
    """Return the start of the command line that runs ``module`` in a Python process; the arguments follow.

    Args:
        options: of the interpreter, such as "-W", "ignore".
        with_parent: the process ends when its standard input does. The parent passes a pipe and holds its other end.
    """
    script = [sys.executable, *options, os.path.abspath(__file__)]
    return [*script, *([WITH_PARENT] if with_parent else []), module]


def leave_out_current_folder() -> None:
    """Let Python processes that libraries start with ``-c`` or ``-m`` from this one import nothing from the current folder."""
    os.environ["PYTHONSAFEPATH"] = "1"
    if sys.version_info < (3, 11):  # which does not read the variable
        from multiprocessing import util

        # Isolated, a process has no PYTHONPATH, but multiprocessing sends it sys.path.
        util._args_from_interpreter_flags = lambda: ["-I", *(f"-W{each}" for each in sys.warnoptions)]


def prepare_streams() -> None:
    """Open the standard streams that the shell has closed (``>&-``), and let every character be printed.

    A closed one becomes /dev/null: the next file that is opened would get its number and, with it, what is printed. Where the
    locale or ``PYTHONIOENCODING`` lacks a character, a terminal shows a question mark. What goes to a file or to another
    program is UTF-8, as every file of this package.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - open until the end
    if isinstance(sys.stdout, io.TextIOWrapper):  # not in a notebook
        sys.stdout.reconfigure(errors="replace", encoding=None if sys.stdout.isatty() else "utf-8")


def end_with_parent() -> None:
    """End this process when the other end of its standard input is closed: the kernel does that even after SIGKILL.

    SIGTERM lets a training save a checkpoint. /dev/null then replaces the standard input, so that child processes do not
    inherit the pipe.
    """
    parent = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)

    def wait() -> None:
        while os.read(parent, 1):
            pass
        with contextlib.suppress(OSError):  # a full disk, or a closed pipe
            os.write(2, b"amos_fairseq: the command that started this process has ended: stopping\n")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SECONDS_TO_SAVE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True, name="parent").start()


class ForkServer:
    """Starts commands that need the same imports: a process imports them once, and forks a process for each command.

    A command finds the process as a new one would be: main module, arguments, variables, current folder and streams are its
    own, and what forks it has started no thread, no parallel loop and nothing on a GPU. What libraries read while they are
    imported comes from ``variables``. The process that forks starts with the first command, is replaced at the next command
    after it was killed, and ends with this object or with this process. Thread-safe.

    Args:
        modules: names of the modules to import.
        variables: environment of the imports.
        stop: once it is set, nothing waits for the imports any more.
    """

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str], stop: threading.Event) -> None:
        self.modules, self.variables, self.stop = modules, variables, stop
        self._lock = threading.Lock()
        self._processes: list[_ForkingProcess] = []  # all but the last one have ended

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.close()

    def start(self, command: Sequence[str], variables: Mapping[str, str], output: BinaryIO) -> "ForkedProcess":
        """Start a command of :func:`python_command` without options of the interpreter, in a session of its own.

        Args:
            variables: environment of the command.
            output: an open file for its standard output and errors.

        Raises:
            ChildProcessError: the imports failed or were given up because of ``stop``, or the process that forks has ended.
        """
        arguments = list(command[command.index(os.path.abspath(__file__)) + 1 :])
        request = {"arguments": arguments, "variables": dict(variables), "folder": os.getcwd()}
        forking = self._forking_process()
        read_end, write_end = os.pipe()
        try:
            pid = forking.ask(request, [read_end, output.fileno(), output.fileno()])
        except ChildProcessError:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return ForkedProcess(forking, pid, write_end)

    def _forking_process(self) -> "_ForkingProcess":
        with self._lock:
            if not self._processes or self._processes[-1].has_ended():
                if self.stop.is_set():  # while this thread waited for the lock
                    raise ChildProcessError("stopped before a process that starts trainings was there")
                self._processes.append(_ForkingProcess(self.modules, self.variables))
                self._processes[-1].wait_for_imports(self.stop)
            return self._processes[-1]


class _ForkingProcess:
    """The process of a :class:`ForkServer`, and the connection to it."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._connection, other = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - of the process itself: why it has ended
        script = [sys.executable, os.path.abspath(__file__), FORKS, str(other.fileno()), ",".join(modules)]
        with other:
            self._process = subprocess.Popen(
                script,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )

    def wait_for_imports(self, stop: threading.Event) -> None:
        """Wait until the modules are imported; end the process if ``stop`` is set first."""
        self._connection.settimeout(0.2)
        while True:
            try:
                is_ready = self._connection.recv(len(READY)) == READY
                break
            except TimeoutError:
                if stop.is_set():
                    self._process.kill()
                    raise ChildProcessError("stopped while the modules of trainings were imported") from None
            except OSError:
                is_ready = False
                break
        if not is_ready:
            raise ChildProcessError(self._reason_of_end())
        self._connection.settimeout(None)  # it now answers at once

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a process, negative after a signal; None while it runs. Ask no more after an exit code."""
        return self.ask({"exit code of": pid}, [])

    def ask(self, request: dict[str, Any], files: list[int]) -> Any:
        with self._lock:
            try:
                socket.send_fds(self._connection, [b" "], files)
                self._connection.sendall(json.dumps(request).encode("ascii") + b"\n")
                answer = _read_line(self._connection)
            except OSError:
                answer = b""
            if not answer:
                raise ChildProcessError(self._reason_of_end())
        return json.loads(answer)

    def _reason_of_end(self) -> str:
        code = self._process.wait()
        self._output.seek(0)
        lines = self._output.read().decode("utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return f"the process that starts trainings has ended with exit code {code} ({last})"

    def close(self) -> None:
        self._process.kill()  # what it has forked goes on
        self._process.wait()
        self._connection.close()
        self._output.close()


class ForkedProcess:
    """A process that a :class:`ForkServer` has started, with the methods of ``subprocess.Popen`` of the same names.

    ``stdin`` is the other end of its standard input.
    """

    def __init__(self, parent: _ForkingProcess, pid: int, pipe: int) -> None:
        self.pid, self.stdin = pid, open(pipe, "wb")  # noqa: SIM115 - open until the caller closes it
        self._parent, self._code = parent, None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._parent.exit_code(self.pid)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # until it is asked for again, the number belongs to no other process
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _read_line(connection: socket.socket) -> bytes:
    """Return a line; b"" at the end. The other side waits for an answer to it, so that no second line follows."""
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            return b""
        line += part
    return line


def serve(connection: socket.socket) -> None:
    """Fork a process for each request until the connection ends; return only in a forked process, as its command."""
    while True:
        first, files, _, _ = socket.recv_fds(connection, 1, 3)
        request = json.loads(_read_line(connection) or "null") if first else None
        if request is None:
            sys.exit()
        if "exit code of" in request:
            ended, status = os.waitpid(request["exit code of"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        else:
            sys.stdout.flush()
            with warnings.catch_warnings():
                # Python 3.12 counts OpenBLAS's threads, which prepares them for a fork itself.
                warnings.simplefilter("ignore", DeprecationWarning)
                answer = os.fork()
            if answer == 0:
                connection.close()
                become(request, files)
                return
            for file in files:
                os.close(file)
        connection.sendall(json.dumps(answer).encode("ascii") + b"\n")


def become(request: dict[str, Any], files: Sequence[int]) -> None:
    """Give this process the session, streams, variables, folder and command line of a request."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(request["variables"])
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[:0] = added
    os.chdir(request["folder"])
    sys.argv[1:] = request["arguments"]


def main() -> None:
    """Run the module that the command line names as the main program of this process."""
    if not getattr(sys.flags, "safe_path", False):  # new in Python 3.11
        del sys.path[0]  # the folder of this file
    package = os.path.dirname(os.path.abspath(__file__))
    if os.path.dirname(package) not in sys.path:
        sys.path.append(os.path.dirname(package))  # a checkout that is not installed; last, so that it hides no library
    prepare_streams()
    if sys.argv[1] == FORKS:
        for name in sys.argv[3].split(","):
            importlib.import_module(name)
        connection = socket.socket(fileno=int(sys.argv[2]))
        connection.sendall(READY)
        serve(connection)
    if sys.argv[1] == WITH_PARENT:
        del sys.argv[1]
        end_with_parent()
    module = sys.argv.pop(1)
    if module == "fairseq_cli.hydra_train":
        # Tasks of fairseq configure logging when they are imported, unless it has a handler. Hydra then configures it.
        logging.root.addHandler(logging.NullHandler())
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

"""Processes: how Python starts, ends with its parent, waits and uses memory; the versions of its libraries.

``python -m`` and ``python -c`` look for modules in the current folder first: a file ``yaml.py`` in the folder of a downloaded
run would be executed. Here a command starts Python with this file as a script, which runs a module as ``-m`` does:

    python process.py [--with-parent] MODULE ARGUMENTS

The script needs only the standard library. ``PYTHONPATH`` has its usual effect; an empty entry in it is the current folder.
Where several such processes need the same imports, each is a :class:`ForkedCommand`.

Two settings make training on a CPU faster, and change no result; a user's own take precedence:

* GNU's OpenMP lets threads that wait for others spin, on a busy machine for as long as another program has the core: two
  threads of ``amos_tiny`` beside two busy programs trained 6,300 tokens/s, and 11,800 when they slept.
* glibc returns the freed memory of large tensors to the system, which then clears every page of the next ones.
"""

import atexit
import contextlib
import ctypes
import io
import logging
import math
import multiprocessing
import os
import platform
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess

_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WITH_PARENT = "--with-parent"
# The time that a training has to finish its update and to write a checkpoint after its parent was killed.
SECONDS_TO_SAVE = 300.0


def python_command(module: str, *options: str, with_parent: bool = False) -> list[str]:
    """Return the start of the command line that runs ``module`` in a Python process with the ``options`` of the interpreter;
    the arguments follow. ``with_parent``: the process ends with its standard input, a pipe of its parent."""
    script = [sys.executable, *options, os.path.abspath(__file__)]
    return [*script, *([WITH_PARENT] if with_parent else []), module]


def leave_out_current_folder() -> None:
    """Keep the current folder off the import path of Python processes that libraries start with ``-c`` or ``-m``.

    Python 3.10 does not read the variable: see docs/limits.md.
    """
    os.environ["PYTHONSAFEPATH"] = "1"


def prepare_streams() -> None:
    """Open the standard streams that the shell has closed (``>&-``) as /dev/null, and let every character be printed.

    Otherwise the next file that is opened would get the number of the stream, and what is printed. A terminal shows a question
    mark for a character that it lacks. What goes to a file or to another program is UTF-8.
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
    """End this process when the other end of its standard input is closed: the kernel does that even after SIGKILL. /dev/null
    then replaces the standard input, so that child processes do not inherit the pipe."""
    parent = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)

    def wait() -> None:
        while os.read(parent, 1):
            pass
        _end_now()

    threading.Thread(target=wait, daemon=True, name="parent").start()


def _end_now() -> None:
    with contextlib.suppress(OSError):  # a full disk, or a closed pipe
        os.write(2, b"amos_fairseq: the command that started this process has ended: stopping\n")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_SAVE)
    os.kill(os.getpid(), signal.SIGKILL)


class ForkedCommand(ForkServerProcess):
    """A command of :func:`python_command` in a process that the server of :mod:`multiprocessing` forks.

    It starts with the modules that the server has imported (``multiprocessing.set_forkserver_preload``), and is otherwise like
    a new process. The server is a new process, never a fork of this one, and starts with the first command. When this process
    ends, even by SIGKILL, the command gets SIGTERM: a training saves a checkpoint. Thread-safe.

    Its standard output and standard error (None: also the output) are appended to the files ``output`` and ``errors``.
    """

    _lock = threading.Lock()  # multiprocessing asks for all exit codes when it starts a process

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        output: os.PathLike,
        errors: os.PathLike | None = None,
    ) -> None:
        super().__init__(name="MainProcess")
        self.command, self.variables, self.folder = list(command), dict(variables), os.getcwd()
        self.outputs = [os.path.abspath(output), os.path.abspath(errors or output)]
        with self._lock:
            self.start()

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while the command runs."""
        with self._lock:
            if self.exitcode is not None:
                self.join()  # multiprocessing forgets it; a command whose server was killed loses its parent, and ends
            return self.exitcode

    def wait(self, timeout: float = math.inf) -> int:
        """Return the exit code; raise ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.command, timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def run(self) -> None:
        """Run the command; multiprocessing calls this in the new process."""
        self.prepare()
        threading.Thread(target=self._end_with_parent, daemon=True, name="parent").start()
        try:
            runpy.run_module(self.command[0], run_name="__main__", alter_sys=True)
        finally:
            atexit._run_exitfuncs()  # multiprocessing ends a process without them

    def prepare(self) -> None:
        """Replace what was inherited from the server by what a new process would have."""
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        multiprocessing.set_start_method(None, force=True)
        logging.root.handlers.clear()  # a message during the imports has configured it
        self._open_streams()
        os.environ.clear()
        os.environ.update(self.variables)
        server_folder = os.getcwd()
        os.chdir(self.folder)
        self._set_import_path(server_folder)
        sys.argv = self.command

    def _open_streams(self) -> None:
        appended = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666) for path in self.outputs]
        for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), *appended]):
            os.dup2(file, number)
            os.close(file)
        # The stream objects of the server were made for other files.
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115

    @staticmethod
    def _set_import_path(server_folder: str) -> None:
        """Put the user's PYTHONPATH first and this package last, and leave out the folder in which the server was started."""
        own_path = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        others = [path for path in sys.path if path not in ("", server_folder, *own_path)]
        package = [_PACKAGE_FOLDER] if _PACKAGE_FOLDER not in (*own_path, *others) else []
        sys.path[:] = [*own_path, *others, *package]

    @staticmethod
    def _end_with_parent() -> None:
        multiprocessing.parent_process().join()
        _end_now()


OPENMP_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
# Parameters of mallopt(3), <malloc.h>. Up to 2 GiB are kept; tensors below 1 GiB come from the heap, which grows by 64 MiB.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_MALLOC_SETTINGS = {_TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 2**26, _MMAP_THRESHOLD: 2**30}
# Before glibc 2.35 a larger threshold is refused.
_LARGEST_MMAP_THRESHOLD = 2**25


def wait_passively() -> None:
    """Let idle OpenMP threads of this process, and of those that it starts, sleep; to be called before PyTorch is imported."""
    if not any(name in os.environ for name in OPENMP_VARIABLES):
        os.environ["OMP_WAIT_POLICY"] = "passive"


def keep_freed_memory() -> bool:
    """Let glibc keep the memory that this process frees; return whether it does. Other C libraries are left alone."""
    if sys.platform != "linux" or any(name in os.environ for name in MALLOC_VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    accepted = [mallopt(parameter, value) for parameter, value in _MALLOC_SETTINGS.items()]
    return all(accepted[:2]) and bool(accepted[2] or mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution; "unknown" if it is on ``PYTHONPATH`` without metadata."""
    from importlib import metadata

    if distribution == "amos_fairseq":  # often used from a checkout, without metadata
        from amos_fairseq import __version__

        return __version__
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def describe_versions() -> str:
    libraries = ", ".join(f"{name} {version_of(name)}" for name in ("fairseq-fixed", "torch"))
    return f"amos_fairseq {version_of('amos_fairseq')} ({libraries}, Python {platform.python_version()})"


def main() -> None:
    """Run the module that the command line names as the main program of this process."""
    if not getattr(sys.flags, "safe_path", False):  # new in Python 3.11
        del sys.path[0]  # the folder of this file
    if _PACKAGE_FOLDER not in sys.path:
        sys.path.append(_PACKAGE_FOLDER)  # a checkout that is not installed; last, so that it hides no library
    prepare_streams()
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

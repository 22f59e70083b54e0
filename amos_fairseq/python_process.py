"""Start Python so that it imports nothing from the current folder, and ends with the process that started it.

``python -m`` and ``python -c`` look for modules in the current folder first: a file ``yaml.py`` in the folder of a downloaded
run would be executed. Here a command starts Python with this file as a script, which runs a module as ``-m`` does:

    python python_process.py [--with-parent] MODULE ARGUMENTS

The script needs only the standard library. ``PYTHONPATH`` has its usual effect; an empty entry in it is the current folder.
"""

import contextlib
import io
import os
import runpy
import signal
import sys
import threading
import time

WITH_PARENT = "--with-parent"
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


def main() -> None:
    """Run the module that the command line names as the main program of this process."""
    if not getattr(sys.flags, "safe_path", False):  # new in Python 3.11
        del sys.path[0]  # the folder of this file
    package = os.path.dirname(os.path.abspath(__file__))
    if os.path.dirname(package) not in sys.path:
        sys.path.append(os.path.dirname(package))  # a checkout that is not installed; last, so that it hides no library
    prepare_streams()
    if sys.argv[1] == WITH_PARENT:
        del sys.argv[1]
        end_with_parent()
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

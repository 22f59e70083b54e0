"""Run modules as commands in forked processes, without the five seconds of imports of a new interpreter.

The server of :mod:`multiprocessing` forks them. It has imported PyTorch and fairseq, but not the plugin. What depends on the
start of an interpreter, and a command that replaces itself, needs a new process.
"""

import atexit
import faulthandler
import io
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from unittest import mock

from tiny_runs import ROOT, environment  # not the plugin: the new process imports this file, too

HELPERS = str(Path(__file__).parent)
# The file alone: to import the package would be to import the plugin, also in the server.
_file = spec_from_file_location("python_process", ROOT / "amos_fairseq" / "process.py")
python_process = module_from_spec(_file)
_file.loader.exec_module(python_process)

# torch.optim imports torch._dynamo when the first optimizer is made.
IMPORTED = ["fairseq.tasks", "fairseq.trainer", "hydra.core.hydra_config", "torch._dynamo", "matplotlib.pyplot"]
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}


class ForkedCommand(python_process.ForkedCommand):
    """``python -m module arguments`` in ``cwd``, the output appended to two files; it is killed when this process ends."""

    def __init__(
        self, module: str, arguments: Sequence[str], cwd: Path, *outputs: Path, env: Mapping[str, str] | None = None
    ) -> None:
        multiprocessing.set_forkserver_preload(IMPORTED)
        self.cwd = str(cwd)
        for path in outputs:
            path.touch()  # it is read before the process has opened it
        with mock.patch.dict(os.environ, environment()):  # of the server, if this is the first command
            super().__init__([module, *arguments], environment(dict(env or {})), *outputs)

    def kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def prepare(self) -> None:
        super().prepare()
        faulthandler.enable(2)  # as its variable does in a new process
        os.chdir(self.cwd)
        paths = [path for path in self.variables.get("PYTHONPATH", "").split(os.pathsep) if path]
        helpers = ("", str(ROOT), HELPERS)
        sys.path[:] = [self.cwd, *paths, *(path for path in sys.path if path not in (*paths, *helpers))]


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
) -> list[subprocess.CompletedProcess[str]]:
    """Run a command once with each environment, all at the same time; after 300 s they are killed, which is an error."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [[Path(folder) / f"{name}{rank}" for name in ("out", "err")] for rank in range(len(environments))]
        ranks = [
            ForkedCommand(module, arguments, cwd, *paths, env=env)
            for paths, env in zip(outputs, environments, strict=True)
        ]
        try:
            codes = [rank.wait(300) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill_group()  # and what it has started
        texts = [[path.read_text(encoding="utf-8") for path in paths] for paths in outputs]
    return [subprocess.CompletedProcess(module, code, *text) for code, text in zip(codes, texts, strict=True)]


def run_module(
    module: str, arguments: Sequence[str], cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command, as :func:`run_ranks` does, once."""
    return run_ranks(module, arguments, [env or {}], cwd)[0]


def run_command(module: str, arguments: Sequence[str], num_ranks: int = 1, env: Mapping[str, str] | None = None) -> str:
    """Run a command on CPU ranks, assert that none fails, and return what they print."""
    ranks = [{}] if num_ranks == 1 else rank_variables(num_ranks)
    done = run_ranks(module, arguments, [{**ON_CPU, **(env or {}), **variables} for variables in ranks])
    text = "".join(rank.stdout + rank.stderr for rank in done)
    assert all(rank.returncode == 0 for rank in done), text[-6000:]
    return text


def run_main(main: Callable[[list[str]], int | None], *arguments: object) -> subprocess.CompletedProcess[str]:
    """Call the ``main`` of a command in this process. Its trainings are forked as :class:`ForkedCommand` is."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    multiprocessing.set_forkserver_preload(IMPORTED)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments]) or 0
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

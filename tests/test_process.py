"""No module of the current folder is imported, by any command or by a process that one starts; waiting threads sleep and freed
memory is kept, unless the user has set them."""

import ast
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import ROOT, environment, run_process, wait_until

from amos_fairseq.cli.main import SUBCOMMANDS
from amos_fairseq.process import MALLOC_VARIABLES, OPENMP_VARIABLES, python_command

# Freed and allocated again, 64 MiB cost 16,384 page faults if glibc has returned them to the system.
ASK_MALLOC = """
import ctypes, resource
{call}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
faults = []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(2**26)
    ctypes.memset(block, 1, 2**26)
    libc.free(block)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults[-1])
"""
CALL = "from amos_fairseq.process import keep_freed_memory; print(keep_freed_memory())"
UNSET = {name: value for name, value in os.environ.items() if name not in (*MALLOC_VARIABLES, *OPENMP_VARIABLES)}


def run_code(code: str, **variables: str) -> list[str]:
    result = run_process([sys.executable, "-c", code], env=UNSET | {"PYTHONPATH": str(ROOT)} | variables)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_freed_memory_is_kept():
    (stock,) = run_code(ASK_MALLOC.format(call=""))
    answer, kept = run_code(ASK_MALLOC.format(call=CALL))
    assert answer == "True"
    assert int(stock) > 16_000
    assert int(kept) < 100
    assert run_code(CALL, MALLOC_TOP_PAD_="131072") == ["False"], "what a user sets is left alone"


@pytest.mark.parametrize(("variables", "expected"), [({}, "passive"), ({"GOMP_SPINCOUNT": "100"}, "None")])
def test_threads_wait_passively(variables: dict[str, str], expected: str):
    code = "import os, amos_start; amos_start.start(); print(os.environ.get('OMP_WAIT_POLICY'))"
    assert run_code(code, **variables) == [expected]


ASK_IMPORT = """
import logging, os, sys
sys.modules["pyarrow"] = None  # scikit-learn imports it where it is installed, and it starts a thread of its own
before = logging.root.level, logging.root.handlers[:]
import torch
torch._C._cuda_getDeviceCount = None  # to call it would initialize CUDA
import amos_fairseq
amos_fairseq.register()
del torch._C._cuda_getDeviceCount
import torch._dynamo
print(before == (logging.root.level, logging.root.handlers), len(os.listdir("/proc/self/task")), torch.cuda.is_initialized())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_importing_the_plugin_changes_no_logger_and_starts_no_thread():
    """Also not with what a training imports, in the environment of the server that forks the trainings."""
    variables = {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert run_code(ASK_IMPORT, **variables) == ["True", "1", "False"]


# Of the standard library, of what the package needs, and the package itself.
PLANTED = ("json", "queue", "pickle", "multiprocessing", "yaml", "numpy", "torch", "fairseq", "hydra", "amos_fairseq")
# As the console script, for all commands in one process: the imports take seconds. Processes are not started, but printed.
CONSOLE_SCRIPT = """\
import os, sys
import amos_start
class Started(BaseException): pass
def start(program, command, variables):
    print("started", command[1:3], variables["PYTHONSAFEPATH"])
    raise Started
os.execve = start
for arguments in {commands!r}:
    sys.argv = ["amos", *arguments]
    try:
        amos_start.main()
    except Started:
        pass
    except SystemExit as ended:
        assert ended.code == 1, arguments
print(*(name for name in {planted!r} if name in sys.modules))
"""
# Each refuses its arguments after the imports.
_COMMANDS = (
    *("prepare text.txt --out out --vocab-size 1", "recipes recipe.yaml", "export start.pt out"),
    *("train amos_tiny task.data=.", "adapt absent text.txt --out out", "report absent"),
    *("report start.pt", "import absent out.pt"),
    *(f"{name} --checkpoint start.pt --data absent --out out" for name in ("glue", "squad", "tag", "probe")),
    "classify --checkpoint start.pt --train absent.tsv --out out",
    "parse --checkpoint start.pt --train absent --dev absent --out out",
    *("score start.pt text.txt", "flops start.pt", "verify absent"),
)
COMMANDS = [command.split() for command in _COMMANDS]
ASK = """\
import importlib, multiprocessing, sys
def tell(who):
    {imports}
    print(who, sys.argv[1:], flush=True)
if __name__ == "__main__":
    if "spawn" in sys.argv:
        import amos_start
        amos_start.start()
        child = multiprocessing.get_context("spawn").Process(target=tell, args=("child",))
        child.start()
        child.join()
    tell("parent")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A current folder with modules that leave a file when they are imported."""
    folder = tmp_path / "stranger"
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r})\n")
    return folder


def run(command: list[str], folder: Path, *path: Path) -> str:
    variables = environment({"PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))})
    result = run_process(command, folder, variables)
    assert result.returncode == 0, result.stderr[-2000:]
    assert not (folder.parent / "executed").exists()
    return result.stdout


@pytest.mark.slow
def test_no_command_imports_modules_of_the_current_folder(folder: Path, tmp_path: Path) -> None:
    assert {module.__name__.rpartition(".")[2].rstrip("_") for module in SUBCOMMANDS} == {name for name, *_ in COMMANDS}
    for name in ("start.pt", "text.txt", "dict.txt", "recipe.yaml"):
        (folder / name).write_text("not a checkpoint\n")
    script = tmp_path / "amos"
    script.write_text(CONSOLE_SCRIPT.format(commands=COMMANDS, planted=PLANTED))
    started, imported = run([sys.executable, str(script)], folder).splitlines()[-2:]
    assert imported.split() == list(PLANTED), "the commands have imported them, from elsewhere"
    assert started == f"started {python_command('fairseq_cli.hydra_train')[1:]} 1"


NOT_ON_310 = pytest.mark.skipif(sys.version_info < (3, 11), reason="docs/limits.md")


@pytest.mark.parametrize("how", ["", pytest.param("spawn", marks=NOT_ON_310)])
def test_a_started_process_imports_from_the_users_path_only(how: str, folder: Path, tmp_path: Path) -> None:
    """Also the processes of multiprocessing that it starts. With ``-m``, the modules of the folder are imported."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "ask.py").write_text(ASK.format(imports="import json, queue, pickle, multiprocessing, yaml"))
    printed = run([*python_command("ask"), "a b", how], folder, own)
    assert printed.splitlines() == [f"{who} {['a b', how]}" for who in (["child", "parent"] if how else ["parent"])]
    with pytest.raises(AssertionError):
        run([sys.executable, "-m", "ask", "a b", how], folder, own)


@pytest.mark.parametrize(
    ("starts", "variables"),
    [("command", {"LC_ALL": "C", "PYTHONUTF8": "0"}), ("process", {"PYTHONIOENCODING": "ascii"})],
)
def test_every_character_can_be_printed(starts: str, variables: dict[str, str], tmp_path: Path) -> None:
    """Tables contain a plus-minus sign. A surrogate stands for a byte of a path that is not UTF-8."""
    prepare = "import amos_start; amos_start.start()" if starts == "command" else ""
    (tmp_path / "table.py").write_text(f"{prepare}\nprint('88.9 \\xb1 0.1 \\udcff')\n")
    command = [sys.executable, str(tmp_path / "table.py")] if starts == "command" else python_command("table")
    variables = environment(variables | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])})
    with (tmp_path / "file").open("wb") as file:
        subprocess.run(command, env=variables, stdout=file, check=True)
    assert (tmp_path / "file").read_bytes() == "88.9 ± 0.1 ?\n".encode()
    reader, terminal = os.openpty()
    subprocess.run(command, env=variables, stdout=terminal, check=True)
    assert os.read(reader, 100) == b"88.9 ? 0.1 ?\r\n"
    os.close(reader)
    os.close(terminal)


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_process_ends_with_its_parent_and_not_before(closed: str, tmp_path: Path) -> None:
    """Where an output is closed, its number must not become the pipe's; where it is full, the message must not stop the end."""
    (tmp_path / "wait.py").write_text("import time\nopen('started', 'w').close()\ntime.sleep(60)\n")
    command = [*python_command("wait", with_parent=True)]
    shell = f"exec {shlex.join(command)} {'>&-' if closed == 'stdout' else '2>/dev/full'}"
    variables = environment({"PYTHONPATH": str(tmp_path)})
    child = subprocess.Popen(shell, shell=True, cwd=tmp_path, stdin=subprocess.PIPE, env=variables)
    wait_until((tmp_path / "started").exists)
    time.sleep(0.3)
    assert child.poll() is None
    child.stdin.close()
    assert child.wait(30) == -signal.SIGTERM


def test_one_function_starts_python() -> None:
    """Where no source of the package and of the examples passes ``-m`` or ``-c`` to Python."""
    for path in (path for folder in ("amos_fairseq", "examples") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            words = node.elts if isinstance(node, ast.List) else node.args if isinstance(node, ast.Call) else ()
            assert not [word for word in words if isinstance(word, ast.Constant) and word.value in ("-m", "-c")], path


def test_the_process_that_forks_trainings_leaves_the_signals_of_a_group_to_the_command() -> None:
    """From its first line on: the imports take seconds."""
    code = "import runpy, signal, sys, amos_fairseq; sys.modules['torch._dynamo'] = sys; amos_fairseq.register = int\n"
    code += "runpy.run_path(sys.argv[1]); print(*(int(signal.getsignal(number)) for number in (1, 2, 10, 12, 15)))"
    file = ROOT / "amos_fairseq" / "experiments" / "forked_training.py"
    printed = run_process([sys.executable, "-c", code, file]).stdout
    assert printed.split() == [str(int(signal.SIG_IGN))] * 5

"""``amos`` and the scripts of ``preprocess`` start without PyTorch; other programs that import the package get the plugin."""

import os
import sys
from pathlib import Path

import pytest
from failures import refusal
from tiny_runs import ROOT, environment, run_process

LIBRARIES = ("torch", "fairseq", "scipy", "transformers", "matplotlib", "sklearn")
ASK = """
import sys
if sys.argv[1] == "after":
    import fairseq.tasks
import amos_fairseq.models
from amos_fairseq.errors import UserError

NAMES = ["torch", "fairseq", *(f"amos_fairseq.{folder}" for folder in ("downstream", "hugging_face", "report"))]

def registered():
    return "fairseq.tasks" in sys.modules and "text_pretraining" in sys.modules["fairseq.tasks"].TASK_REGISTRY

print([name for name in NAMES if name in sys.modules], registered())
try:
    amos_fairseq.load("absent")
except UserError:
    print(registered())
"""


def imported_libraries(trace: str) -> set[str]:
    """The large libraries in what ``python -X importtime`` printed."""
    modules = (line.rpartition("|")[2].strip() for line in trace.splitlines() if line.startswith("import time:"))
    return {module.partition(".")[0] for module in modules} & set(LIBRARIES)


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        ("--help", 0, "usage: amos"),
        ("glue --help", 0, "usage: amos glue"),
        ("classify --train absent.tsv --checkpoint a --out b", 1, "amos_fairseq: error: absent.tsv: no such file"),
    ],
)
def test_amos_imports_no_large_library_before_it_needs_one(arguments: str, code: int, line: str, tmp_path: Path):
    command = [sys.executable, "-X", "importtime", "-m", "amos_start", *arguments.split()]
    result = run_process(command, tmp_path, environment({"PYTHONPATH": str(ROOT)}))
    printed = [line for line in result.stderr.splitlines() if not line.startswith("import time:")]
    assert result.returncode == code
    assert (result.stdout.splitlines() + printed)[0].startswith(line)
    assert imported_libraries(result.stderr) == set()


def test_scripts_check_their_paths_before_large_imports(tmp_path: Path):
    variables = {"PYTHONPROFILEIMPORTTIME": "1", "VIRTUAL_ENV": sys.prefix}
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = ["bash", ROOT / "preprocess" / "glue" / "prepare.sh", "absent", "ALL", "tokenizer", "out"]
    result = run_process(script, tmp_path, environment(variables))
    assert result.returncode == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("amos_fairseq: error: ")]
    assert any("absent" in line for line in errors)
    assert imported_libraries(result.stderr) == set()
    assert list(tmp_path.iterdir()) == []


def test_scripts_take_no_other_python_than_the_one_that_is_given(tmp_path: Path):
    script = ROOT / "preprocess" / "pretraining" / "prepare.sh"
    result = run_process(["bash", script, "absent", "--out", "out"], tmp_path, environment({"PYTHON": "python3.8"}))
    line = refusal(result)
    assert line.startswith("needs Python 3.13, ")
    assert "but PYTHON=python3.8 " in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "printed"), [("before", "[] False"), ("after", "['torch', 'fairseq', 'amos_fairseq.downstream'] True")]
)
def test_the_package_registers_itself_where_fairseq_has_been_imported(order: str, printed: str, tmp_path: Path):
    """``--user-dir`` imports it then, and so do the ranks that a command spawns. Otherwise it imports nothing large."""
    (tmp_path / "ask.py").write_text(ASK)
    result = run_process([sys.executable, "ask.py", order], tmp_path, environment({"PYTHONPATH": str(ROOT)}))
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout == f"{printed}\nTrue\n"


def test_shell_completion(tmp_path: Path):
    """What ``register-python-argcomplete`` asks of the command when a user presses Tab."""
    pytest.importorskip("argcomplete")
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": "amos report --se", "COMP_POINT": "16"}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": "answer", "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
    variables = environment(asked | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})
    assert run_process([sys.executable, "-m", "amos_start"], tmp_path, variables).returncode == 0
    assert (tmp_path / "answer").read_text() == "--sentence"

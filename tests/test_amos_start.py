"""``amos`` and the scripts of ``preprocess`` start without PyTorch; other programs that import the package get the plugin."""

import os
import sys
from pathlib import Path

import pytest
from failures import refusal
from forked_command import run_module
from tiny_runs import ROOT, environment, run_process

LIBRARIES = ("torch", "fairseq", "scipy", "transformers", "matplotlib", "sklearn")
ASK = """
import sys
sys.path.append(sys.argv[2])
import amos_start
if sys.argv[1] == "start":
    amos_start.start()
import amos_fairseq
from fairseq.tasks import TASK_REGISTRY
print("text_pretraining" in TASK_REGISTRY)
from amos_fairseq.compat.hydra_callback import ImportPlugin
ImportPlugin()
print("text_pretraining" in TASK_REGISTRY)
print([name for name in sys.modules if name in ("amos_fairseq.text.prepare", "amos_fairseq.text.split")])
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
@pytest.mark.parametrize(("how", "expected"), [("import", "True True []"), ("start", "False True []")])
def test_only_a_started_command_postpones_the_registration(how: str, expected: str, tmp_path: Path):
    """Not a process that imports the module, as the ranks that a command spawns do."""
    (tmp_path / "ask.py").write_text(ASK)
    result = run_module("ask", [how, str(ROOT)], tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == expected.split()


def test_shell_completion(tmp_path: Path):
    """What ``register-python-argcomplete`` asks of the command when a user presses Tab."""
    pytest.importorskip("argcomplete")
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": "amos report --se", "COMP_POINT": "16"}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": "answer", "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
    variables = environment(asked | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})
    assert run_process([sys.executable, "-m", "amos_start"], tmp_path, variables).returncode == 0
    assert (tmp_path / "answer").read_text() == "--sentence"

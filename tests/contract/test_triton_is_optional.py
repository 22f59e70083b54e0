"""Only functional/cuda imports Triton, and nothing imports functional/cuda unless ``model.kernels=triton`` runs on CUDA."""

import ast
import sys
from pathlib import Path

import pytest
import torch
from tiny_runs import ROOT, environment, run_process

from amos_fairseq.errors import UserError
from amos_fairseq.run.compilation import require_triton

PACKAGE = ROOT / "amos_fairseq"
KERNELS = PACKAGE / "functional" / "cuda"


def imports_of(nodes: list[ast.AST]) -> set[str]:
    """Modules that statements among ``nodes`` import."""
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return found | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}


def test_only_the_kernels_import_triton() -> None:
    importing = {
        path
        for path in PACKAGE.rglob("*.py")
        if any(name.partition(".")[0] == "triton" for name in imports_of(list(ast.walk(ast.parse(path.read_bytes())))))
    }
    assert importing
    assert {path.parent for path in importing} == {KERNELS}


def test_no_module_imports_the_kernels_at_its_top_level() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.parent != KERNELS:
            names = imports_of(ast.parse(path.read_bytes()).body)
            assert not any(name.startswith("amos_fairseq.functional.cuda") for name in names), path


def without_triton(folder: Path) -> dict[str, str]:
    """Variables of a Python for which Triton is not installed."""
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")
    return environment({"PYTHONPATH": f"{folder}:{ROOT}"})


@pytest.mark.slow
def test_a_cpu_trains_with_kernels_triton_where_triton_is_not_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "amos_start", "bench", "amos_tiny", "--steps", "1", "--warmup", "1"]
    command += ["--device", "cpu", "--vocabulary-size", "300", "--set", "dataset.batch_size=2", "model.kernels=triton"]
    result = run_process(command, tmp_path, without_triton(tmp_path))
    assert result.returncode == 0, result.stderr[-3000:]


def test_the_kernels_without_triton_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("amos_fairseq.functional.cuda")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"^model\.kernels=triton needs the package triton, .*: install it, or"):
        require_triton(torch.device("cpu"))

"""Which module imports which, read from the sources: imports inside of functions and for type checkers count as well.

Only ``functional/cuda`` imports Triton, and only ``model.kernels=triton`` on CUDA imports ``functional/cuda``.
"""

import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch
from source_imports import imported_by
from tiny_runs import ROOT, environment, run_process

from amos_fairseq.errors import UserError
from amos_fairseq.run.compilation import require_triton

# Folder -> the folders that its modules may import, besides their own and (except functional and modules) the modules that lie
# directly in the package. A folder that is not named may import all of them, and those of its kind, but not the commands.
LAYERS = {
    "": set(),
    "functional": set(),
    "modules": {"functional"},
    "tokenization": set(),
    "compat": {"functional"},
    "data": {"functional", "tokenization"},
    "optim": {"functional", "modules", "compat"},
    "models": {"functional", "modules"},
    "criterions": {"functional", "modules", "models", "data"},
    "tasks": {"functional", "modules", "models", "data"},
    "prepare": {"functional", "tokenization", "data"},
    "run": {"functional", "modules", "compat", "data"},
    "checkpoints": {"functional", "modules", "models", "tokenization"},
}
WITHOUT_GROUND_FLOOR = {"functional", "modules"}
KERNELS = "amos_fairseq.functional.cuda"


def modules() -> dict[str, Path]:
    found = {}
    for path in (ROOT / "amos_fairseq").rglob("*.py"):
        parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"]
        found[".".join(parts)] = path
    return found


def graph() -> dict[str, set[str]]:
    """The imports of each module, without those of the package itself, whose ``__init__`` registers all modules."""
    known = modules()
    del known["amos_fairseq"]
    return {
        name: {other for other in imported_by(path, known) if other in known} - {name} for name, path in known.items()
    }


def test_no_module_imports_itself_through_others() -> None:
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_sources_are_read() -> None:
    """Imports of four kinds: at the top, in a function, by name, of a module from its package."""
    found = graph()
    assert (
        "amos_fairseq.modules.encoder" in found["amos_fairseq.models.amos"] | found["amos_fairseq.models.pretraining"]
    )
    assert "amos_fairseq.data.corpus" in found["amos_fairseq.data.vocabulary"]
    assert "amos_fairseq.functional.cuda.output_layer" in found["amos_fairseq.functional.output_layer"]
    assert "amos_fairseq.hugging_face.custom_code" in found["amos_fairseq.hugging_face.model_card"]


def layer_of(module: str, paths: dict[str, Path]) -> str:
    """The folder of a module in the package; "" for those on the ground floor."""
    _, *parts = module.split(".")
    return "" if len(parts) == 1 and paths[module].name != "__init__.py" else parts[0]


def test_imports_run_downward() -> None:
    paths, found = modules(), set()
    for name, imported in graph().items():
        layer = layer_of(name, paths)
        allowed = LAYERS.get(layer)
        for other in imported:
            below = layer_of(other, paths)
            is_allowed = below != "cli" if allowed is None else below in allowed
            is_allowed |= below == "" and layer not in WITHOUT_GROUND_FLOOR
            if below != layer and not (layer == "cli" or is_allowed):
                found.add((name, other))
    assert not found, sorted(found)


def test_no_layer_is_above_itself() -> None:
    """So the table has an order, and with it the folders."""
    assert set().union(*LAYERS.values()) < set(LAYERS)
    TopologicalSorter(LAYERS).prepare()


def test_only_the_kernels_import_triton_and_nothing_imports_them_at_its_top_level() -> None:
    paths = modules()
    importing = {
        name
        for name, path in paths.items()
        if "triton" in {each.partition(".")[0] for each in imported_by(path, paths)}
    }
    assert importing
    assert all(name.startswith(KERNELS) for name in importing)
    for name, path in paths.items():
        if not name.startswith(KERNELS):
            assert not [each for each in imported_by(path, paths, at_top_level=True) if each.startswith(KERNELS)], name


@pytest.mark.slow
def test_a_cpu_trains_with_kernels_triton_where_triton_is_not_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "amos_start", "bench", "amos_tiny", "--steps", "1", "--warmup", "1"]
    command += ["--device", "cpu", "--vocabulary-size", "300", "--set", "dataset.batch_size=2", "model.kernels=triton"]
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")
    result = run_process(command, tmp_path, environment({"PYTHONPATH": f"{tmp_path}:{ROOT}"}))
    assert result.returncode == 0, result.stderr[-3000:]


def test_the_kernels_without_triton_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("amos_fairseq.functional.cuda")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"^model\.kernels=triton needs the package triton, .*: install it, or"):
        require_triton(torch.device("cpu"))

"""Which module imports which, read from the sources: imports inside of functions and for type checkers count as well.

Only ``functional/cuda`` imports Triton, and only ``model.kernels=triton`` on CUDA imports ``functional/cuda``.
"""

import functools
import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch
from source_imports import imported_by
from tiny_runs import ROOT

from amos_fairseq.errors import UserError
from amos_fairseq.run.kernels import require_triton

WITHOUT_GROUND_FLOOR = {"functional", "modules"}
KERNELS = "amos_fairseq.functional.cuda"


def modules() -> dict[str, Path]:
    found = {}
    for path in (ROOT / "amos_fairseq").rglob("*.py"):
        parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"]
        found[".".join(parts)] = path
    return found


@functools.cache
def graph() -> dict[str, set[str]]:
    """The imports of each module, without those of the package itself, whose ``__init__`` registers all modules."""
    known = modules()
    del known["amos_fairseq"]
    return {name: known.keys() & set(imported_by(path, known)) - {name} for name, path in known.items()}


def test_no_module_imports_itself_through_others() -> None:
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_sources_are_read() -> None:
    """Imports of four kinds: at the top, in a function, by name, of a module from its package."""
    found = graph()
    assert "amos_fairseq.modules.encoder" in found["amos_fairseq.models.amos"]
    assert "amos_fairseq.data.corpus" in found["amos_fairseq.tasks.corpus_task"]
    assert "amos_fairseq.functional.cuda.output_layer" in found["amos_fairseq.functional.output_layer"]
    assert "amos_fairseq.hugging_face.custom_code" in found["amos_fairseq.hugging_face.export"]


def layer_of(module: str, paths: dict[str, Path]) -> str:
    """The folder of a module in the package; "" for those on the ground floor."""
    _, *parts = module.split(".")
    return "" if len(parts) == 1 and paths[module].name != "__init__.py" else parts[0]


def may_import() -> dict[str, set[str] | None]:
    """The table of CONTRIBUTING.md: folder -> the folders above it that it may import; None: all. "" is the ground floor."""
    lines = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| `")]
    table: dict[str, set[str] | None] = {}
    for folders, _, allowed in rows:
        named = None if "everything" in allowed else set(re.findall("`([^`]+)`", allowed))
        assert named is None or named <= table.keys(), f"{folders} names a folder that is not above it"
        table |= dict.fromkeys(re.findall("`([^`]*)`", folders.replace("*.py", "")), named)
    return table


def test_imports_are_those_of_the_table() -> None:
    """Each folder imports only what its row permits, and all that it names."""
    paths, table, found = modules(), may_import(), set()
    for name, imported in graph().items():
        found |= {(layer_of(name, paths), layer_of(other, paths), name, other) for other in imported}
    wrong = []
    for layer, below, *edge in sorted(found):
        allowed = table[layer]
        is_free = below == "" and layer not in WITHOUT_GROUND_FLOOR
        is_allowed = (below != "cli" or layer == "cli") if allowed is None else below in allowed
        if layer != below and not (is_free or is_allowed):
            wrong.append(edge)
    assert wrong == []
    assert {(layer, below) for layer, allowed in table.items() for below in allowed or ()} <= {e[:2] for e in found}
    assert table.keys() == {layer_of(name, paths) for name in graph()}


def test_only_the_kernels_import_triton_and_nothing_imports_them_at_its_top_level() -> None:
    paths = modules()
    importing = {name for name in paths if "triton" in {each.split(".")[0] for each in imported_by(paths[name], paths)}}
    assert importing
    assert all(name.startswith(KERNELS) for name in importing)
    for name, path in paths.items():
        if not name.startswith(KERNELS):
            assert not [each for each in imported_by(path, paths, at_top_level=True) if each.startswith(KERNELS)], name


def test_the_kernels_without_triton_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("amos_fairseq.functional.cuda")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        UserError, match=r"^model\.kernels=triton does not work .*\(the package triton, .* is missing\): "
    ):
        require_triton(torch.device("cpu"), torch.nn.Linear(1, 1))


def test_the_kernels_with_an_old_triton_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of torch 2.6, whose compiler does not survive the kernels (tests/reliability/test_machine_code.py)."""
    triton = pytest.importorskip("triton")
    for name in [name for name in sys.modules if name.startswith("amos_fairseq.functional.cuda")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(triton, "__version__", "3.2.0")
    with pytest.raises(
        UserError, match=r"^model\.kernels=triton does not .*\(it needs Triton 3\.3 .* and found 3\.2\.0\): "
    ):
        require_triton(torch.device("cpu"), torch.nn.Linear(1, 1))

"""Which module imports which, read from the sources: imports inside of functions and for type checkers count as well.

Only ``functional/cuda`` imports Triton, and only ``model.kernels=triton`` on CUDA imports ``functional/cuda``.
"""

import functools
import re
import sys
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from source_imports import imported_by
from tiny_runs import ROOT

from amos_fairseq.errors import UserError
from amos_fairseq.run.kernels import require_triton

WITHOUT_GROUND_FLOOR = {"functional", "modules"}
KERNELS = "amos_fairseq.functional.cuda"


@functools.cache
def modules() -> dict[str, Path]:
    paths = {}
    for path in (ROOT / "amos_fairseq").rglob("*.py"):
        parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"]
        paths[".".join(parts)] = path
    return paths


@functools.cache
def graph() -> dict[str, set[str]]:
    """The imports of each module, without those of the package itself, whose ``__init__`` registers all modules."""
    known = dict(modules())
    del known["amos_fairseq"]
    return {name: known.keys() & set(imported_by(path, known)) - {name} for name, path in known.items()}


def folder_of(module: str) -> str:
    """The folder of a module in the package, of a task in ``downstream``."""
    parts = modules()[module].relative_to(ROOT / "amos_fairseq").parts[:-1]
    return ".".join(parts[:2] if parts[:1] == ("downstream",) else parts[:1])


@pytest.mark.parametrize("node", [str, folder_of], ids=["modules", "folders"])
def test_none_imports_itself_through_others(node: Callable[[str], str]) -> None:
    edges: dict[str, set[str]] = {}
    for name, imported in graph().items():
        edges.setdefault(node(name), set()).update(set(map(node, imported)) - {node(name), ""})
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


TASKS = "texts|words|spans"
# What a module must not import, as patterns, where the table of CONTRIBUTING.md permits it.
FORBIDDEN = [
    (rf"downstream\.{task}\.", rf"downstream\.(?!{task}\b)({TASKS}|multi_task)\b") for task in TASKS.split("|")
]
FORBIDDEN += [(r"(report|probing|scoring|adaptation|flops|hugging_face)\.", r"downstream\.(\w+\.)*command\b")]


@pytest.mark.parametrize(("place", "forbidden"), FORBIDDEN)
def test_tasks_do_not_import_each_other_and_no_tool_a_command(place: str, forbidden: str) -> None:
    edges = ((name, other) for name, imported in graph().items() for other in imported)
    names = (tuple(name.removeprefix("amos_fairseq.") for name in edge) for edge in edges)
    assert [edge for edge in names if re.match(place, edge[0]) and re.match(forbidden, edge[1])] == []


def layer_of(module: str) -> str:
    """The folder of a module in the package; "" for those on the ground floor."""
    return folder_of(module).partition(".")[0]


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
    table, edges = may_import(), set()
    for name, imported in graph().items():
        edges |= {(layer_of(name), layer_of(other), name, other) for other in imported}
    wrong = []
    for layer, below, *edge in sorted(edges):
        allowed = table[layer]
        is_free = below == "" and layer not in WITHOUT_GROUND_FLOOR
        is_allowed = (below != "cli" or layer == "cli") if allowed is None else below in allowed
        if layer != below and not (is_free or is_allowed):
            wrong.append(edge)
    assert wrong == []
    assert {(layer, below) for layer, allowed in table.items() for below in allowed or ()} <= {e[:2] for e in edges}
    assert table.keys() == set(map(layer_of, graph()))


def test_only_the_kernels_import_triton_and_nothing_imports_them_at_its_top_level() -> None:
    paths = modules()
    importing = {name for name in paths if "triton" in {each.split(".")[0] for each in imported_by(paths[name], paths)}}
    assert importing
    assert all(name.startswith(KERNELS) for name in importing)
    for name, path in paths.items():
        if not name.startswith(KERNELS):
            assert not [each for each in imported_by(path, paths, at_top_level=True) if each.startswith(KERNELS)], name


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (None, r"the package triton, .* is missing"),
        # That of torch 2.6, whose compiler does not survive the kernels.
        (SimpleNamespace(__version__="3.2.0", __spec__="a spec"), r"it needs Triton 3\.3 .* and found 3\.2\.0"),
    ],
)
def test_the_kernels_without_triton_or_with_an_old_one_are_one_line(installed, reason, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", installed)
    for name in [name for name in sys.modules if name.startswith(KERNELS)]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=rf"^model\.kernels=triton does not work .*\({reason}\): "):
        require_triton(torch.device("cpu"), torch.nn.Linear(1, 1))

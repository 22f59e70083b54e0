"""Which module imports which, read from the sources: imports inside of functions and for type checkers count as well."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from tiny_runs import ROOT

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


def modules() -> dict[str, Path]:
    found = {}
    for path in (ROOT / "amos_fairseq").rglob("*.py"):
        parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"]
        found[".".join(parts)] = path
    return found


def imported_by(path: Path, known: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (each.value for each in node.args if isinstance(each, ast.Constant))


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

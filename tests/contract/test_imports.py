"""Which module imports which, read from the sources: imports inside of functions and for type checkers count as well."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from tiny_runs import ROOT

FOLDER = ROOT / "amos_fairseq"


def modules() -> dict[str, Path]:
    found = {}
    for path in FOLDER.rglob("*.py"):
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
    assert "amos_fairseq.hugging_face.custom_code" in found["amos_fairseq.hugging_face.export"]

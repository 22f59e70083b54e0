"""The size and the structure of the package: ceilings, lowered with each change that makes it smaller.

A line of code is one that is not blank, and holds more than a comment or a docstring. Branches of a function: if, for, while,
except, case, conditional expressions, conditions of comprehensions, and operands of ``and`` and ``or`` after the first.
"""

import ast
import functools
import io
import re
import tokenize
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from source_imports import imported_by
from tiny_runs import ROOT

PACKAGE = ROOT / "amos_fairseq"
MOST_LINES, MOST_FILES, MOST_RAISES, MOST_BRANCHES = 35_727, 205, 17.3, 20
MOST_LINES_OF_TESTS = 35_355
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
CORE = "functional|modules|models|criterions|data|optim"
TASKS = "texts|words|spans"
# What a folder must not import, as patterns of module names.
FORBIDDEN = [
    (r"functional\.", r"(?!functional)"),
    (
        rf"({CORE})\.",
        r"(compat|run|checkpoints|checkpoint_files|downstream|hugging_face|report|scoring|probing|adaptation|cli)\b",
    ),
    (r"(text|inputs)\.", r"(models|modules|criterions|tasks|run|compat|downstream|checkpoints)\b"),
    *((rf"downstream\.{task}\.", rf"downstream\.(?!{task}\b)({TASKS}|multi_task)\b") for task in TASKS.split("|")),
    (r"(report|probing|scoring|adaptation|flops|hugging_face)\.", r"cli\b|downstream\.(\w+\.)*command\b"),
    (r"hugging_face\.", r"(downstream|run)\b"),
]


def modules() -> dict[str, Path]:
    """Each module by its name in the package, such as ``text.encoding``; a package is ``text.__init__``."""
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}


def lines_of_code(text: str, tree: ast.Module) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def branches(function: ast.AST) -> int:
    counted = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)
    total = 0
    for node in ast.walk(function):
        total += isinstance(node, counted)
        total += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        total += len(node.ifs) if isinstance(node, ast.comprehension) else 0
    return total


@functools.cache
def imports() -> list[tuple[str, str]]:
    """Each module, and one that it imports."""
    known = {f"amos_fairseq.{name}".removesuffix(".__init__") for name in modules()}
    edges = ((name, other) for name, path in modules().items() for other in imported_by(path, known))
    return [(name, other.removeprefix("amos_fairseq.")) for name, other in edges if other.startswith("amos_fairseq.")]


def test_the_package_is_not_larger_than_it_was() -> None:
    code, raises, lines = 0, 0, 0
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        code, lines = code + lines_of_code(text, tree), lines + text.count("\n")
        raises += sum(isinstance(node, ast.Raise) for node in ast.walk(tree))
    assert lines <= MOST_LINES
    assert len(modules()) <= MOST_FILES
    assert 1000 * raises / code <= MOST_RAISES
    tests = sum(path.read_text(encoding="utf-8").count("\n") for path in (ROOT / "tests").rglob("*.py"))
    assert tests <= MOST_LINES_OF_TESTS


def test_functions_have_few_branches() -> None:
    large = {
        f"{name}.{node.name}": branches(node)
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and branches(node) > MOST_BRANCHES
    }
    assert large == {}


@pytest.mark.parametrize(("place", "forbidden"), FORBIDDEN)
def test_no_folder_imports_what_it_must_not_know(place: str, forbidden: str) -> None:
    found = [edge for edge in imports() if re.match(place, edge[0]) and re.match(forbidden, edge[1])]
    assert found == []


def test_no_folders_import_each_other() -> None:
    """Folders of the package, and of ``downstream``."""

    def folder(name: str) -> str:
        parts = name.split(".")[:-1]
        return ".".join(parts[:2] if parts[:1] == ["downstream"] else parts[:1])

    names, graph = modules(), defaultdict(set)
    for name, other in imports():
        there = folder(other if other in names else f"{other}.__init__")
        if folder(name) and there and folder(name) != there:
            graph[folder(name)].add(there)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_measures_themselves() -> None:
    text = '"""Doc\n\nstring."""\n\n# comment\nx = [\n    1 if a and b else 2,\n]\nfor y in z:\n    pass\n'
    tree = ast.parse(text)
    assert (lines_of_code(text, tree), branches(tree)) == (5, 3)

"""What a source imports, read and not executed."""

import ast
import functools
from collections.abc import Container, Iterator
from pathlib import Path


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def imported_by(path: Path, known: Container[str] = (), at_top_level: bool = False) -> Iterator[str]:
    """Yield the modules that a file imports anywhere, or at its top level; of a package its modules, if they are ``known``."""
    tree = parsed(path)
    for node in tree.body if at_top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in names)
        elif isinstance(node, ast.Call) and "import_module" in (
            getattr(node.func, part, "") for part in ("id", "attr")
        ):
            yield from (each.value for each in node.args if isinstance(each, ast.Constant))

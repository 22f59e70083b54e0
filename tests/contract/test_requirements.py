"""Every library that the package and its preparation of text import is one that ``pip install`` brings."""

import ast
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
# fairseq's configuration is made of these, so it pins them itself.
BROUGHT_BY_FAIRSEQ = {"hydra-core", "omegaconf"}
# NVIDIA's kernels, for which no wheel exists, are used where they are found.
OPTIONAL = {"apex"}
OURS = {"amos_fairseq", "preprocess"}


def imported_modules(path: Path) -> Iterator[str]:
    """First names of all imports of a file, also of those inside functions."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


def install_requires() -> set[str]:
    """Names in the list of setup.py, which is read, not run."""
    tree = ast.parse((ROOT / "setup.py").read_bytes())
    keyword = next(n for n in ast.walk(tree) if isinstance(n, ast.keyword) and n.arg == "install_requires")
    return {canonicalize_name(Requirement(line).name) for line in ast.literal_eval(keyword.value)}


def test_every_import_is_required():
    files = [path for folder in OURS for path in (ROOT / folder).rglob("*.py")]
    modules = {module for path in files for module in imported_modules(path)}
    modules -= sys.stdlib_module_names | OURS | OPTIONAL
    assert {"torch", "fairseq"} <= modules
    distributions = importlib.metadata.packages_distributions()
    needed = {canonicalize_name(name) for module in modules for name in distributions[module]}
    assert needed - BROUGHT_BY_FAIRSEQ <= install_requires()

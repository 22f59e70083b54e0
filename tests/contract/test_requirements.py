"""Every library that the package and its preparation of text import is one that ``pip install`` brings."""

import ast
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

from check_environment import (
    OF_FAIRSEQ,
    OF_TESTS,
    is_found,
    name_of,
    other_versions,
    requirements,
)
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
# fairseq's configuration is made of these, so it pins them itself.
BROUGHT_BY_FAIRSEQ = {"hydra-core", "omegaconf"}
# NVIDIA's kernels, for which no wheel exists, are used where they are found.
OPTIONAL = {"apex", "argcomplete", "triton"}  # triton comes with CUDA builds of torch; argcomplete is an extra
OURS = {"amos_fairseq"}


def imported_modules(path: Path) -> Iterator[str]:
    """First names of all imports of a file, also of those inside functions."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


def test_every_import_is_required():
    files = [path for folder in OURS for path in (ROOT / folder).rglob("*.py")]
    modules = {module for path in files for module in imported_modules(path)}
    modules -= sys.stdlib_module_names | OURS | OPTIONAL
    assert {"torch", "fairseq"} <= modules
    distributions = importlib.metadata.packages_distributions()
    needed = {canonicalize_name(name) for module in modules for name in distributions[module]}
    assert needed - BROUGHT_BY_FAIRSEQ <= {canonicalize_name(name_of(line)) for line in requirements()}


def test_every_requirement_is_found_under_its_module():
    """A distribution whose module has another name would be called missing in every environment."""
    lines = requirements() + OF_FAIRSEQ + [line for line in requirements("test") if name_of(line) in OF_TESTS]
    assert [line for line in lines if not is_found(name_of(line))] == []


def test_what_fairseq_requires_is_checked_in_the_versions_it_requires():
    lines = (line for name in ("fairseq-fixed", "omegaconf", "sacrebleu") for line in importlib.metadata.requires(name))
    assert set(OF_FAIRSEQ) <= {str(Requirement(line)) for line in lines}


def test_older_versions_and_versions_that_were_not_run_are_told_apart():
    """An older one stops the scripts, because it lacks what the code calls; another one is a warning."""
    (older,), (other,) = other_versions(["torch>=99,<100", "packaging<1", "PyYAML>=1", "no-such-package"])
    assert older.startswith("torch ")
    assert older.endswith(" (torch>=99,<100)")
    assert other.startswith("packaging ")
    assert other.endswith(" (packaging<1)")

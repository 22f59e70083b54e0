"""Every library that the package imports is one that ``pip install`` brings; the versions of the Docker images fit."""

import importlib.metadata
import re
import sys

import pytest
from check_environment import OF_FAIRSEQ, OF_TESTS, is_found, name_of, requirements
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from source_imports import imported_by
from tiny_runs import ROOT

# fairseq's configuration is made of these, so it pins them itself.
BROUGHT_BY_FAIRSEQ = {"hydra-core", "omegaconf"}
# NVIDIA's kernels, for which no wheel exists, are used where they are found.
# triton comes with CUDA builds of torch; argcomplete, datasets, pyarrow are extras; a torchaudio that does not load is hidden.
OPTIONAL = {"argcomplete", "datasets", "pyarrow", "torchaudio", "triton"}


def test_every_import_is_required():
    paths = (ROOT / "amos_fairseq").rglob("*.py")
    modules = {name.partition(".")[0] for path in paths for name in imported_by(path)}
    modules -= sys.stdlib_module_names | {"amos_fairseq", "amos_start"} | OPTIONAL
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


def locked() -> dict[str, Version]:
    """Version of each distribution in the images; a line of any other form raises an error."""
    lines = (ROOT / "docker/constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [re.fullmatch(r"([A-Za-z0-9][\w.-]*)==([\w.!]+)", line).groups() for line in lines]  # no local suffix
    versions = {canonicalize_name(name): Version(version) for name, version in pairs}
    assert len(versions) == len(lines)
    return versions


@pytest.mark.parametrize("line", requirements() + OF_FAIRSEQ)
def test_every_requirement_is_locked_in_its_range(line: str):
    requirement = Requirement(line)
    assert requirement.specifier.contains(locked()[canonicalize_name(requirement.name)])

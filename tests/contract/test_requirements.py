"""Every library that the package imports is one that ``pip install`` brings; the versions of the Docker images fit."""

import importlib.metadata
import re
import sys

import pytest
from check_environment import OF_FAIRSEQ, OF_TESTS, is_found, name_of, other_versions, requirements
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from source_imports import imported_by
from tiny_runs import ROOT

# fairseq's configuration is made of these, so it pins them itself.
BROUGHT_BY_FAIRSEQ = {"hydra-core", "omegaconf"}
# NVIDIA's kernels, for which no wheel exists, are used where they are found.
# triton comes with CUDA builds of torch; argcomplete and pyarrow are extras; a torchaudio that does not load is hidden.
OPTIONAL = {"apex", "argcomplete", "pyarrow", "torchaudio", "triton"}


def test_every_import_is_required():
    paths = (ROOT / "amos_fairseq").rglob("*.py")
    modules = {name.partition(".")[0] for path in paths for name in imported_by(path)}
    modules -= sys.stdlib_module_names | {"amos_fairseq"} | OPTIONAL
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


def test_what_belongs_to_the_tests_and_to_one_build_of_torch_is_not_locked():
    """Each CUDA build of torch pins its own Triton, so a version here would make that build impossible to install."""
    of_tests = {canonicalize_name(Requirement(line).name) for line in requirements("test")[len(requirements()) :]}
    assert not (of_tests | {"amos-fairseq", "torchaudio"}) & set(locked())


def test_files_that_the_images_use_exist():
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    named = {
        name
        for file in (ROOT / "docker").glob("*.Dockerfile")
        for name in re.findall(r"/opt/amos_fairseq/([\w./]+)", file.read_text())
    }
    for name in named - {".venv/bin"}:  # made in the image
        assert (ROOT / name).is_file(), name
        assert name.partition("/")[0] not in ignored

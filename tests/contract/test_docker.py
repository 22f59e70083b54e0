"""The images: one file of versions within the ranges of setup.py for both, and every copied file exists. Needs no Docker."""

import re
from pathlib import Path

import pytest
from check_environment import OF_FAIRSEQ, requirements
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "docker/constraints.txt"
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def locked() -> dict[str, Version]:
    """Version of each distribution; a line of any other form raises an error."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
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


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_image_has_the_locked_versions_and_what_it_copies_exists(dockerfile: Path):
    text = dockerfile.read_text(encoding="utf-8")
    folder = re.search(r"^COPY (?:--\S+ )*\. (\S+)$", text, re.MULTILINE).group(1)
    assert f"PIP_CONSTRAINT={folder}/{CONSTRAINTS.relative_to(ROOT)} " in text
    named = re.findall(rf"{re.escape(folder)}/([\w./]+)", text)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for name in named:
        # The environment is made in the image.
        assert name == ".venv/bin" or ((ROOT / name).is_file() and name.partition("/")[0] not in ignored)
    assert "\nUSER amos\n" in text
    assert '\nENTRYPOINT ["amos"]\n' in text


def test_both_images_are_checked():
    assert [path.name for path in DOCKERFILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]

"""Check that an environment has the packages that the scripts of the checkout need, and list missing ones in one line.

    python examples/check_environment.py [test]

``examples/environment.sh`` runs it if ``AMOS_ENVIRONMENT=active``. Modules are located, not imported, which takes a tenth of
a second and needs only the standard library. ``test`` adds the packages that ``tests/run.sh`` needs.
"""

import ast
import importlib.util
import re
import sys
from importlib import metadata
from pathlib import Path

SETUP = Path(__file__).resolve().parents[1] / "setup.py"
# Dependencies of fairseq, omegaconf and sacrebleu according to their metadata; they may be missing after an installation
# with --no-deps.
OF_FAIRSEQ = ["hydra-core==1.3.2", "omegaconf==2.3.0", "antlr4-python3-runtime==4.9.*", "bitarray", "sacrebleu>=1.4.12"]
OF_FAIRSEQ += ["colorama", "lxml", "portalocker", "tabulate>=0.8.9"]
# Tests that use the other packages of the extra "test" are skipped without them.
OF_TESTS = ("pytest", "pytest-xdist", "ruff")
# Distributions whose module has another name, except for "-" instead of "_".
MODULES = {
    "antlr4-python3-runtime": "antlr4",
    "fairseq-fixed": "fairseq",
    "hydra-core": "hydra",
    "protobuf": "google.protobuf",
    "pytest-xdist": "xdist",
    "PyYAML": "yaml",
    "scikit-learn": "sklearn",
}


def requirements(extra: str = "") -> list[str]:
    """Return the requirements of the package and of ``extra`` from setup.py, which is parsed and not run."""
    keywords = {
        node.arg: node.value for node in ast.walk(ast.parse(SETUP.read_bytes())) if isinstance(node, ast.keyword)
    }
    of_extra = ast.literal_eval(keywords["extras_require"])[extra] if extra else []
    return ast.literal_eval(keywords["install_requires"]) + of_extra


def name_of(requirement: str) -> str:
    """Return the distribution's name, without version and markers."""
    return re.match(r"[\w.-]+", requirement).group()


def is_found(distribution: str) -> bool:
    """Return whether the module of a distribution can be located."""
    try:
        return importlib.util.find_spec(MODULES.get(distribution, distribution.replace("-", "_"))) is not None
    except ModuleNotFoundError:  # the parent package of a submodule
        return False


def other_versions(lines: list[str]) -> tuple[list[str], list[str]]:
    """Return what is installed in an older version than required, and what in another version that was not tested.

    Both as strings such as "torch 2.5.0 (torch>=2.6)".
    """
    from packaging.requirements import Requirement
    from packaging.version import Version

    older, others = [], []
    for line in lines:
        requirement = Requirement(line)
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:  # a folder on PYTHONPATH
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            at_least = [Version(bound.version) for bound in requirement.specifier if bound.operator == ">="]
            is_older = any(Version(version) < bound for bound in at_least)
            (older if is_older else others).append(f"{requirement.name} {version} ({line})")
    return older, others


def main() -> int:
    needed = requirements() + OF_FAIRSEQ
    if sys.argv[1:] == ["test"]:
        needed += [line for line in requirements("test") if name_of(line) in OF_TESTS]
    missing = [line for line in needed if not is_found(name_of(line))]
    if missing:
        command = " ".join(f"'{line}'" for line in missing)
        print(
            f"amos_fairseq: error: {sys.executable} lacks {', '.join(map(name_of, missing))}: "
            f"{sys.executable} -m pip install --no-build-isolation {command}",
            file=sys.stderr,
        )
        return 1
    older, others = other_versions(needed)
    if older:
        print(
            f"amos_fairseq: error: {sys.executable} has versions that are too old: {', '.join(older)}", file=sys.stderr
        )
        return 1
    if others:
        print(f"amos_fairseq: warning: versions that were not tested: {', '.join(others)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

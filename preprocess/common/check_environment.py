"""Check that an environment holds what the scripts of the checkout need, and name what is missing in one line.

    python preprocess/common/check_environment.py [test]

``examples/environment.sh`` runs it where ``AMOS_ENVIRONMENT=active``. Modules are located and not imported, which takes a
tenth of a second; only the standard library is needed. ``test``: what ``tests/run.sh`` needs, too.
"""

import ast
import importlib.util
import re
import sys
from importlib import metadata
from pathlib import Path

SETUP = Path(__file__).resolve().parents[2] / "setup.py"
# What fairseq, omegaconf and sacrebleu import in turn, as their metadata states it: after an installation with --no-deps it
# may be missing.
OF_FAIRSEQ = ["hydra-core==1.3.2", "omegaconf==2.3.0", "antlr4-python3-runtime==4.9.*", "bitarray", "sacrebleu>=1.4.12"]
OF_FAIRSEQ += ["colorama", "lxml", "portalocker", "tabulate>=0.8.9"]
# The other packages of the extra "test" are skipped by the tests that use them.
OF_TESTS = ("pytest", "pytest-xdist", "ruff")
# Distributions whose module has another name, beyond "-" for "_".
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
    """The requirements in setup.py, which is parsed and not run: those of the package, and those of ``extra``."""
    keywords = {
        node.arg: node.value for node in ast.walk(ast.parse(SETUP.read_bytes())) if isinstance(node, ast.keyword)
    }
    of_extra = ast.literal_eval(keywords["extras_require"])[extra] if extra else []
    return ast.literal_eval(keywords["install_requires"]) + of_extra


def name_of(requirement: str) -> str:
    """The distribution's name, without version and markers."""
    return re.match(r"[\w.-]+", requirement).group()


def is_found(distribution: str) -> bool:
    """Whether the module of a distribution can be located."""
    try:
        return importlib.util.find_spec(MODULES.get(distribution, distribution.replace("-", "_"))) is not None
    except ModuleNotFoundError:  # the package of a submodule
        return False


def other_versions(lines: list[str]) -> tuple[list[str], list[str]]:
    """What is installed in an older version than its requirement allows, and in another one that was not run.

    Both as "torch 2.5.0 (torch>=2.6)".
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
        print(f"amos_fairseq: warning: versions that were not run: {', '.join(others)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

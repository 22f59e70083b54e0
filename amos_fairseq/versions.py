"""Versions of this package and of the libraries that are recorded with results."""

import platform
from importlib import metadata

__version__ = "0.1.0"  # setup.py reads this line


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution; "unknown" if it is on ``PYTHONPATH`` without metadata.

    The version of this package never comes from metadata, because it is often used from a checkout.
    """
    if distribution == "amos_fairseq":
        return __version__
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def describe_versions() -> str:
    """Return the line of ``amos --version``."""
    libraries = ", ".join(f"{name} {version_of(name)}" for name in ("fairseq-fixed", "torch"))
    return f"amos_fairseq {__version__} ({libraries}, Python {platform.python_version()})"

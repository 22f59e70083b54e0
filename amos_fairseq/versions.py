"""The version of this package, and those of the libraries that it records beside results."""

from importlib import metadata

__version__ = "0.1.0"  # setup.py reads this line


def version_of(distribution: str) -> str:
    """The version of an installed distribution; "unknown" for a library that is on ``PYTHONPATH`` without its metadata.

    This package itself is often used from a checkout, so its version never comes from metadata.
    """
    if distribution == "amos_fairseq":
        return __version__
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"

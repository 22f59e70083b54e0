"""Call ``amos prepare KIND`` in this process."""

from collections.abc import Callable, Sequence

from amos_fairseq.cli.main import main


def prepare(kind: str) -> Callable[[Sequence[object]], object]:
    """Return a function of the arguments behind ``amos prepare KIND``."""
    return lambda arguments: main(["prepare", kind, *map(str, arguments)])

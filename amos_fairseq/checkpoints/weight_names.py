"""Tables of weight names, ours | those of another library, one line for a group of weights.

``N`` is the number of a layer, ``*`` means ``weight`` and ``bias``.
"""

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from torch import Tensor

Weights = dict[str, Tensor]


class Row(NamedTuple):
    """One line of a table.

    Attributes:
        ours: the name in this package.
        theirs: the name in the other library, or several names whose tensors are one tensor of ours.
        conversion: what changes beside the name; its meaning is that of the table. Empty: nothing.
    """

    ours: str
    theirs: str | tuple[str, ...]
    conversion: str = ""


def expand_rows(rows: Collection[Row], num_layers: int) -> Iterator[tuple[str, list[str], str]]:
    """Yield each line once per layer and once for weight and bias: our name, their names, conversion."""
    for row in rows:
        theirs = [row.theirs] if isinstance(row.theirs, str) else list(row.theirs)
        for layer in range(num_layers) if ".N." in row.ours else (0,):
            for kind in ("weight", "bias") if row.ours.endswith("*") else ("",):
                ours, *others = (name.replace(".N.", f".{layer}.").replace("*", kind) for name in (row.ours, *theirs))
                yield ours, others, row.conversion


def count_layers(names: Collection[str], prefix: str) -> int:
    """Return one more than the highest number that follows ``prefix`` in ``names``."""
    numbers = [int(found.group(1)) for name in names if (found := re.match(rf"{re.escape(prefix)}(\d+)\.", name))]
    return max(numbers, default=-1) + 1

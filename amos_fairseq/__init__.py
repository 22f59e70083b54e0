"""AMOS and its family as a fairseq plugin: ``fairseq-train --user-dir amos_fairseq``.

This is the one place that registers everything; fairseq imports it before it parses the flags.
"""

from amos_fairseq import compat

compat.apply()

from amos_fairseq import criterions, models, optim, tasks  # noqa: E402, F401

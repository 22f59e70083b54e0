"""One file per paper; importing this package registers every model with fairseq."""

from amos_fairseq.models import amos, electra, electric, mlm, teams  # noqa: F401

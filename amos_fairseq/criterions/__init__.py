"""One file per paper, of the same stem as its model; importing this package registers every criterion with fairseq."""

from amos_fairseq.criterions import amos, electra, electric, mlm, squad, teams  # noqa: F401

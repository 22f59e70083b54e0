"""Optimizers; importing this package registers them with fairseq."""

from amos_fairseq.optim import grouped_adam  # noqa: F401

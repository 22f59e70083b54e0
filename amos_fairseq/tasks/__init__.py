"""fairseq tasks of this package; importing registers them."""

from amos_fairseq.tasks import text_pretraining

__all__ = ["text_pretraining"]

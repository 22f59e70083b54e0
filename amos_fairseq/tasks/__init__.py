"""fairseq tasks of this package; importing registers them."""

from amos_fairseq.tasks import squad, text_pretraining

__all__ = ["squad", "text_pretraining"]

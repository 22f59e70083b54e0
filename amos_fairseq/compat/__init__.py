"""What stock fairseq needs on today's Python and PyTorch; one small file per concern, each with its reason."""

from amos_fairseq import metrics_log


def apply() -> None:
    """Patch fairseq in place. Called once, when the plugin is imported, before the flags are parsed."""
    metrics_log.apply()

"""What stock fairseq needs on today's Python and PyTorch; one small file per concern, each with its reason."""

# isort: off
from amos_fairseq.compat import known_noise

known_noise.apply()  # before anything imports fairseq
# isort: on

from amos_fairseq import metrics_log
from amos_fairseq.compat import distribution, launch, memory_map, precision


def apply() -> None:
    """Patch fairseq in place. Called once, when the plugin is imported, before the flags are parsed."""
    metrics_log.apply()
    precision.apply()
    distribution.apply()
    launch.apply()
    memory_map.apply()

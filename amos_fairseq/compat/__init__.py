"""What stock fairseq needs on today's Python and PyTorch; one small file per concern, each with its reason."""

# isort: off
from amos_fairseq.compat import known_noise

known_noise.apply()  # before anything imports fairseq
# isort: on

from amos_fairseq.compat import (
    amp_step,
    atomic_checkpoints,
    broken_torchaudio,
    compilation,
    distribution,
    host_reads,
    known_names,
    launch,
    master_gradients,
    master_weights,
    memory_map,
    metrics_log,
    non_finite,
    out_of_memory,
    precision,
    run_lifecycle,
    safe_loading,
    signals,
    train_script,
    user_errors,
    validation_scores,
)


def apply() -> None:
    """Patch fairseq in place. Called once, when the plugin is imported, before the flags are parsed."""
    broken_torchaudio.apply()
    user_errors.apply()
    known_names.apply()
    safe_loading.apply()
    master_weights.apply()
    master_gradients.apply()
    amp_step.apply()
    # Around fairseq's load_checkpoint, from the inside: refuse or accept, then cut the log back, first of all mend.
    run_lifecycle.apply()
    metrics_log.apply()
    atomic_checkpoints.apply()
    non_finite.apply()
    out_of_memory.apply()
    signals.apply()
    train_script.apply()
    precision.apply()
    distribution.apply()
    host_reads.apply()  # around what non_finite and distribution do with the norm of the gradient
    compilation.apply()
    launch.apply()
    memory_map.apply()
    validation_scores.apply()

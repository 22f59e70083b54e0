"""Patches of fairseq for today's Python and PyTorch. This package imports nothing above it: no model, task or criterion.

:data:`PATCHES` lists what is replaced, by what, why, and in which order. :func:`apply` executes it.
"""

# isort: off
from amos_fairseq.compat.side_effects import (
    hide_broken_torchaudio,
    open_without_reading,
    share_config_store,
    silence_harmless_warnings,
)

silence_harmless_warnings()  # before anything imports fairseq
# isort: on

from fairseq import checkpoint_utils, options
from fairseq.data import indexed_dataset
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.logging import progress_bar
from fairseq.models import distributed_fairseq_model
from fairseq.optim import AMPOptimizer, FairseqOptimizer
from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin, _MemoryEfficientFP16OptimizerMixin
from fairseq.tasks import sentence_prediction
from fairseq.trainer import Trainer
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.utils import JobReturn
from torch.utils.data._utils import signal_handling

from amos_fairseq.compat import (
    apex,
    checkpoints,
    collapse,
    compilation,
    distribution,
    divergence,
    failing_updates,
    host_reads,
    known_names,
    master_weights,
    metrics_log,
    precision,
    progress,
    run_lifecycle,
    signals,
    truncation,
    user_errors,
)
from amos_fairseq.compat.patching import Patch, Script, apply_patches, patch_training_script

# Reason -> (owner, attribute, replacement). A replacement is called with the function that it replaces and then with the
# arguments. The order is that of application: of two patches of one attribute, the later one wraps the earlier one.
PATCHES = {
    "A user's mistake ends with one line instead of a traceback from Hydra or Python": (
        Patch(JobReturn, "return_value", user_errors.report_mistake_of_job),
    ),
    "Unknown names, and a criterion that does not fit the model, fail late or with a traceback": (
        Patch(options, "parse_args_and_arch", known_names.check_parsed_flags),
        Patch(Script.STARTING, "add_defaults", known_names.check_config_before_defaults),
    ),
    "torch >= 2.6 loads data only: fairseq reports refused files unclearly and broadcasts classes that are refused": (
        Patch(checkpoint_utils, "load_checkpoint_to_cpu", checkpoints.load_with_explanation),
        Patch(distributed_utils, "broadcast_object", checkpoints.broadcast_without_config),
    ),
    "Mixed precision does not resume exactly: master weights and the state of the loss scaler are not saved": (
        Patch(_FP16OptimizerMixin, "state_dict", master_weights.save_masters),
        Patch(_FP16OptimizerMixin, "load_state_dict", master_weights.load_masters),
        Patch(_MemoryEfficientFP16OptimizerMixin, "state_dict", master_weights.save_masters),
        Patch(_MemoryEfficientFP16OptimizerMixin, "load_state_dict", master_weights.load_masters),
        Patch(AMPOptimizer, "state_dict", master_weights.save_scaler),
        Patch(AMPOptimizer, "load_state_dict", master_weights.load_scaler),
    ),
    "The states of NVIDIA's FusedAdam and of other Adams cannot be exchanged": (
        Patch(FairseqOptimizer, "load_state_dict", apex.load_either_layout),
    ),
    "Gradients of accumulated micro-batches are added up in 16 bits": (
        Patch(_FP16OptimizerMixin, "backward", master_weights.sum_after_backward),
        Patch(_FP16OptimizerMixin, "zero_grad", master_weights.zero_masters_at_once),
        Patch(_FP16OptimizerMixin, "_sync_fp32_params_to_fp16", master_weights.copy_masters_at_once),
        Patch(Trainer, "_build_optimizer", master_weights.sum_in_float32),
    ),
    "--amp divides the gradient by the loss scale twice": (Patch(AMPOptimizer, "step", precision.unscale_once),),
    "A finished run trains on, and a checkpoint that does not fit is loaded": (
        Patch(checkpoint_utils, "load_checkpoint", run_lifecycle.check_before_and_after_load),
        Patch(Script.TRAINING, "train", run_lifecycle.skip_if_finished),
        Patch(Trainer, "state_dict", run_lifecycle.keep_last_history),
    ),
    "Nothing says how long a run takes, and a bar starts again with every epoch": (
        Patch(progress_bar, "progress_bar", progress.show_progress),
        Patch(Script.TRAINING, "train", progress.follow),
    ),
    "Logged values are text for the console; a resumed run cuts metrics.jsonl back once it was accepted": (
        Patch(progress_bar, "progress_bar", metrics_log.record_logged_values),
        Patch(checkpoint_utils, "load_checkpoint", metrics_log.note_resumed_update),
    ),
    "A kill or a full disk truncates checkpoints; a damaged last one is repaired before anything else loads it": (
        Patch(checkpoint_utils, "torch_persistent_save", checkpoints.save_atomically),
        Patch(checkpoint_utils, "load_checkpoint", checkpoints.repair_before_load),
        Patch(PathManager, "copy", checkpoints.copy_local_atomically),
        Patch(PathManager, "rename", checkpoints.rename_after_fsync),
    ),
    "Two runs write to one SAVE_DIR; one that cannot be written ends only the first rank": (
        Patch(checkpoint_utils, "load_checkpoint", run_lifecycle.claim_before_load),
        Patch(checkpoint_utils, "verify_checkpoint_directory", run_lifecycle.leave_to_claim),
    ),
    "A loss or gradient that is not finite is ignored, or reported without naming the loss": (
        Patch(Trainer, "train_step", failing_updates.stop_at_infinite_loss),
        Patch(Trainer, "clip_grad_norm", failing_updates.stop_at_infinite_gradient),
    ),
    "A run that diverges replaces its good checkpoints": (
        Patch(Trainer, "train_step", divergence.stop_if_diverging),
        Patch(Trainer, "state_dict", divergence.save_recent_updates),
        Patch(checkpoint_utils, "load_checkpoint", divergence.load_recent_updates),
        Patch(checkpoint_utils, "save_checkpoint", divergence.save_unless_suspicious),
    ),
    "A discriminator that gives all tokens the same probability is trained on, in silence": (
        Patch(Trainer, "train_step", collapse.watch_discriminator),
        Patch(Trainer, "state_dict", collapse.save_count),
        Patch(checkpoint_utils, "load_checkpoint", collapse.load_count),
    ),
    "A batch that does not fit into memory is skipped, forever": (
        Patch(Trainer, "train_step", failing_updates.stop_when_out_of_memory),
    ),
    "SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C kill a run without a checkpoint": (
        Patch(Trainer, "__init__", signals.handle_in_rank),
        Patch(distributed_utils, "call_main", signals.handle_in_launcher),
        Patch(checkpoint_utils, "save_checkpoint", signals.record_last_save),
        Patch(signal_handling, "_set_worker_signal_handlers", signals.handle_in_loader_process),
        Patch(Script.TRAINING, "train", signals.finish_updates),
        Patch(Script.TRAINING, "validate_and_save", signals.stop_after_update),
    ),
    "Functions of the training script can be replaced only when it runs": (
        Patch(Trainer, "__init__", patch_training_script),
    ),
    "--bf16 on the command line means TPU": (Patch(options, "parse_args_and_arch", precision.parse_bf16_without_tpu),),
    "Several ranks do not work on a CPU, and fail silently in some launches": (
        Patch(distributed_fairseq_model, "DistributedDataParallel", distribution.data_parallel_on_any_device),
        Patch(Trainer, "_check_grad_norms", distribution.check_gradient_norms),
        Patch(Trainer, "__init__", distribution.require_connected_ranks),
    ),
    "An update reads the device two dozen times; these wrap what is done above with the gradient norm": (
        Patch(_FP16OptimizerMixin, "clip_grad_norm", host_reads.read_fp16_norm_once),
        Patch(Trainer, "clip_grad_norm", host_reads.clip_without_reading),
        Patch(Trainer, "_check_grad_norms", host_reads.check_true_norms),
        Patch(Trainer, "_reduce_and_log_stats", host_reads.read_once_and_log),
    ),
    "--compile and --kernels are our settings": (Patch(Trainer, "__init__", compilation.compile_if_requested),),
    "The settings of a launch are checked before any rank exists": (
        Patch(distributed_utils, "call_main", distribution.prepare_and_launch),
    ),
    "A pair that is too long loses the end of the row, often its whole second text, and nothing says so": (
        Patch(sentence_prediction, "maybe_shorten_dataset", truncation.cut_longer_text_first),
    ),
    "Prepared GLUE data that are damaged train another model in silence, or end in a traceback": (
        Patch(sentence_prediction.SentencePredictionTask, "load_dataset", run_lifecycle.check_labeled_texts),
    ),
    "Every rank reads the whole corpus": (Patch(indexed_dataset, "_warmup_mmap_file", open_without_reading),),
    "Hydra copies every class that fairseq has registered for each composition": (
        Patch(CachingConfigRepository, "__init__", share_config_store),
    ),
    "Validation scores can be numpy scalars or nan, or have an unknown name": (
        Patch(Script.TRAINING, "validate", run_lifecycle.return_comparable_scores),
        Patch(Trainer, "train_step", run_lifecycle.check_best_metric),
    ),
}


def apply() -> None:
    """Patch fairseq in place. Called once, when the plugin is imported, before fairseq parses the flags."""
    hide_broken_torchaudio()
    user_errors.install_exception_hook()
    checkpoints.restrict_classes()
    for patches in PATCHES.values():
        apply_patches(patches)

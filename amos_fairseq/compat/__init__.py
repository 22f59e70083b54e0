"""Replacements of functions of fairseq because of its faults, also those with today's Python and PyTorch.

``PATCHES`` lists each replaced function, its replacement and the reason. Where a feature of this package needs the same
function, ``amos_fairseq.run.hooks`` replaces it and calls the functions of this package among its hooks. This package
imports only the ground floor (errors, files ...).
"""

# isort: off
from amos_fairseq.compat.patching import (
    hide_broken_torchaudio,
    open_without_reading,
    share_config_store,
    seed_update,
    shared_parameters,
    silence_harmless_warnings,
)

silence_harmless_warnings()  # before anything imports fairseq
# isort: on

import argparse

import torch
from fairseq import checkpoint_utils, trainer
from fairseq.data import indexed_dataset
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.models import distributed_fairseq_model
from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin, _MemoryEfficientFP16OptimizerMixin
from fairseq.trainer import Trainer
from hydra._internal.config_repository import CachingConfigRepository

from amos_fairseq.compat import checkpoints, device_reads, distribution, mixed_precision
from amos_fairseq.compat.patching import Patch, Script, apply_patches

# Reason -> patches. A replacement is called with the function that it replaces, and then with its arguments.
PATCHES = {
    "torch >= 2.6 loads data only: fairseq reports refused files unclearly and broadcasts classes that are refused": (
        Patch(checkpoint_utils, "load_checkpoint_to_cpu", checkpoints.load_as_data_only),
        Patch(distributed_utils, "broadcast_object", checkpoints.broadcast_without_config),
    ),
    "A kill or a full disk truncates checkpoints": (
        Patch(checkpoint_utils, "torch_persistent_save", checkpoints.save_atomically),
        Patch(PathManager, "copy", checkpoints.copy_atomically),
    ),
    "Mixed precision does not resume exactly: master weights and the state of the loss scaler are not saved": (
        Patch(_FP16OptimizerMixin, "state_dict", mixed_precision.save_masters),
        Patch(_FP16OptimizerMixin, "load_state_dict", mixed_precision.load_masters),
        Patch(_MemoryEfficientFP16OptimizerMixin, "state_dict", mixed_precision.save_masters),
        Patch(_MemoryEfficientFP16OptimizerMixin, "load_state_dict", mixed_precision.load_masters),
    ),
    "Gradients of accumulated micro-batches are added up in 16 bits": (
        Patch(_FP16OptimizerMixin, "backward", mixed_precision.sum_after_backward),
        Patch(Trainer, "_build_optimizer", mixed_precision.sum_in_float32),
    ),
    "Master weights and their gradients are copied and zeroed one by one, some kernels for each": (
        Patch(_FP16OptimizerMixin, "zero_grad", mixed_precision.zero_masters_at_once),
        Patch(_FP16OptimizerMixin, "_sync_fp32_params_to_fp16", mixed_precision.copy_masters_at_once),
    ),
    "Several ranks do not work on a CPU, where gradients that differ go unnoticed": (
        Patch(distributed_fairseq_model, "DistributedDataParallel", distribution.data_parallel_on_any_device),
        Patch(Trainer, "_check_grad_norms", distribution.check_gradient_norms),
    ),
    "--fp16 reads its gradient norm three times": (
        Patch(_FP16OptimizerMixin, "clip_grad_norm", device_reads.read_fp16_norm_once),
    ),
    "Validation scores can be nan, or numpy scalars, with which a checkpoint cannot be loaded": (
        Patch(Script.TRAINING, "validate", checkpoints.return_comparable_scores),
    ),
    "Every rank reads the whole corpus": (Patch(indexed_dataset, "_warmup_mmap_file", open_without_reading),),
    "The log says of every absent bias that it is shared with the first one": (
        Patch(trainer, "_catalog_shared_params", shared_parameters),
    ),
    "Before every update all states of generators are read, and seeds of devices prepared that are not there": (
        Patch(Trainer, "_set_seed", seed_update),
    ),
    "For each composition Hydra copies every class that fairseq has registered": (
        Patch(CachingConfigRepository, "__init__", share_config_store),
    ),
}


def apply() -> None:
    """Patch fairseq in place, hide a ``torchaudio`` that does not load, and let PyTorch load what fairseq saves. Called once,
    when the plugin is imported, before fairseq parses the flags."""
    hide_broken_torchaudio()
    torch.serialization.add_safe_globals([argparse.Namespace, distributed_utils._TensorPlaceholder])
    for patches in PATCHES.values():
        apply_patches(patches)

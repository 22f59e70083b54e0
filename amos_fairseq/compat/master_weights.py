"""Mixed precision resumes exactly: what the optimizer knows beyond torch's state is saved with it.

``--fp16`` and ``--bf16`` keep float32 master weights, of which the model holds a rounded copy. Stock fairseq saves the
copy and makes new masters from it at a resume: the parameters jump (7.8e-3 after 10 updates in bf16). Of the loss scaler
it saves the scale but not when it last changed, and under ``--amp`` not even the scale, so that the next change falls on
another update than in a run without interruption. Here all of it travels in ``last_optimizer_state``; a checkpoint
without these entries loads as it does in stock fairseq, with a warning.
"""

import functools
import logging
from typing import Any

import torch
from fairseq.optim import AMPOptimizer
from fairseq.optim.fp16_optimizer import FP16Optimizer, _FP16OptimizerMixin, _MemoryEfficientFP16OptimizerMixin

from amos_fairseq.errors import UserError

logger = logging.getLogger(__name__)

MASTERS = "master_weights"
SCALER = "loss_scaler"
# The history of fairseq's DynamicLossScaler; the rest of it are settings, and the scale is saved by fairseq.
SCALER_HISTORY = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")


def master_weights(optimizer: FP16Optimizer) -> list[torch.Tensor]:
    """The float32 parameters in the optimizer's order; one flat tensor per device where fairseq flattens them."""
    masters = optimizer.fp32_params
    return [master.data for master in (masters.values() if isinstance(masters, dict) else masters)]


def restore_master_weights(optimizer: FP16Optimizer, saved: list[torch.Tensor]) -> None:
    """Copy saved masters into the optimizer's; :class:`UserError` where shapes differ."""
    masters = master_weights(optimizer)
    if [tuple(master.shape) for master in masters] != [tuple(tensor.shape) for tensor in saved]:
        raise UserError(
            "the checkpoint's float32 master weights have other shapes than this run's: keep --fp16 or --bf16, "
            "--fp16-no-flatten-grads and the model as they were, or give --reset-optimizer"
        )
    for master, tensor in zip(masters, saved, strict=True):
        master.copy_(tensor)


def scaler_history(scaler: Any) -> dict[str, int]:
    return {name: int(getattr(scaler, name)) for name in SCALER_HISTORY}


def restore_scaler_history(scaler: Any, saved: dict[str, int]) -> None:
    for name in SCALER_HISTORY:
        setattr(scaler, name, saved[name])


def _extend(optimizer_class: type, collect: Any, restore: Any, keys: tuple[str, ...]) -> None:
    """Let ``state_dict`` add what ``collect`` gives, and ``load_state_dict`` hand it to ``restore``."""
    state_dict, load_state_dict = optimizer_class.state_dict, optimizer_class.load_state_dict

    @functools.wraps(state_dict)
    def extended_state_dict(self: Any) -> dict[str, Any]:
        return {**state_dict(self), **collect(self)}

    @functools.wraps(load_state_dict)
    def load_extended_state_dict(self: Any, state: dict[str, Any], optimizer_overrides: Any = None) -> None:
        ours = {key: state[key] for key in keys if key in state}
        load_state_dict(self, {key: value for key, value in state.items() if key not in keys}, optimizer_overrides)
        restore(self, ours)

    optimizer_class.state_dict = extended_state_dict
    optimizer_class.load_state_dict = load_extended_state_dict


def _collect_fp16(optimizer: Any) -> dict[str, Any]:
    state: dict[str, Any] = {MASTERS: master_weights(optimizer)} if hasattr(optimizer, "fp32_params") else {}
    if optimizer.scaler is not None:
        state[SCALER] = scaler_history(optimizer.scaler)
    return state


def _restore_fp16(optimizer: Any, state: dict[str, Any]) -> None:
    if MASTERS in state:
        restore_master_weights(optimizer, state[MASTERS])
    elif hasattr(optimizer, "fp32_params"):
        logger.warning("the checkpoint has no float32 master weights: training goes on from the rounded ones")
    if optimizer.scaler is not None and SCALER in state:
        restore_scaler_history(optimizer.scaler, state[SCALER])


def _collect_amp(optimizer: AMPOptimizer) -> dict[str, Any]:
    return {SCALER: optimizer.scaler.state_dict()}  # Python numbers only; empty where the scaler is off


def _restore_amp(optimizer: AMPOptimizer, state: dict[str, Any]) -> None:
    if state.get(SCALER) and optimizer.scaler.is_enabled():
        optimizer.scaler.load_state_dict(state[SCALER])


def apply() -> None:
    """Extend the state of fairseq's three mixed-precision optimizers."""
    _extend(_FP16OptimizerMixin, _collect_fp16, _restore_fp16, (MASTERS, SCALER))
    _extend(_MemoryEfficientFP16OptimizerMixin, _collect_fp16, _restore_fp16, (MASTERS, SCALER))
    # Inherited, and past the wrapped optimizer's own way to torch: as the other two wrappers do, it is asked.
    AMPOptimizer.state_dict = lambda self: self.fp32_optimizer.state_dict()
    AMPOptimizer.load_state_dict = lambda self, state, overrides=None: self.fp32_optimizer.load_state_dict(
        state, overrides
    )
    _extend(AMPOptimizer, _collect_amp, _restore_amp, (SCALER,))

"""``--fp16`` and ``--bf16``: exact resume, exact sums of micro-batches, ``--bf16`` on any device.

Saving. ``--fp16`` and ``--bf16`` keep float32 master weights; the model holds a rounded copy. Stock fairseq saves the copy and
derives new masters from it, which changes the parameters (by 7.8e-3 after 10 updates in bf16). It also forgets when the loss
scale last changed. Here all of it is in ``last_optimizer_state``.

Accumulating. Stock fairseq adds the gradients of micro-batches in the model's 16 bits: with bfloat16's 8, a small contribution
to a sum 256 times as large is lost. Here the gradient of each micro-batch is added to the masters' after its backward pass and
released, which frees two bytes per parameter between the steps. On several ranks, DistributedDataParallel would exchange what
the last backward pass has left in the model. A hook exchanges the float32 sums instead, bucket by bucket and overlapping with
the backward pass: four bytes per parameter and update instead of two. Without accumulation the exchange is fairseq's.

Kernels. PyTorch's operators on lists of tensors (``torch._foreach_*``) take a few kernels on CUDA if all tensors have one
dtype, otherwise one for each tensor. Only ``_foreach_copy_`` also takes a source of another dtype (PyTorch 2.5 and newer), so
16-bit gradients are copied to float32 and then added.
"""

import logging
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fairseq.optim.fp16_optimizer import FP16Optimizer
from fairseq.trainer import Trainer
from torch import Tensor, distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from amos_fairseq.errors import UserError

logger = logging.getLogger(__name__)

# Bytes of the float32 copies of gradients that are added at once: a kernel of ``_foreach_add_`` takes 80 MiB of float32 at
# most, and a copy of all gradients would cost 4 bytes a parameter.
CHUNK_BYTES = 64 * 2**20

# Keys in last_optimizer_state.
MASTERS = "master_weights"
SCALER = "loss_scaler"
# The state of fairseq's DynamicLossScaler except its settings and the scale, which fairseq saves.
SCALER_HISTORY = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")


def master_weights(optimizer: FP16Optimizer) -> list[Tensor]:
    """Return the float32 parameters in the optimizer's order; one flat tensor per device if fairseq flattens them."""
    masters = optimizer.fp32_params
    return [master.data for master in (masters.values() if isinstance(masters, dict) else masters)]


def save_masters(state_dict: Callable[..., Any], optimizer: Any) -> dict[str, Any]:
    """Add the master weights, if there are any, and the history of the loss scaler to the optimizer's state."""
    state = state_dict(optimizer)
    if hasattr(optimizer, "fp32_params"):  # memory-efficient fp16 has none
        state[MASTERS] = master_weights(optimizer)
    if optimizer.scaler is not None:
        state[SCALER] = {name: int(getattr(optimizer.scaler, name)) for name in SCALER_HISTORY}
    return state


def load_masters(
    load_state_dict: Callable[..., Any], optimizer: Any, state_dict: dict[str, Any], optimizer_overrides: Any = None
) -> None:
    saved, history = state_dict.get(MASTERS), state_dict.get(SCALER)
    theirs = {key: value for key, value in state_dict.items() if key not in (MASTERS, SCALER)}
    load_state_dict(optimizer, theirs, optimizer_overrides)
    if saved is not None:
        masters = master_weights(optimizer)
        if [master.shape for master in masters] != [tensor.shape for tensor in saved]:
            raise UserError(
                "the checkpoint's float32 master weights have other shapes than this run's: keep --fp16 or --bf16, "
                "--fp16-no-flatten-grads and the model as they were, or give --reset-optimizer"
            )
        for master, tensor in zip(masters, saved, strict=True):
            master.copy_(tensor)
    elif hasattr(optimizer, "fp32_params"):
        logger.warning("the checkpoint has no float32 master weights: training continues from the rounded ones")
    if optimizer.scaler is not None and history is not None:
        for name in SCALER_HISTORY:
            setattr(optimizer.scaler, name, history[name])


class MasterGradients:
    """The float32 gradients of an update while its micro-batches are processed. ``is_sum``: they contain at least one.
    ``is_exchanged``: the last backward pass has already added its gradients here, and those of the other ranks."""

    def __init__(self, parameters: list[Tensor], masters: list[Tensor]) -> None:
        self.parameters = parameters
        self.of_parameter = {id(parameter): master for parameter, master in zip(parameters, masters, strict=True)}
        self.is_sum = self.is_exchanged = False

    def take(self) -> None:
        """After a backward pass, add the model's gradients to the masters' and release them."""
        if not self.is_exchanged:
            self.add([(p, p.grad) for p in self.parameters if p.grad is not None])
        for parameter in self.parameters:
            parameter.grad = None
        self.is_sum, self.is_exchanged = True, False

    @torch.no_grad()
    def add(self, gradients: list[tuple[Tensor, Tensor]]) -> None:
        """Add pairs of a parameter and its 16-bit gradient. The first micro-batch is copied, without reading the zeros."""
        if not gradients:
            return
        sums = [self.of_parameter[id(parameter)].grad for parameter, _ in gradients]
        add = add_in_float32 if self.is_sum else torch._foreach_copy_
        add(sums, [gradient for _, gradient in gradients])


def add_in_float32(sums: list[Tensor], gradients: list[Tensor]) -> None:
    """Add 16-bit tensors to float32 tensors of the same shapes, about ``CHUNK_BYTES`` at a time, with the bits of adding
    them directly: 16-bit values are exact in float32."""
    start = size = 0
    for end, total in enumerate(sums, start=1):
        size += total.nbytes
        if size >= CHUNK_BYTES or end == len(sums):
            copies = [torch.empty_like(each) for each in sums[start:end]]
            torch._foreach_copy_(copies, gradients[start:end])
            torch._foreach_add_(sums[start:end], copies)
            start, size = end, 0


def exchange_sums(trainer: Trainer, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """DistributedDataParallel's communication hook: average the sums of all micro-batches over ranks.

    It must return the buffer of the bucket, which contains only the last micro-batch and is not used afterwards.
    """
    group = trainer.data_parallel_process_group
    gradients = trainer.optimizer.master_gradients
    if not gradients.is_sum:
        return default_hooks.allreduce_hook(group, bucket)
    parameters = bucket.parameters()
    gradients.add(list(zip(parameters, bucket.gradients(), strict=True)))
    gradients.is_exchanged = True
    sums = [gradients.of_parameter[id(parameter)].grad for parameter in parameters]
    flat = torch.cat([total.reshape(-1) for total in sums]).div_(trainer.data_parallel_world_size)

    def write_back(exchanged: torch.futures.Future) -> Tensor:
        means = exchanged.value()[0].split([total.numel() for total in sums])
        torch._foreach_copy_(sums, [mean.view_as(total) for mean, total in zip(means, sums, strict=True)])
        return bucket.buffer()

    return distributed.all_reduce(flat, group=group, async_op=True).get_future().then(write_back)


def can_sum(trainer: Trainer) -> bool:
    """Return whether micro-batches can be added to the masters, and register the exchange where it has to change."""
    if trainer.data_parallel_world_size == 1:
        return True
    if max(trainer.cfg.optimization.update_freq) == 1:
        return False  # there is nothing to sum
    ddp = distributed_model(trainer.model)
    if ddp is None or trainer.cfg.distributed_training.ddp_comm_hook != "none":
        logger.warning(
            "gradients of accumulated micro-batches are added up in 16 bits: on several ranks a float32 sum needs "
            "--ddp-backend pytorch_ddp and no --ddp-comm-hook"
        )
        return False
    if not getattr(ddp, "exchanges_sums", False):  # a resume creates a new optimizer for the same model
        ddp.register_comm_hook(trainer, exchange_sums)
        ddp.exchanges_sums = True
    return True


def distributed_model(model: Any) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel inside fairseq's one or two wrappers, or None."""
    while model is not None and not isinstance(model, DistributedDataParallel):
        model = model._modules.get("module")
    return model


def sum_in_float32(build_optimizer: Callable[..., Any], trainer: Trainer) -> None:
    """Give an optimizer with float32 masters its ``MasterGradients`` when the trainer builds it."""
    build_optimizer(trainer)
    optimizer = trainer._optimizer
    if isinstance(optimizer, FP16Optimizer) and not optimizer.has_flat_params and can_sum(trainer):
        optimizer.master_gradients = MasterGradients(optimizer.fp16_params, optimizer.fp32_params)


def sum_after_backward(stock_backward: Callable[..., Any], optimizer: FP16Optimizer, loss: Tensor) -> None:
    stock_backward(optimizer, loss)
    if (gradients := getattr(optimizer, "master_gradients", None)) is not None:
        gradients.take()
        optimizer._needs_sync = False


def zero_masters_at_once(stock_zero_grad: Callable[..., Any], optimizer: FP16Optimizer) -> None:
    """Zero the masters' gradients in one launch, and release the model's."""
    if optimizer.has_flat_params:
        stock_zero_grad(optimizer)
    else:
        for parameter in optimizer.fp16_params:
            parameter.grad = None
        gradients = [master.grad for master in optimizer.fp32_params if master.grad is not None]
        if gradients:
            torch._foreach_zero_(gradients)
        optimizer._needs_sync = False
    # Without a scaler, stock fairseq keeps the divisor of the last step, which would scale every later update.
    optimizer._multiply_factor = 1.0 if optimizer.scaler is None else 1.0 / float(optimizer.scaler.loss_scale)
    if (sums := getattr(optimizer, "master_gradients", None)) is not None:
        sums.is_sum = False


def copy_masters_at_once(stock_copy: Callable[..., Any], optimizer: FP16Optimizer) -> None:
    """Copy the masters to the model in one launch."""
    if optimizer.has_flat_params:
        stock_copy(optimizer)
    else:
        with torch.no_grad():
            torch._foreach_copy_(optimizer.fp16_params, optimizer.fp32_params)


def leave_tpu_to_its_flag(flags: Namespace, arguments: Sequence[str]) -> None:
    """Let ``--bf16`` mean bfloat16 on the present device; only ``--tpu`` selects a TPU."""
    if getattr(flags, "bf16", False):
        flags.tpu = "--tpu" in arguments

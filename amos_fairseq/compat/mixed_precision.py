"""``--fp16``, ``--bf16`` and ``--amp``: exact resume, exact sums of micro-batches, ``--bf16`` on any device.

Saving. ``--fp16`` and ``--bf16`` keep float32 master weights; the model holds a rounded copy. Stock fairseq saves the copy
and derives new masters from it when it resumes, which changes the parameters (by 7.8e-3 after 10 updates in bf16). Of the
loss scaler it saves the scale but not when the scale last changed, and under ``--amp`` not even the scale, so that the next
change falls on another update than in an uninterrupted run. Here all of it is saved in ``last_optimizer_state``. A checkpoint
without these entries loads as in stock fairseq, with a warning.

Accumulating. Stock fairseq lets autograd add the gradients of micro-batches in the model's 16-bit gradient, and copies the
sum to the float32 masters: with bfloat16's 8 bits, a small contribution to a sum 256 times as large is lost. Here the
gradient of each micro-batch is added to the masters' after its backward pass and released, which frees two bytes per
parameter between the steps. On several ranks, DistributedDataParallel exchanges what the last backward pass has left in the
model. If there are sums of earlier micro-batches, a hook adds the last one to them and exchanges the float32 sums instead,
bucket by bucket and overlapping with the backward pass: four bytes per parameter and update instead of two. Without
accumulation the exchange is fairseq's. ``--ddp-backend`` other than pytorch_ddp, and ``--ddp-comm-hook``, keep fairseq's
16-bit sum, which is logged; so does, under ``--fp16``, an optimizer that takes all weights as one flat tensor (fairseq's
``adam``, but not this package's).

Kernels. PyTorch's operators on lists of tensors (``torch._foreach_*``) process the lists in a few kernels on CUDA if all
tensors have one dtype and the tensors of a pair equal strides; otherwise they start one kernel per tensor. Only
``_foreach_copy_`` also takes a source of another dtype than the target (PyTorch 2.5 and newer,
``aten/src/ATen/native/cuda/ForeachBinaryOpList.cu``). So masters are copied to the model, and gradients to the masters, by
that operator, and gradients are added in float32 after a copy to float32 (:func:`add_in_float32`).

Flags. Stock fairseq lets ``--bf16`` on the command line mean "TPU" and fails without XLA; through Hydra it trains.
"""

import contextlib
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from fairseq.optim import AMPOptimizer
from fairseq.optim.fp16_optimizer import FP16Optimizer
from fairseq.trainer import Trainer
from torch import Tensor, distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from amos_fairseq.errors import UserError

logger = logging.getLogger(__name__)

# Bytes of the float32 copies of gradients that are added at once. A kernel of ``_foreach_add_`` takes up to 320 blocks of
# 65,536 values, that is 80 MiB of float32: with 64 MiB a chunk is one kernel in spite of the blocks that its tensors fill in
# part (up to 64 tensors), and occupies every multiprocessor with about two blocks. A copy of all gradients would cost 4 bytes
# a parameter.
CHUNK_BYTES = 64 * 2**20
# Each copy begins at a multiple of so many values, or the kernels would read and write the values after it one by one.
ALIGNMENT = 64

# Keys in last_optimizer_state.
MASTERS = "master_weights"
SCALER = "loss_scaler"
# The state of fairseq's DynamicLossScaler except its settings and the scale, which fairseq saves.
SCALER_HISTORY = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")


def master_weights(optimizer: FP16Optimizer) -> list[Tensor]:
    """Return the float32 parameters in the optimizer's order; one flat tensor per device if fairseq flattens them."""
    masters = optimizer.fp32_params
    return [master.data for master in (masters.values() if isinstance(masters, dict) else masters)]


def restore_master_weights(optimizer: FP16Optimizer, saved: list[Tensor]) -> None:
    """Copy saved masters into the optimizer's; raise :class:`UserError` if the shapes differ."""
    masters = master_weights(optimizer)
    if [tuple(master.shape) for master in masters] != [tuple(tensor.shape) for tensor in saved]:
        raise UserError(
            "the checkpoint's float32 master weights have other shapes than this run's: keep --fp16 or --bf16, "
            "--fp16-no-flatten-grads and the model as they were, or give --reset-optimizer"
        )
    for master, tensor in zip(masters, saved, strict=True):
        master.copy_(tensor)


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
    """Restore what :func:`save_masters` adds."""
    masters, history = state_dict.get(MASTERS), state_dict.get(SCALER)
    load_state_dict(optimizer, without_our_keys(state_dict), optimizer_overrides)
    if masters is not None:
        restore_master_weights(optimizer, masters)
    elif hasattr(optimizer, "fp32_params"):
        logger.warning("the checkpoint has no float32 master weights: training continues from the rounded ones")
    if optimizer.scaler is not None and history is not None:
        for name in SCALER_HISTORY:
            setattr(optimizer.scaler, name, history[name])


def save_scaler(stock: Callable[..., Any], optimizer: AMPOptimizer) -> dict[str, Any]:
    """Save the GradScaler of ``--amp``.

    ``AMPOptimizer`` inherits ``state_dict``, which asks the torch optimizer and not the fairseq optimizer that it wraps.
    fairseq's other two mixed-precision wrappers ask the wrapped one, as is done here.
    """
    # The scaler's state consists of Python numbers; it is empty where the scaler is disabled.
    return {**optimizer.fp32_optimizer.state_dict(), SCALER: optimizer.scaler.state_dict()}


def load_scaler(
    stock: Callable[..., Any], optimizer: AMPOptimizer, state_dict: dict[str, Any], optimizer_overrides: Any = None
) -> None:
    """Restore what :func:`save_scaler` saves."""
    optimizer.fp32_optimizer.load_state_dict(without_our_keys(state_dict), optimizer_overrides)
    if state_dict.get(SCALER) and optimizer.scaler.is_enabled():
        optimizer.scaler.load_state_dict(state_dict[SCALER])


def without_our_keys(state_dict: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state_dict.items() if key not in (MASTERS, SCALER)}


class MasterGradients:
    """The float32 gradients of an update while its micro-batches are processed.

    Attributes:
        is_sum: they contain at least one micro-batch.
        is_exchanged: the last backward pass has already added its gradients here, and those of the other ranks.
    """

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
        sums = [self.of_parameter[id(parameter)].grad for parameter, _ in gradients]
        given = [gradient for _, gradient in gradients]
        if sums:
            (add_in_float32 if self.is_sum else torch._foreach_copy_)(sums, given)


def add_in_float32(sums: list[Tensor], given: list[Tensor]) -> None:
    """Add tensors to contiguous float32 tensors of the same shapes, in a few kernels: ``sums[i] += given[i]``.

    ``given`` is copied to float32 in chunks of :data:`CHUNK_BYTES`, all of them in the same memory. 16-bit values are exact in
    float32, so the bits are those of adding them directly.
    """
    sizes = [-(-total.numel() // ALIGNMENT) * ALIGNMENT for total in sums]
    scratch = sums[0].new_empty(min(CHUNK_BYTES // 4, sum(sizes)))
    targets, sources, copies, used = [], [], [], 0

    def add_chunk() -> None:
        nonlocal used
        torch._foreach_copy_(copies, sources)
        torch._foreach_add_(targets, copies)
        for tensors in (targets, sources, copies):
            tensors.clear()
        used = 0

    for total, gradient in zip(sums, given, strict=True):
        total, gradient = total.view(-1), gradient.reshape(-1)
        start = 0
        while start < len(total):  # a tensor may be larger than a chunk, and begins in the rest of the last one
            length = min(len(total) - start, len(scratch) - used)
            targets.append(total[start : start + length])
            sources.append(gradient[start : start + length])
            copies.append(scratch[used : used + length])
            start += length
            used += -(-length // ALIGNMENT) * ALIGNMENT
            if used == len(scratch):
                add_chunk()
    if targets:
        add_chunk()


def exchange_sums(trainer: Trainer, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """DistributedDataParallel's communication hook: average the sums of all micro-batches over ranks.

    The bucket's own buffer, which the hook must return, contains only the last micro-batch and is not used afterwards.
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
    """Give an optimizer with float32 masters its :class:`MasterGradients` when the trainer builds it."""
    build_optimizer(trainer)
    optimizer = trainer._optimizer
    if isinstance(optimizer, FP16Optimizer) and not optimizer.has_flat_params and can_sum(trainer):
        optimizer.master_gradients = MasterGradients(optimizer.fp16_params, optimizer.fp32_params)


def sum_after_backward(stock_backward: Callable[..., Any], optimizer: FP16Optimizer, loss: Tensor) -> None:
    """Add the gradients of a micro-batch to the masters' after its backward pass."""
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


def unscale_once(stock_step: Callable[..., Any], optimizer: AMPOptimizer) -> None:
    """Divide the gradient of ``--amp`` by the loss scale once.

    fairseq unscales the gradients of the torch optimizer before it clips them, but calls ``GradScaler.step`` with its own
    wrapper around that optimizer, which GradScaler takes for another one and divides by the scale again. Adam tolerates that
    only while g / scale is far above its epsilon, which is not the case at the usual scale of 2^16.
    """
    optimizer.scaler.step(optimizer.optimizer)
    optimizer.scaler.update()


@contextlib.contextmanager
def one_precision() -> Iterator[None]:
    """Name the two flags where fairseq says that --fp16 and --tpu exclude each other."""
    try:
        yield
    except ValueError as error:
        if "--fp16 and --tpu" not in str(error):
            raise
        raise UserError("--fp16 and --bf16 exclude each other: choose one") from error


def leave_tpu_to_its_flag(flags: Namespace, given: Sequence[str]) -> None:
    """Let ``--bf16`` mean bfloat16 on the present device; only ``--tpu`` selects a TPU."""
    if getattr(flags, "bf16", False):
        flags.tpu = "--tpu" in given

"""Under ``--bf16`` and ``--fp16`` the gradients of accumulated micro-batches are added up in float32.

Stock fairseq lets autograd add them to the model's 16-bit gradient, and copies the sum to the float32 masters: with
bfloat16's 8 bits a small contribution to a sum 256 times as large is lost. Here each micro-batch's gradient is added to
the masters' when its backward pass is over, and let go, which frees two bytes a parameter between the steps.

On several ranks DistributedDataParallel exchanges what the last backward pass has left in the model. When there are sums
of earlier micro-batches, a hook adds the last one to them and exchanges the float32 sums instead, bucket by bucket
beside the backward pass as before: four bytes a parameter and update, not two. Without accumulation the exchange is
fairseq's. ``--ddp-backend`` other than pytorch_ddp, and ``--ddp-comm-hook``, keep fairseq's sum in 16 bits; the log says so.
So does, under ``--fp16``, an optimizer that takes all weights as one flat tensor (fairseq's ``adam``; ours does not).

The masters are copied to the model in one launch, not in one per parameter, and their gradients are zeroed in one.
"""

import functools
import logging
from typing import Any

import torch
from fairseq.optim.fp16_optimizer import FP16Optimizer, _FP16OptimizerMixin
from fairseq.trainer import Trainer
from torch import Tensor, distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger(__name__)


class MasterGradients:
    """The float32 gradients of an update while its micro-batches pass.

    Attributes:
        is_sum: they hold at least one micro-batch.
        is_exchanged: the backward pass that just ran has brought its gradients here, and the other ranks' too.
    """

    def __init__(self, parameters: list[Tensor], masters: list[Tensor]) -> None:
        self.parameters = parameters
        self.masters = masters
        self.of_parameter = {id(parameter): master for parameter, master in zip(parameters, masters, strict=True)}
        self.is_sum = self.is_exchanged = False

    def take(self) -> None:
        """After a backward pass: add the model's gradients to the masters', and let them go."""
        if not self.is_exchanged:
            self.add([(p, p.grad) for p in self.parameters if p.grad is not None])
        for parameter in self.parameters:
            parameter.grad = None
        self.is_sum, self.is_exchanged = True, False

    @torch.no_grad()
    def add(self, gradients: list[tuple[Tensor, Tensor]]) -> None:
        """Pairs of a parameter and its 16-bit gradient. The first micro-batch need not read the zeros that stand there."""
        sums = [self.of_parameter[id(parameter)].grad for parameter, _ in gradients]
        given = [gradient for _, gradient in gradients]
        if sums:
            (torch._foreach_add_ if self.is_sum else torch._foreach_copy_)(sums, given)


def exchange_sums(trainer: Trainer, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """DistributedDataParallel's communication hook: the mean over ranks of what all micro-batches have left.

    A bucket's own buffer, which the hook must return, holds the last micro-batch alone and is not read any more.
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
    """Whether the masters may take a micro-batch's gradient at once; arranges the exchange where it has to change."""
    if trainer.data_parallel_world_size == 1:
        return True
    if max(trainer.cfg.optimization.update_freq) == 1:
        return False  # one micro-batch is no sum
    ddp = distributed_model(trainer.model)
    if ddp is None or trainer.cfg.distributed_training.ddp_comm_hook != "none":
        logger.warning(
            "gradients of accumulated micro-batches are added up in 16 bits: on several ranks a float32 sum needs "
            "--ddp-backend pytorch_ddp and no --ddp-comm-hook"
        )
        return False
    if not getattr(ddp, "exchanges_sums", False):  # a resume makes the optimizer anew, not the model
        ddp.register_comm_hook(trainer, exchange_sums)
        ddp.exchanges_sums = True
    return True


def distributed_model(model: Any) -> DistributedDataParallel | None:
    """fairseq wraps it once or twice."""
    while model is not None and not isinstance(model, DistributedDataParallel):
        model = model._modules.get("module")
    return model


def apply() -> None:
    """Give fairseq's optimizer with float32 masters its sums, where the trainer makes it."""
    stock_backward, stock_zero_grad = _FP16OptimizerMixin.backward, _FP16OptimizerMixin.zero_grad
    stock_copy, build_optimizer = _FP16OptimizerMixin._sync_fp32_params_to_fp16, Trainer._build_optimizer

    @functools.wraps(stock_backward)
    def backward(self: FP16Optimizer, loss: Tensor) -> None:
        stock_backward(self, loss)
        if self.master_gradients is not None:
            self.master_gradients.take()
            self._needs_sync = False

    @functools.wraps(stock_zero_grad)
    def zero_grad(self: FP16Optimizer) -> None:
        if self.has_flat_params:
            stock_zero_grad(self)
        else:
            for parameter in self.fp16_params:
                parameter.grad = None
            gradients = [master.grad for master in self.fp32_params if master.grad is not None]
            if gradients:
                torch._foreach_zero_(gradients)
            self._needs_sync = False
        # Without a scaler, stock fairseq keeps the factor by which the last step divided: every update would scale the next.
        self._multiply_factor = 1.0 if self.scaler is None else 1.0 / float(self.scaler.loss_scale)
        if self.master_gradients is not None:
            self.master_gradients.is_sum = False

    @functools.wraps(stock_copy)
    @torch.no_grad()
    def copy_to_model(self: FP16Optimizer) -> None:
        if self.has_flat_params:
            stock_copy(self)
        else:
            torch._foreach_copy_(self.fp16_params, self.fp32_params)

    @functools.wraps(build_optimizer)
    def build_summing_optimizer(self: Trainer) -> None:
        build_optimizer(self)
        optimizer = self._optimizer
        if isinstance(optimizer, FP16Optimizer) and not optimizer.has_flat_params and can_sum(self):
            optimizer.master_gradients = MasterGradients(optimizer.fp16_params, optimizer.fp32_params)

    _FP16OptimizerMixin.master_gradients = None
    _FP16OptimizerMixin.backward = backward
    _FP16OptimizerMixin.zero_grad = zero_grad
    _FP16OptimizerMixin._sync_fp32_params_to_fp16 = copy_to_model
    Trainer._build_optimizer = build_summing_optimizer

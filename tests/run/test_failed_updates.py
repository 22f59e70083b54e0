"""Updates with a loss or gradient that is not finite, in each precision, or without enough memory."""

import inspect
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.logging import metrics
from fairseq.optim import AMPOptimizer
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from fairseq.trainer import Trainer
from omegaconf import OmegaConf
from torch import nn

import amos_fairseq  # noqa: F401
from amos_fairseq.errors import UserError
from amos_fairseq.run.failed_updates import check_logged_losses, not_finite

NAN, INF = float("nan"), float("inf")


def test_losses_that_are_not_finite() -> None:
    outputs = [
        {"loss": torch.tensor(NAN), "mlm_loss_4": torch.tensor(2.0), "mlm_loss_6": torch.tensor(INF), "ntokens": 9},
        {"loss": 3.0, "rtd_loss": torch.tensor(NAN), "_histogram_loss": torch.full((100,), NAN), "loss_scale": INF},
    ]
    broken = not_finite(outputs)
    assert list(broken) == ["mlm_loss_6", "rtd_loss"]
    assert not_finite([{"loss": INF}]) == {"loss": INF}
    assert not_finite([{"loss": 1.0, "mlm_acc_4": NAN}]) == {}


class Optimizer:
    """fp16's loss scaler as fairseq's FP16Optimizer uses it, or none; the gradient norm is given."""

    def __init__(self, grad_norm: float, scaler: Any = None) -> None:
        self.grad_norm, self.scaler = torch.tensor(grad_norm), scaler

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Any = None) -> torch.Tensor:
        if self.scaler is not None:
            self.scaler.check_overflow(self.grad_norm)
        return self.grad_norm


def trainer(optimizer: Any, loss: float, amp: bool = False) -> Any:
    return SimpleNamespace(
        optimizer=optimizer,
        is_fsdp=False,
        cfg=OmegaConf.create({"common": {"amp": amp}, "optimization": {"clip_norm": 2.0}}),
        task=SimpleNamespace(reduce_metrics=lambda outputs, criterion: metrics.log_scalar("loss", 0.0)),
        get_criterion=lambda: None,
        tpu=False,
        get_num_updates=lambda: 11,
        logging_outputs_of_update=[{"loss": torch.tensor(loss), "mlm_loss_8": torch.tensor(loss)}],
    )


def update(made: Any) -> dict[str, Any]:
    """The calls of fairseq's trainer with the gradient's norm in an update; returns the logged values."""
    norm = Trainer.clip_grad_norm(made, 2.0)
    assert torch.isfinite(norm)  # fairseq looks at it before the optimizer's step
    with metrics.aggregate(new_root=True) as logged:
        Trainer._reduce_and_log_stats(made, [], 1.0, norm)
    return logged.get_smoothed_values()


@pytest.mark.parametrize(("norm", "clipped"), [(1.5, 0.0), (2.5, 100.0)])
def test_a_finite_gradient_passes_and_is_logged(norm: float, clipped: float) -> None:
    logged = update(trainer(Optimizer(norm), 3.0))
    assert (logged["gnorm"], logged["clip"]) == (norm, clipped)


def test_an_infinite_loss_with_a_finite_gradient_stops_too() -> None:
    after = trainer(Optimizer(1.5), 3.0)
    check_logged_losses(after, {"loss": 3.0, "mlm_loss_8": 2.0})
    check_logged_losses(after, None)  # fp16 has skipped the update
    with pytest.raises(UserError, match=r"update 11: the loss is not finite \(mlm_loss_8 = inf; no loss scale\)"):
        check_logged_losses(after, {"loss": INF, "mlm_loss_8": INF})


@pytest.mark.parametrize("grad_norm", [NAN, INF])
def test_float32_and_bf16_stop_in_the_same_update(grad_norm: float) -> None:
    """Behind the optimizer's step, which the trainer has counted."""
    with pytest.raises(UserError, match=r"update 11: the gradient is not finite \(mlm_loss_8 = nan; no loss scale\)"):
        update(trainer(Optimizer(grad_norm), NAN))


def test_fp16_lowers_its_scale_first() -> None:
    scaler = DynamicLossScaler(init_scale=4.0, min_loss_scale=0.5)
    failing = trainer(Optimizer(INF, scaler), 3.0)
    scales = []
    for _ in range(2):
        with pytest.raises(OverflowError):  # fairseq's own: the update is skipped
            Trainer.clip_grad_norm(failing, 2.0)
        scales.append(scaler.loss_scale)
    assert scales == [2.0, 1.0]
    with pytest.raises(UserError, match=r"Minimum loss scale reached \(0\.5\).*every loss is finite; loss scale 1\)"):
        Trainer.clip_grad_norm(failing, 2.0)


@pytest.fixture
def amp_optimizer() -> AMPOptimizer:
    common = {"fp16_init_scale": 4, "min_loss_scale": 0.5}
    sgd = {"_name": "sgd", "lr": [0.1], "momentum": 0.0, "weight_decay": 0.0}
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = AMPOptimizer.build_optimizer(OmegaConf.create({"common": common, "optimizer": sgd}), [parameter])
    optimizer._grad_scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # fairseq's own is off without CUDA
    return optimizer


def overflowing_update(optimizer: AMPOptimizer, loss: float) -> None:
    """One update under ``--amp`` as the trainer makes it."""
    optimizer.zero_grad()
    (parameter,) = optimizer.fp32_optimizer.params
    optimizer.backward((parameter * INF).sum())
    Trainer.clip_grad_norm(trainer(optimizer, loss, amp=True), 2.0)
    optimizer.step()


def test_amp_lowers_its_scale_and_stops_at_the_smallest(amp_optimizer: AMPOptimizer) -> None:
    scales = []
    for _ in range(2):
        overflowing_update(amp_optimizer, loss=3.0)
        scales.append(amp_optimizer.scaler.get_scale())
    assert scales == [2.0, 1.0]
    with pytest.raises(UserError, match="Minimum loss scale reached"):
        overflowing_update(amp_optimizer, loss=3.0)


def test_amp_does_not_skip_a_broken_loss(amp_optimizer: AMPOptimizer, caplog: pytest.LogCaptureFixture) -> None:
    """Stock fairseq continues, but a smaller scale does not help."""
    caplog.set_level(logging.INFO)
    with pytest.raises(UserError, match=r"mlm_loss_8 = nan; loss scale 4\)"):
        overflowing_update(amp_optimizer, loss=NAN)


def trainer_whose_memory_is_full() -> Any:
    """The attributes that ``Trainer.train_step`` uses up to the end of the forward pass, on one rank."""

    def train_step(**arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    cfg = {"ema": {"store_ema": False}, "distributed_training": {"distributed_world_size": 1}}
    nothing = dict.fromkeys(("get_num_updates", "zero_grad", "_set_seed"), lambda: 0)
    return SimpleNamespace(
        cfg=OmegaConf.create(cfg),
        model=nn.Identity(),
        criterion=nn.Identity(),
        get_criterion=nn.Identity,
        optimizer=None,
        task=SimpleNamespace(train_step=train_step),
        data_parallel_world_size=1,
        cuda=False,
        _prepare_sample=lambda sample: (sample, False),
        _log_oom=lambda error: None,
        **nothing,
    )


def test_the_run_ends() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        Trainer.train_step(trainer_whose_memory_is_full(), [{}])


def test_stock_fairseq_skips_the_batch() -> None:
    assert inspect.unwrap(Trainer.train_step)(trainer_whose_memory_is_full(), [{}]) is None

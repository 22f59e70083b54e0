"""An update under --amp is the update of float32, whatever the loss scale."""

from typing import Any

import pytest
import torch
from fairseq.optim import AMPOptimizer
from omegaconf import OmegaConf

GRADIENT = torch.tensor([3.0, 4.0])


def step_of(scale: float, step: Any, clip_norm: float = 0.0) -> torch.Tensor:
    """How far plain SGD with learning rate 1 moves a parameter whose gradient is GRADIENT."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    sgd = {"_name": "sgd", "lr": [1.0], "momentum": 0.0, "weight_decay": 0.0}
    common = {"fp16_init_scale": scale, "min_loss_scale": 1e-4}
    optimizer = AMPOptimizer.build_optimizer(OmegaConf.create({"common": common, "optimizer": sgd}), [parameter])
    optimizer._grad_scaler = torch.amp.GradScaler("cpu", init_scale=scale)  # fairseq's own is off without CUDA
    optimizer.zero_grad()
    optimizer.backward((parameter * GRADIENT).sum())
    assert optimizer.clip_grad_norm(clip_norm) == 5.0
    step(optimizer)
    return -parameter.detach()


@pytest.mark.parametrize("scale", [1.0, 4.0, 2.0**16])
def test_loss_scale_does_not_change_the_step(scale: float) -> None:
    assert torch.equal(step_of(scale, AMPOptimizer.step), GRADIENT)
    torch.testing.assert_close(step_of(scale, AMPOptimizer.step, clip_norm=1.0), GRADIENT / 5, rtol=1e-5, atol=0)


def test_stock_fairseq_divides_twice() -> None:
    assert torch.equal(step_of(4.0, AMPOptimizer.step.__wrapped__), GRADIENT / 4)

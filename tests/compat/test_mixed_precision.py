"""Precisions by flags; the step of --amp."""

from typing import Any

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.optim import AMPOptimizer
from omegaconf import OmegaConf

import amos_fairseq  # noqa: F401  (patches fairseq)

FLAGS = (
    "DATA --task text_pretraining --arch amos_tiny --criterion amos --optimizer grouped_adam --batch-size 4 --lr 0.001"
)


def parse(*flags: str):
    return options.parse_args_and_arch(options.get_training_parser(), [*FLAGS.split(), *flags])


@pytest.mark.parametrize("flag", ["--bf16", "--memory-efficient-bf16"])
def test_bf16_flag_does_not_mean_tpu(flag: str) -> None:
    """Stock fairseq sets tpu with every --bf16 and dies without XLA."""
    cfg = convert_namespace_to_omegaconf(parse(flag))
    assert cfg.common.bf16
    assert not cfg.common.tpu
    assert convert_namespace_to_omegaconf(parse("--bf16", "--tpu")).common.tpu
    assert not parse().bf16


AMP_GRADIENT = torch.tensor([3.0, 4.0])


def step_of(scale: float, step: Any, clip_norm: float = 0.0) -> torch.Tensor:
    """How far plain SGD with learning rate 1 moves a parameter whose gradient is AMP_GRADIENT."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    sgd = {"_name": "sgd", "lr": [1.0], "momentum": 0.0, "weight_decay": 0.0}
    common = {"fp16_init_scale": scale, "min_loss_scale": 1e-4}
    optimizer = AMPOptimizer.build_optimizer(OmegaConf.create({"common": common, "optimizer": sgd}), [parameter])
    optimizer._grad_scaler = torch.amp.GradScaler("cpu", init_scale=scale)  # fairseq's own is off without CUDA
    optimizer.zero_grad()
    optimizer.backward((parameter * AMP_GRADIENT).sum())
    assert optimizer.clip_grad_norm(clip_norm) == 5.0
    step(optimizer)
    return -parameter.detach()


@pytest.mark.parametrize("scale", [1.0, 4.0, 2.0**16])
def test_loss_scale_does_not_change_the_step(scale: float) -> None:
    assert torch.equal(step_of(scale, AMPOptimizer.step), AMP_GRADIENT)
    torch.testing.assert_close(step_of(scale, AMPOptimizer.step, clip_norm=1.0), AMP_GRADIENT / 5, rtol=1e-5, atol=0)

"""Interrupted and uninterrupted training in mixed precision, to the bit; stock fairseq's methods beside ours."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fairseq.optim import AMPOptimizer
from fairseq.optim.fp16_optimizer import FP16Optimizer, _FP16OptimizerMixin
from omegaconf import OmegaConf

from amos_fairseq.errors import UserError


def configuration(precision: str, **common: Any) -> Any:
    adam = {"_name": "adam", "lr": [0.01], "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-6, "weight_decay": 0.01}
    adam |= {"use_old_adam": True, "fp16_adam_stats": False, "tpu": False}
    return OmegaConf.create(
        {
            "common": {
                "bf16": precision == "bf16",
                "fp16": precision == "fp16",
                "amp": precision == "amp",
                "fp16_no_flatten_grads": True,
                "fp16_init_scale": 4,
                "fp16_scale_window": 4,
                "fp16_scale_tolerance": 0.0,
                "threshold_loss_scale": None,
                "min_loss_scale": 1e-4,
                "model_parallel_size": 1,
                **common,
            },
            "optimizer": adam,
            "optimization": {"update_freq": [1]},
            "distributed_training": {"distributed_world_size": 1},
        }
    )


class Run:
    """A linear model with one of fairseq's mixed-precision optimizers, on random data that depends on the update."""

    def __init__(self, precision: str) -> None:
        torch.manual_seed(0)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "amp": torch.float32}[precision]
        self.model = torch.nn.Linear(8, 4).to(dtype)
        parameters = list(self.model.parameters())
        if precision == "amp":
            self.optimizer = AMPOptimizer.build_optimizer(configuration(precision), parameters)
            # fairseq's own is a CUDA scaler, which is switched off on a CPU
            self.optimizer._grad_scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=4)
        else:
            self.optimizer = FP16Optimizer.build_optimizer(configuration(precision), parameters)

    def update(self, number: int) -> float:
        """One update; returns the loss scale after it."""
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(16, 8, generator=generator).to(self.model.weight.dtype)
        self.optimizer.zero_grad()
        self.optimizer.backward(self.model(inputs).float().pow(2).mean())
        self.optimizer.clip_grad_norm(1.0)
        self.optimizer.step()
        scaler = self.optimizer.scaler
        return 1.0 if scaler is None else getattr(scaler, "loss_scale", None) or scaler.get_scale()

    def saved(self) -> dict[str, Any]:
        """What a checkpoint would hold, by way of a file and the strict loader."""
        buffer = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)

    @classmethod
    def resumed(cls, precision: str, saved: dict[str, Any]) -> "Run":
        """As fairseq's trainer does it: the model first, then a new optimizer over it."""
        run = cls(precision)
        run.model.load_state_dict(saved["model"])
        rebuilt = cls.__new__(cls)
        rebuilt.model = run.model
        if precision == "amp":
            rebuilt.optimizer = run.optimizer
        else:
            rebuilt.optimizer = FP16Optimizer.build_optimizer(configuration(precision), list(run.model.parameters()))
        rebuilt.optimizer.load_state_dict(saved["optimizer"])
        return rebuilt


def trajectory(precision: str, interrupted_after: int | None) -> tuple[list[float], list[torch.Tensor]]:
    run, scales = Run(precision), []
    for number in range(1, 13):
        scales.append(run.update(number))
        if number == interrupted_after:
            run = Run.resumed(precision, run.saved())
    masters = getattr(run.optimizer, "fp32_params", None)
    return scales, [tensor.detach() for tensor in (*run.model.parameters(), *(masters or ()))]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "amp"])
def test_resume_is_exact(precision: str) -> None:
    straight_scales, straight = trajectory(precision, None)
    resumed_scales, resumed = trajectory(precision, 5)
    assert resumed_scales == straight_scales
    for ours, expected in zip(resumed, straight, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    if precision != "bf16":
        assert len(set(straight_scales)) > 2, "the loss scale is meant to grow after the interruption"


@pytest.fixture
def stock_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("state_dict", "load_state_dict"):
        monkeypatch.setattr(_FP16OptimizerMixin, name, getattr(_FP16OptimizerMixin, name).__wrapped__)


@pytest.mark.usefixtures("stock_methods")
def test_stock_fairseq_rounds_the_parameters_at_a_resume() -> None:
    _, straight = trajectory("bf16", None)
    _, resumed = trajectory("bf16", 5)
    assert any(not torch.equal(ours, expected) for ours, expected in zip(resumed, straight, strict=True))


def test_a_stock_checkpoint_loads_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    saved = Run("bf16").saved()
    del saved["optimizer"]["master_weights"]
    Run.resumed("bf16", saved)
    assert "no float32 master weights" in caplog.text


@pytest.mark.parametrize("spoil", [lambda masters: masters[:1], lambda masters: [tensor[:1] for tensor in masters]])
def test_masters_of_another_model_are_refused(spoil: Callable[[list], list]) -> None:
    saved = Run("bf16").saved()
    saved["optimizer"]["master_weights"] = spoil(saved["optimizer"]["master_weights"])
    with pytest.raises(UserError, match=r"other shapes.*--reset-optimizer"):
        Run.resumed("bf16", saved)


def test_the_state_of_the_optimizer_keeps_stock_names() -> None:
    """So that a checkpoint of ours can be continued by stock fairseq."""
    run = Run("fp16")
    run.update(1)
    assert {"state", "param_groups", "loss_scale"} <= set(run.optimizer.state_dict())

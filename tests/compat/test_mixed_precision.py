"""Mixed precision: exact resumes, and sums of gradients against float64, on one rank and on two; compared with stock."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import options
from fairseq.dataclass.configs import DistributedTrainingConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import DistributedFairseqModel
from fairseq.optim.fp16_optimizer import FP16Optimizer, _FP16OptimizerMixin
from fairseq.trainer import Trainer
from omegaconf import OmegaConf
from rank_functions import succeed_on_two_ranks
from torch import distributed, nn
from training_step import FairseqStep, set_up

import amos_fairseq  # noqa: F401  (patches fairseq)
from amos_fairseq.compat import mixed_precision
from amos_fairseq.compat.mixed_precision import MasterGradients, can_sum, distributed_model
from amos_fairseq.errors import UserError


def configuration(precision: str = "bf16", name: str = "adam", update_freq: int = 1, **training: Any) -> Any:
    """Settings of a run; an optimizer ``name`` of fairseq or of this package has its own keys, and ignores the other's."""
    common = {kind: precision == kind for kind in ("bf16", "fp16")} | {"fp16_no_flatten_grads": True}
    common |= {"fp16_init_scale": 4 if name == "adam" else 8, "fp16_scale_window": 4, "fp16_scale_tolerance": 0.0}
    common |= {"threshold_loss_scale": None, "min_loss_scale": 1e-4, "model_parallel_size": 1}
    adam = {"_name": name, "lr": [0.01], "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-6}
    if name == "adam":
        adam |= {"weight_decay": 0.01, "use_old_adam": True, "fp16_adam_stats": False, "tpu": False}
    else:
        adam |= {"weight_decay": 0.0, "decay_all_parameters": False, "layer_wise_lr_decay": 1.0}
    distributed = {"distributed_world_size": 1, "ddp_comm_hook": "none", **training}
    groups = {"common": common, "optimizer": adam, "optimization": {"update_freq": [update_freq]}}
    return OmegaConf.create(groups | {"distributed_training": distributed})


class Run:
    """A linear model with one of fairseq's mixed-precision optimizers, on random data that depends on the update."""

    def __init__(self, precision: str) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 4).to(DTYPES[precision])
        self.optimizer = FP16Optimizer.build_optimizer(configuration(precision), list(self.model.parameters()))

    def update(self, number: int) -> float:
        """One update; returns the loss scale after it."""
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(16, 8, generator=generator).to(self.model.weight.dtype)
        self.optimizer.zero_grad()
        self.optimizer.backward(self.model(inputs).float().pow(2).mean())
        self.optimizer.clip_grad_norm(1.0)
        self.optimizer.step()
        scaler = self.optimizer.scaler
        return 1.0 if scaler is None else scaler.loss_scale

    def saved(self) -> dict[str, Any]:
        """The state after saving it to a file and loading it with the strict loader."""
        buffer = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)

    @classmethod
    def resumed(cls, precision: str, saved: dict[str, Any]) -> "Run":
        """As fairseq's trainer does it: the model first, then a new optimizer over it."""
        run = cls(precision)
        run.model.load_state_dict(saved["model"])
        run.optimizer = FP16Optimizer.build_optimizer(configuration(precision), list(run.model.parameters()))
        run.optimizer.load_state_dict(saved["optimizer"])
        return run


def trajectory(precision: str, interrupted_after: int | None) -> tuple[list[float], list[torch.Tensor]]:
    run, scales = Run(precision), []
    for number in range(1, 13):
        scales.append(run.update(number))
        if number == interrupted_after:
            run = Run.resumed(precision, run.saved())
    masters = getattr(run.optimizer, "fp32_params", None)
    return scales, [tensor.detach() for tensor in (*run.model.parameters(), *(masters or ()))]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resume_is_exact(precision: str) -> None:
    straight_scales, straight = trajectory(precision, None)
    resumed_scales, resumed = trajectory(precision, 5)
    assert resumed_scales == straight_scales
    for ours, expected in zip(resumed, straight, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    if precision != "bf16":
        assert len(set(straight_scales)) > 2, "the loss scale is meant to grow after the interruption"


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


WIDTH = 64
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def linear(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH, bias=False).to(dtype)


def inputs(number: int) -> torch.Tensor:
    """Positive, so that the sum becomes large compared with its terms."""
    return torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(number))


def gradient_of(model: nn.Module, number: int) -> torch.Tensor:
    """The gradient of one micro-batch, computed in the model's dtype, as float64."""
    model.zero_grad(set_to_none=True)
    loss_of(model, number).backward()
    (parameter,) = model.parameters()
    gradient, parameter.grad = parameter.grad.double(), None
    return gradient


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(inputs(number).to(dtype)).float().square().sum()


def optimizer_of(model: nn.Module, precision: str, sums: bool = True) -> FP16Optimizer:
    optimizer = FP16Optimizer.build_optimizer(configuration(precision, "grouped_adam"), list(model.parameters()))
    if sums:
        optimizer.master_gradients = MasterGradients(optimizer.fp16_params, optimizer.fp32_params)
    optimizer.zero_grad()
    return optimizer


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sum_is_in_float32(precision: str) -> None:
    """Each term is a gradient in 16 bits; 16 additions in float32 round by 2^-24 each, at most 1e-6 in all."""
    model = linear(DTYPES[precision])
    expected = sum(gradient_of(model, number) for number in range(16))
    optimizer = optimizer_of(model, precision)
    for number in range(16):
        optimizer.backward(loss_of(model, number))
    optimizer._sync_fp16_grads_to_fp32()
    scale = 1 if optimizer.scaler is None else optimizer.scaler.loss_scale
    assert error(optimizer.fp32_params[0].grad / scale, expected) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("chunk_bytes", [4 * 64, 2**20])
def test_chunks_add_the_same_bits_as_one_addition(chunk_bytes, dtype, monkeypatch) -> None:
    """Tensors above and below the size of a chunk, one of them transposed, against float32 + 16-bit by PyTorch itself."""
    torch.manual_seed(0)
    shapes = [(1,), (64,), (20, 30), (3,), (), (5, 64), (191,), (0,), (2, 32)]
    sums = [torch.randn(shape) for shape in shapes]
    given = [torch.randn(shape).to(dtype) for shape in shapes]
    given[2] = given[2].t().contiguous().t()
    expected = [total + gradient for total, gradient in zip(sums, given, strict=True)]
    sizes: list[list[int]] = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(mixed_precision, "CHUNK_BYTES", chunk_bytes)
    note = lambda to, given: sizes.append([each.nbytes for each in to]) or copy(to, given)  # noqa: E731
    monkeypatch.setattr(torch, "_foreach_copy_", note)
    mixed_precision.add_in_float32(sums, given)
    assert all(torch.equal(total, value) for total, value in zip(sums, expected, strict=True))
    assert (len(sizes) > 1) == (chunk_bytes < 2**20)
    assert all(sum(chunk[:-1]) < chunk_bytes for chunk in sizes)


def test_updates_do_not_share_their_sums() -> None:
    """Nothing of an update is left in the next, nor its clipping; and the model holds no gradient of its own."""
    model = linear(torch.bfloat16)
    optimizer = optimizer_of(model, "bf16")
    for number in (1, 2):
        expected = gradient_of(model, number)
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, number))
        optimizer.multiply_grads(0.5)
        norm = optimizer.clip_grad_norm(1e-3)
        assert float(norm) == pytest.approx(float(expected.norm()) / 2, rel=1e-5)
        assert error(optimizer.fp32_params[0].grad, expected) < 1e-6
        optimizer.step()
        assert next(model.parameters()).grad is None
        assert torch.equal(next(model.parameters()), optimizer.fp32_params[0].bfloat16())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_scale_and_clipping_are_part_of_the_fused_step(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go into the fused kernel; fairseq's way multiplies the masters' gradients first, to the same end."""
    found = []
    for is_fused in (True, False):
        model = linear(DTYPES[precision])
        optimizer = optimizer_of(model, precision)
        assert optimizer.supports_step_with_scale
        inner, multiplied = optimizer.fp32_optimizer, []
        multiply = inner.multiply_grads
        monkeypatch.setattr(inner, "multiply_grads", lambda c, m=multiplied, f=multiply: (m.append(c), f(c)))
        optimizer.optimizer.supports_step_with_scale = is_fused
        for number in range(2):
            optimizer.zero_grad()
            optimizer.backward(loss_of(model, number))
            optimizer.multiply_grads(1 / 7)
            optimizer.clip_grad_norm(0.5)
            optimizer.step()
        assert len(multiplied) == (0 if is_fused else 2)
        found.append(optimizer.fp32_params[0].detach())
    # An update moves a weight by 0.01; where a gradient is near 0, Adam shows the rounding of a quotient and a product.
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


def test_an_overflow_is_seen_in_the_sum() -> None:
    """One infinite micro-batch among finite ones: fairseq's loss scaler halves its scale, from the norm alone."""
    model = linear(torch.float16)
    optimizer = optimizer_of(model, "fp16")
    for factor in (1.0, 1e38, 1.0):
        optimizer.backward(loss_of(model, 0) * factor)
    with pytest.raises(OverflowError):
        optimizer.clip_grad_norm(1.0)
    assert optimizer.scaler.loss_scale == 4


def exchange(rank: int, directory: str) -> None:
    """Two updates of one rank in each precision; the gradients of its masters are saved."""
    found = {precision: sums_of_updates(rank, precision) for precision in DTYPES}
    torch.save(found, Path(directory, f"{rank}.pt"))


def sums_of_updates(rank: int, precision: str, update_freq: int = 4) -> list[torch.Tensor]:
    """As in fairseq's trainer, only the last micro-batch is exchanged."""
    arguments = DistributedTrainingConfig(ddp_backend="pytorch_ddp", device_id=rank, tpu=False)
    arguments.gradient_as_bucket_view = precision == "fp16"
    own = linear(DTYPES[precision])
    model = DistributedFairseqModel(arguments, own, distributed.group.WORLD, torch.device("cpu"))
    cfg = configuration(precision, "grouped_adam", update_freq)
    trainer = SimpleNamespace(model=model, cfg=cfg, data_parallel_world_size=2)
    trainer.data_parallel_process_group, found = distributed.group.WORLD, []
    for sums in (can_sum(trainer), can_sum(trainer)):  # as after a resume, which must not register a second hook
        trainer.optimizer = optimizer_of(own, precision, sums)
    for update in range(2):
        trainer.optimizer.zero_grad()
        for number in range(update_freq):
            with model.no_sync() if number < update_freq - 1 else contextlib.nullcontext():
                trainer.optimizer.backward(loss_of(model, 100 * update + 2 * number + rank))
        trainer.optimizer._sync_fp16_grads_to_fp32()
        found.append(trainer.optimizer.fp32_params[0].grad.clone())
    return found


@pytest.mark.slow
def test_two_ranks_exchange_float32_sums(tmp_path: Path) -> None:
    """The mean over ranks of all micro-batches' gradients, equal to the last bit on both; loss scale 8 in fp16."""
    succeed_on_two_ranks(exchange, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for precision, scale in (("bf16", 1), ("fp16", 8)):
        model = linear(DTYPES[precision])
        for update in range(2):
            assert first[precision][update].equal(second[precision][update])
            expected = sum(gradient_of(model, 100 * update + number) for number in range(8)) / 2
            assert error(first[precision][update] / scale, expected) < 1e-6


@pytest.mark.parametrize(
    ("world_size", "update_freq", "hook", "expected"),
    [(1, 4, "none", True), (2, 1, "none", False), (2, 4, "fp16", False), (2, 4, "none", False)],
)
def test_configurations_that_sum_in_float32(world_size, update_freq, hook, expected, caplog) -> None:
    """Alone always; on several ranks only where there is a sum, and DistributedDataParallel to exchange it."""
    assert distributed_model(nn.Linear(2, 2)) is None
    cfg = configuration(update_freq=update_freq, ddp_comm_hook=hook)
    trainer = SimpleNamespace(model=nn.Linear(2, 2), cfg=cfg, data_parallel_world_size=world_size)
    assert can_sum(trainer) is expected
    assert ("added up in 16 bits" in caplog.text) == (world_size > 1 and update_freq > 1)


def test_trainer_uses_master_gradients() -> None:
    settings = {"precision": "bf16", "device": "cpu", "vocabulary_size": 600}
    trainer: Trainer = FairseqStep(set_up("mlm_tiny", ["dataset.batch_size=2"], **settings)).trainer
    assert isinstance(trainer.optimizer.master_gradients, MasterGradients)
    assert not hasattr(_FP16OptimizerMixin, "master_gradients")


def test_zero_grad() -> None:
    """As fairseq's own zero_grad does it, one tensor after the other."""
    model = nn.Sequential(linear(torch.bfloat16), linear(torch.bfloat16))
    optimizer = optimizer_of(model, "bf16")
    optimizer.backward(loss_of(model[0], 0) + loss_of(model[1], 1))
    masters = [master.grad for master in optimizer.fp32_params]
    assert all(gradient.count_nonzero() > 0 for gradient in masters)
    loss_of(model[0], 2).backward()
    optimizer.zero_grad()
    assert all(gradient.count_nonzero() == 0 for gradient in masters)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.master_gradients.is_sum
    assert not optimizer._needs_sync


FLAGS = "DATA --task text_pretraining --arch amos_tiny --criterion amos --optimizer grouped_adam --lr 0.001"


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

"""What a fake CUDA device refuses, rule by rule; and the defects that it was made to find."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fake_steps import FakeRun
from small_models import modern_config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn import functional

from amos_fairseq.compat import device_reads
from amos_fairseq.criterions.mlm import MlmCriterion
from amos_fairseq.functional import attention
from amos_fairseq.functional.attention import AttentionBias, PackedKeys, fast_attention
from amos_fairseq.measure import fake_cuda as fakes
from amos_fairseq.measure.fake_cuda import CudaRuleError, check_fused_attention, fake_cuda
from amos_fairseq.measure.gpu_rates import DEVICES
from amos_fairseq.measure.on_paper import Trace

B, H, T, D = 2, 3, 16, 8


def heads(dtype: torch.dtype = torch.bfloat16, width: int = D) -> list[Tensor]:
    return [torch.empty(B, H, T, width, dtype=dtype, device="meta") for _ in range(3)]


def mask(dtype: torch.dtype = torch.bfloat16, length: int = T) -> Tensor:
    return torch.empty(1, H, length, length, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("backend", "operands", "bias", "reason"),
    [
        ("efficient", heads(), mask().transpose(2, 3), r"mask.stride\(-1\) is 16"),
        ("efficient", heads(), mask(torch.float32), "the mask is torch.float32"),
        ("efficient", heads(), mask(length=17)[..., 1:, 1:], "multiples of 8"),
        ("efficient", heads(width=12), None, "head width 12 is not a multiple of 8"),
        ("efficient", heads(torch.float32, 6), None, "head width 6 is not a multiple of 4"),
        ("efficient", heads(torch.float64), None, "takes no torch.float64"),
        ("efficient", [*heads()[:2], heads(torch.float32)[0]], None, "value is torch.float32"),
        ("efficient", [heads()[0].mT, *heads()[1:]], None, r"query.stride\(-1\) is 8"),
        ("efficient", heads(), mask()[:, :2], "cannot be expanded"),
        ("flash", heads(), mask(), "no mask"),
        ("flash", heads(torch.float32), None, "no torch.float32"),
        ("flash", heads(width=264), None, "no head of 264"),
        ("cudnn", heads(torch.float32), None, "no torch.float32"),
        ("cudnn", heads(width=136), None, "no head of 136"),
        ("cudnn", heads(width=12), None, "no head of 12"),
        ("cudnn", heads(), mask(), "NaN in the backward pass with a mask"),
        ("cudnn", [tensor[:, :, :1] for tensor in heads()], None, "no single key"),
    ],
)
def test_fused_attention_refuses(backend: attention.Backend, operands: list, bias: Tensor | None, reason: str) -> None:
    with pytest.raises(CudaRuleError, match=reason):
        check_fused_attention(backend, *operands, bias)


@pytest.mark.parametrize(
    ("backend", "operands", "bias"),
    [
        ("efficient", heads(), mask()),
        ("efficient", heads(torch.float32, 12), mask(torch.float32)),
        ("efficient", heads(), mask(length=24)[..., :T, :T]),
        ("efficient", heads(), torch.empty(B, 1, 1, T, dtype=torch.bfloat16, device="meta")),
        ("flash", heads(torch.float16, 256), None),
        ("cudnn", heads(torch.float16, 128), None),
    ],
)
def test_fused_attention_accepts(backend: attention.Backend, operands: list, bias: Tensor | None) -> None:
    check_fused_attention(backend, *operands, bias)


def test_cudnn_attention_refuses_a_dropout_that_it_would_round() -> None:
    check_fused_attention("cudnn", *heads(), None, 0.125)
    with pytest.raises(CudaRuleError, match=r"rounds dropout 0\.1 to a multiple of 1/16"):
        check_fused_attention("cudnn", *heads(), None, 0.1)


@pytest.mark.parametrize(
    ("capability", "dtype", "length", "width", "dropout", "kernel"),
    [
        ((9, 0), torch.bfloat16, 512, 64, 0.0, "cudnn"),
        ((10, 0), torch.float16, 128, 128, 0.0, "cudnn"),
        ((8, 0), torch.bfloat16, 512, 64, 0.0, "flash"),
        ((9, 0), torch.bfloat16, 512, 64, 0.125, "flash"),
        ((9, 0), torch.bfloat16, 448, 64, 0.0, "flash"),
        ((9, 0), torch.bfloat16, 512, 136, 0.0, "flash"),
        ((9, 0), torch.float32, 512, 64, 0.0, "efficient"),
    ],
)
def test_cudnn_attends_without_a_bias_on_hopper(
    capability: tuple[int, int], dtype: torch.dtype, length: int, width: int, dropout: float, kernel: str
) -> None:
    with fake_cuda(capability), Trace(DEVICES["h200"]) as trace:
        fast_attention(torch.empty(B, length, 3, H, width, device="cuda", dtype=dtype), AttentionBias(), dropout)
    assert {name for _, name in trace.operators} == {f"_scaled_dot_product_{kernel}_attention"}


def attention_kernels(length: int, *, is_padded: bool = False, is_packed: bool = False, **settings: Any) -> set[str]:
    """The operators of attention in both directions of a ModernBERT with a global and a local layer, in bfloat16."""
    shape = modern_config(width=128, num_heads=2, ffn_width=64, num_layers=2, **settings)
    lengths = [length, length // 2] if is_packed else None
    with fake_cuda(), Trace(DEVICES["h200"]) as trace:
        encoder = shape.build().to("cuda", torch.bfloat16).train()
        padding = torch.zeros(2, length, dtype=torch.bool, device="cuda") if is_padded or is_packed else None
        embeddings = torch.empty(2, length, 128, device="cuda", dtype=torch.bfloat16)
        encoder(embeddings, padding, lengths=lengths)[-1].sum().backward()
    return {name.removeprefix("_scaled_dot_product_") for _, name in trace.operators if "att" in name}


def both_directions(*kernels: str) -> set[str]:
    return {f"{kernel}{direction}" for kernel in kernels for direction in ("", "_backward")}


MASK, CUDNN, VARLEN = "efficient_attention", "cudnn_attention", "_varlen_attn"
needs_varlen = pytest.mark.skipif(not attention.has_varlen(), reason="from PyTorch 2.11 on")


@needs_varlen
@pytest.mark.parametrize("length", [256, 512])
def test_kernels_of_modernbert(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full blocks, padding, packed texts; dropout or an older PyTorch take a mask, also in blocks, but never cuDNN, whose
    backward pass gives NaN with a mask.
    """
    assert attention_kernels(length) == both_directions(CUDNN, VARLEN)
    assert attention_kernels(length, is_packed=True) == both_directions(VARLEN)
    assert attention_kernels(length, is_packed=True, attention_dropout=0.1) == both_directions(MASK)
    assert attention_kernels(length, is_padded=True) == both_directions(MASK)
    assert attention_kernels(length, attends_to="past") == both_directions(VARLEN)
    monkeypatch.setattr(attention, "has_varlen", lambda: False)
    assert attention_kernels(length) == both_directions(CUDNN, MASK)
    assert attention_kernels(length, is_packed=True) == both_directions(MASK)


def test_short_local_layers_need_no_window() -> None:
    assert attention_kernels(65) == both_directions("flash_attention")


@needs_varlen
@pytest.mark.parametrize(
    ("dtype", "width", "starts", "message"),
    [
        (torch.float32, 64, torch.int32, "takes no torch.float32"),
        (torch.bfloat16, 12, torch.int32, "no head of 12"),
        (torch.bfloat16, 264, torch.int32, "no head of 264"),
        (torch.bfloat16, 64, torch.int64, "starts are torch.int64"),
    ],
)
def test_varlen_attention_refuses(dtype: torch.dtype, width: int, starts: torch.dtype, message: str) -> None:
    with fake_cuda():
        packed = torch.empty(10, 3, 2, width, dtype=dtype, device="cuda")
        sequences = PackedKeys(torch.empty(3, dtype=starts, device="cuda"), 6, (-1, -1))
        with pytest.raises(CudaRuleError, match=message):
            attention.varlen_attention(packed, sequences)


@pytest.mark.parametrize(("kernel", "dropout"), [("flash", 0.1), ("cudnn", 0.0)])
def test_gradients_of_query_key_and_value_are_written_into_one_packed_tensor(kernel: str, dropout: float) -> None:
    """By one operator, contiguous as the linear layer behind it reads it. It used to be stacked and then copied."""
    with fake_cuda():
        packed = torch.empty(B, 128, 3, H, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        mixed = fast_attention(packed.view_as(packed), AttentionBias(), dropout)
        assert mixed.is_contiguous()
        with Trace(DEVICES["h200"]) as trace:
            mixed.backward(torch.empty_like(mixed))
        assert packed.grad.is_contiguous()
    operators = {name: cost.launches for (_, name), cost in trace.operators.items()}
    assert operators == {f"_scaled_dot_product_{kernel}_attention_backward": 1, "stack": 1}


def on_cuda(*shape: int) -> Tensor:
    return torch.ones(*shape, device="cuda")


@pytest.mark.parametrize(
    ("action", "error"),
    [
        (lambda: on_cuda(3) + torch.ones(3), RuntimeError),
        (lambda: on_cuda(3).sum().item(), DataDependentOutputException),
        (lambda: bool(on_cuda(3).any()), DataDependentOutputException),
        (lambda: on_cuda(3)[on_cuda(3) > 0], CudaRuleError),
        (lambda: on_cuda(3).nonzero(), DynamicOutputShapeException),
        (lambda: on_cuda(3).to("cpu"), CudaRuleError),
        (lambda: torch.ones(3).copy_(on_cuda(3)), CudaRuleError),
        (lambda: on_cuda(3).index_put_((on_cuda(3) > 0,), on_cuda(3)), CudaRuleError),
        (lambda: on_cuda(3, 4) @ on_cuda(4, 5).bfloat16(), CudaRuleError),
        (lambda: functional.linear(on_cuda(3, 4), on_cuda(5, 4), on_cuda(5).half()), CudaRuleError),
        (lambda: functional.layer_norm(on_cuda(3, 4), [4], on_cuda(4).half(), on_cuda(4).half()), CudaRuleError),
        (lambda: on_cuda(3).index_put_((on_cuda(2).long(),), on_cuda(2).half()), CudaRuleError),
        (lambda: on_cuda(3).index_add_(0, on_cuda(2).long(), on_cuda(2).half()), (CudaRuleError, RuntimeError)),
        (lambda: functional.cross_entropy(on_cuda(3, 4), on_cuda(3).int()), (CudaRuleError, RuntimeError)),
    ],
)
def test_what_a_gpu_refuses_or_waits_for_is_refused(action, error) -> None:
    with fake_cuda(), pytest.raises(error):
        action()


@pytest.mark.parametrize(
    ("action", "is_refused"),
    [
        (lambda: on_cuda(3).cumsum(0), True),
        (lambda: on_cuda(3).long().cumsum(0), False),
        (lambda: on_cuda(3).long().bincount(on_cuda(3), 5), True),
        (lambda: on_cuda(3).histc(), True),
        (lambda: on_cuda(3).put_(on_cuda(2).long(), on_cuda(2)), True),
        (lambda: on_cuda(3).scatter_add_(0, on_cuda(2).long(), on_cuda(2)), False),
        (lambda: torch.ones(3).cumsum(0), False),
    ],
)
def test_what_pytorch_refuses_under_deterministic_algorithms(
    action, is_refused: bool, restored_determinism: None
) -> None:
    """By the lists in the documentation of torch.use_deterministic_algorithms."""
    torch.use_deterministic_algorithms(True)
    with fake_cuda(), pytest.raises(CudaRuleError, match="no deterministic") if is_refused else nullcontext():
        action()


def test_cudnn_does_not_attend_under_deterministic_algorithms(restored_determinism: None) -> None:
    device = torch.device("cuda", 0)
    with fake_cuda():
        arguments = {"has_bias": False, "length": 512}
        assert attention.choose_backend(device, torch.bfloat16, 64, **arguments) == "cudnn"
        torch.use_deterministic_algorithms(True)
        assert attention.choose_backend(device, torch.bfloat16, 64, **arguments) == "flash"
        assert attention.choose_backend(device, torch.bfloat16, 64, True) == "efficient"
        assert attention.choose_backend(device, torch.bfloat16, 64, True, True) == "triton"


def test_copies_to_the_device_are_counted() -> None:
    with fake_cuda() as cuda:
        torch.ones(3).to("cuda")
        on_cuda(3).copy_(torch.ones(3))
        on_cuda(3).to(torch.bfloat16)
        assert cuda.uploads == 2
        on_cuda(3)[torch.tensor([0, 2])]
        assert cuda.uploads == 3
        torch.tensor([1.0, 2.0], device="cuda")
        torch.tensor(True).to("cuda")
        assert cuda.uploads == 5


def test_everything_is_as_before_afterwards() -> None:
    before = torch.cuda.is_available(), attention.fused_attention, device_reads.fetch, nn.Module._apply
    with pytest.raises(ZeroDivisionError), fake_cuda():
        1 / 0  # noqa: B018
    assert before == (torch.cuda.is_available(), attention.fused_attention, device_reads.fetch, nn.Module._apply)
    weight = torch.ones(2, requires_grad=True)
    weight.sum().backward()
    assert weight.grad.tolist() == [1, 1]
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
            torch.ones(1, device="cuda")


class TestDefects:
    """Each is put back, and a step has to fail."""

    def fails(
        self,
        error: type[Exception],
        message: str | None,
        recipe: str,
        *overrides: str,
        spoil: Callable[[nn.Module], object] = lambda model: None,
    ) -> None:
        with fake_cuda() as cuda:
            run = FakeRun.of(cuda, recipe, overrides)
            spoil(run.step.module)
            with pytest.raises(error, match=message):
                run.check_update(run.full)

    def test_a_bias_with_the_strides_of_a_transposed_table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As it was: strides (12, 1, 6144, 12) at length 512."""

        def toeplitz(values: Tensor) -> Tensor:
            by_distance = values.t().contiguous()  # [2T-1,H], as the table gives it
            return by_distance.t().unfold(-1, (values.size(-1) + 1) // 2, 1).flip(1)

        def as_attention_mask(bias: AttentionBias, dtype: torch.dtype) -> Tensor | None:
            parts = [part.to(dtype) for part in bias if part is not None]
            return sum(parts).unsqueeze(0) if parts[0].ndim == 3 else sum(parts)

        monkeypatch.setattr("amos_fairseq.modules.relative_position.toeplitz", toeplitz)
        monkeypatch.setattr(attention, "as_attention_mask", as_attention_mask)
        self.fails(CudaRuleError, r"mask.stride\(-1\) is", "amos_base", "model.encoder_layers=1")

    def test_a_mask_in_float32_beside_heads_in_bfloat16(self, monkeypatch: pytest.MonkeyPatch) -> None:
        as_attention_mask = attention.as_attention_mask
        monkeypatch.setattr(attention, "as_attention_mask", lambda bias, dtype: as_attention_mask(bias, torch.float32))
        self.fails(CudaRuleError, r"the mask is torch\.float32", "amos_tiny")

    def test_a_head_in_float32_in_a_model_in_bfloat16(self) -> None:
        self.fails(CudaRuleError, "of one dtype", "electra_tiny", spoil=lambda model: model.detection_head.float())

    def test_a_criterion_that_reads_its_loss(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = MlmCriterion.forward

        def reading(self, *args, **kwargs):
            made = forward(self, *args, **kwargs)
            float(made[0].detach())
            return made

        monkeypatch.setattr(MlmCriterion, "forward", reading)
        self.fails(DataDependentOutputException, None, "mlm_tiny")

    def test_a_parameter_that_nothing_uses(self) -> None:
        def add_layer(model: nn.Module) -> None:
            model.left_over = nn.Linear(2, 1, device="cuda")

        self.fails(AssertionError, "left_over", "mlm_tiny", spoil=add_layer)

    def test_a_constant_made_on_the_cpu_in_every_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = MlmCriterion.forward

        def uploading(self, *args, **kwargs):
            loss, *rest = forward(self, *args, **kwargs)
            return (loss * torch.ones(1).to(loss.device), *rest)

        monkeypatch.setattr(MlmCriterion, "forward", uploading)
        self.fails(AssertionError, None, "mlm_tiny")


def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fakes.load_guard.cache_clear()
    try:
        with pytest.raises(fakes.UserError, match="no C\\+\\+ compiler \\(no-such-compiler\\)"):
            fakes.load_guard()
    finally:
        fakes.load_guard.cache_clear()
    assert not list((tmp_path / "amos_fairseq").iterdir())

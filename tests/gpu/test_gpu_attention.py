"""The fused kernels of attention against its definition, on a CUDA device."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from amos_fairseq.functional import attention
from amos_fairseq.functional.attention import (
    MASKED_SCORE,
    AttentionBias,
    PackedKeys,
    fast_attention,
    masked_pairs,
    prepare_bias,
    scores_of_masked_pairs,
    varlen_attention,
    window_of,
)
from amos_fairseq.functional.positions import pack_lengths

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

B, H, D = 4, 3, 64
# Products in float32 run in another order; in half precision scores, weights and gradients are rounded to 11 and 8 bits.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def random_inputs(length: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, AttentionBias]:
    torch.manual_seed(length)
    heads = torch.randn(B, length, 3, H, D, device="cuda").to(dtype).requires_grad_()
    learned = torch.randn(H, length, length, device="cuda").to(dtype).requires_grad_()
    padding = torch.zeros(B, 1, 1, length, dtype=torch.bool, device="cuda")
    padding[1, ..., (length + 1) // 2 :] = True
    fixed = padding.to(dtype) * MASKED_SCORE
    return heads, AttentionBias(
        learned if kind in ("learned", "all") else None, fixed if kind in ("padding", "all") else None
    )


def relative_error(got: Tensor, exact: Tensor) -> float:
    assert got.isfinite().all()
    return ((got.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", ["none", "learned", "padding", "all"])
@pytest.mark.parametrize("length", [1, 7, 64, 65, 128, 192, 200, 320, 512])
def test_matches_the_reference_in_float64(length: int, kind: str, dtype: torch.dtype) -> None:
    """Also at T % 128 == 64, where cuDNN's backward pass gives NaN with a mask."""
    heads, bias = random_inputs(length, kind, dtype)
    assert attention.choose_backend(heads.device, dtype, D, kind != "none") != "math"  # a fused kernel
    out = fast_attention(heads, prepare_bias(bias, heads.device, heads.dtype), 0.0)
    grad = torch.randn_like(out)
    out.backward(grad)
    exact_heads = heads.detach().double().requires_grad_()
    parts = [None if part is None else part.detach().double() for part in bias]
    if parts[0] is not None:
        parts[0].requires_grad_()
    exact = attention.reference_attention(exact_heads, AttentionBias(*parts), 0.0)
    exact.backward(grad.double())
    assert relative_error(out, exact) < TOLERANCES[dtype]
    assert relative_error(heads.grad[:, :, 2], exact_heads.grad[:, :, 2]) < TOLERANCES[dtype]
    if length > 1:  # over a single key the weights are 1 and neither query, key nor bias has a gradient
        assert relative_error(heads.grad, exact_heads.grad) < TOLERANCES[dtype]
        if parts[0] is not None:
            assert relative_error(bias.learned.grad, parts[0].grad) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", ["none", "all"])
@pytest.mark.parametrize("length", [64, 192, 200])
def test_backward_uses_the_dropout_mask_of_forward(length: int, kind: str, dtype: torch.dtype) -> None:
    """With fixed weights the output is linear in v: <v, gradient of v> = <output, gradient of the output>."""
    heads, bias = random_inputs(length, kind, dtype)
    bias = prepare_bias(bias, heads.device, heads.dtype)
    out = fast_attention(heads, bias, 0.5)
    assert not torch.equal(out, fast_attention(heads, bias, 0.5))
    grad = out.detach()  # so that the sum is one of squares, far above its rounding
    (grad_heads,) = torch.autograd.grad(out, heads, grad)
    by_value = (grad_heads[:, :, 2].double() * heads[:, :, 2].double()).sum()
    by_output = (out.double() * grad.double()).sum()
    assert abs(by_value / by_output - 1) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [128, 256, 512])
def test_cudnn_matches_the_reference_in_float64(length: int, dtype: torch.dtype) -> None:
    """Where log-sum-exps are below -88.7. The table leaves out lengths such as 64, at which the backward pass gives NaN."""
    heads, _ = random_inputs(length, "none", dtype)
    with torch.no_grad():  # the first dimension of query and key makes every score about -120
        heads *= 0.1
        heads[:, :, 0, :, 0], heads[:, :, 1, :, 0] = 1.0, -120 * D**0.5
    query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # no other kernel
        out = scaled_dot_product_attention(query, key, value).transpose(1, 2)
    grad = torch.randn_like(out)
    out.backward(grad)
    exact_heads = heads.detach().double().requires_grad_()
    exact = attention.reference_attention(exact_heads, AttentionBias(), 0.0)
    exact.backward(grad.double())
    assert relative_error(out, exact) < TOLERANCES[dtype]
    # The gradient of the large key is a difference of rounded numbers: query and value only.
    assert relative_error(heads.grad[:, :, 2], exact_heads.grad[:, :, 2]) < TOLERANCES[dtype]
    assert heads.grad.isfinite().all()


def test_hopper_runs_cudnn_where_the_table_says_so() -> None:
    """The kernel that PyTorch chose, by the name of its operator."""
    if attention.compute_generation(torch.device("cuda", 0)) < attention.HOPPER:
        pytest.skip("the table chooses cuDNN from compute capability 9.0 on")
    heads, bias = random_inputs(512, "none", torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        fast_attention(heads, bias, 0.0)
    names = {event.key for event in profiled.key_averages()}
    assert "aten::_scaled_dot_product_cudnn_attention" in names


@pytest.mark.skipif(not attention.has_varlen(), reason="from PyTorch 2.11 on")
@pytest.mark.parametrize("reach", [None, 64])
@pytest.mark.parametrize("side", ["all", "past", "future"])
def test_packed_sequences_match_the_reference_in_float64(side: str, reach: int | None) -> None:
    """Lengths at the edges of the window, of tiles of 128, and of one token."""
    torch.manual_seed(0)
    lengths, cuda = [300, 1, 65, 128, 129], torch.device("cuda")
    packing = pack_lengths(lengths, (5, 300), cuda)
    heads = torch.randn(sum(lengths), 3, H, D, device="cuda").bfloat16().requires_grad_()
    out = varlen_attention(heads, PackedKeys(packing.starts, packing.longest, window_of(side, reach)))
    grad = torch.randn_like(out)
    out.backward(grad)
    exact_heads, parts = heads.detach().double().requires_grad_(), []
    for sequence in exact_heads.split(lengths):
        masked = masked_pairs(len(sequence), None, side, reach, device=cuda)
        bias = AttentionBias(fixed=scores_of_masked_pairs(masked, torch.float64))
        parts.append(attention.reference_attention(sequence[None], bias, 0.0)[0])
    exact = torch.cat(parts)
    exact.backward(grad.double())
    assert relative_error(out, exact) < TOLERANCES[torch.bfloat16]
    assert relative_error(heads.grad, exact_heads.grad) < TOLERANCES[torch.bfloat16]

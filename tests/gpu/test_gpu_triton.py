"""Attention in Triton on a CUDA device, against the reference in float64 and against the other backends."""

import dataclasses
from collections.abc import Sequence
from importlib.util import find_spec

import pytest
import torch
from benchmark.gpu import sweep
from small_models import encoder_config
from torch import Tensor
from triton_interpreter import attention_by_definition

from amos_fairseq.functional.attention import ToeplitzBias
from amos_fairseq.modules.bert_encoder import BertEncoder

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from amos_fairseq.functional.cuda import launches
from amos_fairseq.functional.cuda.attention import triton_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

B, H = 3, 4
# Scores, weights and gradients are rounded to 11 and 8 bits.
TOLERANCES = {torch.float16: 5e-3, torch.bfloat16: 4e-2}


WIDE = {"num_layers": 2, "width": 256, "ffn_width": 512, "num_heads": 4, "kernels": "triton"}
WIDE |= {"position_buckets": 32, "position_max_distance": 128}


def random_inputs(length: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Heads [B,T,3,H,d] and values of the bias [H,2T-1], leaves, and padding [B,T] of the second sequence."""
    torch.manual_seed(length)
    heads = torch.randn(B, length, 3, H, width, device="cuda").to(dtype).requires_grad_()
    values = torch.randn(H, 2 * length - 1, device="cuda").requires_grad_()
    padding = torch.zeros(B, length, dtype=torch.bool, device="cuda")
    padding[1, (length + 1) // 2 :] = True
    return heads, values, padding


def assert_close_norms(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for of_got, of_expected in zip(got, expected, strict=True):
        assert of_got.isfinite().all()
        assert (of_got.double() - of_expected).norm() <= tolerance * of_expected.norm() + 1e-3


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("side", ["all", "past", "future"])
@pytest.mark.parametrize(("length", "width"), [(1, 64), (7, 16), (65, 64), (128, 64), (200, 40), (512, 64), (513, 128)])
def test_matches_the_reference_in_float64(
    length: int, width: int, side: str, has_padding: bool, dtype: torch.dtype
) -> None:
    heads, values, padding = random_inputs(length, width, dtype)
    out = triton_attention(heads, values, padding if has_padding else None, side)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in (heads, values)]
    exact = attention_by_definition(*exact_leaves, padding if has_padding else None, side)
    grad = torch.randn_like(out)
    if has_padding:
        grad *= ~padding[:, :, None, None]
    got = torch.autograd.grad(out, (heads, values), grad)
    expected = torch.autograd.grad(exact, exact_leaves, grad.double())
    assert_close_norms((out.detach(), *got), (exact.detach(), *expected), TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("length", "num_positions"), [(1, 1), (128, 20), (200, 77), (512, 130)])
def test_queries_at_positions_equal_those_of_all_tokens(length: int, num_positions: int, dtype: torch.dtype) -> None:
    """One position is given eight times; its gradient is the sum."""
    heads, values, padding = random_inputs(length, 64, dtype)
    positions = torch.randint((length + 1) // 2, (B, num_positions), device="cuda")
    positions[:, :8] = positions[:, :1]
    out = triton_attention(heads, values, padding, "all", 0.0, positions)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in (heads, values)]
    exact = attention_by_definition(*exact_leaves, padding, "all", positions)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (heads, values), grad)
    expected = torch.autograd.grad(exact, exact_leaves, grad.double())
    assert_close_norms((out.detach(), *got), (exact.detach(), *expected), TOLERANCES[dtype])


@pytest.mark.parametrize("length", [128, 200])
def test_the_same_seed_gives_the_same_bits(length: int) -> None:
    """With dropout, 20 times, also at one position that is given eight times: sums in a fixed order, no atomic additions."""
    heads, values, padding = random_inputs(length, 64, torch.bfloat16)
    repeated = torch.full((B, 8), 3, device="cuda")
    results = []
    for number in range(40):
        torch.manual_seed(7)
        out = triton_attention(heads, values, padding, "all", 0.1, repeated if number % 2 else None)
        results.append([out.detach(), *torch.autograd.grad(out.float().pow(2).sum(), (heads, values))])
    for number, other in enumerate(results):
        assert all(torch.equal(one, another) for one, another in zip(results[number % 2], other, strict=True))


def test_dropout_in_both_passes_and_its_share() -> None:
    """With fixed weights the output is linear in v; half of the weights remain, within five standard errors."""
    heads, values, _ = random_inputs(256, 64, torch.bfloat16)
    out = triton_attention(heads, values, None, "all", 0.5)
    assert not torch.equal(out, triton_attention(heads, values, None, "all", 0.5))
    (by_heads,) = torch.autograd.grad(out, heads, out.detach())
    by_value = (by_heads[:, :, 2].double() * heads[:, :, 2].double()).sum()
    assert abs(by_value / out.double().pow(2).sum() - 1) < TOLERANCES[torch.bfloat16]
    flat = torch.zeros(B, 256, 3, H, 64, device="cuda", dtype=torch.bfloat16)
    flat[:, :, 2] = 1.0  # equal weights and values of 1: the output is the share that remains, times 2
    share = triton_attention(flat, None, None, "all", 0.5)[..., 0].double().mean() / 2
    assert abs(share - 0.5) < 5 * 0.5 / (B * H * 256 * 256) ** 0.5 + 2**-9


@pytest.mark.parametrize("has_padding", [False, True])
def test_an_encoder_equals_its_reference(has_padding: bool) -> None:
    """The last layer at some positions alone; in bfloat16 against float32 of the definition."""
    shape = encoder_config(**WIDE, max_positions=200)
    torch.manual_seed(0)
    fast = BertEncoder(shape).cuda()
    reference = BertEncoder(dataclasses.replace(shape, kernels="reference")).cuda()
    reference.load_state_dict(fast.state_dict())
    fast.bfloat16()
    embeddings, positions = torch.randn(2, 200, 256, device="cuda"), torch.randint(99, (2, 30), device="cuda")
    padding = torch.zeros(2, 200, dtype=torch.bool, device="cuda")
    padding[1, 100:] = True
    padding = padding if has_padding else None
    assert isinstance(fast.attention_context(embeddings.bfloat16(), padding), ToeplitzBias)
    outputs = []
    for encoder, dtype in ((fast, torch.bfloat16), (reference, torch.float32)):
        last = encoder(embeddings.to(dtype), padding, last_positions=positions)[-1]
        last.float().sin().sum().backward()
        outputs.append(last.detach().float())
    torch.testing.assert_close(*outputs, rtol=0.05, atol=0.1)
    for (name, parameter), other in zip(fast.named_parameters(), reference.parameters(), strict=True):
        if other.grad is not None:
            assert (parameter.grad.float() - other.grad).norm() <= 0.1 * other.grad.norm() + 1e-3, name


CUDA = torch.device("cuda")
ODD = sweep.Sizes(2, 130, 2, 64, 3, 3, 1000, 9, 20)  # fills no tile


@pytest.mark.parametrize("start", sweep.WORKLOADS)
def test_tuned_launches_compute_what_the_defaults_compute(start: str) -> None:
    """At lengths that fill no tile; the defaults must fit into the shared memory of any GPU since Ampere."""
    for kernel in (name for name in launches.KERNELS if name.startswith(start)):
        width, _ = sweep.width_and_default(kernel, ODD, CUDA)
        with sweep.launched_with(kernel, launches.default_launch(kernel, width)):
            expected = [tensor.clone() for tensor in sweep.build(kernel, ODD, CUDA).result()]
        got = sweep.build(kernel, ODD, CUDA).result()
        assert sweep.difference(got, expected) <= sweep.TOLERANCE

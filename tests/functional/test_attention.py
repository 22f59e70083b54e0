"""Fast attention against the reference: values and gradients, padding, towers, dropout, and intermediate tensors."""

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from training_step import LiveBytes

from amos_fairseq.functional import attention, cpu
from amos_fairseq.functional.attention import (
    MASKED_SCORE,
    NO_BIAS,
    AttentionBias,
    as_attention_mask,
    choose_backend,
    fast_attention,
    prepare_bias,
    reference_attention,
)
from amos_fairseq.functional.cpu import keep_scale, sample_keep_mask

B, H, D = 3, 2, 8  # d = 8 a head
LENGTHS = (1, 7, 64, 65, 128, 192, 200)
KINDS = ("none", "learned", "padding", "tower", "all")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")

Result = tuple[Tensor, ...]


def random_inputs(length: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, AttentionBias]:
    """Heads and bias; of three padded sequences one has only padding."""
    torch.manual_seed(length)
    heads = torch.randn(B, length, 3, H, D, dtype=torch.float64).to(dtype).requires_grad_()
    learned = torch.randn(H, length, length, dtype=torch.float64).to(dtype).requires_grad_()
    padding = torch.zeros(B, 1, 1, length, dtype=torch.bool)
    padding[1, ..., length // 2 :] = True
    padding[2] = True
    places = torch.arange(length)
    ahead = (places > places[:, None])[None, None]
    forbidden = {"padding": padding, "tower": ahead, "all": ahead | padding}.get(kind)
    fixed = None if forbidden is None else forbidden.to(dtype) * MASKED_SCORE
    return heads, AttentionBias(learned if kind in ("learned", "all") else None, fixed)


def values_and_gradients(attend: Any, heads: Tensor, bias: AttentionBias, dropout: float = 0.0) -> Result:
    """The output and the gradients of heads and learned bias, for one random gradient of the output.

    The output of a query that may attend to nothing must be finite; it is set to 0, as no loss uses it.
    """
    out = attend(heads, bias, dropout)
    assert out.isfinite().all()
    if bias.fixed is not None:
        attends = (bias.fixed > MASKED_SCORE / 2).any(-1).squeeze(1)[..., None, None]  # [B or 1, T or 1, 1, 1]
        out = out * attends
    torch.manual_seed(1)
    inputs = [heads] if bias.learned is None else [heads, bias.learned]
    grad = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


def in_double(heads: Tensor, bias: AttentionBias) -> tuple[Tensor, AttentionBias]:
    fixed = None if bias.fixed is None else bias.fixed.double()
    learned = None if bias.learned is None else bias.learned.detach().double().requires_grad_()
    return heads.detach().double().requires_grad_(), AttentionBias(learned, fixed)


@pytest.mark.parametrize("group_bytes", [1, 2**21])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_matches_the_reference(length: int, kind: str, group_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence at a time, and all at once. Sums of up to 200 products in another order: some hundred roundings."""
    monkeypatch.setattr(cpu, "GROUP_BYTES", group_bytes)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        heads, bias = random_inputs(length, kind, dtype)
        expected = values_and_gradients(reference_attention, *in_double(heads, bias))
        got = values_and_gradients(fast_attention, heads, bias)
        assert {each.dtype for each in got} == {dtype}
        torch.testing.assert_close([each.double() for each in got], [*expected], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["none", "learned", "all"])
@pytest.mark.parametrize("length", [7, 65, 192])
def test_bfloat16_error_is_at_most_twice_that_of_the_reference(length: int, kind: str) -> None:
    """Both round scores, weights and gradients to 8 bits; in another order, so up to twice the error of the other."""
    heads, bias = random_inputs(length, kind, torch.bfloat16)
    exact = values_and_gradients(reference_attention, *in_double(heads, bias))
    ours = values_and_gradients(fast_attention, heads, bias)
    theirs = values_and_gradients(reference_attention, heads, bias)
    for of_ours, of_theirs, of_exact in zip(ours, theirs, exact, strict=True):
        assert of_ours.dtype == torch.bfloat16
        error, allowed = ((of.double() - of_exact).norm() for of in (of_ours, of_theirs))
        assert error < 2 * allowed
        assert allowed < 0.02 * of_exact.norm()


def test_dropout_applies_to_the_attention_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """By autograd, with the mask of the same seed, in groups of two sequences and one."""
    heads, bias = random_inputs(9, "all", torch.float64)
    monkeypatch.setattr(cpu, "GROUP_BYTES", 2 * H * 9 * 9 * 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)

    def by_mask(heads: Tensor, bias: AttentionBias, dropout: float) -> Tensor:
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-2, -1) / D**0.5 + bias.learned + bias.fixed).softmax(-1)
        kept = sample_keep_mask((B, H, 9, 9), dropout)
        return (torch.where(kept, weights * keep_scale(dropout), 0) @ value).transpose(1, 2)

    results = []
    for attend in (fast_attention, by_mask):
        torch.manual_seed(3)
        results.append(values_and_gradients(attend, heads, bias, 0.3))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_bias_gradient_is_never_materialized_per_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "GROUP_BYTES", 1)
    heads, bias = random_inputs(64, "learned", torch.float32)
    sizes = {}
    for attend in (fast_attention, reference_attention):
        out = attend(heads, bias, 0.0)
        with LiveBytes() as backward:
            out.sum().backward()
        sizes[attend] = backward.largest / 4  # elements
    assert sizes[fast_attention] == max(H * 64 * 64, B * 64 * 3 * H * D)
    assert sizes[reference_attention] == B * H * 64 * 64


@pytest.mark.parametrize(
    ("device", "dtype", "head_width", "has_bias", "expected"),
    [
        (CPU, torch.float32, 64, True, "cpu"),
        (CPU, torch.bfloat16, 5, False, "cpu"),
        (CUDA, torch.bfloat16, 64, False, "flash"),
        (CUDA, torch.float16, 16, True, "efficient"),
        (CUDA, torch.bfloat16, 8, True, "efficient"),
        (CUDA, torch.float16, 256, False, "flash"),
        (CUDA, torch.float16, 264, False, "efficient"),
        (CUDA, torch.bfloat16, 64, True, "efficient"),
        (CUDA, torch.float32, 64, False, "efficient"),
        (CUDA, torch.float64, 64, False, "math"),
        (CUDA, torch.bfloat16, 12, True, "math"),
        (CUDA, torch.bfloat16, 12, False, "math"),
        (torch.device("meta"), torch.float32, 64, True, "reference"),
    ],
)
def test_choice_of_backend(device, dtype, head_width, has_bias, expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Triton: heads of 16 to 128 in 16 bits, with and without a bias."""
    monkeypatch.setattr(attention, "compute_generation", lambda device: attention.AMPERE)
    assert choose_backend(device, dtype, head_width, has_bias) == expected
    is_triton = device == CUDA and dtype.itemsize == 2 and 16 <= head_width <= 128
    assert choose_backend(device, dtype, head_width, has_bias, True) == ("triton" if is_triton else expected)


@pytest.mark.parametrize(
    ("version", "dtype", "head_width", "dropout", "is_varlen"),
    [
        ("with windows", torch.bfloat16, 64, 0.0, True),
        ("with windows", torch.float16, 256, 0.0, True),
        ("with windows", torch.bfloat16, 64, 0.1, False),
        ("with windows", torch.float32, 64, 0.0, False),
        ("with windows", torch.bfloat16, 12, 0.0, False),
        ("without windows", torch.bfloat16, 64, 0.0, False),
        ("without the module", torch.bfloat16, 64, 0.0, False),
    ],
)
def test_packed_sequences_take_varlen_where_pytorch_has_it(
    version: str, dtype: torch.dtype, head_width: int, dropout: float, is_varlen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(varlen_attn=(lambda q, *, window_size: q) if version == "with windows" else lambda q: q)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None if version == "without the module" else module)
    monkeypatch.setattr(attention, "has_varlen", attention.has_varlen.__wrapped__)  # without its cache
    for generation, by_distance in itertools.product((7, 8, 9), (True, False)):
        monkeypatch.setattr(attention, "compute_generation", lambda device, major=generation: major)
        backend = choose_backend(CUDA, dtype, head_width, False, dropout=dropout, by_distance=by_distance)
        assert (backend == "varlen") == (is_varlen and by_distance and generation >= 8)
        assert backend != "flash" or generation >= 8
    assert choose_backend(CPU, dtype, head_width, False, dropout=dropout, by_distance=True) == "cpu"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 7, 64])
def test_fused_kernel_matches_the_reference(length: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, with the one kernel of PyTorch that a CPU has for everything."""
    heads, bias = random_inputs(length, kind, torch.float64)
    expected = values_and_gradients(reference_attention, heads, bias)
    monkeypatch.setattr(attention, "choose_backend", lambda *arguments, **others: "math")
    prepared = prepare_bias(bias, CUDA, torch.float64)
    assert as_attention_mask(prepared, torch.float64) is prepared.fixed  # once for all layers
    if prepared.fixed is not None:
        assert prepared.learned is None
        assert prepared.fixed.ndim == 4
        assert prepared.fixed.stride(-2) % 8 == 0
        assert prepared.fixed.stride(-1) == 1
    got = values_and_gradients(lambda heads, _, dropout: fast_attention(heads, prepared, dropout), heads, bias)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_cpu_does_not_copy_the_bias() -> None:
    _, bias = random_inputs(7, "all", torch.float32)
    assert prepare_bias(bias, CPU, torch.float32) is bias
    assert prepare_bias(NO_BIAS, CUDA, torch.float32) == NO_BIAS

"""Attention in Triton, run by Triton's interpreter on the CPU: values and all gradients against float64, dropout by its mask.

The interpreter runs the kernel's own code, with tiles of 16 x 16, so that small sizes have whole and partial tiles; odd sizes
also run with the tiles of 64 x 64 that are compiled for a GPU.
"""

import math
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from torch import Tensor, library
from triton_interpreter import attention_by_definition, interpreted

from amos_fairseq.functional.attention import MASKED_SCORE
from amos_fairseq.functional.relative_position import toeplitz

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from amos_fairseq.functional.cuda.launches import default_launch


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    yield from interpreted("attention")


def random_inputs(
    length: int, width: int, has_bias: bool, has_padding: bool, has_positions: bool, num_heads: int = 2
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Heads, bias, padding (the second of two sequences ends in the middle) and positions, one of them given twice."""
    torch.manual_seed(length + width)
    heads = torch.randn(2, length, 3, num_heads, width, dtype=torch.float64)
    bias = torch.randn(num_heads, 2 * length - 1, dtype=torch.float64) if has_bias else None
    padding = None
    if has_padding:
        padding = torch.zeros(2, length, dtype=torch.bool)
        padding[1, (length + 1) // 2 :] = True
    positions = None
    if has_positions:
        positions = torch.randint((length + 1) // 2, (2, 5))
        positions[:, 1] = positions[:, 0]
    return heads, bias, padding, positions


CASES = [
    # length, head width, bias, padding, side, positions
    (1, 16, True, False, "all", False),
    (33, 16, True, True, "all", False),
    (16, 32, True, False, "all", True),
    (19, 16, True, True, "future", False),
    (20, 64, False, True, "past", False),
    (20, 40, False, False, "all", True),
    (19, 16, True, True, "past", True),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "width", "has_bias", "has_padding", "side", "has_positions", "dtype", "tolerance"),
    [
        *((*case, torch.float32, 1e-5) for case in CASES),
        (17, 16, True, True, "all", False, torch.float16, 4e-3),
        (17, 16, True, True, "all", False, torch.bfloat16, 3e-2),
    ],
)
def test_values_and_gradients(
    kernels, length, width, has_bias, has_padding, side, has_positions, dtype, tolerance
) -> None:
    """Against float64 of the same rounded inputs, by norm: 16-bit kernels round weights and dS to 11 or 8 bits."""
    inputs = random_inputs(length, width, has_bias, has_padding, has_positions)
    check_values_and_gradients(kernels, inputs, side, dtype, tolerance)


def check_values_and_gradients(
    kernels: ModuleType, inputs: tuple[Tensor | None, ...], side: str, dtype: torch.dtype, tolerance: float
) -> None:
    heads, bias, padding, positions = inputs
    has_bias, has_padding, has_positions = bias is not None, padding is not None, positions is not None
    heads = heads.to(dtype)
    bias = None if bias is None else bias.float()
    leaves = [heads.requires_grad_()] + ([bias.requires_grad_()] if has_bias else [])
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = attention_by_definition(exact_leaves[0], exact_leaves[1] if has_bias else None, padding, side, positions)
    out = kernels.triton_attention(heads, bias, padding, side, 0.0, positions)
    assert out.dtype == dtype
    grad = torch.randn_like(exact)
    # What padding reads enters no loss, and means nothing where all keys are padding.
    if has_padding and not has_positions:
        assert out.isfinite().all()
        out, exact, grad = (tensor * ~padding[:, :, None, None] for tensor in (out, exact, grad))
    got = [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]
    expected = [exact.detach(), *torch.autograd.grad(exact, exact_leaves, grad.to(dtype).double())]
    for of_got, of_expected in zip(got, expected, strict=True):
        assert of_got.isfinite().all()
        assert (of_got.double() - of_expected).norm() <= tolerance * of_expected.norm() + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "width", "has_bias", "has_padding", "side", "has_positions", "tiles"),
    [
        (66, 80, True, False, "all", False, {"attention_backward_key": {"BLOCK_M": 32}}),
        (129, 16, True, False, "past", False, {}),
        (128, 64, False, True, "past", True, {"attention_forward": {"BLOCK_N": 32}}),
        (
            96,
            16,
            True,
            False,
            "all",
            False,
            {"attention_forward": {"BLOCK_M": 128}, "attention_backward_query": {"BLOCK": 128}},
        ),
    ],
)
def test_odd_sizes_with_the_tiles_of_a_gpu(
    kernels, monkeypatch, length, width, has_bias, has_padding, side, has_positions, tiles
) -> None:
    """Tiles of 64 x 64 as compiled, or others that a sweep tries, in float32: 1e-5 of the norm for sums of up to 129 terms.

    One of three sequences, where there is padding, consists of it alone, and every position is given twice.
    """
    use_tiles(kernels, monkeypatch, tiles)
    heads, bias, padding, positions = random_inputs(length, width, has_bias, has_padding, has_positions)
    heads = torch.cat([heads, heads[:1].flip(1)])
    if has_padding:
        padding = torch.cat([padding, torch.ones(1, length, dtype=torch.bool)])
    if has_positions:
        positions = torch.randint((length + 1) // 2, (3, 40)).repeat(1, 2)
    check_values_and_gradients(kernels, (heads, bias, padding, positions), side, torch.float32, 1e-5)


def use_tiles(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, tiles: dict[str, dict[str, int]]) -> None:
    """Launch with tiles of 64 x 64, and with ``tiles`` by kernel instead."""

    def launch_of(kernel: str, width: int, device: torch.device) -> dict[str, int]:
        launch = default_launch(kernel, width)
        compiled = {name: 64 for name in ("BLOCK", "BLOCK_M", "BLOCK_N") if name in launch}
        return launch | compiled | tiles.get(kernel, {})

    monkeypatch.setattr(kernels.launches, "launch_of", launch_of)


def test_dropout_does_not_depend_on_the_tiles(kernels, monkeypatch) -> None:
    """Values and gradients with two sizes of the backward tiles: float32 sums in another order, 1e-5 of the norm."""
    heads, bias, padding, _ = random_inputs(33, 16, True, True, False)
    results = []
    for tiles in (None, {"attention_backward_key": {"BLOCK_M": 32}}):
        if tiles is not None:
            use_tiles(kernels, monkeypatch, tiles)
        torch.manual_seed(4)
        leaves = [heads.float().requires_grad_(), bias.float().requires_grad_()]
        out = kernels.triton_attention(*leaves, padding, "past", 0.3) * ~padding[:, :, None, None]
        results.append([out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 1e-5 * one.norm()


def mask_of(kernels, length: int, dropout: float, num_heads: int = 1, sequences: int = 1) -> Tensor:
    """Which weights were kept, [B,H,T,T] bool: with scores of 0 and values that name their key, the output is the mask."""
    width = max(16, length)
    heads = torch.zeros(sequences, length, 3, num_heads, width)
    heads[:, :, 2, :, :length] = torch.eye(length)[None, :, None, :]
    out = kernels.triton_attention(heads, dropout=dropout)[..., :length]  # [B,T,H,T]
    kept = out > 0.5 / length
    # What is kept is scaled by 1 / (1 - p); float32 division and a sum of T equal weights.
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (length * (1 - dropout))), rtol=1e-5, atol=0)
    return kept.transpose(1, 2)


def test_dropout_keeps_the_right_share_everywhere(kernels) -> None:
    """Of 4 x 3 x 48 x 48 weights a share of 0.7, in every row, column, head and sequence, and for pairs that agree.

    Bands of 5 standard deviations; some 115 comparisons: a false alarm in about 16,000 runs, and the seed is fixed.
    """
    torch.manual_seed(0)
    kept = mask_of(kernels, 48, 0.3, num_heads=3, sequences=4).double()

    def check(shares: Tensor, expected: float, count: float) -> None:
        deviation = math.sqrt(expected * (1 - expected) / count)
        assert (shares - expected).abs().max() < 5 * deviation

    check(kept.mean(), 0.7, kept.numel())
    for dims in ((0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3)):
        shares = kept.mean(dims)
        check(shares, 0.7, kept.numel() / shares.numel())
    both = 0.7**2 + 0.3**2
    for one, other in (
        (kept[..., 1:], kept[..., :-1]),
        (kept[:, :, 1:], kept[:, :, :-1]),
        (kept[:, 1:], kept[:, :-1]),
        (kept[1:], kept[:-1]),
        (kept[..., 1:, 1:], kept[..., :-1, :-1]),
        # Those which share a hash; their decisions are correlated by less than 1 / 256, far inside of the band.
        (kept[..., 8:], kept[..., :-8]),
        (kept[..., 8:, :], kept[..., :-8, :]),
        (kept[..., 8:, 8:], kept[..., :-8, :-8]),
        (kept[..., 8:, :-8], kept[..., :-8, 8:]),
    ):
        check((one == other).double().mean(), both, one.numel())


def test_dropout_follows_the_seed(kernels) -> None:
    torch.manual_seed(1)
    first, second = mask_of(kernels, 20, 0.5), mask_of(kernels, 20, 0.5)
    torch.manual_seed(1)
    assert torch.equal(mask_of(kernels, 20, 0.5), first)
    assert 0.3 < (first == second).double().mean() < 0.7


@pytest.mark.parametrize("has_positions", [False, True])
def test_the_backward_pass_drops_what_the_forward_pass_dropped(kernels, has_positions: bool) -> None:
    """Against autograd of the definition with the mask of the same seed, in float64. A position has the mask of its row."""
    heads, bias, padding, positions = random_inputs(20, 20, True, True, has_positions, num_heads=1)
    torch.manual_seed(3)
    kept = mask_of(kernels, 20, 0.4, num_heads=1, sequences=2)
    leaves = [heads.float().requires_grad_(), bias.float().requires_grad_()]
    torch.manual_seed(3)
    out = kernels.triton_attention(leaves[0], leaves[1], padding, "all", 0.4, positions)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    query, key, value = exact_leaves[0].permute(2, 0, 3, 1, 4)
    hidden = padding[:, None, None, :].double() * MASKED_SCORE
    weights = (query @ key.mT / math.sqrt(20) + toeplitz(exact_leaves[1]) + hidden).softmax(-1)
    if has_positions:
        weights = weights.gather(2, positions[:, None, :, None].expand(-1, -1, -1, 20))
        kept = kept[:, :, : positions.size(1)]
    exact = ((weights * kept / 0.6) @ value).transpose(1, 2)
    grad = torch.randn_like(exact)
    if not has_positions:
        grad = grad * ~padding[:, :, None, None]
    got = [out.detach(), *torch.autograd.grad(out, leaves, grad.float())]
    expected = [exact.detach(), *torch.autograd.grad(exact, exact_leaves, grad)]
    for of_got, of_expected in zip(got, expected, strict=True):
        assert (of_got.double() - of_expected).norm() <= 1e-5 * of_expected.norm()


@pytest.mark.slow
def test_the_operators_are_what_they_are_declared_to_be(kernels) -> None:
    """By PyTorch's own checks: schema, autograd, and shapes, strides and dtypes without values."""
    heads, bias, padding, positions = random_inputs(17, 16, True, True, True)
    seed = torch.zeros(1, dtype=torch.int64)
    arguments = (heads.float(), bias.float(), padding, seed, positions, 0, 0.1)
    out, lse = kernels.attention_op(*arguments)
    backward_arguments = (torch.ones_like(out), *arguments[:5], out, lse, *arguments[5:])
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for operator, given in ((kernels.attention_op, arguments), (kernels.attention_backward_op, backward_arguments)):
        assert set(library.opcheck(operator, given, test_utils=checks).values()) == {"SUCCESS"}


def test_torch_compile_sees_one_operator(kernels) -> None:
    """Forward and backward pass without a graph break."""
    heads, bias, padding, _ = random_inputs(16, 16, True, True, False)
    leaves = [heads.float().requires_grad_(), bias.float().requires_grad_()]

    def attend(heads: Tensor, bias: Tensor) -> Tensor:
        return kernels.triton_attention(heads * 1, bias, padding)

    expected = torch.autograd.grad(attend(*leaves).pow(2).sum(), leaves)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for got, of_expected in zip(torch.autograd.grad(compiled(*leaves).pow(2).sum(), leaves), expected, strict=True):
        torch.testing.assert_close(got, of_expected)
    torch.compiler.reset()

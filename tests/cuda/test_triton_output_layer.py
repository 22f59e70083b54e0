"""The output layer in Triton, run by Triton's interpreter on the CPU: values and gradients against float64, samples by their
distribution, and what it allocates at the sizes of a base model.

The interpreter takes some 10 to 40 ms for each program of a kernel, so that there are few positions in each test.
"""

import math
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from frequencies import FALSE_ALARM, chi_square_p
from scipy import stats
from small_models import small_amos
from torch import Tensor, library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from triton_interpreter import interpreted

from amos_fairseq.functional import output_layer, sampling
from amos_fairseq.functional.sampling import (
    MixtureReplacementSampler,
    ReplacementAndNegativeSampler,
    ReplacementSampler,
)
from amos_fairseq.modules.mixture import predict_chunked
from tests.functional import test_output_layer_memory as base_model
from tests.functional.test_output_layer import at_once as by_definition
from tests.functional.test_output_layer import check_correct, with_gradients

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

triton_layer = partial(output_layer.output_layer, with_triton=True)
LAST = 1 - 2**-53  # the largest number that torch.rand gives in float64
E = 8


@pytest.fixture(scope="module")
def logits_module() -> Iterator[ModuleType]:
    yield from interpreted("logits")


@pytest.fixture(scope="module")
def kernels(logits_module) -> Iterator[ModuleType]:
    yield from interpreted("output_layer")


def inputs(
    num_depths: int, num_biases: int, num_positions: int, num_rows: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """hidden, weight, biases that require a gradient, and targets; the first target is row 0, the last one the last row."""
    draw = torch.Generator().manual_seed(num_rows)
    shapes = ((num_depths, num_positions, E), (num_rows, E), (num_biases, num_rows))
    leaves = [torch.randn(*shape, generator=draw).to(dtype).requires_grad_() for shape in shapes]
    targets = torch.randint(num_rows, (num_positions,), generator=draw)
    targets[0], targets[-1] = 0, num_rows - 1
    return [*leaves, targets]


def positions_at_once(monkeypatch: pytest.MonkeyPatch, kernels: ModuleType, count: int, *leaves: Tensor) -> None:
    hidden, weight = leaves[:2]
    monkeypatch.setattr(kernels, "CHUNK_BYTES", count * len(hidden) * len(weight) * weight.element_size())


CASES = [
    # depths, biases, positions, positions of a chunk, rows, whether it samples
    (1, 1, 1, 1, 1, False),
    (3, 3, 3, 2, 7, False),
    (3, 1, 4, 3, 600, True),
    (3, 3, 2, 1, 64, True),
    (1, 1, 2, 2, 2_100, False),  # rows of two programs
    (2, 2, 70, 70, 3, False),  # positions of two programs of the gradient
]
TYPES = (torch.float32, torch.float16, torch.bfloat16)
PRECISIONS = list(zip(TYPES, (1e-5, 2**-9, 2**-7), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_depths", "num_biases", "num_positions", "at_once", "num_rows", "samples", "dtype", "tolerance"),
    [(*case, *precision) for case in CASES for precision in PRECISIONS if case == CASES[2] or precision[1] == 1e-5],
)
def test_values_and_gradients(
    kernels, monkeypatch, num_depths, num_biases, num_positions, at_once, num_rows, samples, dtype, tolerance
) -> None:
    """Against float64 of the same rounded inputs, by norm: 16-bit layers round logits and their gradient to 11 or 8 bits.

    That rows are never sampled, the first and the last target among them, changes nothing of the loss.
    """
    *leaves, targets = inputs(num_depths, num_biases, num_positions, num_rows, dtype)
    positions_at_once(monkeypatch, kernels, at_once, *leaves)
    sampler, unsampled = None, None
    if samples:
        sampler = MixtureReplacementSampler(torch.full((num_positions, num_depths), 1 / num_depths))
        unsampled = torch.tensor([0, 1, num_rows - 1])
    prediction = triton_layer(*leaves, targets, unsampled, sampler)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = with_gradients(doubles, by_definition(*doubles, targets)[0])
    assert prediction.nll.dtype == torch.float32
    found = with_gradients(leaves, prediction.nll)
    for got, exact, leaf in zip(found, expected, [prediction.nll, *leaves], strict=True):
        assert got.dtype == leaf.dtype
        assert (got.double() - exact).norm() <= tolerance * exact.norm() + 1e-6


@pytest.mark.parametrize(("dtype", "rounding"), zip(TYPES, (2**-24, 2**-11, 2**-7), strict=True))
def test_the_gradient_of_logits_is_rounded_once_in_their_place(logits_module, dtype, rounding: float) -> None:
    """Of given logits, element by element; its sums are those before rounding.

    Half a unit in the last place, a whole one in bfloat16: the interpreter cuts off what a GPU rounds. float32 adds errors of
    exp(logit - log_sum), which grow with that difference (up to 16 here).
    """
    torch.manual_seed(0)
    logits = (torch.randn(2, 3, 100) * 3).to(dtype)
    exact = logits.double()
    targets, by_nll = torch.tensor([0, 50, 99]), torch.randn(2, 3)
    log_sum = exact.logsumexp(-1)
    onehot = torch.nn.functional.one_hot(targets, 100)
    expected = (exact.softmax(-1) - onehot) * by_nll.double().unsqueeze(-1)
    sums = logits_module.gradient_of_logits(logits, log_sum.float(), targets, by_nll)
    # The smallest normal number of float16 is 6e-5: below it the spacing is 6e-8.
    smallest = 3e-8 if dtype == torch.float16 else 0
    assert ((logits.double() - expected).abs() <= (rounding + 4e-6) * expected.abs() + 2e-7 + smallest).all()
    torch.testing.assert_close(sums, expected.sum(1)[None].float(), rtol=1e-5, atol=1e-6)


def test_correct_means_the_largest_logit_of_all_rows(kernels) -> None:
    check_correct(triton_layer)


def test_no_position_at_all_gives_nothing(kernels) -> None:
    hidden, weight, biases, targets = inputs(3, 1, 2, 40)
    sampler = MixtureReplacementSampler(torch.ones(0, 3), 5)
    prediction = triton_layer(hidden[:, :0], weight, biases, targets[:0], torch.tensor([0]), sampler)
    assert prediction.nll.shape == prediction.correct.shape == (3, 0)
    assert [len(part) for part in prediction.samples] == [0] * 5
    prediction.nll.sum().backward()
    assert not weight.grad.any()


def test_log_probs_of_words(kernels) -> None:
    """log q over the rows that are sampled, against the way in PyTorch; sums of 150 terms in float32."""
    hidden, weight, biases, _ = (tensor.detach() for tensor in inputs(1, 1, 4, 150))
    biases[:, 0] = 300.0  # a special token that the generator is sure of
    arguments = hidden[0], weight, biases[0], torch.tensor([7, 8, 100, 9]), torch.tensor([0, 149])
    got = output_layer.sampling_log_probs(*arguments, with_triton=True)
    torch.testing.assert_close(got, output_layer.sampling_log_probs(*arguments), rtol=1e-5, atol=1e-5)


def mixture_of(kernels: ModuleType, logits: Tensor, depth_weights: Tensor, unsampled: list[int]) -> tuple[Any, Tensor]:
    """What samplers draw from, and the exact probabilities [n,V] float64."""
    never_sampled_mask = kernels.token_mask(torch.tensor(unsampled, dtype=torch.int64), logits.size(-1))
    of_blocks = kernels.summarize_logits(logits, depth_weights, never_sampled_mask)[2:]
    mixed = (logits.double() * depth_weights.double().T.unsqueeze(-1)).sum(0)
    exact = mixed.masked_fill(never_sampled_mask, -math.inf).softmax(-1)
    return kernels.TritonMixture.of(logits, depth_weights, never_sampled_mask, of_blocks), exact


def check_draws(rows: Tensor, probabilities: Tensor) -> None:
    """Frequencies of ``rows`` [S]; the test would see another temperature."""
    counts = torch.bincount(rows, minlength=len(probabilities))
    assert len(counts) == len(probabilities)
    assert chi_square_p(counts, probabilities) > FALSE_ALARM
    wrong = probabilities**1.3
    assert chi_square_p(counts, wrong / wrong.sum()) < FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_depths", "num_rows", "dtype"), [(1, 150, torch.float32), (3, 150, torch.bfloat16), (3, 20, torch.float16)]
)
def test_rows_follow_the_mixture_of_the_depths(kernels, num_depths: int, num_rows: int, dtype) -> None:
    """10,000 draws at one of two positions, from three blocks of rows or one; each sample comes with its logits."""
    torch.manual_seed(0)
    logits = torch.randn(num_depths, 2, num_rows).mul_(2).to(dtype)
    unsampled = [0, num_rows // 2, num_rows - 1]
    logits[..., unsampled[1]] = 80.0  # a special token that all depths are sure of
    gamma = torch.rand(2, num_depths) + 0.2
    mixture, exact = mixture_of(kernels, logits, gamma, unsampled)
    rows, of_depths = mixture.sample(10_000)
    check_draws(rows[1], exact[1])
    assert torch.equal(of_depths, logits.float()[:, torch.arange(2)[:, None], rows].permute(1, 2, 0))
    torch.testing.assert_close(mixture.weights(2) / mixture.total, exact.float(), rtol=1e-5, atol=1e-9)


def test_replacements_follow_their_temperature_and_never_are_the_forbidden_token(kernels) -> None:
    torch.manual_seed(1)
    logits, sampler = torch.randn(1, 1, 150), ReplacementSampler(0.5, excluded=torch.tensor([9, 70]))
    places = slice(1, 2)
    gamma = sampler.depth_weights(places, logits.device)
    assert gamma.tolist() == [[2.0]]
    mixture, exact = mixture_of(kernels, logits, gamma, [0, 149])
    (token,) = sampler.sample(mixture, places)
    assert token.shape == (1,)
    assert exact[:, 70] > 0
    exact[:, 70] = 0
    check_draws(mixture.sample(10_000)[0][0], exact[0] / exact.sum())


def test_blocks_that_lie_far_below_others_keep_their_sums(kernels) -> None:
    """Rows of a block relative to the block's best: with exp(-80) between neighbours all sums are exact to rounding."""
    logits = torch.linspace(0, 1, 300)[None, None] - 80.0 * (torch.arange(300) // 64)
    mixture, exact = mixture_of(kernels, logits, torch.ones(1, 1), [3])
    log_sums = mixture.block_max.double() + mixture.block_sum.double().log()
    blocks = [part.logsumexp(-1) for part in exact.log().split(64, dim=1)]
    expected = torch.stack(blocks, dim=1)
    torch.testing.assert_close(log_sums - log_sums[:, :1], expected - expected[:, :1], rtol=1e-6, atol=1e-5)


def test_excluding_rows_is_as_if_they_were_never_sampled(kernels) -> None:
    """One row after another, two of them in one block, the sure one among them."""
    torch.manual_seed(2)
    logits, gamma = torch.randn(2, 2, 100), torch.rand(2, 2)
    logits[:, :, 30] = 200.0
    mixture, _ = mixture_of(kernels, logits, gamma, [0])
    for row in (30, 31, 99):
        mixture.exclude(torch.full((2,), row))
    expected, exact = mixture_of(kernels, logits, gamma, [0, 30, 31, 99])
    torch.testing.assert_close(mixture.block_max, expected.block_max)
    torch.testing.assert_close(mixture.block_sum, expected.block_sum)
    check_draws(mixture.sample(5_000)[0][0], exact[0])


def points_and_picked(
    kernels: ModuleType, logits_module: ModuleType, logits: Tensor, unsampled: list[int], points: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows picked of the only block [1,V] at ``points`` [S], and the exact weights that they are picked from, [V] float64."""
    mixture, exact = mixture_of(kernels, logits[None], torch.ones(1, 1), unsampled)
    rows, _ = logits_module.pick_rows(
        mixture.logits,
        mixture.depth_weights,
        mixture.never_sampled_mask,
        mixture.excluded,
        torch.zeros(1, len(points), dtype=torch.int64),
        points.double()[None],
    )
    return rows[0], exact[0]


def test_points_are_picked_by_cumulative_sums_in_float64(kernels, logits_module) -> None:
    """A sure row and 60 of 1e-9 each behind it: each point finds its own row, which float32 sums could not tell apart."""
    logits = torch.full((1, 64), math.log(1e-9))
    logits[:, 1] = 0.0
    points = (1 + 1e-9 * (torch.arange(60).double() + 0.5)) / (1 + 62e-9)
    rows, _ = points_and_picked(kernels, logits_module, logits, [0], points)
    assert rows.tolist() == list(range(2, 62))


def test_no_point_falls_on_a_row_of_weight_0(kernels, logits_module) -> None:
    """Unsampled rows and words whose weight is 0 in float32, first, in between and last; beyond all lie none of 50 rows."""
    torch.manual_seed(3)
    logits = torch.randn(1, 50)
    logits[:, [4, 48]] = -1e4
    points = torch.cat([torch.tensor([0.0, LAST], dtype=torch.float64), torch.rand(2_000, dtype=torch.float64)])
    rows, exact = points_and_picked(kernels, logits_module, logits, [0, 20, 49], points)
    assert set(rows.tolist()) == set(exact.nonzero().flatten().tolist())
    assert rows[0] == 1
    assert rows[1] == 47
    assert torch.equal(rows, sampling.pick(exact, points))


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of numpy, in the interpreter
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_reach_the_loss_and_draw_rows(kernels, value: float) -> None:
    """An overflow stops or skips the update by the loss; it must not end in an index out of range."""
    leaves = [leaf.detach() for leaf in inputs(1, 1, 2, 70)[:3]]
    leaves[0][:, 0], leaves[1][:, 0], leaves[2][:] = value, 1.0, 0.0
    leaves = [leaf.requires_grad_() for leaf in leaves]
    targets = torch.tensor([65, 66])
    prediction = triton_layer(*leaves, targets, torch.tensor([0, 69]), MixtureReplacementSampler(torch.ones(2, 1), 3))
    rows = prediction.samples[1]
    assert rows.ge(0).all()
    assert rows.lt(70).all()
    assert not prediction.nll[0, 0].isfinite()
    assert prediction.nll[0, 1].isfinite()
    prediction.nll.sum().backward()
    assert leaves[0].grad[0, 1].isfinite().all()
    assert not leaves[1].grad.isfinite().all()


def test_negatives_are_other_words_drawn_one_after_another(kernels) -> None:
    """Tokens with logits 100 apart are sampled in the order of their logits, except for the original."""
    logits = -100.0 * torch.tensor([[[5.0, 3, 9, 2, 4, 0, 1, 7, 6, 8]]])
    originals = torch.tensor([6])
    sampler = ReplacementAndNegativeSampler(originals, 5, hardest=False)
    mixture, _ = mixture_of(kernels, logits, sampler.depth_weights(slice(0, 1), logits.device), [5])
    sampled, negatives = sampler.sample(mixture, slice(0, 1))
    assert sampled.tolist() == [6]
    assert negatives.tolist() == [[3, 1, 4, 0, 8]]
    hardest = ReplacementAndNegativeSampler(originals, 5, hardest=True)
    mixture, _ = mixture_of(kernels, logits.bfloat16(), torch.ones(1, 1), [5])
    assert hardest.sample(mixture, slice(0, 1))[1].tolist() == [[3, 1, 4, 0, 8]]


def test_a_race_of_rows_is_the_one_of_all_weights(kernels, monkeypatch) -> None:
    """40 positions of one distribution in chunks of 30, 20 arrivals each: rows by frequency, the first arrival's time is
    exponential, logits are those of the rows, and the lost mass of some positions is a probability."""
    torch.manual_seed(5)
    count, num_depths, num_rows = 40, 2, 100
    hidden = torch.randn(num_depths, 1, E).repeat(1, count, 1)
    weight, biases = torch.randn(num_rows, E), torch.randn(1, num_rows)
    positions_at_once(monkeypatch, kernels, 30, hidden, weight)
    gamma = torch.tensor([[0.3, 0.7]]).repeat(count, 1)
    unsampled = torch.tensor([0, 99])
    sampler = MixtureReplacementSampler(gamma, 20, 0.3)
    prediction = triton_layer(hidden, weight, biases, torch.zeros(count, dtype=torch.int64), unsampled, sampler)
    tokens, rows, scores, of_depths, lost = prediction.samples
    logits = hidden[:, 0] @ weight.T + biases
    mixed = (gamma[0, :, None] * logits).sum(0).index_fill(0, unsampled, -math.inf).double()
    assert torch.equal(tokens, rows[:, 0])
    check_draws(rows.flatten(), mixed.softmax(-1))
    torch.testing.assert_close(of_depths, logits.T[rows], rtol=1e-5, atol=1e-5)
    first = (-scores[:, 0].double()).exp() * (mixed - mixed.max()).exp().sum()
    assert stats.kstest(first.numpy(), stats.expon.cdf).pvalue > FALSE_ALARM
    assert torch.equal(scores.isneginf(), sampling.is_repeated(rows))
    assert lost.shape == (4,)
    assert ((lost >= 0) & (lost < 0.5)).all()


def test_operators_are_what_pytorch_is_told_of_them(logits_module) -> None:
    """Shapes, strides and dtypes on tensors without numbers, and which arguments change."""
    logits, gamma = torch.randn(2, 3, 70).bfloat16(), torch.rand(3, 2)
    never_sampled_mask, rows = torch.zeros(70, dtype=torch.bool), torch.zeros(3, 2, dtype=torch.int64)
    targets, factors = torch.tensor([1, 2, 3]), torch.randn(2, 3)
    ops = torch.ops.amos_fairseq
    for operator, arguments in (
        (ops.summarize_logits, (logits, gamma, never_sampled_mask)),
        (ops.summarize_logits, (logits, None, None)),
        (ops.summarize_blocks, (logits, gamma, never_sampled_mask, rows, rows)),
        (ops.pick_rows, (logits, gamma, never_sampled_mask, rows, rows, torch.rand(3, 2).double())),
        (ops.gradient_of_logits, (logits.clone(), factors, targets, factors)),
    ):
        library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


class Float32Tensors(TorchDispatchMode):
    """The shapes of all float32 tensors that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        tensors = (tensor for tensor in tree_iter(made) if isinstance(tensor, Tensor))
        self.shapes |= {tuple(tensor.shape) for tensor in tensors if tensor.dtype == torch.float32}
        return made


def test_no_chunk_is_copied_to_float32_at_the_sizes_of_a_base_model(kernels) -> None:
    """32 blocks of 512 tokens, 77 of them masked, AMOS-base in bfloat16, on tensors without numbers.

    Float32 are the gradient of the embeddings [V,E], sums of the gradient over 64 positions each, the blocks' sums, the samples
    and the weights of the 4 positions whose lost mass is measured. At most 0.58 GiB live at once, one chunk of logits among
    them; all logits would be 0.45 GiB in bfloat16 and 0.90 in float32.
    """
    made = Float32Tensors()
    live = base_model.forward_and_backward(predict_chunked, torch.bfloat16, 128, True, made)
    assert 0.9 * kernels.CHUNK_BYTES < live.largest <= kernels.CHUNK_BYTES
    # A chunk has 1,232 positions of 3 depths; not even one depth of it is there in float32.
    assert max(math.prod(shape) for shape in made.shapes) == base_model.V * base_model.E < 1_232 * base_model.V
    assert live.peak < 0.6 * 2**30


def test_a_model_on_a_cpu_needs_no_triton() -> None:
    model = small_amos(kernels="triton")
    assert model.is_fast
    assert not model.with_triton
    assert output_layer.runs_in_triton("triton", torch.device("cuda"))
    assert not output_layer.runs_in_triton("fast", torch.device("cuda"))

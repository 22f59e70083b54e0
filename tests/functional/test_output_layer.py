"""The output layer in chunks against softmax over all logits at once; inputs of samplers, cached memory; the copy mechanism."""

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from amos_fairseq.functional import output_layer as module
from amos_fairseq.functional.logit_chunks import CHUNK_BYTES_ELSEWHERE, NEVER_SAMPLED_LOGIT, chunks
from amos_fairseq.functional.output_layer import (
    copy_cross_entropy,
    linear_cross_entropy,
    output_layer,
)
from amos_fairseq.functional.sampling import ReplacementSampler

N, E, V = 13, 8, 40
UNSAMPLED = torch.tensor([0, 1, 38, 39])


def inputs(num_depths: int, num_biases: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """hidden, weight, biases that require a gradient, and targets."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_depths, N, E), (V, E), (num_biases, V))
    leaves = [torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return [*leaves, torch.randint(V, (N,), generator=generator)]


def at_once(hidden, weight, biases, targets) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.T + biases.unsqueeze(1)
    nll = cross_entropy(logits.flatten(0, 1), targets.repeat(len(hidden)), reduction="none")
    return nll.view(len(hidden), -1), logits.argmax(-1).eq(targets)


def with_gradients(leaves: list[torch.Tensor], nll: torch.Tensor) -> list[torch.Tensor]:
    """Of a sum in which every position and depth has its own weight, 0 among them."""
    weights = torch.randn(nll.shape, generator=torch.Generator().manual_seed(1)).to(nll.dtype)
    weights[:, 2:3] = 0
    return [nll, *torch.autograd.grad((nll * weights).sum(), leaves)]


@pytest.fixture(params=[1, 5, 13, 1000], ids="{} positions at once".format)
def some_at_once(request, monkeypatch) -> int:
    """Chunks of one, of five with a last one of three, and a single one."""
    monkeypatch.setattr(module, "chunks", lambda count, size, device: chunks_of(count, request.param))
    return request.param


@pytest.fixture(params=[0, 2**20], ids=["recomputed", "cached"])
def cached_bytes(request, monkeypatch) -> int:
    """Backward recomputes the softmax, or uses the cached one."""
    monkeypatch.setattr(module, "CPU_CACHE_BYTES", request.param)
    return request.param


def chunks_of(count: int, at_once: int) -> list[slice]:
    return [slice(start, min(start + at_once, count)) for start in range(0, count, at_once)]


@pytest.mark.parametrize(("num_depths", "num_biases"), [(1, 1), (3, 1), (3, 3)])
@pytest.mark.parametrize("samples", [False, True], ids=["", "sampled"])
@pytest.mark.usefixtures("some_at_once", "cached_bytes")
def test_values_and_all_gradients_in_float64(num_depths: int, num_biases: int, samples: bool) -> None:
    """To rounding: 1e-12. That rows are never sampled changes nothing of the loss, whose softmax has them."""
    *leaves, targets = inputs(num_depths, num_biases)
    targets[0], targets[1] = 0, 39
    sampler = (lambda logits, weights, places: (weights.sum(-1)[0],)) if samples else None
    predictions = output_layer(*leaves, targets, UNSAMPLED if samples else None, sampler)
    nll, correct = at_once(*leaves, targets)
    assert torch.equal(predictions.correct, correct)
    got, expected = with_gradients(leaves, predictions.nll), with_gradients(leaves, nll)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_correct_means_the_largest_logit_of_all_rows() -> None:
    check_correct(output_layer)


def check_correct(layer: Callable) -> None:
    """Also where that row is never sampled, and where two rows have the largest logit."""
    hidden, weight = torch.ones(1, 4, 1), torch.tensor([[3.0], [5.0], [5.0], [1.0], [7.0]])
    targets = torch.tensor([4, 1, 0, 2])
    for last_bias, expected in ((0.0, [True, False, False, False]), (-9.0, [False, True, False, True])):
        bias = torch.tensor([[0.0, 0, 0, 0, last_bias]])
        for sampling in ((), (torch.tensor([3, 4]), ReplacementSampler())):
            assert layer(hidden, weight, bias, targets, *sampling).correct[0].tolist() == expected


def test_sampler_receives_logits_and_weights_of_allowed_tokens(some_at_once: int) -> None:
    """Chunk by chunk; its results are joined for all positions. A likely special token does not hide the others."""
    hidden, weight, biases, targets = (tensor.detach() for tensor in inputs(3, 3))
    biases[:, 0] = 300.0  # exp(-300) of the others would be 0 in float32
    allowed = torch.ones(V, dtype=torch.bool)
    allowed[UNSAMPLED] = False
    seen = []

    def sampler(logits: torch.Tensor, weights: torch.Tensor, places: slice) -> tuple[torch.Tensor, torch.Tensor]:
        seen.extend(range(places.start, places.stop))
        assert logits[..., UNSAMPLED].eq(NEVER_SAMPLED_LOGIT).all()
        return logits.transpose(0, 1).clone(), weights.transpose(0, 1).clone()

    logits, weights = output_layer(hidden, weight, biases, targets, UNSAMPLED, sampler).samples
    expected = (hidden @ weight.T + biases.unsqueeze(1)).transpose(0, 1)
    assert seen == list(range(N))
    expected -= expected[..., allowed].amax(-1, keepdim=True)
    torch.testing.assert_close(logits[..., allowed], expected[..., allowed], rtol=1e-12, atol=1e-12)
    expected.exp_()
    expected[..., ~allowed] = 0
    torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)
    assert weights[..., UNSAMPLED].eq(0).all()


def test_float32_matches_the_reference_for_any_leading_shape() -> None:
    """Sums of at most 40 terms of size 1 in another order. Half of the targets are the best prediction."""
    hidden, weight, biases, targets = inputs(1, 1, torch.float32)
    targets[::2] = (hidden[0] @ weight.T + biases[0]).argmax(-1)[::2]
    leaves = [hidden, weight, biases]
    got, expected = (
        module.cross_entropy(hidden[0, :12].view(3, 4, E), weight, biases[0], targets[:12].view(3, 4), kernels)
        for kernels in ("fast", "reference")
    )
    assert got[0].shape == got[1].shape == (3, 4)
    assert torch.equal(got[1], expected[1])
    assert set(got[1].flatten().tolist()) == {True, False}
    ours, theirs = with_gradients(leaves, got[0]), with_gradients(leaves, expected[0])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_softmax_of_the_reference_is_float32() -> None:
    """Logits of bfloat16 inputs are rounded to 8 bits (at most 2^-8 of 20), the softmax over them is not."""
    hidden, weight, biases, targets = inputs(1, 1, torch.bfloat16)
    exact = at_once(hidden.float(), weight.float(), biases.float(), targets)[0][0]
    nll, _ = linear_cross_entropy(hidden[0], weight, biases[0], targets)
    assert nll.dtype == torch.float32
    assert (nll - exact).abs().max() < 20 * 2**-8
    assert not torch.equal(nll, nll.to(torch.bfloat16).float())


def test_bfloat16_is_near_float64(some_at_once: int, cached_bytes: int) -> None:
    """The same rounded inputs in float64; both round logits and their gradients to 8 bits once: 2^-8 of the norm."""
    *leaves, targets = inputs(3, 1, torch.bfloat16)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = with_gradients(doubles, at_once(*doubles, targets)[0])
    predictions = output_layer(*leaves, targets)
    assert predictions.nll.dtype == torch.float32
    for got, expected in zip(with_gradients(leaves, predictions.nll), exact, strict=True):
        assert (got.double() - expected).norm() < 2**-7 * expected.norm()


def test_the_weights_gradient_is_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 equal positions, one at a time: a bfloat16 sum stays where one more of them is below half of its last bit."""
    monkeypatch.setattr(module, "chunks", lambda count, size, device: chunks_of(count, 1))
    hidden, weight = torch.ones(1, 512, 1).bfloat16(), torch.zeros(2, 1).bfloat16().requires_grad_()
    output_layer(hidden, weight, torch.zeros(1, 2).bfloat16(), torch.zeros(512).long()).nll.sum().backward()
    assert weight.grad.flatten().tolist() == [-256.0, 256.0]


def test_autocast_dtypes() -> None:
    *leaves, targets = inputs(3, 1, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        nll = output_layer(*leaves, targets).nll
    rounded = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    expected = with_gradients(rounded, output_layer(*rounded, targets).nll)
    for got, of_rounded in zip(with_gradients(leaves, nll), expected, strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, of_rounded.float())


def test_chunks_cover_all_positions_once() -> None:
    cpu = torch.device("cpu")
    for count, size in ((2464, 3 * 4 * 32768), (5, 2**20), (1, 2**40), (320, 4 * 32768)):
        parts = list(chunks(count, size, cpu))
        assert [place for part in parts for place in range(part.start, part.stop)] == list(range(count))
        lengths = [part.stop - part.start for part in parts]
        assert max(lengths) * size <= CHUNK_BYTES_ELSEWHERE or max(lengths) == 1
        assert len(set(lengths[:-1])) <= 1
        assert len(parts) == math.ceil(count / max(1, CHUNK_BYTES_ELSEWHERE // size))


def test_no_positions() -> None:
    hidden, weight, biases, _ = inputs(3, 1)
    predictions = output_layer(hidden[:, :0], weight, biases, torch.zeros(0, dtype=torch.int64))
    assert predictions.nll.shape == predictions.correct.shape == (3, 0)
    predictions.nll.sum().backward()
    assert not weight.grad.any()


def test_copies_match_their_distribution() -> None:
    """p(v) = D [v = input] + (1 - D) softmax(v), written out: losses, gradients and predictions of 40 positions of 7 words."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 7, generator=generator, dtype=torch.float64) * 2
    copy_logits = torch.randn(40, generator=generator, dtype=torch.float64) * 2
    words, targets = (torch.randint(7, (40,), generator=generator) for _ in range(2))
    targets[::2] = words[::2]  # half of the inputs are originals
    ours, theirs = ([leaf.clone().requires_grad_() for leaf in (logits, copy_logits)] for _ in range(2))
    nll, correct = copy_cross_entropy(*ours, words, targets)
    d = theirs[1].sigmoid().unsqueeze(-1)
    probabilities = d * one_hot(words, 7) + (1 - d) * theirs[0].softmax(-1)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(40, dtype=torch.float64))
    expected = -probabilities.gather(1, targets[:, None])[:, 0].log()
    torch.testing.assert_close(nll, expected)
    assert correct.tolist() == probabilities.argmax(-1).eq(targets).tolist()
    assert {True, False} == set(correct.tolist())
    nll.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close([leaf.grad for leaf in ours], [leaf.grad for leaf in theirs])


@pytest.mark.parametrize("certainty", [-200.0, 200.0])
def test_certain_copies_give_finite_losses(certainty: float) -> None:
    """In float32 D is 0 or 1 there; the loss of the token that is not copied is about 200 nats, as in float64."""
    logits = torch.zeros(2, 7, requires_grad=True)
    copy_logits = torch.full((2,), certainty, requires_grad=True)
    nll, _ = copy_cross_entropy(logits, copy_logits, torch.tensor([1, 1]), torch.tensor([1, 2]))
    expected = [0.0, 200.0 + math.log(7)] if certainty > 0 else [math.log(7)] * 2
    assert nll.tolist() == pytest.approx(expected, abs=1e-4)
    nll.sum().backward()
    assert logits.grad.isfinite().all()
    assert copy_logits.grad.isfinite().all()

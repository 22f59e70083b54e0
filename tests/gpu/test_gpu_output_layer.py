"""The output layer in chunks and its samplers on CUDA, in PyTorch and in Triton: values of the CPU, frequencies, and no
synchronization."""

from importlib.util import find_spec

import pytest
import torch
from frequencies import FALSE_ALARM, chi_square_p

from amos_fairseq.functional.output_layer import output_layer, triton_kernels
from amos_fairseq.functional.sampling import (
    MixtureReplacementSampler,
    gumbel_top_k_sampling,
    sample_with_replacement,
    sample_without_replacement,
)

NO_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("with_triton", [False, pytest.param(True, marks=NO_TRITON)], ids=["", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients_match_the_cpu(
    dtype: torch.dtype, with_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float64 of the same rounded inputs; products and their gradients are rounded once: 2^-7 of the norm in bfloat16, less in
    float16 and float32. Four chunks."""
    monkeypatch.setattr("amos_fairseq.functional.logit_chunks.CHUNK_BYTES", {"cuda": 25 * 3 * 1024 * 4})
    if with_triton:
        monkeypatch.setattr(triton_kernels(), "CHUNK_BYTES", 25 * 3 * 1024 * dtype.itemsize)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=generator).to(dtype) for shape in ((3, 100, 64), (1024, 64), (3, 1024))]
    inputs[0] /= 8
    targets = torch.randint(1024, (100,), generator=generator)
    results = []
    for device, as_dtype in (("cpu", torch.float64), ("cuda", dtype)):
        leaves = [tensor.to(device, as_dtype).requires_grad_() for tensor in inputs]
        nll = output_layer(*leaves, targets.to(device), with_triton=with_triton and device == "cuda").nll
        results.append([tensor.double().cpu() for tensor in (nll, *torch.autograd.grad(nll.sum(), leaves))])
    tolerance = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-7}[dtype]
    for exact, got in zip(*results, strict=True):
        assert (got - exact).norm() < tolerance * exact.norm()


def test_samplers_follow_the_weights() -> None:
    torch.manual_seed(0)
    weights = (torch.randn(1, 1024, device="cuda") * 2).exp()
    weights[:, [0, 5, 1023]] = 0
    many = weights.repeat(100_000, 1)
    expected = weights[0].double().cpu() / weights.double().cpu().sum()
    samples = (
        sample_with_replacement(many, 1),
        gumbel_top_k_sampling(many, 4).tokens[:, :1],
        sample_without_replacement(many, 3)[:, :1],
    )
    for rows in samples:
        counts = torch.bincount(rows.flatten().cpu(), minlength=1024)
        assert chi_square_p(counts, expected) > FALSE_ALARM


@NO_TRITON
def test_triton_entries_follow_the_mixture() -> None:
    """128 entries at each of 500 positions of one distribution, K = 3, bfloat16; the logits that come with them are theirs."""
    torch.manual_seed(1)
    count, num_rows = 500, 1024
    hidden = torch.randn(3, 1, 64, device="cuda").div_(8).repeat(1, count, 1).bfloat16()
    weight, biases = (
        torch.randn(num_rows, 64, device="cuda").bfloat16(),
        torch.zeros(1, num_rows, device="cuda").bfloat16(),
    )
    gamma = torch.tensor([[0.2, 0.3, 0.5]], device="cuda").repeat(count, 1)
    unsampled = torch.tensor([0, 5, 1023], device="cuda")
    sampler, targets = MixtureReplacementSampler(gamma, 128, 0.3), torch.zeros(count, dtype=torch.int64, device="cuda")
    results = []
    for _ in range(2):
        torch.manual_seed(2)
        results.append(output_layer(hidden, weight, biases, targets, unsampled, sampler, with_triton=True))
    tokens, rows, _, of_depths, lost = results[0].samples
    assert all(torch.equal(one, other) for one, other in zip(results[0].samples, results[1].samples, strict=True))
    logits = torch.stack([(hidden_of_depth[:1] @ weight.T)[0] for hidden_of_depth in hidden])
    # Products of one row and of many may be rounded differently.
    torch.testing.assert_close(of_depths, logits.float().T[rows], rtol=2**-7, atol=2**-7)
    mixed = (gamma[0, :, None] * logits.double()).sum(0).index_fill(0, unsampled, -torch.inf).cpu()
    counts = torch.bincount(rows.flatten().cpu(), minlength=num_rows)
    # The logits' own rounding, 2^-9 of up to 4, is within the spread of 62 samples of a row.
    assert chi_square_p(counts, mixed.softmax(-1)) > FALSE_ALARM
    assert torch.equal(tokens, rows[:, 0])
    assert ((lost >= 0) & (lost < 1)).all()

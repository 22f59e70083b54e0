"""The output layer in chunks and its samplers on CUDA: numbers of the CPU, frequencies, and no waiting for the device."""

import pytest
import torch
from chi_square import FALSE_ALARM, chi_square_p
from small_models import small_batch, small_criterion, small_model

from amos_fairseq.functional.drawing import draw_distinct_rows, draw_rows, race
from amos_fairseq.functional.output_layer import output_layer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients_are_those_of_the_cpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float64 of the same rounded inputs; products and their gradients are rounded once: 2^-7 of the norm in bfloat16, less in
    float16 and float32. Four chunks."""
    monkeypatch.setattr("amos_fairseq.functional.output_layer.CHUNK_BYTES", {"cuda": 25 * 3 * 1024 * 4})
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=draw).to(dtype) for shape in ((3, 100, 64), (1024, 64), (3, 1024))]
    inputs[0] /= 8
    targets = torch.randint(1024, (100,), generator=draw)
    results = []
    for device, as_dtype in (("cpu", torch.float64), ("cuda", dtype)):
        leaves = [tensor.to(device, as_dtype).requires_grad_() for tensor in inputs]
        nll = output_layer(*leaves, targets.to(device)).nll
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
    drawn = draw_rows(many, 1), race(many, 4).rows[:, :1], draw_distinct_rows(many, 3)[:, :1]
    for rows in drawn:
        counts = torch.bincount(rows.flatten().cpu(), minlength=1024)
        assert chi_square_p(counts, expected) > FALSE_ALARM


@pytest.mark.parametrize("settings", [{}, {"gumbel_entries": 20}, {"mixture": "uniform"}], ids=str)
def test_a_step_never_waits_for_the_device(settings: dict) -> None:
    """PyTorch raises an error where an operation synchronises."""
    model, criterion, batch = small_model(**settings).cuda(), small_criterion(), small_batch()
    batch["net_input"] = {name: value.cuda() for name, value in batch["net_input"].items()}
    criterion(model, batch)[0].backward()  # libraries start up
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = criterion(model, batch)[0]
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loss)

"""Tests that require a GPU; they are skipped without one."""

import math

import pytest
import torch
from small_models import encoder_config, modern_config

from amos_fairseq.functional.output_layer import linear_cross_entropy
from amos_fairseq.modules.encoder import TransformerConfig
from amos_fairseq.run.metrics_file import read_records

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


BERT = encoder_config(
    num_layers=2, width=32, ffn_width=64, max_positions=192, position_buckets=32, position_max_distance=128
)
MODERN = modern_config(width=32, ffn_width=48, num_heads=4)


@pytest.mark.parametrize(
    ("config", "length"),
    [*((BERT, length) for length in (64, 128, 192)), *((MODERN, length) for length in (64, 192, 512, 520))],
    ids=lambda value: value if isinstance(value, int) else type(value).__name__,
)
def test_encoder_equals_cpu(config: TransformerConfig, length: int) -> None:
    """Values and gradients of the CPU, also at T % 128 == 64, where cuDNN's attention gives NaN, and with local layers in
    blocks, from 512 tokens on."""
    states = torch.randn(2, length, 32)
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[1, -5:] = True
    results = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        encoder = config.build().to(device)
        inputs = states.to(device).requires_grad_()
        output = encoder(inputs, padding.to(device))[-1][~padding.to(device)]
        output.pow(2).sum().backward()
        gradients = [parameter.grad for parameter in encoder.parameters() if parameter.grad is not None]
        results[device] = [tensor.detach().cpu() for tensor in (output, inputs.grad, *gradients)]
    for on_cpu, on_gpu in zip(results["cpu"], results["cuda"], strict=True):
        # float32 sums of up to 2 * 520 * 64 terms in another order.
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-3, atol=1e-4 * max(1, on_cpu.abs().max().item()))


def test_cross_entropy_in_half_precision_is_float32() -> None:
    hidden, weight = torch.randn(6, 16, device="cuda"), torch.randn(64, 16, device="cuda")
    bias, targets = torch.zeros(64, device="cuda"), torch.arange(6, device="cuda")
    exact, _ = linear_cross_entropy(hidden, weight, bias, targets)
    for dtype in (torch.float16, torch.bfloat16):
        nll, _ = linear_cross_entropy(hidden.to(dtype), weight.to(dtype), bias.to(dtype), targets)
        assert nll.dtype == torch.float32
        # Logits of size about 4 with 8 bits of mantissa in bfloat16.
        torch.testing.assert_close(nll, exact, rtol=0.02, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [(), ("--bf16",), ("--fp16",), ("--amp",)], ids=["fp32", "bf16", "fp16", "amp"])
def test_trains_and_resumes_in_every_precision(run_training, tmp_path, precision: tuple[str, ...]) -> None:
    """Finite losses that start at the entropy of a uniform prediction, and a resume."""
    run_training(tmp_path, *precision, "--max-update", "4")
    run_training(tmp_path, *precision, "--max-update", "8")
    records = [record for record in read_records(tmp_path) if record["split"] == "train"]
    assert [record["update"] for record in records][-1] == 8
    assert all(math.isfinite(record["loss"]) for record in records)
    # 256 embedding rows, of which the corpus uses about 205; an untrained head is close to uniform.
    assert abs(records[0]["mlm_loss_1"] - math.log(256)) < 0.3

"""Tests that require a GPU; they are skipped without one."""

import pytest
import torch
from small_models import encoder_config, modern_config

from amos_fairseq.modules.encoder import TransformerConfig

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

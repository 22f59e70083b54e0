"""Tests that require a GPU, skipped without one: encoders, generators and features, and how often an update waits for it."""

import warnings
from importlib.util import find_spec

import pytest
import torch
from fairseq import utils
from fairseq.logging import metrics
from saved_models import write_run
from small_models import encoder_config, modern_config
from training_step import FairseqStep, random_batches, set_up

import amos_fairseq
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
        inputs = states.to(device, copy=True).requires_grad_()
        output = encoder(inputs, padding.to(device))[-1][~padding.to(device)]
        output.pow(2).sum().backward()
        gradients = [parameter.grad for parameter in encoder.parameters() if parameter.grad is not None]
        results[device] = [tensor.detach().cpu() for tensor in (output, inputs.grad, *gradients)]
    for on_cpu, on_gpu in zip(results["cpu"], results["cuda"], strict=True):
        # float32 sums of up to 2 * 520 * 64 terms in another order.
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-3, atol=1e-4 * max(1, on_cpu.abs().max().item()))


def weights_after_updates(recipe: str, *overrides: str) -> list[torch.Tensor]:
    """The weights after three updates of 32 sequences of 512 tokens, in bf16."""
    settings = {"precision": "bf16", "device": "cuda", "vocabulary_size": 2_000}
    shape = ("dataset.batch_size=32", "task.tokens_per_sample=512", "model.max_positions=512")
    setup = set_up(recipe, [*shape, "model.attention_dropout=0.1", *overrides], **settings)
    step = FairseqStep(setup)
    for batch in random_batches(setup, 3):
        step.step(batch)
    return [parameter.detach().clone() for parameter in step.module.parameters()]


@pytest.mark.parametrize("recipe", ["amos_tiny", "electra_tiny", "teams_tiny", "electric_tiny", "mlm_tiny"])
def test_deterministic_updates_give_the_same_bits(recipe: str, restored_determinism: None) -> None:
    """At T = 512, where the gradient of the bias, and that of the queries, otherwise depend on the order of additions."""
    first, second = (weights_after_updates(recipe, "model.deterministic=true") for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernels_give_the_same_bits_without_the_flag() -> None:
    first, second = (weights_after_updates("amos_tiny", "model.kernels=triton") for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("recipe", ["amos_tiny", "electra_tiny", "teams_tiny", "electric_tiny", "mlm_tiny"])
@pytest.mark.parametrize(("precision", "expected"), [("float32", 1), ("bf16", 1), ("fp16", 2)])
def test_an_update_synchronizes_only_for_its_statistics(recipe: str, precision: str, expected: int) -> None:
    """Two micro-batches, on the GPU as they would come there from pinned memory; fp16 reads its norm too."""
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bfloat16")
    settings = {"precision": precision, "device": "cuda", "vocabulary_size": 2_000}
    setup = set_up(recipe, ["dataset.batch_size=8"], **settings)
    step, batches = FairseqStep(setup), utils.move_to_cuda(random_batches(setup))
    for batch in batches:  # moments, workspaces, and a loss scale that fits
        step.step(batch)
    before = step.trainer.get_num_updates()
    with warnings.catch_warnings(record=True) as seen, metrics.aggregate(new_root=True):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step.trainer.train_step(batches[:2])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [
        f"{warning.filename}:{warning.lineno}" for warning in seen if "called a synchronizing" in str(warning.message)
    ]
    assert step.trainer.get_num_updates() == before + 1
    assert len(waits) == expected, waits


TEXTS = ["the lazy dog jumps over the fox", "the end", ("the quick fox", "over the lazy dog"), "over"]


def test_features_match_the_cpu(tmp_path):
    """Sums of float32 run in another order there; TF32 is off by default. bfloat16 rounds states of about 1 to 8 bits."""
    write_run(tmp_path)
    expected = amos_fairseq.load(tmp_path)(TEXTS)
    features = amos_fairseq.load(tmp_path, device="cuda", batch_size=2)(TEXTS)
    assert {tensor.device.type for tensor in features[:3]} == {"cuda"}
    torch.testing.assert_close(features.states.cpu(), expected.states, atol=1e-4, rtol=0)
    assert torch.equal(features.mask.cpu(), expected.mask)
    half = amos_fairseq.load(tmp_path, device="cuda", dtype=torch.bfloat16)(TEXTS)
    torch.testing.assert_close(half.states.float().cpu(), expected.states, atol=0.2, rtol=0)
    assert half.pooled().shape == (4, 16)

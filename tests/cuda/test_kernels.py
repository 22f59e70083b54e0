"""Which of PyTorch's attention kernels run on CUDA, seen on a fake device."""

from typing import Any

import pytest
import torch
from fake_cuda import fake_cuda
from small_models import modern_config
from synchronization import Operations

from amos_fairseq.functional import attention
from amos_fairseq.functional.attention import AttentionBias, fast_attention

MASK, CUDNN, VARLEN = "efficient_attention", "cudnn_attention", "_varlen_attn"
needs_varlen = pytest.mark.skipif(not attention.has_varlen(), reason="from PyTorch 2.11 on")


def kernels_of(operations: Operations) -> set[str]:
    names = {name.partition("::")[2] for name in operations.names}
    return {name.removeprefix("_scaled_dot_product_") for name in names if "att" in name}


def test_cudnn_attends_without_a_bias_on_hopper() -> None:
    for capability, dtype, length, width, dropout, kernel in (
        ((9, 0), torch.bfloat16, 512, 64, 0.0, "cudnn"),
        ((8, 0), torch.bfloat16, 512, 64, 0.0, "flash"),
        ((9, 0), torch.bfloat16, 512, 64, 0.125, "flash"),
        ((9, 0), torch.bfloat16, 448, 64, 0.0, "flash"),
        ((9, 0), torch.bfloat16, 512, 136, 0.0, "flash"),
        ((9, 0), torch.float32, 512, 64, 0.0, "efficient"),
    ):
        with fake_cuda(capability), Operations() as operations:
            fast_attention(torch.empty(2, length, 3, 3, width, device="cuda", dtype=dtype), AttentionBias(), dropout)
        assert kernels_of(operations) == {f"{kernel}_attention"}, (capability, dtype, length, width, dropout)


def modernbert_kernels(length: int, *, is_padded: bool = False, is_packed: bool = False, **settings: Any) -> set[str]:
    """The operators of attention in both directions of a ModernBERT with a global and a local layer, in bfloat16."""
    shape = modern_config(width=128, num_heads=2, ffn_width=64, num_layers=2, **settings)
    lengths = [length, length // 2] if is_packed else None
    with fake_cuda(), Operations() as operations:
        encoder = shape.build().to("cuda", torch.bfloat16).train()
        padding = torch.zeros(2, length, dtype=torch.bool, device="cuda") if is_padded or is_packed else None
        embeddings = torch.empty(2, length, 128, device="cuda", dtype=torch.bfloat16)
        encoder(embeddings, padding, lengths=lengths)[-1].sum().backward()
    return kernels_of(operations)


def both_directions(*kernels: str) -> set[str]:
    return {f"{kernel}{direction}" for kernel in kernels for direction in ("", "_backward")}


@needs_varlen
def test_kernels_of_modernbert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full blocks, padding, packed texts; dropout or an older PyTorch take a mask, also in blocks, but never cuDNN, whose
    backward pass gives NaN with a mask.
    """
    assert modernbert_kernels(256) == both_directions(CUDNN, VARLEN)
    assert modernbert_kernels(256, is_packed=True) == both_directions(VARLEN)
    assert modernbert_kernels(256, is_packed=True, attention_dropout=0.1) == both_directions(MASK)
    assert modernbert_kernels(256, is_padded=True) == both_directions(MASK)
    assert modernbert_kernels(256, attends_to="past") == both_directions(VARLEN)
    assert modernbert_kernels(65) == both_directions("flash_attention")  # a window is not needed
    monkeypatch.setattr(attention, "has_varlen", lambda: False)
    assert modernbert_kernels(256) == both_directions(CUDNN, MASK)
    assert modernbert_kernels(256, is_packed=True) == both_directions(MASK)


@pytest.mark.parametrize(("kernel", "dropout"), [("flash", 0.1), ("cudnn", 0.0)])
def test_gradients_of_query_key_and_value_are_written_into_one_packed_tensor(kernel: str, dropout: float) -> None:
    """Contiguous, as the linear layer behind it reads it, and not copied."""
    with fake_cuda():
        packed = torch.empty(2, 128, 3, 3, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        mixed = fast_attention(packed.view_as(packed), AttentionBias(), dropout)
        assert mixed.is_contiguous()
        with Operations() as operations:
            mixed.backward(torch.empty_like(mixed))
        assert packed.grad.is_contiguous()
    assert f"aten::_scaled_dot_product_{kernel}_attention_backward" in operations.names
    assert not operations.names & {"aten::clone", "aten::copy_", "aten::cat"}


def test_the_table_of_backends_under_deterministic_algorithms(restored_determinism: None) -> None:
    device = torch.device("cuda", 0)
    with fake_cuda():
        arguments = {"has_bias": False, "length": 512}
        assert attention.choose_backend(device, torch.bfloat16, 64, **arguments) == "cudnn"
        torch.use_deterministic_algorithms(True)
        assert attention.choose_backend(device, torch.bfloat16, 64, **arguments) == "flash"
        assert attention.choose_backend(device, torch.bfloat16, 64, True) == "efficient"
        assert attention.choose_backend(device, torch.bfloat16, 64, True, True) == "triton"

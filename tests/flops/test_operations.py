"""Counts of every kind of operation against counts by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from amos_fairseq.flops.counting import Operations, count_matmuls, count_operations

META = torch.device("meta")
B, T, D, V = 3, 5, 8, 40


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


STATES, TOKENS = on_meta(B, T, D), on_meta(B, T, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: on_meta(B, T, D) @ on_meta(D, V), Operations(matmul=2 * B * T * D * V)),
        (lambda: on_meta(T, D) @ on_meta(D), Operations(matmul=2 * T * D)),
        (lambda: torch.bmm(on_meta(B, T, D), on_meta(B, D, T)), Operations(matmul=2 * B * T * T * D)),
        # One product with a one-hot vector of V entries a token.
        (lambda: functional.embedding(TOKENS, on_meta(V, D)), Operations(look_up=2 * B * T * V * D)),
        (lambda: STATES + STATES * 2, Operations(elementwise=2 * B * T * D)),
        (lambda: functional.gelu(STATES), Operations(elementwise=5 * B * T * D)),
        (lambda: STATES.softmax(-1), Operations(elementwise=5 * B * T * D)),
        (lambda: functional.layer_norm(STATES, (D,)), Operations(elementwise=7 * B * T * D)),
        (lambda: STATES.sum(-1), Operations(elementwise=B * T * D)),
        (lambda: STATES.argmax(-1), Operations(elementwise=B * T * D)),
        # Nothing is calculated.
        (lambda: STATES.transpose(1, 2).contiguous().view(B, T * D).to(torch.bfloat16), Operations()),
    ],
)
def test_operations_of_single_operators(call, expected: Operations) -> None:
    assert count_operations(call)["Global"] == expected


def test_operations_of_dropout() -> None:
    dropout = nn.Dropout(0.1)
    assert count_operations(lambda: dropout(STATES))["Global"].elementwise == 4 * STATES.numel()
    assert count_operations(lambda: dropout.eval()(STATES))["Global"] == Operations()


def test_operations_of_attention() -> None:
    """Fused kernels would be counted by other formulas, or, on a CPU, not at all."""
    from amos_fairseq.modules.bert_encoder import SelfAttention

    with META:
        attention = SelfAttention(D, num_heads=2, dropout=0.0)
    counted = count_operations(lambda: attention(STATES))["Global"]
    assert counted.matmul == B * (2 * T * D * 4 * D + 4 * T * T * D)  # q, k, v, output; q k^T and weights v
    # 5 of the softmax for each pair and head; q is scaled before the product.
    assert counted.elementwise == B * (5 * 2 * T * T + T * D)


def test_operations_by_module() -> None:
    with META:
        model = nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.Linear(D, V), nn.GELU()))
    counts = count_operations(lambda: model(STATES))
    first, second = 2 * B * T * D * D, 2 * B * T * D * V
    assert counts["Sequential.0"] == Operations(first)
    assert counts["Sequential.1"] == Operations(second, 0, 5 * B * T * V)
    assert counts["Sequential"] == counts["Global"] == Operations(first + second, 0, 5 * B * T * V)


def test_operations_of_a_backward_pass() -> None:
    weight = on_meta(D, V).requires_grad_()
    forward = 2 * B * T * D * V
    assert count_matmuls(lambda: (STATES @ weight).sum().backward()) == 2 * forward
    states = on_meta(B, T, D).requires_grad_()
    assert count_matmuls(lambda: (states @ weight).sum().backward()) == 3 * forward

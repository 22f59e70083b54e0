"""Memory of the output layer at the sizes of a base model, on tensors without values."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from training_step import LiveBytes

from amos_fairseq.functional import logit_chunks
from amos_fairseq.modules.mixture import Adversary, OutputLayerWeights, predict_chunked, predict_reference

# 32 blocks of 512 tokens, 77 of them masked; AMOS-base.
B, M, K, E, V = 32, 77, 3, 768, 32_768


def forward_and_backward(
    predict: Callable, dtype: torch.dtype, num_entries: int, with_triton: bool = False, more: Any = None
) -> LiveBytes:
    """The loss of all depths, a sample of their mixture, and the gradients of both; in the context ``more``."""
    with FakeTensorMode():

        def leaf(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(*shape, dtype=of, requires_grad=True)

        hidden, embedding, bias = [leaf(B, M, E) for _ in range(K)], leaf(V, E), leaf(1, V)
        gamma, originals = leaf(B, M, K, of=torch.float32), torch.empty(B, M, dtype=torch.int64)
        unsampled = torch.empty(69, dtype=torch.int64)
        rows = OutputLayerWeights(embedding, bias, unsampled, embedding.detach(), with_triton)
        with LiveBytes() as live, more or nullcontext():
            predictions = predict(hidden, gamma, originals, rows, Adversary(0.3, 0.0, num_entries))
            (predictions.nll.sum() + predictions.adversarial_term.float().sum()).backward()
    assert embedding.grad is not None
    assert gamma.grad is not None
    return live


CPU, GPU = logit_chunks.CHUNK_BYTES_ELSEWHERE, logit_chunks.CHUNK_BYTES["cuda"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "num_entries", "chunk_bytes"),
    [(torch.bfloat16, 128, GPU), (torch.float32, 0, CPU)],
    ids=["chunks of a GPU", "all entries"],
)
def test_peak_memory_is_below_a_quarter_of_the_reference(dtype, num_entries, chunk_bytes, monkeypatch) -> None:
    """0.22 and 0.49 GiB against 2.13 GiB in float32, the gradient of the embeddings (0.09) among both."""
    monkeypatch.setattr(logit_chunks, "CHUNK_BYTES_ELSEWHERE", chunk_bytes)
    fast = forward_and_backward(predict_chunked, dtype, num_entries)
    reference = forward_and_backward(predict_reference, dtype, num_entries)
    assert reference.peak > K * B * M * V * 4  # it holds the float32 softmax of every depth until its backward pass
    assert fast.peak < reference.peak / 4
    assert fast.largest <= max(chunk_bytes, V * E * 4)

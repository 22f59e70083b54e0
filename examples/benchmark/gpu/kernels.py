"""Time attention and the output layer by every backend that the device has. Prints Markdown.

FLOPs of attention are those of the reference: two products forward, five backward; of the output layer three times those of
the logits. Bytes are the minimum that every backend has to move: heads, output and their gradients, each once; hidden
states and embeddings, read in both passes, and their gradients.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from gpu_workload import DROPOUT, Sizes, attention_leaves, first_line, name_of, sizes_on
from torch import Tensor
from torch.nn.attention import SDPBackend

from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.functional import logit_chunks
from amos_fairseq.functional import output_layer as chunked
from amos_fairseq.functional.attention import (
    SDPA_BACKENDS,
    AttentionBias,
    PackedKeys,
    ToeplitzBias,
    as_attention_mask,
    fast_attention,
    fused_attention,
    has_varlen,
    masked_pairs,
    reference_attention,
    scores_of_masked_pairs,
    toeplitz_attention,
    varlen_attention,
    window_of,
)
from amos_fairseq.functional.cross_entropy import linear_cross_entropy
from amos_fairseq.functional.relative_position import toeplitz
from amos_fairseq.measure.measurement import step_peak, sustained_seconds
from amos_fairseq.modules.mixture import Adversary, OutputLayerWeights, predict_chunked, predict_reference

MIB = 2**20
CHUNKS = (32, 64, 128, 256, 512)  # MiB
WINDOW = 64  # tokens on each side, of ModernBERT's local layers


SECONDS = {"cuda": 0.6, "cpu": 0.01}  # of each measurement


@dataclass(frozen=True)
class Variant:
    """A call that returns one tensor, and its leaves that get gradients; ``dropout`` and ``bias_gradient`` label the row."""

    name: str
    call: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    dropout: float = 0.0
    bias_gradient: bool = False


def attention_variants(sizes: Sizes, device: torch.device) -> Iterator[Variant]:
    """Yield the backends.

    Flash and cuDNN's attention, whose bias gets no gradient, are bounds for the others. TFLOP/s of windows count all pairs.
    """
    heads, learned = attention_leaves(sizes, device)
    dtype = sizes.dtype
    on_gpu = device.type == "cuda"

    def fused(backend: str, mask: Tensor | None, dropout: float) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
        with mock.patch.dict(SDPA_BACKENDS, {"cudnn": [SDPBackend.CUDNN_ATTENTION]}):  # alone, without flash behind it
            return fused_attention(query, key, value, mask, dropout, backend).transpose(1, 2)

    def with_bias(attend: Callable, source: Tensor, dropout: float) -> Tensor:
        return attend(heads, AttentionBias(learned=toeplitz(source)), dropout)

    def efficient(source: Tensor, dropout: float) -> Tensor:
        return fused("efficient", as_attention_mask(AttentionBias(learned=toeplitz(source)), dtype), dropout)

    def packed(reach: int | None) -> Tensor:
        starts = torch.arange(sizes.sequences + 1, dtype=torch.int32, device=device) * sizes.length
        sequences = PackedKeys(starts, sizes.length, window_of("all", reach))
        return varlen_attention(heads.flatten(0, 1), sequences).unflatten(0, heads.shape[:2])

    def in_triton(source: Tensor | None, dropout: float) -> Tensor:
        return toeplitz_attention(heads, ToeplitzBias(source, None), dropout, None)

    both = (heads, learned)
    if on_gpu:
        for name, backend in (("flash", "flash"), ("cuDNN", "cudnn")):
            for dropout in (0.0, DROPOUT):
                yield Variant(f"{name}, no bias", partial(fused, backend, None, dropout), (heads,), dropout)
        if has_varlen():
            yield Variant("varlen, no bias", partial(packed, None), (heads,))
            yield Variant("varlen, window", partial(packed, WINDOW), (heads,))
        pairs = masked_pairs(sizes.length, None, reach=WINDOW, device=device)
        window = as_attention_mask(AttentionBias(fixed=scores_of_masked_pairs(pairs, dtype)), dtype)
        yield Variant("efficient, mask of the window", partial(fused, "efficient", window, 0.0), (heads,))
        for dropout in (0.0, DROPOUT):
            yield Variant("efficient", partial(efficient, learned.detach(), dropout), (heads,), dropout)
            yield Variant("efficient", partial(efficient, learned, dropout), both, dropout, True)
        compiled = partial(with_bias, torch.compile(reference_attention), learned, DROPOUT)
        yield Variant("compiled definition", compiled, both, DROPOUT, True)
        yield Variant("FlexAttention", flex_attention(heads, learned, sizes.length), both, 0.0, True)
    else:
        yield Variant("ours on a CPU", partial(with_bias, fast_attention, learned, DROPOUT), both, DROPOUT, True)
    yield Variant("definition", partial(with_bias, reference_attention, learned, DROPOUT), both, DROPOUT, True)
    if on_gpu:  # last, because an illegal memory access makes everything after it fail
        for dropout in (0.0, DROPOUT):
            yield Variant("ours in Triton, no bias", partial(in_triton, None, dropout), (heads,), dropout)
            yield Variant("ours in Triton", partial(in_triton, learned, dropout), both, dropout, True)


def flex_attention(heads: Tensor, values: Tensor, length: int) -> Callable[[], Tensor]:
    """PyTorch's generated kernel, which adds the bias to the score; it has no dropout of the attention weights."""
    from torch.nn.attention.flex_attention import flex_attention as flex

    compiled = torch.compile(flex, dynamic=False)

    def add_bias(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + values[h, key - query + length - 1]

    def call() -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
        return compiled(query, key, value, score_mod=add_bias).transpose(1, 2)

    return call


def print_attention(sizes: Sizes, device: torch.device) -> list[str]:
    """Print the table and return the backends that failed."""
    print(f"{sizes}; the gradient of the bias includes the sum over sequences and diagonals\n")
    print("| backend | dropout | gradient of the bias | forward, ms | TFLOP/s | GB/s | backward, ms | TFLOP/s | GB/s |")
    print("|---|---:|---|---:|---:|---:|---:|---:|---:|")
    product = 2 * sizes.sequences * sizes.heads * sizes.length**2 * sizes.head_width
    tensor = sizes.sequences * sizes.length * sizes.heads * sizes.head_width * sizes.dtype.itemsize
    work = ((2 * product, 4 * tensor), (5 * product, 8 * tensor))
    failed, without_bias = [], []
    for variant in attention_variants(sizes, device):
        head = f"| {variant.name} | {variant.dropout} | {'yes' if variant.bias_gradient else 'no'} | "
        try:
            times = forward_and_backward(variant, device)
        except Exception as error:  # continue with the other backends
            failed.append(variant.name)
            print(f"{head}FAILED: {first_line(error)} | | | | | |", flush=True)
            continue
        cells = (
            f"{seconds * 1e3:.3f} | {flops / seconds / 1e12:.1f} | {moved / seconds / 1e9:.0f}"
            for seconds, (flops, moved) in zip(times, work, strict=True)
        )
        print(f"{head}{' | '.join(cells)} |", flush=True)
        # The rows that choose_backend has to choose from.
        if variant.name.endswith(", no bias") and not variant.dropout:
            without_bias.append(f"{variant.name.removesuffix(', no bias')} {sum(times) * 1e3:.3f} ms")
    if without_bias:
        print(f"\nDecided: attention without a bias and dropout, forward and backward: {', '.join(without_bias)}")
    return failed


def forward_and_backward(variant: Variant, device: torch.device) -> tuple[float, float]:
    """Return the sustained seconds of each pass; the backward pass is the difference."""
    grad = torch.randn_like(variant.call())

    def both() -> None:
        torch.autograd.grad(variant.call(), variant.leaves, grad)

    budget = SECONDS[device.type]
    forward = sustained_seconds(variant.call, device, budget)
    return forward, max(sustained_seconds(both, device, budget) - forward, 1e-9)


def print_output_layer(sizes: Sizes, device: torch.device) -> list[str]:
    """Time cross entropy alone, and AMOS: samples from a mixture and its gradient, forward and backward pass together."""
    torch.manual_seed(0)
    positions, width, dtype = (sizes.sequences, sizes.masked), sizes.heads * sizes.head_width, sizes.dtype
    hidden = [torch.randn(*positions, width, device=device).to(dtype).requires_grad_() for _ in range(sizes.depths)]
    embedding = torch.randn(sizes.vocabulary, width, device=device).mul_(0.02).to(dtype).requires_grad_()
    biases = torch.zeros(1, sizes.vocabulary, device=device, dtype=dtype).requires_grad_()
    gamma = torch.full((*positions, sizes.depths), 1 / sizes.depths, device=device).requires_grad_()
    originals = torch.randint(5, sizes.vocabulary, positions, device=device)
    unsampled = torch.arange(5, device=device)
    rows = OutputLayerWeights(embedding, biases, unsampled, embedding.detach())
    adversary = Adversary(temperature=0.3, hidden_gradient=0.0, num_entries=sizes.samples)
    leaves = (*hidden, embedding, biases)
    all_leaves = (*leaves, gamma)
    targets = originals.flatten()

    def cross_entropy(with_triton: bool) -> Tensor:
        states = torch.stack([h.flatten(0, 1) for h in hidden])
        return chunked.output_layer(states, embedding, biases, targets, with_triton=with_triton).nll.sum()

    def reference() -> Tensor:
        return sum(linear_cross_entropy(h, embedding, biases[0], originals)[0].sum() for h in hidden)

    def mixture(predict: Callable, with_triton: bool = False) -> Tensor:
        own = dataclasses.replace(rows, with_triton=with_triton)
        predictions = predict(hidden, gamma, originals, own, adversary)
        return predictions.nll.sum() + predictions.adversarial_term.float().sum()

    ways: list[tuple[str, int | None, Callable[[], Tensor], Callable[[], Tensor]]] = [
        ("in chunks", size, lambda: cross_entropy(False), lambda: mixture(predict_chunked)) for size in CHUNKS
    ]
    ways.append(("definition", None, reference, lambda: mixture(predict_reference)))
    if device.type == "cuda":
        ways += [
            ("ours in Triton", size, lambda: cross_entropy(True), lambda: mixture(predict_chunked, True))
            for size in CHUNKS[1:]
        ]
    product = 2 * sizes.depths * targets.numel() * embedding.numel()
    print(
        f"{sizes.depths} depths, {targets.numel():,} positions, width {width}, {sizes.vocabulary:,} rows, "
        f"{name_of(dtype)}; forward and backward pass\n"
    )
    traffic = 3 * (embedding.nbytes + sum(h.nbytes for h in hidden))
    print(
        "| way | chunk, MiB | cross entropy, ms: forward | backward | TFLOP/s | GB/s | mixture of AMOS, ms | memory, MiB |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    failed, budget = [], SECONDS[device.type]
    milliseconds: dict[str, dict[int, float]] = {}  # of the mixture, by way and chunk
    for name, size, alone, mixed in ways:
        head = f"| {name} | {size or ''} | "
        try:
            with chunk_bytes(name, size, device):
                forward = sustained_seconds(alone, device, budget)
                both = sustained_seconds(lambda a=alone: torch.autograd.grad(a(), leaves), device, budget)
                whole = sustained_seconds(lambda m=mixed: torch.autograd.grad(m(), all_leaves), device, budget)
                peak = step_peak(lambda m=mixed: torch.autograd.grad(m(), all_leaves), device)
        except Exception as error:  # continue with the other implementations
            failed.append(name)
            print(f"{head}FAILED: {first_line(error)} | | | | | |", flush=True)
            continue
        if size is not None:
            milliseconds.setdefault(name, {})[size] = whole * 1e3
        rates = f"{3 * product / both / 1e12:.1f} | {traffic / both / 1e9:.0f}"
        times = f"{forward * 1e3:.2f} | {(both - forward) * 1e3:.2f} | {rates} | {whole * 1e3:.2f}"
        print(f"{head}{times} | {peak / MIB:.0f} |", flush=True)
    print(f"\nDecided: {'; '.join(fastest_chunk(name, own, device) for name, own in milliseconds.items())}")
    return failed


def fastest_chunk(name: str, milliseconds: dict[int, float], device: torch.device) -> str:
    """Return the size of chunk with the least time, beside the one that the package uses."""
    now = logit_chunks.CHUNK_BYTES.get(device.type, logit_chunks.CHUNK_BYTES_ELSEWHERE)
    if name == "ours in Triton":
        from amos_fairseq.functional.cuda import output_layer as in_triton

        now = in_triton.CHUNK_BYTES
    best = min(milliseconds, key=milliseconds.__getitem__)
    return f"output layer {name}: fastest chunk {best} MiB, {milliseconds[best]:.2f} ms (now {now // MIB} MiB)"


def chunk_bytes(name: str, size: int | None, device: torch.device) -> mock._patch:
    """Change the size of the chunks, in MiB, in a context; None changes nothing."""
    if name == "ours in Triton":
        from amos_fairseq.functional.cuda import output_layer as in_triton

        return mock.patch.object(in_triton, "CHUNK_BYTES", size * MIB)
    return mock.patch.dict(logit_chunks.CHUNK_BYTES, {device.type: size * MIB} if size else {})


@report_user_errors()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("attention", "output_layer"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    measure = {"attention": print_attention, "output_layer": print_output_layer}[arguments.what]
    failed = measure(sizes_on(device), device)
    if failed:
        raise UserError(f"backends that failed: {', '.join(failed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

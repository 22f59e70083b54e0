"""Masked positions through index tensors, and packed sequences, against loops over sequences and slots."""

import itertools
import math
from typing import Any

import pytest
import torch
from small_models import build_encoder, deberta_config, encoder_config, modern_config
from torch import Tensor

from amos_fairseq.functional.attention import PackedKeys
from amos_fairseq.functional.positions import add_at_positions, gather_positions, pack_lengths, replace_positions
from amos_fairseq.modules import modern_encoder
from amos_fairseq.modules.encoder import TransformerEncoder

# Two sequences, three slots; the second sequence has one masked position and two padded slots.
POSITIONS = torch.tensor([[1, 2, 5], [4, 0, 0]])
WEIGHTS = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
SLOTS = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.fixture
def states() -> torch.Tensor:
    return torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)


def test_gather_positions(states):
    gathered = gather_positions(states, POSITIONS)
    assert gathered.shape == (2, 3, 3)
    for b, m in SLOTS:
        assert torch.equal(gathered[b, m], states[b, POSITIONS[b, m]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.bool])
def test_replace_changes_masked_positions_and_no_padded_slot(dtype):
    tokens, values = torch.arange(12).view(2, 6), torch.full((2, 3), 99)
    replaced = replace_positions(tokens, POSITIONS, values, WEIGHTS.to(dtype))
    assert replaced.tolist() == [[0, 99, 99, 3, 4, 99], [6, 7, 8, 9, 99, 11]]
    assert torch.equal(tokens, torch.arange(12).view(2, 6))


def test_add_values_and_their_gradients(states):
    values = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weights = torch.tensor([[1.0, 0.5, 1.0], [1.0, 0.0, 0.0]])
    total = add_at_positions(states, POSITIONS, values, weights)
    expected = states.detach().clone()
    for b, m in SLOTS:
        expected[b, POSITIONS[b, m]] += weights[b, m] * values[b, m].detach()
    assert torch.allclose(total, expected, atol=1e-6)

    upstream = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(2))
    total.backward(upstream)
    assert torch.equal(states.grad, upstream)
    for b, m in SLOTS:
        assert torch.allclose(values.grad[b, m], weights[b, m] * upstream[b, POSITIONS[b, m]])


CPU = torch.device("cpu")
LENGTHS = [3, 7, 1, 5]
# Sums over the same numbers in another order, in float64.
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def test_indices_by_hand() -> None:
    packing = pack_lengths([2, 3, 1], (3, 4), CPU)
    assert packing.slots.tolist() == [0, 1, 4, 5, 6, 8]
    assert packing.starts.tolist() == [0, 2, 5, 6]
    assert packing.starts.dtype == torch.int32
    assert packing.positions().tolist() == [0, 1, 0, 1, 2, 0]
    assert (packing.shape, packing.longest) == ((3, 4), 3)
    assert packing.padding_mask().long().tolist() == [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1]]
    padded = torch.arange(24.0).view(3, 4, 2)
    packed = packing.pack(padded)
    assert packed[0, :, 0].tolist() == [0, 2, 8, 10, 12, 16]
    assert packing.unpack(packed)[..., 0].tolist() == [[0, 2, 0, 0], [8, 10, 12, 0], [16, 0, 0, 0]]


def test_full_batches_are_not_packed() -> None:
    assert pack_lengths([4, 4], (2, 4), CPU) is None


@pytest.mark.parametrize("lengths", [[0, 4], [5, 4], [4], [4, 4, 4]], ids=str)
def test_lengths_that_do_not_fit_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="2 lengths from 1 to 4 expected"):
        pack_lengths(lengths, (2, 4), CPU)
    module = build_encoder(modern_config())
    with pytest.raises(ValueError, match="give lengths or last_positions, not both"):
        module(torch.zeros(2, 4, 8).double(), lengths=[4, 3], last_positions=torch.zeros(2, 1, dtype=torch.int64))


def results(module: TransformerEncoder, lengths: list[int], *, is_packed: bool, **arguments: Any) -> list[Tensor]:
    """States of the text of all layers, their sums, and the gradients of the input and of all weights."""
    length = max(lengths)
    generator = torch.Generator().manual_seed(1)
    shape = (len(lengths), length, module.shape.width)
    embeddings = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    is_text = torch.arange(length) < torch.tensor(lengths)[:, None]
    module.zero_grad()
    given = {"lengths": lengths} if is_packed else {"padding_mask": ~is_text}
    outputs = module(embeddings, with_input=True, **given, **arguments)
    states = torch.stack(list(outputs))
    assert states.shape == (len(module.layers) + 1, *shape)
    assert not is_packed or not states[:, ~is_text].any()
    (states[:, is_text] ** 3).sum().backward()
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return [states[:, is_text].detach(), embeddings.grad[is_text], *gradients]


CONFIGURATIONS = {
    "t5": encoder_config(),
    "amos": encoder_config(position_scheme="amos"),
    "absolute positions, token types": encoder_config(position_scheme="none", num_token_types=2),
    "projected": encoder_config(embedding_width=8, width=8, activation_checkpointing=True),
    "past": encoder_config(attends_to="past"),
    "deberta": deberta_config(activation_checkpointing=True),
    "deberta, mask decoder": deberta_config(has_mask_decoder=True),
    "modern": modern_config(local_attention=4),
    "modern, checkpointed": modern_config(local_attention=4, activation_checkpointing=True),
    "modern, future": modern_config(local_attention=4, attends_to="future"),
    "modern, no local layer": modern_config(global_every=1),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_packed_layers_compute_what_padded_ones_do(name: str) -> None:
    module = build_encoder(CONFIGURATIONS[name])
    expected, got = (results(module, LENGTHS, is_packed=is_packed) for is_packed in (False, True))
    assert len(got) == len(expected) > 10
    torch.testing.assert_close(got, expected, **EXACT)


def test_token_types_are_packed_with_their_tokens() -> None:
    module, types = (
        build_encoder(CONFIGURATIONS["absolute positions, token types"]),
        (torch.arange(28) % 3 > 0).long().view(4, 7),
    )
    padded, packed = (results(module, LENGTHS, is_packed=packed, token_types=types) for packed in (False, True))
    torch.testing.assert_close(packed, padded, **EXACT)


def test_local_attention_in_blocks() -> None:
    """40 tokens are 20 times the reach, beyond the length from which blocks are used."""
    module = build_encoder(modern_config(local_attention=4))
    expected, got = (results(module, [40, 13], is_packed=is_packed) for is_packed in (False, True))
    torch.testing.assert_close(got, expected, **EXACT)


def naive_varlen(heads: Tensor, keys: PackedKeys) -> Tensor:
    """The definition of PyTorch's ``varlen_attn``: one sequence after another, and one query after another."""
    outputs = []
    starts, (before, after) = keys.starts.tolist(), keys.window
    for start, end in itertools.pairwise(starts):
        assert end - start <= keys.longest
        for query in range(start, end):
            first = start if before < 0 else max(start, query - before)
            last = end if after < 0 else min(end, query + after + 1)
            key, value = heads[first:last, 1], heads[first:last, 2]  # [K,H,d]
            scores = torch.einsum("hd,khd->hk", heads[query, 0], key) / math.sqrt(heads.size(-1))
            outputs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), value))
    return torch.stack(outputs)


@pytest.mark.parametrize("side", ["all", "past", "future"])
@pytest.mark.parametrize("lengths", [LENGTHS, [7, 7]], ids=["packed", "full"])
def test_attention_that_takes_packed_sequences(side: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, with a definition in the place of the kernel: rotations, starts and windows."""
    module = build_encoder(modern_config(local_attention=4, attends_to=side))
    expected = results(module, lengths, is_packed=False)
    calls = []

    def varlen(heads: Tensor, keys: PackedKeys) -> Tensor:
        calls.append((keys.window, keys.longest))
        return naive_varlen(heads, keys)

    def choose(*arguments: Any, by_distance: bool = False, **others: Any) -> str:
        return "varlen" if by_distance else "reference"

    monkeypatch.setattr(modern_encoder, "varlen_attention", varlen)
    monkeypatch.setattr(modern_encoder, "choose_backend", choose)
    got = results(module, lengths, is_packed=True)
    torch.testing.assert_close(got, expected, **EXACT)
    everywhere = {"all": (-1, -1), "past": (-1, 0), "future": (0, -1)}[side]
    nearby = {"all": (2, 2), "past": (2, 0), "future": (0, 2)}[side]
    all_layers = [(everywhere, 7), (nearby, 7), (nearby, 7), (everywhere, 7)]
    is_masked = lengths == LENGTHS or side != "all"  # global layers of full blocks have no mask, and faster kernels
    assert calls == (all_layers if is_masked else all_layers[1:3])


def test_attention_dropout_pads_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for packed sequences has no dropout."""
    asked = []
    monkeypatch.setattr(modern_encoder, "choose_backend", lambda *_, **others: asked.append(others) or "cpu")
    module = build_encoder(modern_config(attention_dropout=0.1))
    for is_training in (True, False):
        module.train(is_training)
        results(module, LENGTHS, is_packed=True)
    assert {each["dropout"] for each in asked[: len(asked) // 2]} == {0.1}
    assert {each["dropout"] for each in asked[len(asked) // 2 :]} == {0.0}


def test_the_reference_implementation_is_padded() -> None:
    module, lengths = build_encoder(modern_config(kernels="reference")), [3, 2]
    embeddings, mask = torch.rand(2, 3, 8).double(), torch.arange(3) >= torch.tensor([[3], [2]])
    outputs = module(embeddings, lengths=lengths)
    assert outputs.packing is None
    assert torch.equal(outputs[-1], module(embeddings, mask)[-1])

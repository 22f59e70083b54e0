"""ModernBERT's encoder against Hugging Face's ModernBertModel, dense masks, complex numbers, and its own reference."""

import math

import pytest
import torch
from small_models import build_encoder, modern_config
from torch import Tensor
from transformers import ModernBertConfig, ModernBertModel

from amos_fairseq.functional.attention import (
    AttentionBias,
    block_mask,
    cpu_attention,
    masked_pairs,
    reference_attention,
    runs_in_blocks,
    window_attention,
)
from amos_fairseq.functional.positions import rotate_queries_and_keys, rotation
from amos_fairseq.hugging_face.weights import Head, to_hugging_face
from amos_fairseq.models.electric import TwoTower
from amos_fairseq.modules.encoder import initialize, share_bottom, with_layers
from amos_fairseq.modules.modern_encoder import CUTOFF, ModernBertEncoder

CPU = torch.device("cpu")
# The lengths of the window's edges (64 on each side), of one block, and of several.
LENGTHS = (1, 7, 64, 65, 66, 128, 129, 300, 600)


def random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def hugging_face(module: ModernBertEncoder) -> ModernBertModel:
    """The same weights in float64. Hugging Face rotates in float32 even then."""
    shape = module.shape
    config = ModernBertConfig(
        vocab_size=8,
        hidden_size=shape.width,
        intermediate_size=shape.ffn_width,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        local_attention=shape.local_attention,
        norm_eps=shape.layer_norm_eps,
        pad_token_id=1,
        attn_implementation="sdpa",
    )
    theirs = ModernBertModel(config).double().eval()
    theirs.load_state_dict(by_their_names(module.state_dict(), theirs.embeddings.tok_embeddings.weight.detach()))
    return theirs


def by_their_names(tensors: dict[str, Tensor], embedding: Tensor) -> dict[str, Tensor]:
    """``amos export`` names the tensors of an encoder and the token embeddings, which it does not have here."""
    tensors = {f"encoder.{name}": tensor.clone() for name, tensor in tensors.items()}
    return to_hugging_face("modernbert", Head.NONE, tensors | {"embed_tokens.weight": embedding})


def both(module: ModernBertEncoder, length: int, padded: int) -> tuple[list[Tensor], list[Tensor]]:
    """Last states and all gradients of both, for a whole sequence and one whose last tokens are padding."""
    real = torch.ones(2, length, dtype=torch.bool)
    real[1, length - padded :] = padded == 0
    found = []
    theirs = hugging_face(module)
    for network in (module, theirs):
        embeddings = random(2, length, module.shape.width).requires_grad_()
        if network is module:
            states = module(embeddings, None if real.all() else ~real)[-1]
        else:
            states = theirs(inputs_embeds=embeddings, attention_mask=real.long()).last_hidden_state
        (states[real] ** 3).sum().backward()
        found.append([states[real].detach(), embeddings.grad])
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    ours = by_their_names({name: parameter.grad for name, parameter in module.named_parameters()}, torch.zeros(8))
    assert len(expected) == len(ours) - 1
    return found[0] + [ours[name] for name in expected], found[1] + list(expected.values())


@pytest.mark.parametrize("length", LENGTHS)
def test_values_and_gradients_equal_hugging_faces(length: int) -> None:
    """Relative to the largest of each tensor: the float32 angles and rotations of Hugging Face differ by 1e-7 each."""
    for padded in {0, min(3, length - 1), length // 2}:
        for ours, theirs in zip(*both(build_encoder(modern_config()), length, padded), strict=True):
            assert (ours - theirs).abs().max() <= 3e-6 * theirs.abs().max()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("has_mask", [False, True])
def test_the_cpu_kernel_rotates_as_the_reference(has_mask: bool, dropout: float) -> None:
    """Float64; with dropout the rotated heads go through the same kernel without a rotation, under the same seed."""
    by = rotation(9, 4, 100.0, CPU)
    fixed = random(2, 1, 1, 9) if has_mask else None
    found = []
    for way in ("inside", "before"):
        torch.manual_seed(3)
        heads = random(2, 9, 3, 2, 4).requires_grad_()
        if way == "inside":
            out = cpu_attention(heads, None, fixed, dropout, by)
        elif dropout:
            out = cpu_attention(rotate_queries_and_keys(heads, by), None, fixed, dropout)
        else:
            out = reference_attention(heads, AttentionBias(fixed=fixed), 0.0, by)
        out.backward(random(2, 9, 2, 4, seed=2))
        found.append([out.detach(), heads.grad])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("side", ["all", "past", "future"])
@pytest.mark.parametrize("length", [40, 41, 57])
def test_blocks_equal_one_product_of_all_pairs(length: int, side: str) -> None:
    """Values and gradients in float64, a window of 5 tokens on each side, padding in the second sequence."""
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[1, length - 13 :] = True
    for mask in (None, padding):
        real = torch.ones(2, length, dtype=torch.bool) if mask is None else ~mask
        found = []
        for way in ("blocks", "all pairs"):
            heads = random(2, length, 3, 2, 4).requires_grad_()
            if way == "blocks":
                out = window_attention(heads, block_mask(length, 5, mask, side, 2, like=heads), 0.0)
            else:
                excluded = masked_pairs(length, mask, side, 5, device=CPU)
                out = reference_attention(heads, AttentionBias(fixed=excluded.double() * -30_000), 0.0)
            (out[real] ** 3).sum().backward()
            found.append([out[real].detach(), heads.grad])
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_blocks_compute_fewer_scores_from_some_length_on() -> None:
    assert not runs_in_blocks(511, 64, CPU, torch.float32)
    assert runs_in_blocks(512, 64, CPU, torch.float32)
    assert not runs_in_blocks(1023, 64, CPU, torch.bfloat16)
    assert runs_in_blocks(1024, 64, CPU, torch.bfloat16)
    assert runs_in_blocks(512, 64, torch.device("cuda"), torch.bfloat16)
    assert not runs_in_blocks(512, 0, CPU, torch.float32)
    assert block_mask(512, 64, None, "all", 3, like=random(1)).shape == (24, 1, 64, 192)


def test_heads_read_sums_through_the_last_layer_norm() -> None:
    module, embeddings = build_encoder(modern_config()), random(2, 6, 8)
    outputs = module(embeddings, with_input=True)
    assert len(outputs) == 5
    normed = torch.nn.functional.layer_norm(outputs.sums[2], (8,), module.final_norm.weight, None, 1e-5)
    torch.testing.assert_close(outputs[2], normed)
    view = with_layers(module, module.layers[:2])  # layer 2 of all is the last of the first two
    torch.testing.assert_close(view(embeddings)[-1], outputs[2])


@pytest.mark.parametrize("length", [9, 520])
@torch.no_grad()
def test_two_towers_see_one_side_each(length: int) -> None:
    """A change of one token, seen from the states of all others: entry t depends on all tokens but t."""
    towers = TwoTower(modern_config(embedding_width=6))
    for parameter in towers.parameters():
        parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    towers.double()
    embeddings = random(1, length, 6)
    changed = embeddings.clone()
    changed[0, 5] += 1.0
    before, after = towers(embeddings), towers(changed)
    assert torch.equal(before[0, 5], after[0, 5])
    moved = (before != after).any(-1)[0].nonzero().flatten().tolist()
    assert {4, 6} <= set(moved)
    past, future = (before != after)[0].chunk(2, dim=-1)
    assert past.any(-1).nonzero().min() == 6
    assert future.any(-1).nonzero().max() == 4


def test_initial_weights_are_truncated_and_smaller_where_layers_add() -> None:
    """Standard deviation of N(0, s) cut at 2 s: 0.880 s (integral). Of 6,144 values it is within 4 %, 4.4 sigma.

    A second encoder of two layers uses them as its own, as a generator of TEAMS does: they keep the depth of their owner.
    """
    module = modern_config(width=64, ffn_width=96, num_layers=4, num_heads=2).build()
    other = modern_config(width=64, ffn_width=96, num_layers=2, num_heads=2).build()
    share_bottom(other, module, 2)
    branch = module.new_layer(4)
    torch.manual_seed(0)
    initialize(torch.nn.ModuleList([module, other, branch]), 0.02, 0.05)
    for layer in (*module.layers, branch):
        into, out = layer.ffn_in.weight.detach(), layer.ffn_out.weight.detach()
        assert into.abs().max() <= CUTOFF * 0.05
        assert math.isclose(into.std().item(), 0.880 * 0.05, rel_tol=0.04)
        assert math.isclose(out.std().item(), 0.880 * 0.05 / math.sqrt(8), rel_tol=0.04)
    assert (module.final_norm.weight == 1).all()

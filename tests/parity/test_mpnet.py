"""The encoder against Hugging Face: ``MPNetModel`` with scheme t5, ``BertModel`` without relative positions.

Tolerance: both compute in float32 with the same formulas in another order; 1e-5 is about fifty roundings of values near 1.
"""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, MPNetConfig, MPNetModel

from amos_fairseq.modules.encoder import TransformerConfig, TransformerEncoder

TOLERANCE = 1e-5
WIDTH, HEADS, LAYERS, FFN, VOCABULARY, PAD = 24, 3, 3, 40, 50, 1
LENGTHS = (150, 90, 7)  # past the maximum distance of 128, and two padded sequences
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": FFN,
    "layer_norm_eps": 1e-5,
    "pad_token_id": PAD,
}


def randomize(model: nn.Module) -> nn.Module:
    """Random values everywhere, biases and LayerNorms too; large ones, so that attention is far from uniform."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            near_one = "LayerNorm.weight" in name
            parameter.copy_(torch.randn_like(parameter) * 0.3 + near_one)
    return model.eval()


def our_encoder(scheme: str) -> TransformerEncoder:
    shape = TransformerConfig(
        num_layers=LAYERS, width=WIDTH, ffn_width=FFN, num_heads=HEADS, max_positions=200,
        dropout=0.1, attention_dropout=0.1, activation_dropout=0.0, layer_norm_eps=1e-5,
        position_scheme=scheme, position_buckets=32, position_max_distance=128,
    )  # fmt: skip
    return TransformerEncoder(shape).eval()


def copy_linear(ours: nn.Linear, *theirs: nn.Linear) -> None:
    ours.weight.copy_(torch.cat([linear.weight for linear in theirs]))
    ours.bias.copy_(torch.cat([linear.bias for linear in theirs]))


def copy_layer(
    ours: nn.Module, query_key_value: list, output: nn.Linear, norm: nn.LayerNorm, theirs: nn.Module
) -> None:
    copy_linear(ours.attention.query_key_value, *query_key_value)
    copy_linear(ours.attention.output, output)
    copy_linear(ours.attention_norm, norm)
    copy_linear(ours.ffn_in, theirs.intermediate.dense)
    copy_linear(ours.ffn_out, theirs.output.dense)
    copy_linear(ours.ffn_norm, theirs.output.LayerNorm)


@pytest.fixture
def tokens() -> torch.Tensor:
    tokens = torch.full((len(LENGTHS), max(LENGTHS)), PAD)
    for row, length in enumerate(LENGTHS):
        tokens[row, :length] = torch.randint(4, VOCABULARY, (length,), generator=torch.Generator().manual_seed(row))
    return tokens


def assert_equal_outside_padding(ours: list[torch.Tensor], theirs: tuple, tokens: torch.Tensor) -> None:
    real = tokens.ne(PAD)
    for depth, (a, b) in enumerate(zip(ours, theirs[1:], strict=True), start=1):
        assert (a[real] - b[real]).abs().max() < TOLERANCE * b[real].abs().max(), f"layer {depth}"


@torch.no_grad()
def test_encoder_with_t5_positions_is_mpnet(tokens):
    theirs = randomize(MPNetModel(MPNetConfig(**SIZES, max_position_embeddings=202), add_pooling_layer=False))
    ours = our_encoder("t5")
    embeddings = theirs.embeddings
    ours.embed_positions.weight.copy_(embeddings.position_embeddings.weight[2:])  # theirs count from padding_idx + 1
    copy_linear(ours.embedding_norm, embeddings.LayerNorm)
    ours.relative_position.table.weight.copy_(theirs.encoder.relative_attention_bias.weight)
    for layer, other in zip(ours.layers, theirs.encoder.layer, strict=True):
        attention = other.attention.attn
        copy_layer(layer, [attention.q, attention.k, attention.v], attention.o, other.attention.LayerNorm, other)
    expected = theirs(tokens, attention_mask=tokens.ne(PAD).long(), output_hidden_states=True).hidden_states
    assert_equal_outside_padding(ours(embeddings.word_embeddings(tokens), tokens.eq(PAD)), expected, tokens)


@torch.no_grad()
def test_encoder_without_relative_positions_is_bert(tokens):
    theirs = randomize(BertModel(BertConfig(**SIZES, max_position_embeddings=200), add_pooling_layer=False))
    ours = our_encoder("none")
    embeddings = theirs.embeddings
    embeddings.token_type_embeddings.weight.zero_()
    ours.embed_positions.weight.copy_(embeddings.position_embeddings.weight)
    copy_linear(ours.embedding_norm, embeddings.LayerNorm)
    for layer, other in zip(ours.layers, theirs.encoder.layer, strict=True):
        attention = other.attention.self
        projections = [attention.query, attention.key, attention.value]
        copy_layer(layer, projections, other.attention.output.dense, other.attention.output.LayerNorm, other)
    expected = theirs(tokens, attention_mask=tokens.ne(PAD).long(), output_hidden_states=True).hidden_states
    assert_equal_outside_padding(ours(embeddings.word_embeddings(tokens), tokens.eq(PAD)), expected, tokens)

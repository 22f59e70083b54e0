"""A model small enough for naive loops, and batches as the task makes them."""

import math
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary

from amos_fairseq.criterions.amos import AmosCriterion
from amos_fairseq.models.amos import AmosConfig, AmosModel

NUM_WORDS = 40
TOKENS = 12
MASK_PROB = 0.25

SETTINGS = {
    "encoder_layers": 2,
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 24,
    "encoder_attention_heads": 2,
    "max_positions": 20,
    "generator_depths": "1,2,4",
    # Distances up to 11 reach the logarithmic buckets.
    "relative_position_buckets": 8,
    "relative_position_max_distance": 9,
    # Large initial values: every path then carries a gradient that is far from rounding errors.
    "init_std": 0.3,
    "linear_init_std": 0.3,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "max_update": 30,
}


def small_dictionary(num_words: int = NUM_WORDS) -> Dictionary:
    """``<s> <pad> </s> <unk>``, the words from id 4 on, ``<mask>`` last."""
    dictionary = Dictionary()
    for word in range(num_words):
        dictionary.add_symbol(f"word{word}")
    dictionary.add_symbol("<mask>")
    return dictionary


def small_task(num_words: int = NUM_WORDS, tokens: int = TOKENS, mask_prob: float = MASK_PROB) -> SimpleNamespace:
    """What models and criterions ask of a task."""
    dictionary = small_dictionary(num_words)
    masked_share = math.ceil(mask_prob * tokens) / tokens
    return SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary, masked_share=masked_share)


def small_model(seed: int = 0, **settings) -> AmosModel:
    """In training mode, no dropout unless asked for; LayerNorms, biases and v are random as well."""
    torch.manual_seed(seed)
    model = AmosModel.build_model(AmosConfig(**(SETTINGS | settings)), small_task())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.train()


def small_criterion(discriminator_loss_weight: float = 50.0, **settings) -> AmosCriterion:
    return AmosCriterion(small_task(**settings), discriminator_loss_weight)


def small_batch(
    lengths: Sequence[int] = (12, 7, 12, 10), seed: int = 0, num_tokens: int = TOKENS, slots: int | None = None
) -> dict:
    """Blocks of ``lengths`` real tokens, padded to ``num_tokens``; a short block leaves padded slots of masked positions."""
    draw = torch.Generator().manual_seed(seed)
    dictionary = small_dictionary()
    pad, mask = dictionary.pad(), dictionary.index("<mask>")
    slots = slots or math.ceil(MASK_PROB * TOKENS)
    tokens = torch.full((len(lengths), num_tokens), pad)
    positions = torch.zeros(len(lengths), slots, dtype=torch.int64)
    weights = torch.zeros(len(lengths), slots)
    for row, length in enumerate(lengths):
        tokens[row, 0] = dictionary.bos()
        tokens[row, 1:length] = torch.randint(4, 4 + NUM_WORDS, (length - 1,), generator=draw)
        count = math.ceil(MASK_PROB * length)
        positions[row, :count] = (1 + torch.randperm(length - 1, generator=draw)[:count]).sort().values
        weights[row, :count] = 1
    masked_tokens = tokens.clone()
    for row, slot in weights.nonzero().tolist():
        masked_tokens[row, positions[row, slot]] = mask
    net_input = {
        "tokens": tokens,
        "masked_tokens": masked_tokens,
        "masked_positions": positions,
        "masked_weights": weights,
    }
    return {
        "id": torch.arange(len(lengths)),
        "nsentences": len(lengths),
        "ntokens": sum(lengths),
        "num_masked": int(weights.sum()),
        "first_id": 0,
        "net_input": net_input,
    }


def gumbel(*shape: int, seed: int = 0) -> torch.Tensor:
    """Gumbel(0, 1) noise by the inverse of its distribution function, float32 values."""
    uniform = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return -(-uniform.clamp(1e-12, 1 - 1e-12).log()).log().float()

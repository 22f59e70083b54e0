"""ModernBERT's encoder (Warner et al., 2024, "Smarter, Better, Faster, Longer", section 2.1).

LayerNorm before each block, rotary positions, gated feed-forward networks, no biases, local attention in two of three layers.

Shapes: B sequences, T tokens, M selected positions, H heads, D width of the encoder, E width of the token embeddings.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from amos_fairseq.functional.attention import (
    NO_BIAS,
    AttentionBias,
    PackedKeys,
    block_mask,
    choose_backend,
    fast_attention,
    masked_pairs,
    prepare_bias,
    reference_attention,
    runs_in_blocks,
    scores_of_masked_pairs,
    varlen_attention,
    window_attention,
    window_of,
)
from amos_fairseq.functional.positions import Packing, Rotation, gather_positions, rotate_queries_and_keys, rotation
from amos_fairseq.modules.encoder import TransformerConfig, TransformerEncoder, TransformerLayer, make_dropout

# No initial value is beyond this number of standard deviations (initializer_cutoff_factor of the released models).
CUTOFF = 2.0


@dataclass(frozen=True, kw_only=True)
class ModernBertEncoderConfig(TransformerConfig):
    """Sizes and settings of ``ModernBertEncoder``; source of the defaults: section 2.1."""

    global_every: int = 3  # the layers 1, 1 + n, 1 + 2 n, ... attend to all tokens, the others to those near them
    local_attention: int = 128  # window of a local layer, the token itself not counted: half of it on each side
    global_theta: float = 160_000.0  # base of the rotary angles in global layers
    local_theta: float = 10_000.0  # the same in local layers

    def build(self) -> "ModernBertEncoder":
        return ModernBertEncoder(self)

    def is_global(self, number: int) -> bool:
        """Return whether the layer ``number``, counted from 1, attends to all tokens."""
        return (number - 1) % self.global_every == 0


class LayerContext(NamedTuple):
    """What the attention of all global layers, or of all local ones, needs beside its input."""

    rotation: Rotation
    bias: AttentionBias = NO_BIAS
    # Of block_mask(), where attention runs in blocks.
    blocks: Tensor | None = None
    # Where varlen_attention() runs; rotation then has the angles of all N tokens.
    packed_keys: PackedKeys | None = None


class ModernContext(NamedTuple):
    """Of global and of local layers; ``locally`` is None if there is no local layer."""

    globally: LayerContext
    locally: LayerContext | None


class RotaryAttention(nn.Module):
    """Multi-head self-attention with rotated queries and keys, without biases."""

    def __init__(self, shape: ModernBertEncoderConfig, is_global: bool):
        super().__init__()
        self.num_heads = shape.num_heads
        self.is_global = is_global
        self.dropout = shape.attention_dropout
        self.attend = reference_attention if shape.kernels == "reference" else fast_attention
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.output = nn.Linear(shape.width, shape.width, bias=False)

    def forward(
        self, states: Tensor, context: ModernContext, positions: Tensor | None = None, packing: Packing | None = None
    ) -> Tensor:
        """Compute attention: [B,T,D] -> [B,T,D], or [B,M,D] at ``positions`` [B,M] int64; packed, [1,N,D] -> [1,N,D]."""
        heads = self.query_key_value(states).unflatten(-1, (3, self.num_heads, -1))  # [B,T,3,H,d]
        inputs = context.globally if self.is_global else context.locally
        if packing is None or inputs.packed_keys is not None:
            attended = self._attend(heads, inputs)
        else:
            attended = packing.pack(self._attend(packing.unpack(heads), inputs))
        attended = attended.flatten(2)
        return self.output(attended if positions is None else gather_positions(attended, positions))

    def _attend(self, heads: Tensor, inputs: LayerContext) -> Tensor:
        """[B,T,3,H,d] -> [B,T,H,d]; with ``inputs.packed_keys`` also [1,N,3,H,d] -> [1,N,H,d]."""
        dropout = self.dropout if self.training else 0.0
        if inputs.packed_keys is not None:
            rotated = rotate_queries_and_keys(heads, inputs.rotation)
            return varlen_attention(rotated.flatten(0, 1), inputs.packed_keys).unflatten(0, heads.shape[:2])
        if inputs.blocks is not None:
            return window_attention(rotate_queries_and_keys(heads, inputs.rotation), inputs.blocks, dropout)
        return self.attend(heads, inputs.bias, dropout, inputs.rotation)


class ModernBertLayer(TransformerLayer):
    """x + attention(LayerNorm(x)), then x + W_o geglu(LayerNorm(x)).

    Args:
        shape: of the encoder.
        number: of the layer, counted from 1. The first has no LayerNorm before its attention: the embeddings have just been
            normalized (unless a projection follows).
    """

    def __init__(self, shape: ModernBertEncoderConfig, number: int):
        super().__init__()
        self.num_layers = shape.num_layers
        has_normed_input = number == 1 and not shape.is_projected
        self.attention_norm = nn.Identity() if has_normed_input else layer_norm(shape.width, shape)
        self.attention = RotaryAttention(shape, shape.is_global(number))
        self.ffn_norm = layer_norm(shape.width, shape)
        self.ffn_in = nn.Linear(shape.width, 2 * shape.ffn_width, bias=False)
        self.ffn_out = nn.Linear(shape.ffn_width, shape.width, bias=False)
        self.activation_dropout = make_dropout(shape.activation_dropout, shape.kernels)
        self.dropout = make_dropout(shape.dropout, shape.kernels)

    def initialize(self, std: float) -> None:
        """Set the initial weights of linear layers as the authors' code does for its base model.

        N(0, std) without values beyond 2 std; std is divided by sqrt(2 L) where a linear layer adds to the sum, which happens
        2 L times (``full_megatron`` of https://github.com/AnswerDotAI/ModernBERT).
        """
        for layer in (self.attention.query_key_value, self.ffn_in):
            truncated_normal_(layer.weight, std)
        for layer in (self.attention.output, self.ffn_out):
            truncated_normal_(layer.weight, std / math.sqrt(2 * self.num_layers))

    def forward(
        self, states: Tensor, context: ModernContext, positions: Tensor | None = None, packing: Packing | None = None
    ) -> Tensor:
        """[B,T,D] -> [B,T,D], or [B,M,D] at ``positions`` [B,M] int64; arguments as for ``RotaryAttention``."""
        attended = self.attention(self.attention_norm(states), context, positions, packing)
        states = states if positions is None else gather_positions(states, positions)
        states = states + self.dropout(attended)
        expanded = self.activation_dropout(geglu(self.ffn_norm(states), self.ffn_in.weight))
        return states + self.dropout(self.ffn_out(expanded))


def layer_norm(width: int, shape: ModernBertEncoderConfig) -> nn.LayerNorm:
    return nn.LayerNorm(width, shape.layer_norm_eps, bias=False)


def geglu(states: Tensor, weight: Tensor) -> Tensor:
    """Compute gelu(W_a x) * (W_b x) with the exact gelu (Shazeer, 2020, "GLU Variants Improve Transformer", Eq. 6).

    ``states`` x [...,D], ``weight`` [2F,D], W_a above W_b -> [...,F].
    """
    # On one core of an AMD EPYC (25 November 2026, torch 2.13, bfloat16, 4,096 tokens, D = 128, F = 344) a feed-forward network
    # takes 17 milliseconds forward and backward with two products, 29 with one: the halves of one product are not contiguous,
    # and oneDNN's gelu needs contiguous values. BERT's network with F = 512 and as many weights takes 17.
    if states.device.type == "cpu":
        weight_a, weight_b = weight.chunk(2)
        return gelu(linear(states, weight_a)) * linear(states, weight_b)
    a, b = linear(states, weight).chunk(2, dim=-1)
    return gelu(a) * b


class ModernBertEncoder(TransformerEncoder):
    """Apply LayerNorm and dropout to given token embeddings, then the layers; heads read their sum through a last LayerNorm.

    This is Hugging Face's ``ModernBertModel``. Departure: if E differs from D, as in a generator that is narrower than its
    discriminator, a projection without bias follows the LayerNorm of the embeddings.
    """

    def __init__(self, shape: ModernBertEncoderConfig):
        super().__init__(shape)
        embedding_width = shape.embedding_width or shape.width
        self.embedding_norm = layer_norm(embedding_width, shape)
        self.dropout = make_dropout(shape.dropout, shape.kernels)
        self.embedding_projection = nn.Linear(embedding_width, shape.width, bias=False) if shape.is_projected else None
        self.layers = nn.ModuleList(map(self.new_layer, range(1, shape.num_layers + 1)))
        self.final_norm = layer_norm(shape.width, shape)  # it runs where a head reads a layer

    def new_layer(self, number: int) -> ModernBertLayer:
        return ModernBertLayer(self.shape, number)

    def share_embeddings(self, other: "ModernBertEncoder") -> None:
        self.embedding_norm = other.embedding_norm

    def share_input(self, other: "ModernBertEncoder") -> None:
        self.share_embeddings(other)
        self.embedding_projection = other.embedding_projection

    @property
    def parts_above_embeddings(self) -> list[nn.Module]:
        return [self.layers, self.final_norm]

    def attention_context(
        self, embeddings: Tensor, padding_mask: Tensor | None, packing: Packing | None = None
    ) -> ModernContext:
        """Return rotations and masked pairs of the global layers, and of the local ones if there are any."""
        shape, texts = self.shape, (embeddings, padding_mask, packing)
        has_local = any(not layer.attention.is_global for layer in self.layers)
        return ModernContext(
            self._layer_context(*texts, shape.global_theta, None),
            self._layer_context(*texts, shape.local_theta, shape.local_attention // 2) if has_local else None,
        )

    def _layer_context(
        self, embeddings: Tensor, padding_mask: Tensor | None, packing: Packing | None, theta: float, reach: int | None
    ) -> LayerContext:
        shape, (num_sequences, length), device = self.shape, embeddings.shape[:2], embeddings.device
        head_width, is_reference = shape.width // shape.num_heads, shape.kernels == "reference"
        angles = rotation(length, head_width, theta, device)
        if self._takes_packed(embeddings, padding_mask, packing, reach):
            window = window_of(shape.attends_to, reach)
            if packing is not None:
                angles = Rotation(*(part[packing.positions()] for part in angles))
                return LayerContext(angles, packed_keys=PackedKeys(packing.starts, packing.longest, window))
            starts = torch.arange(0, num_sequences * length + 1, length, dtype=torch.int32, device=device)
            return LayerContext(angles, packed_keys=PackedKeys(starts, length, window))
        if reach is not None and not is_reference and runs_in_blocks(length, reach, device, embeddings.dtype):
            blocks = block_mask(length, reach, padding_mask, shape.attends_to, num_sequences, like=embeddings)
            return LayerContext(angles, blocks=blocks)
        masked = masked_pairs(length, padding_mask, shape.attends_to, reach, device=device)
        bias = AttentionBias(fixed=scores_of_masked_pairs(masked, embeddings.dtype))
        return LayerContext(angles, bias if is_reference else prepare_bias(bias, device, embeddings.dtype))

    def _takes_packed(
        self, embeddings: Tensor, padding_mask: Tensor | None, packing: Packing | None, reach: int | None
    ) -> bool:
        """Return whether ``varlen_attention`` runs: for packed texts, and for full blocks where not all pairs count."""
        shape, length = self.shape, embeddings.size(1)
        is_masked = (reach is not None and reach < length - 1) or shape.attends_to != "all"
        if shape.kernels == "reference" or (packing is None and (padding_mask is not None or not is_masked)):
            return False
        backend = choose_backend(
            embeddings.device,
            embeddings.dtype,
            shape.width // shape.num_heads,
            has_bias=False,
            dropout=shape.attention_dropout if self.training else 0.0,
            by_distance=True,
        )
        return backend == "varlen"


def truncated_normal_(weight: Tensor, std: float) -> None:
    """Fill ``weight`` with N(0, std) given that no value is beyond ``CUTOFF`` standard deviations.

    By the inverse of its distribution function. PyTorch's draws again until all values are inside, which the host waits for.
    """
    share = math.erf(CUTOFF / math.sqrt(2))
    with torch.no_grad():
        weight.uniform_(-share, share).erfinv_().mul_(std * math.sqrt(2)).clamp_(-CUTOFF * std, CUTOFF * std)

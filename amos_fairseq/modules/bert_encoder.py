"""BERT's encoder: post-LayerNorm, learned absolute positions, and relative positions beside them.

Shapes: B sequences, T tokens, M selected positions, H heads, D width of the encoder, E width of the token embeddings.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, pad

from amos_fairseq.functional.attention import (
    NO_BIAS,
    AttentionBias,
    ToeplitzBias,
    choose_backend,
    fast_attention,
    masked_pairs,
    prepare_bias,
    reference_attention,
    scores_of_masked_pairs,
    toeplitz_attention,
)
from amos_fairseq.functional.positions import Packing, gather_positions
from amos_fairseq.functional.relative_position import BUCKETS, toeplitz
from amos_fairseq.modules.encoder import TransformerConfig, TransformerEncoder, TransformerLayer, make_dropout

Bias = AttentionBias | ToeplitzBias


@dataclass(frozen=True, kw_only=True)
class BertEncoderConfig(TransformerConfig):
    """Sizes and settings of ``BertEncoder``."""

    position_scheme: str  # none, t5 or amos: see functional/relative_position.py
    position_buckets: int  # rows of the table
    position_max_distance: int  # distances from here on share a bucket
    num_token_types: int = 0

    def build(self) -> "BertEncoder":
        return BertEncoder(self)

    @property
    def has_learned_bias(self) -> bool:
        """Whether there are relative positions."""
        return self.position_scheme != "none"


class SelfAttention(nn.Module):
    """Multi-head self-attention: softmax(q k^T / sqrt(d) + bias) v, then an output projection.

    Args:
        width: D, a multiple of ``num_heads``.
        num_heads: H.
        dropout: probability of dropping an attention weight in training.
        kernels: ``fast``, ``triton`` or ``reference``; the results are equal up to rounding.
    """

    def __init__(self, width: int, num_heads: int, dropout: float, kernels: str = "fast"):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.attend = reference_attention if kernels == "reference" else fast_attention
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(
        self, states: Tensor, bias: Bias = NO_BIAS, positions: Tensor | None = None, packing: Packing | None = None
    ) -> Tensor:
        """Compute attention: [B,T,D] -> [B,T,D], or [B,M,D] at ``positions`` [B,M] int64; packed, [1,N,D] -> [1,N,D].

        ``bias`` is added to the scores. With a ``ToeplitzBias`` the Triton kernels run, which compute only the given
        positions; the other backends compute all positions and select. The scores of packed states are padded.
        """
        heads = self.query_key_value(states).unflatten(-1, (3, self.num_heads, -1))  # [B,T,3,H,d]
        heads = heads if packing is None else packing.unpack(heads)
        dropout = self.dropout if self.training else 0.0
        if isinstance(bias, ToeplitzBias):
            attended = toeplitz_attention(heads, bias, dropout, positions).flatten(2)
        else:
            attended = self.attend(heads, bias, dropout).flatten(2)
            attended = attended if positions is None else gather_positions(attended, positions)
        return self.output(attended if packing is None else packing.pack(attended))


class BertLayer(TransformerLayer):
    """Attention and feed-forward network, each followed by dropout, residual connection and LayerNorm (post-LayerNorm).

    Args:
        shape: of the encoder.
        attention: None for BERT's; another one is called with the same arguments.
    """

    def __init__(self, shape: TransformerConfig, attention: nn.Module | None = None):
        super().__init__()
        of_bert = (shape.width, shape.num_heads, shape.attention_dropout, shape.kernels)
        self.attention = SelfAttention(*of_bert) if attention is None else attention
        self.attention_norm = nn.LayerNorm(shape.width, shape.layer_norm_eps)
        self.ffn_in = nn.Linear(shape.width, shape.ffn_width)
        self.ffn_out = nn.Linear(shape.ffn_width, shape.width)
        self.ffn_norm = nn.LayerNorm(shape.width, shape.layer_norm_eps)
        self.activation_dropout = make_dropout(shape.activation_dropout, shape.kernels)
        self.dropout = make_dropout(shape.dropout, shape.kernels)

    def forward(
        self, states: Tensor, context: Any, positions: Tensor | None = None, packing: Packing | None = None
    ) -> Tensor:
        """[B,T,D] -> [B,T,D], or [B,M,D]; ``context`` is BERT's bias, the arguments are those of ``SelfAttention``."""
        attended = self.attention(states, context, positions, packing)
        states = states if positions is None else gather_positions(states, positions)
        states = self.attention_norm(states + self.dropout(attended))
        expanded = self.activation_dropout(gelu(self.ffn_in(states)))
        return self.ffn_norm(states + self.dropout(self.ffn_out(expanded)))


class BertEncoder(TransformerEncoder):
    """Add positions and token types to given token embeddings, apply LayerNorm, dropout, a projection to D, and the layers.

    The projection exists only if E differs from D. With scheme ``t5`` this is exactly Hugging Face's ``MPNetModel`` (positions
    count from 0 here), with ``none`` its ``ElectraModel``.
    """

    def __init__(self, shape: BertEncoderConfig):
        super().__init__(shape)
        embedding_width = shape.embedding_width or shape.width
        self.embed_positions = LearnedPositions(shape.max_positions, embedding_width)
        self.embed_token_types = nn.Embedding(shape.num_token_types, embedding_width) if shape.num_token_types else None
        self.embedding_norm = nn.LayerNorm(embedding_width, shape.layer_norm_eps)
        self.dropout = make_dropout(shape.dropout, shape.kernels)
        self.embedding_projection = nn.Linear(embedding_width, shape.width) if shape.is_projected else None
        self.relative_position = RelativePositionBias(shape) if shape.has_learned_bias else None
        self.layers = nn.ModuleList(map(self.new_layer, range(1, shape.num_layers + 1)))

    def new_layer(self, number: int) -> BertLayer:
        return BertLayer(self.shape)

    def share_embeddings(self, other: "BertEncoder") -> None:
        self.embed_positions = other.embed_positions
        self.embed_token_types = other.embed_token_types
        self.embedding_norm = other.embedding_norm

    def share_input(self, other: "BertEncoder") -> None:
        self.share_embeddings(other)
        self.embedding_projection = other.embedding_projection
        self.relative_position = other.relative_position

    @property
    def parts_above_embeddings(self) -> list[nn.Module]:
        return [self.layers, *filter(None, [self.relative_position])]

    def embed(self, embeddings: Tensor, token_types: Tensor | None) -> Tensor:
        embeddings = embeddings + self.embed_positions.rows(embeddings.size(1))
        if self.embed_token_types is not None:
            types = self.embed_token_types.weight
            embeddings = embeddings + (types[0] if token_types is None else types[token_types])
        return super().embed(embeddings, token_types)

    def attention_context(
        self, embeddings: Tensor, padding_mask: Tensor | None, packing: Packing | None = None
    ) -> Bias:
        """Return relative positions and masked pairs in the form that the layers require, of padded sequences.

        Either a value [H,2T-1] for each distance, or [H,T,T] float32 and [B or 1, 1, T or 1, T].
        """
        length, has_bias = embeddings.size(1), self.relative_position is not None
        head_width, with_triton = self.shape.width // self.shape.num_heads, self.shape.kernels == "triton"
        if choose_backend(embeddings.device, embeddings.dtype, head_width, has_bias, with_triton) == "triton":
            values = self.relative_position.values(length) if has_bias else None
            return ToeplitzBias(values, padding_mask, self.shape.attends_to)
        learned = self.relative_position(length) if has_bias else None
        masked = masked_pairs(length, padding_mask, self.shape.attends_to, device=embeddings.device)
        bias = AttentionBias(learned, scores_of_masked_pairs(masked, embeddings.dtype))
        is_reference = self.shape.kernels == "reference"
        return bias if is_reference else prepare_bias(bias, embeddings.device, embeddings.dtype)


def repeated(rows: Tensor, total: int) -> Tensor:
    """Return ``rows`` [N,E] one after another until there are ``total`` (Longformer, Beltagy et al. 2020, section 5)."""
    return rows.repeat(-(-total // len(rows)), 1)[:total]


class LearnedPositions(nn.Embedding):
    """Absolute positions. A run that begins with short sequences trains those of the longer ones to come as copies.

    Attributes:
        period: if above 0, this number of first rows repeats in the whole table. Sequences of this length give all copies of
            a row the same gradient, so they stay equal.
    """

    period = 0

    def rows(self, length: int) -> Tensor:
        """Return the positions of a sequence of T = ``length`` tokens: [T,E]."""
        table, total = self.weight, self.num_embeddings
        if length != self.period or length >= total:
            return table[:length]
        copies = -(-total // length)
        padded = pad(table, (0, 0, 0, copies * length - total)).view(copies, length, -1)
        num_copies = (total - 1 - torch.arange(length, device=table.device)) // length + 1
        return padded.sum(0) / num_copies[:, None]

    @torch.no_grad()
    def repeat_first(self, length: int) -> None:
        """Set all rows to copies of the first ``length`` ones."""
        self.weight.copy_(repeated(self.weight[:length], self.num_embeddings))

    def share(self, length: int) -> None:
        """For sequences of ``length``, train the copies of a row together if the table consists of copies."""
        repeats = torch.equal(self.weight[length:], self.weight[: max(0, self.num_embeddings - length)])
        self.period = length if repeats else 0


class RelativePositionBias(nn.Module):
    """The bias that is added to q.k / sqrt(d) (T5: Raffel et al., 2019; AMOS section 4).

    The table does not depend on the sequence length, so the model accepts longer sequences than in training.

    Raises:
        ValueError: an odd number of buckets, or so few buckets or so small a maximum distance that none is logarithmic.
    """

    def __init__(self, shape: BertEncoderConfig):
        super().__init__()
        scheme, num_buckets, max_distance = shape.position_scheme, shape.position_buckets, shape.position_max_distance
        if num_buckets < 4:
            raise ValueError(f"--relative-position-buckets {num_buckets} is too few: give at least 4, an even number")
        if num_buckets % 2:
            raise ValueError(f"--relative-position-buckets {num_buckets} is odd: half are for each direction")
        largest_exact = num_buckets // 4 + 1 if scheme == "amos" else num_buckets // 4
        if max_distance <= largest_exact:
            problem = f"is too small for {num_buckets} buckets of scheme {scheme}: give more than {largest_exact}"
            raise ValueError(f"--relative-position-max-distance {max_distance} {problem}")
        self.bucket, self.max_distance = BUCKETS[scheme], max_distance
        self.table = nn.Embedding(num_buckets, shape.num_heads)

    def forward(self, length: int) -> Tensor:
        """Return [H, T, T] for T = ``length``, contiguous; entry (h, i, j) belongs to query i and key j."""
        return toeplitz(self.values(length))

    def values(self, length: int) -> Tensor:
        """Return [H, 2T-1] for T = ``length``, contiguous; entry (h, w) belongs to key - query = w - (T-1).

        The result is float32 (float64 for a float64 table), also for a table in 16 bits: the gradient of a row sums
        thousands of entries, and in bfloat16 such a sum is wrong by several percent. It is cast to the dtype of the table
        once, at the end.
        """
        table = self.table.weight
        distance = torch.arange(1 - length, length, device=table.device)
        rows = self.bucket(distance, self.table.num_embeddings, self.max_distance)
        values = embedding(rows, table.to(torch.promote_types(table.dtype, torch.float32)))  # [2T-1, H]
        return values.t().contiguous()

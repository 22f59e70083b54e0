"""DeBERTaV3's encoder (He et al., 2021), and the mask decoder of its generator (DeBERTa: He et al., 2020, section 3.2).

Post-LayerNorm as BERT's, no positions in the input: content and relative positions meet in the scores of attention.

Shapes: B sequences, T tokens, M selected positions, H heads, D width of the encoder, E width of the token embeddings, R rows of
the table of relative positions that T tokens reach.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import linear

from amos_fairseq.functional.attention import disentangled_attention, masked_pairs
from amos_fairseq.functional.positions import Packing, gather_positions
from amos_fairseq.functional.relative_position import deberta_rows
from amos_fairseq.modules.bert_encoder import BertLayer
from amos_fairseq.modules.encoder import TransformerConfig, TransformerEncoder, make_dropout


@dataclass(frozen=True, kw_only=True)
class DebertaEncoderConfig(TransformerConfig):
    """Sizes and settings of the encoder."""

    position_buckets: int = 512  # rows of the table, a multiple of 4: position_buckets of the released models, doubled
    position_max_distance: int = 512  # distances from one less on share a bucket
    has_mask_decoder: bool = False  # of a generator

    def build(self) -> "DebertaEncoder":
        return DebertaEncoder(self)


class DisentangledContext(NamedTuple):
    """What the attention of every layer needs beside its input."""

    table: Tensor  # [R,D], normalized
    rows: Tensor  # [2T-1] int64, the row of each distance of query minus key, the largest first
    masked: Tensor | None  # [B or 1, 1, T or 1, T] bool, True where a query must not attend to a key
    keys: Tensor | None = None  # [B,T,D] or packed, where keys and values are not those of the layer's input


class DisentangledAttention(nn.Module):
    """Multi-head attention by content and relative positions, which have the query and key projections of the content."""

    def __init__(self, shape: DebertaEncoderConfig):
        super().__init__()
        self.num_heads = shape.num_heads
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.output = nn.Linear(shape.width, shape.width)
        self.dropout = make_dropout(shape.attention_dropout, shape.kernels)
        self.table_dropout = make_dropout(shape.dropout, shape.kernels)

    def forward(
        self,
        states: Tensor,
        context: DisentangledContext,
        positions: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Compute attention: [B,T,D] -> [B,T,D], or [B,M,D] at ``positions`` [B,M] int64; packed, [1,N,D] -> [1,N,D]."""
        source = states if context.keys is None else context.keys
        query, key_value = self._project(states, 0, 1), self._project(source, 1, 3)
        if packing is not None:
            query, key_value = packing.unpack(query), packing.unpack(key_value)
        table = self._project(self.table_dropout(context.table), 0, 2)
        attended = disentangled_attention(
            query.squeeze(-3), key_value, table, context.rows, context.masked, self.dropout
        ).flatten(2)
        attended = attended if positions is None else gather_positions(attended, positions)
        return self.output(attended if packing is None else packing.pack(attended))

    def _project(self, states: Tensor, first: int, end: int) -> Tensor:
        """Return projections ``first`` to ``end`` of query (0), key (1) and value (2): [...,D] -> [..., end - first, H, d]."""
        rows = slice(first * states.size(-1), end * states.size(-1))
        projected = linear(states, self.query_key_value.weight[rows], self.query_key_value.bias[rows])
        return projected.unflatten(-1, (end - first, self.num_heads, -1))


class DebertaEncoder(TransformerEncoder):
    """Apply LayerNorm, dropout and a projection to D to given token embeddings, then the layers.

    The projection exists only if E differs from D. Without it, and without a mask decoder, this is Hugging Face's
    ``DebertaV2Model``, with the settings of the released models (``share_att_key``, ``norm_rel_ebd``, no convolution).

    With a mask decoder, the last layer runs twice: the queries are z + h, then its own output, where z are absolute positions
    and h the states below it, which give the keys and values of both. So absolute positions enter just before a token is
    predicted.
    """

    def __init__(self, shape: DebertaEncoderConfig):
        super().__init__(shape)
        rows, max_distance = shape.position_buckets, shape.position_max_distance
        if rows % 4:
            raise ValueError(f"--relative-position-buckets {rows} must be a multiple of 4 with --encoder deberta")
        if max_distance <= rows // 4 + 1:
            problem = f"is too small for {rows} rows: give more than {rows // 4 + 1}"
            raise ValueError(f"--relative-position-max-distance {max_distance} {problem}")
        if shape.has_mask_decoder and shape.num_layers < 2:
            raise ValueError("a mask decoder needs --generator-layers 2 or more: the last one decodes the one below")
        embedding_width = shape.embedding_width or shape.width
        self.embedding_norm = nn.LayerNorm(embedding_width, shape.layer_norm_eps)
        self.dropout = make_dropout(shape.dropout, shape.kernels)
        self.embedding_projection = nn.Linear(embedding_width, shape.width) if shape.is_projected else None
        self.relative_table = nn.Embedding(rows, shape.width)
        self.relative_norm = nn.LayerNorm(shape.width, shape.layer_norm_eps)
        self.layers = nn.ModuleList(map(self.new_layer, range(1, shape.num_layers + 1)))
        self.decoder_positions = nn.Embedding(shape.max_positions, shape.width) if shape.has_mask_decoder else None

    def new_layer(self, number: int) -> BertLayer:
        return BertLayer(self.shape, DisentangledAttention(self.shape))

    def share_embeddings(self, other: "DebertaEncoder") -> None:
        """Share nothing: each network of DeBERTaV3 has a LayerNorm of its own, and the token embeddings are the model's."""

    def share_input(self, other: "DebertaEncoder") -> None:
        self.embedding_norm, self.embedding_projection = other.embedding_norm, other.embedding_projection
        self.relative_table, self.relative_norm = other.relative_table, other.relative_norm

    @property
    def parts_above_embeddings(self) -> list[nn.Module]:
        return [self.layers, self.relative_table, self.relative_norm]

    def attention_context(
        self, embeddings: Tensor, padding_mask: Tensor | None, packing: Packing | None = None
    ) -> DisentangledContext:
        """Return the rows of relative positions that the tokens reach, normalized, and the masked pairs of padded sequences."""
        length, rows, device = embeddings.size(1), self.shape.position_buckets, embeddings.device
        # Where all distances are exact, only their rows are projected.
        reach = length - 1 if length - 1 <= rows // 4 else rows // 2 - 1
        first = rows // 2 - reach
        table = self.relative_norm(self.relative_table.weight[first : rows // 2 + reach + 1])
        of_distances = deberta_rows(length, rows, self.shape.position_max_distance, device) - first
        return DisentangledContext(
            table, of_distances, masked_pairs(length, padding_mask, self.shape.attends_to, device=device)
        )

    def run_last_layer(
        self,
        layer: BertLayer,
        states: Tensor,
        context: DisentangledContext,
        positions: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Call the last layer, twice with a mask decoder."""
        if self.decoder_positions is None:
            return self.run_layer(layer, states, context, positions, packing)
        table = self.decoder_positions.weight
        z = table[: states.size(1)] if packing is None else table[packing.positions()]
        context = context._replace(keys=states)
        decoded = self.run_layer(layer, z + states, context, None, packing)
        return self.run_layer(layer, decoded, context, positions, packing)

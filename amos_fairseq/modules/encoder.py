"""The Transformer encoder of every objective: post-LayerNorm BERT, with relative positions beside absolute ones."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from fairseq.modules import LayerNorm
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

from amos_fairseq.functional.attention import FORBIDDEN, AttentionBias, ToeplitzBias, choose_backend, prepare_bias
from amos_fairseq.functional.positions import gather_positions
from amos_fairseq.modules.attention import SelfAttention
from amos_fairseq.modules.compilation import call_layer, compiled_call
from amos_fairseq.modules.dropout import make_dropout
from amos_fairseq.modules.linear import make_linear
from amos_fairseq.modules.relative_position import RelativePositionBias


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of one encoder; dropouts are probabilities, ``position_scheme`` is none, t5 or amos.

    ``embedding_width`` E is that of the token embeddings, 0 for the encoder's own D; ``num_token_types`` 0 is none.
    ``attends_to`` is all tokens, or those of the ``past`` or the ``future``, each with the token itself. ``kernels`` is fast,
    triton (fast, with attention by Triton on CUDA), or reference for attention, dropout and linear layers as their definitions
    read. With ``activation_checkpointing`` only the input of a layer is kept for the backward pass, which computes the rest
    again, with the same dropout.
    """

    num_layers: int
    width: int
    ffn_width: int
    num_heads: int
    max_positions: int
    dropout: float
    attention_dropout: float
    activation_dropout: float
    layer_norm_eps: float
    position_scheme: str
    position_buckets: int
    position_max_distance: int
    embedding_width: int = 0
    num_token_types: int = 0
    attends_to: str = "all"
    kernels: str = "fast"
    activation_checkpointing: bool = False


class TransformerLayer(nn.Module):
    """Attention and feed-forward network, each followed by dropout, residual and LayerNorm (post-LayerNorm)."""

    def __init__(self, shape: TransformerConfig):
        super().__init__()
        self.attention = SelfAttention(shape.width, shape.num_heads, shape.attention_dropout, shape.kernels)
        self.attention_norm = LayerNorm(shape.width, shape.layer_norm_eps)
        self.ffn_in = make_linear(shape.width, shape.ffn_width, shape.kernels)
        self.ffn_out = make_linear(shape.ffn_width, shape.width, shape.kernels)
        self.ffn_norm = LayerNorm(shape.width, shape.layer_norm_eps)
        self.activation_dropout = make_dropout(shape.activation_dropout, shape.kernels)
        self.dropout = make_dropout(shape.dropout, shape.kernels)

    def forward(self, states: Tensor, bias: AttentionBias | ToeplitzBias, positions: Tensor | None = None) -> Tensor:
        """[B,T,D] -> [B,T,D], or [B,M,D]; arguments as for :class:`SelfAttention`."""
        attended = self.attention(states, bias, positions)
        states = states if positions is None else gather_positions(states, positions)
        states = self.attention_norm(states + self.dropout(attended))
        expanded = self.activation_dropout(gelu(self.ffn_in(states)))
        return self.ffn_norm(states + self.dropout(self.ffn_out(expanded)))


class TransformerEncoder(nn.Module):
    """Positions, token types, LayerNorm, dropout on top of given token embeddings, a projection to D, then the layers.

    Token embeddings belong to the model, which shares them between its encoders; where they are as wide as the encoder,
    nothing is projected. With scheme ``t5`` this is exactly Hugging Face's ``MPNetModel`` (positions count from 0 here),
    with ``none`` its ``ElectraModel``.

    Attributes:
        is_compiled: whether layers run through torch.compile where a gradient is wanted, that is, while training.
    """

    def __init__(self, shape: TransformerConfig):
        super().__init__()
        self.shape = shape
        self.is_compiled = False
        embedding_width = shape.embedding_width or shape.width
        self.embed_positions = nn.Embedding(shape.max_positions, embedding_width)
        self.embed_token_types = nn.Embedding(shape.num_token_types, embedding_width) if shape.num_token_types else None
        self.embedding_norm = LayerNorm(embedding_width, shape.layer_norm_eps)
        self.dropout = make_dropout(shape.dropout, shape.kernels)
        self.embedding_projection = None if embedding_width == shape.width else nn.Linear(embedding_width, shape.width)
        self.relative_position = (
            None
            if shape.position_scheme == "none"
            else RelativePositionBias(
                shape.position_scheme, shape.position_buckets, shape.position_max_distance, shape.num_heads
            )
        )
        self.layers = nn.ModuleList(TransformerLayer(shape) for _ in range(shape.num_layers))

    def share_embeddings(self, other: "TransformerEncoder") -> None:
        """Use the positions, token types and embedding LayerNorm of ``other`` in the place of its own."""
        self.embed_positions = other.embed_positions
        self.embed_token_types = other.embed_token_types
        self.embedding_norm = other.embedding_norm

    def forward(
        self,
        embeddings: Tensor,
        padding_mask: Tensor | None = None,
        detach_after: Collection[int] = (),
        token_types: Tensor | None = None,
        last_positions: Tensor | None = None,
    ) -> list[Tensor]:
        """Token embeddings [B,T,E] -> the output of every layer, ``num_layers`` tensors [B,T,D].

        Args:
            embeddings: [B,T,E] token embeddings.
            padding_mask: [B,T] bool, True at padding, which nothing attends to; None when there is none.
            detach_after: layers (counted from 1) whose output the next layer reads without a gradient.
            token_types: [B,T] int64; None is type 0 for every token. An encoder without token types ignores them.
            last_positions: [B,M] int64, all that is read of the last layer, whose output then is [B,M,D]; None for every
                token. The fast way computes nothing else behind its attention: two thirds of a layer, where few are read.
        """
        is_fast = self.shape.kernels != "reference"
        bias = self.attention_bias(embeddings, padding_mask)
        states = self.embed(embeddings, token_types)
        outputs = []
        for depth, layer in enumerate(self.layers, start=1):
            positions = last_positions if depth == len(self.layers) and is_fast else None
            outputs.append(self.run_layer(layer, states, bias, positions))
            states = outputs[-1].detach() if depth in detach_after else outputs[-1]
        if last_positions is not None and not is_fast:
            outputs[-1] = gather_positions(outputs[-1], last_positions)
        return outputs

    def run_layer(
        self,
        layer: TransformerLayer,
        states: Tensor,
        bias: AttentionBias | ToeplitzBias,
        positions: Tensor | None = None,
    ) -> Tensor:
        """``layer``, one of this encoder's or another of its shape, called as :class:`TransformerLayer` is."""
        if not torch.is_grad_enabled():  # batches of validation differ in shape: each would be compiled anew
            return layer(states, bias, positions)
        call = compiled_call() if self.is_compiled else call_layer
        if self.shape.activation_checkpointing:
            return checkpoint(call, layer, states, bias, positions, use_reentrant=False)
        return call(layer, states, bias, positions)

    def embed(self, embeddings: Tensor, token_types: Tensor | None) -> Tensor:
        """What the first layer reads: [B,T,E] -> [B,T,D]."""
        embeddings = embeddings + self.embed_positions.weight[: embeddings.size(1)]
        if self.embed_token_types is not None:
            types = self.embed_token_types.weight
            embeddings = embeddings + (types[0] if token_types is None else types[token_types])
        states = self.dropout(self.embedding_norm(embeddings))
        return states if self.embedding_projection is None else self.embedding_projection(states)

    def attention_bias(self, embeddings: Tensor, padding_mask: Tensor | None) -> AttentionBias | ToeplitzBias:
        """Relative positions and forbidden pairs as the layers take them.

        Either a value [H,2T-1] for each distance, or [H,T,T] float32 and [B or 1, 1, T or 1, T].
        """
        length, has_bias = embeddings.size(1), self.relative_position is not None
        head_width, with_triton = self.shape.width // self.shape.num_heads, self.shape.kernels == "triton"
        if choose_backend(embeddings.device, embeddings.dtype, head_width, has_bias, with_triton) == "triton":
            values = self.relative_position.values(length) if has_bias else None
            return ToeplitzBias(values, padding_mask, self.shape.attends_to)
        learned = self.relative_position(length) if has_bias else None
        forbidden = self.forbidden_pairs(length, padding_mask, embeddings.device)
        fixed = None if forbidden is None else forbidden.to(embeddings.dtype) * FORBIDDEN
        bias = AttentionBias(learned, fixed)
        is_reference = self.shape.kernels == "reference"
        return bias if is_reference else prepare_bias(bias, embeddings.device, embeddings.dtype)

    def forbidden_pairs(self, length: int, padding_mask: Tensor | None, device: torch.device) -> Tensor | None:
        """True where a query (last dimension but one) must not see a key (last): [B or 1, 1, T or 1, T] bool, or None."""
        padding = None if padding_mask is None else padding_mask[:, None, None, :]
        if self.shape.attends_to == "all":
            return padding
        places = torch.arange(length, device=device)
        ahead = places - places[:, None]  # [T,T], key position minus query position
        wrong_side = (ahead > 0 if self.shape.attends_to == "past" else ahead < 0)[None, None]
        # Padding behind a text has nothing on its side but itself to see.
        return wrong_side if padding is None else wrong_side | (padding & (ahead != 0))

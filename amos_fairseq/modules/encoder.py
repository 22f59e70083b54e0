"""The Transformer encoder of every objective: post-LayerNorm BERT, with relative positions beside absolute ones.

Shapes: B sequences, T tokens, M selected positions, H heads, D width of the encoder, E width of the token embeddings.
"""

import copy
import functools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

from amos_fairseq.functional.attention import (
    MASKED_SCORE,
    NO_BIAS,
    AttentionBias,
    ToeplitzBias,
    choose_backend,
    fast_attention,
    prepare_bias,
    reference_attention,
    toeplitz_attention,
)
from amos_fairseq.functional.cpu.dropout import dropout as fast_dropout
from amos_fairseq.functional.positions import gather_positions
from amos_fairseq.modules.relative_position import RelativePositionBias

# The number of graphs that PyTorch may compile for one function. With its default of 8, further kinds of layers would run
# uncompiled without an error.
MAX_GRAPHS = 64

Bias = AttentionBias | ToeplitzBias
LayerCall = Callable[[nn.Module, Tensor, Bias, Tensor | None], Tensor]


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and settings of one encoder. Dropouts are probabilities.

    Attributes:
        position_scheme: none, t5 or amos.
        embedding_width: E, the width of the token embeddings; 0 for the encoder's own D.
        num_token_types: 0 for an encoder without token types.
        attends_to: all tokens, or those of the ``past`` or the ``future`` and the token itself.
        kernels: fast, triton (fast, with Triton kernels on CUDA), or reference (the reference implementations of attention
            and dropout).
        activation_checkpointing: save only the input of each layer for the backward pass, which computes the rest again, with
            the same dropout.
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


class FastDropout(nn.Dropout):
    """``nn.Dropout`` with masks that cost less on a CPU."""

    def forward(self, states: Tensor) -> Tensor:
        """[...] -> [...]."""
        return fast_dropout(states, self.p) if self.training else states


def make_dropout(probability: float, kernels: str) -> nn.Dropout:
    """Return a dropout layer: PyTorch's own if ``kernels`` is ``reference``."""
    return nn.Dropout(probability) if kernels == "reference" else FastDropout(probability)


class SelfAttention(nn.Module):
    """Multi-head self-attention: softmax(q k^T / sqrt(d) + bias) v, then an output projection.

    Args:
        width: D, a multiple of ``num_heads``.
        num_heads: H.
        dropout: probability of dropping an attention weight in training.
        kernels: ``fast``, ``triton`` or ``reference``; the results are equal up to rounding.

    Raises:
        ValueError: ``width`` is not a multiple of ``num_heads``.
    """

    def __init__(self, width: int, num_heads: int, dropout: float, kernels: str = "fast"):
        super().__init__()
        if width % num_heads:
            raise ValueError(f"the width {width} must be a multiple of the number of attention heads {num_heads}")
        self.num_heads = num_heads
        self.dropout = dropout
        self.attend = reference_attention if kernels == "reference" else fast_attention
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, states: Tensor, bias: Bias = NO_BIAS, positions: Tensor | None = None) -> Tensor:
        """Compute attention: [B,T,D] -> [B,T,D], or [B,M,D] at ``positions`` [B,M] int64.

        ``bias`` is added to the scores. With a :class:`ToeplitzBias` the Triton kernels run, which compute only the given
        positions; the other backends compute all positions and select.
        """
        B, T, D = states.shape
        heads = self.query_key_value(states).view(B, T, 3, self.num_heads, D // self.num_heads)  # [B,T,3,H,d]
        dropout = self.dropout if self.training else 0.0
        if isinstance(bias, ToeplitzBias):
            return self.output(toeplitz_attention(heads, bias, dropout, positions).flatten(2))
        attended = self.attend(heads, bias, dropout).reshape(B, T, D)
        return self.output(attended if positions is None else gather_positions(attended, positions))


class TransformerLayer(nn.Module):
    """Attention and feed-forward network, each followed by dropout, residual connection and LayerNorm (post-LayerNorm)."""

    def __init__(self, shape: TransformerConfig):
        super().__init__()
        self.attention = SelfAttention(shape.width, shape.num_heads, shape.attention_dropout, shape.kernels)
        self.attention_norm = nn.LayerNorm(shape.width, shape.layer_norm_eps)
        self.ffn_in = nn.Linear(shape.width, shape.ffn_width)
        self.ffn_out = nn.Linear(shape.ffn_width, shape.width)
        self.ffn_norm = nn.LayerNorm(shape.width, shape.layer_norm_eps)
        self.activation_dropout = make_dropout(shape.activation_dropout, shape.kernels)
        self.dropout = make_dropout(shape.dropout, shape.kernels)

    def forward(self, states: Tensor, bias: Bias, positions: Tensor | None = None) -> Tensor:
        """[B,T,D] -> [B,T,D], or [B,M,D]; arguments as for :class:`SelfAttention`."""
        attended = self.attention(states, bias, positions)
        states = states if positions is None else gather_positions(states, positions)
        states = self.attention_norm(states + self.dropout(attended))
        expanded = self.activation_dropout(gelu(self.ffn_in(states)))
        return self.ffn_norm(states + self.dropout(self.ffn_out(expanded)))


def call_layer(layer: nn.Module, states: Tensor, bias: Bias, positions: Tensor | None = None) -> Tensor:
    """Call a :class:`TransformerLayer`."""
    return layer(states, bias, positions)


@functools.cache
def compiled_call() -> LayerCall:
    """Return :func:`call_layer` under torch.compile, which compiles it once for each kind of layer and of input.

    Layers of one shape share the result; a graph of the whole model would take as many times longer to compile as there are
    layers. The operations outside of the layers (sampling, the output layer) choose their own memory and kernels.

    An AMOS model has eight kinds: layers of the generator, those whose input is detached, the last one, which computes only
    some positions, and layers of the discriminator, each with and without padding in the batch. From the second batch size on,
    sizes are variables, which makes eight more.
    """
    config = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # its name up to PyTorch 2.6
    setattr(config, name, max(getattr(config, name), MAX_GRAPHS))
    return torch.compile(call_layer)


class TransformerEncoder(nn.Module):
    """Add positions and token types to given token embeddings, apply LayerNorm, dropout, a projection to D, and the layers.

    The model owns the token embeddings and shares them between its encoders. The projection exists only if E differs from D.
    With scheme ``t5`` this is exactly Hugging Face's ``MPNetModel`` (positions count from 0 here), with ``none`` its
    ``ElectraModel``.

    Attributes:
        is_compiled: run layers through torch.compile where a gradient is required, that is, in training.
    """

    def __init__(self, shape: TransformerConfig):
        super().__init__()
        self.shape = shape
        self.is_compiled = False
        embedding_width = shape.embedding_width or shape.width
        self.embed_positions = nn.Embedding(shape.max_positions, embedding_width)
        self.embed_token_types = nn.Embedding(shape.num_token_types, embedding_width) if shape.num_token_types else None
        self.embedding_norm = nn.LayerNorm(embedding_width, shape.layer_norm_eps)
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
        """Use the positions, token types and embedding LayerNorm of ``other``."""
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
        with_input: bool = False,
    ) -> list[Tensor]:
        """Return the output of every layer: token embeddings [B,T,E] -> ``num_layers`` tensors [B,T,D].

        Args:
            embeddings: [B,T,E] token embeddings.
            padding_mask: [B,T] bool, True at padding, which is not attended to; None if there is none.
            detach_after: layers (counted from 1) whose output is detached before the next layer.
            token_types: [B,T] int64; None is type 0 for every token. Ignored by an encoder without token types.
            last_positions: [B,M] int64, the positions at which the output of the last layer is needed, which then is [B,M,D];
                None for all. The fast kernels compute only these after the attention of the last layer, which saves up to two
                thirds of a layer.
            with_input: return the input of the first layer too, [B,T,D], before the outputs: item k is then that of layer k.
        """
        is_fast = self.shape.kernels != "reference"
        bias = self.attention_bias(embeddings, padding_mask)
        states = self.embed(embeddings, token_types)
        outputs = [states] if with_input else []
        for depth, layer in enumerate(self.layers, start=1):
            positions = last_positions if depth == len(self.layers) and is_fast else None
            outputs.append(self.run_layer(layer, states, bias, positions))
            states = outputs[-1].detach() if depth in detach_after else outputs[-1]
        if last_positions is not None and not is_fast:
            outputs[-1] = gather_positions(outputs[-1], last_positions)
        return outputs

    def run_layer(self, layer: TransformerLayer, states: Tensor, bias: Bias, positions: Tensor | None = None) -> Tensor:
        """Call ``layer``, one of this encoder's or another one of its shape, compiled or checkpointed as configured."""
        if not torch.is_grad_enabled():  # validation batches differ in shape: each would be compiled separately
            return layer(states, bias, positions)
        call = compiled_call() if self.is_compiled else call_layer
        if self.shape.activation_checkpointing:
            return checkpoint(call, layer, states, bias, positions, use_reentrant=False)
        return call(layer, states, bias, positions)

    def embed(self, embeddings: Tensor, token_types: Tensor | None) -> Tensor:
        """Compute the input of the first layer: [B,T,E] -> [B,T,D]."""
        embeddings = embeddings + self.embed_positions.weight[: embeddings.size(1)]
        if self.embed_token_types is not None:
            types = self.embed_token_types.weight
            embeddings = embeddings + (types[0] if token_types is None else types[token_types])
        states = self.dropout(self.embedding_norm(embeddings))
        return states if self.embedding_projection is None else self.embedding_projection(states)

    def attention_bias(self, embeddings: Tensor, padding_mask: Tensor | None) -> Bias:
        """Return relative positions and masked pairs in the form that the layers require.

        Either a value [H,2T-1] for each distance, or [H,T,T] float32 and [B or 1, 1, T or 1, T].
        """
        length, has_bias = embeddings.size(1), self.relative_position is not None
        head_width, with_triton = self.shape.width // self.shape.num_heads, self.shape.kernels == "triton"
        if choose_backend(embeddings.device, embeddings.dtype, head_width, has_bias, with_triton) == "triton":
            values = self.relative_position.values(length) if has_bias else None
            return ToeplitzBias(values, padding_mask, self.shape.attends_to)
        learned = self.relative_position(length) if has_bias else None
        masked = self.masked_pairs(length, padding_mask, embeddings.device)
        fixed = None if masked is None else masked.to(embeddings.dtype) * MASKED_SCORE
        bias = AttentionBias(learned, fixed)
        is_reference = self.shape.kernels == "reference"
        return bias if is_reference else prepare_bias(bias, embeddings.device, embeddings.dtype)

    def masked_pairs(self, length: int, padding_mask: Tensor | None, device: torch.device) -> Tensor | None:
        """Return True where a query must not attend to a key: [B or 1, 1, T or 1 (queries), T (keys)] bool, or None."""
        padding = None if padding_mask is None else padding_mask[:, None, None, :]
        if self.shape.attends_to == "all":
            return padding
        positions = torch.arange(length, device=device)
        ahead = positions - positions[:, None]  # [T,T], key position minus query position
        wrong_side = (ahead > 0 if self.shape.attends_to == "past" else ahead < 0)[None, None]
        # Padding after a text can only attend to itself on its side.
        return wrong_side if padding is None else wrong_side | (padding & (ahead != 0))


def share_bottom(encoder: TransformerEncoder, owner: TransformerEncoder, num_layers: int) -> None:
    """Let ``encoder`` use the input modules, relative positions and ``num_layers`` lowest layers of ``owner``, of its width."""
    encoder.share_embeddings(owner)
    encoder.embedding_projection = owner.embedding_projection
    encoder.relative_position = owner.relative_position
    for number in range(num_layers):
        encoder.layers[number] = owner.layers[number]


def with_layers(encoder: TransformerEncoder, layers: Iterable[TransformerLayer]) -> TransformerEncoder:
    """Return a view of ``encoder`` with these layers. Nothing is copied: both share the same parameters."""
    view = copy.copy(encoder)
    view._modules = {**encoder._modules, "layers": nn.ModuleList(layers)}
    view.shape = replace(encoder.shape, num_layers=len(view.layers))
    return view

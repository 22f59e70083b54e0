"""What every Transformer encoder has, whatever its layers are: how it is called, cut, shared, compiled and checkpointed.

Also the initial values of the parameters of models, and their groups for the optimizer.

``.bert_encoder``, ``.modern_encoder`` and ``.deberta_encoder`` have the encoders. Shapes: B sequences, T tokens, M
selected positions, D width of the encoder, E width of the token embeddings.
"""

import abc
import copy
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amos_fairseq.functional.cpu import dropout as fast_dropout
from amos_fairseq.functional.positions import Packing, gather_positions, pack_lengths

# The number of graphs that PyTorch may compile for one function. With its default of 8, further kinds of layers would run
# uncompiled without an error.
MAX_GRAPHS = 64

# layer, its input [B,T,D], what its kind of attention needs, positions [B,M] or None, packing or None -> [B,T,D] or [B,M,D]
LayerCall = Callable[["TransformerLayer", Tensor, Any, Tensor | None, Packing | None], Tensor]


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(abc.ABC):
    """Sizes and settings that all encoders have. Dropouts are probabilities."""

    num_layers: int
    width: int
    ffn_width: int
    num_heads: int
    max_positions: int
    dropout: float
    attention_dropout: float
    activation_dropout: float
    layer_norm_eps: float
    embedding_width: int = 0  # E, the width of the token embeddings; 0 for the encoder's own D
    attends_to: str = "all"  # or "past" or "future": those tokens and the token itself
    # "triton": fast, with Triton kernels on CUDA; "reference": attention and dropout by definition.
    kernels: str = "fast"
    # Save only the input of each layer for the backward pass, which computes the rest again, with the same dropout.
    activation_checkpointing: bool = False

    @abc.abstractmethod
    def build(self) -> "TransformerEncoder":
        """Return an encoder of this shape with PyTorch's initial values."""

    @property
    def has_learned_bias(self) -> bool:
        """Whether a learned bias is added to the scores of attention."""
        return False

    @property
    def is_projected(self) -> bool:
        """Whether the token embeddings have another width than the encoder."""
        return self.embedding_width not in (0, self.width)


class FastDropout(nn.Dropout):
    """``nn.Dropout`` with masks that cost less on a CPU."""

    def forward(self, states: Tensor) -> Tensor:
        """[...] -> [...]."""
        return fast_dropout(states, self.p) if self.training else states


def make_dropout(probability: float, kernels: str) -> nn.Dropout:
    """Return a dropout layer: PyTorch's own if ``kernels`` is ``reference``."""
    return nn.Dropout(probability) if kernels == "reference" else FastDropout(probability)


class TransformerLayer(nn.Module):
    """A layer of an encoder, called with its input, the encoder's ``attention_context()``, positions and packing.

    Its input is [B,T,D], or [1,N,D] where there is a packing.
    """

    def initialize(self, std: float) -> None:
        """Set initial values of linear layers that differ from BERT's, N(0, ``std``); biases are 0 already."""


def call_layer(
    layer: TransformerLayer,
    states: Tensor,
    context: Any,
    positions: Tensor | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """Call a layer of an encoder."""
    return layer(states, context, positions, packing)


@functools.cache
def compiled_call() -> LayerCall:
    """Return ``call_layer`` under torch.compile, which compiles it once for each kind of layer and of input.

    Layers of one shape share the result; a graph of the whole model would take as many times longer to compile as there are
    layers. The operations outside of the layers (sampling, the output layer) choose their own memory and kernels.

    An AMOS model on BERT's encoder has eight kinds: layers of the generator, those whose input is detached, the last one, which
    computes only some positions, and layers of the discriminator, each with and without padding in the batch. From the second
    batch size on, sizes are variables, which makes eight more. On ModernBERT's encoder the first layer, local and global layers
    are kinds of their own.
    """
    config = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # its name up to PyTorch 2.6
    setattr(config, name, max(getattr(config, name), MAX_GRAPHS))
    return torch.compile(call_layer)


@dataclass(frozen=True)
class LayerOutputs:
    """The outputs of an encoder's layers, as the input of the next layer and as the states that heads read.

    In an encoder with LayerNorm before each block, a layer adds to a sum that no LayerNorm has normalized yet. Heads read that
    sum through the encoder's last LayerNorm. In a post-LayerNorm encoder both are the same tensor.
    """

    # What each layer passes on, [B,T,D]; the last [B,M,D] if only some positions were computed; [1,N,D] if packed.
    sums: list[Tensor]
    final_norm: nn.Module | None = None  # the LayerNorm in front of the heads
    packing: Packing | None = None  # of the sums; what is read is padded again, with zeros

    def __len__(self) -> int:
        return len(self.sums)

    def __getitem__(self, index: int) -> Tensor:
        """Return the states that heads read above one layer: [B,T,D]."""
        return self._restore(self._normalize(self.sums[index]))

    def at(self, index: int, positions: Tensor) -> Tensor:
        """Return the states above one layer at ``positions`` [B,M] int64: [B,M,D]."""
        return self._normalize(gather_positions(self._restore(self.sums[index]), positions))

    def _restore(self, states: Tensor) -> Tensor:
        return states if self.packing is None else self.packing.unpack(states)

    def _normalize(self, states: Tensor) -> Tensor:
        return states if self.final_norm is None else self.final_norm(states)


class TransformerEncoder(nn.Module, abc.ABC):
    """Token embeddings in, the outputs of all layers out. A subclass says what the input and the layers are.

    The model owns the token embeddings and shares them between its encoders.

    Attributes:
        shape: sizes and settings.
        layers: of ``TransformerLayer``, the first one nearest to the input.
        embedding_norm, dropout, embedding_projection: of the token embeddings; a projection only where E differs from D.
        final_norm: see ``LayerOutputs``.
        is_compiled: run layers through torch.compile where a gradient is required, that is, in training.
    """

    layers: nn.ModuleList
    embedding_norm: nn.Module
    dropout: nn.Module
    embedding_projection: nn.Module | None
    final_norm: nn.Module | None

    def __init__(self, shape: TransformerConfig):
        super().__init__()
        if shape.width % shape.num_heads:
            problem = f"must be a multiple of the number of attention heads {shape.num_heads}"
            raise ValueError(f"the width {shape.width} {problem}")
        self.shape = shape
        self.is_compiled = False
        self.final_norm = None

    @abc.abstractmethod
    def new_layer(self, number: int) -> TransformerLayer:
        """Return a new layer like the layer ``number``, counted from 1."""

    def embed(self, embeddings: Tensor, token_types: Tensor | None) -> Tensor:
        """Compute the input of the first layer: [B,T,E] -> [B,T,D]. Only BERT's encoder has token types."""
        states = self.dropout(self.embedding_norm(embeddings))
        return states if self.embedding_projection is None else self.embedding_projection(states)

    @abc.abstractmethod
    def attention_context(self, embeddings: Tensor, padding_mask: Tensor | None, packing: Packing | None = None) -> Any:
        """Return what the attention of every layer needs beside its input: biases, masks, rotations.

        Args:
            embeddings: [B,T,E], padded, also where the layers get packed states.
            padding_mask: [B,T] bool, True at padding; None if there is none.
            packing: of the states. Attention that takes no packed sequences restores the padding for itself.
        """

    @abc.abstractmethod
    def share_embeddings(self, other: "TransformerEncoder") -> None:
        """Use the modules of ``other`` that have the width of the token embeddings."""

    @abc.abstractmethod
    def share_input(self, other: "TransformerEncoder") -> None:
        """Use everything of ``other``, of the same width, but its layers and final LayerNorm."""

    @property
    def parts_above_embeddings(self) -> list[nn.Module]:
        """The modules that belong to no input: layers, and what all layers share."""
        return [self.layers]

    def forward(
        self,
        embeddings: Tensor,
        padding_mask: Tensor | None = None,
        detach_after: Collection[int] = (),
        token_types: Tensor | None = None,
        last_positions: Tensor | None = None,
        with_input: bool = False,
        lengths: Sequence[int] | None = None,
    ) -> LayerOutputs:
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
            lengths: number of tokens of each sequence, which padding follows; instead of ``padding_mask``. The layers then
                compute nothing at padding, where the result is 0; only attention may be padded
                (``attention_context``). The reference implementations pad as without lengths.

        Raises:
            ValueError: ``lengths`` do not fit the embeddings, or ``last_positions`` are given too.
        """
        is_fast = self.shape.kernels != "reference"
        packing = None
        if lengths is not None:
            if last_positions is not None:
                raise ValueError("packed layers compute all positions: give lengths or last_positions, not both")
            packing = pack_lengths(lengths, embeddings.shape[:2], embeddings.device)
            padding_mask = None if packing is None else packing.padding_mask()
            packing = packing if is_fast else None
        context = self.attention_context(embeddings, padding_mask, packing)
        states = self.embed(embeddings, token_types)
        states = states if packing is None else packing.pack(states)
        outputs = [states] if with_input else []
        for depth, layer in enumerate(self.layers, start=1):
            is_last = depth == len(self.layers)
            run = self.run_last_layer if is_last else self.run_layer
            outputs.append(run(layer, states, context, last_positions if is_last and is_fast else None, packing))
            states = outputs[-1].detach() if depth in detach_after else outputs[-1]
        if last_positions is not None and not is_fast:
            outputs[-1] = gather_positions(outputs[-1], last_positions)
        return LayerOutputs(outputs, self.final_norm, packing)

    def run_last_layer(self, *call: Any) -> Tensor:
        """Call the last layer; the arguments are those of ``run_layer``."""
        return self.run_layer(*call)

    def run_layer(
        self,
        layer: TransformerLayer,
        states: Tensor,
        context: Any,
        positions: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Call ``layer``, one of this encoder's or another one of its shape, compiled or checkpointed as configured."""
        if not torch.is_grad_enabled():  # validation batches differ in shape: each would be compiled separately
            return layer(states, context, positions, packing)
        call = compiled_call() if self.is_compiled else call_layer
        if self.shape.activation_checkpointing:
            return checkpoint(call, layer, states, context, positions, packing, use_reentrant=False)
        return call(layer, states, context, positions, packing)


def share_bottom(encoder: TransformerEncoder, owner: TransformerEncoder, num_layers: int) -> None:
    """Let ``encoder`` use the input modules and the ``num_layers`` lowest layers of ``owner``, of its width."""
    encoder.share_input(owner)
    for number in range(num_layers):
        encoder.layers[number] = owner.layers[number]


def with_layers(encoder: TransformerEncoder, layers: Iterable[TransformerLayer]) -> TransformerEncoder:
    """Return a view of ``encoder`` with these layers. Nothing is copied: both share the same parameters."""
    view = copy.copy(encoder)
    view._modules = {**encoder._modules, "layers": nn.ModuleList(layers)}
    view.shape = replace(encoder.shape, num_layers=len(view.layers))
    return view


def one_sided(encoder: TransformerEncoder, side: str, num_layers: int) -> TransformerEncoder:
    """Return a view of the ``num_layers`` lowest layers of ``encoder`` in which a token attends to the ``past`` or the
    ``future``, and itself. Nothing is copied."""
    view = with_layers(encoder, encoder.layers[:num_layers])
    view.shape = replace(view.shape, attends_to=side)
    return view


class ParameterGroup(NamedTuple):
    """The attribute ``param_group`` of a parameter.

    fairseq's mixed-precision wrapper copies this attribute, and no other, to its float32 master weights. Therefore it holds
    everything that the optimizer needs to know about a parameter.
    """

    is_decayed: bool = True  # whether weight decay applies
    # 0 for the heads, 1 for the layer below them, and so on down to the embeddings; None if the model does not assign depths.
    depth: int | None = None
    lr_scale: float = 1.0  # share of the learning rate


def parameter_group(parameter: nn.Parameter) -> ParameterGroup:
    """Return the group of a parameter, or the default group if it has none."""
    group = getattr(parameter, "param_group", None)
    return group if isinstance(group, ParameterGroup) else ParameterGroup()


def initialize(model: nn.Module, std: float, linear_std: float) -> None:
    """Set BERT's initial values: weights N(0, std), biases 0, LayerNorm 1 and 0, padding embedding 0.

    The layers of ModernBERT then set the weights of their linear layers as its authors do; embeddings and heads keep BERT's.
    ``linear_std`` is for the weights of linear layers: at width 64, post-LayerNorm with 0.02 stays on the unigram plateau.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=linear_std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            if module.padding_idx is not None:
                nn.init.zeros_(module.weight.data[module.padding_idx])
    for module in model.modules():
        if isinstance(module, TransformerLayer):
            module.initialize(linear_std)


def mark_undecayed(model: nn.Module, also: tuple[str, ...] = ()) -> None:
    """Exclude LayerNorm weights, biases and parameters whose name contains one of ``also`` from weight decay."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or any(part in name for part in also):
            parameter.param_group = parameter_group(parameter)._replace(is_decayed=False)


def mark_lr_scale(parameters: Iterable[nn.Parameter], lr_scale: float) -> None:
    """Give parameters a share of the learning rate."""
    for parameter in parameters:
        parameter.param_group = parameter_group(parameter)._replace(lr_scale=lr_scale)


def mark_layer_depths(model: nn.Module) -> None:
    """Set the depth of every parameter below the heads, for ``--layer-wise-lr-decay``. Call again after adding a head.

    Of the n layers of ``model.encoder``, layer i (counted from 1) has depth n + 1 - i. The rest of the encoder (positions,
    token types, their LayerNorm, the projection, the relative position table) and ``model.embed_tokens`` have depth n + 1,
    and everything else in the model is a head of depth 0, as is the LayerNorm after the last layer of ModernBERT (thesis
    section 3.3 also counts from the output).
    """
    num_layers = len(model.encoder.layers)
    parts = [(model, 0), (model.encoder, num_layers + 1), (model.embed_tokens, num_layers + 1)]
    if model.encoder.final_norm is not None:
        parts.append((model.encoder.final_norm, 0))
    parts += [(layer, num_layers + 1 - number) for number, layer in enumerate(model.encoder.layers, start=1)]
    for part, depth in parts:  # inner modules after the modules that contain them
        for parameter in part.parameters():
            parameter.param_group = parameter_group(parameter)._replace(depth=depth)

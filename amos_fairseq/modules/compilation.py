"""The call of a Transformer layer, as it is written and as torch.compile makes it.

One layer is what is compiled, and layers of one shape share the result: a graph of the whole model would take as many
times longer to compile as there are layers. What stays outside (sampling, the output layer in chunks) chooses its own
memory and kernels already.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from amos_fairseq.functional.attention import AttentionBias, ToeplitzBias

# Most graphs that PyTorch may compile for one function. With its default of 8, further kinds of layers run uncompiled without
# an error.
MOST_GRAPHS = 64

Bias = AttentionBias | ToeplitzBias
LayerCall = Callable[[nn.Module, Tensor, Bias, Tensor | None], Tensor]


def call_layer(layer: nn.Module, states: Tensor, bias: Bias, positions: Tensor | None = None) -> Tensor:
    """As :class:`amos_fairseq.modules.encoder.TransformerLayer`."""
    return layer(states, bias, positions)


@functools.cache
def compiled_call() -> LayerCall:
    """:func:`call_layer` under torch.compile, which compiles it once for each kind of layer and of input.

    An AMOS model has eight kinds: layers of the generator, those of them that read a detached state, the last of them, which
    computes some positions alone, and layers of the discriminator, each with and without padding in the batch. From the
    second size of a batch on, sizes are variables, which makes eight more.
    """
    allow_every_kind_of_layer()
    return torch.compile(call_layer)


def allow_every_kind_of_layer() -> None:
    """Raise PyTorch's limit of graphs a function to :data:`MOST_GRAPHS`; a larger one is kept."""
    config = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # its name up to PyTorch 2.6
    setattr(config, name, max(getattr(config, name), MOST_GRAPHS))

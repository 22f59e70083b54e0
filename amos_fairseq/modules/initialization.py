"""Initial values of parameters, and their groups for the optimizer."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from amos_fairseq.modules.encoder import TransformerLayer


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

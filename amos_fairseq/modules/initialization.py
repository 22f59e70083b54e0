"""Initial values, and the marks by which the optimizer tells parameters apart."""

from typing import NamedTuple

from torch import nn


class ParameterGroup(NamedTuple):
    """What a parameter's attribute ``param_group`` holds.

    fairseq's mixed-precision wrapper copies this one attribute to its float32 masters, so the optimizer finds it there
    as well; therefore everything that it has to know stands in it.

    Attributes:
        is_decayed: whether weight decay applies.
        depth: 0 at the heads, 1 in the layer below them, and so on down to the embeddings; None where a model does not
            count its layers.
    """

    is_decayed: bool = True
    depth: int | None = None


def parameter_group(parameter: nn.Parameter) -> ParameterGroup:
    """The mark of a parameter, or the one of a parameter that nothing is known about."""
    mark = getattr(parameter, "param_group", None)
    return mark if isinstance(mark, ParameterGroup) else ParameterGroup()


def initialize(model: nn.Module, std: float, linear_std: float) -> None:
    """BERT's initial values: weights N(0, std), biases 0, LayerNorm 1 and 0, padding row 0.

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


def mark_undecayed(model: nn.Module, also: tuple[str, ...] = ()) -> None:
    """Mark LayerNorm weights, biases and the parameters whose name contains a part of ``also`` as not decayed."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or any(part in name for part in also):
            parameter.param_group = parameter_group(parameter)._replace(is_decayed=False)


def mark_layer_depths(model: nn.Module) -> None:
    """Mark every parameter with its depth below the heads, for ``--layer-wise-lr-decay``; again whenever a head is added.

    Of the n layers of ``model.encoder``, layer i (counted from 1) has depth n + 1 - i. The rest of the encoder (positions,
    token types, their LayerNorm, the projection, the relative position table) and ``model.embed_tokens`` have depth n + 1,
    and everything else in the model is a head: depth 0 (thesis section 3.3 counts so, from the output).
    """
    num_layers = len(model.encoder.layers)
    parts = [(model, 0), (model.encoder, num_layers + 1), (model.embed_tokens, num_layers + 1)]
    parts += [(layer, num_layers + 1 - number) for number, layer in enumerate(model.encoder.layers, start=1)]
    for part, depth in parts:  # what lies inside comes after what it lies in
        for parameter in part.parameters():
            parameter.param_group = parameter_group(parameter)._replace(depth=depth)

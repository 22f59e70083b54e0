"""Initial values, and which parameters weight decay leaves alone."""

from torch import nn

# fairseq's mixed-precision wrapper copies this attribute to its float32 masters, so the optimizer finds it there as well.
NO_DECAY = "no_decay"


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
            parameter.param_group = NO_DECAY

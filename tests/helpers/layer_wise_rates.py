"""A small fine-tuned model, and the rule of layer-wise rates read off the names of its parameters."""

import re

import torch
from small_models import small_dictionary
from torch import nn

from amos_fairseq.models.configuration import EncoderConfig, PaddedVocabulary
from amos_fairseq.models.fine_tuning import FineTunedModel
from amos_fairseq.optim.grouped_adam import GroupedAdam, GroupedAdamConfig

LEARNING_RATE, WEIGHT_DECAY = 0.01, 0.1


def fine_tuned_model(num_layers: int) -> FineTunedModel:
    """With everything that can lie below the layers: token types, a projection, a relative position table."""
    torch.manual_seed(0)
    cfg = EncoderConfig(
        encoder_layers=num_layers, encoder_embed_dim=8, encoder_ffn_embed_dim=12, encoder_attention_heads=2,
        max_positions=10, relative_position_scheme="t5", embedding_dim=4, token_types=2,
    )  # fmt: skip
    model = FineTunedModel(cfg, PaddedVocabulary.of(small_dictionary()))
    model.register_classification_head("sentence", num_classes=3)
    return model


def config(decay: float, **settings) -> GroupedAdamConfig:
    return GroupedAdamConfig(lr=[LEARNING_RATE], weight_decay=WEIGHT_DECAY, layer_wise_lr_decay=decay, **settings)


def exponent_by_name(name: str, num_layers: int) -> int:
    """The power of the decay, read off a parameter's name: the rule of the documentation once more, by other means."""
    if layer := re.match(r"encoder\.layers\.(\d+)\.", name):
        return num_layers - int(layer.group(1))  # names count from 0
    return num_layers + 1 if name.startswith(("encoder.", "embed_tokens.")) else 0


def rates_by_name(optimizer: GroupedAdam, model: nn.Module) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}


def gradients(model: nn.Module, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(parameter.shape, generator=generator) for parameter in model.parameters()]

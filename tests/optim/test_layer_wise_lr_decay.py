"""Layer-wise learning-rate decay: rates by hand, steps against one AdamW per parameter, mixed precision, saved states."""

import re

import pytest
import torch
from small_models import bf16_optimizer, small_amos, small_dictionary
from torch import nn

from amos_fairseq.downstream.model import TextModel
from amos_fairseq.errors import UserError
from amos_fairseq.models.configuration import EncoderConfig, PaddedVocabulary
from amos_fairseq.optim.grouped_adam import GroupedAdam, GroupedAdamConfig

LEARNING_RATE, WEIGHT_DECAY = 0.01, 0.1


def fine_tuned_model(num_layers: int, **settings: float) -> TextModel:
    """With everything that can be below the layers: token types, a projection, a relative position table."""
    torch.manual_seed(0)
    sizes = {"encoder_layers": num_layers, "encoder_embed_dim": 8, "encoder_ffn_embed_dim": 12, "max_positions": 10}
    below = {"relative_position_scheme": "t5", "embedding_dim": 4, "token_types": 2}
    cfg = EncoderConfig(**sizes, **below, **settings, encoder_attention_heads=2)
    model = TextModel(cfg, PaddedVocabulary.of(small_dictionary()))
    model.register_classification_head("sentence", num_classes=3)
    return model


def config(decay: float, **settings) -> GroupedAdamConfig:
    return GroupedAdamConfig(lr=[LEARNING_RATE], weight_decay=WEIGHT_DECAY, layer_wise_lr_decay=decay, **settings)


def exponent_by_name(name: str, num_layers: int) -> int:
    """The power of the decay by a parameter's name: a second implementation of the documented rule."""
    if layer := re.match(r"encoder\.layers\.(\d+)\.", name):
        return num_layers - int(layer.group(1))  # names count from 0
    return num_layers + 1 if name.startswith(("encoder.", "embed_tokens.")) else 0


def rates_by_name(optimizer: GroupedAdam, model: nn.Module, rate: str = "lr") -> dict[str, float]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: group[rate] for group in optimizer.param_groups for parameter in group["params"]}


def test_rates_of_twelve_layers_by_hand():
    """Base size with 0.8. The released ELECTRA code would give the top layer 0.64 and the embeddings 0.8^14 = 0.0440."""
    model = fine_tuned_model(12)
    optimizer = GroupedAdam(config(0.8), model.parameters())
    optimizer.set_lr(1.0)
    rates = rates_by_name(optimizer, model)
    expected = {
        "classification_heads.sentence.dense.weight": 1.0,
        "classification_heads.sentence.output.bias": 1.0,
        "encoder.layers.11.ffn_out.weight": 0.8,
        "encoder.layers.11.attention_norm.bias": 0.8,
        "encoder.layers.10.attention.query_key_value.weight": 0.64,
        "encoder.layers.9.ffn_norm.weight": 0.512,
        "encoder.layers.0.ffn_in.bias": 0.068719476736,
        "embed_tokens.weight": 0.0549755813888,
    }
    embedding = ("embed_positions", "embed_token_types", "embedding_norm", "embedding_projection")
    below = [f"encoder.{name}.weight" for name in (*embedding, "relative_position.table")]
    expected |= dict.fromkeys(below, 0.0549755813888)
    assert {name: rates[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert set(rates) == {name for name, _ in model.named_parameters()}
    assert len(set(rates.values())) == 14  # heads, twelve layers, everything below them


def separate_optimizers(model: nn.Module, decay: float) -> list[tuple[torch.optim.Optimizer, float]]:
    """One unfused AdamW per parameter, with its share of the rate."""
    num_layers = len(model.encoder.layers)
    optimizers = []
    for name, parameter in model.named_parameters():
        is_decayed = parameter.ndim > 1 and "relative_position" not in name
        settings = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": WEIGHT_DECAY * is_decayed}
        optimizer = torch.optim.AdamW([parameter], **settings, foreach=False)
        optimizers.append((optimizer, decay ** exponent_by_name(name, num_layers)))
    return optimizers


@pytest.mark.parametrize("decay", [0.8, 1.0])
def test_steps_are_those_of_one_adamw_per_parameter(decay):
    """Five steps on a schedule, against float64: 1e-6 is some rounding errors of float32 at values up to 3."""
    model, reference = fine_tuned_model(3), fine_tuned_model(3).double()
    optimizer, separate = GroupedAdam(config(decay), model.parameters()), separate_optimizers(reference, decay)
    for step, rate in enumerate([0.0, 0.01, 0.02, 0.01, 0.001]):
        optimizer.set_lr(rate)
        torch.manual_seed(step)
        for parameter, twin in zip(model.parameters(), reference.parameters(), strict=True):
            parameter.grad = torch.randn_like(parameter)
            twin.grad = parameter.grad.double()
        optimizer.step()
        for plain, share in separate:
            plain.param_groups[0]["lr"] = rate * share
            plain.step()
    for (name, parameter), twin in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.double(), twin, atol=1e-6, rtol=0, msg=name)


def test_pretraining_models_have_one_rate():
    model = small_amos()
    assert {group["lr"] for group in GroupedAdam(config(1.0), model.parameters()).param_groups} == {LEARNING_RATE}
    with pytest.raises(UserError, match=r"--layer-wise-lr-decay 0\.8 needs a fine-tuning task"):
        GroupedAdam(config(0.8), model.parameters())
    with pytest.raises(UserError, match="needs a fine-tuning task"):  # as of a criterion with parameters of its own
        GroupedAdam(config(0.8), [*fine_tuned_model(2).parameters(), nn.Parameter(torch.zeros(2))])


def test_bf16_updates_are_as_large_as_the_rates_say():
    """Adam's first step moves every weight by its rate. Powers of two, so that rounding to bfloat16 hides nothing."""
    model = fine_tuned_model(2).bfloat16()
    optimizer = bf16_optimizer(config(0.5), model.parameters())
    for parameter, copy in zip(model.parameters(), optimizer.fp32_params, strict=True):
        parameter.data.zero_()
        copy.data.zero_()  # at 0 weight decay adds nothing
    optimizer.set_lr(0.25)
    optimizer.zero_grad()
    optimizer.backward(sum(parameter.float().sum() for parameter in model.parameters()))
    optimizer.step()
    for name, parameter in model.named_parameters():
        step = torch.full_like(parameter, -0.25 * 0.5 ** exponent_by_name(name, 2))
        torch.testing.assert_close(parameter, step, atol=0, rtol=1e-2, msg=name)  # epsilon of Adam, bfloat16


def test_flags_win_over_the_checkpoint_and_other_groups_are_refused():
    model = fine_tuned_model(2)
    optimizer = GroupedAdam(config(0.8), model.parameters())
    optimizer.set_lr(0.5)
    saved = optimizer.state_dict()
    changed = GroupedAdam(config(0.5), model.parameters())
    changed.load_state_dict(saved)
    rates = rates_by_name(changed, model)
    assert (changed.get_lr(), rates["embed_tokens.weight"]) == (0.5, 0.0625)
    assert rates["encoder.layers.0.ffn_in.weight"] == 0.125
    changed.load_state_dict(saved, {"lr": 4.0})
    assert (changed.get_lr(), rates_by_name(changed, model)["embed_tokens.weight"]) == (4.0, 0.5)
    with pytest.raises(UserError, match="whether there is a --layer-wise-lr-decay and a --discriminator-lr-scale or"):
        GroupedAdam(config(1.0), model.parameters()).load_state_dict(saved)


def test_an_encoder_has_a_lower_rate_than_its_heads():
    model = fine_tuned_model(3, encoder_lr_scale=0.1)
    rates = rates_by_name(GroupedAdam(config(0.8), model.parameters()), model, "lr_scale")
    scales = {name: 1.0 if name.startswith("classification_heads.") else 0.1 for name in rates}
    assert rates == pytest.approx({name: scale * 0.8 ** exponent_by_name(name, 3) for name, scale in scales.items()})


def test_state_without_lr_scale_is_loaded():
    """Checkpoints of pretraining runs have no ``lr_scale`` in their groups."""
    model = small_amos()
    optimizer = GroupedAdam(config(1.0), model.parameters())
    optimizer.set_lr(0.25)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["lr_scale"]
    resumed = GroupedAdam(config(1.0), model.parameters())
    resumed.load_state_dict(saved)
    assert [group["lr"] for group in resumed.param_groups] == [0.25, 0.25]

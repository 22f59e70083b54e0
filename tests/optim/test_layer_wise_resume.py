"""The state of an optimizer with layer-wise rates: saved, loaded, and loaded under other flags."""

import pytest
import torch
from layer_wise_rates import config, fine_tuned_model, gradients, rates_by_name
from small_models import small_amos
from torch import nn

from amos_fairseq.errors import UserError
from amos_fairseq.optim.grouped_adam import GroupedAdam


def one_update(model: nn.Module, optimizer: GroupedAdam, step: int) -> None:
    for parameter, gradient in zip(model.parameters(), gradients(model, step), strict=True):
        parameter.grad = gradient
    optimizer.step()


def test_saved_state_continues_exactly():
    straight, first, second = fine_tuned_model(2), fine_tuned_model(2), fine_tuned_model(2)
    optimizer = GroupedAdam(config(0.8), straight.parameters())
    for step in range(4):
        one_update(straight, optimizer, step)
    optimizer = GroupedAdam(config(0.8), first.parameters())
    for step in range(2):
        one_update(first, optimizer, step)
    second.load_state_dict(first.state_dict())
    resumed = GroupedAdam(config(0.8), second.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    for step in range(2, 4):
        one_update(second, resumed, step)
    for (name, expected), got in zip(straight.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(expected, got), name


def test_flags_win_over_the_checkpoint_and_other_groups_are_refused():
    model = fine_tuned_model(2)
    optimizer = GroupedAdam(config(0.8), model.parameters())
    optimizer.set_lr(0.5)
    saved = optimizer.state_dict()
    changed = GroupedAdam(config(0.5), model.parameters())
    changed.load_state_dict(saved)
    rates = rates_by_name(changed, model)
    assert (changed.get_lr(), rates["encoder.layers.0.ffn_in.weight"], rates["embed_tokens.weight"]) == (
        0.5,
        0.125,
        0.0625,
    )
    changed.load_state_dict(saved, {"lr": 4.0})
    assert (changed.get_lr(), rates_by_name(changed, model)["embed_tokens.weight"]) == (4.0, 0.5)
    with pytest.raises(UserError, match="whether there is a --layer-wise-lr-decay as they were"):
        GroupedAdam(config(1.0), model.parameters()).load_state_dict(saved)


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

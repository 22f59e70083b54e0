"""No operation of model, criterion and backward pass makes the host wait for the device, seen on a CPU by their names."""

from typing import Any

import pytest
import torch
from small_models import (
    ELECTRA_VARIANTS,
    ELECTRIC_VARIANTS,
    ONLY_RTD,
    electra_criterion,
    model_and_criterion,
    small_batch,
)
from synchronization import SYNCHRONIZING, Operations

SETTINGS = [
    ("amos", {"mixture": "learned"}),
    ("amos", {"mixture": "learned", "gumbel_entries": 20}),
    ("amos", {"mixture": "learned", "kernels": "reference"}),
    ("amos", {"mixture": "learned", "activation_checkpointing": True, "dropout": 0.1}),
    ("amos", {"mixture": "uniform"}),
    ("amos", {"mixture": "random_layer", "adversarial_mlm_multiplier": 0.5}),
    ("amos", {"mixture": "random_layer", "adversarial_mlm_multiplier": 0.5, "gumbel_entries": 20}),
    ("amos", {"mixture": "layer_switch"}),
    ("amos", {"mixture": "fixed", "fixed_mixture_weights": "0.2,0.3,0.5", "separate_generators": True}),
    *(("electra", variant) for variant in ELECTRA_VARIANTS.values()),
    *((variant, {}) for variant in ELECTRIC_VARIANTS if variant != "electra_tt"),
    ("electric", {"electric_variant": "electra_tt"}),
    ("teams", {}),
    ("teams", {"negative_sampling": "hardest", "task_heads": "ffn"}),
    ("teams", ONLY_RTD),
]


def operations_of_step(model: torch.nn.Module, criterion: torch.nn.Module) -> set[str]:
    batch = small_batch()
    with Operations() as operations:
        criterion(model, batch)[0].backward()
    assert {"aten::gelu", "aten::embedding_dense_backward"} <= operations.names  # forward and backward were recorded
    return operations.names


@pytest.mark.parametrize(("objective", "settings"), SETTINGS, ids=str)
def test_step_does_not_synchronize(objective: str, settings: dict[str, Any]) -> None:
    assert not operations_of_step(*model_and_criterion(objective, **settings)) & SYNCHRONIZING


@pytest.mark.parametrize("positions", ["masked", "random"])
def test_step_with_detection_at_some_positions_does_not_synchronize(positions: str) -> None:
    model, _ = model_and_criterion("electra")
    assert not operations_of_step(model, electra_criterion(detection_positions=positions)) & SYNCHRONIZING


def test_synchronizing_operations_are_recorded() -> None:
    with Operations() as operations:
        ones = torch.tensor([1.0, 2.0])
        ones.sum().item()
        ones[ones > 1]
    assert operations.names >= {"aten::lift_fresh", "aten::_local_scalar_dense"}

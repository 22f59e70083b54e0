"""Training steps of every objective and variant: nothing synchronizes host and device, and every parameter is used."""

from typing import Any

import pytest
import torch
from small_models import (
    DEBERTA,
    DEBERTA_PAIR,
    ELECTRA_VARIANTS,
    ELECTRIC_VARIANTS,
    MODERN,
    TEAMS_LAYOUTS,
    electra_criterion,
    model_and_criterion,
    small_batch,
)
from synchronization import SYNCHRONIZING, Operations

AMOS = [
    {},
    {"gumbel_entries": 20},
    {"gumbel_entries": 0},
    {"kernels": "reference"},
    {"activation_checkpointing": True, "dropout": 0.1},
    {"mixture": "uniform"},
    {"mixture": "uniform", "adversarial_mlm_multiplier": 0.1},
    {"mixture": "random_layer"},
    {"mixture": "random_layer", "adversarial_mlm_multiplier": 0.5},
    {"mixture": "random_layer", "adversarial_mlm_multiplier": 0.5, "gumbel_entries": 20},
    {"mixture": "layer_switch"},
    {"mixture": "fixed", "fixed_mixture_weights": "1,0,0"},
    {"mixture": "fixed", "fixed_mixture_weights": "0.2,0.3,0.5", "separate_generators": True},
    {"generator_depths": "3"},
    {"no_stop_gradient": True},
    {"separate_generators": True, "generator_depths": "2,2"},
    {"relative_position_scheme": "amos"},
    {"relative_position_scheme": "none"},
    {"adversarial_mlm_multiplier": 0.5},
    {"embedding_dim": 8},
    {"generator_checkpoint": "amos_separate", "generator_temperature_start": 2.0},
    {"generator_checkpoint": "mlm:modern:narrow"},
]
KERNELS = ("fast", "reference")
OBJECTIVES = ("mlm", "electra", "amos", "teams", "electric")
STEPS = [
    *(("amos", settings) for settings in AMOS),
    *(("electra", settings) for settings in ELECTRA_VARIANTS.values()),
    *((variant, {}) for variant in ELECTRIC_VARIANTS),
    *((variant, {"generator_loss_tokens": "all"}) for variant in ("electric", "electra_tt")),
    *(("teams", settings) for settings in TEAMS_LAYOUTS),
    ("teams", {"negative_sampling": "hardest"}),
    *((name, of | {"kernels": way}) for of in (MODERN, DEBERTA) for name in OBJECTIVES for way in KERNELS),
    ("electra", DEBERTA_PAIR),
]


@pytest.mark.parametrize(("objective", "settings"), STEPS, ids=str)
def test_step_synchronizes_nothing_and_uses_every_parameter(objective: str, settings: dict[str, Any]) -> None:
    """DistributedDataParallel waits for the gradient of every parameter."""
    model, criterion = model_and_criterion(objective, **settings)
    assert not operations_of_step(model, criterion) & SYNCHRONIZING
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad, name
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def operations_of_step(model: torch.nn.Module, criterion: torch.nn.Module) -> set[str]:
    batch = small_batch()
    with Operations() as operations:
        criterion(model, batch)[0].backward()
    assert {"aten::gelu", "aten::embedding_dense_backward"} <= operations.names  # forward and backward were recorded
    return operations.names


@pytest.mark.parametrize("positions", ["masked", "random"])
def test_detection_at_some_positions_synchronizes_nothing(positions: str) -> None:
    model, _ = model_and_criterion("electra")
    assert not operations_of_step(model, electra_criterion(detection_positions=positions)) & SYNCHRONIZING

"""Nothing in the model, the criterion and the backward pass waits for the device: seen on the CPU by the operations called."""

from typing import Any

import pytest
import torch
from device_synchronization import WAITING
from small_models import small_batch, small_criterion, small_model
from small_teams import ONLY_RTD, small_teams, teams_criterion
from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    """The names of all operations, those of the backward pass included."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.add(function.name().partition(".")[0])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "settings",
    [
        {"mixture": "learned"},
        {"mixture": "learned", "gumbel_entries": 20},
        {"mixture": "learned", "kernels": "reference"},
        {"mixture": "learned", "activation_checkpointing": True, "dropout": 0.1},
        {"mixture": "uniform"},
        {"mixture": "random_layer", "adversarial_mlm_multiplier": 0.5},
        {"mixture": "random_layer", "adversarial_mlm_multiplier": 0.5, "gumbel_entries": 20},
        {"mixture": "layer_switch"},
        {"mixture": "fixed", "fixed_mixture_weights": "0.2,0.3,0.5", "separate_generators": True},
    ],
    ids=str,
)
def test_a_step_waits_for_nothing(settings: dict[str, Any]) -> None:
    model, criterion, batch = small_model(**settings), small_criterion(), small_batch()
    with Recorder() as recorder:
        loss, _, _ = criterion(model, batch)
        loss.backward()
    assert "aten::gelu" in recorder.operations  # forward was seen
    assert "aten::embedding_dense_backward" in recorder.operations  # and backward
    assert not recorder.operations & WAITING


@pytest.mark.parametrize("settings", [{}, {"negative_sampling": "hardest", "task_heads": "ffn"}, ONLY_RTD], ids=str)
def test_a_step_of_teams_waits_for_nothing(settings: dict[str, Any]) -> None:
    model, batch = small_teams(**settings), small_batch()
    with Recorder() as recorder:
        teams_criterion(model)(model, batch)[0].backward()
    assert "aten::embedding_dense_backward" in recorder.operations
    assert not recorder.operations & WAITING


def test_the_recorder_sees_what_waits() -> None:
    with Recorder() as recorder:
        ones = torch.tensor([1.0, 2.0])
        ones.sum().item()
        ones[ones > 1]
    assert recorder.operations >= {"aten::lift_fresh", "aten::_local_scalar_dense"}

"""NVIDIA's apex: FusedAdam for ``grouped_adam`` where it can run, and states that move between machines with and without it.

fairseq uses apex wherever it can be imported and there is a GPU: FusedAdam for ``--optimizer adam``, FusedLayerNorm for every
LayerNorm. This package uses PyTorch's fused LayerNorm always. Both have the same parameters, so checkpoints are the same.

The states of FusedAdam and of PyTorch's or fairseq's Adam hold the same moments but count updates in different places: one
``step`` in each parameter group, or one in the state of each parameter. FusedAdam also counts updates in which a parameter has
no gradient; a group that is converted to it gets the largest count of its parameters.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from fairseq.optim import FairseqOptimizer

State = dict[str, Any]


def fused_adam() -> type[torch.optim.Optimizer] | None:
    """Return FusedAdam if it can run here: there is a GPU, and apex was built with its CUDA extensions.

    The package called apex on PyPI is another program.
    """
    if not torch.cuda.is_available():
        return None
    try:
        is_built = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier.available
        return importlib.import_module("apex.optimizers").FusedAdam if is_built else None
    except ImportError:
        return None


def load_either_layout(
    load_state_dict: Callable[..., None],
    optimizer: FairseqOptimizer,
    state_dict: State,
    optimizer_overrides: Any = None,
) -> None:
    """Load the state of an Adam of either kind; the other kind would fail with a ``KeyError`` at the next update."""
    load_state_dict(optimizer, in_layout_of(optimizer.optimizer, state_dict), optimizer_overrides)


def in_layout_of(optimizer: torch.optim.Optimizer, saved: State) -> State:
    """Return ``saved`` with its counts of updates where ``optimizer`` keeps them; it is not changed itself."""
    states = {index: dict(state) for index, state in saved["state"].items()}
    from_apex = all("bias_correction" in group for group in saved["param_groups"])
    from_apex &= not any("step" in state for state in states.values())
    to_apex = any(kind.__module__.startswith("apex.") for kind in type(optimizer).__mro__)
    if from_apex == to_apex:
        return saved
    groups = []
    for here, group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        # Settings that only the other kind has are left out, those that only this kind has keep their present value.
        converted = {name: group.get(name, value) for name, value in here.items()} | {"params": group["params"]}
        of_group = [states[index] for index in group["params"] if index in states]
        if to_apex:
            converted["step"] = max((int(state.pop("step")) for state in of_group), default=0)
        for state in of_group if from_apex else ():
            state["step"] = int(group["step"])
        groups.append(converted)
    return {**saved, "state": states, "param_groups": groups}

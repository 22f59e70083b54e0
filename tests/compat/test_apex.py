"""Optimizer states that move between machines with and without NVIDIA's apex, against AdamW in float64."""

import io
import sys

import apex_stand_in
import pytest
import torch
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
from torch import nn

from amos_fairseq.modules.initialization import ParameterGroup
from amos_fairseq.optim import grouped_adam
from amos_fairseq.optim.grouped_adam import GroupedAdam, GroupedAdamConfig

LR, BETAS, EPSILON, DECAY = 0.01, (0.9, 0.98), 1e-6, 0.1
UPDATES = 6


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, 3, generator=generator) for _ in range(UPDATES)]


def initial_parameters() -> list[nn.Parameter]:
    """Two decayed parameters and one that is not, in groups of their own where groups are known."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 3, generator=generator)) for _ in range(3)]
    parameters[2].param_group = ParameterGroup(is_decayed=False)
    return parameters


def expected(decays: tuple[float, ...], corrected: bool) -> torch.Tensor:
    """All updates in float64: decoupled weight decay, moments with or without bias correction."""
    values = torch.stack([parameter.detach() for parameter in initial_parameters()]).double()
    first, second = torch.zeros_like(values), torch.zeros_like(values)
    for step, gradient in enumerate(gradients(), start=1):
        first = BETAS[0] * first + (1 - BETAS[0]) * gradient
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient.double() ** 2
        means = first / (1 - BETAS[0] ** step), second / (1 - BETAS[1] ** step)
        means = means if corrected else (first, second)
        decay = torch.tensor(decays, dtype=torch.float64)[:, None, None] * values
        values = values - LR * (means[0] / (means[1].sqrt() + EPSILON) + decay)
    return values


def build(kind: str, with_apex: bool, parameters: list[nn.Parameter], monkeypatch, corrected: bool = True):
    """The optimizer that a machine with or without apex builds."""
    with monkeypatch.context() as patch:
        if with_apex:
            apex_stand_in.install(patch)
            patch.setattr(grouped_adam, "on_gpu", lambda groups: True)
            # Stock fairseq wraps apex's class, with the same state.
            apex_adam = lambda params, use_fp16_stats, **settings: apex_stand_in.FusedAdam(params, **settings)  # noqa: E731
            patch.setattr("fairseq.optim.adam.get_fused_adam_class", lambda: apex_adam)
        settings = {"lr": [LR], "adam_betas": str(BETAS), "adam_eps": EPSILON, "weight_decay": DECAY}
        if kind == "adam":
            optimizer = FairseqAdam(FairseqAdamConfig(tpu=False, **settings), parameters)
        else:
            optimizer = GroupedAdam(GroupedAdamConfig(bias_correction=corrected, **settings), parameters)
    assert isinstance(optimizer.optimizer, apex_stand_in.FusedAdam) == with_apex
    return optimizer


@pytest.mark.parametrize(
    ("kind", "decays", "corrected"),
    [
        ("adam", (DECAY, DECAY, DECAY), True),
        ("grouped_adam", (DECAY, DECAY, 0.0), True),
        ("grouped_adam", (DECAY, DECAY, 0.0), False),
    ],
)
@pytest.mark.parametrize("machines", [(True, False, True), (False, True, False)])
def test_moved_between_machines(kind, decays, corrected, machines, monkeypatch):
    """After each machine's part of the updates a checkpoint is saved, and the next machine continues from it."""
    parameters, state = initial_parameters(), None
    for machine, with_apex in enumerate(machines):
        optimizer = build(kind, with_apex, parameters, monkeypatch, corrected)
        if state is not None:
            optimizer.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
        for gradient in gradients()[machine * UPDATES // len(machines) : (machine + 1) * UPDATES // len(machines)]:
            for parameter, of_parameter in zip(parameters, gradient, strict=True):
                parameter.grad = of_parameter.clone()
            optimizer.step()
        state = io.BytesIO()
        torch.save(optimizer.state_dict(), state)
        state = state.getvalue()
        by_group = ["step" in group for group in optimizer.state_dict()["param_groups"]]
        by_parameter = ["step" in each for each in optimizer.state_dict()["state"].values()]
        assert by_group == [with_apex] * len(by_group), "no old count remains in the other place"
        assert by_parameter == [not with_apex] * 3
    found = torch.stack([parameter.detach() for parameter in parameters])
    torch.testing.assert_close(found.double(), expected(decays, corrected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reason", ["not built", "another package", "--cpu"])
def test_pytorch_without_a_usable_apex(reason, monkeypatch):
    apex_stand_in.install(monkeypatch, is_built=reason != "not built")
    if reason == "another package":  # the apex on PyPI has no optimizers
        for name in ("apex.optimizers", "apex.multi_tensor_apply"):
            monkeypatch.delitem(sys.modules, name)
    if reason != "--cpu":
        monkeypatch.setattr(grouped_adam, "on_gpu", lambda groups: True)
    optimizer = GroupedAdam(GroupedAdamConfig(lr=[LR]), initial_parameters())
    assert isinstance(optimizer.optimizer, torch.optim.AdamW)

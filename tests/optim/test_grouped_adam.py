"""GroupedAdam against AdamW written out in float64, its two groups by name, and its way through fairseq."""

import copy
import math
import re
from dataclasses import replace

import pytest
import torch
from fairseq.optim.fp16_optimizer import FP16Optimizer
from small_models import bf16_optimizer, small_amos

from amos_fairseq.errors import UserError
from amos_fairseq.modules.encoder import ParameterGroup
from amos_fairseq.optim.grouped_adam import GroupedAdam, GroupedAdamConfig

LEARNING_RATE, BETA_1, BETA_2, EPSILON, DECAY = 0.01, 0.9, 0.98, 1e-6, 0.1


def config(**settings) -> GroupedAdamConfig:
    return GroupedAdamConfig(lr=[LEARNING_RATE], weight_decay=DECAY, **settings)


def groups_by_name(optimizer: GroupedAdam, model) -> dict[float, set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in optimizer.param_groups}


def test_norms_biases_v_and_tables_are_not_decayed_unless_the_flag_says_so():
    model = small_amos(generator_depths="1,2")
    names = {name for name, _ in model.named_parameters()}
    kinds = re.compile(r"(bias|norm\.weight|mixture\.v|relative_position\.table\.weight)$")
    undecayed = {name for name in names if kinds.search(name)}
    groups = groups_by_name(GroupedAdam(config(), model.parameters()), model)
    assert groups == {0.0: undecayed, DECAY: names - undecayed}
    groups = groups_by_name(GroupedAdam(config(decay_all_parameters=True), model.parameters()), model)
    assert groups == {DECAY: names}


def naive_adamw(value, gradients, rates, decay: float, corrected: bool = True) -> torch.Tensor:
    """Loshchilov and Hutter (2019), Algorithm 2, with PyTorch's place for epsilon; without the correction as in BERT's code."""
    value = value.double().clone()
    first, second = torch.zeros_like(value), torch.zeros_like(value)
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        gradient = gradient.double()
        first = BETA_1 * first + (1 - BETA_1) * gradient
        second = BETA_2 * second + (1 - BETA_2) * gradient**2
        value -= rate * decay * value
        corrections = (1 - BETA_1**step, 1 - BETA_2**step) if corrected else (1, 1)
        value -= rate * (first / corrections[0]) / ((second / corrections[1]).sqrt() + EPSILON)
    return value


@pytest.mark.parametrize("corrected", [True, False])
def test_steps_match_adamw_for_both_groups(corrected):
    """Five steps, the learning rate changed on the way by fairseq's set_lr; after three a new optimizer continues."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(4, 3, generator=generator)) for _ in range(2)]
    parameters[1].param_group = ParameterGroup(is_decayed=False)
    start = [parameter.detach().clone() for parameter in parameters]
    gradients = [[torch.randn(4, 3, generator=generator) for _ in range(5)] for _ in range(2)]
    rates = [0.0, 0.01, 0.02, 0.01, 0.001]
    optimizer = GroupedAdam(config(bias_correction=corrected), parameters)
    for step, rate in enumerate(rates):
        if step == 3:
            state = optimizer.state_dict()
            optimizer = GroupedAdam(config(bias_correction=corrected), parameters)
            optimizer.load_state_dict(state)
        optimizer.set_lr(rate)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient[step].clone()
        optimizer.step()
        assert [group["lr"] for group in optimizer.param_groups] == [rate, rate]
        assert {group["eps"] for group in optimizer.param_groups} == {EPSILON}
    for parameter, value, gradient, decay in zip(parameters, start, gradients, (DECAY, 0.0), strict=True):
        expected = naive_adamw(value, gradient, rates, decay, corrected)
        assert torch.allclose(parameter.double(), expected, atol=1e-6)
        assert not torch.allclose(naive_adamw(value, gradient, rates, decay, not corrected), expected, atol=1e-3)


def test_parameters_without_a_gradient_are_left_alone():
    """PyTorch's AdamW with one group beside ours, in updates 1 and 4 of five without a gradient for one parameter."""
    generator = torch.Generator().manual_seed(0)
    ours, theirs = ([torch.nn.Parameter(torch.ones(4, 3)) for _ in range(3)] for _ in range(2))
    optimizer = GroupedAdam(config(adam_betas="(0.9, 0.98)"), ours)
    peer = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.98), eps=EPSILON, weight_decay=DECAY, fused=True)
    optimizer.set_lr(0.01)
    for step in range(5):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            gradient = torch.randn(4, 3, generator=generator)
            for parameter in pair:
                parameter.grad = None if (index, step) in ((1, 0), (1, 3)) else gradient.clone()
        optimizer.step()
        peer.step()
        assert all(map(torch.equal, ours, theirs)), step
    assert [float(optimizer.optimizer.state[parameter]["step"]) for parameter in ours] == [5, 3, 5]


def test_count_of_updates_after_a_resume_is_the_largest():
    """The first parameter has had a gradient in the first of three updates only."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    whole = GroupedAdam(config(bias_correction=False), parameters)
    for update in range(3):
        parameters[0].grad = torch.ones(2) if update == 0 else None
        parameters[1].grad = torch.ones(2)
        whole.step()
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    resumed = GroupedAdam(config(bias_correction=False), copies)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    for optimizer, group in ((whole, parameters), (resumed, copies)):
        for parameter in group:
            parameter.grad = torch.ones(2)
        optimizer.step()
    assert torch.equal(torch.stack(parameters), torch.stack(copies))


def parameters_with_gradients(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5,))]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return parameters


@pytest.mark.parametrize("scale", [3.0, torch.tensor(3.0), torch.tensor(3.0, dtype=torch.float64)], ids=str)
def test_step_divides_gradients_by_the_scale(scale):
    """fairseq gives a tensor where clipping, or several ranks, made it; a step without one afterwards has none."""
    ours, expected = parameters_with_gradients(), parameters_with_gradients()
    optimizers = [GroupedAdam(config(), parameters) for parameters in (ours, expected)]
    for update in range(2):
        for mine, plain in zip(ours, expected, strict=True):
            mine.grad = plain.grad = torch.full_like(plain, 0.5 + update)
            plain.grad = plain.grad / 3
        optimizers[0].step(scale=scale)
        optimizers[1].step()
    optimizers[0].step()
    for mine, plain in zip(ours, expected, strict=True):
        plain.grad = mine.grad
    optimizers[1].step()
    for mine, plain in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 100.0])
def test_clipping_by_the_norm_of_all_gradients(max_norm):
    """The norm in float64; scaled only where it is above a limit that is not 0; a parameter without gradient is none."""
    parameters = parameters_with_gradients()
    before = [parameter.grad.double() for parameter in parameters]
    expected = math.sqrt(sum(float(gradient.square().sum()) for gradient in before))
    optimizer = GroupedAdam(config(), [*parameters, torch.nn.Parameter(torch.zeros(2))])
    assert float(optimizer.clip_grad_norm(max_norm)) == pytest.approx(expected, rel=1e-6)
    factor = 0.5 / expected if max_norm == 0.5 else 1.0
    for parameter, gradient in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.grad.double(), gradient * factor, rtol=1e-5, atol=0)  # fairseq's 1e-6
    doubled = optimizer.clip_grad_norm(0.0, aggregate_norm_fn=lambda norm: norm * 2)
    assert float(doubled) == pytest.approx(2 * expected * factor, rel=1e-5)


def continued_in_bf16(flags: dict, overrides: dict | None = None) -> FP16Optimizer:
    """fairseq's wrapper of a run that made one update with the flags of :func:`config` and continues with ``flags``."""
    saved = None
    for settings in ({}, flags):
        parameters = list(small_amos(generator_depths="1,2").bfloat16().parameters())
        optimizer = bf16_optimizer(replace(config(), **settings), parameters)
        if saved is None:
            optimizer.zero_grad()
            optimizer.backward(sum(parameter.float().sum() for parameter in parameters))
            optimizer.step()
            saved = optimizer.state_dict()
    optimizer.load_state_dict(saved, overrides)
    return optimizer


def test_changed_flags_apply_to_the_float32_copies_of_bf16():
    """The moments are the checkpoint's, the settings those of the flags, and fairseq's --optimizer-overrides come last;
    undecayed parameters remain undecayed."""
    flags = {"adam_betas": "(0.8, 0.95)", "adam_eps": 1e-4, "weight_decay": 0.3}
    for overrides, eps in ((None, 1e-4), ({"eps": 0.5}, 0.5)):
        optimizer = continued_in_bf16(flags, overrides)
        settings = [(group["betas"], group["eps"], group["weight_decay"]) for group in optimizer.param_groups]
        assert settings == [((0.8, 0.95), eps, 0.3), ((0.8, 0.95), eps, 0.0)]
    assert {float(state["step"]) for state in optimizer.fp32_optimizer.optimizer.state.values()} == {1.0}
    with pytest.raises(UserError, match=r"groups of \[.*\] parameters, this run's of .* --decay-all-parameters"):
        continued_in_bf16({"decay_all_parameters": True})


@pytest.mark.parametrize("betas", ["0.9", "(0.9, 1.0)", "(-0.1, 0.9)", "(0.9, 0.98, 0.99)", "open('x')", "(a, b)", ""])
def test_invalid_betas_are_refused(betas):
    with pytest.raises(UserError, match="--adam-betas needs two numbers"):
        GroupedAdam(config(adam_betas=betas), [torch.nn.Parameter(torch.zeros(2))])

"""Encoders with ``kernels=triton``: against their reference in the interpreter, and whole updates on a fake CUDA device."""

import dataclasses
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from fake_cuda import fake_cuda
from fake_steps import FakeRun
from small_models import encoder_config
from torch import Tensor
from triton_interpreter import interpreted

from amos_fairseq.errors import UserError
from amos_fairseq.functional import attention
from amos_fairseq.functional.attention import choose_backend
from amos_fairseq.models.electric import TwoTower
from amos_fairseq.modules import bert_encoder as encoders
from amos_fairseq.modules.bert_encoder import BertEncoder, BertEncoderConfig
from amos_fairseq.run.kernels import require_triton

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

SIZES = {"num_layers": 2, "width": 32, "ffn_width": 48, "num_heads": 2, "max_positions": 40}
SHAPE = encoder_config(**SIZES, position_buckets=8, position_max_distance=16)


@pytest.fixture
def kernels() -> Iterator[ModuleType]:
    yield from interpreted("attention")


@pytest.fixture
def takes_triton(kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoders take in float32 on the CPU what they take in float16 on CUDA."""
    on_cuda = (torch.device("cuda"), torch.float16)
    monkeypatch.setattr(attention, "compute_generation", lambda device: attention.AMPERE)
    monkeypatch.setattr(encoders, "choose_backend", lambda device, dtype, *others: choose_backend(*on_cuda, *others))


def both(make, shape: BertEncoderConfig) -> tuple[torch.nn.Module, torch.nn.Module]:
    """With Triton and by definition, with the same weights; the tables of positions are not all alike."""
    torch.manual_seed(0)
    fast, reference = (make(dataclasses.replace(shape, kernels=kernels)) for kernels in ("triton", "reference"))
    for parameter in fast.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    reference.load_state_dict(fast.state_dict())
    return fast, reference


def assert_equal_gradients(fast: torch.nn.Module, reference: torch.nn.Module) -> None:
    """float32 sums in another order: 1e-5 of the norm. What no layer reads has no gradient in either."""
    for (name, parameter), other in zip(fast.named_parameters(), reference.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if other.grad is not None:
            assert (parameter.grad - other.grad).norm() <= 1e-5 * other.grad.norm() + 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize(("has_padding", "scheme"), [(True, "t5"), (False, "none")])
def test_an_encoder_equals_its_reference(takes_triton, has_padding: bool, scheme: str) -> None:
    """At 19 tokens, with the last layer at some positions alone; the bias is one value a distance."""
    fast, reference = both(BertEncoder, dataclasses.replace(SHAPE, position_scheme=scheme))
    embeddings, positions = torch.randn(2, 19, 32), torch.randint(9, (2, 4))
    padding = torch.zeros(2, 19, dtype=torch.bool)
    padding[1, 10:] = True
    padding = padding if has_padding else None
    assert isinstance(fast.attention_context(embeddings, padding), attention.ToeplitzBias)
    results = []
    for encoder in (fast, reference):
        first, last = encoder(embeddings, padding, last_positions=positions)
        if has_padding:
            first = first * ~padding.unsqueeze(-1)
        (first.pow(2).mean() + last.sin().sum()).backward()
        results.append((first, last))
    for of_fast, of_reference in zip(*results, strict=True):
        torch.testing.assert_close(of_fast, of_reference, rtol=1e-5, atol=1e-5)
    assert_equal_gradients(fast, reference)


def test_kernels_are_tried_as_a_training_needs_them(kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bias and dropout, forward and backward, once for each width of a head; what fails is one line."""
    wide = dataclasses.replace(SHAPE, kernels="triton")
    narrow = dataclasses.replace(wide, width=40, num_heads=1)
    too_narrow = dataclasses.replace(wide, width=32, num_heads=4)  # 8: not for Triton
    model = torch.nn.ModuleList(BertEncoder(shape) for shape in (wide, wide, narrow, too_narrow))
    tried = []
    attend = kernels.triton_attention

    def recorded(heads: Tensor, bias: Tensor, dropout: float) -> Tensor:
        tried.append((heads.size(-1), bias.requires_grad, dropout))
        return attend(heads, bias, dropout=dropout)

    monkeypatch.setattr(kernels, "triton_attention", recorded)
    require_triton(torch.device("cpu"), model)
    assert tried == [(16, True, 0.1), (40, True, 0.1)]
    require_triton(torch.device("cpu"), torch.nn.Linear(1, 1))  # ModernBERT's: for the output layer
    assert tried[2:] == [(16, True, 0.1)]

    def fail(*arguments, **named) -> None:
        raise RuntimeError("\nno compiler\nand more")

    monkeypatch.setattr(kernels, "triton_attention", fail)
    with pytest.raises(
        UserError, match=r"^model\.kernels=triton does not work on this machine \(no compiler\): install"
    ):
        require_triton(torch.device("cpu"), model)


@pytest.mark.slow
def test_two_towers_equal_their_reference(takes_triton) -> None:
    fast, reference = both(TwoTower, SHAPE)
    embeddings = torch.randn(2, 18, 32)
    padding = torch.zeros(2, 18, dtype=torch.bool)
    padding[0, 11:] = True
    results: list[Tensor] = []
    for towers in (fast, reference):
        states = towers(embeddings, padding) * ~padding.unsqueeze(-1)
        states.sin().sum().backward()
        results.append(states)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert_equal_gradients(fast, reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [["amos_tiny"], ["teams_tiny"], ["electra_tiny", "model.disallow_true_token=true"]], ids=" ".join
)
def test_every_objective_trains_and_validates(monkeypatch: pytest.MonkeyPatch, overrides: list[str]) -> None:
    """bfloat16, tensors on device cuda that have no numbers: no host waits, shapes and dtypes fit from end to end."""
    from amos_fairseq.functional.cuda import output_layer as kernels

    devices = []
    run_layer = kernels.output_layer
    monkeypatch.setattr(kernels, "output_layer", lambda *a: devices.append(a[0].device.type) or run_layer(*a))
    with fake_cuda() as cuda:
        FakeRun.of(cuda, overrides[0], ["model.kernels=triton", *overrides[1:]]).check()
    assert devices == ["cuda"] * len(devices)
    assert len(devices) >= 2

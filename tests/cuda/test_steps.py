"""Recipes of each kind take whole updates on a CUDA device that has no memory: forward and backward pass, clipping, optimizer
and validation, on FakeTensors.

A step fails on what CUDA or PyTorch's fused kernels would refuse (tests/helpers/fake_cuda.py): tensors of two devices in one
operator, strides or dtypes that a kernel does not take, a host that reads a value. It also fails on a parameter without a
gradient. Values are compared elsewhere.
"""

import functools
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import CudaRuleError, fake_cuda
from fake_steps import VOCABULARY, FakeRun
from saved_models import write_untrained
from small_models import modern_config
from synchronization import Operations
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import DataDependentOutputException

from amos_fairseq.checkpoints import read
from amos_fairseq.criterions.mlm import MlmCriterion
from amos_fairseq.functional import attention
from amos_fairseq.functional.attention import AttentionBias, fast_attention
from amos_fairseq.modules.encoder import TransformerEncoder, compiled_call

pytestmark = pytest.mark.slow
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize(
    ("recipe", "precision", "length"),
    [
        ("amos_tiny", "bf16", 512),
        ("electra_tiny", "fp16", 65),
        ("electric_tiny", "bf16", 65),
        ("mlm_tiny", "float32", 512),
        ("teams_tiny", "bf16", 7),
        # Layers 1 and 4 are global.
        ("amos_modern_mini model.encoder_layers=4 model.generator_depths='1,2'", "bf16", 65),
    ],
)
def test_every_objective_trains(recipe: str, precision: str, length: int) -> None:
    """At lengths that are no multiple of 8 a mask needs padded rows. The second update finds the optimizer's moments."""
    name, *settings = recipe.split()
    overrides = [f"task.tokens_per_sample={length}", "model.max_positions=512", *settings]
    with fake_cuda() as cuda:
        FakeRun.of(cuda, name, overrides, precision).check()


@pytest.mark.parametrize(
    "overrides",
    [
        ["amos_tiny", "model.mixture=random_layer", "model.separate_generators=true"],
        ["amos_tiny", "model.no_stop_gradient=true", "model.adversarial_mlm_multiplier=0.5", "model.gumbel_entries=0"],
        ["variants/electra_adversarial", "+sizes=tiny", "model.activation_checkpointing=true"],
        ["amos_tiny", "model.generator_checkpoint=AMOS:MODERN", "model.generator_temperature_start=2"],
        ["variants/two_tower", "+sizes=tiny"],
    ],
    ids=" ".join,
)
def test_settings_with_code_of_their_own_train_and_validate(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "weights_sha256", lambda weights: "")  # FakeTensors have no values
    recipe, *settings = overrides
    for index, setting in enumerate(settings):
        for name, of_generator in (("AMOS", "amos_tiny"), ("MODERN", "mlm_modern_mini")):
            if re.search(rf"[=:]{name}", setting):
                file = write_untrained(tmp_path / f"{name}.pt", of_generator, VOCABULARY)
                settings[index] = setting = re.sub(rf"([=:]){name}", rf"\1{file}", setting)
    with fake_cuda() as cuda:
        run = FakeRun.of(cuda, recipe, settings)
        run.check_update(run.padded)
        run.check_validation(run.full)


@pytest.mark.parametrize("kernels", ["fast", pytest.param("triton", marks=NEEDS_TRITON)])
def test_deterministic_kernels(kernels: str, restored_determinism: None) -> None:
    """An operator without a fixed order fails the step. Length 128 without dropout is where cuDNN would attend."""
    overrides = ["model.deterministic=true", f"model.kernels={kernels}", "task.tokens_per_sample=128"]
    with fake_cuda() as cuda, Operations() as operations:
        run = FakeRun.of(cuda, "amos_tiny", [*overrides, "model.max_positions=128"])
        assert torch.are_deterministic_algorithms_enabled()
        run.check()
    kernel = "amos_fairseq::attention" if kernels == "triton" else "aten::_scaled_dot_product_efficient_attention"
    assert kernel in operations.names
    assert not any("cudnn" in name for name in operations.names)


@pytest.fixture
def traced(nothing_compiled: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """AOTAutograd traces compiled layers, no code is generated. A graph break is an error, and so are more graphs than
    PyTorch's limit, beyond which a layer would run as written."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    compiled_call.cache_clear()
    with torch._dynamo.config.patch(optimize_ddp=False, fail_on_recompile_limit_hit=True):
        yield
    compiled_call.cache_clear()


@pytest.mark.parametrize(
    ("recipe", "precision", "length"),
    [
        ("electra_tiny", "fp16", 65),
        pytest.param("amos_tiny model.kernels=triton", "bf16", 128, marks=NEEDS_TRITON),
    ],
)
def test_every_layer_is_part_of_a_graph(recipe: str, precision: str, length: int, traced: None) -> None:
    """At 65 tokens the mask has padded rows, which the graph has to keep."""
    name, *settings = recipe.split()
    overrides = [f"task.tokens_per_sample={length}", "model.max_positions=128", *settings]
    with fake_cuda() as cuda:
        run = FakeRun.of(cuda, name, overrides, precision)
        for module in run.step.module.modules():
            if isinstance(module, TransformerEncoder):
                module.is_compiled = True
        run.check_update(run.full)
        run.check_update(run.padded)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("defect", "error"),
    [
        ("reads its loss", DataDependentOutputException),
        ("makes a constant on the CPU", AssertionError),
        ("adds a parameter that nothing uses", AssertionError),
        ("multiplies two dtypes", CudaRuleError),
    ],
)
def test_a_defect_fails_the_step(defect: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    forward = MlmCriterion.forward

    def spoiled(self, *args, **kwargs):
        loss, *rest = forward(self, *args, **kwargs)
        if defect == "reads its loss":
            float(loss.detach())
        return (loss * torch.ones(1).to(loss.device), *rest)

    with fake_cuda() as cuda:
        run = FakeRun.of(cuda, "mlm_tiny")
        if defect.startswith("adds"):
            run.step.module.left_over = nn.Linear(2, 1, device="cuda")
        elif defect.startswith("multiplies"):
            run.step.module.mlm_head.float()
        else:
            monkeypatch.setattr(MlmCriterion, "forward", spoiled)
        with pytest.raises(error):
            run.check_update(run.full)


MASK, CUDNN, VARLEN = "efficient_attention", "cudnn_attention", "_varlen_attn"
needs_varlen = pytest.mark.skipif(not attention.has_varlen(), reason="from PyTorch 2.11 on")


def kernels_of(operations: Operations) -> set[str]:
    names = {name.partition("::")[2] for name in operations.names}
    return {name.removeprefix("_scaled_dot_product_") for name in names if "att" in name}


def test_cudnn_attends_without_a_bias_on_hopper() -> None:
    for capability, dtype, length, width, dropout, kernel in (
        ((9, 0), torch.bfloat16, 512, 64, 0.0, "cudnn"),
        ((8, 0), torch.bfloat16, 512, 64, 0.0, "flash"),
        ((9, 0), torch.bfloat16, 512, 64, 0.125, "flash"),
        ((9, 0), torch.bfloat16, 448, 64, 0.0, "flash"),
        ((9, 0), torch.bfloat16, 512, 136, 0.0, "flash"),
        ((9, 0), torch.float32, 512, 64, 0.0, "efficient"),
    ):
        with fake_cuda(capability), Operations() as operations:
            fast_attention(torch.empty(2, length, 3, 3, width, device="cuda", dtype=dtype), AttentionBias(), dropout)
        assert kernels_of(operations) == {f"{kernel}_attention"}, (capability, dtype, length, width, dropout)


def modernbert_kernels(length: int, *, is_padded: bool = False, is_packed: bool = False, **settings: Any) -> set[str]:
    """The operators of attention in both directions of a ModernBERT with a global and a local layer, in bfloat16."""
    shape = modern_config(width=128, num_heads=2, ffn_width=64, num_layers=2, **settings)
    lengths = [length, length // 2] if is_packed else None
    with fake_cuda(), Operations() as operations:
        encoder = shape.build().to("cuda", torch.bfloat16).train()
        padding = torch.zeros(2, length, dtype=torch.bool, device="cuda") if is_padded or is_packed else None
        embeddings = torch.empty(2, length, 128, device="cuda", dtype=torch.bfloat16)
        encoder(embeddings, padding, lengths=lengths)[-1].sum().backward()
    return kernels_of(operations)


def both_directions(*kernels: str) -> set[str]:
    return {f"{kernel}{direction}" for kernel in kernels for direction in ("", "_backward")}


@needs_varlen
def test_kernels_of_modernbert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full blocks, padding, packed texts; dropout or an older PyTorch take a mask, also in blocks, but never cuDNN, whose
    backward pass gives NaN with a mask.
    """
    assert modernbert_kernels(256) == both_directions(CUDNN, VARLEN)
    assert modernbert_kernels(256, is_packed=True) == both_directions(VARLEN)
    assert modernbert_kernels(256, is_packed=True, attention_dropout=0.1) == both_directions(MASK)
    assert modernbert_kernels(256, is_padded=True) == both_directions(MASK)
    assert modernbert_kernels(256, attends_to="past") == both_directions(VARLEN)
    assert modernbert_kernels(65) == both_directions("flash_attention")  # a window is not needed
    monkeypatch.setattr(attention, "has_varlen", lambda: False)
    assert modernbert_kernels(256) == both_directions(CUDNN, MASK)
    assert modernbert_kernels(256, is_packed=True) == both_directions(MASK)


@pytest.mark.parametrize(("kernel", "dropout"), [("flash", 0.1), ("cudnn", 0.0)])
def test_gradients_of_query_key_and_value_are_written_into_one_packed_tensor(kernel: str, dropout: float) -> None:
    """Contiguous, as the linear layer behind it reads it, and not copied."""
    with fake_cuda():
        packed = torch.empty(2, 128, 3, 3, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        mixed = fast_attention(packed.view_as(packed), AttentionBias(), dropout)
        assert mixed.is_contiguous()
        with Operations() as operations:
            mixed.backward(torch.empty_like(mixed))
        assert packed.grad.is_contiguous()
    assert f"aten::_scaled_dot_product_{kernel}_attention_backward" in operations.names
    assert not operations.names & {"aten::clone", "aten::copy_", "aten::cat"}


def test_the_table_of_backends_under_deterministic_algorithms(restored_determinism: None) -> None:
    device = torch.device("cuda", 0)
    with fake_cuda():
        arguments = {"has_bias": False, "length": 512}
        assert attention.choose_backend(device, torch.bfloat16, 64, **arguments) == "cudnn"
        torch.use_deterministic_algorithms(True)
        assert attention.choose_backend(device, torch.bfloat16, 64, **arguments) == "flash"
        assert attention.choose_backend(device, torch.bfloat16, 64, True) == "efficient"
        assert attention.choose_backend(device, torch.bfloat16, 64, True, True) == "triton"

"""Compiled layers take whole updates on a fake CUDA device; AOTAutograd traces them, no code is generated."""

import functools
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from fake_cuda import fake_cuda
from fake_steps import FakeRun
from torch._dynamo.utils import counters

from amos_fairseq.modules.encoder import TransformerEncoder, compiled_call

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def traced(nothing_compiled: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A graph break, or more graphs than PyTorch's limit, beyond which a layer would run as written, are errors (fullgraph)."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    compiled_call.cache_clear()
    with torch._dynamo.config.patch(optimize_ddp=False, fail_on_recompile_limit_hit=True):
        yield
    compiled_call.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "precision", "length"),
    [
        ("electra_tiny", "fp16", 65),
        pytest.param("amos_tiny model.kernels=triton", "bf16", 128, marks=NEEDS_TRITON),
    ],
)
def test_every_layer_is_part_of_a_graph(recipe: str, precision: str, length: int, traced: None) -> None:
    """At 65 tokens the mask has padded rows, which the graph has to keep. A graph break is an error."""
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

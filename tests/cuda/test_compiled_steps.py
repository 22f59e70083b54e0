"""Compiled layers take whole updates on a fake CUDA device, as one graph for each kind of layer.

AOTAutograd traces forward and backward pass (backend aot_eager); no code is generated.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from fake_cuda import fake_cuda
from fake_steps import FakeRun
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from amos_fairseq.modules import encoder as encoders
from amos_fairseq.modules.bert_encoder import BertLayer
from amos_fairseq.modules.encoder import LayerCall, TransformerEncoder, compiled_call

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


class Calls:
    """How often layers ran, and how often a compiled graph ran."""

    def __init__(self) -> None:
        self.layers = self.graphs = 0

    def backend(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        run = aot_eager(graph, inputs)

        def counted(*args: Any) -> Any:
            self.graphs += 1
            return run(*args)

        return counted


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Layers go through a backend that counts; a graph break is an error (fullgraph)."""
    torch.compiler.reset()
    counters.clear()
    calls, compile_function = Calls(), torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function: compile_function(function, backend=calls.backend, fullgraph=True)
    )
    compiled_call.cache_clear()

    def counted_call() -> LayerCall:
        def call(layer: BertLayer, *args: Any) -> Any:
            calls.layers += 1
            return compiled_call()(layer, *args)

        return call

    monkeypatch.setattr(encoders, "compiled_call", counted_call)
    with torch._dynamo.config.patch(optimize_ddp=False):
        yield calls
    compiled_call.cache_clear()
    torch.compiler.reset()
    counters.clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "precision", "length"),
    [
        ("electra_tiny", "fp16", 65),
        ("mlm_tiny", "bf16", 128),  # cuDNN's kernel, which depends on the GPU
        pytest.param("amos_tiny model.kernels=triton", "bf16", 128, marks=NEEDS_TRITON),
    ],
)
def test_every_layer_is_part_of_a_graph(recipe: str, precision: str, length: int, calls: Calls) -> None:
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
    assert calls.layers == calls.graphs > 0
    assert not counters["graph_break"]

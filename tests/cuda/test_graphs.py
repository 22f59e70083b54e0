"""Updates that are captured as CUDA graphs, on the fake device: what the host would do in them, but no kernel and no replay.

A graph repeats the operators of its capture with the arguments that they had. So two captures of different updates must be the
same program, in which nothing is read from or copied to the device, and whose tensors do not outlive it.
"""

import gc
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda, fake_cuda
from fake_steps import FakeRun
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amos_fairseq.criterions.mlm import MlmCriterion
from amos_fairseq.run.graphs import WARM_UP, GraphedUpdates, refusal

pytestmark = pytest.mark.slow
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


class Program(TorchDispatchMode):
    """The operators that run while it is active: names, shapes, strides and dtypes of tensors, and all other arguments.

    All tensors are on the device, and random numbers come from its default generator, which a graph registers by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []
        self.storages: dict[int, weakref.ref] = {}  # of all tensors, by address
        self.made: set[int] = set()  # of these, what an operator has made

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace in ("profiler", "prim"):
            return result
        arguments, results = tree_leaves((args, kwargs)), tree_leaves(result)
        tensors = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
        others = [leaf for leaf in arguments if not isinstance(leaf, Tensor)]
        made = [leaf for leaf in results if isinstance(leaf, Tensor)]
        assert all(tensor.device.type == "cuda" for tensor in (*tensors, *made)), f"{function.name()} on the CPU"
        assert not any(isinstance(leaf, torch.Generator) for leaf in others), f"{function.name()} has its own generator"
        self._note(tensors, is_new=False)
        self._note(made, is_new=True)
        shapes = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        self.operators.append((function.name(), shapes, list(map(repr, others))))
        return result

    def _note(self, tensors: list[Tensor], is_new: bool) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors):
            known = self.storages.get(storage._cdata)
            if known is None or known() is not storage:
                self.storages[storage._cdata] = weakref.ref(storage)
                (self.made.add if is_new else self.made.discard)(storage._cdata)


class Recorder:
    """In place of a CUDA graph: the program of its capture, without reads and uploads."""

    def __init__(self, cuda: FakeCuda, work: Callable[[], Any]) -> None:
        before = cuda.host_reads, cuda.uploads
        reads_state = AssertionError("reads the state of a generator")
        with mock.patch.object(torch, "get_rng_state", side_effect=reads_state), Program() as program:
            self.result = work()
        assert (cuda.host_reads, cuda.uploads) == before
        self.program = program

    def replay(self) -> Any:
        return self.result


def captured(cuda: FakeCuda, recipe: str, updates: int = 2) -> tuple[FakeRun, list[Recorder]]:
    """Run a recipe until its first ``updates`` captures, each of another update, which has another seed and rate."""
    name, *settings = recipe.split()
    run = FakeRun.of(cuda, name, ["task.tokens_per_sample=64", "model.max_positions=64", *settings])
    trainer, graphs = run.step.trainer, []
    graphed = trainer.graphed_updates = GraphedUpdates(trainer, lambda work: Recorder(cuda, work))
    for update in range(WARM_UP + updates):
        run.full["first_id"] = update
        graphed.graph = graphed.graph_key = None
        reads = cuda.host_reads
        run.step.step(run.full)
        assert cuda.host_reads == reads + 1
        graphs += [graphed.graph] if graphed.graph is not None else []
    assert not any(isinstance(group["lr"], Tensor) for group in graphed.groups())
    return run, graphs


@pytest.mark.parametrize(
    "recipe",
    [
        "electra_tiny",
        "mlm_tiny",
        "teams_tiny",
        "electric_tiny",
        "amos_tiny model.mixture=random_layer",
        pytest.param("amos_tiny model.kernels=triton", marks=NEEDS_TRITON),
        "electra_modern_mini model.encoder_layers=2",
    ],
)
def test_the_captured_program_does_not_depend_on_the_update(recipe: str) -> None:
    """It reads no tensor but those that outlive it: weights, moments, gradients and the static ones. Of the tensors that it
    makes, the joined statistics are alive behind it, and a factor that is set before it is read.
    """
    with fake_cuda() as cuda:
        run, (first, second) = captured(cuda, recipe)
        assert len(first.program.operators) > 300
        assert first.program.operators == second.program.operators
        graphed = run.step.trainer.graphed_updates
        held = [*run.step.state(), *graphed.static.values(), *graphed.rates]
        read = second.program.storages.keys() - second.program.made
        assert read <= {tensor.untyped_storage()._cdata for tensor in held}
        gc.collect()
        factor = run.step.trainer.optimizer._multiply_factor
        expected = {tensor.untyped_storage()._cdata for tensor in (second.result[0][0], factor)}
        assert {address for address in second.program.made if second.program.storages[address]()} == expected
        assert refusal(run.step.trainer) is None


def test_each_replay_has_the_rates_of_its_update() -> None:
    with fake_cuda() as cuda:
        run, _ = captured(cuda, "mlm_tiny", updates=1)
        graphed, filled = run.step.trainer.graphed_updates, []
        for rate in graphed.rates:
            rate.fill_ = filled.append
        for _ in range(2):
            expected = [group["lr"] for group in graphed.groups()]
            assert expected == [float(np.float32(rate)) for rate in expected]
            run.step.step(run.full)
            assert filled == expected != []
            filled.clear()


def with_defect(forward: Callable[..., Any], defect: str) -> Callable[..., Any]:
    def spoiled(self: Any, model: Any, sample: Any, reduce: bool = True) -> Any:
        loss, *rest = forward(self, model, sample, reduce)
        if defect == "reads its loss":
            loss = loss * loss.detach().item()
        elif defect == "makes a constant on the CPU":
            loss = loss * torch.ones(1).to(loss.device)
        elif defect == "has its own generator":
            loss = loss * torch.rand(1, generator=torch.Generator(), device="cpu").to(loss.device)
        elif defect == "depends on the update":
            loss = loss * (1 + self.num_updates)
            self.num_updates += 1
        elif defect == "reads a tensor from outside":
            self.other = self.other if hasattr(self, "other") else torch.ones(1, device=loss.device)
            loss = loss * self.other
        elif defect == "keeps a tensor":
            self.kept = loss * 2
        return (loss, *rest)

    return spoiled


@pytest.mark.parametrize(
    ("defect", "error"),
    [
        ("reads its loss", "_local_scalar_dense"),
        ("makes a constant on the CPU", "ones on the CPU"),
        ("has its own generator", "rand.generator on the CPU"),
        ("depends on the update", r"aten::mul.Tensor.*\['4'\]\) != .*\['5'\]"),
        ("reads a tensor from outside", r"\} <= \{"),
        ("keeps a tensor", r"\} == \{"),
        ("model.activation_checkpointing=true model.dropout=0.1", "reads the state"),
    ],
)
def test_a_defect_is_found(defect: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = f" {defect}" if "=" in defect else ""
    monkeypatch.setattr(MlmCriterion, "num_updates", 0, raising=False)
    monkeypatch.setattr(MlmCriterion, "forward", with_defect(MlmCriterion.forward, defect))
    with pytest.raises((AssertionError, DataDependentOutputException), match=error):
        test_the_captured_program_does_not_depend_on_the_update(f"mlm_tiny{setting}")

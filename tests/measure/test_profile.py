"""Shares of a profile: of synthetic events with known sums, and of a model with one dominant part."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from amos_fairseq.measure import step_profile as profile
from amos_fairseq.measure.configuration import BenchSettings, build_task, set_up
from amos_fairseq.measure.fairseq_step import FairseqStep, make_synthetic_text
from amos_fairseq.modules.encoder import TransformerEncoder


def event(name: str, own: float, start: float, parent: Any = None, sequence_nr: int = -1, on_gpu: float = 0.0) -> Any:
    times = {"self_cpu_time_total": own, "self_device_time_total": on_gpu, "time_range": SimpleNamespace(start=start)}
    place = {"sequence_nr": sequence_nr, "cpu_parent": parent, "device_type": DeviceType.CPU}
    return SimpleNamespace(name=name, **times, **place)


def synthetic_step() -> list[Any]:
    """Output layer around attention, a mask without a node, backward in reverse order, optimizer, and a stray operator."""
    output = event(profile.PREFIX + profile.OUTPUT, 0.0, 0)
    attention = event(profile.PREFIX + profile.ATTENTION, 1.0, 1, output)
    softmax = event("softmax", 4.0, 2, attention, sequence_nr=7, on_gpu=30.0)
    comparison = event("gt", 2.0, 3, attention, sequence_nr=8)  # has the number of the next node
    product = event("mm", 3.0, 4, output, sequence_nr=8, on_gpu=10.0)
    mm_node = event(f"{profile.BACKWARD_NODE}: MmBackward0", 0.0, 5, sequence_nr=8)
    softmax_node = event(f"{profile.BACKWARD_NODE}: SoftmaxBackward0", 0.0, 6, sequence_nr=7)
    grad_mm = event("mm", 5.0, 5.5, mm_node, on_gpu=20.0)
    grad_softmax = event("_softmax_backward_data", 6.0, 6.5, softmax_node, on_gpu=40.0)
    accumulation = event(f"{profile.BACKWARD_NODE}: AccumulateGrad", 1.5, 7, sequence_nr=-1)
    optimizer = event("optimizer", 0.0, 8)
    update = event("_fused_adamw_", 2.5, 9, optimizer)
    backward = [mm_node, grad_mm, softmax_node, grad_softmax, accumulation]
    # The list is not sorted by time.
    return [*backward, product, comparison, softmax, attention, output, update, optimizer]


def test_backward_operators_belong_to_their_forward_part() -> None:
    shares = profile.shares(synthetic_step(), on_gpu=False)
    assert {part: share * 25 for part, share in shares.items() if share} == pytest.approx(
        {profile.ATTENTION: 1 + 4 + 2 + 6, profile.OUTPUT: 3 + 5, profile.OPTIMIZER: 2.5, profile.OTHER: 1.5}
    )
    assert list(shares) == list(profile.PARTS)


def test_time_on_a_gpu_is_that_of_the_kernels() -> None:
    kernel = event("a kernel", 0.0, 2.5, on_gpu=30.0)
    kernel.device_type = DeviceType.CUDA
    shares = profile.shares([*synthetic_step(), kernel], on_gpu=True)
    expected = {profile.ATTENTION: 0.7, profile.OUTPUT: 0.3}
    assert {part: share for part, share in shares.items() if share} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("part", "settings"),
    [
        (profile.FFN, ["model.encoder_ffn_embed_dim=4096"]),
        (profile.OUTPUT, ["model.encoder_layers=1", "model.generator_depths='1'", "task.mask_prob=0.9"]),
    ],
)
def test_part_with_the_most_flops_takes_the_most_time(part: str, settings: list[str]) -> None:
    """Each has more than 90 % of the FLOPs, forward and backward; the rest are small operations."""
    vocabulary = 600 if part == profile.FFN else 20_000
    overrides = ["dataset.batch_size=2", *settings]
    setup = set_up(BenchSettings("amos_tiny", overrides, precision="float32", vocabulary_size=vocabulary))
    task = build_task(setup.cfg.task, setup.vocabulary_size)
    step, batch = FairseqStep(setup, task), make_synthetic_text(task, 2).batches[0]
    step.step(batch)
    shares = profile.shares_of_parts(step, batch, torch.device("cpu"))
    assert sum(shares.values()) == pytest.approx(1)
    assert shares[part] == max(shares[name] for name in profile.PARTS if name != profile.OPTIMIZER)
    assert min(shares[name] for name in (profile.ATTENTION, profile.EMBEDDINGS, profile.LOSS, profile.OPTIMIZER)) > 0


@pytest.mark.parametrize("recomputes", [False, True])
def test_compiled_and_recomputed_layers_mark_every_part(recomputes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every range is closed, also where PyTorch stops a recomputed layer early; compiled code would open none."""
    events: list[tuple[str, str]] = []

    class Range:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            events.append(("open", self.name))

        def __exit__(self, *error: Any) -> None:
            events.append(("close", self.name))

    monkeypatch.setattr(profile, "record_function", Range)
    setup = set_up(BenchSettings("mlm_tiny", ["dataset.batch_size=2"], vocabulary_size=600))
    setup = setup.with_model(activation_checkpointing=recomputes)
    task = build_task(setup.cfg.task, setup.vocabulary_size)
    step, batch = FairseqStep(setup, task), make_synthetic_text(task, 2).batches[0]
    for module in step.module.modules():
        if isinstance(module, TransformerEncoder):
            module.is_compiled = True
    with profile.marked_parts(step), profile.as_written():
        step.step(batch)
    attention, layers = (events.count(("open", profile.PREFIX + part)) for part in (profile.ATTENTION, profile.FFN))
    assert attention == layers == setup.cfg.model.encoder_layers * (1 + recomputes)
    assert events.count(("close", profile.PREFIX + profile.FFN)) == layers
